"""Inputs of a step for kernels. They are tensors on the device that are built once a step and read
by every layer.

A row is one sequence of the batch. A step has S decode queries first (a row's newest token, and
each of its drafts), then the tokens of chunks, which are pieces of prompts (prefill). A layer's KV
cache is a LayerKv (kernels/layer_kv.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.latent import LatentSizes

# tokens per tile of a vocabulary; sampling goes tile by tile, and ranks hold whole tiles
TILE = 128
ENDED = 2**31 - 1  # StateInputs.folded of rows that store nothing


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Properties of a layer's attention. Layers with equal properties share a plan of the step
    (Ops.plan).

    rope: index of the rotary table. window: a token sees itself and the window - 1 tokens before
    it; None: all tokens before it. scale: factor of scores. softcap: scores become softcap *
    tanh(score / softcap); None: no cap. turned_first: True: q's and k's heads are normed after
    rotation, not before. value_width: numbers of a value; None: as many as a key has.
    keys_as_values: True: the fused qkv product computes no values; the keys before norm and
    rotation serve as values. normed_values: True: values are normed per head, without a weight,
    with the eps of the keys' norm (Gemma 4). latent: sizes of multi-head latent attention, which
    has one KV head; None: ordinary attention."""

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
    """Groups of decode rows that share a prefix, so that its KV is read once. Group g of the G
    groups is rows start[g] : start[g + 1]; rows from start[-1] on have no group."""

    start: Tensor  # [G + 1] int32
    blocks: Tensor  # [G, width] int32: blocks of each group's prefix, padded with the scratch block
    length: Tensor  # [G] int32: tokens of each group's prefix, multiples of 16
    # set if latent attention is to expand keys and values of each head from the prefixes' latents
    expanded: PrefixSight | None = None


@dataclass(frozen=True, slots=True)
class PrefixSight:
    """Token counts of a step's prefix groups, which the host knows."""

    stored: int  # tokens of the prefixes
    pairs: int  # pairs of a group's query and a token of its prefix

    @classmethod
    def of(cls, start: NDArray[np.int32], length: NDArray[np.int32]) -> PrefixSight:
        """Computes the counts. start: [G + 1], length: [G], as in GroupInputs."""
        queries = (start[1:] - start[:-1]).astype(np.int64)
        return cls(int(length.sum(dtype=np.int64)), int(queries @ length))


@dataclass(slots=True)
class DecodeInputs:
    """The S decode queries of a step. Each row has one query for its newest token and one for each
    of its drafts. A query attends to the tokens up to its own, whose K and V are already stored.

    `table` and `length` are arrays over all rows of the engine, which kernels index by `rows`. So a
    step doesn't have to gather them."""

    rows: Tensor  # [S] int32 or int64: row of each query; queries of one row are adjacent
    # [S] of any integer dtype: position of each query's token, from `RowOps.prepare`
    position: Tensor
    table: Tensor  # [rows, width] int32: block table of every row
    # [rows] int32: tokens stored before the step; the kernel of a single row reads it before
    # `position`
    length: Tensor
    # [S] int32: tokens of the prefix of the query's group, 0 without a group. The query's own part
    # begins after them.
    skip: Tensor
    # the most tokens of a query's own part, position + 1 - skip, or an upper bound; a number that
    # the host knows
    max_own: int
    groups: GroupInputs | None


@dataclass(slots=True)
class PrefillInputs:
    """The chunks of a step. A chunk is a run of consecutive tokens of one prompt. A token of it
    attends to the prompt's tokens up to itself, which are in the cache; the chunk's own K and V are
    already stored."""

    # [chunks + 1] int32: chunk c is tokens start[c] : start[c + 1], counted after the S decode
    # queries
    start: Tensor
    context: Tensor  # [chunks] int32: position of a chunk's first token
    block_table: Tensor  # [chunks, width] int32
    # known to the host; None: the step is captured as a graph, which must work for any chunks
    seen: ChunkSight | None = None

    def expands(self, sizes: LatentSizes, least: int) -> bool:
        """Returns True if latent attention of these chunks should expand keys and values of each
        head from the latents: if the chunks have at least `least` tokens and it takes fewer
        multiplications."""
        seen = self.seen
        return (
            seen is not None
            and seen.tokens >= least
            and sizes.expands(seen.tokens, seen.stored, seen.pairs)
        )


@dataclass(frozen=True, slots=True)
class ChunkSight:
    """Token counts of a step's chunks, which the host knows."""

    tokens: int  # tokens of the chunks
    stored: int  # tokens that a chunk's last token sees, itself included; summed over chunks
    pairs: int  # pairs of a chunk's token and a token that it sees, itself included

    @classmethod
    def of(cls, sizes: NDArray[np.integer[Any]], context: NDArray[np.integer[Any]]) -> ChunkSight:
        """Computes the counts. sizes: [chunks], tokens of each chunk. context: [chunks], tokens of
        its prompt before it."""
        sizes, context = sizes.astype(np.int64), context.astype(np.int64)
        tokens, pairs = int(sizes.sum()), int((sizes * context + sizes * (sizes + 1) // 2).sum())
        return cls(tokens, tokens + int(context[sizes > 0].sum()), pairs)


@dataclass(slots=True)
class StateInputs:
    """Slots of recurrent state that decode queries and chunks read and update.

    A row whose newest token has position p takes its tokens in order. Tokens folded .. p - 1,
    drafts of the step before that turned out right, are folded into the state again, from what the
    slot keeps of them. Then comes the newest token, and the state is stored. It is in the state
    already (folded is p + 1) if its sampling is repeated in this step. Last come the row's drafts
    of this step, whose states are not stored."""

    slots: Tensor  # [S] of any integer dtype: slot of each query's row
    # [S] int32: number of tokens in the slot's state; ENDED if the row has ended: then nothing is
    # stored
    folded: Tensor
    offset: Tensor  # [S] int32: as in Queries
    chunk_slots: Tensor  # [chunks] int64: slot that each chunk continues and updates
    # the column's own forms of the above, made by the step's first layer that needs them
    order: Any = None
    places: Any = None


@dataclass(slots=True)
class StepInputs:
    """All inputs of a step that layers read. tokens:
    number of the step's tokens, padding included."""

    positions: Tensor  # [tokens] int64: rotary positions
    # [tokens] int64: where each token's K and V are stored: block * 16 + offset (padding: in the
    # scratch block, which is never read)
    slots: Tensor
    rows: int  # S, number of decode queries, which come first
    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    alone: DecodeInputs | None = (
        # `decode` without prefix groups, for layers with a window; None: `decode` has no groups
        None
    )
    # kind of attention -> result of `ops.plan`, which runs once a step for each kind
    plans: dict[AttentionKind, Any] = field(default_factory=dict)
    by_layer: list[StepInputs] | None = (
        # the inputs for each layer, if layers store K and V in different blocks; None: all are
        # equal
        None
    )
    states: StateInputs | None = None  # None: no layer has recurrent state
    # [tokens] int32: tag of each token's request; None: the model doesn't read tags
    tags: Tensor | None = None
    kept: int | None = (
        # the output of only the first `kept` tokens is needed; of the others only K and V are.
        # None: all
        None
    )
    layer_inputs: Tensor | None = (
        # [tokens, layers, width]: per-layer inputs (layers/layer_inputs.py); None: the model has
        # none
        None
    )

    def decode_for(self, window: int | None) -> DecodeInputs | None:
        """Returns the decode queries for a layer with this window. With a window, rows of a group
        see different parts of their prefix, so `alone` is returned, which has no groups. Raises
        ValueError if the step has groups but no `alone`."""
        if window is None or self.decode is None or self.decode.groups is None:
            return self.decode
        if self.alone is None:
            raise ValueError(
                "prefix groups cannot be attended with a sliding window: send the rows alone"
            )
        return self.alone

    def keep(self, x: Tensor) -> Tensor:
        """Returns the first `kept` rows of x [tokens, ...]: those whose output is needed."""
        return x if self.kept is None else x[: self.kept]

    @property
    def is_one_row(self) -> bool:
        """True if the step is one decode query without a prefix group."""
        lone = self.rows == 1 and self.prefill is None and self.positions.shape[0] == 1
        return lone and self.decode is not None and self.decode.groups is None


@dataclass(slots=True)
class Queries:
    """The tokens of a step's S decode queries. Query 0 of a row has the row's newest token, query n
    > 0 its n-th draft. A row's queries are adjacent."""

    offset: Tensor  # [S] int32: number of the query in its row, 0 for the newest token
    draft: Tensor  # [S] int32: the query's draft token, if offset > 0


@dataclass(slots=True)
class SamplerInputs:
    """Sampling parameters of n rows of logits, on the device. any_*: True if some row needs that
    operation, as the host knows."""

    temperature: Tensor  # [n] float32
    top_p: Tensor  # [n] float32
    top_k: Tensor  # [n] int32
    min_p: Tensor  # [n] float32
    seed: Tensor  # [n] int64
    sample: Tensor  # [n] int32
    # [n] int32: position of the token to sample, counted from the prompt's first token
    position: Tensor
    any_filter: bool
    # False: every row is greedy (temperature 0), so exponentials need not be computed
    any_random: bool


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's range of a vocabulary that several ranks divide. Column 0 of its logits is token
    `first`, a multiple of TILE.

    gather: function x -> every rank's x, [ranks, *x.shape]. Ranges differ by a tile if the ranks
    don't divide the tiles, so neither the shape of x nor the number of calls may depend on a range.
    """

    first: int
    size: int  # tokens of the whole vocabulary
    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]

    @property
    def largest_share(self) -> int:
        """Tokens of the largest range, the same number on every rank."""
        return -(-self.size // (TILE * self.ranks)) * TILE

    def columns(self, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Returns the columns of tokens [...] in this rank's logits (0 for other ranks' tokens),
        and a bool mask of the tokens in its range. width: number of its columns."""
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
        """Returns for each row the token of the rank with the largest score, [n] int64; among equal
        scores, of the first rank. score: [n] float32. Gathers 8 bytes a row."""
        told = self.gather(torch.stack((score.view(torch.int32), token.to(torch.int32))))
        who = told[:, 0].view(torch.float32).argmax(0, keepdim=True)
        return told[:, 1].gather(0, who)[0].to(torch.int64)
