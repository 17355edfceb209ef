"""Decides which candidate value wins. A candidate must beat the default by more than the noise;
both are timed in the same rounds.

Knows names and figures; times nothing itself.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.artifact.manifest import Decision, Value, name_of

REPEATS = 3  # least number of rounds; in a round each candidate runs once, and so does the default
NOT_REACHED = "not reached in the time for tuning"
LEAST_GAIN = 0.5  # percent; a candidate with a smaller gain is not taken


def measure(
    candidates: Sequence[Value],
    run: Callable[[Value], float],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Runs the candidates in turn, for REPEATS rounds, every second round in reverse order. Returns
    candidate name -> its figure in each round.

    A round starts only if it should end before `deadline` (on `clock`), judged by the longest round
    so far. With fewer than REPEATS rounds, `decide` keeps the default.
    """
    found: dict[str, list[float]] = {name_of(each): [] for each in candidates}
    longest = 0.0
    for number in range(REPEATS):
        begun = clock()
        if begun + longest > deadline:
            break
        for each in candidates if number % 2 == 0 else reversed(candidates):
            found[name_of(each)].append(run(each))
        longest = max(longest, clock() - begun)
    return found


def decide(
    name: str,
    candidates: Sequence[Value],
    measured: Mapping[str, Sequence[float]],
    unit: str,
    *,
    more: bool,
    note: str = "",
) -> Decision:
    """Returns the choice; the first candidate is the default. more: a larger figure is better.

    A candidate is taken if it beats the default by more than the noise, which is half of the span
    of the rounds' ratios.
    """
    default = candidates[0]
    told = {
        each: [float(f"{figure:.6g}") for figure in figures] for each, figures in measured.items()
    }
    if min(map(len, told.values()), default=0) < REPEATS:
        kept = note or NOT_REACHED
        return Decision(
            name=name, chosen=default, default=default, unit=unit, measured=told, note=kept
        )
    gains = {
        each: _gain(measured[name_of(default)], measured[name_of(each)], more)
        for each in candidates[1:]
    }
    winners = [each for each, (won, noise) in gains.items() if won > max(noise, LEAST_GAIN)]
    chosen = max(winners, key=lambda each: gains[each][0]) if winners else default
    best = max(gains, key=lambda each: gains[each][0]) if gains else default
    won, noise = gains[chosen if winners else best] if gains else (0.0, 0.0)
    return Decision(
        name=name,
        chosen=chosen,
        default=default,
        unit=unit,
        measured=told,
        won_percent=round(won, 2) if winners else 0.0,
        noise_percent=round(noise, 2),
        note=note,
    )


def middle(figures: Sequence[float]) -> float:
    """Returns the median of the figures."""
    return statistics.median(figures)


def noise_percent(figures: Sequence[float]) -> float:
    """Returns half of the distance between the largest and the smallest figure, in percent of the
    median."""
    return 50.0 * (max(figures) - min(figures)) / middle(figures)


def _gain(default: Sequence[float], other: Sequence[float], more: bool) -> tuple[float, float]:
    """Returns the percent by which `other` is better, and the noise of that figure. Rounds are
    compared one by one, because a change of the machine's clock between rounds moves both."""
    ratios = [b / a if more else a / b for a, b in zip(default, other, strict=True)]
    assert all(math.isfinite(ratio) for ratio in ratios)
    return 100.0 * (statistics.median(ratios) - 1.0), 50.0 * (max(ratios) - min(ratios))
