"""Codes become 16-bit floats several at a time, in registers, by operations on bits.

Conversions of single elements run at a quarter of the rate of these.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
import triton
import triton.language as tl


@triton.constexpr_function
def _code(codes, part, float16, wide):
    """PTX that makes floats of four bytes, or of nibble `part` of each; of two uint16s if `wide`.

    An integer is laid into the mantissa of 1024 (float16) or of 128 (bfloat16), which then is taken
    off. A float's bits move to their places, and the bias of its exponent is multiplied away.
    """
    kind = "f16x2" if float16 else "bf16x2"
    one = 0x3C003C00 if float16 else 0x3F803F80
    lower, upper = (0x4140, 0x4342), (0x1404, 0x3424)  # two bytes, each in an end of a half
    if codes.endswith("int4"):
        chosen, shift = lower, f"shr.u32 w, $i, {4 * part}; "
        added, less = (0x64006400, 0xE400E400) if float16 else (0x43004300, 0xC300C300)
        less += 0x00080008 if codes == "int4" else 0
        steps = f"lop3.b32 $o, $o, 0x000F000F, {added}, 0xEA; "  # and, or
        steps += f"mov.b32 u, {one}; mov.b32 z, {less}; fma.rn.{kind} $o, $o, u, z; "
    elif codes == "int8":
        chosen, shift = lower, "mov.b32 w, $i; "
        if float16:
            steps = "lop3.b32 $o, $o, 0x00800080, 0x64006400, 0xBE; mov.b32 u, 0xE480E480; "
        else:  # seven bits in 128's mantissa; less 128, or 256 where the sign is set
            steps = "lop3.b32 u, $o, 0x00800080, 0xC300C300, 0xEA; "
            steps += "lop3.b32 $o, $o, 0x007F007F, 0x43004300, 0xEA; "
        steps += f"mov.b32 z, {one}; fma.rn.{kind} $o, $o, z, u; "
    else:
        places, factor = {
            "fp8_e4m3": ((1, 0x5C00), (4, 0x7B80)),
            "fp8_e5m2": ((0, 0x3C00), (3, 0x7780)),
            "fp4_e2m1": ((3, 0x7400), (6, 0x7E80)),
        }[codes][0 if float16 else 1]
        four = codes == "fp4_e2m1"
        below = (0x7000 if four else 0x7F00) >> places
        chosen = upper
        shift = f"shl.b32 w, $i, {(12 if wide else 4) - 4 * part if four else 0}; "
        steps = f"and.b32 u, $o, 0x80008000; shr.u32 $o, $o, {places}; "
        steps += f"lop3.b32 $o, $o, {below * 0x10001}, u, 0xEA; "
        if factor != 0x3C00:
            steps += f"mov.b32 u, {factor * 0x10001}; mul.rn.{kind} $o, $o, u; "
    outs = 1 if wide else 2
    code = "{ .reg .b32 w, u, z; " + shift.replace("$i", f"${outs}")
    for out in range(outs):
        move = "mov.b32 $o, w; " if wide else f"prmt.b32 $o, w, 0, {chosen[out]}; "
        code += (move + steps).replace("$o", f"${out}")
    return code + "}"


@triton.jit
def as_floats(w, PART: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """What bytes mean, or nibble PART of bytes or of uint16s, exactly, in a 16-bit `dtype`.

    CODES are "int8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int4" (as code + 8) and "uint4".
    """
    CODE: tl.constexpr = _code(CODES, PART, dtype == tl.float16, w.dtype == tl.uint16)
    HOW: tl.constexpr = "=&r,r" if w.dtype == tl.uint16 else "=&r,=&r,r"
    COUNT: tl.constexpr = 2 if w.dtype == tl.uint16 else 4
    if dtype == tl.float16:
        y = tl.inline_asm_elementwise(CODE, HOW, [w], tl.float16, True, COUNT)
    else:
        y = tl.inline_asm_elementwise(CODE, HOW, [w], tl.bfloat16, True, COUNT)
    return y
