"""Work beside other work: on one stream, one after the other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def concurrent(
    work: Callable[[Callable[[], Tensor]], Tensor], other: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns what `work` and `other` return; `other` runs first. `work` is given a function that
    returns what `other` returned."""
    made = other()
    return work(lambda: made), made
