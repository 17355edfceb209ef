"""Stop strings: the watch bits miss no token that completes one, and cuts fall at the same place
however text comes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import MAKERS, llama3

from penstock.errors import UsageError
from penstock.text.stop_strings import StopChecker, StopIndex, StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.text.vocabulary import DecoderStyle, Vocabulary


@pytest.fixture(scope="module", params=sorted(MAKERS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer.load(MAKERS[request.param](tmp_path_factory.mktemp("tokenizer")))


def index_of(pieces: list[bytes]) -> StopIndex:
    return StopIndex(Vocabulary(DecoderStyle(), pieces, pieces, frozenset(), frozenset()))


def slow_bits(stops: tuple[str, ...], pieces: list[bytes]) -> list[bool]:
    """The definition, token by token."""

    def completes(piece: bytes) -> bool:
        for stop in (text.encode() for text in stops):
            if stop in piece or any(piece.startswith(stop[cut:]) for cut in range(1, len(stop))):
                return True
        return False

    return [completes(piece) for piece in pieces]


letters = st.text(alphabet="abAB é日\n", min_size=1, max_size=5)


@given(
    stops=st.lists(letters, min_size=1, max_size=3),
    pieces=st.lists(
        st.one_of(letters.map(str.encode), st.binary(max_size=4)), min_size=1, max_size=60
    ),
)
def test_watch_bits_are_the_definition(stops: list[str], pieces: list[bytes]) -> None:
    bits = StopStrings(stops, index_of(pieces)).watch_bits()
    assert bits.dtype == np.bool_ and bits.tolist() == slow_bits(tuple(stops), pieces)


@given(data=st.data())
def test_the_completing_token_is_watched(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Random tokens with special ones between; any slice of their text is a stop string that some
    token completes. What was there, was torn by the first byte of a next character and is back with
    its last is not completed again."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12))
    skip = data.draw(st.booleans())
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    if not text:
        return
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + data.draw(st.integers(1, 8))]
    stops = tokenizer.stop_strings([stop], skip_special_tokens=skip)
    bits = stops.watch_bits()
    most = 0
    for place in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:place], skip_special_tokens=skip).count(stop)
        if now > most:
            assert bits[ids[place - 1]], (stop, ids[:place])
            assert stops.completes(ids[:place])
        most = max(most, now)


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_the_first_token_behind_silent_ones_spells_as_the_first(
    tokenizer: Tokenizer, silent: int
) -> None:
    """Special tokens that give no text don't make the next one any later in it: every pair of
    tokens behind them."""
    lead = [min(tokenizer.special_ids)] * silent
    for first, second in itertools.product(
        range(0, tokenizer.vocab_size, 7), range(0, tokenizer.vocab_size, 29)
    ):
        text = tokenizer.decode(ids := [*lead, first, second], skip_special_tokens=True)
        stop = text[:2]
        if stop and stop not in tokenizer.decode(ids[:-1], skip_special_tokens=True):
            assert tokenizer.stop_strings([stop], skip_special_tokens=True).completes(ids), (
                stop,
                ids,
            )


def test_watched_tokens_are_few(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    bits = tokenizer.stop_strings(["Question:"]).watch_bits()
    assert bits.sum() < 0.05 * tokenizer.vocab_size
    assert not tokenizer.stop_strings([]).watch_bits().any()
    assert tokenizer.stop_strings(["\ufffd"]).watch_bits().sum() == tokenizer.vocab_size - len(
        tokenizer.special_ids
    )
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = True


def test_special_tokens_end_a_stop_only_when_they_are_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    eos = tokenizer.eos_token_id
    assert not tokenizer.stop_strings(["<|eot_id|>"]).watch_bits()[eos]
    assert tokenizer.stop_strings(["<|eot_id|>"], skip_special_tokens=False).watch_bits()[eos]
    ids = [*tokenizer.encode("Ques"), eos or 0, *tokenizer.encode("tion:")]
    stops = tokenizer.stop_strings(["Question:"])
    assert stops.watch_bits()[ids[-1]] and stops.completes(ids)
    assert stops.find(tokenizer.decode(ids)) == (0, "Question:")


def test_equal_stops_are_made_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    assert not tokenizer.has_stops(["a"])
    assert tokenizer.stop_strings(["a"]) is tokenizer.stop_strings(("a",))
    assert not tokenizer.has_stops(["a"])  # its watch bits are not made
    bits = tokenizer.stop_strings(["a"]).watch_bits()
    assert tokenizer.has_stops(["a"]) and not tokenizer.has_stops(["a"], skip_special_tokens=False)
    twice = tokenizer.stop_strings(["a", "b", "a"])
    assert twice.stops == ("a", "b") and (twice.watch_bits() >= bits).all()
    for number in range(600):
        tokenizer.stop_strings([str(number)])
    assert len(tokenizer._stops) <= 256
    # the oldest went
    assert tokenizer.stop_strings(["599"]).stops == ("599",) and not tokenizer.has_stops(["a"])


def test_find_takes_what_is_complete_first() -> None:
    pieces = index_of([b"a"])
    assert StopStrings(["bcd", "c"], pieces).find("abcd") == (2, "c")
    assert StopStrings(["b", "ab"], pieces).find("xab") == (1, "ab")
    assert StopStrings(["x"], pieces).find("abc") is None
    assert StopStrings(["ab"], pieces).find("abab", 2) == (2, "ab")
    assert StopStrings(["ab"], pieces).find("abab", 1) == (0, "ab")
    assert StopStrings(["é!"], pieces).find("xé!") == (1, "é!")


@pytest.mark.parametrize("wrong", [[""], ["a", ""], ["\ud800"], [5]])
def test_wrong_stop_strings_are_refused(wrong: list[str]) -> None:
    with pytest.raises(UsageError, match="stop string"):
        StopStrings(wrong, index_of([b"a"]))


def test_holdback_is_the_longest_beginning() -> None:
    stops = StopStrings(["aab", "Question:"], index_of([b"a"]))
    assert [
        stops.holdback(text) for text in ("", "x", "a", "xaa", "aaa", "aab", "xQuest", "Question")
    ] == [*(0, 0, 1, 2, 2, 0, 5, 8)]


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_a_stream_is_cut_where_the_whole_is(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Whatever the pieces: what is sent is the text up to its first complete stop string."""
    strings = StopStrings(stops, index_of([b"a"]))
    checker = StopChecker(strings, include=include)
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    sent = ""
    for begin, end in itertools.pairwise(marks):
        piece, stop = checker.push(text[begin:end])
        sent += piece
        if stop is not None:
            break
    found = strings.find(text)
    if found is None:
        assert checker.stopped is None and sent + checker.flush() == text
        return
    at, stop = found
    assert checker.stopped == stop and checker.flush() == "" and checker.push("more") == ("", stop)
    assert sent == (text[: at + len(stop)] if include else text[:at])


def test_no_stop_ends_in_unarmed_text() -> None:
    """Before min_tokens a stop string may pass; one that only begins there counts once it is
    complete."""
    checker = StopChecker(StopStrings(["END", "N"], index_of([b"a"])))
    assert checker.push("a END b EN", armed=False) == ("a END b ", None)
    assert checker.push("D", armed=True) == ("", "END")
    checker = StopChecker(StopStrings(["END"], index_of([b"a"])), include=True)
    assert checker.push("xE") == ("xE", None)
    assert checker.push("NDy") == ("ND", "END")
