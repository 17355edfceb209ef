"""Short causal convolutions per channel, for LFM2's gated convolutions, the delta rule and Mamba2.
A program computes some channels of a decode row, or of some tokens of a chunk. Knows one layer's
window; no layer.

A window holds a sequence's last inputs as a ring: the input at position p is at index p % width. A
program may read older inputs while another one writes those of the step, which lie elsewhere. The
inputs of the step's own tokens are read from `given`, not from the window, so a step that is
repeated gives the same output. Tokens of a chunk read the window as it was before the step; a later
launch writes the chunk's last inputs to it. T: a step's tokens, c: channels.

Constants of kernels: TAPS: taps of the convolution. WIDTH: entries of a window; more than TAPS if
rows may have drafts. RING: numbers of an entry."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.grid import cdiv, next_power_of_2

_CHANNELS = 256  # channels of a program for a decode row
_TILE = (16, 512)  # tokens and channels of a program for a chunk


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def came_of(given, token, stride, channel, there, channels, GATED: tl.constexpr):
    """Returns a token's inputs of the convolution for some channels: `given`, or if GATED gate *
    value, rounded to the dtype of `given`. channel, there: indices of channels and their mask."""
    base = given + token * stride + channel
    first = tl.load(base, mask=there, other=0.0).to(tl.float32)
    if GATED:
        value = tl.load(base + 2 * channels, mask=there, other=0.0).to(tl.float32)
        first = (first * value).to(given.dtype.element_ty).to(tl.float32)
    return first


@triton.jit
def queries_of(offset, row, MOST: tl.constexpr):
    """Returns the number of queries of a row, at most MOST; 0 if query `row` is a draft. offset:
    number of each query in its row. The grid has the queries on axis 1."""
    ahead = tl.arange(0, MOST)
    there = row + ahead < tl.num_programs(1)
    found = tl.load(offset + row + ahead, mask=there, other=-1)
    return tl.sum((found == ahead).to(tl.int32), axis=0)


@triton.jit
def of_row(
    given,
    weight,
    window,
    slot,
    position,
    ahead,
    fold,
    token,
    stride,
    channel,
    there,
    channels,
    RING,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Returns the convolution of a decode row's token, for some channels; stores a query's input in
    the window if `fold`. slot: offset of the row's window in `window`, in numbers. ahead: number of
    the token's query in its row; less than 0: the token is folded again, and its input is in the
    window. token: index of the query in `given`, int64. channel, there: indices of channels and
    their mask."""
    held = window + slot + channel
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap  # the tap's token is so many tokens before this one
        kept = held + (position + (WIDTH - TAPS + 1 + tap)) % WIDTH * RING
        if WIDTH > TAPS:
            came = tl.load(kept, mask=there & (ahead < back), other=0.0).to(tl.float32)
            of_step = there & (ahead >= back)
            came += came_of(given, token - back, stride, channel, of_step, channels, GATED)
        elif tap < TAPS - 1:
            came = tl.load(kept, mask=there, other=0.0).to(tl.float32)
        else:
            came = came_of(given, token, stride, channel, there, channels, GATED)
        total += came * tl.load(weight + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
        if tap == TAPS - 1:
            tl.store(kept, came.to(window.dtype.element_ty), mask=there & fold & (ahead >= 0))
    return total


@triton.jit
def beside_of(
    source,
    window,
    slot,
    position,
    ahead,
    fold,
    number,
    channels: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
):
    """Returns a number of a decode row's token beside its input of the convolution, in float32.
    source: pointer to a query's. number: its index after the input in an entry of the window, if
    entries have more than `channels` numbers; there it is stored if `fold`. Other arguments: see
    `of_row`."""
    if channels < RING:
        kept = window + slot + position % WIDTH * RING + channels + number
        own = tl.load(source, mask=ahead >= 0, other=0.0).to(tl.float32)
        own += tl.load(kept, mask=ahead < 0, other=0.0).to(tl.float32)
        tl.store(kept, own.to(window.dtype.element_ty), mask=fold & (ahead >= 0))
    else:
        own = tl.load(source).to(tl.float32)
    return own


@triton.jit
def block_of(start, number, chunks, BLOCK: tl.constexpr):
    """Returns the chunk of block `number`, the block's first token, and its number of tokens (0 or
    less: the block doesn't exist). A chunk is divided into blocks of BLOCK tokens; the blocks of
    chunk c have the numbers from start[c] // BLOCK + c on. start: [chunks + 1], first token of each
    chunk."""
    low, high = chunks * 0, chunks
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(start + middle) // BLOCK + middle <= number
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
    begin, end = tl.load(start + low), tl.load(start + low + 1)
    first = begin + (number - begin // BLOCK - low) * BLOCK
    return low, first, tl.minimum(end - first, BLOCK)


@triton.jit
def _answer(
    given,
    bias,
    out,
    token,
    to,
    stride,
    channel,
    there,
    channels,
    total,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Writes a token's output to row `to` of out. total: sum over the taps. GATED: the output is
    the sum times the output gate; else it is silu of the sum."""
    if BIAS:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(given + token * stride + channels + channel, mask=there, other=0.0).to(
            tl.float32
        )
        value = gate * total.to(given.dtype.element_ty).to(tl.float32)
    else:
        value = silu(total)
    tl.store(out + to * channels + channel, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _rows(
    given,
    weight,
    bias,
    window,
    slots,
    folded,
    offset,
    positions,
    out,
    slot_stride,
    stride,
    channels,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Kernel of `short_conv` for decode rows, with one program per query and CHANNELS channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    slot, position = tl.load(slots + row).to(tl.int64) * slot_stride, tl.load(positions + row)
    ahead = 0
    if WIDTH > TAPS:
        ahead = tl.load(offset + row)
    total = of_row(
        given,
        weight,
        window,
        slot,
        position,
        ahead,
        tl.load(folded + row) <= position,
        row,
        stride,
        channel,
        there,
        channels,
        channels,
        TAPS,
        WIDTH,
        True,
    )
    _answer(given, bias, out, row, row, stride, channel, there, channels, total, BIAS, True)


@triton.jit(do_not_specialize=["rows", "skipped", "chunks"])
def _chunks(
    given,
    weight,
    bias,
    window,
    slots,
    start,
    context,
    out,
    rows,
    skipped,
    chunks,
    slot_stride,
    stride,
    channels,
    RING,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Computes the convolution of TOKENS tokens of a chunk, one after another, for CHANNELS
    channels. rows: decode rows of the step, whose tokens come first in `given`. skipped: those that
    `out` leaves out."""
    chunk, first, count = block_of(start, tl.program_id(0), chunks, TOKENS)
    if count > 0:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        there = channel < channels
        held = window + tl.load(slots + chunk).to(tl.int64) * slot_stride + channel
        since = first - tl.load(start + chunk)  # index of the first token in its chunk
        position = tl.load(context + chunk) + since
        token = (rows + first).to(tl.int64)
        weights, recent = (), ()
        for tap in tl.static_range(TAPS):
            by = tl.load(weight + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
            weights = weights + (by,)
        for tap in tl.static_range(TAPS - 1):
            back = TAPS - 1 - tap  # the tap's token is so many tokens before the first one
            here = there & (since >= back)
            seen = came_of(given, token - back, stride, channel, here, channels, GATED)
            before = held + (position + (WIDTH - back)) % WIDTH * RING
            seen += tl.load(before, mask=there & (since < back), other=0.0).to(tl.float32)
            recent = recent + (seen,)
        for own in tl.static_range(TOKENS):
            here = there & (own < count)
            came = came_of(given, token + own, stride, channel, here, channels, GATED)
            recent = recent + (came,)
            total = tl.zeros((CHANNELS,), tl.float32)
            for tap in tl.static_range(TAPS):
                total += recent[own + tap] * weights[tap]
            to = token + own - skipped
            _answer(
                given,
                bias,
                out,
                token + own,
                to,
                stride,
                channel,
                here,
                channels,
                total,
                BIAS,
                GATED,
            )


@triton.jit(do_not_specialize=["rows"])
def _move_on(
    given,
    window,
    slots,
    start,
    context,
    rows,
    slot_stride,
    stride,
    channels,
    RING,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Writes the last inputs of a chunk to its window, with one program per chunk and CHANNELS
    channels."""
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    first, stop = tl.load(start + chunk), tl.load(start + chunk + 1)
    held = window + tl.load(slots + chunk).to(tl.int64) * slot_stride + channel
    end = tl.load(context + chunk) + stop - first
    for tap in tl.static_range(TAPS):
        back = tap + 1  # index of the token, counted back from the chunk's end
        if back <= stop - first:
            seen = came_of(
                given, (rows + stop - back).to(tl.int64), stride, channel, there, channels, GATED
            )
            tl.store(
                held + (end - back) % WIDTH * RING, seen.to(window.dtype.element_ty), mask=there
            )


def short_conv(
    given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns the gated convolution of all tokens, [T, c]. given: [T, 3c]. weight: [c, taps].
    window: [slots, width, c]. The contract is `ops.GatedConvolution`."""
    states, rows, channels = inputs.states, inputs.rows, weight.shape[0]
    assert states is not None, "a layer with a window has slots"
    out = torch.empty((given.shape[0], channels), dtype=given.dtype, device=given.device)
    block = min(_CHANNELS, next_power_of_2(channels))
    if rows:
        _rows[(rows, cdiv(channels, block))](
            given,
            weight,
            weight if bias is None else bias,
            window,
            states.slots,
            states.folded,
            states.offset,
            inputs.positions,
            out,
            window.stride(0),
            given.stride(0),
            channels,
            TAPS=weight.shape[1],
            WIDTH=window.shape[1],
            BIAS=bias is not None,
            CHANNELS=block,
        )
    convolve_chunks(given, weight, bias, window, inputs, out, gated=True)
    return out


def most_queries(window: Tensor, weight: Tensor) -> int:
    """Returns the most queries of a row in a step, rounded up to a power of two. A window [slots,
    width, numbers] has two entries more than weight [c, taps] for each draft."""
    return next_power_of_2((window.shape[1] - weight.shape[1]) // 2 + 1)


def convolve_chunks(
    given: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    inputs: StepInputs,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    """Writes the convolution of the chunks' tokens to out, and their last inputs to their windows.
    out: [T, c], or without the decode rows [T - rows, c]. gated: True: given [T, 3c] has LFM2's
    gates; False: its first c columns are the input, and silu is applied to the output."""
    states, rows, prefill, channels = inputs.states, inputs.rows, inputs.prefill, weight.shape[0]
    tokens = given.shape[0] - rows
    if prefill is None or not tokens:
        return
    assert states is not None, "a layer with a window has slots"
    slots, chunks = states.chunk_slots, states.chunk_slots.shape[0]
    few, block = _TILE[0], min(_TILE[1], next_power_of_2(channels))
    strides = (window.stride(0), given.stride(0))
    _chunks[(tokens // few + chunks, cdiv(channels, block))](
        given,
        weight,
        weight if bias is None else bias,
        window,
        slots,
        prefill.start,
        prefill.context,
        out,
        rows,
        given.shape[0] - out.shape[0],
        chunks,
        *strides,
        channels,
        window.shape[2],
        TAPS=weight.shape[1],
        WIDTH=window.shape[1],
        BIAS=bias is not None,
        TOKENS=few,
        CHANNELS=block,
        GATED=gated,
    )
    block = min(_CHANNELS, next_power_of_2(channels))
    _move_on[(chunks, cdiv(channels, block))](
        given,
        window,
        slots,
        prefill.start,
        prefill.context,
        rows,
        *strides,
        channels,
        window.shape[2],
        TAPS=weight.shape[1],
        WIDTH=window.shape[1],
        CHANNELS=block,
        GATED=gated,
    )
