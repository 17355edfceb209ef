"""RequestState: the scheduler's data of a live request. A fork group (ForkGroup) is a prompt with
the samples that start from it.

A request begins as one fork group: a prompt and its samples that wait for rows (pending). A
preempted sample comes back as a fork group of its own, whose prompt is the old prompt and the
tokens drawn so far. Knows no rows' columns and no pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.request import Request, SamplingParams
from penstock.row_table import (
    BAD_WORD_IDS,
    FIELDS,
    MAX_STOP_IDS,
    WANTS_BIAS,
    WANTS_FILTER,
    WANTS_LABELS,
    WANTS_LOGPROBS,
    WANTS_MASK,
    WANTS_MIN_TOKENS,
    WANTS_WORDS,
)
from penstock.schedule.constraint import ConstraintFactory
from penstock.schedule.logprob_store import TokenScores
from penstock.schedule.mask_makers import Guide
from penstock.schedule.rows import (
    EACH_TOKEN,
    ENDED,
    IGNORES_EOS,
    MORE_STOP_IDS,
    ON_WATCH,
    STOP_IDS,
    Rows,
)
from penstock.schedule.step import JOIN_RECORD, Int32

WAITING, PREFILLING, READY = range(3)
_INT32 = 2**31 - 1
# parameter, the value at which it changes nothing, and its bit of `wants`
_OPTIONS = [
    (column.param, column.dead, column.wants)
    for column in FIELDS
    if column.param is not None and column.wants
]


def wants_of(params: SamplingParams) -> int:
    """Returns the WANTS_* bits of a request's sampling parameters."""
    wants = WANTS_FILTER if params.top_k > 0 else 0
    for name, off, bit in _OPTIONS:
        if getattr(params, name) != off:
            wants |= bit
    if params.temperature == 0:
        wants &= ~WANTS_FILTER
    if params.logit_bias:
        wants |= WANTS_BIAS
    if params.min_tokens > 0:
        wants |= WANTS_MIN_TOKENS
    if params.allowed_token_ids:
        wants |= WANTS_MASK
    if params.logprobs is not None:
        wants |= WANTS_LOGPROBS
    if params.logprob_token_ids:
        wants |= WANTS_LABELS
    return wants


def row_record(
    params: SamplingParams, seed: int, prompt_length: int, limit: int, min_length: int
) -> NDArray[np.void]:
    """Returns the fields that all rows of a request share, [1] of JOIN_RECORD. Row number, sample
    index, last token and length are set when a row joins."""
    record = np.zeros(1, JOIN_RECORD)
    for column in FIELDS:
        if column.param is not None:
            record[column.name] = getattr(params, column.param)
    mine = np.array(params.stop_token_ids or (), np.int32)[:MAX_STOP_IDS]
    record["stop_ids"] = -1
    record["stop_ids"][0, : mine.size] = mine
    record["top_k"] = min(max(params.top_k, 0), _INT32)
    record["logprobs"] = -1 if params.logprobs is None else params.logprobs
    record["seed"], record["wants"] = seed, wants_of(params)
    record["limit"], record["prompt_length"], record["min_length"] = (
        limit,
        prompt_length,
        min_length,
    )
    record["bias_count"] = len(params.logit_bias or ())
    record["mask_slot"] = record["text_slot"] = -1
    return record


def padded_words(words: list[list[int]]) -> Int32:
    """Returns the token ids of bad words, int32 [words * BAD_WORD_IDS]: one word after the other,
    each padded in front with -1."""
    out = np.full((len(words), BAD_WORD_IDS), -1, np.int32)
    for line, ids in zip(out, words, strict=True):
        line[BAD_WORD_IDS - len(ids) :] = ids
    return out.reshape(-1)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its arrival to the end of its last sample."""

    request_id: int
    arrival: int
    prompt_length: int
    limit: int
    min_length: int
    record: NDArray[np.void]  # [1] of JOIN_RECORD: the fields that all its rows share
    bias_ids: (
        Int32  # ids of logit_bias, then bad words (BAD_WORD_IDS per word), then logprob_token_ids
    )
    bias_values: NDArray[np.float32]
    more_stop_ids: Int32  # stop_token_ids beyond the MAX_STOP_IDS checked on the device
    traits: int  # trait bits of its rows (rows.py)
    watch: int  # slot of its table in StopTokenMasks; -1: none
    prompt_logprobs: int  # number of prompt logprobs at each position; -1: none
    outstanding: int  # number of its samples that have not ended
    # [n] sample index -> the row it joined last, which may belong to another sample by now; -1:
    # none
    row_of: Int32
    background: bool = False
    tenant: int = 0
    salt: int = 0
    tag: int = 0
    allowed: bytes = b""  # allowed_token_ids: sorted int32, distinct; empty: all tokens allowed
    constrain: ConstraintFactory | None = None
    news: bool = True  # True until its PromptNews is sent
    cached_tokens: int = 0
    groups: list[ForkGroup] = field(default_factory=list)
    # prompt logprobs, a list item for each prompt chunk
    scored: list[Any] = field(default_factory=list)
    # sample index -> its constraint, once it has had a row
    guides: dict[int, Guide | None] = field(default_factory=dict)
    came: float = field(default_factory=time.monotonic)
    waited: float = -1.0  # seconds until a step first took it up; -1: none yet

    @classmethod
    def of(
        cls,
        request: Request,
        arrival: int,
        seed: int,
        max_len: int,
        watch: int,
        constrain: ConstraintFactory | None = None,
    ) -> RequestState:
        params = request.sampling
        prompt_length = len(request.prompt) // 4
        most = max_len - prompt_length if params.max_tokens is None else params.max_tokens
        bias = params.logit_bias or {}
        samples = request.samples
        # min_tokens does not forbid end ids if there is a constraint (constraint.py)
        least = params.min_tokens if constrain is None else 0
        limit, min_length = min(prompt_length + most, max_len), min(prompt_length + least, max_len)
        record = row_record(params, seed, prompt_length, limit, min_length)
        record["wants"] |= WANTS_MASK if constrain is not None else 0
        record["wants"] |= WANTS_WORDS if request.bad_words else 0
        record["word_count"], record["tag"] = len(request.bad_words), request.tag
        words = np.append(
            padded_words(request.bad_words), np.array(params.logprob_token_ids or (), np.int32)
        )
        values = np.zeros(len(bias) + words.size, np.float32)
        values[: len(bias)] = np.fromiter(bias.values(), np.float32, len(bias))
        return cls(
            request_id=request.request_id,
            arrival=arrival,
            prompt_length=prompt_length,
            limit=limit,
            min_length=min_length,
            record=record,
            bias_ids=np.concatenate((np.fromiter(bias.keys(), np.int32, len(bias)), words)),
            bias_values=values,
            more_stop_ids=np.array((params.stop_token_ids or [])[MAX_STOP_IDS:], np.int32),
            traits=_traits(request),
            watch=watch,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            outstanding=params.n if samples is None else len(samples),
            row_of=np.full(params.n, -1, np.int32),
            background=request.background,
            tenant=request.tenant,
            salt=request.salt,
            tag=request.tag,
            allowed=np.unique(np.array(params.allowed_token_ids, np.int32)).tobytes()
            if params.allowed_token_ids
            else b"",
            constrain=constrain,
        )

    def living(self, rows: Rows) -> Int32:
        """Returns the rows of its running samples."""
        mine = self.row_of
        its = (
            (rows.state[mine] > ENDED)
            & (rows.request[mine] == self.request_id)
            & (rows.sample[mine] == np.arange(mine.size))
        )
        living: Int32 = mine[its & (mine >= 0)]
        return living

    def begin(self) -> None:
        """Records the waiting time when a step first takes the request up."""
        if self.waited < 0:
            self.waited = time.monotonic() - self.came


def _traits(request: Request) -> int:
    params = request.sampling
    stops = len(params.stop_token_ids or ())
    traits = EACH_TOKEN if request.stream else ON_WATCH if request.watch is not None else 0
    traits |= IGNORES_EOS if params.ignore_eos else 0
    return traits | (STOP_IDS if stops else 0) | (MORE_STOP_IDS if stops > MAX_STOP_IDS else 0)


@dataclass(slots=True, eq=False)
class ForkGroup:
    """A prompt and the samples that start from it. For a sample that was preempted, `tokens` is the
    prompt and the tokens drawn so far."""

    slot: int
    live: RequestState
    tokens: Int32
    samples: Int32  # indices of all its samples; samples[next:] have had no row yet
    sent: int  # position of the first token not sent yet
    next: int = 0
    state: int = WAITING
    # tokens of its full blocks as bytes, as in the prefix tree's keys
    words: list[bytes] = field(default_factory=list)
    # blocks held: the full ones, then the partial one
    blocks: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    passed: int = 0  # number of leading blocks that sliding windows no longer reach
    place: int = 0  # place in the prefix tree after which its next block is inserted
    stored: int = 0  # tokens cached or planned for prefill
    rows: int = 0  # rows not freed yet, including ended ones that steps in flight name
    running: int = 0  # number of its running rows
    # positions in the prompt at which snapshots of its recurrent state are kept
    borders: list[int] = field(default_factory=list)
    # slot of its recurrent state, from the start of its prompt until its last sample has joined;
    # -1: none
    state_slot: int = -1
    last_flight: int = -1
    scored: TokenScores | None = (
        None  # logprobs of the tokens from `sent` on, if its request wants them
    )
    # right and wrong drafts of a preempted sample that have not been sent
    guesses: tuple[int, int] = (0, 0)
    # first step in which its samples may join or its prompt may be prefilled further
    ready_from: int = 0
    finished: int = 0
    finished_tokens: int = 0

    @property
    def pending(self) -> int:
        return self.samples.size - self.next

    def drop_pending(self, stay: Int32) -> None:
        """Removes the samples that have had no row yet, except `stay`."""
        self.samples = np.concatenate((self.samples[: self.next], stay))

    @property
    def target(self) -> int:
        """Number of tokens to prefill: all but the last, which each sample decodes itself."""
        return self.tokens.size - 1

    @property
    def full(self) -> int:
        """Number of full blocks of the prefix, which all samples share."""
        return self.target // BLOCK_SIZE

    @property
    def has_partial(self) -> bool:
        return self.target % BLOCK_SIZE != 0

    @property
    def grows(self) -> int:
        """Number of blocks that a joining sample needs at once beyond the prompt's: 1 if its first
        drawn token begins a new block, else 0."""
        return int(self.tokens.size // BLOCK_SIZE >= -(-self.target // BLOCK_SIZE))

    @property
    def resumed(self) -> bool:
        return self.tokens.size > self.live.prompt_length


class Groups:
    """Fork groups by slot. Slots of dropped groups are reused."""

    def __init__(self) -> None:
        self._by_slot: list[ForkGroup | None] = []
        self._free: list[int] = []

    def __getitem__(self, slot: int) -> ForkGroup:
        group = self._by_slot[slot]
        assert group is not None, f"fork group {slot} is gone"
        return group

    def at(self, slots: list[int]) -> list[ForkGroup]:
        """Returns the fork groups in these slots."""
        return [group for slot in slots if (group := self._by_slot[slot]) is not None]

    def __iter__(self) -> Iterator[ForkGroup]:
        return (group for group in self._by_slot if group is not None)

    def add(self, live: RequestState, tokens: Int32, samples: Int32, sent: int) -> ForkGroup:
        slot = self._free.pop() if self._free else len(self._by_slot)
        group = ForkGroup(slot, live, tokens, samples, sent)
        if slot == len(self._by_slot):
            self._by_slot.append(group)
        else:
            self._by_slot[slot] = group
        live.groups.append(group)
        return group

    def drop(self, group: ForkGroup) -> None:
        self._by_slot[group.slot] = None
        self._free.append(group.slot)
        group.live.groups.remove(group)
