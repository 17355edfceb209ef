"""LoadedCount: progress of loading weights. On a terminal it is one line that is rewritten;
elsewhere it is a log line now and then, which `penstock serve` shows. Knows counts."""

from __future__ import annotations

import logging
import time

from penstock.status_line import OFTEN, SELDOM, StatusLine, duration

log = logging.getLogger(__name__)


class LoadedCount:
    """Counts loaded tensors up to `total` and shows the progress."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._line = total, 0, StatusLine()
        self._begin = self._shown = time.monotonic()

    def one_more(self) -> None:
        """Counts one tensor as loaded."""
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
        """Removes the progress line and logs how long loading took."""
        self._line.clear()
        took = duration(time.monotonic() - self._begin)
        log.info("weights %s of %s, in %s", f"{self._done:,}", f"{self._total:,}", took)
