"""Tiles: rectangles of decode queries for matrix products. A step's queries are divided into tiles
once a step, on the host.

A tile is n prefix groups of M members, with a prefix of L tokens per group and N own tokens per
member. Groups with fewer members or tokens are padded. A query without a group is a group of one
with no prefix. Larger tiles need fewer calls of torch, which cost microseconds each, but more
padding: a tile grows until its padding costs more than the calls for another tile. Knows tables,
lengths and groups; no queries and no KV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import DecodeInputs
from penstock.kernels.layer_kv import RowIndex

Int = NDArray[np.int64]

# Costs measured on 2 cores of a Zen 5. The unit is 0.4 us, the time to gather and multiply one KV
# block of one KV head of width 64.
CALLS = 150  # cost of torch's calls for one tile
MEMBER_BLOCK = 0.17  # cost of multiplying one member's queries of one KV head by one prefix block
# Most own blocks x KV heads of a tile, 6 MB of gathered bf16 KV. More would leave the processor's
# cache before it is used.
TILE_BLOCKS = 1536
TILE_SCORES = 1 << 21  # most scores of a tile


@dataclass(slots=True)
class Tile:
    """A tile of R = n * M queries: n groups of M members, L prefix tokens a group, N own tokens a
    member. Indices are those of KV viewed as [blocks * kv_heads * 2, 16 * width]. Biases are added
    to scores: 0, or -inf for tokens that a query doesn't see."""

    rows: Int  # [R] indices of queries in the step; padding repeats a member of its group
    groups: int  # n
    members: int  # M
    prefix: int  # L, tokens
    own: int  # N, tokens
    prefix_index: RowIndex | None  # [2 * kv_heads * n * L / 16]
    own_index: RowIndex  # [2 * kv_heads * R * N / 16]
    prefix_bias: Tensor | None  # [n, 1, L]
    own_bias: Tensor | None  # [R, 1, N - own_clear]
    own_clear: int  # the first own_clear own tokens are seen by every query, so they need no bias
    own_mask: Tensor | None = None  # None until `mask` makes it

    def mask(self) -> Tensor | None:
        """Returns the bias of all own tokens, [1, R, 1, N], which the step's layers share; None:
        all are seen."""
        if self.own_mask is None and self.own_bias is not None:
            self.own_mask = F.pad(self.own_bias, (self.own_clear, 0))[None]
        return self.own_mask


@dataclass(slots=True)
class _Part:
    """Queries that go into the same tile: the members of a group, or queries without a group that
    have equally many own blocks."""

    rows: Int  # [n, M]
    group: Int  # [n]; -1: no group
    prefix_blocks: int
    own_blocks: int


def cut(decode: DecodeInputs, heads: int, kv_heads: int, window: int | None) -> list[Tile]:
    """Divides a step's decode queries into tiles. heads, kv_heads: of the layer. window: see
    AttentionKind."""
    row_ids = decode.rows.to(torch.int64)
    lengths = decode.position.cpu().numpy().astype(np.int64) + 1
    skip = decode.skip.cpu().numpy().astype(np.int64)
    first = skip if window is None else np.maximum(skip, lengths - window)
    first_block = first // BLOCK_SIZE
    own_blocks = np.maximum(-(-lengths // BLOCK_SIZE) - first_block, 1)
    parts = [
        *_group_parts(decode, own_blocks, heads, kv_heads),
        *_alone_parts(decode, own_blocks, kv_heads),
    ]
    return [_tile(part, decode, row_ids, first, first_block, lengths, kv_heads) for part in parts]


def _group_parts(decode: DecodeInputs, own_blocks: Int, heads: int, kv_heads: int) -> list[_Part]:
    if decode.groups is None:
        return []
    # (prefix blocks, members, own blocks, group, rows) of each group
    pieces: list[tuple[int, int, int, int, Int]] = []
    starts = decode.groups.start.tolist()
    for group, prefix in enumerate(decode.groups.length.tolist()):
        start, end = starts[group : group + 2]
        if start == end:
            continue
        most = int(own_blocks[start:end].max())
        limit = _row_limit(most, prefix // BLOCK_SIZE, heads, kv_heads)
        for rows in np.array_split(np.arange(start, end), -(-(end - start) // limit)):
            pieces.append(
                (prefix // BLOCK_SIZE, len(rows), int(own_blocks[rows].max()), group, rows)
            )
    pieces.sort(key=lambda piece: piece[:3], reverse=True)
    return _joined(pieces, heads, kv_heads)


def _row_limit(own_blocks: int, prefix_blocks: int, heads: int, kv_heads: int) -> int:
    scores = heads * (own_blocks + prefix_blocks) * BLOCK_SIZE
    return max(1, min(TILE_BLOCKS // (own_blocks * kv_heads), TILE_SCORES // scores))


def _joined(pieces: list[tuple[int, int, int, int, Int]], heads: int, kv_heads: int) -> list[_Part]:
    parts: list[_Part] = []
    at = 0
    while at < len(pieces):
        blocks, members, own = pieces[at][:3]
        waste, count = 0.0, 1
        while at + count < len(pieces):
            b, m, o = pieces[at + count][:3]
            wider, taller = max(own, o), max(members, m)
            waste += kv_heads * (MEMBER_BLOCK * (blocks * taller - b * m) + wider * taller - o * m)
            rows = (count + 1) * taller
            if waste > CALLS or rows > _row_limit(wider, blocks, heads, kv_heads):
                break
            own, members, count = wider, taller, count + 1
        taken = pieces[at : at + count]
        rows = np.stack([np.concatenate([r, np.full(members - len(r), r[0])]) for *_, r in taken])
        parts.append(_Part(rows, np.array([group for _, _, _, group, _ in taken]), blocks, own))
        at += count
    return parts


def _alone_parts(decode: DecodeInputs, own_blocks: Int, kv_heads: int) -> list[_Part]:
    start = int(decode.groups.start[-1]) if decode.groups is not None else 0
    order = start + np.argsort(-own_blocks[start:], kind="stable")
    counts = own_blocks[order]
    parts: list[_Part] = []
    at = 0
    while at < len(order):
        most = int(counts[at])
        waste = np.cumsum(most - counts[at:]) * kv_heads
        count = int(np.searchsorted(waste, CALLS, side="right"))
        count = max(1, min(count, TILE_BLOCKS // (most * kv_heads)))
        rows = np.sort(order[at : at + count])
        parts.append(_Part(rows[:, None], np.full(count, -1), 0, most))
        at += count
    return parts


def _tile(
    part: _Part,
    decode: DecodeInputs,
    row_ids: Tensor,
    first: Int,
    first_block: Int,
    lengths: Int,
    kv_heads: int,
) -> Tile:
    device = decode.table.device
    flat = part.rows.reshape(-1)
    rows = row_ids.index_select(0, torch.from_numpy(flat).to(device))
    own = part.own_blocks * BLOCK_SIZE
    columns = torch.from_numpy(first_block[flat]).to(device)[:, None] + torch.arange(
        part.own_blocks, device=device
    )
    table = decode.table[rows[:, None], columns.clamp_(max=decode.table.shape[1] - 1)]
    begin, end = (
        (first - first_block * BLOCK_SIZE)[flat],
        (lengths - first_block * BLOCK_SIZE)[flat],
    )
    clear = int(end.min()) if not begin.any() else 0
    tile = Tile(
        rows=flat,
        groups=part.rows.shape[0],
        members=part.rows.shape[1],
        prefix=part.prefix_blocks * BLOCK_SIZE,
        own=own,
        prefix_index=None,
        own_index=_index(table, kv_heads),
        prefix_bias=None,
        own_bias=None if clear >= own else _bias(begin, end, clear, own, device),
        own_clear=min(max(clear, 0), own),
    )
    if part.prefix_blocks:
        _add_prefix(tile, part, decode, kv_heads)
    return tile


def _add_prefix(tile: Tile, part: _Part, decode: DecodeInputs, kv_heads: int) -> None:
    assert decode.groups is not None
    device = decode.table.device
    groups = torch.from_numpy(part.group).to(device)
    tile.prefix_index = _index(
        decode.groups.blocks.index_select(0, groups)[:, : part.prefix_blocks], kv_heads
    )
    prefixes = decode.groups.length.cpu().numpy().astype(np.int64)[part.group]
    if (prefixes < tile.prefix).any():
        tile.prefix_bias = _bias(np.zeros_like(prefixes), prefixes, 0, tile.prefix, device)


def _index(table: Tensor, kv_heads: int) -> RowIndex:
    """Returns indices of the blocks of table [n, blocks] in KV viewed as [blocks * kv_heads * 2,
    ...]: all of K, then all of V, each sorted by KV head and row: [2 * kv_heads * n * blocks]."""
    part = torch.arange(2, device=table.device)[:, None, None, None]
    head = torch.arange(kv_heads, device=table.device)[:, None, None]
    return RowIndex((table.long() * (2 * kv_heads) + 2 * head + part).flatten())


def _bias(begin: Int, end: Int, clear: int, width: int, device: torch.device) -> Tensor:
    """Returns a bias of scores for tokens from `clear` to `width`, [n, 1, width - clear]: 0 if
    begin <= token < end, else -inf. begin, end: [n]."""
    token = np.arange(max(clear, 0), width)
    seen = (token >= begin[:, None]) & (token < end[:, None])
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]).to(device)
