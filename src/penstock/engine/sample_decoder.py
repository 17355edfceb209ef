"""SampleDecoder: the text of one growing sample. Used for samples that are streamed or have stop
strings; other samples are decoded once, at their end.

Knows one sample's tokens; no requests, no channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta, SamplingParams
from penstock.schedule.deltas import GOES_ON, STOP

if TYPE_CHECKING:
    from penstock.text.stop_strings import StopStrings
    from penstock.text.tokenizer import Tokenizer


class SampleDecoder:
    """Turns tokens into Deltas. A stop string sets `stop_reason` and cuts text and tokens at its
    end."""

    def __init__(
        self,
        params: SamplingParams,
        stops: StopStrings | None,
        tokenizer: Tokenizer | None,
        stream: bool,
        begins: bool = True,
    ) -> None:
        """begins: True if the text begins a message; False if it continues the prompt's text."""
        from penstock.text.detokenizer import Detokenizer
        from penstock.text.stop_strings import StopChecker

        self.params, self.stops, self.tokenizer, self.stream = params, stops, tokenizer, stream
        # keyword arguments of every decoding call
        self._how = {
            "skip_special_tokens": params.skip_special_tokens,
            "begins": begins,
        }
        self.ids: list[int] = []
        self.scores: list[LazyLogprobs] = []
        spoken = tokenizer is not None and params.detokenize
        self._detokenizer = (
            Detokenizer(tokenizer, **self._how)
            if spoken and stream and tokenizer is not None
            else None
        )
        self._checker = (
            StopChecker(stops, include=params.include_stop_str_in_output)
            if stops is not None and stream
            else None
        )

    def take(
        self,
        request_id: int,
        index: int,
        tokens: list[int],
        finish: int,
        scores: LazyLogprobs | None,
    ) -> Delta:
        """Returns the sample's delta. Streamed: its new tokens and text; else the whole sample,
        only complete once it has ended."""
        delta = Delta(request_id, index)
        if self.stream:
            self._stream(delta, tokens, finish)
        else:
            self.ids += tokens
            if scores is not None:
                self.scores.append(scores)
            if finish != GOES_ON or (self.stops is not None and self.stops.completes(self.ids)):
                self._whole(delta, finish)
            if scores is not None and delta.token_ids:
                scores = LazyLogprobs.joined(self.scores)
        if scores is not None:
            delta.logprobs = scores[: len(delta.token_ids)]
        return delta

    def _stream(self, delta: Delta, tokens: list[int], finish: int) -> None:
        """Decodes token by token if a stop string may cut the text; else all at once."""
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
            armed = len(self.ids) > self.params.min_tokens
            if (
                armed
                and (run := self._detokenizer.held_run())
                and self._checker.would_stop(new + run)
            ):
                # decode held-back bytes too if they complete a stop string, instead of waiting for
                # another token
                new += self._detokenizer.flush()
            if last and finish != GOES_ON:
                new += self._detokenizer.flush()
            emitted, stop = self._checker.push(new, armed=armed)
            delta.text += emitted
            if stop is not None:
                delta.stop_reason = stop
                return
        if finish != GOES_ON:
            delta.text += self._checker.flush()

    def _whole(self, delta: Delta, finish: int) -> None:
        """Decodes the whole sample at its end, or when a stop string may have been completed."""
        delta.token_ids = list(self.ids)
        if self.tokenizer is None or not self.params.detokenize:
            return
        shown = self.ids[:-1] if self._hides_last(finish) else self.ids
        read = self.tokenizer.settled if finish == GOES_ON else self.tokenizer.decode
        delta.text = read(shown, **self._how)
        # like an end id, a stop string can't end a sample within its first min_tokens tokens
        barred = self.params.min_tokens
        if self.stops is None or len(self.ids) <= barred:
            return
        seen = len(self.tokenizer.settled(self.ids[:barred], **self._how)) if barred else 0
        found = self.stops.find(delta.text, seen)
        if found is None:
            return
        at, stop = found
        end = at + len(stop)
        delta.token_ids = self.ids[: self.tokenizer.tokens_until(self.ids, end, **self._how)]
        delta.text = delta.text[: end if self.params.include_stop_str_in_output else at]
        delta.stop_reason = stop

    def _hides_last(self, finish: int) -> bool:
        return finish == STOP and not self.params.include_stop_str_in_output
