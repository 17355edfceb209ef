"""Inputs of a step for kernels: tensors on the device, built once a step, read by every layer.

A layer's KV is a LayerKv (kernels/layer_kv.py). Tokens of a step are ordered: S decode rows (one
token each), then the chunks' tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.latent import LatentSizes

TILE = 128  # tokens per tile of a vocabulary, for sampling and for cuts over ranks


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Properties shared by layers with equal attention; a step is planned once for each kind.

    rope: index of the rotary table. window: a token sees itself and the window - 1 tokens before
    it; None: all. scale: factor of scores. softcap: scores become softcap * tanh(score / softcap);
    None: no cap. turned_first: norms of q's and k's heads come after rotation. value_width: numbers
    of a value; None: as many as of a key. keys_as_values: a fused product has no columns of values:
    they are the keys' columns, before norm and rotation. normed_values: values are normed per head,
    without a weight, with the eps of the keys' norm (Gemma 4). latent: sizes for attention over
    latents, with one KV head; None: ordinary heads."""

    heads: int
    kv_heads: int
    width: int
    rope: int
    window: int | None
    scale: float
    softcap: float | None = None
    turned_first: bool = False
    value_width: int | None = None
    keys_as_values: bool = False
    normed_values: bool = False
    latent: LatentSizes | None = None


@dataclass(slots=True)
class GroupInputs:
    """Decode rows that share a prefix: group g is rows start[g] : start[g + 1]; rows from start[-1]
    on have no group."""

    start: Tensor  # [G + 1] int32
    blocks: Tensor  # [G, width] int32, padded with the scratch block
    length: Tensor  # [G] int32: tokens, multiples of 16


@dataclass(slots=True)
class DecodeInputs:
    """S queries of rows: a row's newest token, then its drafts, one query each. A query attends to
    the tokens up to its own, whose K and V are stored by then.
    `table` and `length` are the device's whole columns, indexed by `rows`, so that a step needs no
    gathering."""

    rows: Tensor  # [S] int32 or int64: the queries' rows; queries of one row are adjacent
    position: Tensor  # [S] of any integer dtype: the queries' positions, from `prepare`
    table: Tensor  # [rows, width] int32: block table of every row
    # [rows] int32: tokens stored before the step; the kernel of a single row reads it before
    # `position`
    length: Tensor
    # [S] int32: tokens of the group's prefix, skipped in a row's own part (0 without a group)
    skip: Tensor
    max_own: int  # on the host: max(position + 1 - skip), or an upper bound of it
    groups: GroupInputs | None


@dataclass(slots=True)
class PrefillInputs:
    """Chunks: queries of one prompt each, causal, over the cache (the chunk's own K and V are
    stored already)."""

    start: Tensor  # [chunks + 1] int32, CSR over the step's tokens after the S decode rows
    context: Tensor  # [chunks] int32: position of a chunk's first token
    block_table: Tensor  # [chunks, width] int32
    seen: ChunkSight | None = None  # on the host; None: in a graph, which must work for any chunks

    def expands(self, sizes: LatentSizes, least: int) -> bool:
        """Returns True if chunks expand each head's keys and values from the latents they see: with
        `least` tokens or more, if that takes fewer multiplications."""
        seen = self.seen
        return (
            seen is not None
            and seen.tokens >= least
            and sizes.expands(seen.tokens, seen.stored, seen.pairs)
        )


@dataclass(frozen=True, slots=True)
class ChunkSight:
    """Counts over a step's chunks, known to the host."""

    tokens: int  # tokens of the chunks
    stored: int  # tokens that the chunks see, their own included
    pairs: int  # pairs of a chunk's token and a token that it sees, itself included

    @classmethod
    def of(cls, sizes: NDArray[np.integer[Any]], context: NDArray[np.integer[Any]]) -> ChunkSight:
        """Returns the counts. sizes, context: [chunks], a chunk's tokens and the
        tokens before it."""
        sizes, context = sizes.astype(np.int64), context.astype(np.int64)
        tokens, pairs = int(sizes.sum()), int((sizes * context + sizes * (sizes + 1) // 2).sum())
        return cls(tokens, tokens + int(context[sizes > 0].sum()), pairs)


@dataclass(slots=True)
class StateInputs:
    """Slots of recurrent state that a row's or chunk's tokens update.
    If a row doesn't fold, its state is left alone and read as it is: either its newest token is in
    the state already (its last draw came too late and is repeated), or the row has ended."""

    slots: Tensor  # [S] of any integer dtype: slot of each decode row
    folds: Tensor  # [S] bool: True if the row's token updates the state
    chunk_slots: Tensor  # [chunks] int64: slot that each chunk continues and updates


@dataclass(slots=True)
class StepInputs:
    """All inputs of layers in a step."""

    positions: Tensor  # [tokens] int64: rotary positions
    # [tokens] int64: block * 16 + offset of a token's K and V (scratch block: discarded)
    slots: Tensor
    rows: int  # S, the decode rows at the front
    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    alone: DecodeInputs | None = (
        None  # the same rows without prefix groups, for windows; None: `decode` has no groups
    )
    # results of `ops.plan`, once a step
    plans: dict[AttentionKind, Any] = field(default_factory=dict)
    by_layer: list[StepInputs] | None = (
        None  # the step as each layer sees it, if layers keep K and V in different blocks
    )
    states: StateInputs | None = None  # None: no layer has recurrent state
    # [tokens] int32: tags of the tokens' requests, if the model reads them
    tags: Tensor | None = None
    kept: int | None = (
        # number of leading tokens whose output is needed; for the others only K and V. None: all
        None
    )
    layer_inputs: Tensor | None = (
        None  # [tokens, layers, width]: each layer's input per token, beside the stream
    )

    def decode_for(self, window: int | None) -> DecodeInputs | None:
        """Returns the rows for a layer with this window. With a window rows see different parts of
        a shared prefix, so they are taken without groups. Raises ValueError if the step has them in
        groups only."""
        if window is None or self.decode is None or self.decode.groups is None:
            return self.decode
        if self.alone is None:
            raise ValueError(
                "prefix groups cannot be attended with a sliding window: send the rows alone"
            )
        return self.alone

    def keep(self, x: Tensor) -> Tensor:
        """Returns the rows of x [tokens, ...] whose output is needed."""
        return x if self.kept is None else x[: self.kept]

    @property
    def is_one_row(self) -> bool:
        """True if the step is a single row without a group."""
        lone = self.rows == 1 and self.prefill is None and self.positions.shape[0] == 1
        return lone and self.decode is not None and self.decode.groups is None


@dataclass(slots=True)
class Queries:
    """The S queries of a step: each query's offset after the row's newest token, and its draft. A
    row's queries are adjacent, offset 0, 1, ..."""

    offset: Tensor  # [S] int32: 0 for the row's newest token
    draft: Tensor  # [S] int32: the draft token, if offset > 0


@dataclass(slots=True)
class SamplerInputs:
    """Sampling parameters of n rows of logits, on the device. any_*: known to the host: True if any
    row needs it."""

    temperature: Tensor  # [n] float32
    top_p: Tensor  # [n] float32
    top_k: Tensor  # [n] int32
    min_p: Tensor  # [n] float32
    seed: Tensor  # [n] int64
    sample: Tensor  # [n] int32
    # [n] int32: position of the token to draw, counted from the prompt's first token
    position: Tensor
    any_filter: bool
    any_random: bool  # False: every row is greedy (temperature 0), so no exponential is needed


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's range of a vocabulary shared by several ranks: column 0 of its logits is token
    `first`, a multiple of TILE.

    gather: x -> every rank's x, [ranks, *x.shape]. Shares differ by a tile if ranks don't divide
    the tiles, so no shape and no count of `gather` calls may depend on a share."""

    first: int
    size: int  # tokens of the whole vocabulary
    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]

    @property
    def largest_share(self) -> int:
        """Tokens of the largest share, the same number on every rank."""
        return -(-self.size // (TILE * self.ranks)) * TILE

    def columns(self, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Returns the columns of tokens [...] among this rank's `width` (0 for tokens of other
        ranks), and a bool mask of its own tokens."""
        column = tokens - self.first
        mine = (column >= 0) & (column < width)
        return torch.where(mine, column, 0), mine

    def most(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of every rank's x [...]; a NaN on any rank gives NaN."""
        return self.gather(x).amax(0)

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x [...], added in rank order."""
        return self.gather(x).sum(0)

    def best(self, score: Tensor, token: Tensor) -> Tensor:
        """Returns the token [n] int64 of the rank with the largest score [n] float32, the first
        rank among equals. Gathers 8 bytes a row."""
        told = self.gather(torch.stack((score.view(torch.int32), token.to(torch.int32))))
        who = told[:, 0].view(torch.float32).argmax(0, keepdim=True)
        return told[:, 1].gather(0, who)[0].to(torch.int64)
