"""The ways on that messages name are taken, and work; others stand beside what they are about."""

import ast
import inspect
import json
import re
import typing
from functools import partial
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pydantic
import pytest
import torch
import transformers as hf
import typer

import dualinfer
from dualinfer import DualinferError
from dualinfer.cli.main import app
from dualinfer.config import InferenceConfig
from dualinfer.engine.arguments import KNOWN, TRANSCRIBING
from dualinfer.engine.fused import FusedEngine
from dualinfer.engine.likeness import Likeness

from .cases import make_model
from .checkpoints import write_byte_tokenizer, write_llama
from .models import BACKENDS

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
    (
        lambda e: e.generate(IDS, guidance_scale=2.0),
        r"A logits_processor of yours can call engine\(\) itself",
        lambda e: e.generate(IDS, max_new_tokens=2, logits_processor=[partial(guided, e)]),
    ),
    (
        lambda e: e(IDS, attention_mask=np.ones((1, 1, 9, 9))),
        r"Pass \(1, 9\), .*; position_ids that start anew separate packed sequences",
        lambda e: e(IDS, attention_mask=np.ones((1, 9)), position_ids=[[*range(4), *range(5)]]),
    ),
    (
        lambda e: e(e.tokenizer("some text")),
        r"Pass it as \*\*inputs",
        lambda e: e(**e.tokenizer("some text", return_tensors="np")),
    ),
]


def guided(engine, ids, scores):
    """Scores that go away from those of a pass over the last token alone."""
    other = np.asarray(engine(np.asarray(ids)[:, -1:]).logits)[:, -1]
    return scores + (scores - (jnp if isinstance(scores, jax.Array) else torch).asarray(other))


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


def test_a_length_beyond_the_models_own_is_asked_for_as_the_message_says(folder):
    said = "fewer new tokens, shorten the prompt, or set a larger max_out_tokens"
    with (
        dualinfer.init_inference(folder, dtype="fp32") as made,
        pytest.raises(DualinferError, match=said),
    ):
        made.generate(IDS, max_new_tokens=121)
    with dualinfer.init_inference(folder, dtype="fp32", max_out_tokens=130) as made:
        assert made.generate(IDS, max_new_tokens=121, eos_token_id=None).shape == (1, 130)


def test_what_fused_mode_sends_to_module_mode_is_served_there():
    model, ids = LIVE["llama"](), torch.from_numpy(IDS)
    model.set_attn_implementation("eager")
    asked = {
        r"module mode of a model with attn_implementation='eager'": {"output_attentions": True},
        "Module mode takes such a mask": {"attention_mask": torch.zeros(1, 1, 9, 9)},
    }
    with dualinfer.init_inference(model, dtype="fp32", **FUSED) as fused:
        for said, given in asked.items():
            with pytest.raises(DualinferError, match=said):
                fused(ids, **given)
        assert fused.embed([IDS[0]], pooling="mean").shape == (1, 32)
    with dualinfer.init_inference(model, dtype="fp32") as made:
        found = [made(ids, **given) for given in asked.values()]
        assert len(found[0].attentions) == 1 and found[1].logits.isfinite().all()
        with pytest.raises(DualinferError, match="one with replace_with_kernel_inject=True"):
            made.embed([IDS[0]], pooling="mean")


SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}
DBRX = {
    **{"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 64},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
    "ffn_config": {
        **{"moe_num_experts": 2, "moe_top_k": 1, "ffn_hidden_size": 16, "hidden_size": 32},
    },
}
XLNET = {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
MIXTRAL = {**SMALL, **{"num_local_experts": 2, "num_key_value_heads": 2}}
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


class Field(typing.NamedTuple):
    """A config that a message is about: the way that it names is `args`, or torch's module mode."""

    model: type
    config: typing.Any
    said: str
    args: dict[str, typing.Any] | None
    written: typing.Mapping[str, typing.Any] = MappingProxyType({})
    call: typing.Callable[[typing.Any], typing.Any] = lambda e: e(IDS).logits


FIELDS = {
    "unread": Field(
        *(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL), r'args=\{"mystery": None\}'),
        *({"mystery": None}, {"mystery": 3}),
    ),
    "windows": Field(
        *(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL), "Remove the field"),
        *({"sliding_window": None}, {"sliding_window": 4}),
    ),
    "padding": Field(
        *(hf.LlamaForSequenceClassification, hf.LlamaConfig(**SMALL), r'args=\{"pad_token_id"'),
        *({"pad_token_id": 1}, {}, lambda e: e(np.concatenate([IDS, IDS])).logits),
    ),
    "routers": Field(
        *(hf.MixtralForCausalLM, hf.MixtralConfig(**MIXTRAL), r'args=\{"output_router_logits"'),
        *({"output_router_logits": False}, {"output_router_logits": True}),
        lambda e: e(IDS, labels=IDS).loss,
    ),
    "turns": Field(hf.DbrxForCausalLM, hf.DbrxConfig(**DBRX), "makers' text", TURNED),
    "language": Field(
        *(hf.XmodForMaskedLM, hf.XmodConfig(**SMALL, languages=["de_DE"])),
        *(r'args=\{"default_language"', {"default_language": "de_DE"}),
    ),
    "quantized": Field(
        *(hf.XLNetLMHeadModel, hf.XLNetConfig(**XLNET), "made from, with backend='torch'", None),
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_are_refused_name_ways_that_work(case, backend, tmp_path):
    field = FIELDS[case]
    model = field.model(field.config).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    plain = path.read_text("utf-8")
    path.write_text(json.dumps(json.loads(plain) | dict(field.written)))

    def run(backend, **given):
        with dualinfer.init_inference(tmp_path, backend=backend, dtype="fp32", **given) as made:
            ask = field.call if made.report().mode == "fused" else lambda e: e(torch.tensor(IDS))[0]
            return made.report().mode, np.asarray(ask(made))

    asked = {"replace_with_kernel_inject": True} if field.args else {}
    with pytest.raises(DualinferError, match=field.said):
        run(backend, **asked)
    if field.args is None:
        path.write_text(plain)
        backend = "torch"
    mode, result = run(backend, **asked, **({"args": field.args} if field.args else {}))
    assert mode == ("fused" if field.args else "module") and np.isfinite(result).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fields_that_are_refused_are_said_to_stand_where_they_do(backend):
    def run(**given):
        with dualinfer.init_inference(model, backend=backend, dtype="fp32", **FUSED, **given):
            pass

    model = LIVE["llama"]()
    model.config.mystery = 3
    where = r"^model\.config has mystery=3.*remove it from model\.config, or pass args=.*None\}"
    with pytest.raises(DualinferError, match=where) as told:
        run()
    assert "config.json" not in str(told.value)
    run(args={"mystery": None})
    del model.config.mystery
    run()
    for name, value in {"num_hidden_layers": 10**5, "hidden_act": "gelu_3"}.items():
        with pytest.raises(DualinferError, match=f"^args has {name}="):
            run(args={name: value})


HOST = {"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}
FUSED = {"replace_with_kernel_inject": True}
LIVE = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=2)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=3)
    ),
    "mamba": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            **{"vocab_size": 64, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 2},
            **{"state_size": 8, "num_hidden_layers": 1, "chunk_size": 8},
        )
    ),
}


def tp(size: int, **more: typing.Any) -> dict[str, typing.Any]:
    """Options of JAX that share a model over so many of the tests' four virtual devices."""
    return {"backend": "jax", "tensor_parallel": {"tp_size": size}, **more}


def over(axis: str, **more: typing.Any) -> dict[str, typing.Any]:
    """As `tp`, over a mesh of two, which is made in the test."""
    return {"backend": "jax", "tensor_parallel": {"mesh": (2,), "axis": axis, **more}}


# Options of live models: what is asked for, what the message says, and the ways that it names.
# Those of torch run in module mode, but where FUSED is among them.
LIVE_OPTIONS = [
    ("llama", {"resident_layers": 1}, "=True and keep_module_on_host=True; or leave", None),
    ("llama", HOST, "Set replace_with_kernel_inject=True; or leave", HOST | FUSED, {}),
    ("llama", HOST, "or leave it unset: with keep_module_on_host", {"keep_module_on_host": True}),
    ("llama", {"kv_cache_dtype": "int8"}, "Set replace_with_k.*or leave it unset", None),
    ("llama", {"quant": {"qkv": {"enabled": False}}}, "Leave it unset, or set replace_with", None),
    ("llama", {"moe": {"drop_tokens": True}}, r"the .* has none\. Leave it unset\.$", {}),
    ("mixtral", {"moe": {"drop_tokens": True}} | FUSED, "drops no token. Leave it unset", FUSED),
    ("llama", {"min_out_tokens": 4}, "Use 1", {"min_out_tokens": 1}),
    ("llama", {"return_tuple": False}, "Leave it unset", {}),
    ("llama", {"use_triton": True}, "needs a CUDA device.*Leave it unset", {}),
    ("llama", {"enable_cuda_graph": True}, "Leave enable_cuda_graph unset", {}),
    ("llama", {"injection_policy": {"x": "y"}} | FUSED, "Leave out one of injection", FUSED),
    ("llama", {"dtype": "int8", "quant": "int4"}, "give quant, and as dtype", {"quant": "int4"}),
    ("llama", {"mp_size": 2, **tp(4)}, "differ; give one of them", tp(4)),
    ("llama", over("y"), "the mesh has the axes 'x'. Name one of them", over("x")),
    ("llama", over("x", tp_size=4), "2 devices along 'x'. Leave tp_size out", over("x")),
    ("llama", {"moe": {"ep_size": 2}, **tp(1)}, "unset, and set tensor_parallel.tp_size=2", tp(2)),
    ("mamba", tp(4), "Use at most 2", tp(2)),
    ("mixtral", tp(1, moe={"ep_size": 4}), "Use at most 3", tp(1, moe={"ep_size": 3})),
    ("mixtral", tp(2, moe={"ep_size": 3}), "to a multiple of 3", tp(3, moe={"ep_size": 3})),
    (
        *("mixtral", tp(1, moe={"moe_experts": [5]}), "Use 3, or leave it unset"),
        *(tp(1, moe={"moe_experts": [3]}), tp(1)),
    ),
    ("mixtral", tp(1, moe={"type": "residual"}), "Use 'standard'", tp(1, moe={"type": "standard"})),
]


@pytest.mark.parametrize(
    ("name", "asked", "said", "ways"), [(n, a, s, w) for n, a, s, *w in LIVE_OPTIONS], ids=str
)
def test_options_of_live_models_that_are_refused_name_ways_that_work(name, asked, said, ways):
    def make(**given):
        shared = given.get("tensor_parallel", {})
        if "mesh" in shared:
            mesh = jax.make_mesh(shared["mesh"], ("x",))
            given = given | {"tensor_parallel": shared | {"mesh": mesh}}
        with dualinfer.init_inference(LIVE[name](), **{"dtype": "fp32"} | given) as made:
            if given.get("backend") != "jax":  # which would compile each
                assert made(torch.from_numpy(IDS))[0].isfinite().all()

    with pytest.raises(DualinferError, match=said):
        make(**asked)
    for way in ways:
        for given in ({}, asked | FUSED) if way is None else (way,):
            make(**given, **({"keep_module_on_host": True} if "and keep_module" in said else {}))


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
        given = inspect.signature(function).parameters
        known |= {name for name, given in given.items() if given.kind != given.VAR_KEYWORD}
    known |= {"output_hidden_states", "checkpoint"}  # of forward
    known |= {"static_argnames", "attn_implementation"}  # JAX's own, and transformers'
    both = {*BACKENDS, "nccl", "gloo"}  # the latter two of torch.distributed
    tuned = {*dir(peft.PeftModel), *dir(peft.LoraModel)}
    texts = list(_messages())
    read = {text for _, text in texts}  # among them the fields of configs that the package reads
    asked, wrong = 0, []
    for place, text in texts:
        found = [(n, options) for n in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?= [A-Z]|\b)", text)]
        found += [(n, commands) for n in re.findall(r"`dualinfer (\w+)", text)]
        found += [(n, both) for n in re.findall(r"\bbackend='(\w+)'", text)]
        found += [(n, {"backend"}) for n in re.findall(r"\b(\w+)='(?:torch|jax)'", text)]
        found += [(n, read) for n in re.findall(r"\bargs=\{\"(\w+)\"", text)]
        found += [(n, tuned) for n in re.findall(r"\bpeft_model\.(\w+)\(", text)]
        for way in _ASKS.findall(text):
            found += [(n, known) for n in re.findall(r"\b([a-z_][a-z_0-9]*)=(?!=)", way)]
            found += [(n, methods) for n in re.findall(r"\bengine\.(\w+)\(", way)]
        asked += len(found)
        wrong += [f"{place}: {name} in {text}" for name, there in found if name not in there]
    assert not wrong and asked > 60
