"""What torch does with quantized weights and with a cache in codes: SCHEMES and CACHE_CODES."""

from ....ops.cache_codes import CacheCodes
from ....ops.schemes import BlockArithmetic
from ..maths import MATHS

SCHEMES = BlockArithmetic(MATHS)
CACHE_CODES = CacheCodes(MATHS)
