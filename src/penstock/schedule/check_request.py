"""check_request: refuses what a model can never run. It knows sizes and parameters; no queue, no
text."""

from __future__ import annotations

from penstock.errors import ContextLengthError, UsageError, too_long
from penstock.request import SamplingParams


def check_request(
    size: int, span: tuple[int, int] | None, params: SamplingParams, longest: int, vocabulary: int
) -> None:
    """Refuses what a model of `vocabulary` tokens and a context of `longest` can never run.

    `size` of the prompt in tokens, `span` its lowest and highest id (None where it is empty). Both
    ends of the engine ask: the client, so that a caller hears at once, and the scheduler, which
    trusts no channel. Raises ContextLengthError for a prompt that leaves no room for a token,
    UsageError for the rest.
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
