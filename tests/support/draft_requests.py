"""Requests for tests of drafts, their options, and the engine that runs them. It knows LLM alone,
so that a process which imports it starts without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of token ids, each longer than the one before."""
    return [[2 + (i * 7 + k * k) % 280 for i in range(5 + 9 * k)] for k in range(count)]


def params_of(asks: list[dict[str, Any]], tokens: int) -> list[SamplingParams]:
    """Parameters of so many tokens, each with a seed of its own."""
    shared: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(**shared, seed=k, **ask) for k, ask in enumerate(asks)]


def open_llm(folder: Path, **knobs: Any) -> LLM:
    """A small engine in float32 that attends all shared prefixes together."""
    shared = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "kv_cache_tokens": 8192,
        "dtype": "float32",
    }
    return LLM(str(folder), prefix_groups="always", **shared | knobs)


def with_drafter(folder: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """Options whose "drafter" is a drafter's config.json: writes it, without weights, and returns
    the options that draft by it."""
    if "drafter" not in knobs:
        return knobs
    knobs, config = dict(knobs), knobs["drafter"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    asked = {"method": config["speculators_model_type"], "model": str(folder)}
    asked["num_speculative_tokens"] = knobs.pop("num_speculative_tokens")
    del knobs["drafter"]
    return knobs | {"speculative_config": asked}
