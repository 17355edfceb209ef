"""Sums and gatherings over the ranks of one model, each a GPU that reads the others' memory: one launch, no library.

    one shot    a rank copies x where all can read it, says so, waits until all have, and adds up every rank's
    two shots   each adds up one part in as many as there are ranks; once all have, it reads the others' sums

A sum is of all ranks' numbers in the ranks' order, in float32, rounded once: the same bits on every rank, in both forms
and whatever else is in x. `RankMemory` is what ranks share: flags, and room for x twice, since a rank may be a call
ahead of one that still reads: it cannot be two ahead, for each call waits for all. Which half, and what flags say,
comes from a count of calls in the device's own memory, so calls may be captured and replayed in any mix.

Nobody waits forever: past `most` looks at a flag a rank notes which other did not come, in a word that the host reads
too, goes on with what is there, and waits no more. It knows addresses, numbers and ranks; no layers, and nothing of how
ranks met. Source of the two forms: one-shot and two-shot all-reduce, as in TensorRT-LLM's and PyTorch's custom
collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, wait

FLAG_BYTES = 16384  # of flags, in front of the room for x: int64 [programs, ranks]
MOST_PROGRAMS = 128  # fewer than a large chip has multiprocessors: all of a call run at once, as waiting asks for
MOST_RANKS = FLAG_BYTES // 8 // MOST_PROGRAMS
# Numbers in `state`, int64.
CALLS, LEFT, HUNG, MOST, HOST = (tl.constexpr(i) for i in range(5))
STATE = 5
FLAGS = tl.constexpr(FLAG_BYTES)
# Ranks -> up to how many bytes one shot is the faster; others: LARGE. Two H200s: at any size (16 MB 69 us, two shots
# 71; docs/design/ranks.md). More ranks have not been measured.
ONE_SHOT_BYTES = {2: 1 << 62, 4: 1 << 18}
ONE_SHOT_LARGE = 1 << 17
# Numbers of a block and warps of a program: few of both come soonest; many bytes under way fill the links.
SMALL, LARGE, LARGE_BYTES = (1024, 4), (4096, 16), 1 << 20


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank knows of the memory that ranks share.

    addresses [ranks] int64: of each rank's flags, FLAG_BYTES of zeros at first; behind them lies room for x twice, of
    `room` bytes each.   state [STATE] int64, this rank's own: calls so far, programs that have left the call, 1 +
    the rank that it waited for in vain (0: none), the most looks at a flag, and the address of an int64 in pinned
    memory that says the same rank.
    """

    addresses: Tensor
    state: Tensor
    rank: int
    room: int

    @property
    def ranks(self) -> int:
        return self.addresses.shape[0]


@triton.jit
def _meet(bases, lane, state, program, turn, me, RANKS: tl.constexpr):
    """Says that this program has come so far, and waits until the same program of every rank has: what each wrote
    before is visible then."""
    there = lane < RANKS
    tl.debug_barrier()  # all of this program's writes, before the flag
    said = tl.zeros_like(bases) + turn
    theirs = bases.to(tl.pointer_type(tl.int64), bitcast=True) + program * RANKS + me
    tl.atomic_xchg(theirs, said, mask=there, sem="release", scope="sys")
    mine = _of(bases, lane, me).to(tl.pointer_type(tl.int64), bitcast=True) + program * RANKS + lane
    hung = tl.load(state + HUNG)
    most = tl.where(hung != 0, 1, tl.load(state + MOST))
    late, looks = tl.full((), 1, tl.int32), most * 0
    while (late > 0) & (looks < most):
        seen = tl.load(mine, mask=there, other=0, volatile=True)
        late = tl.sum((there & (seen < turn)).to(tl.int32), axis=0)
        looks += 1
    seen = tl.atomic_add(mine, said * 0, mask=there, sem="acquire", scope="sys")
    late = tl.sum((there & (seen < turn)).to(tl.int32), axis=0)
    if (late > 0) & (hung == 0):  # behind the first hang nobody is waited for, and late ranks are no news
        host = tl.load(state + HOST).to(tl.pointer_type(tl.int64), bitcast=True)
        absent = tl.max(tl.where(there & (seen < turn), lane + 1, 0), axis=0).to(tl.int64)
        tl.store(state + HUNG, absent)
        tl.store(host, absent)
    tl.debug_barrier()


@triton.jit
def _of(bases, lane, rank):
    """The address of one rank, which a look at memory would cost again behind each meeting."""
    return tl.sum(tl.where(lane == rank, bases, 0), axis=0)


@triton.jit
def _room(bases, lane, rank, behind, x):
    """The room of a rank, as a pointer to numbers of x's kind."""
    return tl.multiple_of((_of(bases, lane, rank) + behind).to(x.dtype, bitcast=True), 16)


@triton.jit
def _begin(addresses, state, room, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """-> calls so far, lanes [WIDTH], every rank's address, how far behind it this call's room lies."""
    calls = tl.load(state + CALLS)
    lane = tl.arange(0, WIDTH)
    bases = tl.load(addresses + lane, mask=lane < RANKS, other=0)
    return calls, lane, bases, FLAGS + (calls & 1) * room


@triton.jit
def _leave(state, calls, programs):
    """The last program counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(state + LEFT, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(state + LEFT, 0)
        tl.store(state + CALLS, calls + 1)


@triton.jit(do_not_specialize=["units", "room", "me"])
def _one_shot(
    x, out, addresses, state, units, room, me,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, GATHERS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [count], the sum; GATHERS: out [RANKS, count], every rank's x. count: units * UNIT."""
    wait(EARLY)
    count = units * UNIT  # so the compiler knows what divides it, and moves 16 bytes at a time
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, behind = _begin(addresses, state, room, RANKS, WIDTH)
    mine = _room(bases, lane, me, behind, x)
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x + at, mask=at < count), mask=at < count)
    _meet(bases, lane, state, program, calls * 2 + 1, me, RANKS)
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            theirs = _room(bases, lane, rank, behind, x)
            value = tl.load(theirs + at, mask=at < count, cache_modifier=".cg")
            if GATHERS:
                tl.store(out + rank * count + at, value, mask=at < count)
            else:
                total += value.to(tl.float32)
        if not GATHERS:
            tl.store(out + at, total.to(x.dtype.element_ty), mask=at < count)
    _leave(state, calls, programs)


@triton.jit(do_not_specialize=["units", "room", "me"])
def _two_shots(
    x, out, addresses, state, units, room, me,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [count], the sum; count: units * UNIT. Of RANKS blocks that lie together rank r adds up the
    r-th, in its place."""
    wait(EARLY)
    count = units * UNIT  # so the compiler knows what divides it, and moves 16 bytes at a time
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, behind = _begin(addresses, state, room, RANKS, WIDTH)
    mine = _room(bases, lane, me, behind, x)
    for first in range(program * BLOCK * RANKS, count, programs * BLOCK * RANKS):
        for rank in tl.static_range(RANKS):
            at = first + rank * BLOCK + tl.arange(0, BLOCK)
            tl.store(mine + at, tl.load(x + at, mask=at < count), mask=at < count)
    _meet(bases, lane, state, program, calls * 2 + 1, me, RANKS)
    for first in range(program * BLOCK * RANKS, count, programs * BLOCK * RANKS):
        at = first + me * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            theirs = _room(bases, lane, rank, behind, x)
            total += tl.load(theirs + at, mask=at < count, cache_modifier=".cg").to(tl.float32)
        value = total.to(x.dtype.element_ty)
        tl.store(mine + at, value, mask=at < count)
        tl.store(out + at, value, mask=at < count)
    _meet(bases, lane, state, program, calls * 2 + 2, me, RANKS)
    for first in range(program * BLOCK * RANKS, count, programs * BLOCK * RANKS):
        for rank in tl.static_range(RANKS):
            if rank != me:
                at = first + rank * BLOCK + tl.arange(0, BLOCK)
                theirs = _room(bases, lane, rank, behind, x)
                value = tl.load(theirs + at, mask=at < count, cache_modifier=".cg")
                tl.store(out + at, value, mask=at < count)
    _leave(state, calls, programs)


def all_reduce(
    x: Tensor, memory: RankMemory, *, one_shot: bool | None = None, cut: tuple[int, int] | None = None,
    most_programs: int = MOST_PROGRAMS,
) -> Tensor:  # fmt: skip
    """x of any shape and float dtype, the same on every rank -> the sum of every rank's, a tensor of its own. More than
    there is room for goes in pieces. one_shot: the form; cut: numbers of a block and warps; None: by x's bytes."""
    x = x.contiguous()
    out = torch.empty_like(x)
    flat, sums, piece = x.view(-1), out.view(-1), memory.room // x.element_size()
    for first in range(0, flat.shape[0], piece):
        some, its = flat[first : first + piece], sums[first : first + piece]
        one = some.nbytes <= ONE_SHOT_BYTES.get(memory.ranks, ONE_SHOT_LARGE) if one_shot is None else one_shot
        by = cut or (LARGE if some.nbytes >= LARGE_BYTES else SMALL)
        if one:
            _launch(_one_shot, some, its, memory, 1, by, most_programs, GATHERS=False)
        else:
            _launch(_two_shots, some, its, memory, memory.ranks, by, most_programs)
    return out


def all_gather(x: Tensor, memory: RankMemory) -> Tensor:
    """x of any shape, the same on every rank, with numbers of 4 or 8 bytes -> [ranks, *x.shape]. Whatever x is, it is
    one kernel: what ranks exchange at work differs in its numbers and their count, and nothing is compiled then."""
    x = x.contiguous()
    out = torch.empty((memory.ranks, *x.shape), dtype=x.dtype, device=x.device)
    flat, every = x.view(-1).view(torch.int32), out.view(memory.ranks, -1).view(torch.int32)
    piece = memory.room // 4
    for first in range(0, flat.shape[0], piece):
        some, its = flat[first : first + piece], every
        if flat.shape[0] > piece:
            its = torch.empty((memory.ranks, some.shape[0]), dtype=torch.int32, device=x.device)
        _launch(_one_shot, some, its, memory, 1, SMALL, MOST_PROGRAMS, GATHERS=True)
        if its is not every:
            every[:, first : first + piece] = its
    return out


def _launch(
    kernel: object, x: Tensor, out: Tensor, memory: RankMemory, together: int, cut: tuple[int, int], most: int,
    **more: object,
) -> None:  # fmt: skip
    """together: blocks that a program takes at once."""
    assert memory.ranks <= MOST_RANKS and most <= MOST_PROGRAMS
    if not x.shape[0]:
        return
    early, (block, warps) = has_pdl(x.device), cut
    programs = min(most, cdiv(x.shape[0], block * together))
    unit = 16 if x.shape[0] % 16 == 0 and not more.get("GATHERS") else 1
    kernel[(programs,)](  # type: ignore[index]
        x, out, memory.addresses, memory.state, x.shape[0] // unit, memory.room, memory.rank,
        RANKS=memory.ranks, WIDTH=next_power_of_2(memory.ranks), BLOCK=block, EARLY=early,
        UNIT=unit, num_warps=warps, launch_pdl=bool(early), **more,
    )  # fmt: skip
