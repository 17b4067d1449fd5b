"""Steps by Pallas' kernels, compiled for TPUs by their own compiler, which needs no TPU.

No kernel runs on one. `make test-slow` compiles a few; `make test-tpu` every family's, and runs
each interpreted, too.
"""

from typing import Any

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax import ahead  # noqa: E402
from dualinfer.backends.jax.executables import Executables, Job  # noqa: E402
from dualinfer.backends.jax.maths import MATHS  # noqa: E402
from dualinfer.backends.jax.ops.pallas import PallasOps  # noqa: E402
from dualinfer.kernels.pallas import append as appending  # noqa: E402
from dualinfer.kernels.pallas import attention as attending  # noqa: E402
from dualinfer.kernels.pallas import experts as mixing  # noqa: E402
from dualinfer.kernels.pallas import product as products  # noqa: E402
from dualinfer.kernels.pallas import state as states  # noqa: E402
from dualinfer.ops import caches  # noqa: E402
from dualinfer.ops.cache_kinds import kinds_over  # noqa: E402

from .cases import (  # noqa: E402
    encoders,
    make_model,
    mixtures,
    pairs,
    recurrent,
    relatives,
)
from .cases.decoders import GENERATING  # noqa: E402
from .kernels.tpu_compiler import compiled, needs_compiler  # noqa: E402
from .models import random_ids, relative_rms  # noqa: E402
from .test_encoder_decoders import source_of  # noqa: E402

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "head_dim": 128}
WIDE |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 512}
WIDE |= {"max_position_embeddings": 2048}
CACHE = (2, 1, 1024, 128)  # keys of two sequences of 1,000 tokens

CHIPS = ("v5e", "v6e")

pytestmark = needs_compiler


def programs(model: Any, chip: str, monkeypatch: Any, count: int = 1, **options: Any) -> Any:
    """A prompt's and a token's programs of two sequences of 1,000 tokens, by name."""
    options = {"dtype": "bf16", "tensor_parallel": {"tp_size": count}} | options
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_make_ops", lambda *args: PallasOps(args[3]))
        with dualinfer.init_inference(model, backend="jax", **options) as engine:
            jobs = ahead.jobs(engine.runner, ahead.Wanted((2,), (1000,), 4), 4)
            keys: list[Any] = [job.key for job in jobs]
            return {k[0]: compiled(job, chip, count) for k, job in zip(keys, jobs, strict=True)}


@pytest.mark.parametrize(
    ("chip", "how"),
    [
        pytest.param("v5e", {}, marks=pytest.mark.slow),
        pytest.param("v5p", {"dtype": "fp32"}, marks=pytest.mark.tpu),
        pytest.param("v6e", {"quant": "int4", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("v5e", {"quant": "int8"}, marks=pytest.mark.tpu),
    ],
    ids=str,
)
def test_steps_compile(chip, how, monkeypatch):
    """And copy neither a cache nor a weight: results take the memory of the caches."""
    made = programs(make_model("llama-gqa", **WIDE), chip, monkeypatch, **how)
    own = set() if "quant" in how else {"append"}
    assert made["decode"].kernels >= {"product", "attention", "thresholds", *own}
    assert made["prefill"].kernels >= {"product", "attention"}
    for program in made.values():
        assert program.aliased >= 2 * np.prod(CACHE)  # keys and values
    assert not {shape for shape in made["decode"].copied if np.prod(shape) >= np.prod(CACHE)}


@pytest.mark.parametrize(
    ("name", "kind", "how"),
    [
        pytest.param("llama-gqa", "full", {}, marks=pytest.mark.tpu),
        pytest.param("llama-gqa", "full", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama-gqa", "blocks", {}, marks=pytest.mark.slow),
        pytest.param("llama-gqa", "blocks", {"kv_cache_dtype": "fp8"}, marks=pytest.mark.tpu),
        pytest.param("deepseek_v3", "latent", {}, marks=pytest.mark.tpu),
        pytest.param("deepseek_v3", "latent_blocks", {}, marks=pytest.mark.tpu),
    ],
    ids=str,
)
def test_a_step_copies_no_cache_of_any_kind(name, kind, how, monkeypatch):
    """Of heads of 64, and of latent vectors of 576: a TPU would hold their rows side by side."""
    monkeypatch.setattr(caches, "kind_of", lambda a: kind)
    sizes = WIDE | {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "deepseek_v3":
        sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 1}
        sizes |= {"max_position_embeddings": 2048, "first_k_dense_replace": 1}
    made = programs(make_model(name, **sizes), "v5e", monkeypatch)["decode"]
    assert not [shape for shape in made.copied if np.prod(shape) >= np.prod(CACHE)]
    assert made.aliased >= 2 * np.prod(CACHE)


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "chip"),
    [
        pytest.param("blocks", "uint8", 8, "v5e", marks=pytest.mark.slow),
        *(
            pytest.param(*own, marks=pytest.mark.tpu)
            for own in (
                ("full", "bfloat16", 8, "v5e"),
                ("full", "int8", 64, "v5p"),
                ("blocks", "float32", 2, "v6e"),
                ("blocks", "int8", 1, "v6e"),
                ("latent_blocks", "bfloat16", 1, "v5p"),
            )
        ),
    ],
)
def test_tokens_go_into_caches_of_real_sizes_in_place(kind, dtype, heads, chip):
    """64 slots of 1,024: of two rows of 64 tokens, and of a token a slot; nor is one in VMEM.

    Of blocks, whose scales fill no lanes, these are turned, a thirtieth of the whole.
    """
    slots, tokens, dim, size = 64, 1024, 128, 64
    of: Any = jax.ShapeDtypeStruct
    lead = (slots * tokens // size, heads, size) if "blocks" in kind else (slots, heads, tokens)
    table = [of((slots, tokens // size), "int32")] if "blocks" in kind else []
    scales = [of(lead, "float32")] * 2 if dtype in ("int8", "uint8") else []
    pools = [of((*lead, dim), dtype)] * 2
    if kind.startswith("latent"):
        pools, dim = [of((lead[0], size, 640), dtype)], 576
    cache = kinds_over(MATHS)[kind](*pools, *table, *scales)
    where, new = of((2,), "int32"), of((2, 64, heads, dim), "bfloat16")
    token, ops = of((slots, heads, dim), "bfloat16"), PallasOps()
    if kind.startswith("latent"):
        token = of((slots, dim), "bfloat16")
    for job, kernel in (
        (Job("rows", ops._extend, (cache, *(where,) * 3, new, new), (0,)), "put_rows"),
        (Job("token", ops._append, (cache, token, token, of((slots,), "int32")), (0,)), "put"),
    ):
        made = compiled(job, chip)
        assert made.kernels == {kernel}
        assert not {x for x in made.copied if np.prod(x) >= np.prod(pools[0].shape)}
        assert made.aliased >= sum(np.prod(x.shape) * x.dtype.itemsize for x in pools)
        assert made.moved < made.aliased and made.held < made.aliased / 4


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(8, marks=[pytest.mark.tpu]),
    ],
)
def test_a_mesh_compiles(count, monkeypatch):
    """Weights of several chips by the plan that any devices have, two sums a layer."""
    if jax.device_count() < count:
        pytest.skip(f"{count} devices, of which conftest.py asks XLA for 4; see XLA_FLAGS")
    model = make_model("llama-gqa", **WIDE | {"num_attention_heads": 8, "num_key_value_heads": 4})
    for program in programs(model, "v6e", monkeypatch, count=count).values():
        assert {"product", "attention"} <= program.kernels and "all-reduce" in program.collectives


@pytest.mark.parametrize(
    ("kind", "columns", "rows"),
    [
        pytest.param("int4", 64, 16, marks=pytest.mark.slow),
        pytest.param("uint4", 128, 256, marks=pytest.mark.tpu),
        pytest.param("fp4_e2m1", 32, 16, marks=pytest.mark.tpu),
        pytest.param("fp8_e4m3", 0, 256, marks=pytest.mark.tpu),
    ],
)
def test_products_with_codes_have_room_for_their_values(kind, columns, rows):
    """Gate and up of an 8B model, of whose blocks a program makes megabytes of float32."""
    width, out = 4096, 28672

    def run(x: Any, data: Any, scale: Any) -> Any:
        codes = products.Codes(data, scale, None, None, kind, columns, width)
        assert products.serves(rows, codes, True, 2)
        how: Any = {"activation": jax.nn.silu, "gated": True, "interpret": False}
        return products.product(x, codes, dtype=x.dtype, **how)

    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    data = jax.ShapeDtypeStruct(
        (out, width // (2 if kind in products.PACKED_KINDS else 1)), "uint8"
    )
    scale = jax.ShapeDtypeStruct((out, width // columns if columns else 1), "bfloat16")
    assert compiled(Job("product", run, (x, data, scale)), "v5p").kernels == {"product"}


EXPERTS = {
    # experts, width, features, of codes, the columns and the rows of a scale, dtype of scales
    "DeepSeek-V3, fp8": (256, 7168, 2048, "fp8_e4m3", 128, 128, "float32"),
    "DeepSeek-V3, nvfp4": (64, 7168, 2048, "fp4_e2m1", 16, 1, "float32"),
    "Mixtral, int4": (8, 4096, 14336, "int4", 64, 1, "bfloat16"),
    "Mixtral, nf4": (8, 4096, 14336, "table", 64, 1, "float32"),
    "Qwen3 30B, int8": (128, 2048, 768, "int8", 0, 1, "float32"),
}


@pytest.mark.parametrize(
    ("name", "tokens", "chip"),
    [
        pytest.param("Qwen3 30B, int8", 4, "v5e", marks=pytest.mark.slow),
        *(
            pytest.param(name, tokens, chip, marks=pytest.mark.tpu)
            for chip, tokens in (("v5e", 1024), ("v6e", 4))
            for name in EXPERTS
        ),
    ],
)
def test_experts_in_codes_of_real_sizes_compile(name, tokens, chip):
    """No matrix of theirs is in memory as values; scales are turned at most."""
    total, width, features, kind, columns, shared, dtype = EXPERTS[name]
    packed, table = kind in products.PACKED_KINDS, (0.0, *range(15)) if kind == "table" else ()

    def codes(data: Any, scale: Any, width: int) -> products.Codes:
        raised = 8 if kind == "int4" else 0
        rest = None, None, kind, columns, width, raised, table, shared
        return products.Codes(data, scale, *rest)

    def run(x: Any, up: Any, of_up: Any, down: Any, of_down: Any, chosen: Any) -> Any:
        both = codes(up, of_up, width), codes(down, of_down, features)
        assert all(mixing.serves_codes(own, 2) for own in both)
        how: Any = {"hidden": lambda h: jax.nn.silu(h[:, :features]) * h[:, features:]}
        return mixing.in_codes(x, *both, chosen, **how, interpret=False)

    def of(*shape: int, dtype: str = "uint8") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    args = [of(tokens, width, dtype="bfloat16")]
    for rows, inner in ((2 * features, width), (width, features)):
        stored = "int8" if kind == "int8" else "uint8"
        args.append(of(total, rows, inner // (2 if packed else 1), dtype=stored))
        args.append(of(total, rows // shared, inner // columns if columns else 1, dtype=dtype))
    args.append(of(tokens, 8 if total > 8 else 2, dtype="int32"))
    program = compiled(Job("experts", run, tuple(args)), chip)
    assert program.kernels == {"experts"}
    pairs = np.prod(args[-1].shape) + 128 * total if tokens > 4 else 16 * tokens * 8
    scales = 4 * sum(np.prod(x.shape) for x in args[2:5:2])
    assert program.held < pairs * (4 * features + 6 * width) * 2 + scales


@pytest.mark.slow
def test_scales_and_zeros_of_float16_compile():
    """Whose loads no chip has: in a product and in experts of codes."""

    def run(x: Any, data: Any, scale: Any, zero: Any) -> Any:
        codes = products.Codes(data, scale, zero, None, "uint4", 32, 256)
        if data.ndim == 2:
            return products.product(x, codes, dtype=x.dtype, interpret=False)
        chosen, same = jax.numpy.zeros((2, 2), "int32"), {"hidden": lambda h: h}
        return mixing.in_codes(x, codes, codes, chosen, **same, interpret=False)

    x = jax.ShapeDtypeStruct((2, 256), "bfloat16")
    for lead, kernel in (((), "product"), ((4,), "experts")):
        data = jax.ShapeDtypeStruct((*lead, 256, 128), "uint8")
        beside = jax.ShapeDtypeStruct((*lead, 256, 8), "float16")
        assert compiled(Job("run", run, (x, data, beside, beside)), "v5e").kernels == {kernel}


@pytest.mark.tpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1024), (8, 1)], ids=["prompt", "tokens"])
def test_scores_with_numbers_of_distances_compile(rows, tokens, chip):
    """Heads of T5 11B, each row with numbers of its own, as DeBERTa's are."""
    heads, dim, keys = 128, 128, 1024

    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        starts = jax.numpy.full(rows, keys - tokens, "int32")
        seen = attending.Seen(starts, starts + tokens, tokens == 1)
        scores = attending.Scores(1.0, bias=bias)
        return attending.attend(q, k, v, seen, scores, interpret=False)

    held = jax.ShapeDtypeStruct((rows, heads, keys, dim), "bfloat16")
    q = jax.ShapeDtypeStruct((rows, tokens, heads, dim), "bfloat16")
    bias = jax.ShapeDtypeStruct((rows, heads, tokens, keys), "float32")
    made = compiled(Job("attention", run, (q, held, held, bias)), chip)
    assert made.kernels == {"attention"}
    assert not {shape for shape in made.copied if np.prod(shape) >= np.prod(bias.shape)}


@pytest.mark.slow
def test_numbers_of_distances_of_long_prompts_lie_in_few_blocks():
    """T5 XXL's heads and 8,192 tokens: those of each pair of tokens would take 17 GB."""
    heads, dim, tokens = 64, 64, 8192

    def run(q: Any, k: Any, v: Any, table: Any) -> Any:
        seen = attending.Seen(jax.numpy.zeros(1, "int32"), jax.numpy.full(1, tokens), False)
        assert attending.by_distance(tokens, heads, table, k, q.dtype)
        scores = attending.Scores(1.0, table=table)
        return attending.attend(q, k, v, seen, scores, interpret=False)

    held = jax.ShapeDtypeStruct((1, heads, tokens, dim), "bfloat16")
    q = jax.ShapeDtypeStruct((1, tokens, heads, dim), "bfloat16")
    table = jax.ShapeDtypeStruct((heads, 2 * 128 + 1), "float32")
    made = compiled(Job("attention", run, (q, held, held, table)), "v5e")
    assert made.kernels == {"attention"} and made.held < 2**30


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("shape", "blocks", "tokens"),
    [((65, 64), 8, 1), ((65, 64), 8, 16), ((8, 1088), 0, 1)],
    ids=["blocks, tokens", "blocks, pieces", "slots, tokens"],
)
def test_numbers_of_distances_compile_for_keys_that_fill_no_lanes(shape, blocks, tokens):
    """Blocks of 64 keys, and slots of 1,088 of which 512 are read."""
    rows, heads, dim, reach = 8, 8, 128, 512

    def run(q: Any, k: Any, v: Any, bias: Any, table: Any) -> Any:
        starts = jax.numpy.full(rows, reach - tokens, "int32")
        seen = attending.Seen(starts, starts + tokens, True)
        how: Any = {"table": table if blocks else None, "reach": reach, "interpret": False}
        return attending.attend(q, k, v, seen, attending.Scores(1.0, bias=bias), **how)

    count, size = shape
    held = jax.ShapeDtypeStruct((count, heads, size, dim), "bfloat16")
    q = jax.ShapeDtypeStruct((rows, tokens, heads, dim), "bfloat16")
    bias = jax.ShapeDtypeStruct((rows, heads, tokens, reach), "float32")
    table = jax.ShapeDtypeStruct((rows, blocks), "int32")
    job = Job("attention", run, (q, held, held, bias, table))
    assert compiled(job, "v5e").kernels == {"attention"}


@pytest.mark.parametrize(
    ("dtype", "normed", "chip"),
    [
        pytest.param("bfloat16", True, "v5e", marks=pytest.mark.slow),
        pytest.param("int8", False, "v6e", marks=pytest.mark.tpu),
    ],
)
def test_queries_of_a_panel_are_read_as_a_product_gave_them(dtype, normed, chip):
    """32 rows of 64 tokens of an 8B model: neither they nor what heads give are copied."""
    rows, tokens, heads, kv_heads, dim, blocks = 32, 64, 32, 8, 128, 16
    of: Any = jax.ShapeDtypeStruct

    def run(qkv: Any, k: Any, v: Any, scale: Any, table: Any, cos: Any, sin: Any, w: Any) -> Any:
        starts = jax.numpy.full(rows, 64, "int32")
        seen = attending.Seen(starts, starts + tokens, True)
        turn = appending.Turn(cos, sin, appending.pairs(dim, dim, False))
        norm = appending.HeadNorm(lambda x, w: x * w, [w], []) if normed else None
        assert attending.takes_packed(tokens, heads, k, v, qkv.dtype)
        how: dict[str, Any] = {"packed": attending.Packed(heads, turn, norm), "table": table}
        how["scales"] = (scale, scale) if dtype == "int8" else None
        y = attending.attend(qkv, k, v, seen, attending.Scores(1.0), **how, interpret=False)
        return y.reshape(rows, tokens, -1)

    pool, turning = of((1024, kv_heads, 64, dim), dtype), of((rows, tokens, dim), "float32")
    args = (
        of((rows, tokens, (heads + 2 * kv_heads) * dim), "bfloat16"),
        *(pool, pool, of(pool.shape[:3], "float32"), of((rows, blocks), "int32")),
        *(turning, turning, of((dim,), "bfloat16")),
    )
    made = compiled(Job("attention", run, args), chip)
    assert made.kernels == {"attention"}
    assert not {shape for shape in made.copied if np.prod(shape) >= rows * tokens * heads * dim}
    assert made.held < 2 * rows * tokens * heads * dim


LATENTS = {
    # heads, elements of a latent vector, turning, of a head's own keys and of its values
    "DeepSeek-V3": (128, 512, 64, 128, 128),
    "LongCat-Flash": (64, 512, 64, 128, 128),
    "MiniCPM3": (40, 256, 32, 64, 64),
}


@pytest.mark.parametrize(
    ("name", "tokens", "size", "chip"),
    [
        pytest.param(name, tokens, size, chip, marks=marked)
        for name, tokens, size, chip, marked in [
            ("DeepSeek-V3", 512, 64, "v5e", pytest.mark.slow),
            *(("DeepSeek-V3", n, 0, chip, pytest.mark.tpu) for n in (4, 2048) for chip in CHIPS),
            ("DeepSeek-V3", 2048, 256, "v6e", pytest.mark.tpu),
            ("LongCat-Flash", 16, 64, "v6e", pytest.mark.tpu),
            ("MiniCPM3", 512, 0, "v5e", pytest.mark.tpu),
            ("MiniCPM3", 16, 64, "v6e", pytest.mark.tpu),
        ]
    ],
)
def test_pieces_of_latent_attention_of_real_sizes_compile(name, tokens, size, chip):
    """Of sequences of 32,768 tokens: no key or value of a head is in memory, nor a second cache."""
    (heads, rank, turning, own, width), rows, total = LATENTS[name], 4, 32768

    def run(q: Any, shared: Any, table: Any, keys: Any, values: Any) -> Any:
        starts = jax.numpy.full(rows, total - tokens, "int32")
        seen = attending.Seen(starts, starts + tokens, True)
        how: dict[str, Any] = {"table": table if size else None, "interpret": False}
        how |= {"made": attending.Made(keys, values)} if made else {"values": rank}
        return attending.attend(q, shared, None, seen, attending.Scores(1.0), **how)

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    made = attending.makes_heads(tokens, own + turning, width, rank, turning)
    assert made == (tokens > 16)
    lead = (rows * total // size, 1, size) if size else (rows, 1, total)
    table = jax.ShapeDtypeStruct((rows, total // size if size else 0), "int32")
    q = floats(rows, tokens, heads, (own if made else rank) + turning)
    held = floats(
        *lead, PallasOps().lies(caches.CacheSpec("latent", 1, rank + turning, rank)).key_dim
    )
    args = q, held, table, *(floats(heads, n, rank) for n in (own, width))
    program = compiled(Job("attention", run, args), chip)
    assert program.kernels == {"attention"} and program.held <= 10 * np.prod(q.shape)


STATES = {
    # sequences, groups, heads of each, elements of keys and values; the delta rule; by channel
    "Mamba-2 2.7B": (32, 1, 80, 128, 64, False, False),
    "Nemotron-H 8B": (4, 8, 16, 128, 64, False, False),
    "Falcon-H1 34B": (8, 2, 16, 256, 128, False, False),
    "Qwen3.5": (32, 16, 2, 128, 128, True, False),
    "Kimi Linear": (4, 32, 1, 128, 128, True, True),
    "MiniMax": (8, 64, 1, 128, 128, False, False),
}


@pytest.mark.tpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STATES)
def test_states_of_real_sizes_are_moved_in_place(name, chip):
    count, groups, each, size, width, delta, by_channel = STATES[name]

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "float32")

    def run(*args: Any) -> Any:
        # As a step has it: a program of this call's results and nothing else is refused.
        y, held = states.take_in(*args, interpret=False)
        return held, y

    shape = (size, width) if delta else (width, size)
    held = floats(count + 3, groups * each, *shape)
    assert states.serves(held)
    args = (
        *(floats(count, groups, size), floats(count, groups, size)),
        *(floats(count, groups, each, width), floats(count, groups, each) if delta else None),
        floats(count, groups, each, size if by_channel else 1),
        *(held, jax.ShapeDtypeStruct((count,), "bool")),
    )
    made = compiled(Job("state", run, args, (5,)), chip)
    assert made.kernels == {"state"} and held.shape not in made.copied
    assert made.aliased >= 4 * np.prod(held.shape)


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_5"])
def test_a_step_copies_no_state(name, monkeypatch):
    """Of heads of a model's size, in layers of a small one; XLA itself moves Mamba-1's."""
    sizes: dict[str, Any] = {"state_size": 128, "head_dim": 64, "num_heads": 16, "hidden_size": 512}
    sizes["num_hidden_layers"] = 1
    if name == "qwen3_5":
        sizes = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
        sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "hidden_size": 256}
    if name == "mamba":
        sizes = {"num_hidden_layers": 1, "state_size": 16, "hidden_size": 512}
    made = programs(make_model(name, **sizes), "v6e", monkeypatch)["decode"]
    assert ("state" in made.kernels) is (name != "mamba")
    states = (64, 128), (128, 128), (1024, 16)
    assert not {shape for shape in made.copied if shape[-2:] in states}


# Every family


FAMILIES = [
    *GENERATING,
    *(name for table in (relatives, mixtures, recurrent) for name in table.CASES),
    *(name for name in pairs.CASES if not name.endswith("-base")),
    *encoders.BASES,
]


@pytest.mark.tpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_interpreted_and_compiles(name, monkeypatch):
    model, jobs, made_ops = make_model(name), [], []
    lower, given = Executables.lower, {"input_ids": random_ids(2, 7, vocab=40) + 5}
    if name in pairs.CASES:
        given = {key: np.asarray(x) for key, x in source_of(name).items()}

    def kept(self: Any, job: Job) -> Any:
        jobs.append(job)
        return lower(self, job)

    def make_ops(*args: Any) -> PallasOps:
        made_ops.append(PallasOps(args[3], interpret=True))
        return made_ops[-1]

    def answers(by_kernels: bool) -> list[Any]:
        how = {"dtype": "fp32", "replace_with_kernel_inject": True}
        with monkeypatch.context() as patch:
            if by_kernels:
                patch.setattr(backend, "_make_ops", make_ops)
                patch.setattr(Executables, "lower", kept)
            with dualinfer.init_inference(model, backend="jax", **how) as engine:
                if name in encoders.BASES:
                    return [np.asarray(x) for x in engine(**given).values()]
                new = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
                made: Any = engine.generate(**given, output_logits=True, **new)
                return [made.sequences, *made.logits]

    expected, found = answers(False), answers(True)
    for own, other in zip(found, expected, strict=True):
        own, other = np.asarray(own), np.asarray(other)
        if own.dtype.kind == "i":
            np.testing.assert_array_equal(own, other)
        else:
            # Two keys of Doge's have biases e^(f b) of 344: where b is rounded otherwise, once, the
            # scores move by 3e-4. HF's own float32 is 3e-5 from its float64.
            assert relative_rms(own, other) < (1e-4 if name == "doge" else 1e-5)
    assert jobs
    for ops in made_ops:
        ops.interpret = False
    jax.clear_caches()  # or what was traced to be interpreted would be compiled
    kernels: set[str] = set()
    for job in jobs:
        kernels |= compiled(job, "v5e").kernels
    assert kernels
