"""Widening of four- and eight-bit weights to the dtype of rows, exactly, on their way to tensor
cores.

Each instruction per weight counts: a GPU reads four bits of weight in the time of three
instructions. So one instruction widens two weights, which needs assembler: a whole number n below
128 is bfloat16's 0x4300 | n minus 128, below 1,024 float16's 0x6400 | n minus 1,024. The
interpreter's dtype is float32, which is widened plainly. Knows bytes; no matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.int_matrix import unpack_four

WIDE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
FOUR, EIGHT, FLOAT8 = tl.constexpr(4), tl.constexpr(8), tl.constexpr(1)  # contents of a byte


def in_halves(packed: Tensor, turn: int) -> Tensor:
    """Repacks [N, K / 2] from the layout of kernels/int_matrix.py: of every 2 * turn neighbours
    along K the first half is in the low halves of `turn` bytes, the second in the high halves."""
    n, size = packed.shape
    low, high = unpack_four(packed).view(n, size // turn, 2, turn).unbind(2)
    return (low | high << 4).view(n, size)


# An instruction's register holds four numbers of a thread, which need not be neighbours (on
# Hopper's tensor cores they are in two rows): a result may depend only on its own byte.
def _four(magic: str, one: str, kind: str) -> tl.constexpr:
    """Returns assembler. $4: four bytes; $5 to $8: added to $0 to $3 -> numbers of the low halves
    in $0 and $1, of the high halves in $2 and $3."""
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
# bfloat16 has no room for 8 bits after 128, so the upper bit is split off: 128 or 256 is subtracted
# from 128 plus the lower seven.
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


# e4m3's bits are placed at the low end of the wider exponent, which makes them too small by 2**120
# (2**8): correct for subnormals too.
def _float8(by: int, up: str, kind: str) -> tl.constexpr:
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
    """Returns assembler for e2m1, by the same method. $4: four bytes; $5, $6: factors of the
    numbers in their low halves, $7, $8: of those in the high halves; $0 and $1: the low ones, $2
    and $3: the high ones."""

    def halves(into: str, more: str, factor: str, other: str) -> str:
        """Returns assembler for the numbers in the upper halves of bytes at the upper ends of a's
        and b's 16 bits."""
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
    """Returns the numbers of the bytes' low halves times `scale`, and those of the high halves times
    `more_scale`, [R, C] each. w: [R, C] bytes of two e2m1 numbers. scale, more_scale: [R, C] int32,
    whose lowest byte is a scale in the form of kernels/triton/linear/fp4_scales.py."""
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
    """Returns the scales in the lower bytes; in 16 bits multiplied by 2 ** 126 (float16: 2 ** 14),
    since e2m1's bits at the low end of an exponent are that much too small."""
    if kind == tl.bfloat16:
        by = (((octets & 255) << 4) | 0x7000).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif kind == tl.float16:
        by = ((octets & 255) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        by = (((octets & 255) << 20) + (98 << 23)).to(tl.float32, bitcast=True)
    return by


@triton.jit
def _fp4_plain(octets, by):
    """Returns the numbers in the lower halves of bytes times `by`, in float32."""
    octets = octets.to(tl.int32)
    bits = ((octets & 8) << 28) | ((octets & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * by


@triton.jit
def widen_four(w, zero, more_zero, kind: tl.constexpr):
    """Returns the numbers in the bytes' low halves minus zero, and those in the high halves minus
    more_zero, [R, C] each. w: [R, C] bytes. zero, more_zero: [R, 1] whole numbers in float32."""
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
    return (-magic - zero).to(kind).broadcast_to(w.shape)


@triton.jit
def widen_eight(w, what: tl.constexpr, kind: tl.constexpr):
    """Returns w [R, C] bytes, integers or float8, in a wider dtype."""
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
