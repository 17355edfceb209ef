"""Fused product of gate and up, for many rows. It computes act(x @ gate.T) * (x @ up.T). The
outputs of gate and up are never written to memory. T: rows of x, K: inputs, F: outputs of gate and
of up. Knows rows and a matrix; no layer.

Tiles are loaded by bulk copies (TMA). The matrix is viewed as [2, F, K]: 128 rows of the gate and
128 rows of up are one operand of 256 rows, so that a program has both in its registers. There are
as many programs as run at once; each computes several tiles of the output. Tiles are computed in
bands of BAND row tiles, whose programs share weights in the L2 cache.

Times in ms on an H200, each measured over a second, so that its power limit of 700 W takes effect.
The sizes are 16,784 rows of Gemma 3 4B, 8,192 rows of an 8B and 8,192 rows of a 1B model. cuBLAS
followed by `activation` takes 2.85, 3.00 and 0.940; this kernel 2.69, 2.89 and 0.854; cuBLAS alone
2.63, 2.89 and 0.855. Some variants of this kernel are 2 to 20 % slower: bands of 64 tiles, one
stage more, steps of 32 or 128 inputs, tiles of 64 x 128, and half the outputs with two programs on
a multiprocessor. With gate and up as two operands it is 28 % slower.

Speedup in a CUDA graph over cuBLAS followed by `activation`, at 1,024, 2,048 and 8,192 rows: 0.93,
1.16 and 1.14 for a 0.5B model; 1.09, 1.09 and 1.05 for a 1B model; 1.09, 1.06 and 1.05 for Gemma 3
4B; 1.02, 1.01 and 1.00 for an 8B model (1.05 at 16,384 and 0.96 at 1,536 rows); 0.88, 0.99 and 1.01
for a quarter of a 70B model, with 8,192 inputs. In these measurements gate and up were rounded
before the activation, as `linear` rounds them; without that the kernel takes 2 % less time if power
allows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.triton.elementwise.activation import gelu_tanh, swish
from penstock.kernels.triton.grid import cdiv, processors_of, shared_of
from penstock.kernels.triton.linear.linear_small import SmallWeight

LEAST_ROWS = 2048
# the more inputs, the smaller the share of time that the fused activation saves
MOST_INPUTS = 4096
_ROWS, _OUTPUTS, _INPUTS, _STAGES, _BAND = 128, 128, 64, 3, 16
_SHARED = 181_000  # bytes of shared memory that a program needs


@triton.jit(do_not_specialize=["M"])
def _linear_gated(
    x,
    weight,
    out,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
):
    """Kernel of `gated_product`. x [M, K], weight [2, N, K] and out [M, N] are TMA descriptors with
    blocks [BM, BK], [2, BN, BK] and [BM, BN]. BAND: row tiles of a band. GELU: True: act is GELU;
    False: silu."""
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        first = tile // (BAND * across) * BAND
        band = tl.minimum(down - first, BAND)
        m = (first + tile % (BAND * across) % band) * BM
        n = tile % (BAND * across) // band * BN
        sums = tl.zeros((BM, 2 * BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            both = weight.load([0, n, k]).reshape(2 * BN, BK)
            sums = tl.dot(x.load([m, k]), both.T, sums)
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BM, 2, BN)), (0, 2, 1)))
        value = gelu_tanh(gate) * up if GELU else swish(gate, 1.0) * up
        out.store([m, n], value.to(out.dtype))


def linear_gated(x: Tensor, weight: SmallWeight, activation: str) -> Tensor | None:
    """Returns act(gate) * up [T, F]. Returns None for few rows or many inputs, where `linear`
    followed by `activation` is as fast, and for sizes that bulk copies don't support. x: [T, K].
    weight: [2F, K], the gate's rows first. activation: "silu" or "gelu_tanh"."""
    rows, k = x.shape
    if (
        rows < LEAST_ROWS
        or k > MOST_INPUTS
        or k % 8
        or weight.weight.shape[0] % 16
        or shared_of(x.device) < _SHARED
    ):
        return None
    return gated_product(x, weight.weight, activation)


def gated_product(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Returns act(gate) * up [T, F], computed by this module's kernel for any number of rows.
    Parameters: see `linear_gated`."""
    (m, k), n = x.shape, weight.shape[0] // 2
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tiles = cdiv(m, _ROWS) * cdiv(n, _OUTPUTS)
    programs = processors_of(x.device) if x.is_cuda else 2  # one program per multiprocessor
    _linear_gated[(min(tiles, programs),)](
        TensorDescriptor(x, [m, k], [x.stride(0), 1], [_ROWS, _INPUTS]),
        TensorDescriptor(weight, [2, n, k], [n * k, k, 1], [2, _OUTPUTS, _INPUTS]),
        TensorDescriptor(out, [m, n], [n, 1], [_ROWS, _OUTPUTS]),
        m,
        n,
        k,
        BM=_ROWS,
        BN=_OUTPUTS,
        BK=_INPUTS,
        BAND=_BAND,
        STAGES=_STAGES,
        GELU=activation == "gelu_tanh",
        num_warps=8,
    )
    return out
