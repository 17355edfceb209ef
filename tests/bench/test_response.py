"""How answers are read: however a stream is chopped, the same events, usage and verdict come out of
it."""

from __future__ import annotations

import itertools

import pytest
from hostile_server import DONE, EVENTS, event, usage_event
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.bench.response_reader import LONGEST_LINE, OWN_LIMIT, StreamReader, judge

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CHAT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
THOUGHT = b'data: {"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}\n\n'
CALL = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
IDS = b'data: {"choices":[{"text":"","token_ids":[5]}]}\n\n'
MARKED = event("\ndata: {")  # output that looks like an event


def read(data: bytes, cuts: list[int] | None = None) -> StreamReader:
    """The answer of bytes that arrive in pieces, at the instants 0, 1, 2..."""
    stream, ends = (
        StreamReader(),
        sorted({cut % (len(data) + 1) for cut in cuts or []} | {0, len(data)}),
    )
    for now, (begin, end) in enumerate(itertools.pairwise(ends)):
        stream.feed(data[begin:end], float(now))
    stream.finish()
    return stream


@given(
    st.lists(
        st.sampled_from([event(), event("b"), event(""), b": c\n\n", MARKED, ROLE, CHAT, IDS]),
        max_size=8,
    ),
    st.lists(st.integers(0, 5000), max_size=12),
    st.booleans(),
)
def test_chopping_changes_nothing_but_the_times(
    pieces: list[bytes], cuts: list[int], returns: bool
) -> None:
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


def test_a_line_without_end_is_given_up_and_nothing_of_it_is_kept() -> None:
    """However it comes; what a result keeps to the end of its load is times and a usage."""
    stream, sent = StreamReader(), 0
    while stream.fault is None:
        stream.feed(b"x" * 1000, 0.0)
        sent += 1000
        assert len(stream._rest) <= LONGEST_LINE
    assert stream.fault == ("broken", stream.fault[1]) and sent <= LONGEST_LINE + 1000
    assert not stream._rest and len(stream.fault[1]) < 500
    cut = read(b"data: " + b"x" * 1000)
    cut.let_go()
    assert cut.fault is not None and cut.fault[0] == "cut" and not cut._rest
    told = read(event("a", "x" * 10_000))
    assert told.reason is not None and len(told.reason) <= 200


@example(DONE, [])
@example(CHAT, [7])
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_no_bytes_make_it_fail(data: bytes, cuts: list[int]) -> None:
    """And none are a whole answer, or output, but those that OpenAI's form makes so."""
    stream = read(data, cuts)
    assert stream.fault is not None or b"[DONE]" in data or b"finish_reason" in data
    assert not stream.times or b"choices" in data


@pytest.mark.parametrize(
    ("data", "events"), [(ROLE, 0), (CHAT, 1), (THOUGHT, 1), (CALL, 1), (IDS, 1), (event(""), 0)]
)
def test_events_count_when_they_bring_output(data: bytes, events: int) -> None:
    assert len(read(data + event("", "stop") + DONE).times) == events


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("length", f"{OWN_LIMIT} at 6 tokens in and out"),
        ("stop", "ignore_eos is not heeded"),
        (None, "were asked for"),
    ],
)
def test_an_answer_that_is_too_short_tells_how_it_ended(reason: str | None, told: str) -> None:
    stream = StreamReader()
    stream.feed(
        event()
        + event("b")
        + event("c", reason)
        + usage_event(prompt_tokens=3, total_tokens=6)
        + DONE,
        1.0,
    )
    stream.finish()
    verdict = judge(stream, 3, 9)
    assert verdict is not None and verdict[0] == "length" and "3 tokens out, 9 were" in verdict[1]
    assert told in verdict[1] and (OWN_LIMIT in verdict[1]) is (reason == "length")


@pytest.mark.parametrize(
    ("reason", "asked", "sound"),
    [("stop", -1, True), ("length", -1, False), ("stop", 1, False), (None, -1, False)],
)
def test_an_answer_that_ends_at_once_is_one(reason: str | None, asked: int, sound: bool) -> None:
    """Its end token is all that it has; where a length was asked for, or it ended at a limit, text
    is missing."""
    stream = StreamReader()
    stream.feed(
        event("", reason)
        + usage_event(prompt_tokens=3, completion_tokens=1, total_tokens=4)
        + DONE,
        1.0,
    )
    stream.finish()
    assert (judge(stream, 3, asked) is None) == sound
