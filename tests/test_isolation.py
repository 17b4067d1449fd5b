"""Each backend works where the other is not installed, and importing dualinfer loads neither."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .checkpoints import write_byte_tokenizer, write_llama

FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "triton", "transformers")

# Hides packages from imports, find_spec and importlib.metadata alike, as if never installed.
HIDE = """
import sys

class Hiding:
    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(name, path, target)

    def find_distributions(self, context=None):
        if context is not None and context.name in self.names:
            return iter(())
        return getattr(self.finder, "find_distributions", lambda context: iter(()))(context)

    def invalidate_caches(self):
        getattr(self.finder, "invalidate_caches", lambda: None)()

sys.meta_path[:] = [Hiding(finder, {names!r}) for finder in sys.meta_path]
"""


def run(code: str, *arguments: object, hidden: tuple[str, ...] = ()) -> str:
    """Standard output of `code` in a fresh interpreter in which `hidden` packages do not exist."""
    program = HIDE.replace("{names!r}", repr(set(hidden))) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    return write_llama(folder, write_byte_tokenizer(folder))


GENERATE = """
import sys
import dualinfer

folder, backend, others = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
with dualinfer.init_inference(folder, backend=backend, dtype="fp32") as engine:
    assert engine.report().mode == "fused"
    ids = engine.generate([[5, 6, 7], [8]], max_new_tokens=5, do_sample=False)
    forward = engine([[5, 6, 7]])
    print(ids.tolist(), forward.logits.shape[-1])
loaded = [name for name in others if name in sys.modules]
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def on_jax(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where neither torch nor triton is installed: GENERATE's output, of .bin as well, and a text.

    One process says all of it, since each takes seconds to import what it needs.
    """
    folder = tmp_path_factory.mktemp("bin")
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    torch.save(load_file(checkpoint / "model.safetensors"), folder / "pytorch_model.bin")
    command = """
    from typer.testing import CliRunner
    from dualinfer.cli.main import app

    split = ["serve", sys.argv[1], "--backend", "torch", "--tp", "2"]
    said = CliRunner().invoke(app, split)
    assert "needs torch" in f"{said.stderr}{said.exception}", said
    app(["generate", sys.argv[1], "ab", "--backend", "jax", "--max-new-tokens", "3"])
    """
    again = GENERATE.replace("sys.argv[1]", "sys.argv[4]")
    code = "\nprint('---')\n".join((GENERATE, again, textwrap.dedent(command)))
    hidden = ("torch", "triton")
    return run(code, checkpoint, "jax", "torch", folder, hidden=hidden).split("---\n")


def test_importing_dualinfer_loads_no_framework():
    loaded = run(
        f"""
        import dualinfer, dualinfer.cli.main, dualinfer.cli.parity
        print([name for name in {FRAMEWORKS} if name in sys.modules])
        """
    )
    assert loaded.strip() == "[]"


def test_each_backend_generates_without_the_other_and_both_agree(checkpoint, on_jax):
    on_torch = run(
        GENERATE, checkpoint, "torch", "jax,jaxlib,flax", hidden=("jax", "jaxlib", "flax")
    )
    assert on_jax[0] == on_torch
    assert on_torch.startswith("[[")


def test_each_backend_runs_alone_without_loading_the_other(checkpoint: Path):
    """Nothing is hidden here: what is installed must not be pulled in."""
    run(GENERATE, checkpoint, "torch", "jax,jaxlib,flax")


def test_jax_compiles_tritons_kernels_without_torch(tmp_path: Path):
    """As on a machine that has JAX for GPUs and Triton."""
    pytest.importorskip("triton")
    found = run(
        """
        import os

        os.environ.pop("TRITON_INTERPRET", None)
        os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
        import dualinfer.backends.jax.ops.split
        from dualinfer.kernels.triton.norm import rms_norm
        from dualinfer.kernels.triton.operands import Recording
        from dualinfer.kernels.xla import handler

        made = Recording()
        x, weight = made.operand((3, 64), "bfloat16"), made.operand((64,), "bfloat16")
        rms_norm(x, weight, 1e-5, pdl=True)
        handler.prepare(90)
        print(handler.program(tuple(made.launches), 90) >= 0)
        """,
        tmp_path,
        hidden=("torch",),
    )
    assert found == "True\n"


@pytest.mark.parametrize(
    ("backend", "hidden", "named"),
    [
        ("torch", ("torch",), "torch, which is"),
        ("jax", ("jax", "jaxlib", "flax"), "jax and flax, which are"),
        ("jax", ("flax",), "flax, which is"),
    ],
)
def test_missing_backend_says_what_to_install(checkpoint, backend, hidden, named):
    message = run(
        f"""
        import dualinfer
        try:
            dualinfer.init_inference(sys.argv[1], backend={backend!r})
        except dualinfer.BackendNotAvailableError as error:
            assert isinstance(error, ImportError)
            print(error)
        """,
        checkpoint,
        hidden=hidden,
    )
    assert f"needs {named} not installed" in message
    assert f"`dualinfer[{backend}]`" in message


def test_backend_that_a_finder_refuses_counts_as_missing(checkpoint: Path):
    message = run(
        """
        class Refusing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "flax":
                    raise ModuleNotFoundError(f"no {name} here")

        sys.meta_path.insert(0, Refusing())
        import dualinfer
        try:
            dualinfer.init_inference(sys.argv[1], backend="jax")
        except dualinfer.BackendNotAvailableError as error:
            print(error)
        """,
        checkpoint,
    )
    assert "needs flax" in message


def test_bin_weights_are_read_on_jax_without_torch(on_jax):
    assert on_jax[1] == on_jax[0]


def test_command_line_generates_on_jax_without_torch(on_jax):
    assert on_jax[2].startswith("ab")


def test_demo_without_jax_says_what_to_install():
    error = run(
        """
        import contextlib, io
        from dualinfer.cli.main import app

        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            try:
                app(["demo"])
            except SystemExit as leaving:
                assert leaving.code == 1
        print(stderr.getvalue())
        """,
        hidden=("jax", "flax"),
    )
    assert "`dualinfer[jax]`" in error
    assert "Traceback" not in error


def test_the_command_leaves_torch_to_what_module_mode_runs(checkpoint: Path, tmp_path: Path):
    """Whose family is known, and a field of whose config is not."""
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mystery": 3}))
    available = run(
        """
        from pathlib import Path
        from dualinfer.cli.quick_start import start_sooner

        start_sooner(Path(sys.argv[1]))
        assert "torch" not in sys.modules
        from transformers.utils import is_torch_available
        print(is_torch_available())
        """,
        tmp_path,
    )
    assert available == "True\n"


def test_the_command_imports_no_more_than_it_needs(checkpoint: Path):
    """With everything installed; and a plan needs neither framework."""
    text = run(
        """
        from dualinfer.cli.main import app
        from dualinfer.cli.quick_start import OWN_PROCESS

        def call(*arguments):
            app([*arguments], obj=OWN_PROCESS, standalone_mode=False)

        model = sys.argv[1]
        call("plan", model, "--tp", "2")
        assert not {"torch", "jax"} & set(sys.modules)
        call("generate", model, "ab", "--backend", "jax", "--max-new-tokens", "3")
        assert "torch" not in sys.modules
        call("generate", model, "ab", "--backend", "torch", "--max-new-tokens", "3")
        assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
        import transformers
        assert transformers.AutoTokenizer and transformers.GenerationConfig
        assert not hasattr(transformers, "LlamaConfig")  # no source of a model was read for it
        """,
        checkpoint,
    )
    first, second = text.splitlines()[-2:]
    assert first == second and first.startswith("ab")
