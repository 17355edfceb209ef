"""Trials of a limit that the product holds by a real clock, on a machine that may be slow.

An engine that completes no step for a second is ended, and a busy machine may hold up a sound one
for as long.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import httpx

from penstock.errors import EngineError

SECONDS = (1.0, 10.0, 120.0)
T = TypeVar("T")


def patiently(trial: Callable[[float], T]) -> T:
    """Returns what the trial returns with a limit of 1 s. A trial that fails, or whose engine ends,
    is repeated with 10 s, then with 120 s, where its failure is raised."""
    for seconds in SECONDS[:-1]:
        with suppress(AssertionError, httpx.HTTPError, EngineError):
            return trial(seconds)
    return trial(SECONDS[-1])
