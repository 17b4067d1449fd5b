"""Inputs of a dtype, and the comparison with the reference."""

import ml_dtypes
import numpy as np

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]

# Finite, since 0 * NaN is NaN: a dense softmax multiplies what it hides by zero.
GARBAGE = 30000.0


def normal(seed: int, *shape: int, dtype: np.dtype, scale: float = 1.0) -> np.ndarray:
    """Normal numbers, already rounded to `dtype`: the reference sees what the op sees."""
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return x.astype(dtype)


def unit(dtype: np.dtype) -> float:
    """Greatest relative error of one rounding."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def assert_close(
    actual: np.ndarray,
    expected: np.ndarray,
    dtype: np.dtype,
    *,
    length: int = 1,
    roundings: int = 1,
    scale: np.ndarray | float | None = None,
) -> None:
    """`actual` has `dtype` and is as near to `expected` as float32 sums over `length` come.

    `roundings` to `dtype` may lie on the way. Errors are relative: the RMS one to the RMS, each
    one to `scale`, by default its own size plus the RMS.
    """
    assert actual.dtype == dtype, f"dtype {actual.dtype}, expected {dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), "the reference is not finite"
    found, wanted = actual.astype(np.float64), expected.astype(np.float64)
    wrong = int((~np.isfinite(found)).sum())
    assert not wrong, f"{wrong} of {found.size} values are not finite"
    error, size = np.abs(found - wanted), np.abs(wanted)
    norm = float(np.sqrt((wanted**2).mean()))
    rms = float(np.sqrt((error**2).mean())) / max(norm, 1e-30)
    worst = float((error / np.maximum(size + norm if scale is None else scale, 1e-30)).max())
    # Float32 sums err by about sqrt(length) units; the functions around them by a few.
    allowed = roundings * unit(dtype) + (4 + 2 * length**0.5) * unit(np.dtype(np.float32))
    message = (
        f"relative RMS {rms:.2e} (allowed {allowed:.2e}), "
        f"max error {error.max():.2e}, relative {worst:.2e} (allowed {4 * allowed:.2e})"
    )
    assert (rms <= allowed or scale is not None) and worst <= 4 * allowed, message
