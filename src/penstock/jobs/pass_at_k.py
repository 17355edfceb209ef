"""Coverage (pass@k) and its confidence interval. pass@k is the probability that at least one of k
samples is right. Knows numbers only.

    pass@k = 1 - C(n - c, k) / C(n, k)      Chen et al. 2021 (arXiv:2107.03374): unbiased from n >=
                                            k samples, c of them right

The 95 % interval is Gaffke's (2005), over problems; Clopper-Pearson's where each problem's estimate
is 0 or 1. docs/jobs.md explains the method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.almanac.intervals import share_interval

BOOTSTRAPS = 10_000
CHUNK = 256  # bootstrap draws at once: [256, problems] weights in memory


@dataclass(frozen=True, slots=True)
class Coverage:
    """pass@k over all problems, as a share of 1, with its 95 % interval."""

    k: int
    value: float
    low: float
    high: float


def powers(n: int) -> list[int]:
    """Returns the powers of two below n, and n itself."""
    return [1 << i for i in range(n.bit_length()) if 1 << i < n] + [n]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Returns pass@k of one problem. It is computed as a product of ratios, so that no binomial
    overflows."""
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right among {n} samples doesn't exist")
    if n - right < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - right + 1, n + 1)))


def coverage(
    samples: Sequence[int], right: Sequence[int], ks: Iterable[int], seed: int
) -> list[Coverage]:
    """Returns the coverage for each k. samples, right: numbers of drawn and of right samples, for
    each problem; at least one problem."""
    ks = list(ks)
    # estimate of each problem for each k, [problems, ks]
    estimates = np.array(
        [[pass_at_k(n, c, k) for k in ks] for n, c in zip(samples, right, strict=True)]
    )
    low, high = _interval(estimates, seed)
    return [
        Coverage(k, float(v), float(a), float(b))
        for k, v, a, b in zip(ks, estimates.mean(0), low, high, strict=True)
    ]


def _interval(
    estimates: NDArray[np.float64], seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the interval's ends [k]. estimates: [problems, k]. For speed, problems with equal
    estimates get one joint bootstrap weight."""
    distinct, counts = np.unique(estimates, axis=0, return_counts=True)
    draw = np.random.default_rng(seed)
    lows, highs = [], []
    for start in range(0, BOOTSTRAPS, CHUNK):
        rows = min(CHUNK, BOOTSTRAPS - start)
        weights = draw.standard_gamma(counts, (rows, len(counts)))
        another = draw.standard_gamma(1, (rows, 1))
        # total: [draws, 1]; solved: [draws, ks]
        total, solved = (
            weights.sum(1, keepdims=True) + another,
            weights @ distinct,
        )
        lows.append(solved / total)
        highs.append((solved + another) / total)
    low = np.percentile(np.concatenate(lows), 2.5, axis=0)
    high = np.percentile(np.concatenate(highs), 97.5, axis=0)
    binary = ((estimates == 0) | (estimates == 1)).all(0)
    low[binary], high[binary] = share_interval(estimates[:, binary].sum(0), len(estimates))
    return low, high


def majority(answers: Iterable[str | None]) -> str | None:
    """Returns the most frequent answer; of equally frequent ones the first. None if no sample gave
    one."""
    counts = Counter(answer for answer in answers if answer is not None)
    return counts.most_common(1)[0][0] if counts else None
