"""Fixtures that several test files share; frameworks are imported only by those that need them."""

import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec

import pytest

if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # `make test`: Triton's kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("JAX_PLATFORMS") == "cpu":  # likewise: devices to share a model
    flags = ["--xla_force_host_platform_device_count=4"]
    # XLA compiles in less than half the time so, which is most of what a tiny model takes.
    flags.append("--xla_backend_optimization_level=0")
    if find_spec("jaxlib") and version("jaxlib") < "0.11":  # an unknown flag ends the process
        flags.append("--xla_cpu_use_fusion_emitters=false")
        flags.append("--xla_cpu_parallel_codegen_split_count=1")  # fewer maps, see `_few_maps`
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
# On a GPU torch, JAX and every worker share the card, of which JAX would take three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
gc.disable()  # until the tests are collected: imports make a million objects and leave no garbage


def pytest_configure(config):
    """XLA executables that one test has compiled serve all others, in every worker."""
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.jax_cache = tempfile.mkdtemp(prefix="dualinfer-jax-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.jax_cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure(config):
    """The cache lives as long as the run."""
    if hasattr(config, "jax_cache"):
        shutil.rmtree(config.jax_cache, ignore_errors=True)


_MAPS = "/proc/self/maps"
_MOST_MAPS = 20_000  # a process that wants more than vm.max_map_count, 65,530, crashes
_ran = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_maps():
    """XLA's code for a CPU takes memory maps, which a process has few of: forget it in time."""
    yield
    if next(_ran) % 16 or "jax" not in sys.modules or not os.path.exists(_MAPS):
        return
    if _count_maps() < _MOST_MAPS:
        return
    import jax

    from dualinfer.backends.jax.executables import Executables

    jax.clear_caches()
    gc.collect()
    if _count_maps() < _MOST_MAPS // 2:
        return
    for held in [x for x in gc.get_objects() if type(x) is Executables]:
        with held._lock:
            held._made.clear()
            held._used.clear()
            held._bytes.clear()
    gc.collect()


def _count_maps():
    with open(_MAPS, "rb") as file:
        return file.read().count(b"\n")


def pytest_collection_finish():
    """What saves time in every test."""
    gc.collect()
    gc.freeze()  # what imports have made, which collections need not look through
    gc.set_threshold(10_000, 10, 10)  # tracing makes objects by the million
    gc.enable()
    atexit.register(gc.unfreeze)  # or what jaxlib holds counts as leaked
    from .interpreter import quicken

    quicken()


@pytest.fixture(scope="session")
def hf_model():
    """A function from a case's name to its tiny HF model, one a process; not to be changed."""
    from .cases import make_model

    made = {}

    def get(name):
        if name not in made:
            made[name] = make_model(name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def engine_of(hf_model):
    """A function from (case, backend) to an engine of its live module, one a process."""
    import dualinfer

    made = {}

    def get(name, backend):
        if (name, backend) not in made:
            made[name, backend] = dualinfer.init_inference(
                hf_model(name), backend=backend, dtype="fp32", replace_with_kernel_inject=True
            )
        return made[name, backend]

    return get


@pytest.fixture
def greedy(request, monkeypatch):
    """Tokens are the best ones: JAX's steps lack what draws, a third of what a tiny one takes.

    Files use it of whose tests few draw, and these use `drawing`; one that does not fails. Its
    engines draw in no later test.
    """
    if find_spec("jax") is None or "drawing" in request.fixturenames:
        return
    import jax.numpy as jnp

    from dualinfer.backends.jax import prompts, runner, sampler, streaming_runner

    mode_of = sampler.mode_of

    def best(needs):
        assert mode_of(needs) == sampler.BEST, "a test that draws uses the fixture `drawing`"
        return sampler.BEST

    for module in (prompts, runner, streaming_runner):
        monkeypatch.setattr(module, "mode_of", best)
    monkeypatch.setattr(sampler, "_changed", lambda logits, *_: jnp.full_like(logits, jnp.nan))


@pytest.fixture
def drawing():
    """A test that draws tokens, in a file that uses `greedy`, uses this."""


@pytest.fixture(scope="session")
def crew():
    """Processes that run a function as the ranks of one job; see `ranks.Crew`."""
    from .ranks import Crew

    crew = Crew()
    yield crew
    crew.close()
