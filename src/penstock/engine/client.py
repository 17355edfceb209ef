"""Client: the engine's end that knows text. Ids go down; deltas come up and become text, stop
strings, logprobs.

    submit -> Request (ids) --down--> engine --up--> Deltas (columns) -> take -> Delta (text, one
    sample's news)

Text is touched late: a sample that is not streamed is decoded once, at its end, many in one call;
one with stop strings also when a watched token was drawn. It knows ids and text; not how messages
travel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.build_engine import EngineFacts
from penstock.engine.group_stop import STOP_WHEN, GroupStop
from penstock.engine.logprobs import LazyLogprobs
from penstock.engine.sample_decoder import SampleDecoder
from penstock.errors import UsageError
from penstock.request import FINISH_REASONS, REST, Delta, PositionLogprobs, Request, SamplingParams
from penstock.schedule.check_request import check_request
from penstock.schedule.deltas import ABORT, ERROR, GOES_ON, STOP, Deltas, PromptNews

if TYPE_CHECKING:
    from penstock.text.stop_strings import StopStrings
    from penstock.text.tokenizer import Tokenizer


_NOT_FINITE = (
    "the model's logits were not finite: try another dtype; where none helps, its weights have NaN"
    " or inf"
)
_UNFIT = (
    "no token could follow: the grammar passed its limits, another parameter barred what it left,"
    " or the model's logits were not finite"
)
_NONE_LEFT = (
    "allowed_token_ids left no token to draw beside what bad_words and min_tokens bar, or the"
    " model's logits were not finite: allow others, or bar fewer"
)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that has not been answered in full."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    stream: bool
    stops: StopStrings | None
    remaining: int
    # those that have had news before their end
    samples: dict[int, SampleDecoder] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)  # samples that have ended
    group_stop: GroupStop | None = None
    begins: bool = True  # whether the samples' text does, or goes on behind the prompt's
    num_cached_tokens: int = 0
    waited: float = 0.0  # seconds in the engine's line
    begun: float | None = (
        None  # of time.perf_counter(): when it was heard that its first token is drawn
    )
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class Client:
    """One client of one engine. `send` takes what goes down: a Request, or (request id, sample,
    None or REST) to cancel."""

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        send: Callable[[Request | tuple[int, int | None]], None],
        on_fault: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """on_fault: takes (request id, exception) of a request whose news could not be made into
        text; it has been ended, the others' news go on. None: the exception is raised by take()."""
        self.facts, self.tokenizer, self._send, self._on_fault = facts, tokenizer, send, on_fault
        self.asked: dict[int, PendingRequest] = {}
        self._grouped: dict[int, GroupStop] = {}  # by the requests that have one
        self._ids = itertools.count()
        self._words: tuple[list[str], list[list[int]]] = [], []  # the last bad words, and their ids

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        samples: Sequence[int] | None = None,
        background: bool = False,
        tenant: int = 0,
        salt: int = 0,
        group_stop: GroupStop | None = None,
        answers: bool = False,
    ) -> PendingRequest:
        """Sends a request down. Raises UsageError or ContextLengthError at once where it can never
        be served.

        answers: the text is a message's, and so begins without a space, as a form's does not: that
        is kept whole. Else it goes on behind the prompt's text.

        group_stop: in place of its own stop_when's: of a request whose other samples are drawn
        elsewhere, or that has another rule."""
        span = (min(prompt_ids), max(prompt_ids)) if len(prompt_ids) else None
        check_request(
            len(prompt_ids), span, params, self.facts.max_model_len, self.facts.vocab_size
        )
        stops = None
        if params.stop:
            if self.tokenizer is None:
                raise UsageError(
                    "stop strings need a tokenizer: leave skip_tokenizer_init off", param="stop"
                )
            stops = self.tokenizer.stop_strings(
                params.stop_strings, skip_special_tokens=params.skip_special_tokens
            )
        words = self._word_ids(params.bad_words) if params.bad_words else []
        check_choice(params, words, self.facts.eos_token_ids)
        if group_stop is None and params.stop_when is not None:
            group_stop = GroupStop.of(params.stop_when)
        if group_stop is not None and self.tokenizer is None:
            raise UsageError(
                "stop_when needs a tokenizer: leave skip_tokenizer_init off", param="stop_when"
            )
        request_id = next(self._ids)
        count = params.n if samples is None else len(samples)
        asked = PendingRequest(
            request_id, list(prompt_ids), params, stream, stops, count, group_stop=group_stop
        )
        asked.begins = self._begins(prompt_ids, params, answers)
        self._send(
            Request(
                request_id=request_id,
                prompt=np.array(prompt_ids, np.int32).tobytes(),
                sampling=params,
                stream=stream,
                watch=None if stops is None else np.packbits(stops.watch_bits()).tobytes(),
                samples=None if samples is None else list(samples),
                background=background,
                tenant=tenant,
                salt=salt,
                bad_words=words,
            )
        )
        self.asked[request_id] = (
            asked  # after sending, which may raise: what never went down is not waited for
        )
        if group_stop is not None:
            self._grouped[request_id] = group_stop
            group_stop.on_over(lambda: self.end_rest(request_id))
        return asked

    def _begins(self, prompt_ids: Sequence[int], params: SamplingParams, answers: bool) -> bool:
        if self.tokenizer is None:
            return True
        form = params.structured_outputs
        if answers and (form is None or not form.kinds):
            return True
        return self.tokenizer.begins_behind(
            prompt_ids, skip_special_tokens=params.skip_special_tokens
        )

    def end_rest(self, request_id: int) -> None:
        """Has the samples that have not ended end, and told with what they made."""
        if request_id in self.asked:
            self._send((request_id, REST))

    def _word_ids(self, words: list[str]) -> list[list[int]]:
        if self.tokenizer is None:
            raise UsageError(
                "bad_words need a tokenizer: leave skip_tokenizer_init off", param="bad_words"
            )
        if words != self._words[0]:
            from penstock.text.bad_words import bad_word_ids

            self._words = list(words), bad_word_ids(self.tokenizer, words)
        return self._words[1]

    def cancel(self, asked: PendingRequest) -> None:
        """Ends a request whose answer nobody wants any more."""
        self._grouped.pop(asked.request_id, None)
        if self.asked.pop(asked.request_id, None) is not None:
            self._send((asked.request_id, None))

    def waits_for(self, request_id: int) -> bool:
        """Whether samples of a request are still to end."""
        return request_id in self.asked

    def refused(self, request_id: int) -> None:
        """A request that the engine will never run is waited for no more."""
        self.asked.pop(request_id, None)
        self._grouped.pop(request_id, None)

    def process(self, up: Deltas) -> list[Delta]:
        """Makes deltas of one message, in its order."""
        for news in up.prompts:
            try:
                self._prompt_news(news)
            except Exception as error:  # noqa: BLE001  this request's own; told or raised by _fault
                self._fault(news.request, error)
        out: list[Delta] = []
        # whole samples without stop strings: decoded together
        late: list[tuple[Delta, PendingRequest]] = []
        # Whole columns become lists at once: taking numbers out of arrays one by one was a third of
        # this loop.
        columns = up.request.tolist(), up.sample.tolist(), up.finish.tolist(), up.stop_id.tolist()
        start, every = up.start.tolist(), up.tokens.tolist()
        for i, (request_id, index, finish, stop_id) in enumerate(zip(*columns, strict=True)):
            asked = self.asked.get(request_id)
            if asked is None or index in asked.over:
                continue
            tokens = every[start[i] : start[i + 1]]
            if finish == ERROR:
                tokens = tokens[:-1]  # the last stands for the one that could not be drawn
            try:
                scores = None
                if asked.params.logprobs is not None:
                    k = asked.params.logprobs
                    ranked = asked.params.logprob_token_ids is None
                    scores = LazyLogprobs.of(
                        up, i, k, self.tokenizer, brief=asked.stream, ranked=ranked
                    )
                    scores = scores[: len(tokens)]
                if asked.stops is None and not asked.stream:
                    delta = Delta(asked.request_id, index, token_ids=tokens, logprobs=scores)
                    late.append((delta, asked))
                else:
                    delta = self._news(asked, index, tokens, finish, scores, out)
                self._finish(asked, delta, finish, stop_id)
            except Exception as error:  # noqa: BLE001  this request's own; told or raised by _fault
                self._fault(request_id, error)
        self._decode(late)
        out += [delta for delta, _ in late]
        if self._grouped:
            self._hear(out)
        return out

    def _hear(self, news: list[Delta]) -> None:
        """Lets those that count answers hear of samples, in one order however the news came."""
        for delta in news:
            group_stop = self._grouped.get(delta.request_id)
            if group_stop is not None:
                group_stop.hear(delta)
        for request_id in [number for number in self._grouped if number not in self.asked]:
            del self._grouped[request_id]

    # --- one sample -------------------------------------------------------------------------------

    def _news(
        self,
        asked: PendingRequest,
        index: int,
        tokens: list[int],
        finish: int,
        scores: LazyLogprobs | None,
        out: list[Delta],
    ) -> Delta:
        """News of a sample that keeps a state: streamed, or with stop strings."""
        text = asked.samples.get(index)
        if text is None:
            text = asked.samples[index] = SampleDecoder(
                asked.params, asked.stops, self.tokenizer, asked.stream, asked.begins
            )
        delta = text.take(asked.request_id, index, tokens, finish, scores)
        if asked.stream or finish != GOES_ON or delta.stop_reason is not None:
            out.append(delta)
        return delta

    def _finish(self, asked: PendingRequest, delta: Delta, finish: int, stop_id: int) -> None:
        # by a stop string, which the engine doesn't know of
        stopped = delta.stop_reason is not None
        if stopped:
            delta.finish_reason = "stop"
            if finish == GOES_ON:
                self._send((asked.request_id, delta.index))
        elif finish != GOES_ON:
            delta.finish_reason = FINISH_REASONS[finish]
            if finish == STOP and stop_id >= 0:
                delta.stop_reason = stop_id
            if finish == ABORT and asked.group_stop is not None and asked.group_stop.over:
                _say_why(delta, asked.group_stop)
            if finish == ERROR:
                delta.error, delta.error_param = _no_token(asked.params)
        if delta.finish_reason is None:
            return
        asked.over.add(delta.index)
        asked.samples.pop(delta.index, None)
        asked.remaining -= 1
        if not asked.remaining:
            self.asked.pop(asked.request_id, None)

    def _decode(self, late: list[tuple[Delta, PendingRequest]]) -> None:
        """Decodes whole samples, many in one call."""
        if self.tokenizer is None:
            return
        alike: dict[tuple[bool, bool], list[tuple[Delta, PendingRequest]]] = {}
        for delta, asked in late:
            if asked.params.detokenize:
                alike.setdefault((asked.params.skip_special_tokens, asked.begins), []).append(
                    (delta, asked)
                )
        for (skip, begins), mine in alike.items():
            how = {"skip_special_tokens": skip, "begins": begins}
            kept = [visible_tokens(d.token_ids, d.finish_reason, a.params) for d, a in mine]
            try:
                texts = self.tokenizer.decode_batch(kept, **how)
            except Exception:  # noqa: BLE001  whose it is shows when each is decoded alone
                texts = [
                    self._decode_one(d.request_id, ids, how)
                    for (d, _), ids in zip(mine, kept, strict=True)
                ]
            for (delta, _), text in zip(mine, texts, strict=True):
                delta.text = text

    def _decode_one(self, request_id: int, ids: list[int], how: dict[str, bool]) -> str:
        assert self.tokenizer is not None
        try:
            return self.tokenizer.decode(ids, **how)
        except Exception as error:  # noqa: BLE001  this request's own; told or raised by _fault
            self._fault(request_id, error)
            return ""

    def _fault(self, request_id: int, error: Exception) -> None:
        """Ends a request that our own code failed at, and says so; raises where nobody listens."""
        if self._on_fault is None:
            raise error
        self._grouped.pop(request_id, None)
        if self.asked.pop(request_id, None) is not None:
            self._send((request_id, None))
        self._on_fault(request_id, error)

    # --- the rest ---------------------------------------------------------------------------------

    def _prompt_news(self, news: PromptNews) -> None:
        asked = self.asked.get(news.request)
        if asked is None:
            return
        asked.num_cached_tokens, asked.waited, asked.begun = (
            news.cached_tokens,
            news.waited,
            time.perf_counter(),
        )
        found = LazyLogprobs.of_prompt(
            asked.prompt_ids, news, asked.params.prompt_logprobs or 0, self.tokenizer
        )
        if found is not None:
            asked.prompt_logprobs = [None, *found]


def check_choice(
    params: SamplingParams, words: Sequence[Sequence[int]], ends: Sequence[int]
) -> None:
    """words: the ids of bad_words; ends: the model's end ids. Raises UsageError where of
    allowed_token_ids no token may come first: bad words of one token are barred always, end and
    stop ids within min_tokens."""
    left = set(params.allowed_token_ids or ())
    if not left:
        return
    barring = (
        ["bad_words"] if left & (barred := {word[0] for word in words if len(word) == 1}) else []
    )
    left -= barred
    if params.min_tokens > 0:
        ending = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else ends)}
        barring += ["min_tokens"] if left & ending else []
        left -= ending
    if not left:
        rule = (
            f"allowed_token_ids and {' and '.join(barring)} leave no token to draw: allow others,"
            " or bar fewer"
        )
        raise UsageError(rule, param="allowed_token_ids", rule=rule)


def _say_why(delta: Delta, group_stop: GroupStop) -> None:
    """Notes why a group's end has ended a sample: its answers agree, or they could not be looked
    for."""
    if group_stop.fault is None:
        delta.stop_reason = STOP_WHEN
    else:
        delta.finish_reason, delta.error, delta.error_param = (
            "error",
            str(group_stop.fault),
            STOP_WHEN,
        )


def _no_token(params: SamplingParams) -> tuple[str, str | None]:
    """Returns why no token could be drawn, as far as anyone can tell, and the parameter at fault,
    if one is."""
    if params.structured_outputs is not None:
        return _UNFIT, "structured_outputs"
    return (_NONE_LEFT, "allowed_token_ids") if params.allowed_token_ids else (_NOT_FINITE, None)


def visible_tokens(tokens: list[int], finish: str | None, params: SamplingParams) -> list[int]:
    """The tokens whose text is shown: all but an end or stop token, unless that was asked for."""
    if finish == "stop" and not params.include_stop_str_in_output:
        return tokens[:-1]
    return tokens
