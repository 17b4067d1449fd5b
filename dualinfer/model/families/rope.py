"""Rotary frequencies from HF's rope_parameters: default, linear, dynamic, llama3, yarn, longrope.

Formulas: transformers `modeling_rope_utils.py`; llama3 from Meta's Llama 3.1 reference code; yarn
from arXiv:2309.00071. Computed in float32, in HF's order of operations.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...blocks.long_rope import LongRope
from ...blocks.stretched_rope import StretchedRope
from ...errors import ModelError, UnservedError, shown
from ..spec import Rope
from .fields import is_positive

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
}
ORIGINAL = "original_max_position_embeddings"
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # HF takes 0 for not given
_MOST = 2**31 - 1  # positions are 32-bit numbers
_SHOWN, _LONGEST = 8, 80  # names in a message, and letters of each


def make_rope(
    parameters: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    interleaved: bool = False,
) -> Rope:
    """The rotary embedding of one head, or of the `head_dim` elements at its start that rotate.

    Raises UnservedError that names a rope_type or a parameter that is not honoured, and ModelError
    for a bad value.
    """
    if not isinstance(parameters, Mapping):
        raise ModelError(
            f"config.json has rope_parameters={shown(parameters)}; expected an object."
        )
    kind = kind_of(parameters)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise (UnservedError if isinstance(kind, str) else ModelError)(
            f"config.json has rope_type={shown(kind)}, which dualinfer does not honour; "
            f"ignoring it would give wrong text. Honoured: {', '.join(_KEYS)}."
        )
    keys = {k for k, v in parameters.items() if v is not None}
    unknown = keys - _KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    # HF writes a length here for every scaled kind, and these kinds ignore it.
    unknown -= {"default": {ORIGINAL, "factor"}, "dynamic": {ORIGINAL}}.get(kind, set())
    unknown.discard("finetuned")  # a remark of the first yarn checkpoints
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        unknown.add("partial_rotary_factor")
    if unknown:
        names = ", ".join(str(name)[:_LONGEST] for name in sorted(unknown)[:_SHOWN])
        raise UnservedError(
            f"config.json has rope_parameters {names} with rope_type={kind!r}, which dualinfer "
            "does not honour; ignoring them could give wrong text."
        )
    if head_dim % 2:
        raise ModelError(f"head_dim={head_dim} is odd; rotary position embedding needs pairs.")
    needed = {
        "linear": {"factor"},
        "dynamic": {"factor"},
        "llama3": _KEYS["llama3"] - {ORIGINAL},
        "longrope": {"short_factor", "long_factor"},
    }.get(kind, set())
    for name in sorted({"rope_theta", *needed} - keys):
        raise ModelError(f"config.json has rope_parameters without {name}; {kind!r} needs it.")
    for name in sorted(keys & (_KEYS[kind] | {"rope_theta"})):
        _check(name, parameters[name])
    if kind == "dynamic" and head_dim < 4:
        raise ModelError(f"rope_type='dynamic' turns {head_dim} elements of a head; it needs 4.")
    if kind == "longrope":
        _check_factors(parameters, head_dim)
    theta = float(parameters["rope_theta"])
    inv_freq, scaling = np.empty(0), math.nan
    try:
        with np.errstate(all="ignore"):
            inv_freq, scaling = _frequencies(kind, theta, parameters, head_dim, max_positions)
            fits = bool(np.isfinite([*inv_freq, np.float32(scaling)]).all())
    except ArithmeticError:
        fits = False
    if not fits:
        raise ModelError(
            f"config.json has rope_parameters={shown(dict(parameters))}, which give frequencies "
            "that are no finite numbers. Take those of the model's maker."
        )
    rope = Rope(tuple(float(f) for f in inv_freq), float(scaling), interleaved)
    if kind == "dynamic":
        stretched = StretchedRope(max_positions, float(parameters["factor"]))
        return replace(rope, by_length=stretched)
    if kind != "longrope" or list(parameters["short_factor"]) == list(parameters["long_factor"]):
        return rope
    short = {**parameters, "long_factor": parameters["short_factor"]}
    inv_freq, _ = _frequencies(kind, theta, short, head_dim, max_positions)
    long = LongRope(int(parameters[ORIGINAL]), rope.inv_freq)
    return replace(rope, inv_freq=tuple(map(float, inv_freq)), by_length=long)


def kind_of(parameters: Mapping[str, Any]) -> Any:
    """What HF calls a kind of rotary embedding, as its parameters name it."""
    named = (parameters.get(name) for name in ("rope_type", "type"))
    return next((name for name in named if name is not None), "default")


def _frequencies(
    kind: str, theta: float, parameters: Mapping[str, Any], dim: int, max_positions: int
) -> tuple[np.ndarray, float]:
    """Angular frequencies float32 [dim / 2], and the factor on cos and sin."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # NumPy's float32 power is a unit off torch's in places, and a position multiplies the error.
    periods = (theta ** exponents.astype(np.float64)).astype(np.float32)
    inv_freq, scaling = np.float32(1.0) / periods, 1.0
    if kind == "linear":
        inv_freq = inv_freq / np.float32(parameters["factor"])
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, parameters, max_positions)
    elif kind == "yarn":
        inv_freq, scaling = _yarn(periods, theta, parameters, dim, max_positions)
    elif kind == "longrope":
        factors = np.array(parameters["long_factor"], np.float32)
        inv_freq = np.float32(1.0) / (factors * periods)
        scaling = _longrope_scaling(parameters, max_positions)
    return inv_freq.astype(np.float32), scaling


def _check(name: str, value: Any) -> None:
    """Raise ModelError unless a parameter is a number that its formula can take."""
    if name in ("short_factor", "long_factor"):
        fits = isinstance(value, list | tuple) and all(map(is_positive, value))
        expected = "a list of positive numbers"
    elif name == "truncate":
        fits, expected = isinstance(value, bool), "true or false"
    else:
        zero = name in _MAY_BE_ZERO and value == 0 and not isinstance(value, bool)
        fits, expected = zero or is_positive(value), "a positive number"
    if not fits:
        raise ModelError(
            f"config.json has rope_parameters with {name}={shown(value)}; expected {expected}."
        )


def _longrope_scaling(parameters: Mapping[str, Any], max_positions: int) -> float:
    """The factor on cos and sin."""
    given, original = parameters.get("attention_factor"), parameters.get(ORIGINAL)
    if given is not None or original is None:
        return float(given or 1.0)
    factor = parameters.get("factor") or max_positions / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _check_factors(parameters: Mapping[str, Any], dim: int) -> None:
    """Raise unless each frequency has its factors, and what else these need is there."""
    short, long = parameters["short_factor"], parameters["long_factor"]
    differ, original = list(short) != list(long), parameters.get(ORIGINAL)
    needs = differ or parameters.get("attention_factor") is None
    if needs and (not isinstance(original, int) or isinstance(original, bool) or original < 2):
        raise ModelError(
            f"config.json has rope_parameters with {ORIGINAL}={shown(original)}; longrope needs "
            "an int above 1."
        )
    if {len(long), len(short)} != {dim // 2}:
        raise ModelError(
            f"config.json has rope_parameters with {len(short)} and {len(long)} factors; expected "
            f"{dim // 2}."
        )


def ropes_by_kind(ropes: Any, kinds: Iterable[str]) -> Mapping[str, Any]:
    """HF's rope_parameters, where each kind of layer has its own.

    A kind's `truncate` is true whatever it says: HF looks for it beside the kinds.
    """
    missing = set(kinds)
    if not isinstance(ropes, Mapping) or missing - ropes.keys():
        raise ModelError(
            f"config.json has rope_parameters={shown(ropes)}; expected an object with one for each "
            f"of {', '.join(sorted(missing))}."
        )
    truncated = {k: own for k, own in ropes.items() if isinstance(own, Mapping)}
    truncated = {k: {**own, "truncate": True} for k, own in truncated.items() if "truncate" in own}
    return {**ropes, **truncated}


def without(parameters: Any, *names: str) -> Any:
    """HF's rope_parameters without some of them."""
    if not isinstance(parameters, Mapping):
        return parameters
    return {**parameters, **dict.fromkeys(names)}


def rotary_size(parameters: Any, head_dim: int) -> int:
    """Elements of a head that rotate, by the `partial_rotary_factor` of HF's rope_parameters."""
    if not isinstance(parameters, Mapping):
        raise ModelError(
            f"config.json has rope_parameters={shown(parameters)}; expected an object."
        )
    factor = parameters.get("partial_rotary_factor")
    factor = 1.0 if factor is None else factor
    if not is_positive(factor) or factor > 1:
        raise ModelError(
            f"config.json has partial_rotary_factor={shown(factor)}; expected a number up to 1."
        )
    size = int(head_dim * factor)
    if factor != 1 and (size < 2 or size % 2):
        raise ModelError(
            f"config.json has partial_rotary_factor={factor}, which rotates {size} of the "
            f"{head_dim} elements of a head; expected an even number."
        )
    return size


def reach(parameters: Mapping[str, Any], max_positions: int) -> int:
    """Positions that a model's rotary embedding is made for.

    HF's max_position_embeddings is the length before scaling for linear and dynamic, and may be
    for yarn.
    """
    kind, factor = parameters.get("rope_type"), parameters.get("factor") or 1
    if kind in ("linear", "dynamic"):
        return max(1, round(min(max_positions * factor, _MOST)))
    if kind == "yarn":
        original = parameters.get("original_max_position_embeddings") or max_positions
        return max(max_positions, round(min(original * factor, _MOST)))
    return max_positions


def _llama3(inv_freq: np.ndarray, parameters: Mapping[str, Any], max_positions: int) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = np.float32(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    if low > high:
        raise ModelError(
            f"config.json has rope_parameters with low_freq_factor={low} and "
            f"high_freq_factor={high}; expected the first not above the second."
        )
    original = parameters.get("original_max_position_embeddings") or max_positions
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = np.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(between, blended, stretched)


def _yarn(
    periods: np.ndarray,
    theta: float,
    parameters: Mapping[str, Any],
    dim: int,
    max_positions: int,
) -> tuple[np.ndarray, float]:
    """Frequencies between interpolation and extrapolation, and the factor on cos and sin."""
    original = parameters.get("original_max_position_embeddings") or max_positions
    factor = parameters.get("factor") or max_positions / original
    if theta <= 1:
        raise ModelError(
            f"config.json has rope_parameters with rope_theta={theta}; yarn needs one above 1."
        )

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    scaling = parameters.get("attention_factor")
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scaling is None:
        scaling = magnitude(factor)
        if mscale and mscale_all:
            scaling = magnitude(factor, mscale) / magnitude(factor, mscale_all)

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        if not turns:
            raise ZeroDivisionError("numbers too far apart for a float")
        return dim * math.log(turns) / (2 * math.log(theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    interpolated = np.float32(1.0) / (np.float32(factor) * periods)
    return interpolated * (1 - keep) + (np.float32(1.0) / periods) * keep, float(scaling)
