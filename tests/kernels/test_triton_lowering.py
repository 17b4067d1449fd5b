"""Triton's kernels compile for an H100, without one, and ptxas reports no spilled registers.

Each line of VARIANTS is a kernel as some launch would specialise it. To add one, write the
module and the kernel, the arguments by name, and num_warps (num_stages) where they are not 4 (3).
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

DTYPES = ("fp32", "bf16", "fp16")
NORM = {"CENTER": False, "UNIT_OFFSET": False, "EARLY": True, "AXES": 1, "ROWS": 1, "BLOCK": 4096}
TILE = {"PAIRS": 64, "D": 128, "HEADS": 16, "HALF": 64, "REST": 0, "INTERLEAVED": False}
PREFILL = TILE | {"H": 32, "K": 8, "FIRST": 0, "LAST": 48, "UNIT_OFFSET": False}
NO_NORM = {"q_norm_ptr": None, "k_norm_ptr": None}
GPTJ = {"PAIRS": 32, "D": 256, "HALF": 32, "REST": 256, "INTERLEAVED": True, "H": 16, "K": 16}

# Arguments: "*x" is a pointer to the variant's dtype, "*i64" one to that type, a type a scalar that
# is no multiple of 16 ("i32/16" is one), anything else a constant. PDL is on. What is not named is
# a pointer if it ends in _ptr, else a multiple of 16.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
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
    ("activation", "_activation_kernel", {"KIND": "gelu", "GATED": True, "AXES": 2, "BLOCK": 2048}),
    ("embedding", "_embed_kernel", {"SCALED": True, "AXES": 1, "BLOCK": 1024, "ids_ptr": "*i64"}),
    ("rotary", "_rotary_kernel", TILE | {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}),
    ("rotary", "_rotary_append_kernel", PREFILL | NO_NORM),
    ("rotary", "_rotary_append_kernel", PREFILL | {"starts_ptr": None}),
    ("rotary", "_rotary_append_kernel", PREFILL | GPTJ | {"LAST": 48, "HEADS": 4}),
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
    "position_offset": "i32",
}
SCALARS = ("i1", "i32", "i64", "fp32", "i32/16", "i64/16")


def signature(names: list[str], constants: list[str], arguments: dict[str, Any], dtype: str) -> Any:
    """Types, constants and multiples of 16, each by parameter name."""
    types, values, aligned = {}, {}, []
    for name in names:
        default = "*x" if name.endswith("_ptr") else "i32/16"
        given = arguments.get(name, True if name == "PDL" else TYPES.get(name, default))
        is_type = isinstance(given, str) and (given.startswith("*") or given in SCALARS)
        if name in constants or not is_type:
            types[name], values[name] = "constexpr", given
            continue
        types[name] = given.replace("*x", f"*{dtype}").removesuffix("/16")
        if given.startswith("*") or given.endswith("/16"):
            aligned.append(name)
    return types, values, aligned


def compile_all() -> None:
    """Print what each variant became in each dtype, a line of JSON each."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for module_name, kernel_name, variant in VARIANTS:
        module = importlib.import_module(f"dualinfer.kernels.triton.{module_name}")
        kernel = getattr(module, kernel_name)
        options = {k: v for k, v in variant.items() if k in ("num_warps", "num_stages")}
        constants = [p.name for p in kernel.params if p.is_constexpr]
        names = [p.name for p in kernel.params]
        unknown = set(variant) - set(names) - set(options)
        assert not unknown, f"{kernel_name} has no parameter {unknown}"
        for dtype in DTYPES:
            types, values, aligned = signature(names, constants, variant, dtype)
            source = ASTSource(
                fn=kernel,
                signature=types,
                constexprs={(names.index(n),): v for n, v in values.items()},
                attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
            )
            log = io.StringIO()
            with contextlib.redirect_stdout(log):  # of ptxas, by TRITON_DUMP_PTXAS_LOG
                compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            print(
                json.dumps(
                    {"kernel": kernel_name, "variant": repr(variant), "dtype": dtype}
                    | facts(log.getvalue(), compiled.asm["ptx"])
                )
            )


def facts(log: str, ptx: str) -> dict[str, int]:
    """Numbers of ptxas' report, and of 16-byte loads."""
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert found and registers, log
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", ptx))
    return {"spilled": int(found[1]) + int(found[2]), "registers": int(registers[1]), "wide": wide}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process for all: without the interpreter, and with an empty cache of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_no_kernel_spills(report):
    assert len(report) == len(VARIANTS) * len(DTYPES)
    assert not [line for line in report if line["spilled"]]


def test_kernels_load_16_bytes_at_a_time(report):
    assert not [line for line in report if not line["wide"]]


if __name__ == "__main__":
    compile_all()
