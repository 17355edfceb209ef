"""Converts four- and eight-bit weights to the dtype of activations, exactly, in registers before a
product on tensor cores.

Each instruction per weight counts: a GPU reads four bits of weight in the time of three
instructions. So one instruction converts two weights, which needs assembler. It uses the bits of a
float: for a whole number n below 128, the bits 0x4300 | n are the bfloat16 128 + n; for n below
1,024, the bits 0x6400 | n are the float16 1,024 + n. Subtracting 128 or 1,024 gives n. Triton's
interpreter uses float32 and plain operations. R, C: shape of a tile of weight bytes. Knows bytes;
no matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.int_matrix import unpack_four

WIDE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# contents of a weight's byte: two int4, an int8, or an e4m3
FOUR, EIGHT, FLOAT8 = tl.constexpr(4), tl.constexpr(8), tl.constexpr(1)


def in_halves(packed: Tensor, turn: int) -> Tensor:
    """Repacks four-bit weights [N, K / 2] from the layout of kernels/int_matrix.py. In the result,
    of each 2 * turn inputs the first `turn` are the low nibbles of `turn` bytes, the others their
    high nibbles."""
    n, size = packed.shape
    low, high = unpack_four(packed).view(n, size // turn, 2, turn).unbind(2)
    return (low | high << 4).view(n, size)


# A register has four bytes that a thread holds. They need not be neighbours in the tile (on
# Hopper's tensor cores they come from two rows), so a result may depend only on its own byte.
def _four(magic: str, one: str, kind: str) -> tl.constexpr:
    """Returns assembler that converts the nibbles of the four bytes in register $4. The low nibbles
    go to $0 and $1, the high nibbles to $2 and $3, two 16-bit floats each, after $5 to $8 have been
    added to them. magic, one: two copies of the bits described above, and of 1.0. kind: PTX's name
    of the float type."""
    return tl.constexpr(f"""{{
        .reg .b32 m, o, a, b, c, d;
        mov.b32 m, {magic};
        mov.b32 o, {one};
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        lop3.b32 a, a, 0x000F000F, m, 0xEA;
        lop3.b32 b, b, 0x000F000F, m, 0xEA;
        lop3.b32 c, c, 0x000F000F, m, 0xEA;
        lop3.b32 d, d, 0x000F000F, m, 0xEA;
        fma.rn.{kind} a, a, o, $5;
        fma.rn.{kind} b, b, o, $6;
        fma.rn.{kind} c, c, o, $7;
        fma.rn.{kind} d, d, o, $8;
        mov.b32 $0, a;
        mov.b32 $1, b;
        mov.b32 $2, c;
        mov.b32 $3, d;
    }}""")


_FOUR_BF16 = _four("0x43004300", "0x3F803F80", "bf16x2")
_FOUR_F16 = _four("0x64006400", "0x3C003C00", "f16x2")
# Eight bits don't fit below 128 in bfloat16, so the top bit is handled separately: 128 or 256 is
# subtracted from 128 plus the number's lower seven bits.
_EIGHT_BF16 = tl.constexpr("""{
    .reg .b32 m, o, a, b, c, d;
    mov.b32 m, 0x43004300;
    mov.b32 o, 0xBF80BF80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, m, 0xEA;
    lop3.b32 d, b, 0x00800080, m, 0xEA;
    lop3.b32 a, a, 0x007F007F, m, 0xEA;
    lop3.b32 b, b, 0x007F007F, m, 0xEA;
    fma.rn.bf16x2 $0, c, o, a;
    fma.rn.bf16x2 $1, d, o, b;
}""")
_EIGHT_F16 = tl.constexpr("""{
    .reg .b32 l, o, a, b;
    mov.b32 l, 0xE480E480;
    mov.b32 o, 0x3C003C00;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    xor.b32 a, a, 0x64806480;
    xor.b32 b, b, 0x64806480;
    fma.rn.f16x2 $0, a, o, l;
    fma.rn.f16x2 $1, b, o, l;
}""")


# e4m3's exponent and fraction are shifted to the low end of the wider exponent field. The float is
# then too small by 2**120 (float16: 2**8), also for subnormals, and is multiplied by that factor.
def _float8(by: int, up: str, kind: str) -> tl.constexpr:
    """Returns assembler that converts the four e4m3 numbers in register $2 to 16-bit floats in $0
    and $1. by: bits by which exponent and fraction are shifted. up: the factor of the result,
    twice. kind: PTX's name of the float type."""
    return tl.constexpr(f"""{{
        .reg .b32 u, z, a, b, c, d;
        mov.b32 u, {up};
        mov.b32 z, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 c, a, 0x7F007F00;
        and.b32 d, b, 0x7F007F00;
        shr.u32 c, c, {by};
        shr.u32 d, d, {by};
        lop3.b32 c, a, 0x80008000, c, 0xEA;
        lop3.b32 d, b, 0x80008000, d, 0xEA;
        fma.rn.{kind} $0, c, u, z;
        fma.rn.{kind} $1, d, u, z;
    }}""")


_FLOAT8_BF16 = _float8(4, "0x7B807B80", "bf16x2")
_FLOAT8_F16 = _float8(1, "0x5C005C00", "f16x2")


def _fp4(by: int, mask: str, kind: str) -> tl.constexpr:
    """Returns assembler that converts the e2m1 nibbles of the four bytes in register $4, by the
    same method as `_float8`, and multiplies them by factors. Low nibbles go to $0 and $1, their
    factors are $5 and $6. High nibbles go to $2 and $3, their factors are $7 and $8. by, mask:
    shift, and bits of exponent and fraction."""

    def halves(into: str, more: str, factor: str, other: str) -> str:
        """Returns assembler that converts the nibbles that are the top four bits of the 16-bit
        halves of registers a and b."""
        return f"""
        shr.u32 c, a, {by};
        shr.u32 d, b, {by};
        and.b32 c, c, {mask};
        and.b32 d, d, {mask};
        lop3.b32 c, a, z, c, 0xEA;
        lop3.b32 d, b, z, d, 0xEA;
        fma.rn.{kind} {into}, c, {factor}, z;
        fma.rn.{kind} {more}, d, {other}, z;"""

    return tl.constexpr(f"""{{
        .reg .b32 z, a, b, c, d;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, 0, 0x1404;
        prmt.b32 b, $4, 0, 0x3424;{halves("$2", "$3", "$7", "$8")}
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;{halves("$0", "$1", "$5", "$6")}
    }}""")


_FP4_BF16 = _fp4(6, "0x01C001C0", "bf16x2")
_FP4_F16 = _fp4(3, "0x0E000E00", "f16x2")


@triton.jit
def widen_fp4(w, scale, more_scale, kind: tl.constexpr):
    """Returns the e2m1 numbers in the low nibbles of w times `scale`, and those in the high nibbles
    times `more_scale`, each [R, C] of dtype `kind`. w: [R, C] uint8. scale, more_scale: [R, C]
    int32, whose lowest byte is a scale in the format of kernels/triton/linear/fp4_scales.py."""
    low_by, high_by = _fp4_scale(scale, kind), _fp4_scale(more_scale, kind)
    if kind == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _FP4_BF16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [w, low_by, high_by],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif kind == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _FP4_F16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [w, low_by, high_by],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = _fp4_plain(w, low_by), _fp4_plain(w >> 4, high_by)
    return low, high


@triton.jit
def _fp4_scale(octets, kind: tl.constexpr):
    """Converts scale bytes (the lowest bytes of int32 `octets`) to dtype `kind`. In bfloat16 the
    result is the scale times 2 ** 126, in float16 times 2 ** 14: the assembler of `_fp4` makes e2m1
    numbers too small by that factor."""
    if kind == tl.bfloat16:
        by = (((octets & 255) << 4) | 0x7000).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif kind == tl.float16:
        by = ((octets & 255) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        by = (((octets & 255) << 20) + (98 << 23)).to(tl.float32, bitcast=True)
    return by


@triton.jit
def _fp4_plain(octets, by):
    """Returns the e2m1 numbers in the low nibbles of `octets` times `by`, in float32, without
    assembler."""
    octets = octets.to(tl.int32)
    bits = ((octets & 8) << 28) | ((octets & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * by


@triton.jit
def widen_four(w, zero, more_zero, kind: tl.constexpr):
    """Returns the unsigned low nibbles of w minus `zero`, and the high nibbles minus `more_zero`,
    each [R, C] of dtype `kind`. w: [R, C] uint8. zero, more_zero: zero points, [R, 1] whole numbers
    in float32."""
    if kind == tl.bfloat16:
        less, more_less = _less(zero, 128.0, w, kind), _less(more_zero, 128.0, w, kind)
        low, high = tl.inline_asm_elementwise(
            _FOUR_BF16,
            "=r,=r,=r,=r,r,r,r,r,r",
            [w, less, more_less],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif kind == tl.float16:
        less, more_less = _less(zero, 1024.0, w, kind), _less(more_zero, 1024.0, w, kind)
        low, high = tl.inline_asm_elementwise(
            _FOUR_F16,
            "=r,=r,=r,=r,r,r,r,r,r",
            [w, less, more_less],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = (w & 15).to(tl.float32) - zero, (w >> 4).to(tl.float32) - more_zero
    return low, high


@triton.jit
def _less(zero, magic: tl.constexpr, w, kind: tl.constexpr):
    """Returns -magic - zero in dtype `kind`, broadcast to the shape of w."""
    return (-magic - zero).to(kind).broadcast_to(w.shape)


@triton.jit
def widen_eight(w, what: tl.constexpr, kind: tl.constexpr):
    """Returns the bytes w [R, C] as numbers of dtype `kind`. what: FLOAT8: the bytes are e4m3; else
    int8."""
    if kind == tl.bfloat16:
        program: tl.constexpr = _FLOAT8_BF16 if what == FLOAT8 else _EIGHT_BF16
        wide = tl.inline_asm_elementwise(
            program, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif kind == tl.float16:
        program: tl.constexpr = _FLOAT8_F16 if what == FLOAT8 else _EIGHT_F16
        wide = tl.inline_asm_elementwise(
            program, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4
        )
    elif what == FLOAT8:
        wide = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = w.to(tl.int8, bitcast=True).to(tl.float32)
    return wide
