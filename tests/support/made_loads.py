"""Small loads for a simulator: columns with the same number for all requests,
or drawn from a seed."""

from __future__ import annotations

import numpy as np

from penstock.simulate.asked_load import AskedLoad


def made_load(
    count: int,
    *,
    prompt: int = 100,
    output: int = 40,
    samples: int = 1,
    rate: float | None = None,
    limit: int = 0,
    shared: int = 0,
    drawn: bool = True,
    seed: int = 0,
) -> AskedLoad:
    """rate: requests a second; None: a job.   drawn: whether answers are of drawn lengths, `output`
    their mean."""
    draw = np.random.default_rng(seed)
    outputs = np.full(count * samples, output)
    if drawn:
        outputs = np.minimum(draw.geometric(1 / output, outputs.size), 8 * output)
    return AskedLoad(
        arrival=np.zeros(count) if rate is None else np.cumsum(draw.exponential(1 / rate, count)),
        prompt=np.full(count, prompt, np.int32),
        start=np.arange(count + 1) * samples,
        output=outputs.astype(np.int32),
        limit=np.full(count, limit, np.int32),
        shared=np.full(count, shared, np.int32),
        header=np.zeros(count, np.int32),
        at_once=rate is None,
    )
