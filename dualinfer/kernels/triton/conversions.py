"""Bytes of codes become 16-bit floats four at a time, in registers, by operations on bits.

Conversions of single elements run at a quarter of the rate of these.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
import triton
import triton.language as tl


@triton.constexpr_function
def _code(codes, half, float16):
    """PTX for four bytes of codes, or for nibble `half` of each.

    An integer is laid into the mantissa of 1024 (float16) or of 128 (bfloat16), which then is taken
    off. A float's bits move to their places, and the bias of its exponent is multiplied away.
    """
    kind = "f16x2" if float16 else "bf16x2"
    if codes.endswith("int4"):
        move = f"shr.u32 w, $2, {4 * half};"
        one, added, less = (
            (0x3C003C00, 0x64006400, 0xE400E400)
            if float16
            else (0x3F803F80, 0x43004300, 0xC300C300)
        )
        less += 0x00080008 if codes == "int4" else 0
        chosen = 0x4140, 0x4342  # two bytes, each in the lower end of a half
        steps = f"lop3.b32 $o, $o, 0x000F000F, {added}, 0xEA; "  # and, or
        steps += f"mov.b32 u, {one}; mov.b32 z, {less}; fma.rn.{kind} $o, $o, u, z; "
    else:
        places, factor = {
            "fp8_e4m3": ((1, 0x5C00), (4, 0x7B80)),
            "fp8_e5m2": ((0, 0x3C00), (3, 0x7780)),
            "fp4_e2m1": ((3, 0x7400), (6, 0x7E80)),
        }[codes][0 if float16 else 1]
        below = (0x7000 if codes == "fp4_e2m1" else 0x7F00) >> places
        move = f"shl.b32 w, $2, {4 - 4 * half};" if codes == "fp4_e2m1" else "mov.b32 w, $2;"
        chosen = 0x1404, 0x3424  # in the upper end
        steps = f"and.b32 u, $o, 0x80008000; shr.u32 $o, $o, {places}; "
        steps += f"lop3.b32 $o, $o, {below * 0x10001}, u, 0xEA; "
        if factor != 0x3C00:
            steps += f"mov.b32 u, {factor * 0x10001}; mul.rn.{kind} $o, $o, u; "
    code = "{ .reg .b32 w, u, z; " + move + " "
    for out in range(2):
        code += f"prmt.b32 ${out}, w, 0, {chosen[out]}; " + steps.replace("$o", f"${out}")
    return code + "}"


@triton.jit
def as_floats(b, HALF: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """What bytes of floats of 8 bits mean, or nibble HALF of each, exactly, in a 16-bit `dtype`.

    CODES are "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int4" (as code + 8) and "uint4".
    """
    CODE: tl.constexpr = _code(CODES, HALF, dtype == tl.float16)
    if dtype == tl.float16:
        y = tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [b], tl.float16, True, 4)
    else:
        y = tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [b], tl.bfloat16, True, 4)
    return y
