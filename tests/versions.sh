#!/usr/bin/env bash
# A small suite with the lowest and highest versions that pyproject.toml promises, each in an
# environment of its own under a folder that is removed: `make test-versions ARGS="low py312"`.
# Needs the Pythons that are named (PATH or pyenv) and pip's index.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
TESTS=(tests/test_config.py tests/test_types.py tests/test_text.py tests/test_jax_users.py)
TESTS+=(tests/test_pipelines.py tests/test_quantize_on_load.py tests/test_deploy.py)
TESTS+=(tests/kernels/test_pallas.py tests/kernels/test_pallas_lowering.py) # names of JAX that move

# The lower bounds of pyproject.toml, as pins.
lowest() {
    "$1" - <<'PYTHON'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(one for x in ("torch", "jax", "serve") for one in extras[x])]
print(*(re.sub(r">=([\d.]+).*", r"==\1", one) for one in wanted))
PYTHON
}

# The promise: name, Python, and what pip is asked for beside the package.
rows() {
    cat <<ROWS
low    3.11 lowest
high   3.11
py312  3.12
py313  3.13
ROWS
}

python_of() {
    for found in "$HOME"/.pyenv/versions/"$1".*/bin/python "$(command -v "python$1")"; do
        "$found" -c "" 2>/dev/null && { echo "$found"; return; }
    done
}

failed=()
while read -r name version wanted; do
    [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
    python=$(python_of "$version")
    if [ -z "$python" ]; then
        echo "== $name: there is no Python $version here"; failed+=("$name"); continue
    fi
    echo "== $name: Python $version ${wanted:-with the newest of all}"
    [ "$wanted" != lowest ] || wanted=$(lowest "$python")
    "$python" -m venv "$FOLDER/$name"
    # The extra test alone: tools of lint and docs may have other bounds.
    # shellcheck disable=SC2086
    "$FOLDER/$name/bin/python" -m pip install --quiet --disable-pip-version-check ".[torch,jax,serve,test]" \
        "pytest>=9,<9.2" pytest-timeout pytest-xdist optax $wanted || { failed+=("$name"); continue; }
    "$FOLDER/$name/bin/python" -m pip list 2>/dev/null | grep -iE "^(torch|jax|flax|transformers|numpy|pydantic|huggingface_hub) "
    # What one library calls out of date in another is no failure.
    PYTHONPATH= CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
        "$FOLDER/$name/bin/python" -m pytest -q -W default::DeprecationWarning \
        -m "not slow and not gpu and not multi_gpu and not tpu" "${TESTS[@]}" || failed+=("$name")
    rm -rf "${FOLDER:?}/$name"
done < <(rows)
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
