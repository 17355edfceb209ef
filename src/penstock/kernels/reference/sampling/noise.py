"""Random numbers for sampling, from a counter. (seed, sample, position, attempt, stream, lane)
determines a number, so it doesn't depend on other rows or steps.

Knows no logits. All arithmetic is on 32-bit integers that wrap around, so that the Triton kernels
can compute the same bits. Here torch's int32 is used as uint32 (a logical shift is an arithmetic
shift and a mask).

  mix(x)      x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
              ("lowbias32")
  absorb      h = mix((h ^ word) + 0x9E3779B9)
  key         two words: from h = 0x243F6A88 and from h = 0x85A308D3, absorb seed's low half, seed's
              high half, sample, position * 32 + attempt * 2 + stream
  bits(lane)  mix(mix(key[0] + lane * 0x9E3779B9) ^ key[1])
  uniform     ((bits >> 9) + 0.5) * 2^-23: 23 bits, never 0 or 1, exact in float32
  gumbel      -log(-log(uniform)), between -2.81 and 16.64

The key has two words, since with one word thousands of pairs among the 2^24 tokens of a long job
would have equal keys. A position is below 2^26 and an attempt below 16. Stream 0 is for sampling a
tile, stream 1 for sampling a token (lane) in a tile. Source of the mixing function: Chris Wellons,
"Prospecting for Hash Functions" (2018), public domain."""

from __future__ import annotations

import torch
from torch import Tensor

TILES, LANES = 0, 1  # streams: for sampling a tile, for sampling a token in it

_GOLDEN = 0x9E3779B9 - (1 << 32)
# starting values of the two words of a key: digits of pi
_STARTS = (0x243F6A88, 0x85A308D3 - (1 << 32))
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)


def _mix(x: Tensor) -> Tensor:
    """Applies `mix` to an int32 tensor in place and returns it."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _MULTIPLY_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _MULTIPLY_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _low_word(x: Tensor) -> Tensor:
    """Returns the low 32 bits of an int64, as int32."""
    return x.view(torch.int32)[::2] if x.is_contiguous() else x.contiguous().view(torch.int32)[::2]


def row_keys(seed: Tensor, sample: Tensor) -> Tensor:
    """Returns the part of a row's keys that is the same in all steps, [2, n] int32. seed: [n]
    int64. sample: [n] int32, number of the sample in its request."""
    h = torch.stack([torch.full_like(sample, start) for start in _STARTS])
    for word in (_low_word(seed), _low_word(seed >> 32), sample):
        h = _mix((h ^ word) + _GOLDEN)
    return h


def keys(rows: Tensor, position: Tensor, attempt: int, stream: int) -> Tensor:
    """Returns keys [2, n] int32. rows: [2, n] from row_keys. position: [n] int32."""
    return _mix((rows ^ (position * 32 + (attempt * 2 + stream))) + _GOLDEN)


def bits(key: Tensor, lanes: int, first: int = 0) -> Tensor:
    """Returns 32 random bits, int32, for each row and each of the `lanes` lanes from `first` on:
    [n, lanes]. key: [2, n]."""
    lane = torch.arange(first, first + lanes, dtype=torch.int32, device=key.device) * _GOLDEN
    return _mix(_mix(key[0][:, None] + lane) ^ key[1][:, None])


def uniform(key: Tensor, lanes: int, first: int = 0) -> Tensor:
    """Returns uniform numbers [n, lanes] float32 in (0, 1), never 0 or 1."""
    return (
        (bits(key, lanes, first) >> 9)
        .bitwise_and_(0x7FFFFF)
        .to(torch.float32)
        .add_(0.5)
        .mul_(2.0**-23)
    )


def gumbel(key: Tensor, lanes: int, first: int = 0) -> Tensor:
    """Returns numbers [n, lanes] float32 of the standard Gumbel distribution."""
    return uniform(key, lanes, first).log_().neg_().log_().neg_()
