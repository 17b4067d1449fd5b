"""Keys and values in codes of 8 bits: text and logits, bytes, what serves them, what is refused."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
hf = pytest.importorskip("transformers")

import dualinfer  # noqa: E402
from dualinfer import embedded  # noqa: E402
from dualinfer.bench.counts import Counts  # noqa: E402
from dualinfer.cli.main import app  # noqa: E402
from dualinfer.cli.plan_table import make_plan_table  # noqa: E402
from dualinfer.config import InferenceConfig, make_config  # noqa: E402
from dualinfer.errors import ConfigError, UnsupportedError  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.load_plan import TableSource, make_load_plan  # noqa: E402
from dualinfer.ops import caches  # noqa: E402
from dualinfer.ops.caches import CacheSpec, KeptIn, check_kinds  # noqa: E402

from .cases import make_model  # noqa: E402
from .kernels import oracles  # noqa: E402
from .models import BACKENDS, noted_logits, random_ids, relative_rms, slow_but  # noqa: E402
from .test_cache_kinds import (  # noqa: E402
    GREEDY,
    OPTIONS,
    PROMPTS,
    SHORT,
    add_blocks,
    by_kernels,
    layers_of,
    texts,
    windowed,
)

pytestmark = pytest.mark.usefixtures("greedy")

assert add_blocks and by_kernels and windowed  # fixtures
CODES = ("fp8_e4m3", "int8")
torch_first = pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))


def combined(quick: set[tuple[str, ...]], *axes: tuple[str, ...]) -> list[Any]:
    """All combinations; those that are not `quick` show the same and are slow."""
    return [
        pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow])
        for case in product(*axes)
    ]


def kept(x: torch.Tensor, codes: str) -> torch.Tensor:
    """What the oracle's codes of heads [..., D] mean."""
    return torch.from_numpy(oracles.decode_heads(*oracles.encode_heads(x.numpy(), codes)))


class CodedCache(hf.DynamicCache):
    """HF's cache, where keys and values are what codes mean; the query's own token's, too."""

    def __init__(self, codes: str):
        super().__init__()
        self.codes = codes

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        states = (kept(x, self.codes) for x in (key_states, value_states))
        return super().update(*states, *args, **kwargs)


def logits_of(engine: Any, backend: str, ids: np.ndarray, new: int) -> tuple[np.ndarray, Any]:
    """The greedy text of `ids`, and the logits [B, new, V] that chose it."""
    with noted_logits(backend) as noted:
        text = np.asarray(
            engine.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
        )
    found = [noted[position][: len(ids)] for position in sorted(noted)]
    assert len(found) == new
    return text, np.stack(found, 1)


@pytest.mark.parametrize(
    ("name", "codes", "backend"),
    combined(
        {("llama-mha", "int8", "torch"), ("gemma2", "fp8_e4m3", "jax")},
        *(("llama-mha", "qwen3", "gemma2"), CODES, BACKENDS),
    ),
)
def test_logits_are_those_of_hf_over_the_same_codes(name, codes, backend, hf_model):
    """Of the prompt's last token, and of each one after it, which the cache has."""
    ids, model = random_ids(2, 9, seed=4), hf_model(name)
    how = {"backend": backend, "kv_cache_dtype": codes, **OPTIONS}
    with dualinfer.init_inference(model, **how) as engine:
        text, found = logits_of(engine, backend, ids, 8)
        assert engine.report().cache == f"full in {codes}"
        assert f"(full in {codes})" in str(engine.report())
    with torch.no_grad():
        whole = {"past_key_values": CodedCache(codes), "use_cache": True}
        expected = model(torch.from_numpy(text), **whole).logits[:, 8:-1].numpy()
        plain = model(torch.from_numpy(text)).logits[:, 8:-1].numpy()
    cost = relative_rms(found, plain)
    assert 1e-4 < cost < (1e-1 if codes == "fp8_e4m3" else 2e-2)
    # A value on the border between two codes may become either: one of thousands, in one row, and
    # what it moves is a small part of what all codes cost.
    assert min(relative_rms(x, y) for x, y in zip(found, expected, strict=True)) < 1e-5
    assert relative_rms(found, expected) < max(1e-5, 0.05 * cost)


@pytest.mark.parametrize(
    ("kind", "codes", "backend"),
    [
        own
        for own in combined({("blocks", "int8", "torch")}, ("full", "blocks"), CODES, BACKENDS)
        if own.values not in (("full", "fp8_e4m3", "jax"), ("blocks", "int8", "jax"))
    ],
)
def test_backends_and_kinds_make_the_same_text_where_the_cache_grows(
    drawing, kind, codes, backend, hf_model, add_blocks
):
    def found(backend: str, kind: str) -> list[list[int]]:
        how = {"backend": backend, "kv_cache_dtype": codes, **OPTIONS}
        with dualinfer.init_inference(hf_model("llama-gqa"), **how) as engine:
            text, layers = texts(engine), layers_of(engine)
            assert {(x.kind, x.codes) for x in layers} == {(kind, codes)}
            k, scale = (np.asarray(x) for x in (layers[0].k, layers[0].k_scale))
            assert k.dtype == (np.uint8 if codes == "fp8_e4m3" else np.int8)
            assert scale.shape == k.shape[:-1] and scale.dtype == np.float32
            held, slots = engine.report().cache_bytes, 4
            assert held == engine.runner.cache_bytes_for(slots, layers[0].capacity)
            return text

    expected = found("torch", "full")
    if kind == "blocks":
        add_blocks()
    assert found(backend, kind) == expected


@torch_first
def test_what_the_cache_holds_is_the_references_codes(backend, hf_model):
    """Bit for bit, of the keys and values that the model's dtype has."""
    seen = {}
    for codes in (None, *CODES):
        how = {"backend": backend, "kv_cache_dtype": codes, **OPTIONS}
        with dualinfer.init_inference(hf_model("llama-mqa"), **how) as engine:
            ids = random_ids(2, 9)
            engine.generate(ids, max_new_tokens=1, do_sample=False)
            seen[codes] = [
                None if x is None else np.asarray(x)[:2, :, :9] for x in layers_of(engine)[0]
            ]
    for codes in CODES:
        for i in range(2):
            data, scale = oracles.encode_heads(seen[None][i], codes)
            np.testing.assert_array_equal(seen[codes][i], data)
            np.testing.assert_array_equal(seen[codes][2 + i], scale)


@torch_first
def test_a_row_beside_longer_ones_is_the_row_alone(backend, hf_model):
    how = {"backend": backend, "kv_cache_dtype": "fp8", **OPTIONS}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with dualinfer.init_inference(hf_model("qwen3"), **how) as engine:
        together = np.asarray(engine.generate(PROMPTS, **options))
        for row, prompt in zip(together, PROMPTS, strict=True):
            alone = np.asarray(engine.generate([prompt], **options))[0]
            np.testing.assert_array_equal(row[-8:], alone[-8:])


@pytest.mark.slow
def test_two_devices_give_the_text_of_one(hf_model):
    how = {"backend": "jax", "kv_cache_dtype": "int8", **OPTIONS}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = []
    for size in (1, 2):
        parallel = {"tensor_parallel": {"tp_size": size}}
        with dualinfer.init_inference(hf_model("qwen3"), **how, **parallel) as engine:
            found.append(np.asarray(engine.generate(PROMPTS, **options)))
            scale = layers_of(engine)[0].k_scale
            assert scale.addressable_data(0).shape[1] == scale.shape[1] // size
    np.testing.assert_array_equal(*found)


# By kernels


@pytest.fixture(scope="module")
def expected(windowed) -> dict[str, np.ndarray]:
    """The text of the tiny model with a window for SHORT, by plain ops."""
    found = {}
    for codes in CODES:
        how = {"backend": "torch", "kv_cache_dtype": codes, **OPTIONS}
        with dualinfer.init_inference(windowed[0], **how) as engine:
            found[codes] = np.asarray(engine.generate(SHORT, **GREEDY))
    return found


@pytest.mark.parametrize(
    ("backend", "codes"),
    combined({("torch", "fp8_e4m3"), ("jax", "int8")}, BACKENDS, CODES),
)
def test_kernels_write_and_read_codes(
    backend, codes, windowed, expected, add_blocks, by_kernels, monkeypatch
):
    """In a full cache and in blocks; on torch the longer prompt goes in pieces."""
    by_kernels(backend)
    add_blocks(lambda a: a.window is not None)
    monkeypatch.setattr(caches, "BLOCK", 16)
    how = {"backend": backend, "kv_cache_dtype": codes, **OPTIONS}
    with dualinfer.init_inference(windowed[0], **how) as engine:
        found = np.asarray(engine.generate(SHORT, **GREEDY))
        report = engine.report()
        assert [x.kind for x in layers_of(engine)] == ["blocks", "full"]
    np.testing.assert_array_equal(found, expected[codes])
    assert report.cache == f"blocks in {codes}, full in {codes}"
    assert "split KV" in report.ops["decode_attention"]
    assert "plain" not in report.ops["decode_attention"] + report.ops["rotary"]


@torch_first
def test_codes_that_kernels_do_not_know_are_left_to_plain_ops(
    backend, windowed, expected, by_kernels, monkeypatch
):
    by_kernels(backend)
    served = f"dualinfer.backends.{backend}.ops.kernel_base.served_codes"
    monkeypatch.setattr(served, lambda capability: frozenset({"int8"}))
    for codes in CODES:
        how = {"backend": backend, "kv_cache_dtype": codes, **OPTIONS}
        with dualinfer.init_inference(windowed[0], **how) as engine:
            found = np.asarray(engine.generate(SHORT, **GREEDY))
            ops = engine.report().ops
        np.testing.assert_array_equal(found, expected[codes])
        is_plain = codes == "fp8_e4m3"
        assert ops["decode_attention"].endswith("for a cache of kind full in fp8_e4m3") == is_plain
        assert ("split KV" in ops["decode_attention"]) == (not is_plain)
        assert ops["rotary"].endswith("a cache of kind full in fp8_e4m3 is plain") == is_plain


# What is asked


@pytest.mark.parametrize(
    ("given", "codes"),
    [
        *[(name, "fp8_e4m3") for name in ("fp8", "fp8_e4m3", "FP8_E4M3", "float8_e4m3fn")],
        *[(torch.float8_e4m3fn, "fp8_e4m3"), (torch.int8, "int8"), (np.int8, "int8")],
        *[("int8", "int8"), ("auto", None), (None, None)],
    ],
    ids=str,
)
def test_spellings(given, codes):
    assert make_config({"kv_cache_dtype": given}, {}).kv_cache_dtype == codes


@pytest.mark.parametrize("given", ["int4", "fp8_e5m2", "bfloat16", 8, True], ids=str)
def test_other_dtypes_are_refused(given):
    with pytest.raises(ConfigError, match=r'kv_cache_dtype.*"fp8_e4m3" or "int8"'):
        make_config({"kv_cache_dtype": given}, {})


def test_what_has_no_cache_of_ours_refuses_it(hf_model):
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8': in module mode"):
        dualinfer.init_inference(make_model("llama-mqa"), kv_cache_dtype="int8", backend="torch")
    for backend in BACKENDS:
        how = {"backend": backend, "kv_cache_dtype": "fp8", **OPTIONS}
        with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e4m3': BertModel does not"):
            dualinfer.init_inference(hf_model("bert"), **how)


def test_a_kind_without_scales_refuses_codes():
    spec = CacheSpec("by_token", 1, 4, 4, "int8")
    with pytest.raises(UnsupportedError, match="kind by_token, which has no scales"):
        check_kinds([spec], {"by_token"}, "torch")
    check_kinds([CacheSpec("by_token", 1, 4, 4)], {"by_token"}, "torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_hold_a_bias_are_not_kept_in_floats_of_8_bits(backend):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 99}
    model = hf.DogeForCausalLM(hf.DogeConfig(**sizes, num_attention_heads=2))
    with pytest.raises(UnsupportedError, match=r"bias of its scores.*Use 'int8'"):
        dualinfer.init_inference(model, backend=backend, kv_cache_dtype="fp8", **OPTIONS)


def test_the_plan_and_the_bench_count_codes_and_scales(hf_model):
    config = hf_model("llama-mha").config.to_dict()
    spec, table = describe_model(config, ["LlamaForCausalLM"])
    plan = make_load_plan(table, TableSource(table, "float32", "none"))
    settings = InferenceConfig(kv_cache_dtype="int8")
    found = make_plan_table(table, 2, "float16", 64, settings=settings)
    a = spec.layers[0].attention
    per_token = len(spec.layers) * 2 * a.kv_heads * (a.head_dim + 4)
    assert found.devices[0].cache == per_token / 2
    assert any("full in int8" in note for note in found.notes)
    read = Counts.of(plan, "float16", KeptIn("int8")).kv_bytes("float16", 3, 5, 9)
    assert read == pytest.approx(3 * per_token * np.mean([5 + k for k in range(8)]))


def text_of_a_rank(codes):
    model = make_model("llama-gqa")
    how = {"dtype": "fp32", "replace_with_kernel_inject": True, "kv_cache_dtype": codes}
    with dualinfer.init_inference(model, tensor_parallel={"tp_size": 2}, **how) as engine:
        return np.asarray(engine.generate(random_ids(2, 9), **GREEDY)).tolist()


@pytest.mark.slow
def test_two_ranks_of_torch_give_the_text_of_one(crew):
    how = {"dtype": "fp32", "replace_with_kernel_inject": True, "kv_cache_dtype": "int8"}
    with dualinfer.init_inference(make_model("llama-gqa"), backend="torch", **how) as engine:
        expected = np.asarray(engine.generate(random_ids(2, 9), **GREEDY)).tolist()
    assert crew.run(text_of_a_rank, "int8", world=2) == [expected, expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_on_the_host_go_with_a_cache_in_codes(backend, hf_model):
    how = {"dtype": "fp32", "replace_with_kernel_inject": True, "kv_cache_dtype": "int8"}
    found = []
    for streamed in ({}, {"keep_module_on_host": True, "resident_layers": 1}):
        model = hf_model("llama-gqa")
        with dualinfer.init_inference(model, backend=backend, **how, **streamed) as engine:
            assert engine.report().cache == "full in int8"
            found.append(np.asarray(engine.generate(random_ids(2, 9), **GREEDY)))
    np.testing.assert_array_equal(*found)


def test_the_command_line_asks_for_codes():
    asked = ["--kv-cache-dtype", "fp8"]
    made = [
        CliRunner().invoke(app, ["generate", "import os", "--max-new-tokens", "6", *kind])
        for kind in ([], asked)
    ]
    assert [result.exit_code for result in made] == [0, 0]
    assert made[0].stdout.startswith("import os") and made[1].stdout.startswith("import os")
    shown = CliRunner().invoke(app, ["plan", str(embedded.path()), "--tp", "1", *asked])
    assert "cache: full in fp8_e4m3, with a float32 scale" in " ".join(shown.stdout.split())
    refused = CliRunner().invoke(app, ["generate", "import os", "--kv-cache-dtype", "fp9"])
    said = " ".join(str(refused.exception or "").split()) + refused.output
    assert refused.exit_code and "fp9" in said
