"""What one call has had so far, for the metrics and for the access log. It knows deltas; no HTTP, no text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.request import Delta
from penstock.server.online.metrics import Metrics
from penstock.server.openai.translate import Call

if TYPE_CHECKING:
    from penstock.engine.async_client import Stream


class CallMetrics:
    """A call's tokens, ends and times. background: nobody waits for it, so its times are no latencies."""

    def __init__(self, metrics: Metrics, call: Call, *, background: bool) -> None:
        # Not the call itself: this lives with the connection, whose cycle the collector may leave for minutes, and a
        # call holds its prompts.
        self.stream, self.n, self.choices = call.stream, call.sampling.n, call.choices
        self._most = call.sampling.max_tokens
        self.prompt_tokens = call.prompt_tokens
        self.made = 0  # tokens
        self.first: float | None = None  # seconds until the first of them was here, or drawn where none is streamed
        self.ends: dict[str, int] = {}  # finish reason -> samples
        self._metrics, self._background = metrics, background
        self._start = time.perf_counter()
        self._samples: dict[tuple[int, int], list[float]] = {}  # (prompt, sample) -> [its last delta's time, tokens]

    def note(self, at: int, deltas: Sequence[Delta]) -> None:
        """News of prompt `at`; 0.6 us a delta, of which a streamed token is one."""
        now, streamed, samples = time.perf_counter(), self.stream and not self._background, self._samples
        if self.first is None and self.stream:
            self.first = now - self._start
        for delta in deltas:
            tokens = len(delta.token_ids)
            self.made += tokens
            known = samples.get((at, delta.index))
            if known is None:
                samples[at, delta.index] = [now, tokens]
                if streamed:
                    self._metrics.first_token.observe(now - self._start)
            else:
                if streamed:
                    self._metrics.between_tokens.observe(now - known[0])
                known[0] = now
                known[1] += tokens
            if delta.finish_reason is not None:
                self._end(delta.finish_reason)

    def close(self, streams: Sequence[Stream]) -> None:
        """All of it came: what is known of whole calls alone."""
        metrics, longest = self._metrics, int(max((tokens for _, tokens in self._samples.values()), default=0))
        begun = [stream.begun for stream in streams if stream.begun is not None]
        if self.first is None and begun:
            self.first = min(begun) - self._start
        metrics.asked.observe(self.prompt_tokens)
        metrics.made.observe(self.made)
        metrics.longest.observe(longest)
        metrics.samples.observe(self.n)
        if self._most is not None:
            metrics.most.observe(self._most)
        if not self._background:
            self._observe_times(streams, longest)
        self._samples.clear()

    def cut(self) -> None:
        """It was cancelled, or failed, before all samples had ended."""
        left = self.choices - sum(self.ends.values())
        if left > 0:
            self._metrics.finished["abort"] += left
            self.ends["abort"] = left
        self._samples.clear()

    def _observe_times(self, streams: Sequence[Stream], longest: int) -> None:
        metrics, now, decoded = self._metrics, time.perf_counter(), 0.0
        metrics.end_to_end.observe(now - self._start)
        for stream in streams:
            if stream.begun is not None:
                metrics.queued.observe(stream.waited)
                metrics.prefilled.observe(max(0.0, stream.begun - self._start - stream.waited))
                metrics.decoded.observe(now - stream.begun)
                metrics.inferred.observe(max(0.0, now - self._start - stream.waited))
                decoded = max(decoded, now - stream.begun)
        if longest > 1:
            metrics.each_token.observe(decoded / (longest - 1))

    def _end(self, reason: str) -> None:
        self._metrics.finished[reason] += 1
        self.ends[reason] = self.ends.get(reason, 0) + 1
