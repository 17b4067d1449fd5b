"""What examples/ and the pages show runs as written, on the CPU, with the embedded model."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs an example and returns its lines."""

    def run(name, *arguments, typed=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_a_pipeline_gives_the_same_text(run):
    assert run("pipeline.py")[-1] == "The same text as before."


def test_a_script_for_deepspeed_moves(run):
    lines = run("from_deepspeed.py")
    assert lines[:2] == ["import os", "import sys"] and "fused mode, torch" in lines[-1]


def test_a_chat_answers_each_line(run):
    one = run("chat.py", typed="Hello\n")
    both = run("chat.py", typed="Hello\nAnd then?\n")
    assert one and both[: len(one)] == one and len(both) > len(one)


def test_a_mesh_gives_the_scores_of_one_device(run):
    import jax
    import jax.numpy as jnp

    import dualinfer

    rows = jnp.arange(2, 66).reshape(4, 16)
    folder = dualinfer.embedded_model()
    with dualinfer.init_inference(folder, backend="jax", dtype="float32") as engine:
        scores = jax.nn.log_softmax(engine(rows).logits[:, :-1])
    expected = jnp.take_along_axis(scores, rows[:, 1:, None], axis=-1)[..., 0].mean(-1)
    lines = run("mesh.py")
    found = [float(x) for x in re.findall(r"-\d+\.\d+", lines[0])]
    assert found == pytest.approx(expected.tolist(), abs=1e-3)
    assert "model" in lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_notebook_prints_what_it_stores(name):
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            (stored,) = cell["outputs"]
            assert printed.getvalue() == "".join(stored["text"]), cell["id"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_it_is_called(run, capsys, path):
    for argument, code in (("--help", 0), ("--nonsense", 2)):
        with pytest.raises(SystemExit) as stopped:
            run(path.name, argument)
        out, err = capsys.readouterr()
        assert stopped.value.code == code and f"usage: {path.name}" in out + err


def test_every_example_is_short():
    assert all(len(path.read_text().splitlines()) < 40 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("page", ["README.md", "docs/text.md"])
def test_python_of_the_page_runs(page, capsys):
    """But for the blocks that name a model of the reader's own."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    blocks = [block for block in blocks if "embedded_model()" in block]
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    assert capsys.readouterr().out
