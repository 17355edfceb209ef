"""StepPace: measures seconds per drawn and per prompt token. The figures come from the durations of
the engine's steps.

The router between replicas weighs requests by these figures (schedule/replica_router.py). The cost
of a drawn token is its cost in the fullest steps seen: in a step of few rows most of the time goes
to reading the weights, and one more row is nearly free. Knows numbers of steps and seconds.
"""

from __future__ import annotations

from collections import deque

_FADE = 0.98  # weight of the old value in a running mean, at each step
# factor by which the stored least seconds grow per step, so that an outdated value is replaced
_FORGET = 1.0005


class StepPace:
    """Measures steps. The engine calls `launched` and `read` for each step, in order."""

    def __init__(self) -> None:
        self._launched: deque[float] = deque()
        self._read = 0.0
        self._drawing = 0.0  # mean seconds of a step without prompts
        self._best = 0.0  # least seconds per row of a step so far
        self._extra = self._prompt_tokens = (
            0.0  # decaying sums: seconds added by prompts, and their tokens
        )

    def launched(self, now: float) -> None:
        self._launched.append(now)

    def read(self, rows: int, prompt_tokens: int, now: float) -> None:
        """Records that the oldest step was read. It began at its launch, or at the end of the step
        before it, whichever is later."""
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
        """Returns the seconds per token, per prompt token and per step without prompts;
        0: unknown."""
        return {
            "token_seconds": self._best,
            "prompt_token_seconds": self._extra / self._prompt_tokens
            if self._prompt_tokens
            else 0.0,
            "step_seconds": self._drawing,
        }
