"""Pallas' kernels, interpreted on any device, against the meaning of what they compute."""

from typing import Any, cast

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from dualinfer.backends.jax.maths import MATHS  # noqa: E402
from dualinfer.kernels.pallas import activation as activations  # noqa: E402
from dualinfer.kernels.pallas import append as appending  # noqa: E402
from dualinfer.kernels.pallas import attention as attending  # noqa: E402
from dualinfer.kernels.pallas import experts as mixing  # noqa: E402
from dualinfer.kernels.pallas import launch, norm, product, ring, state, thresholds  # noqa: E402
from dualinfer.ops.attention import alibi_bias, relative_bias  # noqa: E402
from dualinfer.ops.exact import MATHS as EXACT  # noqa: E402
from dualinfer.ops.recurrence_kernels import StateStep  # noqa: E402
from dualinfer.ops.recurrences import take_in  # noqa: E402
from dualinfer.quantization import BlockScheme  # noqa: E402

from ..quantized import NF, dequantize, quantize  # noqa: E402
from . import oracles  # noqa: E402
from .cases import DTYPES, GARBAGE, assert_close, normal  # noqa: E402

FLOAT32, BFLOAT16 = DTYPES[:2]
EPS = 1e-5
INTERPRET: dict[str, Any] = {"interpret": True}
attend: Any = attending.attend
both = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)


def rms(x: Any, weight: Any) -> Any:
    """A norm as kernels take it."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def silu(y: Any) -> Any:
    return MATHS.activation(y, "silu")


@both
@pytest.mark.parametrize("after", [False, True], ids=["residual in front", "residual behind"])
def test_norms_take_residuals_in_front_or_behind(dtype, after, monkeypatch):
    """Seven rows in blocks of a tile, the last of which is ragged."""
    monkeypatch.setattr(norm, "_BLOCK", 1)
    x, residual, gain = (
        normal(i, *s, dtype=dtype) for i, s in enumerate([(21, 24), (21, 24), (24,)])
    )
    given = jnp.asarray(x), rms, [jnp.asarray(gain)], jnp.asarray(residual)
    found = np.asarray(norm.norm(*given, after=after, **INTERPRET))
    wide = residual.astype(np.float32)
    if after:
        wanted = wide + oracles.rms_norm(x, gain, EPS)
    else:
        summed = (wide + x.astype(np.float32)).astype(dtype)
        wanted = oracles.rms_norm(summed, gain, EPS)
    assert_close(found, wanted, dtype, length=24, roundings=2)


@both
@pytest.mark.parametrize(
    ("rows", "features", "width", "split"),
    [(1, 33, 24, False), (19, 130, 512, True), (3, 130, 24, False)],
    ids=["a row", "blocks of columns", "blocks of rows"],
)
def test_products_carry_bias_activation_gate_and_residual(
    dtype, rows, features, width, split, monkeypatch
):
    monkeypatch.setattr(product, "_WIDEST", 128)
    if split:
        monkeypatch.setattr(product, "_BLOCK", 2 * 128 * 128 * dtype.itemsize)
    shapes = [(rows, width), (2 * features, width), (2 * features,), (rows, features), (width,)]
    x, weight, bias, residual, gain = (normal(i, *s, dtype=dtype) for i, s in enumerate(shapes))
    blocks = product.blocks_of(features, width, dtype.itemsize, 2)
    assert (blocks.columns < width) is split and (blocks.rows < features) is (features > 128)
    how: dict[str, Any] = {"bias": jnp.asarray(bias), "residual": jnp.asarray(residual)}
    if not split:
        how |= {"norm": rms, "norm_weights": [jnp.asarray(gain)]}
    found = product.product(
        jnp.asarray(x),
        jnp.asarray(weight),
        dtype=dtype,
        activation=silu,
        gated=True,
        **how,
        **INTERPRET,
    )
    rows_of = x if split else oracles.rms_norm(x, gain, EPS).astype(dtype)
    y = rows_of.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)
    gate, up = np.split(y, 2, -1)
    wanted = gate / (1 + np.exp(-gate)) * up + residual.astype(np.float64)
    roundings = 1 if split else 3
    assert_close(np.asarray(found), wanted, dtype, length=width, roundings=roundings)


FORMS = {
    "int8": BlockScheme("int8"),
    "int8 zeros": BlockScheme("uint8", zeros=True),
    "int4": BlockScheme("int4", columns=64, scale_dtype="bfloat16"),
    "int4 rows": BlockScheme("int4", scale_dtype="float16"),
    "int4 zeros": BlockScheme("int4", columns=32, zeros=True),
    "uint4": BlockScheme("uint4", columns=32, scale_dtype="float16", zeros=True),
    "fp8": BlockScheme("fp8_e4m3"),
    "fp8 e5m2": BlockScheme("fp8_e5m2"),
    "fp8 blocks": BlockScheme("fp8_e4m3", 128, 128),
    "fp4": BlockScheme("fp4_e2m1", columns=32),
    "nvfp4": BlockScheme("fp4_e2m1", columns=16, scale_dtype="float8_e4m3fn", outer=True),
    "table": BlockScheme("table", columns=64, table=NF),
}


def coded(scheme: BlockScheme, matrix: np.ndarray) -> tuple[product.Codes, np.ndarray]:
    """A matrix in codes as kernels take it, and what the codes mean."""
    arrays = quantize(scheme, matrix)
    meant = dequantize(scheme, arrays)
    if scheme.outer:
        arrays["scale"] = arrays["scale"].astype(np.float32)
    if scheme.codes == "int4" and scheme.zeros:
        arrays["zero"] = arrays["zero"].view(np.uint8) + np.uint8(scheme.code.raised)
    codes = product.Codes(
        jnp.asarray(scheme.code.pack(arrays["codes"])),
        jnp.asarray(arrays["scale"]),
        jnp.asarray(arrays["zero"]) if "zero" in arrays else None,
        jnp.asarray(arrays["outer"]) if "outer" in arrays else None,
        scheme.codes,
        scheme.columns,
        matrix.shape[1],
        8 if scheme.codes == "int4" and not scheme.zeros else 0,
        scheme.table,
        scheme.rows,
    )
    return codes, meant


@pytest.mark.parametrize("form", FORMS)
def test_products_with_codes_are_those_with_what_they_mean(form, monkeypatch):
    """Of four blocks of columns, of which two have the same scales."""
    scheme, width = FORMS[form], 512
    features = 66 if scheme.rows == 1 else 512
    codes, meant = coded(scheme, normal(1, features, width, dtype=FLOAT32))
    assert product.serves(3, codes, True, 4)
    monkeypatch.setattr(product, "_MOST_SCALES", 8)
    monkeypatch.setattr(product, "_BLOCK", 33 * 2 * 128)
    x = normal(2, 3, width, dtype=FLOAT32)
    found = product.product(
        jnp.asarray(x), codes, dtype=FLOAT32, activation=silu, gated=True, **INTERPRET
    )
    gate, up = np.split(x.astype(np.float64) @ meant.astype(np.float64).T, 2, -1)
    wanted = gate / (1 + np.exp(-gate)) * up
    assert_close(np.asarray(found), wanted, FLOAT32, length=width, roundings=4)


def test_floats_of_8_bits_are_those_of_ml_dtypes():
    """All but NaN's payloads, those near zero too."""
    import ml_dtypes

    every = np.arange(256, dtype=np.uint8)
    for kind, dtype in (("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)):
        found = np.asarray(product.float8(jnp.asarray(every), kind))
        np.testing.assert_array_equal(found, every.view(dtype).astype(np.float32))


def test_float16_is_loaded_as_bits_and_means_the_same():
    """Subnormals, infinities and NaN, too; bfloat16 is loaded as it is."""
    every = jnp.asarray(np.arange(1 << 16, dtype=np.uint16).view(np.float16))
    loaded = product.loadable(every)
    assert loaded.dtype == jnp.int16
    found = np.asarray(product.widened(loaded, every))
    np.testing.assert_array_equal(found, np.asarray(every).astype(np.float32))
    assert product.loadable(jnp.ones(1, BFLOAT16)).dtype == BFLOAT16


def test_a_product_of_one_feature_is_left_to_xla():
    """Mosaic has none in 16 bits: the gate of a shared expert, and a gated product of two rows."""
    for features, gated, served in ((1, False, False), (2, False, True), (2, True, False)):
        matrix = jnp.zeros((features, 256), BFLOAT16)
        assert product.serves(2, matrix, gated, 2) is served


@pytest.mark.parametrize(
    "option",
    ["", "window", "softcap", "sinks", "alibi", "mask", "segments", "both ways", "bias", "table"],
)
def test_attention_of_prompts_is_the_reference(option, monkeypatch):
    """Three heads a key, values of another width, two blocks of queries by three of keys."""
    monkeypatch.setattr(attending, "_ROWS", 24)
    monkeypatch.setattr(attending, "_KEYS", 8)
    batch, tokens, heads, kv_heads, dim = 2, 20, 6, 2, 16
    q = normal(1, batch, tokens, heads, dim, dtype=FLOAT32)
    k = normal(2, batch, tokens, kv_heads, dim, dtype=FLOAT32)
    v = normal(3, batch, tokens, kv_heads, 8, dtype=FLOAT32)
    how: dict[str, Any] = {"scale": 0.25, "causal": option not in ("both ways", "table")}
    seen: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    shown = np.ones((batch, tokens), bool)
    if option in ("window", "both ways"):
        how["window"] = seen["window"] = 5
    if option == "softcap":
        how["softcap"] = scores["softcap"] = 0.7
    if option == "sinks":
        how["sinks"] = scores["sinks"] = normal(4, heads, dtype=FLOAT32)
    if option == "alibi":
        how["alibi"] = scores["slopes"] = np.abs(normal(4, heads, dtype=FLOAT32))
        how["positions"] = np.arange(tokens)[None] * np.array([[1], [2]])
        scores["queries"] = scores["keys"] = jnp.asarray(how["positions"], jnp.int32)
    if option == "bias":
        how["alibi"], how["alibi_scale"] = normal(4, heads, dtype=BFLOAT16).astype(FLOAT32), 0.3
        at = how["positions"] = np.arange(tokens)[None] * np.array([[1], [2]])
        scores["bias"] = alibi_bias(MATHS, *map(jnp.asarray, (how["alibi"], at, at)), 0.3)
    if option == "table":  # five blocks of distances, of which the last are of all that are far
        how["relative"] = scores["table"] = normal(4, heads, 2 * 3 + 1, dtype=FLOAT32)
        held = jnp.zeros((1, kv_heads, tokens, dim))
        given = heads, scores["table"], held, FLOAT32
        assert attending.by_distance(tokens, *given) and not attending.by_distance(8, *given)
    if option == "mask":
        shown[1, :7] = False
        how["mask"] = shown
        numbers = np.where(shown, 0, -1).astype(np.int32)
        seen |= {"queries": jnp.zeros((batch, tokens), jnp.int32), "keys": jnp.asarray(numbers)}
    if option == "segments":
        how["segments"] = np.arange(tokens)[None].repeat(batch, 0) // 7
        seen["queries"] = seen["keys"] = jnp.asarray(how["segments"], jnp.int32)
    scores = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in scores.items()
    }
    whole: Any = (jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32))
    found = attend(
        *(jnp.asarray(x) for x in (q, k.swapaxes(1, 2), v.swapaxes(1, 2))),
        cast(Any, attending.Seen)(*whole, how["causal"], **seen),
        attending.Scores(0.25, **scores),
        **INTERPRET,
    )
    assert np.isfinite(np.asarray(found)).all()
    wanted = oracles.attention(q, k, v, **how)
    assert_close(np.asarray(found)[shown], wanted[shown], FLOAT32, length=tokens, roundings=2)


@both
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_packed_queries_are_normed_and_turned_where_they_are_read(dtype, interleaved, monkeypatch):
    """Three heads a key, in two blocks of queries; rows have angles of their own, or the same."""
    monkeypatch.setattr(attending, "_ROWS", 48)
    monkeypatch.setattr(attending, "LANES", 16)
    batch, tokens, heads, kv_heads, dim = 2, 32, 6, 2, 16
    qkv = normal(1, batch, tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], 2)
    gain = normal(4, dim, dtype=dtype)
    angles = normal(5, 1 if interleaved else batch, tokens, 4, dtype=FLOAT32)
    cos, sin = np.cos(angles), np.sin(angles)
    keys, values = (jnp.asarray(x.swapaxes(1, 2)) for x in (k, v))
    assert attending.takes_packed(tokens, heads, keys, values, dtype)
    assert not attending.takes_packed(tokens + 1, heads, keys, values, dtype)
    wide = appending.widened(jnp.asarray(cos), jnp.asarray(sin), dim, interleaved)
    found = attend(
        jnp.asarray(qkv.reshape(batch, tokens, -1)),
        *(keys, values),
        attending.Seen(jnp.zeros(batch, jnp.int32), jnp.full(batch, tokens, jnp.int32), True),
        attending.Scores(0.25),
        packed=attending.Packed(
            heads,
            appending.Turn(*wide, appending.pairs(dim, 8, interleaved)),
            appending.HeadNorm(rms, [jnp.asarray(gain)], []),
        ),
        **INTERPRET,
    )
    normed = oracles.rms_norm(q, gain, EPS).astype(dtype)
    cos, sin = (np.broadcast_to(x, (batch, *x.shape[1:])) for x in (cos, sin))
    turned = oracles.rotary(normed, cos, sin, interleaved)
    wanted = oracles.attention(np.asarray(turned).astype(dtype), k, v, scale=0.25, causal=True)
    assert found.dtype == dtype
    assert_close(np.asarray(found), wanted, dtype, length=tokens, roundings=4)


@both
@pytest.mark.parametrize("table", [False, True], ids=["slots", "blocks"])
def test_a_token_attends_to_its_slot_alone(dtype, table, monkeypatch):
    """Garbage lies behind; a window and a chunk begin in other blocks than the first.

    Distances add to scores; their last block is short. A slot's blocks of keys fill their lanes.
    """
    monkeypatch.setattr(attending, "_MANY_KEYS", 8)
    if not table:
        monkeypatch.setattr(attending, "LANES", 8)
    slots, kv_heads, size, dim, reach = 3, 2, 24, 16, 23
    lengths = np.array([1, reach, 14], np.int32)
    k, v = (normal(i, slots, kv_heads, size, dim, dtype=dtype) for i in (1, 2))
    for n, length in enumerate(lengths):
        k[n, :, length:], v[n, :, length:] = GARBAGE, np.nan
    q = normal(3, slots, 4, dim, dtype=dtype)
    where: dict[str, Any] = {"reach": reach}
    held = [jnp.asarray(k), jnp.asarray(v)]
    if table:
        blocks = np.random.default_rng(4).permutation(9).reshape(3, 3)
        pools = [np.empty((9, kv_heads, 8, dim), dtype) for _ in held]
        for pool, part in zip(pools, (k, v), strict=True):
            pool[blocks] = part.reshape(slots, kv_heads, 3, 8, dim).swapaxes(1, 2)
        held, where["table"] = [jnp.asarray(pool) for pool in pools], jnp.asarray(blocks)
    added = normal(5, 4, 2 * 6 + 1, dtype=FLOAT32)
    places = jnp.arange(reach)[None], jnp.asarray(lengths - 1)[:, None]
    bias = relative_bias(jnp.asarray(added), *places)
    for name, most in (("window", 5), ("chunk", 9)):
        own: dict[str, Any] = {name: most}
        seen = attending.Seen(jnp.asarray(lengths - 1), jnp.asarray(lengths), True, **own)
        how: Any = (seen, attending.Scores(0.25, bias=bias))
        found = attend(jnp.asarray(q)[:, None], *held, *how, **where, **INTERPRET)
        own |= {"scale": 0.25, "relative": added}
        wanted = oracles.decode_attention(q, (k, v), lengths, **own)
        assert_close(np.asarray(found)[:, 0], wanted, dtype, length=size, roundings=3)


@both
@pytest.mark.parametrize("codes", ["int8", "fp8_e4m3"])
def test_attention_reads_keys_and_values_in_codes(codes, dtype):
    """Whose products are of the queries' dtype, in which codes are exact."""
    q = normal(3, 2, 4, 16, dtype=dtype)
    lengths = np.array([5, 8], np.int32)
    pairs = [oracles.encode_heads(normal(i, 2, 2, 8, 16, dtype=FLOAT32), codes) for i in (1, 2)]
    cache: Any = tuple(oracles.decode_heads(*pair) for pair in pairs)
    held, scales = ([jnp.asarray(x) for x in part] for part in zip(*pairs, strict=True))
    seen = attending.Seen(jnp.asarray(lengths - 1), jnp.asarray(lengths), True)
    how: Any = (seen, attending.Scores(0.25))
    found = attend(jnp.asarray(q)[:, None], *held, *how, scales=scales, **INTERPRET)
    wanted = oracles.decode_attention(q, cache, lengths, scale=0.25)
    assert_close(np.asarray(found)[:, 0], wanted, dtype, length=8, roundings=3)
    step = jax.make_jaxpr(lambda *of: attend(*of, *how, scales=scales, interpret=False))
    step = str(step(jnp.asarray(q)[:, None], *held))
    assert ("HIGHEST" in step) == (dtype == FLOAT32) and "dot_general" in step


@both
@pytest.mark.parametrize("table", [False, True], ids=["slots", "blocks"])
@pytest.mark.parametrize(("tokens", "made"), [(1, False), (5, False), (21, True)])
def test_pieces_attend_to_latent_vectors(tokens, made, table, dtype, monkeypatch):
    """From any place of their slots, in blocks of queries and of keys, with garbage behind.

    Heads share a vector, whose first elements are values of queries that meet it, or which the
    kernel makes keys and values of.
    """
    monkeypatch.setattr(attending, "_KEYS", 8)
    monkeypatch.setattr(attending, "LANES", 8)
    monkeypatch.setattr(attending, "_MANY_ROWS", 16)
    rank, turning, own, width, heads = 16, 8, 12, 10, 4
    starts, slots = np.array([3, 9], np.int32), np.array([2, 0], np.int32)
    shared = normal(1, 3, 32, rank + turning, dtype=dtype)
    for slot, start in zip(slots, starts, strict=True):
        shared[slot, start + tokens :] = np.nan
    held, where = jnp.asarray(shared)[:, None], {"slots": jnp.asarray(slots)}
    if table:
        order = np.random.default_rng(4).permutation(12)
        held = jnp.asarray(shared.reshape(12, 1, 8, -1)[order])
        where = {"table": jnp.asarray(np.argsort(order).reshape(3, 4)[slots])}
    keys, values = (normal(i, heads, n, rank, dtype=dtype) for i, n in ((2, own), (3, width)))
    q = normal(4, 2, tokens, heads, (own if made else rank) + turning, dtype=dtype)
    how: dict[str, Any] = {"reach": 31, **where, **INTERPRET}
    how |= {"made": attending.Made(*map(jnp.asarray, (keys, values)))} if made else {"values": rank}
    seen = attending.Seen(*map(jnp.asarray, (starts, starts + tokens)), True)
    found = attend(jnp.asarray(q), held, None, seen, attending.Scores(0.25), **how)

    def of_heads(matrices: np.ndarray) -> np.ndarray:
        """What heads make of all slots' vectors, as they are rounded: [N, H, S, any]."""
        made = np.einsum("nsr,hor->nhso", *(x.astype(np.float32) for x in (vectors, matrices)))
        return made.astype(dtype)

    vectors, keys_of_all = shared[..., :rank], shared[:, None]
    values_of_all = keys_of_all[..., :rank]
    if made:
        turned = np.broadcast_to(keys_of_all[..., rank:], (3, heads, 32, turning))
        keys_of_all, values_of_all = np.concatenate((of_heads(keys), turned), -1), of_heads(values)
    for b, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        cache: Any = [x[slot][None].repeat(tokens, 0) for x in (keys_of_all, values_of_all)]
        cache[1] = np.pad(cache[1], ((0, 0),) * 3 + ((0, q.shape[-1] - cache[1].shape[-1]),))
        lengths = start + 1 + np.arange(tokens)
        wanted = oracles.decode_attention(q[b], cache, lengths, scale=0.25)[..., : found.shape[-1]]
        assert_close(np.asarray(found)[b], wanted, dtype, length=32, roundings=3)


@both
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_a_token_is_normed_turned_and_put_in_its_place(dtype, interleaved):
    """The first 8 of 16 elements turn; nothing else of the cache changes, nor a third slot."""
    heads, kv_heads, size, dim, lengths = 4, 2, 32, 16, np.array([17, 2], np.int32)
    qkv = normal(1, 2, heads + 2 * kv_heads, dim, dtype=dtype)
    held = [normal(i, 3, kv_heads, size, dim, dtype=dtype) for i in (2, 3)]
    gain = normal(4, dim, dtype=dtype)
    angles = normal(5, 2, 4, dtype=FLOAT32)
    cos, sin = np.cos(angles), np.sin(angles)
    wide = appending.widened(jnp.asarray(cos), jnp.asarray(sin), dim, interleaved)
    found = cast(Any, appending.append)(
        jnp.asarray(qkv),
        *map(jnp.asarray, held),
        jnp.asarray(lengths),
        heads=heads,
        turn=appending.Turn(*wide, appending.pairs(dim, 8, interleaved)),
        norm=appending.HeadNorm(rms, [jnp.asarray(gain)], [jnp.asarray(gain)]),
        **INTERPRET,
    )
    q, k, v = map(np.asarray, found)
    normed = oracles.rms_norm(qkv[:, : heads + kv_heads], gain, EPS).astype(dtype)
    turned = oracles.rotary(normed[:, None], cos[:, None], sin[:, None], interleaved)[:, 0]
    assert_close(q, turned[:, :heads], dtype, roundings=2)
    for new, old, values in (
        (k, held[0], turned[:, heads:]),
        (v, held[1], qkv[:, heads + kv_heads :]),
    ):
        for n, at in enumerate(lengths):
            assert_close(new[n, :, at], np.asarray(values[n]), dtype, roundings=2)
            old[n, :, at] = new[n, :, at]
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "scales"])
def test_a_row_is_put_in_its_place_of_an_array(dtype):
    """Of blocks that others lie between, and of scales, which have no width."""
    rng, rest = np.random.default_rng(1), () if dtype == "scales" else (16,)
    kind = jnp.dtype("float32" if dtype == "scales" else dtype)
    held, new = (
        rng.integers(-120, 120, (*lead, *rest)).astype(np.int8).astype(kind)
        for lead in ((5, 2, 256), (3, 2))
    )
    rows, places = np.array([4, 0, 2], np.int32), np.array([0, 255, 37], np.int32)
    found = np.asarray(appending.put(*map(jnp.asarray, (held, new, rows, places)), **INTERPRET))
    held[rows, :, places] = new
    assert found.dtype == kind
    np.testing.assert_array_equal(found, held)


@pytest.mark.parametrize("table", [False, True], ids=["slots", "blocks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "scales"])
def test_rows_are_put_in_their_places_of_an_array(dtype, table, monkeypatch):
    """Nothing else changes, nor is what lies behind a row's end written.

    Of 70 tokens in tiles of 32: a slot that there is not comes first; two rows of one slot meet
    within a tile; one ends where its slot does, one is empty, and one lies in a single tile, one
    in all three that it may touch.
    """
    monkeypatch.setattr(appending, "_TILE", 4 * 2 * 32 * 16)
    monkeypatch.setattr(appending, "LANES", 32)
    rng, count, rest = np.random.default_rng(1), 70, () if dtype == "scales" else (16,)
    kind = jnp.dtype("float32" if dtype == "scales" else dtype)
    slots = np.array([5, 3, 3, 0, 4, 1, 2], np.int32)
    starts = np.array([0, 33, 103, 75, 0, 7, 31], np.int32)
    lengths = np.array([70, 70, 5, 70, 0, 9, 70], np.int32)
    pool = (10, 2, 64) if table else (5, 2, 128)
    held, new = (
        rng.integers(-120, 120, (*lead, *rest)).astype(np.int8).astype(kind)
        for lead in (pool, (len(slots), count, 2))
    )
    # Slot 2 has given its first block back.
    blocks = np.array([[8, 1], [2, 3], [-1, 9], [6, 7], [4, 5]], np.int32) if table else None
    where = (x if x is None else jnp.asarray(x) for x in (slots, starts, lengths, blocks))
    given = jnp.asarray(held), jnp.asarray(new), appending.Rows(*where)
    found = np.asarray(appending.put_rows(*given, **INTERPRET))
    assert found.dtype == kind
    for b, slot in enumerate(slots):
        for t in range(lengths[b] if slot < 5 else 0):
            row, at = slot, starts[b] + t
            if blocks is not None and at < 128:
                row, at = blocks[slot, at // 64], at % 64
            if row >= 0 and at < pool[2]:
                held[row, :, at] = new[b, t]
    np.testing.assert_array_equal(found, held)


@pytest.mark.parametrize("rows", [1, 40])
def test_experts_give_what_each_gives_by_itself(rows, monkeypatch):
    """Two blocks of hidden features; some experts have no row, one has more than a tile."""
    monkeypatch.setattr(mixing, "_BLOCK", 2 * 128 * 24 * 4)
    monkeypatch.setattr(mixing, "_MANY", 16)
    total, width, features = 5, 24, 256
    x = normal(1, rows, width, dtype=FLOAT32)
    up = normal(2, total, 2 * features, width, dtype=FLOAT32, scale=0.2)
    bias = normal(3, total, 2 * features, dtype=FLOAT32)
    down = normal(4, total, width, features, dtype=FLOAT32, scale=0.1)
    chosen = np.random.default_rng(5).permuted(np.tile([0, 1, 3], (rows, 1)), axis=1)[:, :2]
    chosen = np.sort(chosen, -1).astype(np.int32)
    weights = np.array([[0.3, 0.7]], np.float32).repeat(rows, 0)
    chosen[-1, 1], weights[-1, 1] = total, 0  # no expert of these
    assert mixing.columns_of(features, width, 2, 4) == 128
    parts = mixing.experts(
        *map(jnp.asarray, (x, up, down, chosen)),
        hidden=lambda h: silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :],
        gated=True,
        up_bias=jnp.asarray(bias),
        **INTERPRET,
    )
    found, chosen = (np.asarray(parts) * weights[..., None]).sum(1), chosen.clip(max=total - 1)
    assert not np.asarray(parts)[-1, 1].any()
    how: dict[str, Any] = {"activation": "silu", "gated": True}
    wanted = oracles.experts(x, up, down, bias, None, chosen, weights, **how)
    assert_close(found, wanted, FLOAT32, length=features, roundings=2)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    "form", ["int8", "int4", "int4 zeros", "fp8 blocks", "fp4", "nvfp4", "table"]
)
def test_experts_in_codes_are_those_of_what_they_mean(form, rows, monkeypatch):
    """Two blocks of columns and two of hidden features; experts have no row, or several tiles."""
    monkeypatch.setattr(product, "_WIDEST", 128)
    monkeypatch.setattr(product, "_MOST_SCALES", 4)
    monkeypatch.setattr(mixing, "_MANY", 16)
    scheme, total, width, features = FORMS[form], 4, 512, 128
    x, bias = (normal(i, *s, dtype=FLOAT32) for i, s in enumerate([(rows, width), (4, 256)]))
    stacks, means = [], []
    for shape in ((2 * features, width), (width, features)):
        made = [coded(scheme, normal(i, *shape, dtype=FLOAT32, scale=0.1)) for i in range(total)]
        parts = zip(*(own[0] for own in made), strict=True)
        stacked = [jnp.stack(p) if isinstance(p[0], jax.Array) else p[0] for p in parts]
        stacks.append(product.Codes(*stacked))
        means.append(np.stack([own[1] for own in made]))
    chosen = np.random.default_rng(5).permuted(np.tile([0, 1, 3], (rows, 1)), axis=1)[:, :2]
    chosen = np.sort(chosen, -1).astype(np.int32)
    weights = np.array([[0.3, 0.7]], np.float32).repeat(rows, 0)
    chosen[-1, 1], weights[-1, 1] = total, 0  # no expert of these
    assert all(mixing.serves_codes(codes, 4) for codes in stacks)
    found = mixing.in_codes(
        jnp.asarray(x),
        *stacks,
        jnp.asarray(chosen),
        hidden=lambda h: silu(h[:, :features]) * h[:, features:],
        up_bias=jnp.asarray(bias),
        **INTERPRET,
    )
    assert not np.asarray(found)[-1, 1].any()
    found, chosen = (np.asarray(found) * weights[..., None]).sum(1), chosen.clip(max=total - 1)
    how: dict[str, Any] = {"activation": "silu", "gated": True}
    wanted = oracles.experts(x, *means, bias, None, chosen, weights, **how)
    assert_close(found, wanted, FLOAT32, length=width, roundings=4)


def test_filters_keep_what_the_reference_keeps():
    logits = normal(1, 4, 97, dtype=FLOAT32, scale=3)
    logits[3, :90] = logits[3, 90]  # ties stay or go together
    top_k, top_p = np.array([5, 0, 200, 7], np.int32), np.array([0.9, 0.5, 1, 1], np.float32)
    min_p = np.array([0.02, 0, 0.1, 0], np.float32)
    given = logits, top_k, top_p, min_p
    found = np.asarray(thresholds.filter_logits(*map(jnp.asarray, given), **INTERPRET))
    np.testing.assert_array_equal(found, oracles.filter_logits(*given))


RINGS: dict[str, BlockScheme | None] = {
    "floats": None,
    "int8": BlockScheme("int8"),
    "int8 zeros": BlockScheme("uint8", zeros=True),
    "fp8": BlockScheme("fp8_e4m3", scale_dtype="bfloat16"),
    "fp8 e5m2": BlockScheme("fp8_e5m2", 128),
    "int4": BlockScheme("int4", scale_dtype="float16"),
    "int4 zeros": BlockScheme("uint4", zeros=True),
}


@pytest.mark.parametrize("form", RINGS)
def test_a_row_goes_through_a_ring_of_weights(form):
    """As JAX simulates a GPU's shared memory and barriers: more rows than programs have slots."""
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    scheme = RINGS[form]
    width = 768 if scheme is None or scheme.code.bits == 8 else 1536  # loads of two sizes
    features = 16 if scheme is None or scheme.rows == 1 else 128
    shapes = [(width,), (2 * features, width), (2 * features,), (width,), (features,)]
    x, weight, bias, gain, residual = (
        normal(i, *shape, dtype=BFLOAT16) for i, shape in enumerate(shapes)
    )
    matrix: Any = jnp.asarray(weight)
    if scheme is not None:
        matrix, weight = coded(scheme, weight.astype(np.float32))
    assert ring.serves(1, matrix, True, BFLOAT16)
    found = ring.product(
        jnp.asarray(x),
        matrix,
        dtype=jnp.float32,
        bias=jnp.asarray(bias),
        eps=EPS,
        gain=jnp.asarray(gain),
        activation=silu,
        gated=True,
        residual=jnp.asarray(residual),
        sms=1,
        interpret=InterpretGPUParams(detect_races=True),
    )
    normed = oracles.rms_norm(x.astype(np.float32), gain.astype(np.float32), EPS)
    y = weight.astype(np.float64) @ normed.astype(np.float64) + bias.astype(np.float64)
    gate, up = np.split(y, 2)
    wanted = gate / (1 + np.exp(-gate)) * up + residual.astype(np.float64)
    assert_close(np.asarray(found), wanted, FLOAT32, length=width, roundings=2)
    assert not get_races().races_found


def test_a_ring_is_of_what_its_copies_and_registers_hold():
    """Lines of 256 bytes or elements, a scale for each row, and a row of 16 bits."""

    def served(
        scheme: BlockScheme | None, width: int, count: int = 1, dtype: Any = BFLOAT16
    ) -> bool:
        weight = normal(1, 4, width, dtype=FLOAT32)
        matrix = jnp.asarray(weight, BFLOAT16) if scheme is None else coded(scheme, weight)[0]
        return ring.serves(count, matrix, False, dtype)

    assert served(None, 256) and served(RINGS["int8"], 256) and served(RINGS["int4"], 512)
    assert not served(None, 128) and not served(RINGS["int8"], 384)
    assert not served(RINGS["int4"], 256) and not served(FORMS["int4"], 512)
    assert not served(RINGS["int8"], 256, 2) and not served(None, 256, dtype=FLOAT32)
    assert not served(None, 32768)


def test_gelu_is_that_of_the_error_function():
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    found = np.asarray(activations.gelu(jnp.asarray(x)))
    np.testing.assert_allclose(found, oracles.activation(x, "gelu"), rtol=0, atol=6e-7)


def test_a_kernel_that_would_hold_too_much_is_refused():
    x = jax.ShapeDtypeStruct((4096, 8192), jnp.float32)
    block = launch.Block(x, (4096, 8192), lambda i: (0, 0))
    with pytest.raises(launch.NoRoomError, match=r"product would hold 268,435,456 bytes of VMEM"):
        launch.check_room("product", [block], [])


def test_vmem_is_counted_in_tiles():
    """Rows of 8, or 16 of half the size, by 128 lanes."""
    counts = [launch.held_bytes((1, 3), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8)]
    assert counts == [4096, 4096, 4096]
    assert launch.held_bytes((None, 2, 9, 129), jnp.float32) == 2 * 16 * 256 * 4


def test_bytes_that_move_are_those_of_blocks_once():
    """A program has one place of a cache; a matrix is read once, however many have it."""
    cache = launch.Block(jax.ShapeDtypeStruct((8, 64, 16), BFLOAT16), (None, 1, 16), lambda n: n)
    matrix = launch.whole(jnp.zeros((16, 16), FLOAT32))
    assert launch.moved_bytes([cache, matrix], (4,)) == 4 * 16 * 2 + 16 * 16 * 4


STEPS = {
    # heads, groups, elements of keys and values, of a program; the delta rule; a decay a channel
    "Mamba-2": (16, 1, 24, 20, 8, False, False),
    "by groups": (16, 8, 24, 20, 16, False, False),
    "delta rule": (16, 8, 24, 20, 8, True, False),
    "delta rule by channel": (6, 6, 24, 20, 6, True, True),
    "delta rule in bfloat16": (16, 8, 24, 20, 8, True, False),
}


@pytest.mark.parametrize("kind", STEPS)
def test_tokens_go_into_the_states_that_move(kind, monkeypatch):
    """Three slots of five; the second stays, and is not looked at."""
    heads, groups, size, width, own, delta, by_channel = STEPS[kind]
    shape = (size, width) if delta else (width, size)
    monkeypatch.setattr(state, "_BLOCK", launch.held_bytes((own, *shape), FLOAT32))
    assert state.heads_of(heads, shape) == own
    lead = 3, groups, heads // groups
    step = StateStep(
        normal(1, 3, groups, size, dtype=FLOAT32),
        normal(2, 3, groups, size, dtype=FLOAT32, scale=0.3),
        normal(3, *lead, width, dtype=FLOAT32),
        abs(normal(4, *lead, dtype=FLOAT32)) if delta else None,
        -abs(normal(5, *lead, size if by_channel else 1, dtype=FLOAT32)),
    )
    kept = BFLOAT16 if "bfloat16" in kind else FLOAT32
    held = normal(6, 5, heads, *shape, dtype=kept)
    held[1] = np.nan
    moves = np.array([True, False, True])
    given = (None if x is None else jnp.asarray(x) for x in (*step, held, moves))
    y, new = map(np.asarray, cast(Any, state.take_in)(*given, **INTERPRET))
    wanted, behind = take_in(EXACT, step, held[:3].astype(np.float64))
    for n in (0, 2):
        assert_close(y[n], wanted[n].astype(np.float32), FLOAT32, length=2 * size)
        assert_close(new[n], behind[n].astype(np.float32), kept, length=2 * size)
    old, kept = (x[[1, 3, 4]].astype(np.float32) for x in (held, new))
    np.testing.assert_array_equal(kept, old)
