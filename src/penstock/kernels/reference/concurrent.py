"""Work beside other work: on one stream, `work` runs at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def concurrent(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a function that returns the result of `work`."""
    made = work()
    return lambda: made
