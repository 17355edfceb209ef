"""Sums and gathers over the ranks of a model. The ranks' GPUs write into each other's memory: it
takes one launch and no library.

Two ways to sum x:

  one shot    a rank writes x into every other's memory; each rank adds up what it received
  two shots   a rank writes the r-th part of x to rank r alone, which adds up that part and writes
              the sum to all

A sum adds all ranks' numbers in rank order, in float32, and rounds once. So its bits are the same
on every rank and in both ways, and don't depend on other numbers in x.

Readers recognise received data without flags. A receive buffer holds EMPTY (all bits set), which no
sender writes. A reader waits until a word differs from EMPTY, reads it, and writes EMPTY again. So
no flags and memory fences are needed, and a call takes one transfer, or two in two shots. As a
float EMPTY is a NaN (two NaNs in 16 bits), which senders replace with another NaN. Gathers send
32-bit words in 64 bits. There are two buffers, since a rank may be one call ahead of a reader. It
is never two calls ahead: a call needs words from every rank, and a rank sends them after its
previous call has ended. A counter in device memory chooses the buffer, so calls may be captured in
graphs and replayed in any order.

Waits are limited. After `most` reads of a word a rank records the missing rank in a word that the
host reads too, continues with the data it has, and never waits again. Knows addresses, numbers and
ranks; no layers, and not how ranks are connected. Sources: one-shot and two-shot all-reduce, as in
TensorRT-LLM's and PyTorch's custom collectives; data as its own flag, as in NCCL's low-latency
protocol and TensorRT-LLM's Lamport kernels."""

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

# The most programs of a call. They must all run at the same time, since they wait; a large GPU has
# more multiprocessors than this.
MOST_PROGRAMS = 128
# Bytes of each of a rank's two buffers, enough to sum 8 MB in two shots. 16 MB are faster in two
# calls (91 us on four H100s) than in one (99 us).
ROOM = (16 << 20) + (1 << 16)
# number of ranks -> the most bytes for which one shot is faster (docs/design/ranks.md); for other
# numbers of ranks it is MORE_RANKS_BYTES
ONE_SHOT_BYTES = {2: 1 << 19, 4: 1 << 17}
MORE_RANKS_BYTES = 1 << 16
# (up to so many bytes, words that a program processes at once, warps); in two shots the words
# are those of a block, and a program processes a block for each rank
ONE_SHOT_CUTS = ((1 << 17, 256, 4), (1 << 62, 1024, 8))
TWO_SHOT_CUTS = ((3 << 19, 1024, 4), (3 << 20, 2048, 4), (1 << 62, 4096, 8))
GATHER_CUT = (256, 4)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The receive buffers of all ranks, as one rank sees them.

    addresses: [ranks] int64, address of each rank's memory: 2 * `room` bytes, which hold EMPTY at
    first. state: [STATE] int64, this rank's own: number of calls so far, programs of the current
    call that have ended, 1 + the rank for which a wait timed out (0: none), the most reads of a
    word, and the address of an int64 in pinned memory that gets a copy of the third number."""

    addresses: Tensor
    state: Tensor
    rank: int
    room: int

    @property
    def ranks(self) -> int:
        return self.addresses.shape[0]

    def wait_at_most(self, looks: int) -> None:
        """Sets how often a program reads a word before it records the missing rank."""
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
    """Returns the sum of every rank's x, a new tensor. x: any shape, float32 or 16 bits, the same
    shape on every rank.

    An x larger than the buffers is summed in several calls. one_shot: True: one shot, False: two
    shots. cut: words of a block, and warps. None: both are chosen by the size of x."""
    flat = x.reshape(-1)
    count, odd = flat.shape[0], flat.shape[0] % (4 // flat.element_size())
    # copied to a padded tensor, since kernels read words of two 16-bit numbers, 16 bytes at a time
    if odd or flat.data_ptr() % 16:
        flat = torch.nn.functional.pad(flat, (0, odd))
    out = torch.empty_like(flat)
    words, sums = flat.view(torch.int32), out.view(torch.int32)
    if one_shot is None:
        one_shot = flat.nbytes <= ONE_SHOT_BYTES.get(memory.ranks, MORE_RANKS_BYTES)
    kernel, shares = (one_shot_kernel, 1) if one_shot else (two_shots_kernel, memory.ranks)
    block, warps = cut or _cut(flat.nbytes, one_shot, next_power_of_2(shares))
    # Words of a call. One shot needs buffer space for all ranks' words, two shots for parts and for
    # sums; both are rounded up to a block.
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
    """Returns (words of a block, warps) for a sum of `size` bytes. shares: blocks that a program
    processes at once."""
    cuts = ONE_SHOT_CUTS if one_shot else TWO_SHOT_CUTS
    step, warps = next((step, warps) for most, step, warps in cuts if size <= most)
    return step // shares, warps


def all_gather(x: Tensor, memory: RankMemory) -> Tensor:
    """Returns every rank's x, [ranks, *x.shape]. x: any shape, the same on every rank, of 4- or
    8-byte numbers. All shapes and dtypes share one compiled kernel, since gathers while serving
    have many shapes, and nothing may be compiled then."""
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
    """Launches a kernel over x, counted in int32 words. units: the kernel's argument for the size
    of x: words, or groups of 16. cut: BLOCK in words, and warps. most: largest grid. step: words
    that a program processes in a loop turn: a BLOCK, or one for each rank."""
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
