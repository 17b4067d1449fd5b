"""JAX multiplies quantized weights by these functions."""

from ....ops.schemes import BlockArithmetic
from ..maths import MATHS

SCHEMES = BlockArithmetic(MATHS)
