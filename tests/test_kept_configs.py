"""What transformers makes of a config, kept for processes that have not imported it."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualinfer.checkpoint.described import kept_configs
from dualinfer.checkpoint.described.kept_configs import keep
from dualinfer.model.kept_config import KeptConfig, made

from .checkpoints import write_llama

_START = """
import sys
import dualinfer
imported = lambda: [name for name in ("torch", "transformers") if name in sys.modules]
engine = dualinfer.init_inference(sys.argv[1], backend="jax", dtype="fp32")
text = engine.generate([[1, 2, 3]], max_new_tokens=3, do_sample=False)
print(imported(), text, engine.config.hidden_size, type(engine.config).__name__)
print(type(engine.generation_config).__name__, engine.config is engine.config, imported())
print(type(engine([[1, 2, 3]])).__name__)
"""


class _Made:
    hidden = 3

    def __init__(self, fields):
        self.fields = fields

    def to_dict(self):
        return copy.deepcopy(self.fields)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process without transformers, whose cache is empty."""
    monkeypatch.setenv("DUALINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(kept_configs, "_imported", [])
    return tmp_path / "cache" / "configs"


def test_a_second_start_imports_neither_transformers_nor_torch(tmp_path):
    pytest.importorskip("jax")
    folder = write_llama(tmp_path / "llama", 101)
    env = os.environ | {"DUALINFER_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _START, str(folder)]
    first, second = (
        subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    both = "['torch', 'transformers'] "
    assert first.startswith(both) and second.startswith("[] ")
    assert first.removeprefix(both) == second.removeprefix("[] ")


@pytest.mark.parametrize(
    "fields", [{"a": 1, "b": 1.0, "c": True, "names": {0: "x"}}, {"t": (1, [None, "é"])}]
)
def test_fields_come_back_as_they_were(alone, fields):
    first = keep("config", {"a": 1}, lambda: _Made(fields))
    assert isinstance(first, _Made)
    again = keep("config", {"a": 1}, lambda: _Made(fields))
    assert isinstance(again, KeptConfig) and repr(again.to_dict()) == repr(fields)
    assert again.hidden == 3 and made(again) is made(again) and made(first) is first
    again.to_dict().clear()
    assert again.to_dict() == fields
    others = ("generation", {"a": 1}), ("config", {"a": 2}), ("config", {"a": True})
    assert not any(isinstance(keep(*one, lambda: _Made(fields)), KeptConfig) for one in others)


def test_what_literals_do_not_say_is_not_kept(alone):
    for value in (float("inf"), object(), type("Int", (int,), {})(3), "x" * (1 << 20)):
        for _ in range(2):
            assert isinstance(keep("config", {}, lambda v=value: _Made({"a": v})), _Made)


def test_nothing_is_read_or_kept_where_transformers_was_there(alone, monkeypatch):
    keep("config", {}, lambda: _Made({}))
    monkeypatch.setattr(kept_configs, "_imported", [])
    monkeypatch.setitem(sys.modules, "transformers", sys)
    assert isinstance(keep("config", {}, lambda: _Made({})), _Made)
    assert isinstance(keep("other", {}, lambda: _Made({})), _Made)
    assert len([*alone.iterdir()]) == 1


@pytest.mark.parametrize("content", ["", "[1]", "__import__()", "{", "(" * 10_000], ids=range(5))
def test_a_file_that_is_no_dict_is_written_anew(alone, content):
    keep("config", {}, lambda: _Made({"a": 1}))
    (path,) = alone.iterdir()
    path.write_text(content)
    assert isinstance(keep("config", {}, lambda: _Made({"a": 1})), _Made)
    assert isinstance(keep("config", {}, lambda: _Made({"a": 1})), KeptConfig)


def test_what_others_can_write_is_not_read(alone):
    keep("config", {}, lambda: _Made({"a": 1}))
    (path,) = alone.iterdir()
    path.chmod(0o666)
    assert isinstance(keep("config", {}, lambda: _Made({"a": 1})), _Made)


def test_a_failure_is_told_each_time(alone):
    def fail():
        raise ValueError("no config")

    for _ in range(2):
        with pytest.raises(ValueError, match="no config"):
            keep("config", {}, fail)


def test_an_unwritable_cache_is_no_fault(monkeypatch, tmp_path, alone):
    file = tmp_path / "file"
    file.write_text(json.dumps({}))
    monkeypatch.setenv("DUALINFER_CACHE", str(Path(file) / "below"))
    for _ in range(2):
        assert isinstance(keep("config", {}, lambda: _Made({})), _Made)
