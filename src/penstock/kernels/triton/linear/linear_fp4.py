"""Products with weights in four-bit floats. One row, in fixed point, is multiplied by
`linear_four.py`, and up to 256 rows by `stream_fp4.py`. For more rows, the weights of some outputs
at a time are widened to the model's dtype and multiplied by cuBLAS. T: rows of x, N: outputs, K:
inputs. Knows rows and a matrix; no layer."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow
from penstock.kernels.fp8_rows import Rows, wide
from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.linear.linear_four import lone_product
from penstock.kernels.triton.linear.linear_groups import by_library
from penstock.kernels.triton.linear.stream_fp4 import (
    Fp4Weight,
    firsts,
    fp4_weight,
    scale_pairs,
    streamed_fp4,
)
from penstock.kernels.triton.linear.widen import widen_fp4
from penstock.kernels.triton.pdl import has_pdl, wait

MOST_STREAMED = 256  # the most rows for stream_fp4.py, the same as for integers

prepare_linear_fp4 = fp4_weight


def linear_fp4(
    x: Rows, matrix: Fp4Weight, bias: Tensor | None = None, *, streamed_rows: int = MOST_STREAMED
) -> Tensor:
    """Returns x @ weight.T + bias, [T, N]. x: [T, K] in the model's dtype; if T = 1, a FixedRow.
    streamed_rows: the most rows for `stream_fp4.py`, see kernels/tunables.py."""
    if isinstance(x, FixedRow):
        return wide(lone_product(x, matrix, bias))
    x = wide(x)
    if x.shape[0] <= streamed_rows:
        return streamed_fp4(x, matrix, bias)
    return by_library(x, matrix.shape, partial(widened_fp4, matrix), bias)


@triton.jit(do_not_specialize=["first", "count"])
def _widened_fp4(
    weight,
    scale,
    by,
    out,
    first,
    count,
    N,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TURN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `widened_fp4`. A program widens 2 * BK inputs of BN rows, which are BK bytes of
    packed weights each. weight, scale, by, TURN: fields of Fp4Weight. out: [count, K]. EARLY: see
    pdl.py."""
    wait(EARLY)
    row, turn, octet = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, BK)
    n = tl.minimum(first + row, N - 1)
    mask = (row < count)[:, None] & (turn * BK + octet < K // 2)[None, :]
    w = tl.load(
        weight + n[:, None].to(tl.int64) * (K // 2) + turn * BK + octet[None, :], mask=mask, other=0
    )
    kind = out.dtype.element_ty
    pairs = scale_pairs(scale, n, N, turn, BN, BK)
    low, high = widen_fp4(w, pairs, pairs >> 8, kind)
    times = tl.load(by + n)[:, None]
    begin, lane = firsts(turn, TURN, BK)
    to = out + row[:, None].to(tl.int64) * K + (begin + lane)[None, :]
    tl.store(to, (low.to(tl.float32) * times).to(kind), mask=mask)
    tl.store(to + TURN, (high.to(tl.float32) * times).to(kind), mask=mask)


def widened_fp4(matrix: Fp4Weight, first: int, count: int) -> Tensor:
    """Returns `count` rows of the matrix, from row `first` on, as numbers of the model's dtype:
    [count, K]."""
    (n, k), early = matrix.shape, has_pdl(matrix.weight.device)
    out = torch.empty((count, k), dtype=matrix.dtype, device=matrix.weight.device)
    _widened_fp4[(cdiv(count, 32), cdiv(k, 256))](
        matrix.weight,
        matrix.scale,
        matrix.by,
        out,
        first,
        count,
        n,
        k,
        BN=32,
        BK=128,
        TURN=matrix.turn,
        EARLY=early,
        num_warps=4,
        launch_pdl=bool(early),
    )
    return out
