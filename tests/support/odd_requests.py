"""Requests that nobody sends twice: prompts of any length, groups, prefixes in common, and every
sampling parameter."""

from __future__ import annotations

import random
from typing import Any

from penstock.request import SamplingParams


def odd_requests(
    rng: random.Random, count: int, vocabulary: int, longest: int
) -> list[tuple[list[int], SamplingParams]]:
    """So many (prompt, params). longest: tokens of prompt and output together."""
    shared = [rng.randrange(vocabulary) for _ in range(longest)]
    return [_one(rng, vocabulary, longest, shared) for _ in range(count)]


def _one(
    rng: random.Random, vocabulary: int, longest: int, shared: list[int]
) -> tuple[list[int], SamplingParams]:
    size = min(
        longest - 2,
        rng.choice([1, 2, 15, 16, 17, 31, 33, 64, rng.randrange(1, longest - 1), longest - 2]),
    )
    common = rng.choice([0, 0, size // 2, size - 1])
    prompt = shared[:common] + [rng.randrange(vocabulary) for _ in range(size - common)]
    asked: dict[str, Any] = {
        "n": rng.choice([1, 1, 2, 5, 17]),
        "max_tokens": rng.randrange(1, min(24, longest - size) + 1),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "seed": rng.choice([None, 1, 2**40]),
        "ignore_eos": True,
    }
    maybe: dict[str, list[Any]] = {
        "top_p": [0.5, 0.9],
        "top_k": [1, 16, vocabulary],
        "min_p": [0.1],
        "repetition_penalty": [1.3],
        "presence_penalty": [1.0],
        "frequency_penalty": [-0.5],
        "logprobs": [0, 1, 5, 16, 20],
        "prompt_logprobs": [0, 1, 16, 20],
        "min_tokens": [1],
        "stop_token_ids": [[3], list(range(16))],
        "logit_bias": [{5: 2.0}, dict.fromkeys(range(min(300, vocabulary)), 1.0)],
        "allowed_token_ids": [[7], list(range(0, vocabulary, 3))],
    }
    for name in rng.sample(sorted(maybe), rng.choice([0, 0, 1, 2, 4])):
        asked[name] = rng.choice(maybe[name])
    return prompt, SamplingParams(**asked)
