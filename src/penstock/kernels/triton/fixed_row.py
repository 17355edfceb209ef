"""Kernel functions that write rows in fixed point. kernels/fixed_row.py has their contract. Knows
numbers; no weight."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels import fixed_row

LEAST: tl.constexpr = tl.constexpr(fixed_row.LEAST_BITS)
TOP: tl.constexpr = tl.constexpr(fixed_row.TOP)
DOWN: tl.constexpr = tl.constexpr(2.0**-fixed_row.TOP)
# 1.5 * 2**23: adding it to a float32 rounds that to a whole number, in the lower bits
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
ROUNDED: tl.constexpr = tl.constexpr(0x4B400000)  # bits of ROUNDER


@triton.jit
def store_fixed(values, numbers, scales, sums, block, there, K):
    """Writes values [B, 16] as blocks of 16 numbers of a row in fixed point. values: already
    rounded to the model's dtype; zeros past the row's end. block: [B], index of each block in the
    row. there: [B], False: the block is not written. K: numbers of the row."""
    values = values.to(tl.float32)
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    power = tl.maximum(most & 0x7F800000, LEAST)
    by = ((254 << 23) - power + (TOP << 23)).to(tl.float32, bitcast=True)
    whole = (values * by[:, None] + ROUNDER).to(tl.int32, bitcast=True) - ROUNDED
    whole = tl.minimum(whole, 32767)  # rounding may give 32768, which 16 bits can't hold
    to = numbers + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(to, (whole >> 8).to(tl.int8), mask=there[:, None])
    tl.store(to + K, whole.to(tl.int8), mask=there[:, None])
    tl.store(scales + block, power.to(tl.float32, bitcast=True) * DOWN, mask=there)
    tl.store(sums + block, tl.sum(whole, axis=1), mask=there)
