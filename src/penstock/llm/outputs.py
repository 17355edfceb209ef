"""Builds vLLM's output classes from deltas. A delta is the new text and tokens of a sample after a
step. Knows deltas and outputs; no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from penstock.engine.logprobs import GrowingLogprobs, LazyLogprobs
from penstock.llm.inputs import Finished, Prompt, TextOrIds
from penstock.request import (
    FIRST_WEIGHTS,
    CompletionOutput,
    Delta,
    RequestOutput,
    RequestOutputKind,
)

if TYPE_CHECKING:
    from penstock.engine.client import PendingRequest

# a delta, its request (None if the prompt was refused), and its prompt
Told: TypeAlias = "tuple[Delta, PendingRequest | None, Prompt]"


class SampleBuilder:
    """Builds one sample's output from its deltas."""

    def __init__(self, index: int) -> None:
        self._out = CompletionOutput(index, "", [])
        self._parts: GrowingLogprobs | None = None

    @property
    def finished(self) -> bool:
        """True once the sample has ended."""
        return self._out.finish_reason is not None

    def add(self, delta: Delta, *, whole: bool) -> None:
        """Adds a delta. whole: True if this is the sample's only delta, so that nothing needs to be
        copied."""
        out, scores = self._out, delta.logprobs
        out.text += delta.text
        if out.token_ids:
            out.token_ids += delta.token_ids
        else:
            out.token_ids = delta.token_ids
        out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason
        out.weights_version = delta.weights_version or FIRST_WEIGHTS
        if scores is None:
            return
        assert isinstance(scores, LazyLogprobs), "a client's logprobs are columns"
        out.cumulative_logprob = scores.added_to(out.cumulative_logprob or 0.0)
        if whole:
            out.logprobs = scores
            return
        self._parts = self._parts or GrowingLogprobs()
        self._parts.add(scores)
        out.logprobs = self._parts.so_far()

    def abort(self) -> None:
        """Ends the sample with finish_reason "abort", unless it has ended."""
        self._out.finish_reason = self._out.finish_reason or "abort"

    def so_far(self) -> CompletionOutput:
        """Returns the output so far. Its token_ids are the sample's own list, which keeps growing,
        as in vLLM."""
        out = self._out
        return CompletionOutput(
            index=out.index,
            text=out.text,
            token_ids=out.token_ids,
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            cumulative_logprob=out.cumulative_logprob,
            logprobs=out.logprobs,
            weights_version=out.weights_version,
        )

    def news(self) -> CompletionOutput:
        """Returns the part of the output since the last call of this method. Only
        cumulative_logprob covers the whole sample, as in vLLM."""
        told = self.so_far()
        self._out.text, self._out.token_ids, self._out.logprobs, self._parts = "", [], None, None
        return told


class RequestBuilder:
    """Builds one request's outputs from its deltas."""

    def __init__(self, request_id: str, prompt: TextOrIds | None, samples: int) -> None:
        """samples: number of samples of the request."""
        text = prompt if isinstance(prompt, str) else None
        self._out = RequestOutput(request_id, text, [], finished=False)
        self._count = samples
        self._made: dict[int, SampleBuilder] = {}
        self._told: set[int] = set()  # indices of samples with new tokens since the last output

    @property
    def finished(self) -> bool:
        """True once all samples have ended or the request was refused."""
        return self._out.finished

    def add(
        self, delta: Delta, asked: PendingRequest | None, prompt: TextOrIds | None = None
    ) -> None:
        """Adds a delta. asked: its request, None if the prompt was refused. prompt: text rendered
        from the messages of a chat."""
        out = self._out
        out.error = delta.error or out.error
        if asked is None:
            out.finished = True
            return
        if isinstance(prompt, str):
            out.prompt = prompt
        out.prompt_token_ids = asked.prompt_ids
        out.num_cached_tokens = asked.num_cached_tokens
        out.prompt_logprobs = asked.prompt_logprobs
        sample = self._made.get(delta.index)
        if sample is None:
            sample = self._made[delta.index] = SampleBuilder(delta.index)
        sample.add(delta, whole=not asked.stream)
        self._told.add(delta.index)
        out.finished = len(self._made) == self._count and all(
            each.finished for each in self._made.values()
        )

    def abort(self) -> None:
        """Marks the samples that are still running as aborted."""
        for index in range(self._count):
            sample = self._made.setdefault(index, SampleBuilder(index))
            if not sample.finished:
                sample.abort()
                self._told.add(index)
        self._out.finished = True

    def output(self, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> RequestOutput:
        """Returns the output so far, with samples in the order of their index. With DELTA: only the
        new part of samples that have one."""
        if kind is RequestOutputKind.DELTA:
            samples = [self._made[index].news() for index in sorted(self._told)]
        else:
            samples = [self._made[index].so_far() for index in sorted(self._made)]
        self._told.clear()
        out = self._out
        return RequestOutput(
            request_id=out.request_id,
            prompt=out.prompt,
            prompt_token_ids=out.prompt_token_ids,
            outputs=samples,
            prompt_logprobs=out.prompt_logprobs,
            finished=out.finished,
            num_cached_tokens=out.num_cached_tokens,
            error=out.error,
        )


def finished_of(delta: Delta, asked: PendingRequest | None, prompt: Prompt) -> Finished:
    """Returns the result of an ended sample or a refused prompt, with its prompt's key."""
    if asked is None:
        return Finished(key=prompt.key, output=None, error=delta.error, prompt_tokens=0)
    sample = SampleBuilder(delta.index)
    sample.add(delta, whole=True)
    return Finished(
        key=prompt.key,
        output=sample.so_far(),
        error=delta.error,
        prompt_tokens=len(asked.prompt_ids),
    )
