"""What the kernels are handed of a step: tensors on the device, built once a step, read by every
layer.

A layer's KV is a LayerKv (kernels/layer_kv.py). Tokens of a step are ordered: S decode rows (one
token each), then the chunks' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.latent import LatentSizes

TILE = 128  # tokens by which a vocabulary is drawn from, and cut over ranks


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What layers that attend alike have in common: a step is planned once for each kind.

    rope: number of its rotary table.   window: a token sees itself and the window - 1 tokens before
    it; None: all. scale: of scores.   softcap: scores become softcap * tanh(score / softcap); None:
    as they are. turned_first: where heads of q and k are normed, they are so once they are turned.
    value_width: numbers of a value; None: as many as of a key. keys_as_values: a fused product has
    no columns of values: they are the keys' columns, before norm and rotation. normed_values:
    values are normed head by head, without a weight, by the eps of the keys' norm (Gemma 4).
    latent: the one KV head is a vector that all heads' keys and values may be made of; None: it
    isn't.
    """

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
    on stand alone."""

    start: Tensor  # [G + 1] int32
    blocks: Tensor  # [G, width] int32, padded with the scratch block
    length: Tensor  # [G] int32, tokens, multiples of 16


@dataclass(slots=True)
class DecodeInputs:
    """S queries of rows: a row's newest token, and behind it the drafts that it is offered, one
    query each. A query attends to the tokens up to its own, which is stored by then.

    `table` and `length` are the device's whole columns, which `rows` picks from: nothing is
    gathered to tell a step.
    """

    rows: Tensor  # [S] int32 or int64: the queries' rows; those of one row are neighbours
    position: Tensor  # [S] of any integer dtype: the queries' positions, as `prepare` left them
    table: Tensor  # [rows, width] int32: every row's table
    # [rows] int32: tokens stored before the step; a lone row's kernel reads it ahead of `position`
    length: Tensor
    # [S] int32: tokens of the group's prefix that a row's own part skips (0 where it stands alone)
    skip: Tensor
    max_own: int  # host: max(position + 1 - skip), or a bound of it
    groups: GroupInputs | None


@dataclass(slots=True)
class PrefillInputs:
    """Chunks: queries of one prompt each, causal, over the cache (the chunk's own K and V are
    stored already)."""

    start: Tensor  # [chunks + 1] int32, CSR over the step's tokens after the S decode rows
    context: Tensor  # [chunks] int32: position of a chunk's first token
    block_table: Tensor  # [chunks, width] int32
    seen: ChunkSight | None = (
        None  # host; None: in a graph, which runs whatever chunks are put into it
    )

    def expands(self, sizes: LatentSizes, least: int) -> bool:
        """Whether the chunks have each head's keys and values made of the latent vectors that they
        see: `least` tokens or more, where that is fewer multiplications."""
        seen = self.seen
        return (
            seen is not None
            and seen.tokens >= least
            and sizes.expands(seen.tokens, seen.stored, seen.pairs)
        )


@dataclass(frozen=True, slots=True)
class ChunkSight:
    """What a step's chunks see, as the host knows it."""

    tokens: int  # of the chunks
    stored: int  # tokens that they see, each chunk's own among them
    pairs: int  # of a chunk's token and one that it sees, itself among them

    @classmethod
    def of(cls, sizes: NDArray[np.integer[Any]], context: NDArray[np.integer[Any]]) -> ChunkSight:
        """sizes, context [chunks]: a chunk's tokens, and those before it."""
        sizes, context = sizes.astype(np.int64), context.astype(np.int64)
        tokens, pairs = int(sizes.sum()), int((sizes * context + sizes * (sizes + 1) // 2).sum())
        return cls(tokens, tokens + int(context[sizes > 0].sum()), pairs)


@dataclass(slots=True)
class StateInputs:
    """Slots of recurrent state that the step's tokens are folded into, a row's or a chunk's.

    A row that doesn't fold finds its newest token in its state already (its last draw came too late
    and is made again), or has ended: its answer is read from the state as it is.
    """

    slots: Tensor  # [S] of any integer dtype: of each decode row
    folds: Tensor  # [S] bool
    chunk_slots: Tensor  # [chunks] int64: what each chunk goes on from, and is folded into


@dataclass(slots=True)
class StepInputs:
    """Everything that layers need of a step."""

    positions: Tensor  # [tokens] int64: rotary positions
    # [tokens] int64: block * 16 + offset, where a token's K and V go (scratch block: nowhere)
    slots: Tensor
    rows: int  # S, the decode rows at the front
    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    alone: DecodeInputs | None = (
        None  # the same rows without prefix groups, for windows; None: `decode` has none
    )
    # what `ops.plan` worked out, once a step
    plans: dict[AttentionKind, Any] = field(default_factory=dict)
    by_layer: list[StepInputs] | None = (
        None  # the step as each layer sees it, where they keep K and V in other blocks
    )
    states: StateInputs | None = None  # None: no layer has recurrent state
    tags: Tensor | None = None  # [tokens] int32: their requests' tags, where the model reads them
    kept: int | None = (
        # tokens from the first on whose answers are asked for; of others K and V alone. None: all
        None
    )
    layer_inputs: Tensor | None = (
        None  # [tokens, layers, width]: what each layer is given of a token beside the stream
    )

    def decode_for(self, window: int | None) -> DecodeInputs | None:
        """Returns the rows as a layer with this window attends them: such rows see different parts
        of a shared prefix, and each is attended by itself. ValueError where they come in groups
        only."""
        if window is None or self.decode is None or self.decode.groups is None:
            return self.decode
        if self.alone is None:
            raise ValueError(
                "prefix groups cannot be attended with a sliding window: send the rows alone"
            )
        return self.alone

    def keep(self, x: Tensor) -> Tensor:
        """x [tokens, ...] -> those whose answers are asked for."""
        return x if self.kept is None else x[: self.kept]

    @property
    def is_one_row(self) -> bool:
        """Whether the step is one row that stands alone."""
        lone = self.rows == 1 and self.prefill is None and self.positions.shape[0] == 1
        return lone and self.decode is not None and self.decode.groups is None


@dataclass(slots=True)
class Queries:
    """Which token of its row each of a step's S queries feeds, and where the drafts are: a row's
    queries are neighbours, offset 0, 1, ..."""

    offset: Tensor  # [S] int32: 0 for the row's newest token
    draft: Tensor  # [S] int32: the token, where offset > 0


@dataclass(slots=True)
class SamplerInputs:
    """Sampling parameters of n rows of logits, on the device. `any_*` are host-known: whether any
    row asks for it."""

    temperature: Tensor  # [n] float32
    top_p: Tensor  # [n] float32
    top_k: Tensor  # [n] int32
    min_p: Tensor  # [n] float32
    seed: Tensor  # [n] int64
    sample: Tensor  # [n] int32
    # [n] int32: position of the token to be drawn, counted from the prompt's first token
    position: Tensor
    any_filter: bool
    any_random: bool  # False: every row is greedy (temperature 0), so no exponential is needed


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Which tokens a rank's logits are of, where several ranks share a vocabulary: column 0 is
    token `first`, a multiple of TILE. What they must know of each other goes through `gather`: x ->
    every rank's x, [ranks, *x.shape]. Shares differ by a tile where tiles don't divide, so no
    call's shape, and no count of calls, may come of a share.
    """

    first: int
    size: int  # of the whole vocabulary
    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]

    @property
    def largest_share(self) -> int:
        """Tokens of the rank that has the most of them: the same number on every rank."""
        return -(-self.size // (TILE * self.ranks)) * TILE

    def columns(self, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """tokens [...] -> their columns among this rank's `width`, 0 for those of others, and which
        are its own."""
        column = tokens - self.first
        mine = (column >= 0) & (column < width)
        return torch.where(mine, column, 0), mine

    def most(self, x: Tensor) -> Tensor:
        """Returns the largest of every rank's x [...]: a NaN of any is one."""
        return self.gather(x).amax(0)

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x [...], in the ranks' order."""
        return self.gather(x).sum(0)

    def best(self, score: Tensor, token: Tensor) -> Tensor:
        """Returns the token [n] int64 of the rank with the largest score [n] float32, the first one
        among equals: 8 bytes a row."""
        told = self.gather(torch.stack((score.view(torch.int32), token.to(torch.int32))))
        who = told[:, 0].view(torch.float32).argmax(0, keepdim=True)
        return told[:, 1].gather(0, who)[0].to(torch.int64)
