"""SampleText: one sample's text as it grows, for samples that are streamed, watched for stop strings, or scored.

It knows one sample's tokens; nothing of requests and channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.request import Delta, Logprob, PositionLogprobs, SamplingParams
from penstock.schedule.deltas import GOES_ON, STOP, Deltas, PromptNews
from penstock.schedule.step import Float32, Int32

if TYPE_CHECKING:
    from penstock.text.stop_strings import StopStrings
    from penstock.text.tokenizer import Tokenizer


class LogprobColumns:
    """Logprobs of t tokens that follow each other, as they came up."""

    def __init__(self, chosen: Float32, rank: Int32, top_ids: Int32, top: Float32) -> None:
        self.chosen, self.rank, self.top_ids, self.top = chosen, rank, top_ids, top

    @classmethod
    def of(cls, up: Deltas, i: int) -> LogprobColumns | None:
        """Those of the message's sample i; None where it has none."""
        if up.chosen is None or up.rank is None or up.top_ids is None or up.top is None:
            return None
        mine = slice(int(up.start[i]), int(up.start[i + 1]))
        if mine.start == mine.stop or np.isnan(up.chosen[mine]).all():
            return None
        return cls(up.chosen[mine], up.rank[mine], up.top_ids[mine], up.top[mine])

    @classmethod
    def of_prompt(cls, news: PromptNews) -> LogprobColumns | None:
        if news.chosen is None or news.rank is None or news.top_ids is None or news.top is None:
            return None
        return cls(news.chosen, news.rank, news.top_ids, news.top)

    def positions(self, tokens: list[int], k: int, tokenizer: Tokenizer | None) -> list[PositionLogprobs]:
        """For each token a dict of itself and the k most likely, most likely first, as vLLM's."""

        def text(token: int) -> str | None:
            return None if tokenizer is None else tokenizer.token_text(token)

        out: list[PositionLogprobs] = []
        for at, token in enumerate(tokens):
            found: PositionLogprobs = {token: Logprob(float(self.chosen[at]), int(self.rank[at]), text(token))}
            ids, values = self.top_ids[at, :k].tolist(), self.top[at, :k].tolist()
            for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
                if other >= 0 and other != token:
                    found[other] = Logprob(value, rank, text(other))
            out.append(found)
        return out


class SampleText:
    """Tokens in, Delta out. A stop string sets `stop_reason` and cuts text and tokens where it was completed."""

    def __init__(
        self, params: SamplingParams, stops: StopStrings | None, tokenizer: Tokenizer | None, stream: bool
    ) -> None:
        from penstock.text.detokenizer import Detokenizer
        from penstock.text.stop_strings import StopChecker

        self.params, self.stops, self.tokenizer, self.stream = params, stops, tokenizer, stream
        self.ids: list[int] = []
        self.scores: list[PositionLogprobs] = []
        spoken = tokenizer is not None and params.detokenize
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if spoken and stream and tokenizer is not None
            else None
        )
        self._checker = (
            StopChecker(stops, include=params.include_stop_str_in_output) if stops is not None and stream else None
        )

    def take(self, request_id: int, index: int, tokens: list[int], finish: int, scores: LogprobColumns | None) -> Delta:
        """News of the sample: streamed, what is new; else all of it, of use only where it has ended."""
        positions: list[PositionLogprobs] = []
        if scores is not None:
            positions = scores.positions(tokens, self.params.logprobs or 0, self.tokenizer)
        delta = Delta(request_id, index)
        if self.stream:
            self._stream(delta, tokens, finish)
            positions = positions[: len(delta.token_ids)]
        else:
            self.ids += tokens
            self.scores += positions
            if finish != GOES_ON or (self.stops is not None and self.stops.completes(self.ids)):
                self._whole(delta, finish)
            positions = self.scores[: len(delta.token_ids)]
        if self.params.logprobs is not None:
            delta.logprobs = positions
        return delta

    def _stream(self, delta: Delta, tokens: list[int], finish: int) -> None:
        """Token by token where a stop string may cut; else all at once."""
        hidden = self._hides_last(finish)
        if self._checker is None:
            shown = tokens[:-1] if hidden else tokens
            delta.token_ids = tokens
            if self._detokenizer is not None:
                delta.text = self._detokenizer.push(shown)
                if finish != GOES_ON:
                    delta.text += self._detokenizer.flush()
            return
        assert self._detokenizer is not None, "stop strings need text"
        for place, token in enumerate(tokens):
            last = place == len(tokens) - 1
            self.ids.append(token)
            delta.token_ids.append(token)
            new = "" if last and hidden else self._detokenizer.push([token])
            if last and finish != GOES_ON:
                new += self._detokenizer.flush()
            emitted, stop = self._checker.push(new, armed=len(self.ids) > self.params.min_tokens)
            delta.text += emitted
            if stop is not None:
                delta.stop_reason = stop
                return
        if finish != GOES_ON:
            delta.text += self._checker.flush()

    def _whole(self, delta: Delta, finish: int) -> None:
        """The whole sample at its end, or where a stop string may just have been completed."""
        skip = self.params.skip_special_tokens
        delta.token_ids = list(self.ids)
        if self.tokenizer is None or not self.params.detokenize:
            return
        shown = self.ids[:-1] if self._hides_last(finish) else self.ids
        delta.text = self.tokenizer.decode(shown, skip_special_tokens=skip)
        barred = self.params.min_tokens  # as an end id, a stop string ends no sample within its first min_tokens tokens
        if self.stops is None or len(self.ids) <= barred:
            return
        seen = len(self.tokenizer.decode(self.ids[:barred], skip_special_tokens=skip)) if barred else 0
        found = self.stops.find(delta.text, seen)
        if found is None:
            return
        at, stop = found
        end = at + len(stop)
        delta.token_ids = self.ids[: self.tokenizer.tokens_until(self.ids, end, skip_special_tokens=skip)]
        delta.text = delta.text[: end if self.params.include_stop_str_in_output else at]
        delta.stop_reason = stop

    def _hides_last(self, finish: int) -> bool:
        return finish == STOP and not self.params.include_stop_str_in_output
