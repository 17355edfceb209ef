"""check_request: refuses requests that can never run. Knows sizes and parameters; no queue, no
text."""

from __future__ import annotations

from collections.abc import Container

from penstock.errors import ContextLengthError, UsageError, too_long
from penstock.request import MAX_SALT, MAX_TAG, Request, SamplingParams
from penstock.row_table import BAD_WORD_IDS
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import Int32


def check_request(
    size: int, span: tuple[int, int] | None, params: SamplingParams, longest: int, vocabulary: int
) -> None:
    """Refuses a request that a model with `vocabulary` tokens and a context of `longest` tokens can
    never run.

    size: prompt length in tokens; span: lowest and highest prompt id (None for an empty prompt).
    Both ends of the engine check: the client, so that the caller gets the error at once, and the
    scheduler, which trusts no channel. Raises ContextLengthError for a prompt that leaves no room
    for a token, UsageError for all else.
    """
    if span is None:
        raise UsageError("the prompt is empty: give at least one token", param="prompt")
    if size >= longest:
        raise ContextLengthError(
            f"{too_long(longest)}, {size} tokens: shorten it, or raise max_model_len",
            param="prompt",
        )
    if span[0] < 0 or span[1] >= vocabulary:
        raise UsageError(f"the prompt names a token outside 0 to {vocabulary - 1}", param="prompt")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        ids = getattr(params, name)
        if ids and max(ids) >= vocabulary:
            raise UsageError(f"{name} names a token outside 0 to {vocabulary - 1}", param=name)


def check_new(
    request: Request, tokens: Int32, limits: SchedulerConfig, live: Container[int]
) -> None:
    """Refuses a new request that can never run, or whose id is in `live`. Raises UsageError or
    ContextLengthError."""
    span = (int(tokens.min()), int(tokens.max())) if tokens.size else None
    check_request(tokens.size, span, request.sampling, limits.max_model_len, limits.vocab_size)
    if not 0 <= request.request_id < 2**63 or request.request_id in live:
        raise UsageError("request_id must be a new number, from 0 to 2**63 - 1", param="request_id")
    if not 0 <= request.salt <= MAX_SALT:
        raise UsageError(f"salt must be between 0 and {MAX_SALT}", param="cache_salt")
    if not 0 <= request.tag <= MAX_TAG:
        raise UsageError(f"tag must be between 0 and {MAX_TAG}", param="tag")
    for word in request.bad_words:
        if not 0 < len(word) <= BAD_WORD_IDS or min(word) < 0 or max(word) >= limits.vocab_size:
            rule = f"bad_words must be of 1 to {BAD_WORD_IDS} ids of the vocabulary each"
            raise UsageError(rule, param="bad_words", rule=rule)
    samples = request.samples
    if samples is not None and (
        not samples
        or len(set(samples)) < len(samples)
        or min(samples) < 0
        or max(samples) >= request.sampling.n
    ):
        raise UsageError(
            f"samples must be distinct indices below n = {request.sampling.n}", param="samples"
        )
