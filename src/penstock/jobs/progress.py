"""The live progress line of a long job. It shows how much is done, the current speed and the
expected end. On a terminal a thread overwrites it; elsewhere it is printed every ten seconds. Knows
the job only by its counts and its journal.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from penstock.journal import Journal
from penstock.status_line import SELDOM, StatusLine, duration

LIVE_SECONDS = 0.25
# the speed is the mean over this time, or over a longer one if it has no tokens
WINDOW_SECONDS = 5.0
# number of items that must end after the first before the end time is predicted
FEW = 10
BAR = 12  # characters of the progress bar


@dataclass(slots=True)
class Count:
    """The progress of one kind of item, such as rows. done: items in the journal on the disk, of
    `total`; before: how many of them an earlier run has done.

    ended: items that ended in this run, whether on the disk yet or not. begun: items that the
    engine has taken in this run; 0 if not counted.
    """

    name: str
    total: int
    before: int = 0
    ended: int = 0
    done: int = 0
    begun: int = 0

    @property
    def text(self) -> str:
        under_way = f", {self.begun - self.ended:,} under way" if self.begun > self.ended else ""
        return f"{self.before + self.done:,}/{self.total:,} {self.name}{under_way}"

    @property
    def left(self) -> int:
        return self.total - self.before - self.done


class Progress:
    """Used as `with Progress([Count(...), ...], tokens) as p:`; then add to the counts' `ended` as
    items end, and call `follow`.

    counts: the progress of each kind of item; the last one determines the bar and the expected end.
    tokens: returns the number of output tokens so far; called from the redrawing thread.
    """

    def __init__(self, counts: list[Count], tokens: Callable[[], int]) -> None:
        self.counts = counts
        self._tokens = tokens
        self._shown = StatusLine()
        self._start = time.monotonic()
        self._seen: deque[tuple[float, int]] = deque([(self._start, tokens())])
        # (time, count) at which the first ended items were seen
        self._first: tuple[float, int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="penstock-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._shown.clear()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def follow(self, journal: Journal) -> None:
        """Writes waiting rows to the disk when that is due, and then counts ended items as done.
        Call it often while the job runs."""
        if journal.tick():
            for count in self.counts:
                count.done = count.ended

    @contextmanager
    def stoppable(self, journal: Journal, out: Path | None) -> Iterator[None]:
        """Writes all rows to the disk at the end of the block and at Ctrl-C. KeyboardInterrupt gets
        a message that says how to continue from `out`; None: the run cannot be continued."""
        try:
            yield
            journal.commit()
        except KeyboardInterrupt as stop:
            journal.commit()
            main = self.counts[-1]
            if out is None:
                raise KeyboardInterrupt(
                    f"stopped; {len(journal):,} of {main.total:,} {main.name} were done"
                ) from stop
            done = f"{len(journal):,} of {main.total:,} {main.name} are in {out}"
            raise KeyboardInterrupt(
                f"stopped; {done}; the same command goes on from there"
            ) from stop
        self.follow(journal)

    def line(self) -> str:
        """Returns the whole line; reads the engine's count of tokens."""
        now = time.monotonic()
        made = self._tokens()
        if len(self._seen) > 1 and self._seen[-1][1] == self._seen[-2][1] == made:
            # during a time without tokens only its first and last entry are needed
            self._seen.pop()
        self._seen.append((now, made))
        # A step may take longer than the window: keep the last entry from before the window.
        while (
            len(self._seen) > 2
            and now - self._seen[0][0] > WINDOW_SECONDS
            and self._seen[1][1] < made
        ):
            self._seen.popleft()
        then, before = self._seen[0]
        speed = (
            f"{(made - before) / (now - then):,.0f} tok/s"
            if made > before
            else "first tokens are on their way"
        )
        return f"{' · '.join(c.text for c in self.counts)} · {speed} · {self._end(now)}"

    def _end(self, now: float) -> str:
        """Returns the expected end as text, by the pace since the first items ended; the time
        before counts as start-up."""
        main = self.counts[-1]
        if self._first is None and main.done:
            self._first = now, main.done
        if self._first is None or main.done - self._first[1] < min(FEW, main.total):
            return "expected end not known yet"
        began, there = self._first
        return f"about {duration((now - began) / (main.done - there) * main.left)} left"

    def _redraw(self) -> None:
        while not self._stop.wait(LIVE_SECONDS if self._shown.live else SELDOM):
            before = self._bar() if self._shown.live else "penstock:"
            self._shown.show(f"{before} {self.line()}", anew=True)

    def _bar(self) -> str:
        main = self.counts[-1]
        full = BAR * (main.before + main.done) // (main.total or 1)
        return "━" * full + "·" * (BAR - full)
