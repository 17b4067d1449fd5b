"""What torch does with quantized weights."""

from ....ops.schemes import BlockArithmetic
from ..maths import MATHS

SCHEMES = BlockArithmetic(MATHS)
