"""Sums and gatherings over the ranks of one model, each a GPU that writes into the others' memory:
one launch, no library.

    one shot    a rank writes x into every other's memory; each adds up what came to it
    two shots   a rank writes the r-th part of x to rank r alone, which adds up that part and writes
    the sum to all

A sum is of all ranks' numbers in the ranks' order, in float32, rounded once: the same bits on every
rank, in both forms and whatever else is in x.

A word says by itself that it has come: memory that waits holds EMPTY, all bits set, which no sender
writes, and who has read a word puts EMPTY back. So there are no flags and no fences: a call costs
one way of the data, or two. Of floats EMPTY is a NaN (two of them in 16 bits), in whose place
another NaN is sent; words that are gathered go in 64 bits. Memory is there twice, for a rank may be
a call ahead of one that still reads. It is never two ahead, since the sums of a call need a word of
every rank, which a rank sends when its call before has ended. Which half a call takes comes from a
count of calls in the device's own memory, so calls may be captured and replayed in any mix.

Nobody waits forever: past `most` looks a rank notes which other did not come, in a word that the
host reads too, goes on with what is there, and waits no more. It knows addresses, numbers, ranks;
no layers, and nothing of how ranks met. Sources: one-shot and two-shot all-reduce, as in
TensorRT-LLM's and PyTorch's custom collectives; data that is its own flag, as in NCCL's low-latency
protocol and TensorRT-LLM's Lamport kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.all_reduce_kernels import (
    MOST,
    gather_kernel,
    one_shot_kernel,
    two_shots_kernel,
)
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl

# Fewer than a large chip has multiprocessors: all programs of a call run at once, as waiting
# requires
MOST_PROGRAMS = 128
# Bytes that a call may take of a rank's memory: enough for 8 MB by two shots. 16 MB are faster as
# two calls than as one (four H100s: 91 us, not 99), since what is read is written once more.
ROOM = (16 << 20) + (1 << 16)
# Ranks -> up to how many bytes one shot is the faster; others: LARGE_BYTES (docs/design/ranks.md).
ONE_SHOT_BYTES = {2: 1 << 19, 4: 1 << 17}
MORE_RANKS_BYTES = 1 << 16
# Up to how many bytes -> words that a program takes at once (by two shots a block of each rank),
# and its warps.
ONE_SHOT_CUTS = ((1 << 17, 256, 4), (1 << 62, 1024, 8))
TWO_SHOT_CUTS = ((3 << 19, 1024, 4), (3 << 20, 2048, 4), (1 << 62, 4096, 8))
GATHER_CUT = (256, 4)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank knows of the memory that ranks share.

    addresses [ranks] int64: of each rank's, 2 * `room` bytes of EMPTY at first.   state [STATE]
    int64, this rank's own: calls so far, programs that have left the call, 1 + the rank that it
    waited for in vain (0: none), the most looks, and the address of an int64 in pinned memory that
    says the same rank.
    """

    addresses: Tensor
    state: Tensor
    rank: int
    room: int

    @property
    def ranks(self) -> int:
        return self.addresses.shape[0]

    def wait_at_most(self, looks: int) -> None:
        """Sets how often a program looks for a word before it notes the rank that did not come."""
        self.state[MOST.value] = looks


_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def all_reduce(
    x: Tensor,
    memory: RankMemory,
    *,
    one_shot: bool | None = None,
    cut: tuple[int, int] | None = None,
    most_programs: int = MOST_PROGRAMS,
) -> Tensor:
    """x of any shape, in float32 or in 16 bits, the same on every rank -> the sum of every rank's,
    a tensor of its own. What there is no room for goes in pieces. one_shot: the form; cut: words of
    a block and warps; None: by x's bytes.
    """
    flat = x.reshape(-1)
    count, odd = flat.shape[0], flat.shape[0] % (4 // flat.element_size())
    if odd or flat.data_ptr() % 16:  # words of two numbers, and 16 bytes at a time
        flat = torch.nn.functional.pad(flat, (0, odd))
    out = torch.empty_like(flat)
    words, sums = flat.view(torch.int32), out.view(torch.int32)
    if one_shot is None:
        one_shot = flat.nbytes <= ONE_SHOT_BYTES.get(memory.ranks, MORE_RANKS_BYTES)
    kernel, shares = (one_shot_kernel, 1) if one_shot else (two_shots_kernel, memory.ranks)
    block, warps = cut or _cut(flat.nbytes, one_shot, next_power_of_2(shares))
    # Of the room, in words: one shot takes all ranks', two take parts and sums; each is rounded up
    # to a block.
    piece = (memory.room // 4 // (memory.ranks if one_shot else 2) - block * shares) // 16 * 16
    for first in range(0, words.shape[0], piece):
        some, its = words[first : first + piece], sums[first : first + piece]
        unit = 16 if some.shape[0] % 16 == 0 else 1
        _launch(
            kernel,
            some,
            its,
            memory,
            some.shape[0] // unit,
            (block, warps),
            most_programs,
            block * shares,
            KIND=_KINDS[x.dtype],
            UNIT=unit,
        )
    return out[:count].view(x.shape)


def _cut(size: int, one_shot: bool, shares: int) -> tuple[int, int]:
    """-> words of a block and warps, for so many bytes. shares: blocks that a program takes at
    once."""
    cuts = ONE_SHOT_CUTS if one_shot else TWO_SHOT_CUTS
    step, warps = next((step, warps) for most, step, warps in cuts if size <= most)
    return step // shares, warps


def all_gather(x: Tensor, memory: RankMemory) -> Tensor:
    """x of any shape, the same on every rank, with numbers of 4 or 8 bytes -> [ranks, *x.shape].
    Whatever x is, it is one kernel: what ranks exchange at work differs in its numbers and their
    count, and nothing is compiled then."""
    x = x.contiguous()
    out = torch.empty((memory.ranks, *x.shape), dtype=x.dtype, device=x.device)
    flat, every = x.view(-1).view(torch.int32), out.view(memory.ranks, -1).view(torch.int32)
    block, warps = GATHER_CUT
    piece = memory.room // (8 * memory.ranks) // block * block
    for first in range(0, flat.shape[0], piece):
        some, its = flat[first : first + piece], every
        if flat.shape[0] > piece:
            its = torch.empty((memory.ranks, some.shape[0]), dtype=torch.int32, device=x.device)
        _launch(
            gather_kernel, some, its, memory, some.shape[0], (block, warps), MOST_PROGRAMS, block
        )
        if its is not every:
            every[:, first : first + piece] = its
    return out


def _launch(
    kernel: object,
    x: Tensor,
    out: Tensor,
    memory: RankMemory,
    units: int,
    cut: tuple[int, int],
    most: int,
    step: int,
    **more: object,
) -> None:
    """step: words that a program takes at once."""
    assert most <= MOST_PROGRAMS
    early, (block, warps) = has_pdl(x.device), cut
    kernel[(min(most, cdiv(x.shape[0], step)),)](  # type: ignore[index]
        x,
        out,
        memory.addresses,
        memory.state,
        units,
        memory.room,
        memory.rank,
        RANKS=memory.ranks,
        WIDTH=next_power_of_2(memory.ranks),
        BLOCK=block,
        EARLY=early,
        num_warps=warps,
        launch_pdl=bool(early),
        **more,
    )
