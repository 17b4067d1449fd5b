"""The docs: the files that they name exist, and the examples of the pages for contributors run."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dualinfer
from dualinfer import errors
from dualinfer.symptoms import SYMPTOMS

from .recipes import RECIPES
from .server_process import server_process

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = ("dualinfer", "tests", "benchmarks", "training", "examples", "docs")
CONTRIBUTING = ROOT / "docs" / "contributing"
# Chains of pages whose examples go on from one another, and the tests of what they add.
EXAMPLES = {
    ("family", "op", "kernel"): "tests/parity tests/test_report.py tests/test_generate.py "
    "tests/test_sharding.py tests/test_decoder.py tests/kernels tests/test_kernel_ops.py "
    "tests/test_kernel_ops_jax.py -k 'pebble or damp or ops_take or spills or implementations'",
    ("scheme", "code", "router"): "tests/test_rows8.py tests/test_int3.py tests/test_schemes.py "
    "tests/kernels/test_rooted.py "
    "-k 'rows8 or int3 or rooted or packed or refused or means_zero or plain_ops'",
    ("cache-kind",): "tests/test_by_token.py tests/parity tests/test_cache_kinds.py "
    "-k 'by_token or smallest_windows or different_kinds'",
}


def files() -> list[str]:
    """The repository's files, by their paths."""
    return [str(p.relative_to(ROOT)) for folder in CODE for p in (ROOT / folder).rglob("*.py")]


def examples(page: Path) -> list[tuple[str, str, str]]:
    """Kind, path and text of each example on a page: `python` is a new file, `diff` a change."""
    return re.findall(r"^```(python|diff)\n# (\S+\.py)\n(.*?)^```$", page.read_text(), re.M | re.S)


def apply(root: Path, kind: str, path: str, text: str) -> None:
    """Write an example into a copy of the repository; what a change replaces stands there once."""
    target = root / path
    if kind == "python":
        assert not target.exists(), f"{path} is no new file"
        target.write_text(text)
        return
    whole = target.read_text()
    for hunk in re.split(r"^@@\n", text, flags=re.M):
        lines = [line or " " for line in hunk.splitlines()]
        old, new = ("".join(f"{x[1:]}\n" for x in lines if x[0] in kept) for kept in (" -", " +"))
        assert whole.count(old) == 1, f"{path} has these lines {whole.count(old)} times:\n{old}"
        whole = whole.replace(old, new)
    target.write_text(whole)


def test_the_tables_of_families_are_those_of_the_registry():
    for path, text in runpy.run_path(str(ROOT / "docs" / "families.py"))["pages"]().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python docs/families.py"


def test_pages_made_of_the_code_are_as_it_says():
    for path, text in runpy.run_path(str(ROOT / "docs" / "site.py"))["pages"]().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python docs/site.py"


def test_each_error_has_a_symptom_and_each_symptom_is_in_the_code():
    known = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    known = {kind for kind in known if issubclass(kind, errors.DualinferError)}
    assert {s.error for s in SYMPTOMS} == known - {errors.DualinferError}
    code = "".join(path.read_text() for path in (ROOT / "dualinfer").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    for symptom in SYMPTOMS:
        parts = [part.strip() for part in symptom.seen.split("...")]
        assert all(part in code for part in parts if part != "tensor_parallel.tp_size="), symptom
    help = errors.LengthError("too long").help
    assert help == f"{errors.SITE}troubleshooting/#lengtherror"
    assert f"site_url: {errors.SITE}\n" in (ROOT / "mkdocs.yml").read_text()


def test_the_release_says_one_version_and_the_workflow_runs_what_ci_does():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {dualinfer.__version__}\n" in citation
    assert f"\n## {dualinfer.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = re.findall(r"name: (\w+), python: \"([\d.]+)\"", workflow)
    script = (ROOT / "tests" / "versions.sh").read_text()
    assert named == re.findall(r"^(\w+) +(3\.\d+)", script, re.M)
    assert "run: bash .ci/run\n" in workflow and "run: make docs\n" in workflow


@pytest.mark.slow
def test_the_site_builds_without_a_dead_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout + done.stderr
    models = (tmp_path / "models" / "index.html").read_text()
    assert models.count("<code>Qwen3MoeForCausalLM</code>") == 1 and 'id="find-model"' in models
    assert "max_new_tokens" in (tmp_path / "api" / "index.html").read_text()


NEEDED = {"Evaluate with lm-eval": "lm_eval"}
# The first below, the second in test_ray_data.py.
ELSEWHERE = {"Stream into a web page", "Ray Data"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the harness's own
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ELSEWHERE])
def test_a_recipe_runs(name, tmp_path, monkeypatch, capfd):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason="Not installed: make test-slow does it.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    ran = 0
    for language, file, code in RECIPES[name]:
        if file:
            Path(file).write_text(code)
        elif language == "python":
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        elif language == "bash":
            code = code.replace("MODEL", str(dualinfer.embedded_model()))
            subprocess.run(["bash", "-ec", code], check=True)
        ran += language in ("python", "bash")
    out = capfd.readouterr().out
    assert ran and out
    if "loss" in out:
        assert float(re.findall(r"loss (\d+\.\d+)", out)[-1]) < 1
    for said, times in SAID.get(name, {}).items():
        assert out.count(said) == times, out


SAID = {  # what a recipe prints, and how often
    "Batch a file": {"3 answers": 1},
    "Train LoRA on JAX, and use it": {
        "Bonjour": 3
    },  # the adapter's, on both backends and in a shell
    "Quantize and publish": {"import os.path": 2},
    "Evaluate with lm-eval": {"1.0\n": 1},
    "Several GPUs": {"import sys\n": 3},  # two processes, and one over two devices
    "A policy of your own": {"*.up (column), *.down (row)": 2, "split over 2 devices": 1},
}


@pytest.mark.slow
def test_the_page_of_the_recipe_shows_the_text(tmp_path):
    """Its script runs in Node, which reads streams as a browser does."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed.")
    (_, _, command), (_, _, page) = RECIPES["Stream into a web page"]
    options = shlex.split(command)[3:]
    with server_process(*options) as server:
        script = re.findall(r"<script.*?>(.*)</script>", page, re.S)[0]
        script = script.replace("http://127.0.0.1:8000", server.url).replace('"MODEL"', '"small"')
        (tmp_path / "page.mjs").write_text(
            "const shown = [''], answer = {get textContent() {return shown.at(-1)}, "
            "set textContent(text) {shown.push(text)}};\n"
            "const document = {getElementById: id => id === 'answer' ? answer : null};\n"
            f"{script}\nconsole.log(JSON.stringify(shown));\n"
        )
        done = subprocess.run(
            [node, tmp_path / "page.mjs"], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    with dualinfer.init_inference(dualinfer.embedded_model(), dtype="float32") as engine:
        assert shown[-1] == engine.generate_text("import os", max_new_tokens=64, do_sample=False)
    assert len(shown) > 4  # as it comes


def test_the_page_of_results_is_made_of_the_files_of_results():
    """Of commits since, which each one changes, the page may tell fewer."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))
    whole = script["PAGE"].read_text("utf-8")
    found = re.sub(r"\| [\d, ]* (\| [\d, ]+ \|)$", r"|  \1", whole, flags=re.M)
    assert found == script["page"](marks=False), "run python benchmarks/results.py"


@pytest.fixture
def example(names, tmp_path):
    """A copy of the package and its tests, with the examples of some pages in it."""
    for folder in ("dualinfer", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pyc*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in names:
        (article,) = CONTRIBUTING.glob(f"adding-a*-{name}.md")
        for example in examples(article):
            apply(tmp_path, *example)
    return tmp_path


def run(folder: Path, command: str) -> None:
    """Run a Python module there; its output is the message of a failure."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        # Of the kernels the example's is compiled alone; of the others this suite says the same.
        env=os.environ | {"PYTHONPATH": str(folder), "ONLY_KERNELS": "damping"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    known = [*files(), *(path for _, path, _ in examples(page))]
    named = re.findall(r"(?<=`)[\w./-]+\.py(?=`)|\b[\w.-]+/[\w./-]+\.py\b", text)
    assert not [n for n in named if not any(f"/{path}".endswith(f"/{n}") for path in known)]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("names", EXAMPLES, ids=lambda names: names[-1])
def test_examples_fit_what_they_change(example):
    run(example, "ruff check --no-cache .")
    run(example, "ruff format --no-cache --check .")


@pytest.mark.slow
@pytest.mark.parametrize("names", EXAMPLES, ids=lambda names: names[-1])
def test_examples_run(names, example):
    run(example, f"pytest -q -x -m 'not slow' {EXAMPLES[names]}")
