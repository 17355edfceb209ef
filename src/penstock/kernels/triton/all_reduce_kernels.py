"""Kernels for sums and gathers over ranks. `all_reduce.py` launches them and explains their method:
words that are not EMPTY have arrived, and waits are limited."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.pdl import wait

EMPTY = tl.constexpr(-1)  # value of words that have not arrived, in 32 or 64 bits
# indices in `state`, int64
CALLS, LEFT, HUNG, MOST, HOST = (tl.constexpr(i) for i in range(5))
STATE = 5


@triton.jit
def _begin(addresses, state, room, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the number of calls so far, indices 0 to WIDTH - 1, the address of each rank's buffer
    for this call [WIDTH], and the most reads of a word."""
    calls = tl.load(state + CALLS)
    lane = tl.arange(0, WIDTH)
    bases = tl.load(addresses + lane, mask=lane < RANKS, other=0) + (calls & 1) * room
    most = tl.load(state + MOST)
    # after the first timeout a word is read once only
    return calls, lane, bases, tl.where(tl.load(state + HUNG) != 0, most * 0 + 1, most)


@triton.jit
def _memory(bases, lane, rank, KIND: tl.constexpr):
    """Returns a rank's memory, as a pointer to words of KIND."""
    base = tl.sum(tl.where(lane == rank, bases, 0), axis=0)
    return tl.multiple_of(base.to(tl.pointer_type(KIND), bitcast=True), 16)


@triton.jit
def _leave(state, calls, programs):
    """Counts a finished program; the call's last program increments the number of calls."""
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
    """Waits until no word of another rank is EMPTY; after `most` reads it records the missing rank.
    Rank r's words are at `words` [BLOCK] + r * apart; those with r * onward + place [BLOCK] >=
    count don't exist."""
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
        if tl.load(state + HUNG) == 0:  # only the first missing rank is recorded
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
    """Returns the numbers in 32-bit words as float32. KIND: their dtype. NTH: 0: the first number
    of each word; 1: the second of two 16-bit numbers."""
    if tl.float32 == KIND:
        number = word.to(tl.float32, bitcast=True)
    else:
        number = (word >> (16 * NTH)).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _word(first, second, KIND: tl.constexpr):
    """Returns 32-bit words that hold one float32 (`first`), or two 16-bit numbers of dtype KIND.
    first, second: float32."""
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
    """Waits for the other ranks' words at index `at`; returns the sum of them and of this rank's
    words `own`. Sets the received words to EMPTY."""
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
    """Adds all ranks' words. Returns the sums of the first and of the second number of each word,
    and a mask that is 1 if some rank's word is still EMPTY. own: this rank's words."""
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
    """Copies the other ranks' words to `out`; returns a mask that is 1 if some word is still EMPTY.
    Arguments as in _await."""
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
    """Waits for the other ranks' words, copies those of rank r to `out` [BLOCK] + r * out_apart,
    and sets the received words to EMPTY."""
    missing = _take(words, apart, out, out_apart, place, onward, count, me, RANKS, BLOCK)
    if tl.max(missing, axis=0) > 0:
        _await(words, apart, place, onward, count, me, state, most, RANKS, BLOCK)
        _take(words, apart, out, out_apart, place, onward, count, me, RANKS, BLOCK)
    _empty(words, apart, place, onward, count, me, RANKS, BLOCK)


@triton.jit
def _empty(words, apart, place, onward, count, me, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    tl.debug_barrier()  # another thread may still have to read a word that this one sets to EMPTY
    for rank in tl.static_range(RANKS):
        there = (place + rank * onward < count) & (rank != me)
        tl.store(words + rank * apart, tl.full((BLOCK,), -1, words.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["units", "room", "me"])
def one_shot_kernel(
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
    """Writes the sum of all ranks' x to out. x, out: [units * UNIT] int32, words that hold numbers
    of dtype KIND. me: this rank."""
    wait(EARLY)
    # a product, so that the compiler knows that UNIT divides it and moves 16 bytes at a time
    count = units * UNIT
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, most = _begin(addresses, state, room, RANKS, WIDTH)
    apart = (count + BLOCK - 1) // BLOCK * BLOCK
    for first in range(program * BLOCK, count, programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = _sendable(tl.load(x + at, mask=at < count))
        for step in tl.static_range(
            1, RANKS
        ):  # each rank sends to another neighbour first, so that all links are busy
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
def two_shots_kernel(
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
    """Computes the same as one_shot_kernel, in two shots: of RANKS adjacent blocks, rank r sums the
    r-th and sends the sum to all ranks."""
    wait(EARLY)
    count = units * UNIT
    STEP: tl.constexpr = BLOCK * RANKS
    program, programs = tl.program_id(0), tl.num_programs(0)
    calls, lane, bases, most = _begin(addresses, state, room, RANKS, WIDTH)
    # buffer space in words for what one rank sends to another, rounded up to a block
    apart = (count + STEP - 1) // STEP * BLOCK
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
def gather_kernel(
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
    """Writes every rank's x to out [RANKS, count]. x: [count] int32. Words are sent in 64 bits, so
    that a sent word is never EMPTY."""
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
