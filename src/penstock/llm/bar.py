"""Bar: generate's and chat's progress line. It knows no engine."""

from __future__ import annotations


class Bar:
    """A progress line, on a terminal only."""

    def __init__(self, samples: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("penstock"), MofNCompleteColumn(), TextColumn("samples"))
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("", total=samples)
        self._progress.start()

    def advance(self) -> None:
        self._progress.advance(self._task)

    def close(self) -> None:
        self._progress.stop()
