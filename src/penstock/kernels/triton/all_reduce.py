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
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, wait

EMPTY = tl.constexpr(-1)  # of 32 bits or of 64: memory that waits
# fewer than a large chip has multiprocessors: all of a call run at once, as waiting asks for
MOST_PROGRAMS = 128
# Bytes that a call may take of a rank's memory: enough for 8 MB by two shots. 16 MB are faster as
# two calls than as one (four H100s: 91 us, not 99), since what is read is written once more.
ROOM = (16 << 20) + (1 << 16)
# Numbers in `state`, int64.
CALLS, LEFT, HUNG, MOST, HOST = (tl.constexpr(i) for i in range(5))
STATE = 5
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


@triton.jit
def _begin(addresses, state, room, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """-> calls so far, lanes [WIDTH], the address of every rank's half for this call, the most
    looks."""
    calls = tl.load(state + CALLS)
    lane = tl.arange(0, WIDTH)
    bases = tl.load(addresses + lane, mask=lane < RANKS, other=0) + (calls & 1) * room
    most = tl.load(state + MOST)
    # Behind the first hang nobody is waited for.
    return calls, lane, bases, tl.where(tl.load(state + HUNG) != 0, most * 0 + 1, most)


@triton.jit
def _memory(bases, lane, rank, KIND: tl.constexpr):
    """A rank's memory, as a pointer to words of KIND."""
    base = tl.sum(tl.where(lane == rank, bases, 0), axis=0)
    return tl.multiple_of(base.to(tl.pointer_type(KIND), bitcast=True), 16)


@triton.jit
def _leave(state, calls, programs):
    """The last program counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(state + LEFT, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(state + LEFT, 0)
        tl.store(state + CALLS, calls + 1)


@triton.jit
def _await(
    words,
    apart,
    place,
    onward,
    count,
    me,
    state,
    most,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Waits until no word of another rank is EMPTY; notes whose are, where it has looked often
    enough. Rank r's lie r * apart behind `words` [BLOCK]: as many of them as have r * onward +
    place [BLOCK] below count."""
    late, looks = tl.full((), 1, tl.int32), most * 0
    while (late > 0) & (looks < most):
        missing = tl.zeros((BLOCK,), tl.int32)
        for rank in tl.static_range(RANKS):
            there = (place + rank * onward < count) & (rank != me)
            seen = tl.load(words + rank * apart, mask=there, other=0, volatile=True)
            missing = missing | (seen == EMPTY).to(tl.int32)
        late = tl.max(missing, axis=0)
        looks += 1
    if late > 0:  # noqa: SIM102  `and` would look at both
        if tl.load(state + HUNG) == 0:  # behind the first hang late ranks are no news
            for rank in tl.static_range(RANKS):
                there = (place + rank * onward < count) & (rank != me)
                seen = tl.load(words + rank * apart, mask=there, other=0, volatile=True)
                if tl.max((seen == EMPTY).to(tl.int32), axis=0) > 0:
                    absent = tl.full((), rank + 1, tl.int64)
                    tl.store(state + HUNG, absent)
                    tl.store(
                        tl.load(state + HOST).to(tl.pointer_type(tl.int64), bitcast=True), absent
                    )


@triton.jit
def _sendable(word):
    return tl.where(word == EMPTY, EMPTY - 1, word)


@triton.jit
def _number(word, KIND: tl.constexpr, NTH: tl.constexpr):
    """A number of KIND in words of 32 bits -> float32. NTH: 0, or 1 for the second of 16 bits."""
    if tl.float32 == KIND:
        number = word.to(tl.float32, bitcast=True)
    else:
        number = (word >> (16 * NTH)).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _word(first, second, KIND: tl.constexpr):
    """Numbers in float32 -> words of 32 bits, which hold one of KIND, or two."""
    if tl.float32 == KIND:
        word = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = low | (second.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word


@triton.jit
def _sum(
    words,
    apart,
    at,
    count,
    own,
    me,
    state,
    most,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Waits for the others' words of `at` -> their sum with `own`; puts EMPTY in their place."""
    first, second, missing = _add(words, apart, at, count, own, me, KIND, RANKS, BLOCK)
    if tl.max(missing, axis=0) > 0:
        _await(words, apart, at, 0, count, me, state, most, RANKS, BLOCK)
        first, second, missing = _add(words, apart, at, count, own, me, KIND, RANKS, BLOCK)
    _empty(words, apart, at, 0, count, me, RANKS, BLOCK)
    return _word(first, second, KIND)


@triton.jit
def _add(
    words, apart, at, count, own, me, KIND: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """-> sums of what there is of the first and the second number in each word; where words are
    EMPTY: 1."""
    first, second = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    missing = tl.zeros((BLOCK,), tl.int32)
    for rank in tl.static_range(RANKS):
        came = tl.load(
            words + rank * apart, mask=(at < count) & (rank != me), other=0, volatile=True
        )
        missing = missing | (came == EMPTY).to(tl.int32)
        word = tl.where(rank == me, own, came)
        first += _number(word, KIND, 0)
        second += _number(word, KIND, 1)
    return first, second, missing


@triton.jit
def _take(
    words, apart, out, out_apart, place, onward, count, me, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies the others' words to `out` as they are -> where some are EMPTY: 1. As _await."""
    missing = tl.zeros((BLOCK,), tl.int32)
    for rank in tl.static_range(RANKS):
        there = (place + rank * onward < count) & (rank != me)
        came = tl.load(words + rank * apart, mask=there, other=0, volatile=True)
        tl.store(out + rank * out_apart, came.to(tl.int32), mask=there)
        missing = missing | (came == EMPTY).to(tl.int32)
    return missing


@triton.jit
def _receive(
    words,
    apart,
    out,
    out_apart,
    place,
    onward,
    count,
    me,
    state,
    most,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Waits for the others' words, copies rank r's to r * out_apart behind `out` [BLOCK], puts
    EMPTY in their place."""
    missing = _take(words, apart, out, out_apart, place, onward, count, me, RANKS, BLOCK)
    if tl.max(missing, axis=0) > 0:
        _await(words, apart, place, onward, count, me, state, most, RANKS, BLOCK)
        _take(words, apart, out, out_apart, place, onward, count, me, RANKS, BLOCK)
    _empty(words, apart, place, onward, count, me, RANKS, BLOCK)


@triton.jit
def _empty(words, apart, place, onward, count, me, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    tl.debug_barrier()  # a word may be read by another thread than the one that empties it
    for rank in tl.static_range(RANKS):
        there = (place + rank * onward < count) & (rank != me)
        tl.store(words + rank * apart, tl.full((BLOCK,), -1, words.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["units", "room", "me"])
def _one_shot(
    x,
    out,
    addresses,
    state,
    units,
    room,
    me,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x [units * UNIT] int32, words of KIND -> out, the sum's words."""
    wait(EARLY)
    count = units * UNIT  # so the compiler knows what divides it, and moves 16 bytes at a time
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, most = _begin(addresses, state, room, RANKS, WIDTH)
    apart = (count + BLOCK - 1) // BLOCK * BLOCK
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = _sendable(tl.load(x + at, mask=at < count))
        for step in tl.static_range(
            1, RANKS
        ):  # each begins with another neighbour: all links are at work
            theirs = _memory(bases, lane, (me + step) % RANKS, tl.int32)
            tl.store(theirs + me * apart + at, own, mask=at < count)
    mine = _memory(bases, lane, me, tl.int32)
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = tl.load(x + at, mask=at < count, other=0)
        total = _sum(mine + at, apart, at, count, own, me, state, most, KIND, RANKS, BLOCK)
        tl.store(out + at, total, mask=at < count)
    _leave(state, calls, programs)


@triton.jit(do_not_specialize=["units", "room", "me"])
def _two_shots(
    x,
    out,
    addresses,
    state,
    units,
    room,
    me,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Takes and gives what _one_shot does. Of RANKS blocks that lie together rank r adds up the
    r-th."""
    wait(EARLY)
    count = units * UNIT
    STEP: tl.constexpr = BLOCK * RANKS
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, most = _begin(addresses, state, room, RANKS, WIDTH)
    apart = (
        (count + STEP - 1) // STEP * BLOCK
    )  # words that one rank sends to another, up to a block
    along = tl.arange(0, BLOCK)
    for first in range(program * STEP, count, programs * STEP):
        for step in tl.static_range(1, RANKS):
            rank = (me + step) % RANKS
            at = first + rank * BLOCK + along
            own = _sendable(tl.load(x + at, mask=at < count))
            theirs = _memory(bases, lane, rank, tl.int32) + me * apart + first // STEP * BLOCK
            tl.store(theirs + along, own, mask=at < count)
    mine = _memory(bases, lane, me, tl.int32)
    for first in range(program * STEP, count, programs * STEP):
        at = first + me * BLOCK + along
        own = tl.load(x + at, mask=at < count, other=0)
        parts = mine + first // STEP * BLOCK + along
        total = _sendable(_sum(parts, apart, at, count, own, me, state, most, KIND, RANKS, BLOCK))
        tl.store(out + at, total, mask=at < count)
        for step in tl.static_range(1, RANKS):
            theirs = _memory(bases, lane, (me + step) % RANKS, tl.int32) + RANKS * apart
            tl.store(theirs + at, total, mask=at < count)
    sums = mine + RANKS * apart
    for first in range(program * STEP, count, programs * STEP):
        place = first + along
        _receive(
            sums + place,
            BLOCK,
            out + place,
            BLOCK,
            place,
            BLOCK,
            count,
            me,
            state,
            most,
            RANKS,
            BLOCK,
        )
    _leave(state, calls, programs)


@triton.jit(do_not_specialize=["count", "room", "me"])
def _gather(
    x,
    out,
    addresses,
    state,
    count,
    room,
    me,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x [count] int32 -> out [RANKS, count], every rank's. Words go in 64 bits, which are never
    EMPTY."""
    wait(EARLY)
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, most = _begin(addresses, state, room, RANKS, WIDTH)
    apart = (count + BLOCK - 1) // BLOCK * BLOCK
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = tl.load(x + at, mask=at < count)
        tl.store(out + me * count + at, own, mask=at < count)
        for step in tl.static_range(1, RANKS):
            theirs = _memory(bases, lane, (me + step) % RANKS, tl.int64)
            tl.store(theirs + me * apart + at, own.to(tl.int64) & 0xFFFFFFFF, mask=at < count)
    mine = _memory(bases, lane, me, tl.int64)
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        _receive(mine + at, apart, out + at, count, at, 0, count, me, state, most, RANKS, BLOCK)
    _leave(state, calls, programs)


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
    kernel, shares = (_one_shot, 1) if one_shot else (_two_shots, memory.ranks)
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
        _launch(_gather, some, its, memory, some.shape[0], (block, warps), MOST_PROGRAMS, block)
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
