"""StepPlan: what the scheduler tells the device of one step, and StepTokens: what the device tells
back.

Both are columns: a few numpy arrays, whatever the number of rows. It knows no torch, no text and no
request objects.

A row lives on the device as `length` (tokens whose K and V are stored), `last_token` (the token at
position `length`, not stored yet) and its block table. A decode step of a row stores K and V of
`last_token` at position `length`, draws the token of position `length + 1`, and adds one to
`length`. So a prompt of P tokens is prefilled for P - 1 tokens and its last one is decoded: the
first token of a sample needs no path of its own, and prefill makes no logits (but for
prompt_logprobs).

A step on the device, in this order:
    1. moves        of state: block -> block (a tail's own copy of a prompt's last, partial block),
       slot -> slot (the
                    recurrent state that a prompt or a tail goes on from)
    2. joins        rows come to life: their columns are written, their tables filled
    3. new blocks   table entries of rows that grow
    4. masks        which tokens may come, for rows whose mask is new
    5. forward      of `rows` (one token each) and then of the chunks' tokens, in one batch
    6. late masks   only where `draws_late`: of rows with constraints, which need tokens in flight
       at the launch
    7. sample       one token for each of `rows`; last_token, length and done are updated on the
       device

A step that draws late is launched up to its forward, which hides how long masks take; `Runner.draw`
ends it. A row whose mask is not there by then sits the draw out: it stays what it was, and its next
step is this one again.

A row may be offered drafts: tokens that are guessed to come next. The step feeds them behind the
row's last token, a query each, and draws after every one. A draw depends on what is before it and
on counters alone, so a draft is right if it equals the draw before it, and the row's tokens are
those that it makes without drafts, in fewer steps. The host may know a row's drafts, or their
number alone: those the device made itself, behind the draw of the row's step before.
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

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # what may sleep, as vLLM's tags name it
SCRATCH_BLOCK = 0  # where finished, padded and dead rows read and write; never handed out

# What StepTokens.tokens holds where there is no token
NO_TOKEN = -1  # the row was done before this step (it ran too far), or is padding
BAD_LOGITS = -2  # the row's logits were not finite: the sample ends with an error
FROM_DEVICE = -1  # in Drafts.tokens: a token that the device made


# What a joining row carries: its number, and the row table's fields.
JOIN_RECORD = np.dtype(
    [
        ("row", "i4"),
        *((f.name, f.kind, (f.width,)) if f.width > 1 else (f.name, f.kind) for f in FIELDS),
    ]
)


@dataclass(slots=True)
class Joins:
    """Rows that come to life in this step. Biases, and each row's bad words behind its biases, are
    a CSR over the rows: they lie in a pool, not in columns."""

    records: NDArray[np.void]  # [k] of JOIN_RECORD; what becomes of bias_start is the device's
    blocks: Int32  # [k, width]  block tables, padded with SCRATCH_BLOCK
    bias_start: Int32  # [k + 1]
    bias_ids: Int32  # [sum]
    bias_values: Float32  # [sum]

    @property
    def rows(self) -> Int32:
        """Returns the row numbers [k]."""
        rows: Int32 = self.records["row"]
        return rows


@dataclass(slots=True)
class Moves:
    """State that is copied, all layers, before the forward: [n, 2] from and to. No block and no
    slot is both."""

    blocks: Int32  # of paged state
    slots: Int32  # of recurrent state

    @classmethod
    def none(cls) -> Moves:
        return cls(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32))


@dataclass(slots=True)
class Masks:
    """Token masks for slots of the device's pool, written before the step's draw. Bit t % 32 of
    word t // 32 is set where token t may come."""

    slots: Int32  # [m]  distinct
    words: Int32  # [m, ceil(vocabulary / 32)]


@dataclass(slots=True)
class LateMasks:
    """What the draw of a step that draws late is told: masks words[places], as Masks, and who is
    not drawn."""

    slots: Int32  # [m]  distinct
    places: Int32  # [m]
    # [n, ceil(vocabulary / 32)]  a board of masks: these are not written to until the draw was read
    words: Int32
    sit_out: Int32  # [k]  rows of the step that stay what they were; their queries tell NO_TOKEN
    forced: Int64  # [f]  queries behind which only one token may come, and is not drawn
    tokens: Int32  # [f]  theirs


@dataclass(slots=True)
class Embeds:
    """Embeddings that are handed in place of those of some tokens of the chunks. The ids there are
    pseudo-ids of the vocabulary, equal only where the embeddings are: by them K and V are found
    again."""

    where: Int32  # [k]  indices into Chunks.tokens, distinct
    # [k, hidden]  as the first layer takes them, whatever the model scales its table's rows by
    rows: Float32


@dataclass(slots=True)
class Chunks:
    """Pieces of prompts that are prefilled in this step, one after the other in `tokens`."""

    tokens: Int32  # [tokens]
    start: Int32  # [chunks + 1]  CSR over tokens
    context: (
        Int32  # [chunks]  tokens of that prompt that are stored already: the chunk's first position
    )
    blocks: (
        Int32  # [chunks, width]  block tables that cover context + chunk, padded with SCRATCH_BLOCK
    )
    # [chunks]  -1: none; k: for each token of the chunk, logprobs of the *next* prompt token
    prompt_logprobs: Int32
    # [tokens]  the prompt token after each (scored where prompt_logprobs asks), -1 elsewhere
    next_token: Int32
    slots: Int32 | None = (
        None  # [chunks]  of recurrent state that each is folded into; None: the dead row's
    )
    tags: Int32 | None = None  # [chunks]  their requests' tags; None: each is 0
    embeds: Embeds | None = None

    @property
    def scored(self) -> bool:
        """Whether logprobs of some prompt's tokens are asked for."""
        return bool((self.prompt_logprobs >= 0).any())


@dataclass(slots=True)
class Drafts:
    """Tokens that rows are offered; a CSR over the step's rows, at most MAX_DRAFTS each."""

    start: Int32  # [S + 1]
    # [start[S]], FROM_DEVICE where the device made the token; None: it made them all
    tokens: Int32 | None

    @property
    def told(self) -> Int32:
        """Returns the tokens [start[S]], FROM_DEVICE where the device made them."""
        return (
            np.full(self.start[-1], FROM_DEVICE, np.int32) if self.tokens is None else self.tokens
        )

    @property
    def from_device(self) -> bool:
        """Whether the device made any of them."""
        return bool((self.told == FROM_DEVICE).any())

    @property
    def counts(self) -> Int32:
        """Returns how many each row is offered [S]."""
        counts: Int32 = self.start[1:] - self.start[:-1]
        return counts

    @property
    def query_start(self) -> Int32:
        """Returns where each row's queries begin [S + 1]: its last token, then its drafts."""
        start: Int32 = np.arange(self.start.size, dtype=np.int32)
        start += self.start
        return start

    @property
    def offset(self) -> Int32:
        """Returns which of its row's queries each query is [Q], counted from 0."""
        start = self.query_start
        offset: Int32 = np.arange(start[-1], dtype=np.int32) - np.repeat(start[:-1], np.diff(start))
        return offset


@dataclass(slots=True)
class StepPlan:
    """One step. Rows of a prefix group are neighbours in `rows`; rows that stand alone come after
    all groups."""

    number: int  # the flight's number, counted from 0
    rows: Int32  # [S]
    # [S]  stored tokens of each row before this step as planned: at most so many, exact without
    # drafts
    lengths: Int32
    wants: int  # OR of the rows' WANTS_* bits
    # [G + 1]  rows group_start[g] : group_start[g+1] share group g's prefix; rows from [-1] on:
    # alone
    group_start: Int32
    group_blocks: Int32  # [G, width]  blocks of the prefixes, padded with SCRATCH_BLOCK
    group_length: Int32  # [G]  tokens of the prefixes, multiples of BLOCK_SIZE
    moves: Moves
    new_blocks: Int32  # [m, 3]  row, index in its table, block
    joins: Joins | None
    chunks: Chunks | None
    drafts: Drafts | None = None  # None: a query a row
    masks: Masks | None = None
    draws_late: bool = False  # rows have constraints: nothing is drawn until Runner.draw
    clears: bool = (
        False  # blocks that it hands out are cleared first: a row's logits were not finite
    )
    window_pages: Int32 | None = (
        None  # [p, 1 + tables]  blocks and their pages for layers with windows, cleared first
    )

    @property
    def query_rows(self) -> Int32:
        """Returns the row of each query [Q]; a row's queries are neighbours."""
        return self.rows if self.drafts is None else np.repeat(self.rows, self.drafts.counts + 1)

    @property
    def group_skip(self) -> Int32:
        """Returns how many tokens each row of a group leaves to its group's prefix
        [group_start[-1]]."""
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
    """Logprobs of m tokens under the raw logits; `top_*` are padded with id -1."""

    where: Int32  # [m]  index into StepPlan.query_rows (decode) or into Chunks.tokens (prompt)
    chosen: Float32  # [m]
    rank: Int32  # [m]  1 is the most likely
    top_ids: Int32  # [m, k]
    top: Float32  # [m, k]


@dataclass(slots=True)
class StepTokens:
    """What a flight brings back, in the order of its plan's queries."""

    # [Q]  the token drawn after each query, or NO_TOKEN (done before, or not the draft), or
    # BAD_LOGITS
    tokens: Int32
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class Drafter(Protocol):
    """Guesses what rows will say next. Whatever it offers, the tokens are the same: a good guess
    saves a step."""

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        """Returns drafts for rows [S], at most most[i] for each: guesses of the tokens at positions
        lengths[i] + 1 and on, or how many the device has made (tokens None). lengths: as planned;
        where drafts are in flight the row may be shorter."""


class Flight(Protocol):
    """A step launched and not yet read."""

    def ready(self) -> bool:
        """Whether fetch() would return at once."""

    def fetch(self) -> StepTokens:
        """Waits for the step; raises what the device raised."""


class Runner(Protocol):
    """Runs steps in the order of their launch. `execute.runner` is the real one;
    tests bring fakes."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, the scratch block included."""

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step and returns at once. The plan's arrays are the runner's from now on. Of a
        step that draws late it starts the forward: that flight brings nothing, and is ready when
        the device has come to the draw."""

    def watch(self, goes_on: Callable[[], None]) -> None:
        """Has `goes_on` called in the thread that waits for a step, now and then, while it goes on;
        where steps are short it never is."""

    def draw(self, late: LateMasks) -> Flight:
        """Ends the step that was launched last, which draws late, and returns at once."""

    def counts(self) -> dict[str, int]:
        """`jit_compiles`, `jit_loads`: kernels compiled, or loaded from a disk, since the runner
        was ready."""

    def update_weights(self, source: WeightsSource) -> None:
        """Puts other weights in the place of the model's, where no step is under way; they sleep no
        more. Raises PenstockError; the old ones stay then."""

    @property
    def asleep(self) -> tuple[str, ...]:
        """What sleeps: WEIGHTS, KV_CACHE, both or nothing. While something does nothing is
        launched."""

    def sleep(self, level: int) -> None:
        """Gives memory back: of KV and rows, of which none may live, and of the weights, which are
        kept in host memory (1) or nowhere (2)."""

    def wake_up(self, tags: Collection[str]) -> None:
        """Takes memory again. Weights that are nowhere wait for update_weights. Raises
        CapacityError."""

    def describe(self) -> dict[str, Any]:
        """dtype, device, kernels by operation and why, KV tokens, weights' bytes: for stats and
        doctor."""

    def close(self) -> None:
        """Stops the device's thread and gives the memory back."""
