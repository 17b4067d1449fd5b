"""Products of several rows by Mosaic GPU, as JAX simulates a GPU, against what they mean."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # noqa: E402

from dualinfer.kernels.pallas import tiles  # noqa: E402
from dualinfer.quantization import BlockScheme  # noqa: E402

from .cases import DTYPES, assert_close, normal  # noqa: E402
from .test_pallas import FORMS, coded, silu  # noqa: E402

FLOAT32, BFLOAT16 = DTYPES[:2]
CASES: dict[str, tuple[int, bool, BlockScheme | None]] = {
    "3 rows": (3, False, None),
    "16 rows, gated": (16, True, None),
    "130 rows, gated, in two turns": (130, True, None),
    "int8": (3, True, FORMS["int8"]),
    "int8, one row": (1, False, FORMS["int8"]),
    "int8 in blocks": (24, False, BlockScheme("int8", columns=128, scale_dtype="bfloat16")),
    "uint8 with zeros": (3, False, FORMS["int8 zeros"]),
    "fp8": (9, True, FORMS["fp8"]),
    "fp8 in blocks": (3, False, FORMS["fp8 blocks"]),
    "int4": (3, True, FORMS["int4"]),
    "int4, 80 rows": (80, False, FORMS["int4"]),
    "int4 in rows": (3, False, FORMS["int4 rows"]),
    "uint4 with zeros": (3, False, BlockScheme("uint4", columns=128, zeros=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_go_through_tiles_of_the_matrix(name):
    """Steps that warpgroups share, with all that goes with a product."""
    count, gated, scheme = CASES[name]
    width, features, parts = 768, 256 if scheme and scheme.rows > 1 else 64, 2 if gated else 1
    x, weight = (
        normal(i, n, width, dtype=BFLOAT16) for i, n in ((1, count), (2, parts * features))
    )
    bias, residual = (
        normal(i, *s, dtype=BFLOAT16) for i, s in ((3, (parts * features,)), (4, (count, features)))
    )
    matrix: Any = jnp.asarray(weight)
    if scheme is not None:
        matrix, weight = coded(scheme, weight.astype(np.float32))
        if scheme.columns and count > 64:  # values of blocks are rounded then
            weight = weight.astype(BFLOAT16)
    assert tiles.serves(count, matrix, gated, BFLOAT16)
    found = tiles.product(
        jnp.asarray(x),
        matrix,
        dtype=FLOAT32,
        bias=jnp.asarray(bias),
        activation=silu,
        gated=gated,
        residual=jnp.asarray(residual),
        interpret=InterpretGPUParams(detect_races=True),
    )
    wide = [a.astype(np.float64) for a in (x, weight, bias, residual)]
    y, *up = np.split(wide[0] @ wide[1].T + wide[2], parts, -1)
    wanted = y / (1 + np.exp(-y)) * (up[0] if gated else 1) + wide[3]
    assert_close(np.asarray(found), wanted, FLOAT32, length=width, roundings=2)
    assert not get_races().races_found
