"""Client: the text side of an engine. Token ids go down; deltas come up and become text, stop
strings, logprobs.

    submit -> Request (ids) --down--> engine --up--> Deltas (columns) -> process -> Delta (text)

Text is made late: a sample that is not streamed is decoded once, at its end, many in one call; one
with stop strings also whenever a watched token was drawn. Knows ids and text; not how messages
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
    from penstock.schedule.step import Int32, Int64
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
    """A request of which some samples have not ended."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    stream: bool
    stops: StopStrings | None
    remaining: int
    # sample index -> decoder, for samples with deltas before their end
    samples: dict[int, SampleDecoder] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)  # indices of ended samples
    group_stop: GroupStop | None = None
    # True if the samples' text begins a chat message; False if it continues the prompt's text
    begins: bool = True
    num_cached_tokens: int = 0
    guesses: tuple[int, int] = (0, 0)  # right and wrong drafts so far
    waited: float = 0.0  # seconds that the request was in the waiting queue
    begun: float | None = (
        # time.perf_counter() when PromptNews arrived, i.e. while the first token is drawn
        None
    )
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    def count_guesses(self, right: int, wrong: int) -> None:
        self.guesses = self.guesses[0] + right, self.guesses[1] + wrong


class Client:
    """One client of one engine. send: called with each message to the engine: a Request, or
    (request id, sample index) to cancel; None as the index is the whole request, REST all samples
    that have not ended."""

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        send: Callable[[Request | tuple[int, int | None]], None],
        on_fault: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """on_fault: called with (request id, exception) when a request's deltas could not be made
        into text. That request has been ended; others go on. None: process() raises the exception.
        """
        self.facts, self.tokenizer, self._send, self._on_fault = facts, tokenizer, send, on_fault
        self.asked: dict[int, PendingRequest] = {}
        self._grouped: dict[int, GroupStop] = {}  # request id -> its GroupStop
        self._ids = itertools.count()
        # the latest request's bad_words, and their token ids
        self._words: tuple[list[str], list[list[int]]] = [], []

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
        """Sends a request down. Raises UsageError or ContextLengthError at once if it can never be
        served.

        answers: True if the text is a chat message: its leading space is dropped, unless it has a
        structured output, whose text is kept whole. False: the text continues the prompt's text.

        group_stop: used instead of one made from stop_when. Needed if another engine draws other
        samples of the request, or if the request has another rule of stopping."""
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
            # stored only after sending, which may raise: no answer comes for a request that was not
            # sent
            asked
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
        """Ends all samples that have not ended; each still sends its tokens so far."""
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
        """Ends a request whose answer is no longer wanted."""
        self._grouped.pop(asked.request_id, None)
        if self.asked.pop(asked.request_id, None) is not None:
            self._send((asked.request_id, None))

    def waits_for(self, request_id: int) -> bool:
        """Returns True while samples of the request have not ended."""
        return request_id in self.asked

    def refused(self, request_id: int) -> None:
        """Forgets a request that the engine refused."""
        self.asked.pop(request_id, None)
        self._grouped.pop(request_id, None)

    def process(self, up: Deltas) -> list[Delta]:
        """Returns the deltas of one message, in its order."""
        for news in up.prompts:
            try:
                self._prompt_news(news)
            except Exception as error:  # noqa: BLE001
                # this request's own error; _fault reports or raises it
                self._fault(news.request, error)
        out: list[Delta] = []
        # samples to decode together: whole ones without stop strings
        late: list[tuple[Delta, PendingRequest]] = []
        # Convert whole columns to lists at once: taking numbers out of arrays one by one took a
        # third of this loop's time.
        columns = up.request.tolist(), up.sample.tolist(), up.finish.tolist(), up.stop_id.tolist()
        start, every = up.start.tolist(), up.tokens.tolist()
        if up.guesses is not None:
            self._count_guesses(up.request, up.guesses)
        for i, (request_id, index, finish, stop_id) in enumerate(zip(*columns, strict=True)):
            asked = self.asked.get(request_id)
            if asked is None or index in asked.over:
                continue
            tokens = every[start[i] : start[i + 1]]
            if finish == ERROR:
                # the last token is a placeholder for the one that could not be drawn
                tokens = tokens[:-1]
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
            except Exception as error:  # noqa: BLE001
                # this request's own error; _fault reports or raises it
                self._fault(request_id, error)
        self._decode(late)
        out += [delta for delta, _ in late]
        if self._grouped:
            self._hear(out)
        return out

    def _hear(self, news: list[Delta]) -> None:
        """Passes deltas to the GroupStop of their requests, in order."""
        for delta in news:
            group_stop = self._grouped.get(delta.request_id)
            if group_stop is not None:
                group_stop.hear(delta)
        for request_id in [number for number in self._grouped if number not in self.asked]:
            del self._grouped[request_id]

    # --- the deltas of one sample -----------------------------------------------------------------

    def _news(
        self,
        asked: PendingRequest,
        index: int,
        tokens: list[int],
        finish: int,
        scores: LazyLogprobs | None,
        out: list[Delta],
    ) -> Delta:
        """Returns the delta of a sample that has a SampleDecoder: it is streamed or has stop
        strings."""
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
        # a stop string ended the sample; only the client knows these, so the engine must be told
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
        """Decodes samples that arrived whole, many in one call."""
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
            except Exception:  # noqa: BLE001  decoding one by one shows the request at fault
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
        except Exception as error:  # noqa: BLE001
            # this request's own error; _fault reports or raises it
            self._fault(request_id, error)
            return ""

    def _fault(self, request_id: int, error: Exception) -> None:
        """Ends a request whose processing raised an error, and reports it; raises if there is no
        on_fault."""
        if self._on_fault is None:
            raise error
        self._grouped.pop(request_id, None)
        if self.asked.pop(request_id, None) is not None:
            self._send((request_id, None))
        self._on_fault(request_id, error)

    def _count_guesses(self, requests: Int64, guesses: Int32) -> None:
        for at in np.flatnonzero(guesses.any(0)).tolist():
            if (asked := self.asked.get(int(requests[at]))) is not None:
                asked.count_guesses(*guesses[:, at].tolist())

    # --- news about a prompt ----------------------------------------------------------------------

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
    """Checks allowed_token_ids against bad_words and min_tokens. words: the ids of bad_words; ends:
    the model's end ids.

    Raises UsageError if no allowed token may come first: bad words of one token are always barred,
    end and stop ids until min_tokens is reached."""
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
    """Sets finish and stop reason of a delta whose sample a GroupStop ended: enough answers agree,
    or extracting them failed."""
    if group_stop.fault is None:
        delta.stop_reason = STOP_WHEN
    else:
        delta.finish_reason, delta.error, delta.error_param = (
            "error",
            str(group_stop.fault),
            STOP_WHEN,
        )


def _no_token(params: SamplingParams) -> tuple[str, str | None]:
    """Returns the likely reason why no token could be drawn, and the parameter at
    fault, or None."""
    if params.structured_outputs is not None:
        return _UNFIT, "structured_outputs"
    return (_NONE_LEFT, "allowed_token_ids") if params.allowed_token_ids else (_NOT_FINITE, None)


def visible_tokens(tokens: list[int], finish: str | None, params: SamplingParams) -> list[int]:
    """Returns the tokens whose text is shown: all but an end or stop token, unless
    include_stop_str_in_output is set."""
    if finish == "stop" and not params.include_stop_str_in_output:
        return tokens[:-1]
    return tokens
