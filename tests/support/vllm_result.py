"""A result file as vLLM's own benchmark writes it, made up; it knows no room."""

from __future__ import annotations

from typing import Any

import numpy as np


def told(
    count: int = 400,
    rate: float | str = 20.0,
    users: int | None = None,
    output: int = 16,
    seed: int = 0,
) -> dict[str, Any]:
    """A result file with `--save-detailed`, of requests sent by a Poisson clock or at once; a
    twentieth failed."""
    rng = np.random.default_rng(seed)
    sent = 1000.0 + (
        np.cumsum(rng.exponential(1 / rate, count)) if isinstance(rate, float) else np.zeros(count)
    )
    ttfts, itls = 0.05 * rng.lognormal(0, 0.3, count), rng.exponential(0.01, (count, output - 1))
    failed = rng.random(count) < 0.05
    return {
        "date": "20260131-120000",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": "meta-llama/Llama-3.2-1B",
        "tokenizer_id": "meta-llama/Llama-3.2-1B",
        "num_prompts": count,
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": users,
        "duration": float((sent + ttfts + itls.sum(1))[~failed].max() - 1000.0),
        "completed": int((~failed).sum()),
        "input_lens": [64] * count,
        "output_lens": [0 if bad else output for bad in failed],
        "ttfts": [0.0 if bad else float(one) for one, bad in zip(ttfts, failed, strict=True)],
        "itls": [[] if bad else row.tolist() for row, bad in zip(itls, failed, strict=True)],
        "start_times": sent.tolist(),
        "generated_texts": ["<b>text</b>"] * count,
        "errors": ["Traceback: aiohttp.ServerDisconnectedError" if bad else "" for bad in failed],
    }
