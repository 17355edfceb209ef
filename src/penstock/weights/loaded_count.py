"""LoadedCount: how many weights are in their places: a line that moves on a terminal, elsewhere one
a while to the log, which `penstock serve` shows. It knows counts."""

from __future__ import annotations

import logging
import time

from penstock.status_line import OFTEN, SELDOM, StatusLine, duration

log = logging.getLogger(__name__)


class LoadedCount:
    """Counts tensors up to `total`."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._line = total, 0, StatusLine()
        self._begin = self._shown = time.monotonic()

    def one_more(self) -> None:
        """Takes one as loaded."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown < (OFTEN if self._line.live else SELDOM):
            return
        self._shown = now
        if self._line.live:
            self._line.show(f"penstock: weights {self._done:,} of {self._total:,}")
        else:
            log.info("weights %s of %s", f"{self._done:,}", f"{self._total:,}")

    def end(self) -> None:
        """Takes the moving line away, and says in the log how long it took."""
        self._line.clear()
        took = duration(time.monotonic() - self._begin)
        log.info("weights %s of %s, in %s", f"{self._done:,}", f"{self._total:,}", took)
