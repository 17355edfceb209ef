"""BetweenCalls: what an LLM has done between two of its calls: other weights, an empty prefix
cache, sleep.

It knows an engine in the caller's process and whether a call turns it; nothing of prompts.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import EngineError, UsageError
from penstock.shared_weights import SharedWeights

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

AT_WORK = "this LLM is at work: end or close its other generate, chat or stream first"
CLOSED = "this LLM is closed: make a new one"


class BetweenCalls:
    """LLM's methods that no request may be under way for: else they raise UsageError."""

    _process: int
    _turning: threading.Lock
    _finalizer: weakref.finalize  # type: ignore[type-arg]  # not subscriptable at run time

    @property
    def engine(self) -> Engine:
        raise NotImplementedError

    def update_weights(
        self,
        model_path: str | Path | None = None,
        *,
        shared: SharedWeights | None = None,
        weights_version: str | None = None,
    ) -> None:
        """Puts the weights of a folder, or of another process (`weights.share`), in the place of
        the model's, made into the scheme that it has; nothing that was computed with the old ones
        is found again. weights_version: what `self.weights_version` says from here on, None: the
        folder's name. Raises CheckpointError for weights of another model, that are not whole, or
        no finite numbers, and UsageError at work: the old ones stay then."""
        if (model_path is None) == (shared is None):
            raise UsageError(
                "weights come from model_path or from shared: give one of the two",
                param="model_path",
            )
        source = Path(model_path) if model_path is not None else shared
        assert source is not None
        self._between(lambda: self.engine.update_weights(source, weights_version))

    def reset_prefix_cache(self) -> bool:
        """Has no prompt that comes find what was computed so far. Returns that it is so,
        as vLLM's."""
        self._between(self.engine.reset_prefix_cache)
        return True

    @property
    def weights_version(self) -> str:
        """Names the weights that answers are made with: `default` for those that it was opened
        with."""
        return self.engine.weights_version

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until `wake_up`: that of KV and of weights, which go to
        host memory (1) or are dropped (2), to be given again by `update_weights`. Meanwhile
        generate, chat and stream raise UsageError."""
        self._between(lambda: self.engine.sleep(level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes the memory again; `tags`: of `weights` and `kv_cache`, None: both. Raises
        CapacityError where somebody else has it."""
        self._between(lambda: self.engine.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Returns whether weights or KV sleep."""
        return bool(self.engine.asleep)

    def _refuse_a_fork(self) -> None:
        """Raises UsageError in a fork of the process that made this LLM: nothing would answer it
        there."""
        if os.getpid() != self._process:
            raise UsageError(
                f"this LLM was made by process {self._process}, and a fork has none of its threads:"
                " make the LLM behind the fork, or start processes by multiprocessing's 'spawn'"
            )

    def _refuse_asleep(self) -> None:
        """Raises UsageError where there are no weights, or no KV, to generate with."""
        asleep = self.engine.asleep
        if asleep:
            way = "wake_up(), and update_weights() where it slept at level 2"
            raise UsageError(
                f"this LLM sleeps ({', '.join(asleep)}): {way}, before it can generate"
            )

    def _between(self, work: Callable[[], None]) -> None:
        from penstock.engine.interrupts import held_interrupts

        self._refuse_a_fork()
        if not self._finalizer.alive:
            raise EngineError(CLOSED)
        if not self._turning.acquire(blocking=False):
            raise UsageError(AT_WORK)
        try:
            with held_interrupts():
                work()
        finally:
            self._turning.release()
