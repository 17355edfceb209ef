"""Random numbers for sampling kernels. Their bits are those of `reference/sampling/noise.py`, which
defines them.

These are functions of scalars and blocks for other kernels; nothing is launched here."""

from __future__ import annotations

import triton
import triton.language as tl

# streams of random numbers: one for sampling a tile, one for sampling a token in it
TILES, LANES = tl.constexpr(0), tl.constexpr(1)

_GOLDEN = tl.constexpr(0x9E3779B9)
_START_0, _START_1 = tl.constexpr(0x243F6A88), tl.constexpr(0x85A308D3)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _absorb(h, word):
    return _mix((h ^ word) + _GOLDEN)


@triton.jit
def row_keys(seed, sample):
    """Returns two uint32 words, the part of a row's random keys that is the same in all steps.
    seed: int64. sample: int32, number of the sample in its request."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    word = sample.to(tl.uint32)
    zero = word ^ word
    first = _absorb(_absorb(_absorb(zero + _START_0, low), high), word)
    second = _absorb(_absorb(_absorb(zero + _START_1, low), high), word)
    return first, second


@triton.jit
def gumbel(first, second, position, attempt, stream, lane):
    """Returns numbers of the standard Gumbel distribution, float32, one for each element of `lane`
    (int32). first, second: from row_keys. stream: TILES or LANES."""
    counter = (position * 32 + attempt * 2 + stream).to(tl.uint32)
    first = _absorb(first, counter)
    second = _absorb(second, counter)
    bits = _mix(_mix(first + lane.to(tl.uint32) * _GOLDEN) ^ second)
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
