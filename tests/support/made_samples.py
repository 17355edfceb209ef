"""Made-up samples of a queue whose truth is known: an open loop at a rate, a closed one, everything
at once.

One server with one line: a request waits for those before it, then takes its time. So that its
figures can be known without the code under test. Times are seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.record import ClientHealth
from penstock.almanac.samples import Samples, from_lists

LOOK = ClientHealth(lag_p99=0.001, busy=0.2, headroom=5.0, late_p99=0.002, short=False)


def samples_of(
    intended: npt.ArrayLike,
    first: npt.ArrayLike,
    gaps: list[npt.NDArray[np.float64]],
    *,
    name: str = "p",
    window: tuple[float, float] = (0.0, np.inf),
    start: int = 0,
    actual: npt.ArrayLike | None = None,
    prompt: int = 128,
    **more: Any,
) -> Samples:
    """Samples whose requests were sent as planned (or at `actual`), with their first tokens at
    `first` and these gaps. A column in `more` replaces the made one."""
    intended, first = np.asarray(intended, float), np.asarray(first, float)
    sent = intended if actual is None else np.asarray(actual, float)
    issued, count = np.where(np.isnan(intended), sent, intended), len(intended)
    gaps = [np.asarray(each, np.float32) for each in gaps]
    lengths = [len(each) + 1 for each in gaps]
    ends = np.asarray(first) + [float(each.sum(dtype=np.float64)) for each in gaps]
    columns = {
        "point": [name] * count,
        "start": [start] * count,
        "intended": list(intended),
        "actual": list(sent),
        "first": list(first),
        "end": list(ends),
        "events": lengths,
        "gaps": gaps,
        "prompt_tokens": [prompt] * count,
        "output_tokens": lengths,
        "cached_tokens": [0] * count,
        "asked_prompt": [prompt] * count,
        "asked_output": lengths,
        "window": list((issued >= window[0]) & (issued < window[1])),
        "outcome": ["ok"] * count,
    }
    return from_lists({**columns, **more})


def open_loop(
    rate: float = 20.0,
    seconds: float = 60.0,
    *,
    seed: int = 0,
    output: int = 32,
    warm: float = 10.0,
    start: int = 0,
    name: str = "open",
    slow: float = 1.0,
) -> Samples:
    """Poisson arrivals; first tokens 0.1 s later in the middle (lognormal), gaps of 10 ms
    (exponential)."""
    rng = np.random.default_rng([seed, start])
    sent = np.cumsum(rng.exponential(1 / rate, int((seconds + warm + 5) * rate)))
    first = sent + 0.1 * slow * rng.lognormal(0, 0.3, len(sent))
    gaps = list(rng.exponential(0.01, (len(sent), output - 1)))
    return samples_of(
        sent, first, gaps, name=name, window=(warm, warm + seconds), start=start, actual=sent + 5e-4
    )


def one_line(
    arrive: npt.NDArray[np.float64], takes: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """When each request is served, where each waits for the ones before it (Lindley's
    recursion)."""
    before = np.cumsum(takes) - takes
    return before + takes + np.maximum.accumulate(arrive - before)
