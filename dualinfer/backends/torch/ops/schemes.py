"""The arithmetic of quantized weights on torch."""

from ....ops.schemes import BlockArithmetic
from ..maths import MATHS

SCHEMES = BlockArithmetic(MATHS)
