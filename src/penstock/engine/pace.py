"""StepPace: what a drawn token and a token of a prompt take of this engine's time, from how long
its steps took.

A router between replicas weighs by it (schedule/router.py). A drawn token takes what it does in the
fullest steps seen: in a step of few rows most of the time is the weights', and one row more is
nearly free. It knows numbers of steps and seconds.
"""

from __future__ import annotations

from collections import deque

_FADE = 0.98  # of what was known stays, a step
_FORGET = 1.0005  # the best is forgotten that much a step: a better one is soon seen again


class StepPace:
    """Fed by the engine: `launched` and `read` for each step, in their order."""

    def __init__(self) -> None:
        self._launched: deque[float] = deque()
        self._read = 0.0
        self._drawing = 0.0  # mean seconds of a step without prompts
        self._best = 0.0  # least seconds a row
        self._extra = self._prompt_tokens = (
            0.0  # fading sums: seconds that prompts added, and their tokens
        )

    def launched(self, now: float) -> None:
        self._launched.append(now)

    def read(self, rows: int, prompt_tokens: int, now: float) -> None:
        """The oldest step is here: it began when it was launched,
        or the one before it had ended."""
        took, self._read = max(0.0, now - max(self._launched.popleft(), self._read)), now
        if prompt_tokens:
            self._extra = self._extra * _FADE + max(0.0, took - (self._drawing if rows else 0.0))
            self._prompt_tokens = self._prompt_tokens * _FADE + prompt_tokens
        elif rows:
            self._drawing = (
                took if not self._drawing else self._drawing * _FADE + took * (1 - _FADE)
            )
            self._best = min(self._best * _FORGET, took / rows) if self._best else took / rows

    def stats(self) -> dict[str, float]:
        """Seconds; 0 is not known."""
        return {
            "token_seconds": self._best,
            "prompt_token_seconds": self._extra / self._prompt_tokens
            if self._prompt_tokens
            else 0.0,
            "step_seconds": self._drawing,
        }
