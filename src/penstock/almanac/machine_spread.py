"""The spread of a figure between machines of one kind, which intervals of the edition's method
carry. It was taken from figures of one engine and one work on H200s of different days, and is
written into each record, so that a later measurement changes no older record. Knows numbers and
records; no page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.almanac.intervals import t_value
from penstock.almanac.record import Edition, Figures, Interval, Method, Point, Record, Spread
from penstock.almanac.summaries import short

# Output tokens a second of one engine and work, each of another day, so of a machine rented anew.
# The GPU decided: Penstock 0.1.0 with a 1B, 128x1024 and monkeys over HTTP, 20 to 22 Nov 2026; an
# 8B in fp8 with fp8 KV, 128 x 256 -> 256, Penstock and vLLM 0.26.0, 22 to 26 Nov. Code changed
# between the days too, so machines differ by no more.
BY_GPU = (
    (99_874, 102_936, 103_283),
    (158_017, 164_031, 161_300),
    (25_638, 24_947),
    (18_911, 18_800),
)
# One core of the host decided: vLLM 0.26.0 with the same 1B, 128x1024 and monkeys, 20 to 22 Nov.
BY_HOST = (
    (19_559, 27_440, 19_000),
    (27_219, 20_200, 23_500),
)
SOURCE = (
    "pooled standard deviations of logarithms, times Student's t, over figures of one engine and"
    " work on H200s of different days, 20 to 26 Nov 2026. gpu: 10 figures of 4 works. host: 6"
    " figures of vLLM 0.26.0 with a 1B, held by one core. No machine was measured thrice on purpose"
)
# Figures that wait in queues: at an open point, a machine that serves a little slower may lengthen
# them by much, and the GPU's term is of rates.
QUEUED = ("first_token", "first_token_actual", "end_to_end", "end_to_end_actual")
BUSY_GPU = 0.9  # least share of a window in which kernels ran, if the GPU is said to decide


def half_width(groups: Sequence[Sequence[float]]) -> float:
    """Returns half of the 95 % interval of one machine's figure, in logarithms. groups: figures of
    one engine and work each."""
    logs = [np.log(np.asarray(each, float)) for each in groups]
    freedom = sum(len(each) - 1 for each in logs)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in logs)
    return t_value(freedom) * math.sqrt(squares / freedom)


EDITION = Edition(gpu=short(half_width(BY_GPU)), host=short(half_width(BY_HOST)), measured=SOURCE)


def apart(edition: Edition | None, busy: float | None) -> float:
    """Returns the half-width in logarithms by which machines differ; 0 for another method. busy:
    the GPU's busy share; None: unknown, so that the host may decide."""
    if edition is None:
        return 0.0
    return edition.gpu if busy is not None and busy >= BUSY_GPU else edition.host


def _apart(method: Method, point: Point) -> float:
    return apart(method.edition, point.board.busy if point.board else None)


def over_machines(method: Method, point: Point) -> Figures:
    """Returns a load level's figures as they are shown and compared: those of the edition's method
    with the term for another machine of the kind. (Within a run, as when offered and completed
    rates are compared, figures stay without it.)"""
    away, queued = _apart(method, point), apart(method.edition, None)
    if not away:
        return point.figures
    return _widened(point.figures, away, queued if point.kind == "open" else away)


def shown(record: Record) -> list[Point]:
    """Returns a benchmark record's load levels with `over_machines`'s figures, and joules of a
    token alike."""
    points = []
    for point in record.points:
        board, away = point.board, _apart(record.method, point)
        if board is not None and board.joules_per_token is not None:
            joules = over(board.joules_per_token, away)
            board = board.model_copy(update={"joules_per_token": joules})
        told = {"figures": over_machines(record.method, point), "board": board}
        points.append(point.model_copy(update=told))
    return points


def apart_at_most(record: Record) -> float:
    """Returns the half-width for the rates that keep a goal: that of the saturation load level,
    where the engine is at its limit."""
    whole = [each.board for each in record.points if each.kind == "saturation" and each.board]
    return apart(record.method.edition, whole[0].busy if whole else None)


def _widened(figures: Figures, away: float, queued: float) -> Figures:
    told: dict[str, Any] = {}
    for name, each in figures:
        if isinstance(each, Spread):
            term = queued if name in QUEUED else away
            told[name] = Spread(**{key: over(value, term) for key, value in each})
        else:
            told[name] = each and over(each, away)
    return Figures(**told)


def over(value: Interval, away: float) -> Interval:
    """Widens an interval by `away`, in logarithms. An unknown end stays unknown."""

    def end(known: float | None, sign: int) -> float | None:
        if not known or not value.value:
            return known
        return short(value.value * math.exp(sign * math.hypot(math.log(known / value.value), away)))

    return Interval(value=value.value, low=end(value.low, -1), high=end(value.high, 1))
