"""The ways on that messages name are taken, and work; others stand beside what they are about."""

import ast
import inspect
import re
import typing
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
import typer

import dualinfer
from dualinfer import DualinferError
from dualinfer.cli.main import app
from dualinfer.config import InferenceConfig
from dualinfer.engine.arguments import KNOWN, TRANSCRIBING
from dualinfer.engine.fused import FusedEngine
from dualinfer.engine.likeness import Likeness

from .checkpoints import write_byte_tokenizer, write_llama
from .models import BACKENDS, make_model

IDS = np.arange(3, 12, dtype=np.int64)[None]
UNEVEN = [[3, 4, 5], [6, 7]]
TEMPLATE = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer that has no chat template."""
    path = tmp_path_factory.mktemp("llama")
    return write_llama(path, write_byte_tokenizer(path))


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request, folder):
    with dualinfer.init_inference(folder, backend=request.param, dtype="float32") as made:
        yield made


# What is asked for, what the message says, and the ways that it names, each in the place of it.
OPTIONS = [
    ({"use_triton": True}, "Leave it unset", {}),
    ({"revision": "main"}, "Leave revision out", {}),
    ({"backend": "jax", "triton_autotune": True}, "leave it unset", {"backend": "jax"}),
    ({"quant": {"weight": {"enabled": False}}}, "Set enabled", {"quant": {"enabled": False}}),
    (
        {"quant": {"scheme": "fp8", "activation": {"num_bits": 8}}},
        "Use int8 or int4",
        {"quant": {"scheme": "int8", "activation": {"num_bits": 8}}},
        {"quant": {"scheme": "int4", "activation": {"num_bits": 8}}},
    ),
    (
        {"quant": {"activation": {"num_bits": 4}}},
        "Use 8",
        {"quant": {"activation": {"num_bits": 8}}},
    ),
    (
        {"quant": {"activation": {"q_groups": 2}}},
        "Use 1",
        {"quant": {"activation": {"q_groups": 1}}},
    ),
    (
        {"quant": {"weight": {"q_groups": 7}}},
        "a number that divides 48 and other matrices' rows, or group_size",
        {"quant": {"weight": {"q_groups": 2}}},
        {"quant": {"weight": {"group_size": 32}}},
    ),
    (
        {"quant": {"scheme": "int4", "weight": {"num_bits": 8}}},
        "Give one of them",
        {"quant": {"scheme": "int4"}},
        {"quant": {"weight": {"num_bits": 8}}},
    ),
    (
        {"quant": {"weight": {"q_groups": 2, "group_size": 32}}},
        "Give one of them",
        {"quant": {"weight": {"q_groups": 2}}},
        {"quant": {"weight": {"group_size": 32}}},
    ),
]


@pytest.mark.parametrize(("asked", "said", "ways"), [(a, s, w) for a, s, *w in OPTIONS], ids=str)
def test_options_that_are_refused_name_ways_that_work(asked, said, ways, folder):
    with pytest.raises(DualinferError, match=said):
        dualinfer.init_inference(folder, **{"backend": "torch", "dtype": "float32"} | asked)
    for way in ways:
        given = {"backend": "torch", "dtype": "float32"} | way
        with dualinfer.init_inference(folder, **given) as made:
            assert np.isfinite(np.asarray(made(IDS).logits)).all()


CALLS = [
    (
        lambda e: e(UNEVEN),
        r"generate\(\) and embed",
        lambda e: e.generate(UNEVEN, max_new_tokens=2),
    ),
    (lambda e: e(UNEVEN), r"generate\(\) and embed", lambda e: e.embed(UNEVEN, pooling="mean")),
    (lambda e: e.generate("hi"), "generate_text", lambda e: e.generate_text("hi")),
    (
        lambda e: e.generate_text("hi", max_tokens=2),
        "mean max_new_tokens",
        lambda e: e.generate_text("hi", max_new_tokens=2),
    ),
    (
        lambda e: e.generate_text("hi", stop=["x"]),
        "mean stop_strings",
        lambda e: e.generate_text("hi", stop_strings=["x"], max_new_tokens=2),
    ),
    (
        lambda e: e.generate(IDS, stop_strings=["x"], tokenizer=None),
        "pass tokenizer=",
        lambda e: e.generate(IDS, stop_strings=["x"], tokenizer=e.tokenizer, max_new_tokens=2),
    ),
    (
        lambda e: e.generate(IDS, num_beams=2),
        "Use num_beams=1",
        lambda e: e.generate(IDS, num_beams=1, max_new_tokens=2),
    ),
    (
        lambda e: e.generate(IDS, num_return_sequences=2),
        "Set do_sample=True, or num_return_sequences=1",
        lambda e: e.generate(IDS, num_return_sequences=2, do_sample=True, max_new_tokens=2),
    ),
    (
        lambda e: e.generate(IDS, output_hidden_states=True),
        r"Call engine\(ids, output_hidden_states=True\)",
        lambda e: e(IDS, output_hidden_states=True).hidden_states,
    ),
    (
        lambda e: e.chat(HI),
        r"generate_text\(\) instead.*pass template_options=\{'chat_template'",
        lambda e: e.chat(HI, template_options=TEMPLATE, max_new_tokens=2),
    ),
    (
        lambda e: e.generate_text("x", max_new_tokens=2, streamer=print),
        r"stream_text\(\)",
        lambda e: list(e.stream_text("x", max_new_tokens=2)),
    ),
]


@pytest.mark.parametrize(("call", "said", "way"), CALLS)
def test_calls_that_are_refused_name_ways_that_work(call, said, way, engine):
    with pytest.raises(DualinferError, match=said):
        call(engine)
    assert way(engine) is not None


def test_ways_of_module_mode_work():
    with dualinfer.init_inference(make_model("llama-gqa"), dtype="float32") as made:
        assert made.report().mode == "module"
        given = torch.from_numpy(IDS)
        with pytest.raises(DualinferError, match=r"Use num_beams=1, or engine\.module\.generate"):
            made.generate(given, num_beams=2)
        made.generate(given, num_beams=1, max_new_tokens=2)
        made.module.generate(given, num_beams=2, max_new_tokens=2)


# What a message asks for begins with one of these words.
_ASKS = re.compile(
    r"(?:^|[.:;,] |\bor )(?:Add|Ask|Call|Give|Leave|Make|Name|Pass|Quantize|Run|Set|Start|Take|Use|"
    r"add|ask|call|give|leave|name|pass|run|set|take|use)\b[^.;]*"
)


def _messages():
    """The texts of the package that are no docstrings, with `{}` for what is put into them."""
    for path in sorted(Path(dualinfer.__file__).parent.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        inner = {id(x) for n in nodes if isinstance(n, ast.JoinedStr) for x in ast.walk(n)}
        inner |= {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                yield f"{path.name}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and id(node) not in inner:
                yield f"{path.name}:{node.lineno}", str(node.value)


def _fields_of(model):
    """The names of a config's fields, and of those within."""
    for name, field in model.model_fields.items():
        yield from filter(None, (name, field.alias))
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                yield from _fields_of(kind)


def test_messages_ask_for_arguments_options_and_methods_that_there_are():
    """Each by its name, in whatever message of the package."""
    command, options = typer.main.get_command(app), set()
    levels = [command]
    for level in levels:
        levels += getattr(level, "commands", {}).values()
        options |= {name for param in level.params for name in (*param.opts, *param.secondary_opts)}
    commands = {*command.commands}
    options |= {"--help", "--xla", "--local-dir", "--nproc-per-node"}  # of others, the latter three
    methods = dict(inspect.getmembers(FusedEngine)) | dict(inspect.getmembers(Likeness))
    known = {*_fields_of(InferenceConfig), *KNOWN, *TRANSCRIBING}
    for function in (dualinfer.init_inference, *filter(inspect.isfunction, methods.values())):
        known |= inspect.signature(function).parameters.keys()
    known |= {"output_hidden_states", "checkpoint", "static_argnames"}  # of forward; JAX's own
    asked, wrong = 0, []
    for place, text in _messages():
        found = [(n, options) for n in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?= [A-Z]|\b)", text)]
        found += [(n, commands) for n in re.findall(r"`dualinfer (\w+)", text)]
        for way in _ASKS.findall(text):
            found += [(n, known) for n in re.findall(r"\b([a-z_][a-z_0-9]*)=(?!=)", way)]
            found += [(n, methods) for n in re.findall(r"\bengine\.(\w+)\(", way)]
        asked += len(found)
        wrong += [f"{place}: {name} in {text}" for name, there in found if name not in there]
    assert not wrong and asked > 60
