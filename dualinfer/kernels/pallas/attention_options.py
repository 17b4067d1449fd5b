"""What attention of whole prompts is told, and whether it fits."""

from typing import Any, NamedTuple

import jax

LARGEST_HEAD = 256
_FLOATS = ("float32", "bfloat16", "float16")
_INTEGERS = ("int32", "int64")


class Options(NamedTuple):
    """What `reference.attention` is told beside its arrays, and `lengths`; [B, T] where not said.

    `mask` is bool, `segments` and `positions` are int; `alibi` and `sinks` float32 [H]. Keys at or
    beyond `lengths` int [B] are hidden.
    """

    scale: float
    causal: bool
    window: int | None = None
    mask: jax.Array | None = None
    segments: jax.Array | None = None
    alibi: jax.Array | None = None
    positions: jax.Array | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    lengths: jax.Array | None = None

    def check(self, batch: int, tokens: int, heads: int) -> None:
        """Raise ValueError for what does not fit B, T and H."""
        for name in ("scale", "window", "softcap"):
            x = getattr(self, name)
            if x is not None and not x > 0:
                raise ValueError(f"{name}={x}: expected a positive number, or None for no {name}.")
        _check_option("mask", self.mask, (batch, tokens), ("bool",))
        _check_option("segments", self.segments, (batch, tokens), _INTEGERS)
        _check_option("positions", self.positions, (batch, tokens), _INTEGERS)
        _check_option("alibi", self.alibi, (heads,), _FLOATS[:1])
        _check_option("sinks", self.sinks, (heads,), _FLOATS[:1])
        _check_option("lengths", self.lengths, (batch,), _INTEGERS)
        if self.positions is not None and self.alibi is None:
            raise ValueError("positions serve alibi only; pass its slopes, or leave positions out.")


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError for shapes or dtypes that are none of attention's."""
    batch, tokens, heads, dim = q.shape
    fits = k.shape == v.shape and k.ndim == 4 and k.shape[:2] == (batch, tokens)
    if not fits or k.shape[3] != dim or heads % k.shape[2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected [B, T, H, D] and twice "
            "[B, T, K, D], with H a multiple of K."
        )
    if dim > LARGEST_HEAD:
        raise ValueError(f"head_dim {dim}: at most {LARGEST_HEAD}. Use XLA's attention for it.")
    if str(q.dtype) not in _FLOATS or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: expected one of {_FLOATS}.")


def _check_option(
    name: str, x: jax.Array | None, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    if x is None:
        return
    if x.shape != shape:
        raise ValueError(f"{name} {x.shape}: expected {list(shape)}.")
    if str(x.dtype) not in dtypes:
        raise ValueError(f"{name} is {x.dtype}; expected {' or '.join(dtypes)}.")
