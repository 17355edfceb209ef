"""A device for the scheduler's tests: no model, but real rows, tables and blocks.

A slot holds the token that was stored there. A row's next token is a hash of all tokens that its block table shows, so
a wrong block, a missed copy, a row used again too early or a token sent to the wrong sample changes what comes out.
"""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np

from penstock.schedule.step import NO_TOKEN, SCRATCH_BLOCK, StepPlan, StepTokens


def next_token(history: list[int], seed: int, sample: int, vocab: int) -> int:
    """The token that follows `history` in sample `sample`."""
    digest = hashlib.blake2b(repr((history, seed, sample)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab


def sample_alone(prompt: list[int], seed: int, sample: int, vocab: int, limit: int, eos: set[int]) -> list[int]:
    """What a sample is when nothing else runs."""
    history = list(prompt)
    while len(history) < limit:
        history.append(next_token(history, seed, sample, vocab))
        if history[-1] in eos:
            break
    return history[len(prompt) :]


class FakeDevice:
    """Runs plans in order; results are handed out when asked for, so any lag is the caller's choice."""

    def __init__(self, num_blocks: int, rows: int, width: int, vocab: int, eos: set[int]) -> None:
        self.slots = np.full((num_blocks, 16), -7, np.int64)
        self.table = np.zeros((rows, width), np.int64)
        self.length = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.int64)
        self.sample = np.zeros(rows, np.int64)
        self.ignore = np.zeros(rows, bool)
        self.stops: dict[int, set[int]] = {}
        self.done = np.ones(rows, bool)
        self.vocab, self.eos = vocab, eos
        self.results: deque[tuple[StepPlan, StepTokens]] = deque()
        self.prefilled = 0

    def launch(self, plan: StepPlan) -> None:
        for source, target in plan.copies:
            self.slots[target] = self.slots[source]
        self._join(plan)
        for row, index, block in plan.new_blocks:
            assert block != SCRATCH_BLOCK
            self.table[row, index] = block
        self._store(plan)
        self._check_groups(plan)
        tokens = np.array([self._decode(row, length) for row, length in zip(plan.rows, plan.lengths)], np.int32)
        self.results.append((plan, StepTokens(tokens)))

    def _join(self, plan: StepPlan) -> None:
        joins = plan.joins
        if joins is None:
            return
        for i, row in enumerate(joins.rows):
            self.table[row] = SCRATCH_BLOCK
            self.table[row, : joins.blocks.shape[1]] = joins.blocks[i]
            self.length[row], self.last[row] = joins.length[i], joins.last_token[i]
            self.limit[row], self.seed[row] = joins.limit[i], joins.sampling.seed[i]
            self.sample[row], self.ignore[row] = joins.samples[i], joins.sampling.ignore_eos[i]
            self.stops[int(row)] = set(joins.sampling.stop_ids[i].tolist()) - {-1}
            self.done[row] = False

    def _store(self, plan: StepPlan) -> None:
        """All stores of a step come before any read, as in a layer."""
        for row in plan.rows:
            if not self.done[row]:
                at = self.length[row]
                self.slots[self.table[row, at // 16], at % 16] = self.last[row]
        chunks = plan.chunks
        if chunks is None:
            return
        for c in range(chunks.context.size):
            tokens = chunks.tokens[chunks.start[c] : chunks.start[c + 1]]
            self.prefilled += len(tokens)
            for i, token in enumerate(tokens):
                at = chunks.context[c] + i
                assert chunks.blocks[c, at // 16] != SCRATCH_BLOCK
                self.slots[chunks.blocks[c, at // 16], at % 16] = token

    def _check_groups(self, plan: StepPlan) -> None:
        assert plan.group_start[0] == 0 and plan.group_start.size == plan.group_length.size + 1
        for g, length in enumerate(plan.group_length):
            for row in plan.rows[plan.group_start[g] : plan.group_start[g + 1]]:
                n = length // 16
                assert (self.table[row, :n] == plan.group_blocks[g, :n]).all(), "a member doesn't share the prefix"
                assert self.done[row] or self.length[row] >= length

    def _decode(self, row: int, planned: int) -> int:
        if self.done[row]:
            return NO_TOKEN
        length = int(self.length[row])
        assert length == planned, "the host's planned length is not the device's"
        history = [int(self.slots[self.table[row, at // 16], at % 16]) for at in range(length + 1)]
        token = next_token(history, int(self.seed[row]), int(self.sample[row]), self.vocab)
        self.last[row] = token
        self.length[row] += 1
        ended = (token in self.eos and not self.ignore[row]) or token in self.stops[int(row)]
        self.done[row] = ended or length + 2 >= self.limit[row]
        return token
