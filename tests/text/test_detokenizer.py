"""Streams: pushes and flush, joined, are the text that decode gives,
and no push tears a character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import MAKERS, TEXTS, llama2, llama3, metaspace

from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=sorted(MAKERS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer.load(MAKERS[request.param](tmp_path_factory.mktemp("tokenizer")))


def stream(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.flush()]


@given(data=st.data())
def test_pushes_joined_are_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.vocab_size - 1)
    # The first ids are special tokens, bytes and byte-fallback tokens: torn characters in plenty.
    pushes = data.draw(
        st.lists(st.lists(st.one_of(ids, st.integers(0, 258)), max_size=6), max_size=12)
    )
    skip = data.draw(st.booleans())
    whole = [index for push in pushes for index in push]
    assert "".join(stream(tokenizer, pushes, skip)) == tokenizer.decode(
        whole, skip_special_tokens=skip
    )


@given(
    text=st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)),
    sizes=st.lists(st.integers(1, 4), min_size=1),
)
def test_valid_text_is_never_torn(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    pushes, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pushes.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    pieces = stream(tokenizer, pushes)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    table = {piece: index for index, piece in enumerate(tokenizer.token_bytes) if len(piece) == 1}
    ids = [table[bytes([byte])] for byte in "é👍".encode()]
    assert stream(tokenizer, [[index] for index in ids]) == ["", "é", "", "", "", "👍", ""]
    assert stream(tokenizer, [[index] for index in ids[:4]]) == ["", "é", "", "", "\ufffd"]


def test_special_tokens_inside_a_character_are_passed_over(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama3(tmp_path))
    table = {piece: index for index, piece in enumerate(tokenizer.token_bytes) if len(piece) == 1}
    ids = [table[b"\xc3"], tokenizer.eos_token_id or 0, table[b"\xa9"]]
    assert stream(tokenizer, [[index] for index in ids]) == ["", "", "é", ""]
    assert "".join(stream(tokenizer, [ids], skip=False)) == "\ufffd<|eot_id|>\ufffd"


def test_a_run_of_bytes_waits_for_its_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(llama2(tmp_path))
    ids = tokenizer.encode("a 👍 b", add_special_tokens=False)
    pieces = stream(tokenizer, [[index] for index in ids])
    assert "".join(pieces) == "a 👍 b"
    assert "👍" in "".join(pieces[:-1])


def test_only_the_first_token_loses_its_space(tmp_path: Path) -> None:
    for maker in (llama2, metaspace):
        tokenizer = Tokenizer.load(maker(tmp_path / maker.__name__))
        ids = tokenizer.encode("Mia has 12", add_special_tokens=False)
        assert (
            "".join(stream(tokenizer, [[index] for index in [1, 2, *ids, *ids]]))
            == "Mia has 12 Mia has 12"
        )


@given(data=st.data())
def test_text_behind_a_prompt_is_the_whole_text_less_the_prompts(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Sentencepiece's decoders take a space from the beginning of a text: an answer's first token
    keeps its own."""
    # Whole characters: tokens that are some by themselves, and the tokens of a word together.
    words = [
        tokenizer.encode(word, add_special_tokens=False) for text in TEXTS for word in text.split()
    ]
    alone = [
        [token] for word in words for token in word if "\ufffd" not in tokenizer.decode([token])
    ]
    units = st.lists(st.sampled_from([*words, *alone]), max_size=8)
    prompt, answer = ([token for unit in data.draw(units) for token in unit] for _ in range(2))
    begins = tokenizer.begins_behind(prompt)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
    assert whole.startswith(before) and "\ufffd" not in whole
    if not begins or not prompt:
        assert tokenizer.decode(answer, begins=begins) == whole[len(before) :]
    pushed = Detokenizer(tokenizer, begins=begins)
    assert "".join([*(pushed.push([each]) for each in answer), pushed.flush()]) == tokenizer.decode(
        answer, begins=begins
    )


@pytest.mark.parametrize("make", [llama2, metaspace])
def test_special_tokens_before_a_text_leave_its_beginning(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    assert tokenizer.bos_token_id is not None and tokenizer.begins_behind([tokenizer.bos_token_id])
    assert not tokenizer.begins_behind([tokenizer.bos_token_id], skip_special_tokens=False)
    ids = tokenizer.encode("the river", add_special_tokens=False)
    assert (
        tokenizer.decode(ids) == "the river" and tokenizer.decode(ids, begins=False) == " the river"
    )


@given(text=st.one_of(st.text(st.characters(codec="utf-8"), max_size=20), st.sampled_from(TEXTS)))
def test_text_inside_another_is_spelt_as_it_is(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode_inside([text])
    spelt = b"".join(map(tokenizer.token_bytes.__getitem__, ids))
    assert spelt == text.encode() or not ids  # no token spells it
    assert tokenizer.encode_inside(["a" + " b"]) == tokenizer.encode_inside(["a b"])
