"""Spellings of dtypes: strings as users write them, and the frameworks' own dtype objects."""

import re
from types import MappingProxyType
from typing import Any

DTYPES = MappingProxyType(
    {
        "float32": "float32",
        "float": "float32",
        "fp32": "float32",
        "float16": "float16",
        "half": "float16",
        "fp16": "float16",
        "bfloat16": "bfloat16",
        "bfloat": "bfloat16",
        "bf16": "bfloat16",
    }
)


def serving_dtype(own: str, default: str) -> tuple[str, str]:
    """The dtype to compute in for a checkpoint of the dtype `own` if nobody asks for one, and why.

    `default` is the contract's on the device: float16 on a GPU, float32 on a CPU.
    """
    if default == "float16" and own in ("float16", "bfloat16"):
        return own, "the checkpoint's own"
    return default, f"the checkpoint is {own}"


INT8 = "int8"  # as a dtype: weights of 8 bits


def asked_dtype(value: Any) -> str:
    """As `dtype_name`, and int8 in any spelling."""
    name = value.__name__ if isinstance(value, type) else str(value)
    return INT8 if _bare(name) == INT8 else dtype_name(value)


_CACHE_CODES = {
    **{"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"},
    **{"float8_e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "int8": "int8"},
}

_STATES = {"float32": None, "fp32": None, "bfloat16": "bfloat16", "bf16": "bfloat16"}


def cache_codes(value: Any) -> str | None:
    """`fp8_e4m3` or `int8` for any spelling; None for None. Raises ValueError."""
    if value is None:
        return None
    name = value.__name__ if isinstance(value, type) else str(value)
    codes = _CACHE_CODES.get(_bare(name))
    if codes is None:
        raise ValueError(
            'keys and values are kept as "fp8_e4m3" or "int8"; unset, in the dtype that the model '
            "computes in"
        )
    return codes


def states_in(value: Any) -> str | None:
    """`bfloat16` for any spelling, None for float32 and None. Raises ValueError."""
    if value is None:
        return None
    name = _bare(value.__name__ if isinstance(value, type) else str(value))
    if name not in _STATES:
        raise ValueError('states of recurrences are kept as "float32" or "bfloat16"')
    return _STATES[name]


def _bare(name: str) -> str:
    return re.sub(r"^(torch|numpy|np|jax\.numpy|jnp)\.", "", name.strip().lower())


def dtype_name(value: Any) -> str:
    """`float32`, `float16` or `bfloat16` for any spelling or framework's dtype object.

    Strings count in any case, with or without a prefix such as `torch.`. Raises ValueError.
    """
    name = value if isinstance(value, str) else str(value)
    if isinstance(value, type):  # numpy.float16, jax.numpy.bfloat16; Python's float has 64 bits
        name = "" if value.__module__ == "builtins" else value.__name__
    key = _bare(name)
    if key in DTYPES:
        return DTYPES[key]
    if re.fullmatch(r"u?int\d+", key):
        raise ValueError(
            "a model computes in float32, float16 or bfloat16; weights in int8 or int4 are asked "
            'for by `quant`, as quant="int4"'
        )
    raise ValueError("this dtype is not supported; use float32, float16 or bfloat16")
