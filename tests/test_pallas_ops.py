"""The JAX decoder on Pallas' kernels, interpreted on any device, against the one on plain XLA."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax.device import pallas_obstacle  # noqa: E402
from dualinfer.backends.jax.maths import MATHS  # noqa: E402
from dualinfer.backends.jax.ops.pallas import PallasOps  # noqa: E402
from dualinfer.backends.jax.ops.plain import IMPLEMENTATIONS, PlainOps  # noqa: E402
from dualinfer.errors import ConfigError, UnsupportedError  # noqa: E402
from dualinfer.kernels.pallas import attention as attending  # noqa: E402
from dualinfer.kernels.pallas.launch import VARIABLE  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.weights import Weight  # noqa: E402
from dualinfer.ops import mixtures  # noqa: E402
from dualinfer.ops.cache_kinds import kinds_over  # noqa: E402
from dualinfer.ops.caches import KeptIn, cache_specs, served  # noqa: E402
from dualinfer.ops.contract import NormOf  # noqa: E402
from dualinfer.quantization import Blocks, BlockScheme  # noqa: E402
from dualinfer.quantization.quantize import SCHEMES  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import noted_logits, relative_rms, slow_but  # noqa: E402
from .test_blocks import fill_with_nan  # noqa: E402
from .test_kernel_ops import CASES, ENCODER, MIXTURES, VOCAB, batch, tiny  # noqa: E402

_WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
_WIDE |= {"num_key_value_heads": 2, "num_hidden_layers": 1}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
init_inference: Any = dualinfer.init_inference
OPTIONS: dict[str, Any] = {"backend": "jax", "dtype": "fp32"}
greedy = pytest.mark.usefixtures("greedy")


@pytest.fixture
def engines(monkeypatch):
    """A function from a tiny model, or its name, to engines of it: by kernels, by plain XLA."""
    monkeypatch.setenv(VARIABLE, "1")

    def make(model: Any, **more: Any):
        if isinstance(model, str):
            model = tiny(model, **(CASES | MIXTURES)[model])
        fast, plain = (
            init_inference(model, kernels=kernels, **OPTIONS | more)
            for kernels in ("pallas", "xla")
        )
        assert "Pallas" in fast.report().ops["matmul"]
        assert "Pallas" not in str(plain.report().ops)
        return fast, plain

    return make


# Kernels do of these what they do of other mixtures: a mean of experts is XLA's.
OTHERS = ("afmoe", "cohere2_moe", "phimoe")


@greedy
@pytest.mark.parametrize(
    "name", slow_but(("llama-gqa",), [n for n in CASES | MIXTURES if n not in OTHERS])
)
def test_kernels_give_what_plain_xla_gives(name, engines, monkeypatch):
    """Three prompts of one length, into the cache and on; heads of 12 fill their lanes."""
    monkeypatch.setattr(attending, "LANES", 4)
    fast, plain = engines(name)
    ids = np.random.default_rng(2).integers(3, VOCAB, (3, 13))
    with noted_logits("jax") as logits:
        text = np.asarray(fast.generate(ids, max_new_tokens=3, **GREEDY))
    expected = np.asarray(plain(text).logits)[:, 12:-1]
    np.testing.assert_array_equal(text[:, 13:], expected.argmax(-1))
    found = np.stack([logits[at][:3] for at in range(13, 16)], 1)
    assert relative_rms(found, expected) < 1e-6


def test_the_choice_is_told_and_refused_where_it_cannot_run(monkeypatch):
    """On a CPU Pallas' kernels run where the environment asks for it, and Triton's never."""
    model = make_model("llama-gqa", vocab_size=VOCAB, **CASES["llama-gqa"])
    monkeypatch.delenv(VARIABLE, raising=False)
    read = []
    monkeypatch.setattr(backend, "load_params", lambda *args: read.append(args))
    for kernels, why in (
        ("pallas", f"run on TPUs and on NVIDIA.*{VARIABLE}=1"),
        ("triton", "data-centre GPUs"),
    ):
        with pytest.raises(ConfigError, match=f"kernels='{kernels}'.*{why}.*Leave it unset"):
            init_inference(model, kernels=kernels, **OPTIONS)
    assert not read  # no weight, before that
    monkeypatch.undo()
    assert "Pallas" in pallas_obstacle(jax.devices("cpu")[0])
    monkeypatch.setenv(VARIABLE, "1")
    assert backend.describe_kernels() == "Pallas: interpreted"
    unset = init_inference(model, **OPTIONS)
    assert unset.report().ops["matmul"] == "XLA dot"
    engine: Any = init_inference(model, kernels="pallas", **OPTIONS)
    assert engine.report().ops["attention"].startswith("Pallas")
    assert not any("kernels" in note for note in engine.report().notes)
    with pytest.raises(UnsupportedError, match="Pallas kernels"):
        jax.grad(lambda p: engine.apply(p, np.ones((1, 4), int)).logits.sum())(engine.params)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"backend": "torch", "kernels": "xla"}, "on torch there are Triton's alone"),
        ({"kernels": "pallas", "replace_with_kernel_inject": False}, "says that there are none"),
        ({"kernels": "pallas", "use_triton": True}, "use_triton=True says otherwise"),
        ({"kernels": "triton", "use_triton": False}, "use_triton=False says otherwise"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_fields_that_disagree_are_refused(fields, why):
    model = make_model("llama-gqa", vocab_size=VOCAB, **CASES["llama-gqa"])
    with pytest.raises(ConfigError, match=why):
        init_inference(model, **{"backend": "jax", **fields})


@greedy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama-gqa", {"kv_cache_dtype": "int8"}),
        ("llama-gqa", {"quant": "int4"}),
        ("llama-gqa", {"quant": "int8_w8a8"}),
        ("gpt_oss", {"quant": "mxfp4"}),
        ("gpt_oss", {"quant": "nvfp4"}),
        ("gpt_oss", {"quant": "fp8_w8a8"}),
    ],
    ids=str,
)
def test_codes_give_what_they_give_on_plain_xla(name, how, engines, monkeypatch):
    """Of a hidden size that blocks of scales divide; prompts read codes of keys, as tokens do."""
    attend, read = attending.attend, set()

    def noted(q: Any, k: Any, *rest: Any, **more: Any) -> Any:
        read.add(k.dtype.name)
        return attend(q, k, *rest, **more)

    monkeypatch.setattr(attending, "attend", noted)
    if name in MIXTURES:
        sizes = _WIDE | {"hidden_size": 64, "intermediate_size": 64}
        sizes |= {"layer_types": ["full_attention"]}
        fast, plain = engines(make_model(name, vocab_size=VOCAB, **sizes), **how)
        assert "Pallas" in fast.report().ops["experts"], fast.report().ops
    else:
        fast, plain = engines(make_model(name, vocab_size=VOCAB, **_WIDE), **how)
    ids = np.random.default_rng(2).integers(3, VOCAB, (2, 13))
    texts = [np.asarray(e.generate(ids, max_new_tokens=4, **GREEDY)) for e in (fast, plain)]
    np.testing.assert_array_equal(texts[0], texts[1])
    assert read == {how.get("kv_cache_dtype", "float32")}


@pytest.mark.slow
def test_sampled_text_is_that_of_the_plain_ops(engines):
    fast, plain = engines("gpt2")
    sampling = {"do_sample": True, "seed": 3, "temperature": 1.5, "repetition_penalty": 1.4}
    sampling |= {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "min_new_tokens": 3}
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    texts = [np.asarray(e.generate(prompts, max_new_tokens=7, **sampling)) for e in (fast, plain)]
    np.testing.assert_array_equal(texts[0], texts[1])


@greedy
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_sequences_of_a_pool_go_on_in_rows(name, engines, monkeypatch):
    """Their prompts are read as rows of tokens of slots that others have had."""
    monkeypatch.setattr(attending, "LANES", 4)
    monkeypatch.setattr(PallasOps, "grain", 4)  # or keys would be wider than queries
    fast, plain = engines(name)
    ids = np.random.default_rng(4).integers(3, VOCAB, 70).tolist()
    texts = []
    for engine in (fast, plain):
        engine.reserve(2, 128)
        own = [engine.generate([prompt], max_new_tokens=4, **GREEDY) for prompt in (ids, ids[:67])]
        texts.append([np.asarray(text).tolist() for text in own])
    assert texts[0] == texts[1]


@greedy
@pytest.mark.slow
def test_a_slot_that_another_left_nan_in_changes_no_text(engines, monkeypatch):
    """Read in pieces, with keys behind them, and on from there."""
    monkeypatch.setattr(backend.whole, "most_tokens", lambda *_: 8)
    fast, plain = engines("llama-gqa")
    ids = np.random.default_rng(4).integers(3, VOCAB, (1, 20))
    expected = np.asarray(plain.generate(ids, max_new_tokens=3, **GREEDY))
    fast.reserve(2, 64)
    fill_with_nan(fast.runner)
    found = np.asarray(fast.generate(ids, max_new_tokens=3, **GREEDY))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "deberta-2"])
def test_encoders_hide_padding(name, engines):
    model = make_model(name, vocab_size=VOCAB, **ENCODER)
    fast, plain = engines(model)
    call = batch()
    seen = call["attention_mask"] > 0
    found, wanted = (np.asarray(e(**call)["last_hidden_state"])[seen] for e in (fast, plain))
    assert relative_rms(found, wanted) < 1e-6


def test_experts_are_told_to_be_read_as_they_are():
    """By a kernel where it reads both of a layer's matrices."""

    def weight(scheme: BlockScheme | None) -> Weight:
        data, axes = jnp.zeros((2, 64, 64), "int8"), ("count", "up", "in")
        if scheme is None:
            return Weight(data.astype("float32"), axes)
        beside = {"scale": jnp.ones((2, 64, 1))}
        return Weight(data, axes, scheme, beside, "float32", Blocks(1, 64, 64))

    model = make_model("mixtral", vocab_size=VOCAB, num_hidden_layers=1)
    spec, ops = describe_model(model.config.to_dict())[0], PallasOps()
    coded, rounded = BlockScheme("int8"), SCHEMES["int8_w8a8"]
    for schemes, said in (
        ((coded, coded), "Pallas, rows sorted by expert"),
        ((coded, None), None),
        ((rounded, rounded), "Pallas, rows sorted by expert"),
    ):
        up, down = map(weight, schemes)
        layers = [{"experts.up.weight": up, "experts.down.weight": down}]
        assert ops.reads_codes(up, spec, layers) == said
        assert ("experts" in ops.left_plain(spec, layers)) is (said is None)


def test_what_a_cache_or_a_norm_leaves_to_xla_is_told():
    """Of a token's turn and append, which are one kernel for keys and values of floats alone."""
    ops, fused = PallasOps(), PallasOps.implementations

    def told(name: str, codes: str | None = None, kind: str | None = None) -> Mapping[str, str]:
        spec = describe_model(make_model(name).config.to_dict())[0]
        specs = cache_specs(spec, KeptIn(codes))
        specs = [s if kind is None else replace(s, kind=kind) for s in specs]
        return served(fused, IMPLEMENTATIONS, ops.knows, specs, ops.left_plain(spec, [], specs))

    assert told("llama-gqa")["rotary"] == fused["rotary"]
    for how in (("llama-gqa", "int8"), ("llama-gqa", None, "blocks"), ("youtu",), ("olmo2",)):
        assert told(*how)["rotary"] == told(*how)["qk_norm"] == "XLA", how


def test_a_token_without_a_block_is_written_to_the_one_that_nobody_reads():
    """Of a slot that has given back what lies behind its window, as plain ops write it."""
    k, v = (jnp.zeros((4, 2, 64, 128), jnp.float32) for _ in range(2))
    held: Any = kinds_over(MATHS)["blocks"](k, v, jnp.array([[-1, 1], [2, 3]], jnp.int32))
    new, lengths = jnp.ones((2, 2, 128), jnp.float32), jnp.array([0, 5], jnp.int32)
    both: list[Any] = [PallasOps(interpret=True), PlainOps()]
    found, wanted = (ops._append(held, new, new, lengths)[:2] for ops in both)
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got[3].any() and got[2, :, 5].all() and not got[:2].any()


def test_a_router_in_codes_chooses_what_its_values_would(monkeypatch):
    """By the kernel, of few rows, with its norm."""
    spec = describe_model(make_model("mixtral", num_hidden_layers=1).config.to_dict())[0]
    mixture: Any = spec.layers[0].mlp
    rng, count = np.random.default_rng(1), mixture.count
    data, scale = (
        jnp.asarray(x)
        for x in (rng.integers(-127, 127, (count, 64)).astype(np.int8), rng.random((count, 1)))
    )
    beside = {"scale": scale.astype("float32") / 64}
    weight = Weight(
        data, ("experts", "in"), BlockScheme("int8"), beside, "float32", Blocks(1, 64, 64)
    )
    norm = NormOf(spec.final_norm, jnp.asarray(rng.random(64), "float32"), None)
    x = jnp.asarray(rng.standard_normal((5, 64)), "float32")
    wanted = PlainOps().route(x, weight, mixture.router, norm=norm)
    monkeypatch.setattr(mixtures, "route", None)
    found = PallasOps(interpret=True).route(x, weight, mixture.router, norm=norm)
    np.testing.assert_array_equal(found.experts, wanted.experts)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=2e-6)


@greedy
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "bart", "t5", "lfm2", "falcon_h1"])
def test_other_kinds_of_layers_give_what_plain_xla_gives(name, engines):
    """Latent attention, attention to an encoder, and recurrences with states and without."""
    fast, plain = engines(make_model(name))
    told = fast.report().ops.get("recurrence")
    assert told == {"lfm2": "XLA", "falcon_h1": PallasOps.implementations["recurrence"]}.get(name)
    ids = np.random.default_rng(2).integers(5, 40, (2, 13))
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    texts = [np.asarray(engine.generate(ids, **how)) for engine in (fast, plain)]
    np.testing.assert_array_equal(texts[0], texts[1])


@greedy
@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="two devices, which conftest.py asks XLA for")
@pytest.mark.parametrize(
    ("name", "more"), [("llama-gqa", {}), ("gpt_oss", {"moe": {"ep_size": 2}})], ids=str
)
def test_two_devices_give_what_one_gives(name, more, monkeypatch):
    """Two parts of a layer, or its experts in two parts."""
    monkeypatch.setenv(VARIABLE, "1")
    model = tiny(name, **(CASES | MIXTURES)[name])
    ids, texts = np.random.default_rng(2).integers(3, VOCAB, (2, 13)), []
    for kernels, size in (("pallas", 2), ("xla", 1)):
        how = OPTIONS | {"kernels": kernels, "tensor_parallel": {"tp_size": size}}
        how |= more if size > 1 else {}
        engine = init_inference(model, **how)
        texts.append(np.asarray(engine.generate(ids, max_new_tokens=4, **GREEDY)))
        assert ("sum over devices" in engine.report().ops) == (size == 2)
    np.testing.assert_array_equal(texts[0], texts[1])
