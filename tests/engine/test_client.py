"""The client: columns of ids come up and text goes out. Fed by hand, message by message, against a
naive reading."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import END, VOCABULARY, make_tokenizer
from text_samples import llama2

from penstock.engine.build_engine import EngineFacts
from penstock.engine.client import Client, PendingRequest
from penstock.errors import ContextLengthError, UsageError
from penstock.request import Delta, Request, SamplingParams, StructuredOutputsParams
from penstock.schedule.deltas import ERROR, GOES_ON, LENGTH, STOP, Deltas
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

FACTS = EngineFacts(
    model="m",
    folder="f",
    max_model_len=64,
    max_num_seqs=8,
    vocab_size=VOCABULARY,
    eos_token_ids=(END,),
)
THE = -1  # the token of "the", in the cases below
SMILE = "n\u00e9 \U0001f600\u2014x \u4e2d\u6587"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder, vocab_size=VOCABULARY)


class Below:
    """What goes down."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[tuple[int, int | None]] = []

    def __call__(self, word: Request | tuple[int, int | None]) -> None:
        if isinstance(word, Request):
            self.requests.append(word)
        else:
            self.cancelled.append(word)


def news(
    *samples: tuple[PendingRequest, int, list[int], int], stop_id: int = -1, scored: bool = False
) -> Deltas:
    """One message: (request, sample index, tokens, finish) each. `scored`: logprob -t of token t,
    and a top of one."""
    sizes = [len(tokens) for _, _, tokens, _ in samples]
    tokens = np.array([t for _, _, each, _ in samples for t in each], np.int32)
    up = Deltas(
        request=np.array([asked.request_id for asked, *_ in samples], np.int64),
        sample=np.array([index for _, index, *_ in samples], np.int32),
        finish=np.array([finish for *_, finish in samples], np.int8),
        stop_id=np.array([stop_id] * len(samples), np.int32),
        start=np.array([0, *np.cumsum(sizes)], np.int32),
        tokens=tokens,
    )
    if scored:
        up.chosen, up.rank = -tokens.astype(np.float32), np.full(tokens.size, 2, np.int32)
        up.top_ids, up.top = (
            np.full((tokens.size, 1), 7, np.int32),
            np.full((tokens.size, 1), -0.5, np.float32),
        )
    return up


def feed(
    tokenizer: Tokenizer, params: SamplingParams, stream: bool, tokens: list[int], finish: int
) -> list[Delta]:
    """All deltas of one sample whose tokens come as the engine sends them: each, or at its end and
    when watched."""
    below = Below()
    client = Client(FACTS, tokenizer, below)
    asked = client.submit([5], params, stream=stream)
    watch = below.requests[0].watch
    watched = (
        np.zeros(VOCABULARY, bool)
        if watch is None
        else np.unpackbits(np.frombuffer(watch, np.uint8))
    )
    out: list[Delta] = []
    held: list[int] = []
    for place, token in enumerate(tokens):
        held.append(token)
        last = place == len(tokens) - 1
        if not (last or stream or watched[token]):
            continue
        scored = params.logprobs is not None
        out += client.process(news((asked, 0, held, finish if last else GOES_ON), scored=scored))
        held = []
        if not client.waits_for(asked.request_id):
            assert below.cancelled == ([] if last else [(asked.request_id, 0)])
            break
    assert not client.asked
    return out


def joined(deltas: list[Delta]) -> Delta:
    """A sample's deltas as one."""
    whole = Delta(deltas[0].request_id, 0)
    for delta in deltas:
        assert whole.finish_reason is None, "news after the end"
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or []), *delta.logprobs]
    return whole


def naive(
    tokenizer: Tokenizer, params: SamplingParams, tokens: list[int], finish: int
) -> tuple[str, list[int], Any]:
    """(text, token ids, stop string or None), from the text after each token."""
    hidden = finish == STOP and not params.include_stop_str_in_output
    for count in range(params.min_tokens + 1, len(tokens) + 1):
        shown = tokens[:-1] if hidden and count == len(tokens) else tokens[:count]
        before = len(tokenizer.decode(tokens[: params.min_tokens])) if params.min_tokens else 0
        text = tokenizer.decode(shown)
        found = []
        for stop in params.stop_strings:
            at = text.find(stop, max(0, before - len(stop) + 1))
            found += [(at + len(stop), at, stop)] if at >= 0 else []
        if found:
            end, at, stop = min(found)
            return text[: end if params.include_stop_str_in_output else at], tokens[:count], stop
    return tokenizer.decode(tokens[:-1] if hidden else tokens), tokens, None


def test_a_stream_never_tears_a_character(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(SMILE)
    assert len(tokens) > len(SMILE)  # characters of several tokens
    for stop in (None, ["zz"]):
        deltas = feed(tokenizer, SamplingParams(max_tokens=64, stop=stop), True, tokens, LENGTH)
        assert len(deltas) == len(tokens)
        assert "".join(delta.text for delta in deltas) == SMILE
        assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("include", [True, False], ids=["included", "cut"])
def test_stop_strings_end_a_sample_where_a_naive_reading_does(
    tokenizer: Tokenizer, stream: bool, include: bool
) -> None:
    rng = random.Random(11)
    drawn = tokenizer.encode(SMILE + " the wheel turns ab abab")
    stopped = crossed = barred = 0
    for _ in range(300):
        tokens = [rng.choice(drawn) for _ in range(rng.randrange(1, 16))]
        text = tokenizer.decode(tokens)
        at = rng.randrange(len(text))
        piece = text[at : at + rng.randrange(1, 5)].replace("\ufffd", "") or "q"
        stops = [piece, rng.choice(["ab", "zz", "b a", "\u00e9"])]
        params = SamplingParams(
            max_tokens=64,
            stop=stops,
            include_stop_str_in_output=include,
            min_tokens=rng.choice([0, 0, 3]),
            logprobs=rng.choice([None, 1]),
        )
        finish = rng.choice([LENGTH, STOP])
        want_text, want_ids, stop = naive(tokenizer, params, tokens, finish)
        got = joined(feed(tokenizer, params, stream, tokens, finish))
        assert (got.text, got.token_ids, got.stop_reason) == (want_text, want_ids, stop), (
            tokens,
            params,
        )
        assert got.finish_reason == ("stop" if stop is not None or finish == STOP else "length")
        assert (None if got.logprobs is None else len(got.logprobs)) == (
            params.logprobs and len(want_ids)
        )
        stopped += stop is not None
        crossed += stop is not None and all(
            stop not in tokenizer.decode([token]) for token in want_ids
        )
        barred += stop is None and any(s in text for s in params.stop_strings)
    assert min(stopped, crossed, barred) > 5, (stopped, crossed, barred)


def test_an_end_token_is_in_the_ids_and_not_in_the_text(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("the wheel"), END]
    for stream in (True, False):
        plain = joined(feed(tokenizer, SamplingParams(), stream, tokens, STOP))
        assert (plain.text, plain.token_ids, plain.stop_reason) == ("the wheel", tokens, None)
        asked = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
        assert joined(feed(tokenizer, asked, stream, tokens, STOP)).text == "the wheel<|end|>"
        silent = SamplingParams(include_stop_str_in_output=True)
        assert joined(feed(tokenizer, silent, stream, tokens, STOP)).text == "the wheel"
        unread = joined(feed(tokenizer, SamplingParams(detokenize=False), stream, tokens, STOP))
        assert (unread.text, unread.token_ids) == ("", tokens)


def test_special_tokens_inside_a_text_are_skipped_or_told(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("the"), 1, *tokenizer.encode(" wheel")]
    for stream in (True, False):
        assert joined(feed(tokenizer, SamplingParams(), stream, tokens, LENGTH)).text == "the wheel"
        told = SamplingParams(skip_special_tokens=False)
        assert joined(feed(tokenizer, told, stream, tokens, LENGTH)).text == "the<|pad|> wheel"
        over = SamplingParams(stop="e w")  # its text is that of the tokens around the special one
        assert joined(feed(tokenizer, over, stream, tokens, LENGTH)).text == "th"


def test_stop_ids_are_told_and_an_error_takes_its_token_back(tokenizer: Tokenizer) -> None:
    for stream in (True, False):
        client = Client(FACTS, tokenizer, Below())
        asked = client.submit([5], SamplingParams(n=2, stop_token_ids=[9]), stream=stream)
        (ended,) = client.process(news((asked, 1, [8, 9], STOP), stop_id=9))
        assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", 9, [8, 9])
        (bad,) = client.process(news((asked, 0, [8, 0], ERROR)))
        assert (bad.finish_reason, bad.token_ids, bad.text) == (
            "numerical_error",
            [8],
            tokenizer.decode([8]),
        )
        assert bad.error is not None and not client.asked


def test_logprobs_hold_the_drawn_token_first_and_then_the_top(tokenizer: Tokenizer) -> None:
    client = Client(FACTS, tokenizer, Below())
    asked = client.submit([5], SamplingParams(n=2, logprobs=1), stream=True)
    (delta, other) = client.process(
        news((asked, 0, [50], GOES_ON), (asked, 1, [7], GOES_ON), scored=True)
    )
    assert delta.logprobs is not None and other.logprobs is not None
    assert {t: (s.logprob, s.rank) for t, s in delta.logprobs[0].items()} == {
        50: (-50.0, 2),
        7: (-0.5, 1),
    }
    assert list(other.logprobs[0]) == [7]
    assert delta.logprobs[0][50].decoded_token == tokenizer.token_text(50)


def test_news_of_what_is_over_is_passed_by(tokenizer: Tokenizer) -> None:
    below = Below()
    client = Client(FACTS, tokenizer, below)
    asked = client.submit([5], SamplingParams(n=2, stop="wheel"), stream=True)
    wheel = tokenizer.encode(" wheel")
    assert client.process(news((asked, 0, wheel, GOES_ON)))[-1].finish_reason == "stop"
    assert client.process(news((asked, 0, [8], GOES_ON))) == []
    assert client.process(news((asked, 0, [8], LENGTH))) == []
    client.cancel(asked)
    client.cancel(asked)
    assert client.process(news((asked, 1, [8], LENGTH))) == []
    assert below.cancelled == [(asked.request_id, 0), (asked.request_id, None)]


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "param"),
    [
        ([], {}, UsageError, "prompt"),
        ([5] * 64, {}, ContextLengthError, "prompt"),
        ([VOCABULARY], {}, UsageError, "prompt"),
        ([-1], {}, UsageError, "prompt"),
        ([5], {"logit_bias": {VOCABULARY: 1.0}}, UsageError, "logit_bias"),
        ([5], {"allowed_token_ids": [4, VOCABULARY]}, UsageError, "allowed_token_ids"),
        ([5], {"stop_token_ids": [4, VOCABULARY], "min_tokens": 3}, UsageError, "stop_token_ids"),
    ],
)
def test_what_can_never_run_is_refused_before_it_goes_down(
    tokenizer: Tokenizer,
    prompt: list[int],
    params: dict[str, Any],
    kind: type[UsageError],
    param: str,
) -> None:
    below = Below()
    client = Client(FACTS, tokenizer, below)
    with pytest.raises(kind) as caught:
        client.submit(prompt, SamplingParams(**params))
    assert caught.value.param == param and "\n" not in str(caught.value)
    assert not below.requests and not client.asked


def test_what_did_not_go_down_is_not_waited_for(tokenizer: Tokenizer) -> None:
    def refuse(word: object) -> None:
        raise UsageError("no")

    client = Client(FACTS, tokenizer, refuse)
    with pytest.raises(UsageError):
        client.submit([5], SamplingParams())
    assert not client.asked


def test_text_needs_a_tokenizer() -> None:
    client = Client(FACTS, None, Below())
    with pytest.raises(UsageError):
        client.submit([5], SamplingParams(stop="a"))
    asked = client.submit([5], SamplingParams(logprobs=1))
    (delta,) = client.process(news((asked, 0, [8, 8], LENGTH), scored=True))
    assert (delta.text, delta.token_ids) == ("", [8, 8])
    assert delta.logprobs is not None and delta.logprobs[0][8].decoded_token is None


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of sentencepiece's form: "▁" before a text, bytes for what no token spells."""
    return Tokenizer.load(llama2(tmp_path_factory.mktemp("llama")))


def told(
    tokenizer: Tokenizer, text: str | list[int], stream: bool, answers: bool = False, **params: Any
) -> Delta:
    """What becomes of a sample of these tokens behind the prompt "hello"."""
    facts = replace(FACTS, vocab_size=tokenizer.vocab_size)
    below = Below()
    client = Client(facts, tokenizer, below)
    asked = client.submit(
        tokenizer.encode("hello"),
        SamplingParams(max_tokens=64, **params),
        stream=stream,
        answers=answers,
    )
    watch = below.requests[0].watch
    watched = (
        np.ones(10_000, bool) if watch is None else np.unpackbits(np.frombuffer(watch, np.uint8))
    )
    ids = tokenizer.encode_inside([text])[0] if isinstance(text, str) else text
    out: list[Delta] = []
    held: list[int] = []
    for place, token in enumerate(ids):
        held.append(token)
        last = place == len(ids) - 1
        if last or stream or (watch is not None and watched[token]):
            out += client.process(news((asked, 0, held, LENGTH if last else GOES_ON)))
            held = []
        if not client.waits_for(asked.request_id):
            break
    return joined(out)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_completion_keeps_the_space_that_it_begins_with(llama: Tokenizer, stream: bool) -> None:
    assert told(llama, " the river", stream).text == " the river"
    assert told(llama, "    the", stream).text == "    the"
    assert told(llama, " the river", stream, answers=True).text == "the river"
    form = StructuredOutputsParams(regex="( the)? river")
    assert (
        told(llama, " the river", stream, answers=True, structured_outputs=form).text
        == " the river"
    )
    stopped = told(llama, " the river", stream, stop=[" the"])
    assert (stopped.text, stopped.stop_reason) == ("", " the")


@pytest.mark.parametrize("kind", ["byte-level", "bytes for what no token spells"])
def test_streamed_and_whole_samples_stop_at_the_same_character(
    tokenizer: Tokenizer, llama: Tokenizer, kind: str
) -> None:
    """A character of several tokens is no U+FFFD while its bytes come, and ends a sample with its
    last one."""
    named = tokenizer if kind == "byte-level" else llama
    smile = "the \U0001f600 the"
    torn = [
        *named.encode_inside(["the "])[0],
        *named.encode_inside(["\U0001f600"])[0][:-1],
        *named.encode_inside(["the"])[0],
    ]
    for stop in ("\ufffd", "\U0001f600", "e \U0001f600", "\U0001f600 t", "zz"):
        for ids in (named.encode_inside([smile])[0], torn):
            both = [told(named, ids, stream, stop=[stop]) for stream in (True, False)]
            assert (both[0].text, both[0].token_ids, both[0].stop_reason) == (
                both[1].text,
                both[1].token_ids,
                both[1].stop_reason,
            )
    assert told(named, smile, False, stop=["\ufffd"]).text == smile
    cut = told(named, smile, True, stop=["\U0001f600"])
    assert cut.text == "the " and named.decode(cut.token_ids) == "the \U0001f600"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"allowed_token_ids": [END], "min_tokens": 1}, "min_tokens leave no token to draw"),
        (
            {"allowed_token_ids": [7, END], "stop_token_ids": [7], "min_tokens": 3},
            "min_tokens leave no token to draw",
        ),
        ({"allowed_token_ids": [THE], "bad_words": ["the"]}, "bad_words leave no token to draw"),
        (
            {"allowed_token_ids": [THE, END], "bad_words": ["the"], "min_tokens": 1},
            "bad_words and min_tokens leave no",
        ),
    ],
)
def test_parameters_that_leave_nothing_to_draw_are_refused(
    tokenizer: Tokenizer, params: dict[str, Any], says: str
) -> None:
    (the,) = tokenizer.encode_inside(["the"])[0]
    allowed = [the if token == THE else token for token in params["allowed_token_ids"]]
    with pytest.raises(UsageError, match=says) as caught:
        Client(FACTS, tokenizer, Below()).submit(
            [5], SamplingParams(max_tokens=9, **{**params, "allowed_token_ids": allowed})
        )
    assert caught.value.param == "allowed_token_ids"


def test_nothing_left_amid_a_sample_is_told_by_name(tokenizer: Tokenizer) -> None:
    below = Below()
    client = Client(FACTS, tokenizer, below)
    asked = client.submit(
        [5], SamplingParams(max_tokens=9, allowed_token_ids=[7, 8], bad_words=["the wheel"])
    )
    (delta,) = client.process(news((asked, 0, [7, -2], ERROR)))
    assert delta.error is not None and delta.error.startswith("allowed_token_ids left no token")
    assert delta.error_param == "allowed_token_ids"
