"""StepPlan: one step as sent to the device. StepTokens: its results.

Both are columns: a few numpy arrays, whatever the number of rows. Knows no torch, no text and no
request objects.

A row lives on the device as `length` (tokens whose K and V are stored), `last_token` (the token at
position `length`, not stored yet) and its block table. A decode step of a row stores K and V of
`last_token` at position `length`, draws the token of position `length + 1`, and adds one to
`length`. So a prompt of P tokens is prefilled for P - 1 tokens and its last one is decoded: the
first token of a sample needs no path of its own, and prefill makes no logits (but for
prompt_logprobs).

A step on the device, in this order:
    1. moves        copies of state: block -> block (a sample's own copy of its prompt's last,
                    partial block), slot -> slot (recurrent state from which a prompt or a
                    sample goes on)
    2. joins        new rows: their columns are written, their tables filled
    3. new blocks   blocks are added to the tables of rows that grow
    4. masks        allowed tokens of rows with a new static mask
    5. forward      `rows` (one token each) and the chunks' tokens, in one batch
    6. late masks   if `draws_late`: masks of rows with constraints, which need tokens in flight
    7. sample       one token for each of `rows`; updates last_token, length and done

A step that draws late is launched up to its forward, which hides the time masks take; `Runner.draw`
ends it. A row whose mask is missing by then sits the draw out: its state does not change, and its
next step repeats this one.

A row may have drafts: guesses of its next tokens. The step feeds them after the row's last token,
one query each, and draws after every query. A draw depends only on the tokens before it and on
counters, so a draft is right if it equals the draw before it, and the row's tokens are the same as
without drafts, in fewer steps. The host knows a row's drafts, or only their number if the device
made them itself, after the draw of the row's previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.row_table import FIELDS
from penstock.shared_weights import WeightsSource

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # parts that may sleep, named like vLLM's tags
SCRATCH_BLOCK = 0  # block read and written by finished, padded and dead rows; never given out

# Values in StepTokens.tokens where there is no token
NO_TOKEN = -1  # the row was done before this step (it ran too far), or is padding
BAD_LOGITS = -2  # the row's logits were not finite: the sample ends with an error
FROM_DEVICE = -1  # value in Drafts.tokens: a token made by the device


# Record of a joining row: its number, and the row table's fields.
JOIN_RECORD = np.dtype(
    [
        ("row", "i4"),
        *((f.name, f.kind, (f.width,)) if f.width > 1 else (f.name, f.kind) for f in FIELDS),
    ]
)


@dataclass(slots=True)
class Joins:
    """k rows that join in this step. Each row's logit_bias values, and its bad words after them,
    are concatenated for all rows, since the device keeps them in one pool: row i's are
    bias_ids[bias_start[i] : bias_start[i + 1]]. b is their total number, width the longest block
    table."""

    records: NDArray[np.void]  # [k] of JOIN_RECORD; the device sets its field bias_start itself
    blocks: Int32  # [k, width]  block tables, padded with SCRATCH_BLOCK
    bias_start: Int32  # [k + 1] offsets into bias_ids and bias_values
    bias_ids: Int32  # [b] token ids
    bias_values: Float32  # [b] values added to the logits of bias_ids; 0 for bad words

    @property
    def rows(self) -> Int32:
        """Returns the row numbers [k]."""
        rows: Int32 = self.records["row"]
        return rows


@dataclass(slots=True)
class Moves:
    """Copies of state in all layers before the forward: int32 [copies, 2] (source, target). No
    block or slot is both source and target."""

    blocks: Int32  # numbers of KV cache blocks
    slots: Int32  # numbers of recurrent state slots

    @classmethod
    def none(cls) -> Moves:
        return cls(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32))


@dataclass(slots=True)
class Masks:
    """m token masks, written to slots of the device's mask pool before the step's draw. Bit t % 32
    of word t // 32 is set if token t is allowed."""

    slots: Int32  # [m] mask slots, distinct
    words: Int32  # [m, ceil(vocabulary / 32)] bits of the masks


@dataclass(slots=True)
class LateMasks:
    """Input to the draw of a late step: m masks, the k rows that draw no token, and f forced
    tokens. The mask of slot slots[i] is words[places[i]], as in Masks."""

    slots: Int32  # [m] mask slots, distinct
    places: Int32  # [m] indices into `words`
    # the masks of the mask board, [samples on the board, ceil(vocabulary / 32)]; those used here do
    # not change until the draw has been read
    words: Int32
    # [k] rows without a mask: they keep their state, and their queries return NO_TOKEN
    sit_out: Int32
    forced: Int64  # [f]  queries whose next token is forced, not drawn
    tokens: Int32  # [f]  the forced tokens


@dataclass(slots=True)
class Embeds:
    """Embeddings used instead of the embedding table's for k tokens of the chunks. These tokens
    have pseudo-ids, which are equal only if the embeddings are equal, so that the prefix cache
    works with them."""

    where: Int32  # [k]  indices into Chunks.tokens, distinct
    # [k, model width] input of the first layer, without the model's scaling of its embedding table
    rows: Float32


@dataclass(slots=True)
class Chunks:
    """Pieces of prompts prefilled in this step, concatenated in `tokens`."""

    tokens: Int32  # [tokens] ids
    start: Int32  # [chunks + 1]  offsets into tokens
    context: Int32  # [chunks]  tokens of that prompt already stored: the chunk's first position
    blocks: (
        Int32  # [chunks, width]  block tables that cover context + chunk, padded with SCRATCH_BLOCK
    )
    # [chunks] number of most likely tokens with logprobs, for the prompt token after each token of
    # the chunk; -1: no logprobs
    prompt_logprobs: Int32
    # [tokens] the prompt token after each (scored if prompt_logprobs >= 0), -1 elsewhere
    next_token: Int32
    slots: Int32 | None = (
        None  # [chunks] slot of the recurrent state that each chunk updates; None: the dead row's
    )
    tags: Int32 | None = None  # [chunks]  tags of the requests; None: all 0
    embeds: Embeds | None = None

    @property
    def scored(self) -> bool:
        """Returns True if any chunk needs prompt logprobs."""
        return bool((self.prompt_logprobs >= 0).any())


@dataclass(slots=True)
class Drafts:
    """Draft tokens for the step's S rows. Those of row i are tokens[start[i] :
    start[i + 1]]. A row has one query for its last token and one per draft, Q in all."""

    start: Int32  # [S + 1] offsets into tokens
    # [start[S]] token ids; FROM_DEVICE where the device made the token. None: the device made them
    # all
    tokens: Int32 | None

    @property
    def told(self) -> Int32:
        """Returns the tokens [start[S]], FROM_DEVICE where the device made the token."""
        return (
            np.full(self.start[-1], FROM_DEVICE, np.int32) if self.tokens is None else self.tokens
        )

    @property
    def from_device(self) -> bool:
        """Returns True if the device made any of the drafts."""
        return bool((self.told == FROM_DEVICE).any())

    @property
    def counts(self) -> Int32:
        """Returns the number of drafts of each row, int32 [S]."""
        counts: Int32 = self.start[1:] - self.start[:-1]
        return counts

    @property
    def query_start(self) -> Int32:
        """Returns the index of each row's first query, int32 [S + 1]: its last token, then its
        drafts."""
        start: Int32 = np.arange(self.start.size, dtype=np.int32)
        start += self.start
        return start

    @property
    def offset(self) -> Int32:
        """Returns the index of each query within its row, int32 [Q], from 0."""
        start = self.query_start
        offset: Int32 = np.arange(start[-1], dtype=np.int32) - np.repeat(start[:-1], np.diff(start))
        return offset


@dataclass(slots=True)
class Texts:
    """t tokens of samples that ended, written to m of the device's texts (RowState.texts)."""

    places: Int64  # [t] slot * width + place in the text
    tokens: Int32  # [t] ids
    slots: Int64  # [m] slots, distinct
    filled: Int32  # [m] tokens in each slot from now on


@dataclass(slots=True)
class StepPlan:
    """One step of S rows with Q queries (one per row, or more with drafts) and G prefix groups.
    Rows of a prefix group are neighbours in `rows`; rows without a group come after all groups."""

    number: int  # number of the step, counted from 0
    rows: Int32  # [S] row numbers
    # [S] stored tokens of each row before this step; with drafts an upper bound, else exact
    lengths: Int32
    wants: int  # OR of the rows' WANTS_* bits
    # [G + 1] rows group_start[g] : group_start[g + 1] share group g's prefix; rows from
    # group_start[-1] on are in no group
    group_start: Int32
    group_blocks: Int32  # [G, width]  blocks of the prefixes, padded with SCRATCH_BLOCK
    group_length: Int32  # [G]  tokens of the prefixes, multiples of BLOCK_SIZE
    moves: Moves
    new_blocks: Int32  # [n, 3] blocks added to block tables: row, index in its table, block
    joins: Joins | None
    chunks: Chunks | None
    drafts: Drafts | None = None  # None: every row has one query
    masks: Masks | None = None
    # True if rows have constraints: no token is drawn until Runner.draw is called
    draws_late: bool = False
    texts: Texts | None = None
    proposes: int = 0  # most next tokens of a row that the device drafts after the draw
    # True: rows may draft soon, and a draft layer keeps K and V of their tokens
    follows: bool = False
    clears: bool = (
        False  # clear blocks when giving them out, since some row's logits were not finite
    )
    window_pages: Int32 | None = (
        # [blocks, 1 + window tables] new blocks, each with its pages for layers with sliding
        # windows; all are cleared first
        None
    )

    @property
    def query_rows(self) -> Int32:
        """Returns the row of each query, int32 [Q]; a row's queries are adjacent."""
        return self.rows if self.drafts is None else np.repeat(self.rows, self.drafts.counts + 1)

    @property
    def group_queries(self) -> Int32:
        """Returns `group_start`, counted in queries."""
        return (
            self.group_start if self.drafts is None else self.drafts.query_start[self.group_start]
        )

    @property
    def group_skip(self) -> Int32:
        """Returns, for each grouped row, the number of its tokens covered by the group's prefix,
        int32 [group_start[-1]]."""
        return np.repeat(self.group_length, self.group_start[1:] - self.group_start[:-1])


def plain_step(
    number: int,
    rows: Int32,
    lengths: Int32,
    wants: int = 0,
    joins: Joins | None = None,
    chunks: Chunks | None = None,
) -> StepPlan:
    """Returns a step without prefix groups, moves and new blocks."""
    return StepPlan(
        number=number,
        rows=rows,
        lengths=lengths,
        wants=wants,
        group_start=np.zeros(1, np.int32),
        group_blocks=np.zeros((0, 0), np.int32),
        group_length=np.zeros(0, np.int32),
        moves=Moves.none(),
        new_blocks=np.zeros((0, 3), np.int32),
        joins=joins,
        chunks=chunks,
    )


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs of m tokens under the raw logits, and of up to k most likely tokens each; `top_ids`
    is padded with -1."""

    where: Int32  # [m]  index into StepPlan.query_rows (decode) or into Chunks.tokens (prompt)
    chosen: Float32  # [m] logprob of the token
    rank: Int32  # [m] rank of the token; 1: the most likely
    top_ids: Int32  # [m, k] ids of the most likely tokens
    top: Float32  # [m, k] logprobs of the most likely tokens


@dataclass(slots=True)
class StepTokens:
    """Results of one step, in the order of its plan's Q queries."""

    # [Q] the token drawn after each query, or NO_TOKEN (row done before, or wrong draft), or
    # BAD_LOGITS
    tokens: Int32
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class Drafter(Protocol):
    """Guesses the next tokens of rows. Drafts never change the output; a right guess
    saves a step."""

    @property
    def most(self) -> int:
        """Returns the most drafts of a row in a step."""

    @property
    def reach(self) -> int:
        """Returns the most tokens past a row's newest one that a step with drafts may store, those
        that the device stores while it makes further drafts included."""

    def wants(self, rows: Int32) -> bool:
        """Returns False for a step of these rows that is to have no drafts: `offer` is not called
        for it."""

    @property
    def idle(self) -> bool:
        """Returns True if nothing drafts and few drafts are made after it: texts that end now are
        not worth keeping."""

    @property
    def proposes(self) -> int:
        """Returns the most drafts of a row that the device should make after the step that was
        offered drafts last."""

    @property
    def follows(self) -> bool:
        """Returns True if rows of that step may draft soon."""

    def settled(self, rows: Int32, offered: Int32, right: Int32) -> None:
        """Takes in a step that was read: the numbers of drafts of each of S rows, and of those that
        were right."""

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        """Returns drafts for S rows, at most most[i] each: guesses of the tokens at positions
        lengths[i] + 1 and on, or only their number if the device makes them (tokens None). lengths:
        planned lengths; a row with drafts in flight may turn out shorter."""


class Flight(Protocol):
    """A launched step whose results are read once."""

    def ready(self) -> bool:
        """Returns True if fetch() would not have to wait."""

    def fetch(self) -> StepTokens:
        """Waits for the step's results; raises the device's error."""


class Runner(Protocol):
    """Runs steps in launch order. `execute.runner` is the real one; tests use fakes."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, the scratch block included."""

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step and returns at once; takes ownership of the plan's arrays. For a late step
        it starts only the forward: that flight has no results, and is ready when the device has
        reached the draw."""

    def watch(self, goes_on: Callable[[], None]) -> None:
        """Has `goes_on` called now and then while a long step runs, in the thread that waits for
        it; never called where steps are short."""

    def draw(self, late: LateMasks) -> Flight:
        """Launches the draw of the last launched step, a late one; returns at once."""

    def counts(self) -> dict[str, int]:
        """`jit_compiles`, `jit_loads`: kernels compiled, or loaded from disk, since the runner
        became ready."""

    def update_weights(self, source: WeightsSource) -> None:
        """Replaces the model's weights, while no step is under way, and wakes them up. Raises
        PenstockError; then the old weights stay."""

    @property
    def asleep(self) -> tuple[str, ...]:
        """Parts asleep: WEIGHTS, KV_CACHE, both or none. No step may be launched while
        any sleeps."""

    def sleep(self, level: int) -> None:
        """Frees memory: of the KV cache and rows (no row may be live), and of the weights. level 1
        keeps weights in host memory, 2 drops them."""

    def wake_up(self, tags: Collection[str]) -> None:
        """Allocates memory again for the parts named by tags. Dropped weights wait for
        update_weights. Raises CapacityError."""

    def describe(self) -> dict[str, Any]:
        """Returns dtype, device, kernels by operation and the reasons, KV tokens, bytes of weights;
        for stats and doctor."""

    def close(self) -> None:
        """Stops the device's thread and frees the memory."""
