"""The ways on that messages name are taken, and work; others stand beside what they are about."""

import numpy as np
import pytest
import torch

import dualinfer
from dualinfer import DualinferError

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
