"""Deltas that have come to their end as vLLM's outputs. It knows deltas and outputs; no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from penstock.engine.logprobs import LazyLogprobs
from penstock.llm.inputs import Finished, Prompt, TextOrIds
from penstock.request import CompletionOutput, Delta, RequestOutput

if TYPE_CHECKING:
    from penstock.engine.client import PendingRequest

# What a step says: a delta, its request, None where the prompt was refused, and its prompt.
Told: TypeAlias = "tuple[Delta, PendingRequest | None, Prompt]"


def collect(out: RequestOutput, delta: Delta, asked: PendingRequest | None, prompt: TextOrIds | None) -> None:
    """Adds what a delta says to its prompt's answer. asked: the request, None: the prompt was refused."""
    if asked is None:
        out.error = delta.error
        return
    out.prompt = prompt if isinstance(prompt, str) else None
    out.prompt_token_ids = asked.prompt_ids
    out.num_cached_tokens = asked.num_cached_tokens
    out.prompt_logprobs = asked.prompt_logprobs
    out.error = delta.error or out.error
    if delta.finish_reason is not None:
        out.outputs.append(output_of(delta))


def finished_of(delta: Delta, asked: PendingRequest | None, prompt: Prompt) -> Finished:
    """Returns a sample that has ended, or a prompt that was refused, under its prompt's key."""
    if asked is None:
        return Finished(key=prompt.key, output=None, error=delta.error, prompt_tokens=0)
    return Finished(key=prompt.key, output=output_of(delta), error=delta.error, prompt_tokens=len(asked.prompt_ids))


def output_of(delta: Delta) -> CompletionOutput:
    """Returns the sample that a whole delta is."""
    total = None
    if delta.logprobs is not None:
        assert isinstance(delta.logprobs, LazyLogprobs), "a client's logprobs are columns"
        total = delta.logprobs.total
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        cumulative_logprob=total,
        logprobs=delta.logprobs,
    )
