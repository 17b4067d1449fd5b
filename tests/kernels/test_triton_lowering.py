"""Triton's kernels compile for an H100, without one, and ptxas reports no spilled registers.

Each line of VARIANTS is a kernel as some launch would specialise it. To add one, write the
module and the kernel, the arguments by name, num_warps (num_stages) where they are not 4 (3), and
`dtypes` where it does not run in all of them. ONLY_KERNELS=norm compiles that module's alone.

Compiling all of them takes five minutes, so compiled.json keeps what became of each, by a digest of
its source, its arguments and Triton's version. After a kernel has changed, write it anew:

    python -m tests.kernels.test_triton_lowering record
"""

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from dualinfer.kernels.triton import (
    attention,
    attention_choice,
    conv_token,
    decode_attention,
    delta_prompt,
    delta_token,
    eight_bit,
    experts,
    experts_choice,
    filters,
    linear,
    operands,
    quantized,
    routing,
    selective_scan,
    state_prompt,
    state_token,
)
from dualinfer.kernels.triton import latent as latents
from dualinfer.kernels.triton import mixture as mixtures
from dualinfer.kernels.triton.blocks import count_of_entries
from dualinfer.kernels.triton.launch import next_power_of_2

pytestmark = pytest.mark.xdist_group("lowering")  # one process compiles for all tests

RECORD = Path(__file__).with_name("compiled.json")
TRITON = "3.9.0"  # of the record
CHECKED = 60  # one of so many is compiled though it is recorded

DTYPES = ("fp32", "bf16")  # float16 differs by conversions: one product has it
NORM = {"CENTER": False, "UNIT_OFFSET": False, "EARLY": True, "AXES": 1, "ROWS": 1, "BLOCK": 4096}
NORM |= {"AFTER": False}
TILE = {"PAIRS": 64, "D": 128, "HEADS": 16, "HALF": 64, "REST": 0, "INTERLEAVED": False}
PREFILL = TILE | {"H": 32, "K": 8, "FIRST": 0, "LAST": 48, "UNIT_OFFSET": False}
PREFILL |= {"NORM_TURNED": False, "ends_ptr": None, "STRETCH": 0.0, "ROUNDED": False}
HEADS = {"QUERIES": 1, "KEYS": 1, "Q_WIDTH": 4096, "K_WIDTH": 1024, "OWN": False, "CENTER": False}
HEADS |= {"UNIT_OFFSET": False, "UNITS": 1, "BLOCK": 4096, "num_warps": 8, "positions_ptr": None}
HEADS |= {"q_bias_ptr": None, "k_bias_ptr": None}
OWN = {"QUERIES": 32, "KEYS": 8, "Q_WIDTH": 128, "K_WIDTH": 128, "OWN": True, "CENTER": True}
OWN |= {"UNITS": 8, "BLOCK": 128, "num_warps": 2, "positions_ptr": "*i64"}
CACHE = "keys_ptr", "values_ptr"
NO_NORM = {"q_norm_ptr": None, "k_norm_ptr": None}
GPTJ = {"PAIRS": 32, "D": 256, "HALF": 32, "REST": 256, "INTERLEAVED": True, "H": 16, "K": 16}

EXCHANGE = {"RANK": 1, "SIZE": 4, "RANKS": 4, "BLOCK": 512}
ROW = dict.fromkeys(("RANK", "words_ptr", "state_ptr")) | {"peers_ptr": "*i32"}

FOUR = ("int4", "uint4", "fp4_e2m1", "table")
HALF, BFLOAT16, WHOLE = ("fp16",), ("bf16",), ("fp32",)
Variant = tuple[str, str, dict[str, Any]]


def product(
    count: int, features: int, width: int, dtypes: Any = BFLOAT16, **arguments: Any
) -> Variant:
    """A product as `linear` launches it where nobody measured."""
    gated = arguments.setdefault("GATED", False)
    size = 4 if dtypes == WHOLE else 2
    config = linear.default_config(count, features, width, size, gated, 132)
    arguments = {"ACTIVATION": None, "K": width, "num_warps": config.warps} | arguments
    arguments["dtypes"] = dtypes
    for name in ("bias_ptr", "residual_ptr"):
        arguments.setdefault(name, None)
    if isinstance(config, linear.VectorConfig):
        if arguments.setdefault("NORM", None) != "layer":
            arguments["norm_bias_ptr"] = None
        for name in ("before_ptr", "normed_ptr"):
            arguments.setdefault(name, None)
        blocks = {"ROWS": config.rows, "BLOCK_K": next_power_of_2(width)}
        return (
            "linear_kernels",
            "matvec_kernel",
            {"COUNT": count, "PROGRAMS": 0} | blocks | arguments,
        )
    share = -(-width // config.k // config.splits)
    splits = {"SPLITS": config.splits, "SPLIT_K": share * config.k, "STAGES": config.stages}
    blocks = {"BLOCK_M": config.m, "BLOCK_N": config.n, "BLOCK_K": config.k}
    return "linear_kernels", "tile_kernel", splits | blocks | arguments


def reading(
    codes: str,
    features: int,
    width: int,
    columns: int = 128,
    count: int = 1,
    config: quantized.QuantizedConfig | None = None,
    scales: str = "bfloat16",
    dtypes: Any = BFLOAT16,
    zeros: bool = False,
    **options: Any,
) -> Variant:
    """A product with quantized weights, as it is launched where nobody measured."""
    recording = operands.Recording()

    def new(*shape: int, dtype: str = "bfloat16") -> operands.Operand:
        return recording.operand(shape, dtype)

    held = "uint8" if scales.startswith("float8") else scales
    groups = -(-width // columns) if columns else 1
    weight = quantized.Packed(
        new(features, width * (4 if codes in FOUR else 8) // 8, dtype="uint8"),
        new(features, groups, dtype=held),
        new(features, groups, dtype="uint8") if zeros else None,
        new(features, dtype="float32") if scales == "float8_e4m3fn" else None,
        *(codes, scales, 1, columns, width, tuple(i / 8 for i in range(16))),
    )
    x = new(count, width, dtype={WHOLE: "float32", HALF: "float16"}.get(dtypes, "bfloat16"))
    if options.pop("normed", False):
        options["norm"] = linear.NormArguments("rms", new(width, dtype=x.dtype), None, 1e-5)
    if options.get("gated"):
        options["activation"] = "silu"
    counters = new(linear.MOST_TILES, dtype="int32")
    quantized.linear(x, weight, config=config, counters=counters, **options)
    launch = recording.launches[-1]  # others prepare x
    types = {"float32": "*fp32", "int32": "*i32", "uint8": "*u8", "uint32": "*u32"}
    types |= {"float16": "*fp16", "bfloat16": "*bf16"}
    arguments: dict[str, Any] = dict(launch.options) | {"dtypes": dtypes}
    for name, value in launch.arguments:
        if isinstance(value, operands.Pointer):
            value = types[value.dtype]
        elif name in ("count", "features", "x_stride", "residual_stride", "eps", "mask"):
            continue
        arguments[name] = value
    name = launch.kernel.__name__
    modules = {"fragment_kernel": "fragment_kernel", "tile_kernel": "quantized_tiles"}
    return modules.get(name, "quantized_kernels"), name, arguments


def choosing_experts(
    tokens: int, width: int, total: int, chosen: int, features: int, shared: int = 0, **how: Any
) -> list[Variant]:
    """A router and the products of its experts, as they are launched where nobody measured."""
    recording = operands.Recording()

    def new(*shape: int, dtype: str = "bfloat16") -> operands.Operand:
        return recording.operand(shape, dtype)

    x, counters = new(tokens, width), new(4096, dtype="int32")
    few = experts_choice.is_few(tokens)
    norm = linear.NormArguments("rms", new(width), None, 1e-5)
    router = {"chosen": chosen, "score": "softmax"} | how.pop("router", {})
    router |= {"norm": norm if routing.fuses_norm(tokens) else None}
    routed = routing.route(x, new(total, width), counters=counters, **router)
    biases, codes = how.pop("biases", False), how.pop("codes", None)
    how |= {"own": new(2, dtype="int32")} if how.pop("in_parts", False) else {}

    def weight(rows: int, columns: int) -> Any:
        if codes is None:
            return new(total, rows, columns)
        name, group, scales = codes
        data = new(total, rows, columns * (4 if name in FOUR else 8) // 8, dtype="uint8")
        held = "uint8" if scales.startswith("float8") else scales
        scale = new(total, rows, -(-columns // group) if group else 1, dtype=held)
        return quantized.Packed(data, scale, None, None, name, scales, 1, group, columns)

    mixture = mixtures.Mixture(
        weight(2 * features, width),
        weight(width, features),
        new(total, 2 * features) if biases else None,
        new(total, width) if biases else None,
        shared=mixtures.Shared(new(2 * shared, width), new(width, shared), new(width))
        if shared
        else None,
        **how,
    )
    experts.experts(
        x, mixture, routed, norm=norm if few else None, residual=new(tokens, width),
        counters=counters,
    )  # fmt: skip
    return [written(launch) for launch in recording.launches]


def written(launch: operands.Launch) -> Variant:
    """A launch that was written down."""
    types = {"float32": "*fp32", "int32": "*i32", "bfloat16": "*bf16"}
    types |= {"uint8": "*u8", "uint32": "*u32"}
    arguments: dict[str, Any] = dict(launch.options) | {"dtypes": BFLOAT16}
    for name, value in launch.arguments:
        if isinstance(value, operands.Pointer):
            value = types[value.dtype]
        elif isinstance(value, int) and name.islower():
            value = "i32/16" if value % 16 == 0 else "i32"
        elif isinstance(value, float) and name.islower():
            value = "fp32"
        arguments[name] = value
    return launch.kernel.__module__.split(".")[-1], launch.kernel.__name__, arguments


def decoding(
    slots: int, kv_heads: int, group: int, dim: int, dtypes: Any = BFLOAT16, **arguments: Any
) -> Variant:
    """Attention of a decode step with 2,048 places in the cache; plain but for `arguments`."""
    kept = 4 if dtypes == WHOLE else 1 if "CODES" in arguments else 2
    config = decode_attention.default_config(slots * kv_heads, 2048, dim, kept, 132)
    heads = {"KV_HEADS": kv_heads, "GROUP": group, "EACH": min(group, 16), "DIM": dim}
    heads["BLOCK_D"] = next_power_of_2(dim)
    splits = {"SPLITS": config.splits, "SPLIT_BLOCK": next_power_of_2(config.splits)}
    flags = (
        "INTERLEAVED",
        "NORM_OFFSET",
        "NORM_TURNED",
        "WINDOWED",
        "CHUNKED",
        "SOFTCAP",
        "TWO_TABLES",
    )
    flags += ("CROSS", "STRETCH")
    flags = dict.fromkeys(flags, False)
    names = ("q_norm_ptr", "k_norm_ptr", "slopes_ptr", "sinks_ptr", "alibi_scale", "relative_ptr")
    absent = dict.fromkeys(names)
    rows = 1 if dtypes == WHOLE and group == 1 else 16
    blocks = {"BLOCK_G": rows, "BLOCK_S": config.block, "STAGES": config.stages, "ROTARY": dim}
    arguments = {"num_warps": config.warps, "dtypes": dtypes} | arguments
    arguments["EARLY"] = "CODES" not in arguments and slots <= 4
    arguments["ENTRIES"] = 32 if "table_ptr" in arguments else 0
    arguments["THREADS"] = 32 * config.warps
    return (
        "decode_attention",
        "decode_attention_kernel",
        heads | splits | flags | absent | blocks | arguments,
    )


def latent(
    slots: int, heads: int, kernel: str, dtypes: Any = BFLOAT16, rank: int = 512, **more: Any
) -> Variant:
    """A launch of latent attention, as it is where nobody measured.

    Of a decode step, or of SEVERAL tokens, 64, of each slot.
    """
    pairs, size = (64 if "SEVERAL" in more else 1) * heads, 4 if dtypes == WHOLE else 2
    config = latents.default_config(slots, pairs, 2048, size, 132)
    read = 2048, config.block, config.splits
    entries = count_of_entries(more.get("table_ptr"), more.get("SIZE", 0), *read)
    rows = 1 if slots == 1 else 16
    sizes = {"H": heads, "RANK": rank, "dtypes": dtypes}
    block_r = next_power_of_2(rank)
    own: dict[str, dict[str, Any]] = {
        "_absorb_kernel": {
            **{"D": 192, "NOPE": 128, "BLOCK_N": rows, "BLOCK_D": 128, "BLOCK_R": 32},
            "keys_ptr": "*x",
        },
        "_decode_latents_kernel": {
            **{"D": 192, "TURNING": 64, "SPLITS": config.splits, "STAGES": config.stages},
            **{"SEVERAL": False, "slots_ptr": None},
            **{"BLOCK_H": config.heads, "BLOCK_S": config.block, "BLOCK_R": block_r},
            **{"BLOCK_T": 64, "num_warps": config.warps, "ENTRIES": entries},
        },
        "_join_latents_kernel": {
            **{"VALUE": 128, "SPLITS": config.splits, "BLOCK_N": rows, "BLOCK_R": block_r},
            "BLOCK_V": 16,
        },
    }
    return "latent", kernel, sizes | own[kernel] | more


def attending(dim: int, tokens: int, dtypes: Any = BFLOAT16, **arguments: Any) -> Variant:
    """Attention of a prompt of 8 sequences of 32 heads, read by TMA; causal but for `arguments`."""
    size = 4 if dtypes == WHOLE else 2
    config = attention_choice.attention_configs(
        itemsize=size, head_dim=dim, tokens=tokens, pairs=256
    )[0]
    if "relative_ptr" in arguments:
        config = config._replace(block_m=64)
    main, rest = attention._split(dim)
    values: dict[str, Any] = {"DIM": dim, "MAIN": main, "REST": rest, "GROUP": 4, "CAUSAL": True}
    values |= {"TMA": True, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    for name, rows in (("q", config.block_m), ("k", config.block_n), ("v", config.block_n)):
        values[name] = f"tensordesc<x[1, 1, {rows}, {main}]>"
        values[f"{name}_rest"] = f"tensordesc<x[1, 1, {rows}, {rest}]>" if rest else None
    names = ("mask", "segments", "positions", "slopes", "sinks", "relative")
    values |= dict.fromkeys(f"{name}_ptr" for name in names)
    values |= {"softcap": None, "alibi_scale": None, "window": None, "dtypes": dtypes}
    values |= {"num_warps": config.warps, "num_stages": config.stages}
    return "attention_kernel", "attention_kernel", values | arguments


def choosing(module: str, kernel: str, vocab: int = 128256, **arguments: Any) -> Variant:
    """A sampling kernel."""
    work = filters.make_workspace(1, vocab, "cpu")
    flags: dict[str, Any] = {"EOS_WIDTH": 2, "dtypes": WHOLE}
    blocks = {"BLOCK": work.block, "CHUNKS": work.chunks, "num_warps": max(4, work.block // 256)}
    return module, kernel, {"enable_fp_fusion": False} | flags | blocks | arguments


ROUNDED = {"slopes_ptr": "*fp32", "alibi_scale": "fp32"}
TABLE = {"table_ptr": "*i32", "table_stride": "i32", "SIZE": 64}
SCALES = {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
FLOATS8, INTEGERS8 = SCALES | {"CODES": "fp8_e4m3"}, SCALES | {"CODES": "int8"}
POINTERS = {"TMA": False, "q": "*x", "k": "*x", "v": "*x"}
NORMED = {"NORM": "rms"}
BIASED = {"NORM": "layer", "bias_ptr": "*x"}
SWIGLU = {"GATED": True, "ACTIVATION": "silu"}
ADDED = {"residual_ptr": "*x"}

GPT_OSS: Any = {"activation": "quick_gelu", "limit": 7.0, "offset": 1.0}
GPT_OSS["router"] = {"score": "chosen"}
GROUPS = {"score": "sigmoid", "groups": 8, "groups_chosen": 4, "group_score": "two"}
VECTOR = quantized.QuantizedVectorConfig(8, 32, 1)
STREAM = quantized.QuantizedStreamConfig(4, 8, 2)
FEW: Any = (("int4", 6144, 4096), {"normed": True})
MXFP4_ROW = reading("fp4_e2m1", 28672, 4096, 32, scales="float8_e8m0fnu", gated=True, normed=True)
INT4, INT8 = ("int4", 128, "bfloat16"), ("int8", 0, "float32")

# Arguments: "*x" is a pointer to the variant's dtype, "*i64" one to that type, a type a scalar that
# is no multiple of 16 ("i32/16" is one), anything else a constant. PDL is on. What is not named is
# a pointer if it ends in _ptr, else a multiple of 16.
VARIANTS: list[Variant] = [
    ("norm", "_norm_kernel", NORM | {"bias_ptr": None, "num_warps": 8}),
    (
        "norm",
        "_norm_kernel",
        NORM | {"CENTER": True, "EARLY": False, "BLOCK": 16384, "num_warps": 16},
    ),
    ("norm", "_norm_kernel", NORM | {"AXES": 3, "ROWS": 8, "BLOCK": 128, "num_warps": 2}),
    ("activation", "_activation_kernel", {"KIND": "silu", "GATED": True, "AXES": 1, "BLOCK": 2048}),
    (
        "activation",
        "_activation_kernel",
        {"KIND": "tanh", "GATED": False, "AXES": 1, "BLOCK": 2048},
    ),
    ("activation", "_xielu_kernel", {"BLOCK": 2048}),
    ("activation", "_activation_kernel", {"KIND": "gelu", "GATED": True, "AXES": 2, "BLOCK": 2048}),
    (
        "embedding",
        "_embed_kernel",
        {"SCALED": True, "SHARE": False, "AXES": 1, "BLOCK": 1024, "ids_ptr": "*i64"},
    ),
    (
        "embedding",
        "_embed_kernel",
        {"SCALED": False, "SHARE": True, "AXES": 1, "BLOCK": 1024, "ids_ptr": "*i64"},
    ),
    ("exchange", "_sum_kernel", EXCHANGE | {"x_ptr": "*fp32", "residual_ptr": "*x"}),
    ("exchange", "_sum_kernel", EXCHANGE | {"bias_ptr": "*x", "residual_ptr": None}),
    ("exchange", "_gather_kernel", EXCHANGE | {"stride": None, "dtypes": WHOLE}),
    ("exchange", "_sum_kernel", EXCHANGE | ROW | {"x_ptr": "*fp32", "bias_ptr": None}),
    ("exchange", "_gather_kernel", EXCHANGE | ROW | {"SIZE": 8, "RANKS": 8, "dtypes": WHOLE}),
    ("rotary", "_rotary_append_kernel", PREFILL | NO_NORM),
    ("rotary", "_rotary_append_kernel", PREFILL | {"starts_ptr": None}),
    ("rotary", "_rotary_append_kernel", PREFILL | {"NORM_TURNED": True, "ROUNDED": True}),
    ("rotary", "_rotary_append_kernel", PREFILL | {"ends_ptr": "*i64"}),
    ("rotary", "_rotary_append_kernel", PREFILL | {"ends_ptr": "*i64", "STRETCH": 3.0}),
    ("head_norm", "_head_norm_kernel", HEADS),
    ("head_norm", "_head_norm_kernel", HEADS | OWN),
    ("rotary", "_rotary_append_kernel", PREFILL | GPTJ | {"LAST": 48, "HEADS": 4}),
    ("rotary", "_rotary_append_kernel", PREFILL | TABLE | {"dtypes": BFLOAT16}),
    ("rotary", "_rotary_append_kernel", PREFILL | FLOATS8 | dict.fromkeys(CACHE, "*u8")),
    ("rotary", "_rotary_append_kernel", PREFILL | TABLE | INTEGERS8 | dict.fromkeys(CACHE, "*i8")),
    product(1, 6144, 4096, **NORMED),
    product(1, 6144, 4096, HALF, **NORMED),
    product(1, 6144, 4096, WHOLE, **NORMED),
    product(1, 14336, 4096, **NORMED, **SWIGLU),
    product(1, 4096, 14336, **ADDED),
    product(1, 4096, 11008, WHOLE, **ADDED),
    product(1, 128256, 4096, **NORMED, y_ptr="*fp32"),
    product(1, 18432, 4608, **BIASED, ACTIVATION="relu"),
    product(1, 2304, 768, **BIASED),
    product(1, 4096, 1024, **BIASED, before_ptr="*x", normed_ptr="*x", ACTIVATION="gelu"),
    product(1, 4096, 4096, **ADDED, ROWS=2, PROGRAMS=264),
    product(2, 14336, 4096, **SWIGLU),
    product(2, 4096, 14336, **ADDED),
    product(8, 6144, 4096),
    product(8, 14336, 4096, **SWIGLU),
    product(64, 4096, 14336, **ADDED),
    product(64, 16384, 4096, bias_ptr="*x", ACTIVATION="gelu_tanh"),
    product(128, 4096, 4096, **ADDED),
    reading("int4", 4096, 16384, config=VECTOR),
    reading("int4", 4096, 4096, config=STREAM),
    reading("int8", 4096, 4096, 0, scales="float32"),
    reading(*FEW[0], **FEW[1]),
    MXFP4_ROW,
    reading("uint4", 4096, 14336, zeros=True, scales="float16", dtypes=WHOLE),
    reading("int8", 4096, 16384, 0, config=VECTOR._replace(rows=4, quads=64), scales="float32"),
    reading("fp8_e4m3", 4096, 14336, 128, scales="float32"),
    reading("fp4_e2m1", 28672, 4096, 16, gated=True, normed=True, scales="float8_e4m3fn"),
    reading("int4", 28672, 4096, count=8, gated=True),
    reading("int4", 4096, 14336, count=32),
    reading("int8", 4096, 14336, 0, count=64, scales="float32"),
    reading("fp8_e4m3", 28672, 4096, 0, count=128, gated=True, scales="float32"),
    reading("uint4", 6144, 4096, count=64, zeros=True),
    reading("int4", 4096, 4096, 64, count=128),
    reading("fp4_e2m1", 4096, 4096, 32, count=128, dtypes=HALF, scales="float8_e8m0fnu"),
    reading("fp4_e2m1", 4096, 14336, 16, count=8, scales="float8_e4m3fn"),
    decoding(1, 8, 4, 128),
    decoding(1, 32, 1, 64, ROTARY=0, frequencies_ptr=None, **ROUNDED),
    decoding(1, 16, 1, 256, ROTARY=64, INTERLEAVED=True),
    decoding(1, 8, 4, 128, q_norm_ptr="*x", k_norm_ptr="*x", sinks_ptr="*fp32"),
    decoding(32, 8, 4, 128, **FLOATS8, **TABLE, k_ptr="*u8", v_ptr="*u8"),
    decoding(32, 8, 4, 128, WINDOWED=True, **TABLE),
    decoding(1, 32, 1, 128, WHOLE, **FLOATS8, k_ptr="*u8", v_ptr="*u8"),
    (
        "latent",
        "_turn_latents_kernel",
        {"PAIRS": 32, "D": 192, "H": 16, "RANK": 512, "INTERLEAVED": True, "HEADS": 16}
        | {"HALF": 32, "BLOCK": 512, "ends_ptr": "*i64", "STRETCH": 3.0},
    ),
    latent(1, 16, "_absorb_kernel"),
    latent(1, 16, "_decode_latents_kernel"),
    latent(1, 16, "_decode_latents_kernel", WHOLE),
    latent(32, 16, "_decode_latents_kernel", **TABLE),
    latent(8, 16, "_decode_latents_kernel", SEVERAL=True, slots_ptr="*i64", **TABLE),
    latent(1, 16, "_join_latents_kernel"),
    decoding(1, 16, 1, 64, ROTARY=0, frequencies_ptr=None, relative_ptr="*x"),
    decoding(1, 20, 1, 64, ROTARY=0, frequencies_ptr=None, CROSS=True),
    attending(64, 128, CAUSAL=False, mask_ptr="*i1"),
    attending(64, 512, CAUSAL=False, segments_ptr="*i32", window="i32"),
    attending(128, 2048),
    attending(128, 2048, **POINTERS | TABLE | SCALES | {"k": "*i8", "v": "*i8"}),
    choosing("sampling", "_choose_kernel", STEP=True, FILTERS=False),
    choosing("sampling", "_choose_kernel", 50304, STEP=True, FILTERS=True),
    choosing("filters", "_best_kernel", STEP=True),
    choosing("filters", "_narrow_kernel", DIGIT=0),
    choosing("filters", "_narrow_kernel", DIGIT=1),
    choosing("filters", "_narrow_kernel", DIGIT=2),
]
# They differ from another one by a size or by one of several features: for `make test-slow`.
REPEATING: list[Variant] = [
    decoding(1, 4, 2, 256, SOFTCAP=True, WINDOWED=True),
    latent(32, 16, "_absorb_kernel"),
    latent(32, 16, "_join_latents_kernel"),
    decoding(1, 8, 4, 128, TWO_TABLES=True, STRETCH=3.0),
    attending(256, 2048, softcap="fp32", window="i32"),
    attending(64, 2048, relative_ptr="*x"),
    decoding(1, 8, 4, 128, WINDOWED=True, CHUNKED=True),
    attending(64, 2048, **ROUNDED),
    product(1, 14336, 4096, WHOLE, **NORMED, **SWIGLU),
    product(8, 4096, 14336, **ADDED),
    product(32, 14336, 4096, **SWIGLU),
    product(128, 4096, 1024, bias_ptr="*x", ACTIVATION="gelu"),
    reading("int8", 28672, 4096, 0, gated=True, normed=True, scales="float32"),
    reading("int4", 4096, 4096, 64, count=128, dtypes=HALF),
    reading("int4", 4096, 4096, 32, count=128),
    reading("fp4_e2m1", 4096, 4096, 32, count=128, scales="float8_e8m0fnu"),
    reading("fp4_e2m1", 4096, 4096, 32, count=32, scales="float8_e8m0fnu"),
    decoding(1, 32, 1, 80, ROTARY=32),
    decoding(1, 16, 1, 96, ROTARY=0, frequencies_ptr=None, slopes_ptr="*fp32"),
    decoding(1, 8, 4, 128, **TABLE),
    decoding(32, 8, 4, 128, **FLOATS8, **TABLE, k_ptr="*u8", v_ptr="*u8", WINDOWED=True),
    decoding(32, 8, 4, 128, **TABLE),
    decoding(32, 8, 4, 128),
    decoding(1, 32, 1, 128),
    decoding(1, 12, 1, 64, ROTARY=0, frequencies_ptr=None),
    decoding(1, 8, 4, 128, q_norm_ptr="*x", k_norm_ptr="*x", NORM_TURNED=True),
    decoding(1, 4, 2, 256, **INTEGERS8, k_ptr="*i8", v_ptr="*i8"),
    decoding(32, 16, 1, 64, ROTARY=0, frequencies_ptr=None, CROSS=True),
    latent(1, 128, "_decode_latents_kernel"),
    attending(80, 2048),
    attending(128, 2048, **POINTERS, **TABLE),
    attending(128, 2048, slopes_ptr="*fp32"),
    attending(128, 2048, **POINTERS | SCALES | {"k": "*u8", "v": "*u8"}),
    attending(64, 512, CAUSAL=False, mask_ptr="*i1", relative_ptr="*x"),
]
TYPES = {
    "types_ptr": "*i64",
    "positions_ptr": "*i64",
    "frequencies_ptr": "*fp32",
    "slots_ptr": "*i64",
    "starts_ptr": "*i64",
    "eps": "fp32",
    "scale": "fp32",
    "scaling": "fp32",
    **dict.fromkeys(("position_offset", "original"), "i32"),
    **dict.fromkeys(("beta", "period"), "fp32"),
    **{"table_ptr": None, "table_stride": None, "SIZE": 0},
    **dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "CODES")),
    "softcap": "fp32",
    "alibi_scale": "fp32",
    "rotary_scale": "fp32",
    **dict.fromkeys(("ahead", "window", "capacity", "tokens", "start", "pairs", "section"), "i32"),
    **dict.fromkeys(("words_ptr", "peers_ptr"), "*i64"),
    **dict.fromkeys(("state_ptr", "firsts_ptr"), "*i32"),
    **dict.fromkeys(("seen_ptr", "active_ptr", "noise_ptr"), "*u8"),
    **dict.fromkeys(("counters_ptr", "counter_ptr", "keys_ptr", "ids_ptr", "ints_ptr"), "*i32"),
    **dict.fromkeys(("masses_ptr", "scales_ptr"), "*fp64"),
}
INTEGERS = (
    *("eos", "new", "minimum", "last", "length", "lengths", "remaining", "seed_low", "seed_high"),
    *("return_index", "position", "step", "top_k", "coarse", "fine"),
)
FLOATS = (
    *("penalty", "temperature", "min_p", "top_p", "chunk_best", "row_best", "partial", "slopes"),
    *("sinks",),
)
TYPES |= {f"{name}_ptr": "*i64" for name in INTEGERS} | {f"{name}_ptr": "*fp32" for name in FLOATS}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
SCALARS = ("i1", "i32", "i64", "fp32", "i32/16", "i64/16")


def signature(names: list[str], constants: list[str], arguments: dict[str, Any], dtype: str) -> Any:
    """Types, constants and multiples of 16, each by parameter name."""
    types, values, aligned = {}, {}, []
    for name in names:
        default = "*x" if name.endswith("_ptr") else "i32/16"
        given = arguments.get(name, True if name == "PDL" else TYPES.get(name, default))
        is_type = isinstance(given, str) and (
            given.startswith(("*", "tensordesc")) or given in SCALARS
        )
        if name in constants or not is_type:
            types[name], values[name] = "constexpr", given
            continue
        types[name] = re.sub(r"(?<=[*<])x\b", dtype, given).removesuffix("/16")
        if given.startswith("*") or given.endswith("/16"):
            aligned.append(name)
    return types, values, aligned


def cases(rest: bool) -> list[tuple[Variant, str]]:
    """What `make test` compiles, each with its dtype, or the rest: float32, and REPEATING."""
    wanted = ("fp32",) if rest else ("bf16", "fp16")
    found = [
        (variant, dtype)
        for variant in VARIANTS
        for dtype in variant[2].get("dtypes", DTYPES)
        if dtype in wanted
    ]
    if rest:
        found += [(v, dtype) for v in REPEATING for dtype in v[2].get("dtypes", DTYPES)]
    only = os.environ.get("ONLY_KERNELS")
    return [case for case in found if only in (None, case[0][0])]


def compile_all(rest: bool) -> None:
    """Print what each of `cases` became, a line of JSON each: as it is recorded, or compiled."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for i, ((module_name, kernel_name, variant), dtype) in enumerate(cases(rest)):
        module = importlib.import_module(f"dualinfer.kernels.triton.{module_name}")
        kernel = getattr(module, kernel_name)
        options = {k: v for k, v in variant.items() if k in OPTIONS}
        constants = [p.name for p in kernel.params if p.is_constexpr]
        names = [p.name for p in kernel.params]
        unknown = set(variant) - set(names) - set(options) - {"dtypes"}
        assert not unknown, f"{kernel_name} has no parameter {unknown}"
        types, values, aligned = signature(names, constants, variant, dtype)
        source = ASTSource(
            fn=kernel,
            signature=types,
            constexprs={(names.index(n),): v for n, v in values.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        )
        what = triton.__version__, kernel.cache_key, types, values, aligned, options
        digest = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
        known = recorded.get(digest)
        found: dict[str, Any] = known or {}
        if not known or i % CHECKED == 0:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):  # of ptxas, by TRITON_DUMP_PTXAS_LOG
                made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            found = facts(log.getvalue(), made.asm["ptx"])
            found |= loop(made.asm["cubin"] if "TABLE" in variant else b"")
        line = {"kernel": kernel_name, "variant": repr(variant), "dtype": dtype, "known": known}
        print(json.dumps(line | {"digest": digest} | found))


def facts(log: str, ptx: str) -> dict[str, int]:
    """Numbers of ptxas' report, and of 16-byte loads."""
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert found and registers, f"nothing was compiled: {log}"
    wide = r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.\S+ .*, 0x10|cp\.async\.bulk\.tensor"
    return {
        "spilled": int(found[1]) + int(found[2]),
        "registers": int(registers[1]),
        "wide": len(re.findall(wide, ptx)),
        "fetched": ptx.partition("griddepcontrol.wait")[0].count("cp.async.bulk.prefetch.L2"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "fed": len(re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*\{", ptx)),  # by registers
        "eight": len(re.findall(r"wgmma.mma_async\S+\.(?:f32\.e4m3\.e4m3|s32\.s8\.s8)", ptx)),
    }


def loop(cubin: bytes) -> dict[str, Any]:
    """Of the longest loop: instructions, conversions of integers, moves of halves of words.

    Stores to shared memory, too, and the order of products of the matrix units (H), codes' loads
    (L) and barriers (B).
    """
    if not cubin:
        return {}
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    longest: list[str] = []
    for at, code in lines:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", code)
        if target and int(target[1], 16) < at:
            body = [own for place, own in lines if int(target[1], 16) <= place <= at]
            longest = max(longest, body, key=len)
    marks = {"HMMA": "H", "LDG.E.EF": "L", "BAR.SYNC": "B"}
    order = "".join(own for code in longest for mark, own in marks.items() if mark in code)
    conversions = sum("I2F" in code for code in longest)
    moves = sum(bool(re.search(r"STS\.U16|LDSM|SHFL\.IDX", code)) for code in longest)
    stored = sum(bool(re.search(r"\bSTS\b", code)) for code in longest)
    counts = {"loop": len(longest), "conversions": conversions, "moves": moves, "stored": stored}
    return counts | {"order": re.sub(r"(.)\1+", r"\1", order)}


def compiled(folder: Path, rest: bool = False) -> list[dict[str, Any]]:
    """What `compile_all` says in a process without the interpreter, with a cache of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    run = subprocess.run(
        [sys.executable, __file__, *(["rest"] if rest else [])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == len(cases(rest))
    return lines


def record() -> None:
    """Write to `RECORD` what became of every case; what is recorded is not compiled again."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [line for rest in (False, True) for line in compiled(Path(folder), rest)]
    beside = ("kernel", "variant", "dtype", "known", "digest")
    found = {line["digest"]: {k: v for k, v in line.items() if k not in beside} for line in lines}
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items()))
    RECORD.write_text(f"{{\n{text}\n}}\n")


def eight_bits(codes: str, gated: bool = False, scaled: bool = False, few: bool = False) -> Variant:
    """A product of codes with codes, as it is launched where nobody measured."""
    config = eight_bit.default_config(128 if few else 4096, 4096, gated, scaled, 132)
    kind = "*i8" if codes == "int8" else "*u8"
    return (
        "eight_bit_kernels",
        "tile_kernel",
        {
            **{"x_ptr": kind, "weight_ptr": kind, "x_scale_ptr": "*fp32", "scale_ptr": "*fp32"},
            **{"bias_ptr": None, "K": 4096, "CODES": codes, "SCALES": "float32"},
            **{"BLOCK": (128, 128) if scaled else (1, 0), "GROUPS": 32 if scaled else 0},
            **{"BLOCK_M": config.m, "BLOCK_N": config.n, "BLOCK_K": config.k, "GATED": gated},
            **{"STAGES": config.stages, "ACTIVATION": "silu" if gated else None},
            **{"num_warps": config.warps, "dtypes": BFLOAT16},
        },
    )


def delta_rule(keys: int, values: int, by_channel: bool, states: str = "float32") -> list[Variant]:
    """A token and a prompt of the delta rule with heads of 128 elements."""
    recording = operands.Recording()

    def new(*shape: int, dtype: str = "bfloat16") -> operands.Operand:
        return recording.operand(shape, dtype)

    channels, decays = (2 * keys + values) * 128, values * (128 if by_channel else 1)
    layer = delta_token.DeltaLayer(
        *(keys, values, 128, 128, channels + values * 128, new(channels, 4)),
        *(new(values, dtype="float32"), new(decays, dtype="float32"), new(128), 1e-6),
        gate="sigmoid" if by_channel else "silu",
    )
    width = channels + values * 129 + decays
    held = new(8, 3, channels), new(8, values, 128, 128, dtype=states)
    own = {"counters": new(4096, dtype="int32"), "pdl": True}
    delta_token.delta_token(new(8, width), layer, *held, new(8, dtype="bool"), **own)
    numbers = {name: new(1, dtype="int32") for name in ("slots", "lengths", "starts")}
    delta_prompt.delta_prompt(new(1, 8192, width), layer, *held, pdl=True, **numbers)
    return [written(launch) for launch in recording.launches]


def state_space(heads: int, groups: int, dim: int, size: int, normed: int) -> list[Variant]:
    """A token of Mamba-2."""
    recording = operands.Recording()

    def new(*shape: int, dtype: str = "bfloat16") -> operands.Operand:
        return recording.operand(shape, dtype)

    width, channels = heads * dim, heads * dim + 2 * groups * size
    layer = state_token.StateLayer(
        *(heads, dim, size, groups, new(channels, 4), new(channels)),
        *(new(heads, dtype="float32") for _ in range(3)),
        **{"norm": new(width), "normed": normed, "eps": 1e-5},
    )
    held = new(8, 3, channels), new(8, heads, dim, size, dtype="float32")
    own: dict[str, Any] = {"counters": new(4096, dtype="int32"), "pdl": True}
    for rows in (4, 8):  # a few, and many, for which programs are one warp
        x = new(rows, width + channels + heads)
        own["leaves_norm"] = rows == 4
        state_token.state_token(x, layer, *held, new(rows, dtype="bool"), **own)
    y = new(1, width, dtype="float32")  # of one slot, whose norm is left
    norm = linear.NormArguments("rms", new(width), None, 1e-5)
    linear.linear(y, new(width // 2, width), norm=norm, residual=new(1, width // 2), pdl=True)
    numbers = {name: new(1, dtype="int32") for name in ("slots", "lengths", "starts")}
    x = new(1, 8192, width + channels + heads)
    state_prompt.state_prompt(x, layer, *held, pdl=True, **numbers)
    return [written(launch) for launch in recording.launches]


def in_parts() -> list[Variant]:
    """Products of a single row whose width is read in parts: alike, exact ones, and with a rest."""
    recording = operands.Recording()

    def new(*shape: int, dtype: str = "bfloat16") -> operands.Operand:
        return recording.operand(shape, dtype)

    def norm(width: int, kind: str = "rms") -> linear.NormArguments:
        bias = new(width) if kind == "layer" else None
        return linear.NormArguments(kind, new(width), bias, 1e-5)

    config = linear.VectorConfig(1, 2, 8, 512)
    how: dict[str, Any] = {"norm": norm(2560), "before": new(1, 2560), "pdl": True}
    linear.linear(new(1, 2560), new(10576, 2560), config=config, **how)
    config = linear.VectorConfig(2, 8, 0, 4096)
    how = {"norm": norm(5120), "residual": new(1, 2560), "pdl": True}
    linear.linear(new(1, 5120, dtype="float32"), new(2560, 5120), config=config, **how)
    config = linear.VectorConfig(1, 2, 2, 512)
    how = {"norm": norm(1000, "layer"), "bias": new(2 * 5000), "gated": True, "pdl": True}
    linear.linear(new(1, 1000), new(2 * 5000, 1000), activation="silu", config=config, **how)
    return [written(launch) for launch in recording.launches]


def short_convolution(width: int) -> list[Variant]:
    """A token of LFM2."""
    recording = operands.Recording()
    x, past, taps = (
        recording.operand(shape, "bfloat16")
        for shape in ((8, 3 * width), (8, 2, width), (width, 3))
    )
    conv_token.conv_token(x, past, recording.operand((8,), "bool"), taps=taps, pdl=True)
    return [written(launch) for launch in recording.launches]


def scan(width: int, size: int) -> list[Variant]:
    """A token and a prompt of Mamba-1."""
    recording = operands.Recording()

    def new(*shape: int, dtype: str = "bfloat16") -> operands.Operand:
        return recording.operand(shape, dtype)

    wide = {"dtype": "float32"}
    layer = selective_scan.ScanLayer(
        new(width, **wide), new(width, size, **wide), new(width, **wide)
    )
    taps, past, state = (new(width, 4), new(width)), new(8, 3, width), new(8, width, size, **wide)
    moves = new(8, dtype="bool")
    x, read = new(8, 2 * width), [new(8, part) for part in (width, width, size, size)]
    how = {"taps": taps[0], "taps_bias": taps[1], "gated": False, "pdl": True}
    conv_token.conv_token(x, past, moves, **how)
    selective_scan.scan_token(x, *read, layer, state, moves, pdl=True)
    numbers = {name: new(1, dtype="int32") for name in ("slots", "starts")}
    x, read = new(1, 4096, 2 * width), [new(1, 4096, part) for part in (width, width, size, size)]
    selective_scan.convolve(x, *taps, past, **numbers, pdl=True)
    numbers["lengths"] = new(1, dtype="int32")
    selective_scan.scan(x, *read, layer, past, state, **numbers, pdl=True)
    return [written(launch) for launch in recording.launches]


VARIANTS += scan(8192, 16)
VARIANTS += in_parts()
VARIANTS += short_convolution(2048)
VARIANTS += state_space(80, 1, 64, 128, 5120)
VARIANTS += delta_rule(16, 32, by_channel=False)
REPEATING += delta_rule(32, 32, by_channel=True)
of_states = delta_rule(16, 32, by_channel=False, states="bfloat16")
REPEATING += [variant for variant in of_states if variant not in VARIANTS]
VARIANTS += [
    *choosing_experts(1, 2048, 128, 8, 768, router={"renormalized": True}),
    *choosing_experts(8, 4096, 8, 2, 14336, router={"score": "sparse", "jitter": 0.01}),
    *choosing_experts(1, 2880, 32, 4, 2880, biases=True, **GPT_OSS),
    *choosing_experts(1, 2048, 60, 4, 1408, shared=5632),
    *choosing_experts(2048, 2048, 128, 8, 768, router=GROUPS)[0:3],
]
MXFP4 = "fp4_e2m1", 32, "float8_e8m0fnu"
VARIANTS += [
    *choosing_experts(1, 2880, 32, 4, 2880, biases=True, codes=MXFP4, **GPT_OSS)[1:],
]
REPEATING += [
    *choosing_experts(1, 2048, 128, 8, 768, codes=INT4)[1:],
    *choosing_experts(64, 2880, 32, 4, 2880, biases=True, codes=MXFP4, **GPT_OSS)[3:6:2],
    *choosing_experts(512, 2880, 32, 4, 2880, biases=True, codes=MXFP4, **GPT_OSS)[3:4],
    *choosing_experts(1, 2048, 128, 8, 768, codes=INT8)[1:],
    *choosing_experts(64, 2048, 128, 8, 768, codes=INT4)[3:4],
    *choosing_experts(2048, 2880, 32, 4, 2880, biases=True, **GPT_OSS)[2:],
    *choosing_experts(1, 2048, 64, 8, 768, in_parts=True)[1:],
    *choosing_experts(8, 4096, 8, 2, 14336, in_parts=True)[1::3],
    *choosing_experts(2, 2880, 32, 4, 2880, biases=True, codes=MXFP4, in_parts=True, **GPT_OSS)[1:],
]
EIGHT = [
    eight_bits("fp8_e4m3", False, False),
    eight_bits("fp8_e4m3", True, True),
    eight_bits("int8", True),
    eight_bits("fp8_e4m3", True, few=True),
]
VARIANTS += EIGHT


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each variant becomes in 16 bits."""
    return compiled(tmp_path_factory.mktemp("triton"))


def check_record(report):
    """What is recorded is what compiling gives, and of this Triton everything is recorded."""
    checked = report[::CHECKED]
    assert [x["known"] for x in checked if x["known"]] == [
        {k: x[k] for k in x["known"]} for x in checked if x["known"]
    ]
    if version("triton") == TRITON and "ONLY_KERNELS" not in os.environ:
        missing = {line["kernel"] for line in report if not line["known"]}
        assert not missing, "Run: python -m tests.kernels.test_triton_lowering record"


def test_kernels_are_as_recorded(report):
    check_record(report)


def test_no_kernel_spills(report):
    """But for a few words where a launch limits registers, so that programs run side by side.

    And where a thread has all that there are.
    """
    for line in report:
        has_all = line["registers"] == 255 or "maxnreg" in line["variant"]
        assert line["spilled"] <= (96 if has_all else 0), line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_of_every_size_and_dtype_do_not_spill_and_load_16_bytes(tmp_path):
    """Those that the tests beside this one do not compile."""
    report = compiled(tmp_path, rest=True)
    check_record(report)
    test_no_kernel_spills(report)
    test_kernels_load_16_bytes_at_a_time(report)
    check_tiles_of_codes(report, least=4)


def test_kernels_load_16_bytes_at_a_time(report):
    latency_bound = ("_sum_kernel", "_gather_kernel")  # a few words a thread, polled for
    narrow = ("order_pairs_kernel", "codes_tile_kernel")  # chunks of few columns share a scale
    rest = [line for line in report if line["kernel"] not in (*latency_bound, *narrow)]
    assert not [line for line in rest if not line["wide"]]


def test_a_token_asks_for_keys_and_values_before_it_waits(report):
    lines = [line for line in report if line["kernel"] == "decode_attention_kernel"]
    found = [line["fetched"] for line in lines]
    assert 2 in found and found == [2 * ("'EARLY': True" in line["variant"]) for line in lines]


def test_codes_become_values_by_few_instructions(report):
    """Above five instructions a weight of 4 bits an H100 could not keep up with its memory."""
    lines = {line["variant"]: line for line in report if "loop" in line}

    def line(
        config: quantized.QuantizedConfig | None, codes: str, columns: int, scales: str
    ) -> Any:
        width = 16384 if isinstance(config, quantized.QuantizedVectorConfig) else 4096
        case = reading(codes, 4096, width, columns, config=config, scales=scales)
        return lines[repr(case[2])]

    # By the weights that a thread has of each turn.
    four, stream = line(VECTOR, *INT4), line(STREAM, *INT4)
    assert 0 < four["loop"] / 256 <= 4.0 and not four["conversions"]
    assert 0 < stream["loop"] / 64 <= 4.0 and not stream["conversions"]
    assert 0 < line(VECTOR._replace(rows=4, quads=64), *INT8)["loop"] / 128 <= 4.5
    assert 0 < line(None, *INT8)["loop"] / 64 <= 4.0


def test_tiles_of_codes_go_to_the_matrix_units_from_registers(report):
    check_tiles_of_codes(report, least=5)


def check_tiles_of_codes(report, least):
    tiles = [
        line for line in report if line["kernel"] == "tile_kernel" and "TABLE" in line["variant"]
    ]
    halves = [line for line in tiles if "'BLOCK': (1, 16)" not in line["variant"]]
    assert len(halves) >= least
    assert not [line for line in halves if not 0 < line["fed"] == line["wgmma"]]
    assert not [line for line in halves if line["stored"]]


def test_codes_are_the_matrix_units_operand_where_they_were_loaded(report):
    lines = {line["variant"]: line for line in report if line["kernel"] == "fragment_kernel"}
    # The results of a tile are written by other lanes than those that summed them.
    assert lines and max(line["moves"] for line in lines.values()) <= 8
    assert not [line for line in lines.values() if line["conversions"]]

    def each(case: Variant, weights: int) -> float:
        return lines[repr(case[2])]["loop"] / weights

    # By the weights that a thread has of two turns; the loop has the ends of blocks in it.
    assert each(reading(*FEW[0], **FEW[1]), 1024) <= 1.6
    assert each(MXFP4_ROW, 512) <= 2.8


def test_what_a_row_is_multiplied_with_next_is_asked_for_before_a_program_waits(report):
    """Each of two turns asks for its codes anew behind its own products, not at the loop's end."""
    lines = [
        line for line in report if line["kernel"] in ("fragment_kernel", "up_fragments_kernel")
    ]
    two = [line for line in lines if "'TWO': False" not in line["variant"] and line["loop"]]
    assert len(two) >= 3
    for line in two:
        assert re.search("L.*B.*H.*L.*B", line["order"]), line["variant"]


def test_attention_of_prompts_runs_on_the_matrix_units(report):
    lines = [line for line in report if line["kernel"] == "attention_kernel"]
    assert lines and not [line for line in lines if not line["wgmma"]]


def test_codes_are_multiplied_on_the_8_bit_matrix_units(report):
    variants = {repr(variant) for _, _, variant in EIGHT}
    lines = [line for line in report if line["variant"] in variants]
    assert len(lines) == len(EIGHT) and all(line["eight"] == line["wgmma"] > 0 for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        record()
    else:
        compile_all(rest=sys.argv[1:] == ["rest"])
