"""AskedLoad: the requests of a simulation. Its columns are arrival times, prompt lengths and
samples' lengths. Prompts are random ids seeded by the request's number, so that prompts share no
prefix beyond `shared`.

Knows numbers; no files, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.request import Request, SamplingParams
from penstock.schedule.step import Int32, Int64
from penstock.simulate.modelled_outputs import FIRST, VOCABULARY, WORD

Float64 = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class AskedLoad:
    """Requests in the order of their arrival. The samples of all requests are concatenated in
    `output`."""

    arrival: Float64  # [requests] seconds since the first arrival
    prompt: Int32  # [requests] prompt length in tokens
    start: Int64  # [requests + 1] request i's samples are output[start[i] : start[i + 1]]
    output: Int32  # [samples] answer length in tokens
    # [requests] max_tokens; 0: samples ignore end-of-sequence and end at their length in `output`
    limit: Int32
    shared: Int32  # [requests] leading tokens shared by all prompts of the same header
    header: Int32  # [requests] number of the group of prompts that share their leading tokens
    # True for a job: replicas get requests whenever they have room; `arrival` is ignored
    at_once: bool = False

    def __len__(self) -> int:
        return int(self.arrival.size)

    @property
    def samples(self) -> Int64:
        """Returns the number of samples of each request [requests]."""
        counts: Int64 = np.diff(self.start)
        return counts

    @property
    def shares(self) -> bool:
        """Returns True if prompts of several requests begin alike; if not, a prefix cache would
        find nothing and is left out."""
        return bool(self.shared.any())

    def longest(self) -> int:
        """Returns the most tokens of a prompt with one of its samples."""
        return int((self.prompt + np.maximum.reduceat(self.output, self.start[:-1])).max())

    def reach(self) -> int:
        """Returns the most tokens that a prompt with a sample could reach if every sample ran to
        its limit."""
        made = np.maximum.reduceat(self.output, self.start[:-1])
        return int((self.prompt + np.where(self.limit > 0, self.limit, made)).max())

    def request(self, number: int, name: int, samples: Sequence[int] | None = None) -> Request:
        """Returns request `number` as an engine takes it. name: its request id there. Its seed is
        `number`, by which the modelled device finds a row's request."""
        limit, n = int(self.limit[number]), int(self.samples[number])
        outputs = self.output[self.start[number] : self.start[number + 1]]
        sampling = SamplingParams(
            n=n,
            max_tokens=limit or int(outputs.max()),
            ignore_eos=not limit,
            seed=number,
            detokenize=False,
        )
        prompt = self.prompt_ids(number).tobytes()
        return Request(
            request_id=name,
            prompt=prompt,
            sampling=sampling,
            samples=None if samples is None else list(samples),
        )

    def prompt_ids(self, number: int) -> Int32:
        """Returns a request's prompt: its header's prefix, then its own tokens."""
        total, shared = int(self.prompt[number]), int(self.shared[number])
        if not self.shares:
            return np.full(total, WORD, np.int32)  # content does not matter without sharing
        ids = np.empty(total, np.int32)
        ids[:shared] = _ids(shared, [1, int(self.header[number])])
        ids[shared:] = _ids(total - shared, [2, number])
        return ids


def _ids(count: int, seed: list[int]) -> Int32:
    return np.random.default_rng(seed).integers(FIRST, VOCABULARY, count, np.int32)
