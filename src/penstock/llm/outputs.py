"""vLLM's outputs, built of deltas: those of LLM and of AsyncLLM. It knows deltas and outputs; no
engine."""

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

# What a step says: a delta, its request, None where the prompt was refused, and its prompt.
Told: TypeAlias = "tuple[Delta, PendingRequest | None, Prompt]"


class SampleBuilder:
    """Builds one sample's output of its deltas."""

    def __init__(self, index: int) -> None:
        self._out = CompletionOutput(index, "", [])
        self._parts: GrowingLogprobs | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self._out.finish_reason is not None

    def add(self, delta: Delta, *, whole: bool) -> None:
        """Takes news of the sample. whole: there is no other, so nothing of it is copied."""
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
        """Ends it where it stands, unless it has ended."""
        self._out.finish_reason = self._out.finish_reason or "abort"

    def so_far(self) -> CompletionOutput:
        """Returns all that was made. Its token_ids are the sample's own list, which grows on, as
        vLLM's does."""
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
        """Returns what was made since the last time; cumulative_logprob is of all, as vLLM's."""
        told = self.so_far()
        self._out.text, self._out.token_ids, self._out.logprobs, self._parts = "", [], None, None
        return told


class RequestBuilder:
    """Builds one request's outputs of its deltas."""

    def __init__(self, request_id: str, prompt: TextOrIds | None, samples: int) -> None:
        """samples: how many the request has."""
        text = prompt if isinstance(prompt, str) else None
        self._out = RequestOutput(request_id, text, [], finished=False)
        self._count = samples
        self._made: dict[int, SampleBuilder] = {}
        self._told: set[int] = set()  # samples with news since the last output

    @property
    def finished(self) -> bool:
        """Whether all samples have ended, or the request was refused."""
        return self._out.finished

    def add(
        self, delta: Delta, asked: PendingRequest | None, prompt: TextOrIds | None = None
    ) -> None:
        """Takes a delta. asked: its request, None: the prompt was refused.   prompt: the text that
        messages became."""
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
        """Ends all samples where they stand."""
        for index in range(self._count):
            sample = self._made.setdefault(index, SampleBuilder(index))
            if not sample.finished:
                sample.abort()
                self._told.add(index)
        self._out.finished = True

    def output(self, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> RequestOutput:
        """Returns what there is, samples in the order of their index: of DELTA, those with news and
        that alone."""
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
    """Returns a sample that has ended, or a prompt that was refused, under its prompt's key."""
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
