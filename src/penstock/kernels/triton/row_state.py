"""The step's own bookkeeping on the device: rows join and grow, a step's arrays are made, its draw is taken in.

One launch each, whole columns and row ids in, nothing asked back. What each does is execute/device_rows.py's and
execute/batch.py's, said again in kernels. It knows rows, blocks and ids; no sequences, no model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.reference.tile_draw import BAD_LOGITS
from penstock.kernels.triton.pdl import has_pdl, release, wait
from penstock.kernels.triton.row_columns import NO_TOKEN, RowColumns

_BLOCK = 256
_STOPS = 8
_SCRATCH = 0  # schedule.step's SCRATCH_BLOCK

# A joining row in 32-bit words; its blocks follow. -1 in the first: none.
_INTS = ("row", "last_token", "length", "limit", "prompt_length", "min_length", "sample")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_MORE = ("seed_low", "seed_high", "top_k", "ignore_eos", "wants", "logprobs", "bias_start", "bias_count")
JOIN_WORDS = len(_INTS) + len(_FLOATS) + len(_MORE) + _STOPS


@triton.jit(do_not_specialize=["count"])
def _prepare(
    row_ids, last_token, length, done, block_table, table_width, slot_token, token_ids, positions, slots,
    count, dump_block, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    wait(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    row = tl.load(row_ids + i, mask=there, other=0).to(tl.int64)
    token = tl.load(last_token + row, mask=there, other=0)
    stored = tl.load(length + row, mask=there, other=0)
    over = tl.load(done + row, mask=there, other=1) != 0
    entry = tl.minimum(stored // SLOTS, table_width - 1)
    block = tl.load(block_table + row * table_width + entry, mask=there, other=0).to(tl.int64)
    slot = tl.where(over, dump_block, block) * SLOTS + stored % SLOTS
    tl.store(token_ids + i, token, mask=there)
    tl.store(positions + i, stored, mask=there)
    tl.store(slots + i, slot, mask=there)
    tl.store(slot_token + slot, token, mask=there)


def prepare(
    row_ids: Tensor,
    rows: RowColumns,
    slot_token: Tensor,
    dump_block: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """row_ids [S] int32 -> the first S entries of token_ids, positions, slots (of any integer dtype that holds them),
    and each row's token stored beside its K and V, slot_token [blocks, 16] int32.

    Rows that are done go to the dump block, at their own offset.
    """
    count = row_ids.shape[0]
    if count:
        early = has_pdl(row_ids.device)
        _prepare[(triton.cdiv(count, _BLOCK),)](
            row_ids, rows.last_token, rows.length, rows.done, rows.block_table, rows.block_table.stride(0), slot_token,
            token_ids, positions, slots, count, dump_block, SLOTS=BLOCK_SIZE, BLOCK=_BLOCK, EARLY=early,
            num_warps=4, launch_pdl=bool(early),
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _advance(
    row_ids, drawn, last_token, length, done, limit, ignore_eos, stop_ids, is_end, told, count,
    NONE: tl.constexpr, BAD: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    wait(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    row = tl.load(row_ids + i, mask=there, other=0).to(tl.int64)
    live = there & (tl.load(done + row, mask=there, other=1) == 0)
    drew = tl.load(drawn + i, mask=live, other=NONE)
    tl.store(told + i, drew, mask=there)
    moved = live & (drew >= 0)
    stored = tl.load(length + row, mask=moved, other=0) + 1
    over = tl.load(is_end + drew, mask=moved, other=0) != 0
    over = over & (tl.load(ignore_eos + row, mask=moved, other=1) == 0)
    for j in tl.static_range(STOPS):
        over = over | (tl.load(stop_ids + row * STOPS + j, mask=moved, other=-1) == drew)
    over = over | (stored + 1 >= tl.load(limit + row, mask=moved, other=0))
    tl.store(last_token + row, drew, mask=moved)
    tl.store(length + row, stored, mask=moved)
    tl.store(done + row, (over | (drew == BAD)).to(tl.int1), mask=live)


def advance(row_ids: Tensor, drawn: Tensor, rows: RowColumns, told: Tensor | None = None) -> Tensor:
    """Takes a step's draw into the rows. row_ids [S], drawn [S] int32 -> what the host is told, [S] int32.

    A row that was done before tells NO_TOKEN and stays as it is; one with BAD_LOGITS is done from now on. A live row
    comes once; the dead row as often as padding needs it.
    """
    told = torch.empty_like(drawn) if told is None else told
    count = row_ids.shape[0]
    assert rows.stop_ids.shape[1] == _STOPS
    if count:
        early = has_pdl(row_ids.device)
        _advance[(triton.cdiv(count, _BLOCK),)](
            row_ids, drawn, rows.last_token, rows.length, rows.done, rows.limit, rows.ignore_eos, rows.stop_ids,
            rows.is_end, told, count, NONE=NO_TOKEN, BAD=BAD_LOGITS, STOPS=_STOPS, BLOCK=_BLOCK, EARLY=early,
            num_warps=4, launch_pdl=bool(early),
        )  # fmt: skip
    return told


@triton.jit(do_not_specialize=["words"])
def _join(
    packed, last_token, length, limit, prompt_length, min_length, sample, temperature, top_p, min_p, repetition,
    presence, frequency, seed, top_k, ignore_eos, wants, logprobs, bias_start, bias_count, stop_ids, done, block_table,
    words, table_width, WORDS: tl.constexpr, STOPS: tl.constexpr, SCRATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = packed + tl.program_id(0).to(tl.int64) * words
    row = tl.load(at).to(tl.int64)
    if row >= 0:
        tl.store(last_token + row, tl.load(at + 1))
        tl.store(length + row, tl.load(at + 2))
        tl.store(limit + row, tl.load(at + 3))
        tl.store(prompt_length + row, tl.load(at + 4))
        tl.store(min_length + row, tl.load(at + 5))
        tl.store(sample + row, tl.load(at + 6))
        tl.store(temperature + row, tl.load(at + 7).to(tl.float32, bitcast=True))
        tl.store(top_p + row, tl.load(at + 8).to(tl.float32, bitcast=True))
        tl.store(min_p + row, tl.load(at + 9).to(tl.float32, bitcast=True))
        tl.store(repetition + row, tl.load(at + 10).to(tl.float32, bitcast=True))
        tl.store(presence + row, tl.load(at + 11).to(tl.float32, bitcast=True))
        tl.store(frequency + row, tl.load(at + 12).to(tl.float32, bitcast=True))
        low = tl.load(at + 13).to(tl.int64) & 0xFFFFFFFF
        tl.store(seed + row, (tl.load(at + 14).to(tl.int64) << 32) | low)
        tl.store(top_k + row, tl.load(at + 15))
        tl.store(ignore_eos + row, tl.load(at + 16) != 0)
        tl.store(wants + row, tl.load(at + 17))
        tl.store(logprobs + row, tl.load(at + 18))
        tl.store(bias_start + row, tl.load(at + 19))
        tl.store(bias_count + row, tl.load(at + 20))
        stop = tl.arange(0, STOPS)
        tl.store(stop_ids + row * STOPS + stop, tl.load(at + 21 + stop))
        tl.store(done + row, tl.load(at) < 0)
        for first in range(0, table_width, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            block = tl.load(at + WORDS + entry, mask=entry < words - WORDS, other=SCRATCH)
            tl.store(block_table + row * table_width + entry, block, mask=entry < table_width)


def pack_joins(joins: Any, bias_start: NDArray[np.integer], out: NDArray[np.int32]) -> None:
    """schedule.step.Joins of k rows into out [k or more, JOIN_WORDS + width] int32; lines past k are marked as none.

    bias_start [k]: where each row's biases lie in the device's pool. width: at least that of joins.blocks; what is
    beyond it is scratch, as is what the table holds beyond out's width.
    """
    asked, k = joins.sampling, joins.rows.shape[0]
    out[k:, 0] = -1
    seed = np.ascontiguousarray(asked.seed, np.int64).view(np.int32).reshape(k, 2)
    more = {
        "row": joins.rows, "sample": joins.samples, "seed_low": seed[:, 0], "seed_high": seed[:, 1],
        "bias_start": bias_start, "bias_count": np.diff(asked.bias_start),
    }  # fmt: skip
    for word, name in enumerate(_INTS + _FLOATS + _MORE):
        values = more[name] if name in more else getattr(joins if name in _INTS else asked, name)
        if name in _FLOATS:
            values = np.ascontiguousarray(values, np.float32).view(np.int32)
        out[:k, word] = values
    out[:k, JOIN_WORDS - _STOPS : JOIN_WORDS] = asked.stop_ids
    brought = joins.blocks.shape[1]
    out[:k, JOIN_WORDS : JOIN_WORDS + brought] = joins.blocks
    out[:k, JOIN_WORDS + brought :] = _SCRATCH


def join(packed: Tensor, rows: RowColumns) -> None:
    """Rows come to life: packed [k, JOIN_WORDS + width] int32 as pack_joins made it. Tables are scratch past width."""
    k, words = packed.shape
    if k:
        _join[(k,)](
            packed, rows.last_token, rows.length, rows.limit, rows.prompt_length, rows.min_length, rows.sample,
            rows.temperature, rows.top_p, rows.min_p, rows.repetition, rows.presence, rows.frequency, rows.seed,
            rows.top_k, rows.ignore_eos, rows.wants, rows.logprobs, rows.bias_start, rows.bias_count, rows.stop_ids,
            rows.done, rows.block_table, words, rows.block_table.stride(0),
            WORDS=JOIN_WORDS, STOPS=_STOPS, SCRATCH=_SCRATCH, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _grow(new_blocks, block_table, table_width, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(new_blocks + i * 3, mask=i < count, other=-1).to(tl.int64)
    entry = tl.load(new_blocks + i * 3 + 1, mask=row >= 0, other=0)
    block = tl.load(new_blocks + i * 3 + 2, mask=row >= 0, other=0)
    tl.store(block_table + row * table_width + entry, block, mask=row >= 0)


def grow(new_blocks: Tensor, rows: RowColumns) -> None:
    """new_blocks [m, 3] int32: row (-1: nothing), index in its table, block."""
    count = new_blocks.shape[0]
    if count:
        _grow[(triton.cdiv(count, _BLOCK),)](
            new_blocks, rows.block_table, rows.block_table.stride(0), count, BLOCK=_BLOCK, num_warps=4
        )
