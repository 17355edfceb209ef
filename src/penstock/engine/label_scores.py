"""Label scores: next-token probabilities of given tokens. A request names several tokens (labels);
the answer is each one's probability as the next token after the prompt.

The request draws one token, in the step that ends its prompt. Knows logprobs; no prompts."""

from __future__ import annotations

import numpy as np

from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta, SamplingParams


def label_params(labels: list[int]) -> SamplingParams:
    """Returns the sampling parameters of a label score request. Raises UsageError."""
    return SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=labels, detokenize=False)


def label_probs(delta: Delta, *, softmax: bool) -> list[float]:
    """Returns the labels' probabilities in their order: normalised over the labels if softmax, else
    over the whole vocabulary."""
    found = delta.logprobs
    assert isinstance(found, LazyLogprobs) and len(found) == 1, "a label's request draws one token"
    logprobs = found.columns[4][0].astype(np.float64)
    if softmax:
        logprobs = logprobs - np.logaddexp.reduce(logprobs)
    probs: list[float] = np.exp(logprobs).tolist()
    return probs
