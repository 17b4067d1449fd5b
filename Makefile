# Everything runs in .venv, made when it is missing and refreshed when its inputs change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow test-tpu test-gpu test-multi-gpu test-versions lint format docs package clean

demo: $(INSTALLED)
	$(VENV)/bin/dualinfer demo

# The CPU suite. One thread a worker: two workers share two cores, and the models are tiny. Bytecode
# is written even where the environment says no: the second suite reads the tests that the first
# has compiled, which takes each worker 8 seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -q

test: $(INSTALLED)
	$(PYTEST) -m "not gpu and not multi_gpu and not tpu and not slow" $(ARGS)

# What takes longer than half a minute: fuzzers and the like. Tests of Ray, of lm-eval, of guidellm
# and of the compilers for TPUs and by Mosaic GPU are skipped where these cannot be installed.
test-slow: $(INSTALLED) $(VENV)/.slow $(VENV)/.tpu $(VENV)/.mosaic $(VENV)/.guidellm
	$(PYTEST) -m "slow and not gpu and not multi_gpu" $(ARGS)

# Every family's steps by Pallas' kernels, interpreted, and compiled for TPUs by their own compiler.
# Weights are shared by 8 devices in one case.
test-tpu: $(INSTALLED) $(VENV)/.tpu
	XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0" \
	$(PYTEST) -m tpu $(ARGS) tests/test_tpu.py

# The GPU suites: of one device, and of several of one host. They run in the Python that is active,
# since the user chooses a CUDA build of torch; `make test-gpu GPU_PYTHON=.venv/bin/python` names another.
# Tests that measure the whole card, its memory or its time, run alone, after the others.
GPU_PYTHON ?= python3
GPU_FILES = $(shell grep -rlE 'mark\.gpu\b' tests --include=test_*.py)
MULTI_GPU_FILES = $(shell grep -rlE 'mark\.multi_gpu\b' tests --include=test_*.py)
GPU_PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m pytest -q -p no:benchmark -p tests.gpu_suite
WORKERS ?= 16

test-gpu:
	$(GPU_PYTEST) -n $(WORKERS) --dist loadgroup -m "gpu and not multi_gpu and not alone" $(ARGS) $(GPU_FILES)
	$(GPU_PYTEST) -m "gpu and not multi_gpu and alone" $(ARGS) $(GPU_FILES)

test-multi-gpu:
	$(GPU_PYTEST) -m multi_gpu $(ARGS) $(MULTI_GPU_FILES)

lint: $(INSTALLED)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/pyright

format: $(INSTALLED)
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

$(VENV)/.slow: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[ray,evaluation]' && touch $@ \
		|| echo "Ray and lm-eval were not installed."

# The compiler for TPUs, in a folder of its own: JAX looks for a TPU wherever it finds libtpu.
$(VENV)/.tpu: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--constraint constraints.txt --target $(VENV)/tpu libtpu && touch $@ \
		|| echo "libtpu was not installed."

# JAX's plugin for CUDA, whose compiler of Mosaic GPU needs no GPU; in a folder of its own as well.
# From 0.12 on it compiles without a client of XLA.
$(VENV)/.mosaic: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--constraint constraints.txt --target $(VENV)/mosaic jax-cuda13-pjrt && touch $@ \
		|| echo "JAX's plugin for CUDA was not installed."

# A client that measures servers, in a folder of its own: it wants other versions of what is here.
$(VENV)/.guidellm: tests/guidellm.txt $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/guidellm --requirement tests/guidellm.txt && touch $@ \
		|| echo "guidellm was not installed."

# The site; a dead link or anchor is an error.
docs: $(INSTALLED)
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(VENV)/bin/python -m mkdocs build --quiet

# A small suite in environments of its own, under a folder that is removed: see the script.
test-versions:
	bash tests/versions.sh $(ARGS)

# What would go to PyPI, built by what is installed: no other environment is made.
package: $(VENV)/.release
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation
	$(VENV)/bin/python -m twine check --strict dist/*

$(VENV)/.release: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[release]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing dualinfer and what it needs into $(VENV), which takes one to three minutes."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[torch,jax,dev]'
	touch $@
