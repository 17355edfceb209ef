"""How answers are read: however a stream is chopped, the same events, usage and verdict come out of it."""

from __future__ import annotations

import itertools
import json

import pytest
from hostile_server import DONE, EVENTS, event, usage_event
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.bench.response_checks import OWN_LIMIT, judge
from penstock.bench.response_reader import ErrorReader, StreamReader

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CHAT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
THOUGHT = b'data: {"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}\n\n'
CALL = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
IDS = b'data: {"choices":[{"text":"","token_ids":[5]}]}\n\n'
MARKED = event("\ndata: {")  # output that looks like an event


def read(data: bytes, cuts: list[int] | None = None) -> StreamReader:
    """The answer of bytes that arrive in pieces, at the instants 0, 1, 2..."""
    stream, ends = StreamReader(), sorted({cut % (len(data) + 1) for cut in cuts or []} | {0, len(data)})
    for now, (begin, end) in enumerate(itertools.pairwise(ends)):
        stream.feed(data[begin:end], float(now))
    stream.finish()
    return stream


@given(
    st.lists(st.sampled_from([event(), event("b"), event(""), b": c\n\n", MARKED, ROLE, CHAT, IDS]), max_size=8),
    st.lists(st.integers(0, 5000), max_size=12),
    st.booleans(),
)
def test_chopping_changes_nothing_but_the_times(pieces: list[bytes], cuts: list[int], returns: bool) -> None:
    data = b"".join([*pieces, event("", "length"), usage_event(), DONE])
    if returns:
        data = data.replace(b"\n", b"\r\n")
    whole, chopped = read(data), read(data, cuts)
    with_output = sum(piece in (event(), event("b"), MARKED, CHAT, IDS) for piece in pieces)
    assert len(whole.times) == len(chopped.times) == with_output
    assert whole.usage == chopped.usage and whole.usage is not None and whole.usage.cached == 2
    assert whole.fault is chopped.fault is None and list(chopped.times) == sorted(chopped.times)


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 400))
def test_a_stream_that_was_cut_is_never_taken_for_a_whole_one(cuts: list[int], lost: int) -> None:
    data = b"".join(EVENTS[:3])
    stream = read(data[: max(0, len(data) - lost)], cuts)
    assert stream.fault is not None and stream.fault[0] == "cut"


@example(DONE, [])
@example(CHAT, [7])
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_no_bytes_make_it_fail(data: bytes, cuts: list[int]) -> None:
    """And none are a whole answer, or output, but those that OpenAI's form makes so."""
    stream = read(data, cuts)
    assert stream.fault is not None or b"[DONE]" in data or b"finish_reason" in data
    assert not stream.times or b"choices" in data


@pytest.mark.parametrize(("data", "events"), [(ROLE, 0), (CHAT, 1), (THOUGHT, 1), (CALL, 1), (IDS, 1), (event(""), 0)])
def test_events_count_when_they_bring_output(data: bytes, events: int) -> None:
    assert len(read(data + event("", "stop") + DONE).times) == events


def test_an_event_arrives_when_its_line_is_whole() -> None:
    stream = StreamReader()
    stream.feed(event()[:20], 1.0)
    assert not stream.times
    stream.feed(event()[20:] + event() + event()[:9], 2.0)
    assert list(stream.times) == [2.0, 2.0]


def test_a_line_without_end_is_broken_and_not_kept() -> None:
    stream = StreamReader()
    for _ in range(10):
        stream.feed(b"data: {" + b"x" * (1 << 20), 0.0)
    assert stream.fault is not None and stream.fault[0] == "broken" and len(stream.fault[1]) < 400


@pytest.mark.parametrize(
    ("reasons", "output", "verdict"),
    [
        (("length", "length"), 16, None), (("length", "length"), 9, "length"), (("stop", "length"), 7, "length"),
        (("stop", "length"), 8, None), (("stop", "stop"), 5, None), (("stop", "stop"), 17, "usage"),
    ],
)  # fmt: skip
def test_samples_that_a_context_clamped_are_seen(reasons: tuple[str, str], output: int, verdict: str | None) -> None:
    """Two samples of up to 8 tokens, that may end by themselves."""
    events = b"".join(event("a") + event("b", reason) for reason in reasons)
    stream = StreamReader()
    used = usage_event(prompt_tokens=3, completion_tokens=output, total_tokens=3 + output)
    stream.feed(events + used + DONE, 1.0)
    stream.finish()
    found = judge(stream, 3, -1, 16)
    assert (found and found[0]) == verdict
    assert found is None or verdict == "usage" or OWN_LIMIT in found[1]
    assert judge(stream, 3, -1) is None  # where nobody knows the most


@pytest.mark.parametrize(
    ("reason", "told"),
    [("length", f"{OWN_LIMIT} at 6 tokens in and out"), ("stop", "ignore_eos is not heeded"), (None, "were asked for")],
)
def test_an_answer_that_is_too_short_tells_how_it_ended(reason: str | None, told: str) -> None:
    stream = StreamReader()
    stream.feed(event() + event("b") + event("c", reason) + usage_event(prompt_tokens=3, total_tokens=6) + DONE, 1.0)
    stream.finish()
    verdict = judge(stream, 3, 9)
    assert verdict is not None and verdict[0] == "length" and "3 tokens out, 9 were" in verdict[1]
    assert told in verdict[1] and (OWN_LIMIT in verdict[1]) is (reason == "length")


def test_a_refusal_shows_its_beginning() -> None:
    answer = ErrorReader(429)
    answer.feed(b"slow down " * 1000, 0.0)
    answer.finish()
    assert answer.fault is not None and "429" in answer.fault[1] and len(answer.fault[1]) < 600
    assert answer.fault[1].endswith((" slow ...", " down ..."))


def test_a_refusal_says_all_that_a_server_says_of_it() -> None:
    said = "a prompt has 4000 tokens and the context 2304, with room for one at least to be made: shorten it, or cut it"
    told = {"message": f"{said} with truncate_prompt_tokens", "type": "invalid_request_error", "param": "prompt"}
    body = {"error": {**told, "code": 400}}
    answer = ErrorReader(400)
    for byte in json.dumps(body).encode():
        answer.feed(bytes([byte]), 0.0)
    answer.finish()
    assert answer.fault == ("status", f"status 400: {json.dumps(body).encode()!r}")
