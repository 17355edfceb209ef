"""BetweenCalls: LLM's methods that change the engine. They update weights, reset the prefix cache
and put the engine to sleep, while no call of generate, chat or stream runs. Knows an engine in the
caller's process and whether a call is stepping it; no prompts.
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
    """LLM's methods that raise UsageError while a request runs."""

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
        """Replaces the model's weights by those of a folder or of another process
        (`weights.share`), converted to the model's quantization. Empties the prefix cache.
        weights_version: new value of `self.weights_version`; None: the folder's name. Raises
        CheckpointError for weights that belong to another model, are incomplete or not finite, and
        UsageError while a call runs. After an error the old weights stay."""
        if (model_path is None) == (shared is None):
            raise UsageError(
                "weights come from model_path or from shared: give one of the two",
                param="model_path",
            )
        source = Path(model_path) if model_path is not None else shared
        assert source is not None
        self._between(lambda: self.engine.update_weights(source, weights_version))

    def reset_prefix_cache(self) -> bool:
        """Makes later prompts ignore cached prefixes. Always returns True,
        as vLLM's method does."""
        self._between(self.engine.reset_prefix_cache)
        return True

    @property
    def weights_version(self) -> str:
        """Version name of the weights in use: `default` until the first update."""
        return self.engine.weights_version

    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory until `wake_up`: the KV cache and the weights. Level 1 moves
        the weights to host memory, level 2 drops them until `update_weights`. Meanwhile generate,
        chat and stream raise UsageError."""
        self._between(lambda: self.engine.sleep(level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Allocates the device's memory again. tags: `weights`, `kv_cache`; None: both. Raises
        CapacityError if other processes use the memory."""
        self._between(lambda: self.engine.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Returns True while weights or the KV cache are asleep."""
        return bool(self.engine.asleep)

    def _refuse_a_fork(self) -> None:
        """Raises UsageError in a fork of the process that made this LLM, since the fork lacks its
        threads."""
        if os.getpid() != self._process:
            raise UsageError(
                f"this LLM was made by process {self._process}, and a fork has none of its threads:"
                " make the LLM behind the fork, or start processes by multiprocessing's 'spawn'"
            )

    def _refuse_asleep(self) -> None:
        """Raises UsageError while weights or the KV cache are asleep."""
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
