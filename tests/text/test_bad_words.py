"""Bad words in token ids: neither a word nor the word behind a space,
with every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from text_samples import MAKERS

from penstock import demo
from penstock.errors import UsageError
from penstock.text.bad_words import bad_word_ids
from penstock.text.tokenizer import Tokenizer

WORDS = ["the", " the", "apple", "water tower", "7", "zq", "a b", "river"]


@pytest.mark.parametrize("kind", ["demo", *MAKERS])
def test_neither_the_word_nor_the_word_behind_a_space_may_come(kind: str, tmp_path: Path) -> None:
    """Whatever the tokenizer sets before a text by itself, and however many tokens either takes."""
    folder = demo.model_folder() if kind == "demo" else MAKERS[kind](tmp_path)
    tokenizer = Tokenizer.load(folder)
    spell = lambda ids: b"".join(map(tokenizer.token_bytes.__getitem__, ids))  # noqa: E731
    for word in WORDS:
        (plain,), (spaced,) = (
            tokenizer.encode_inside([word.lstrip()]),
            tokenizer.encode_inside([" " + word.lstrip()]),
        )
        barred = bad_word_ids(tokenizer, [word])
        if not plain:  # this vocabulary cannot say it
            assert barred == []
            continue
        assert (
            spell(plain) == word.lstrip().encode()
            and spell(spaced) == b" " + word.lstrip().encode()
        )
        for said in (plain, spaced):  # some barred word ends where it does
            assert any(said[-len(ids) :] == ids for ids in barred), (word, said, barred)
        assert all(spell(ids).strip() == word.strip().encode() for ids in barred)


def test_a_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="bad_words has a word of more than 16 tokens") as caught:
        bad_word_ids(Tokenizer.load(demo.model_folder()), ["fine", "zq" * 40])
    assert caught.value.param == "bad_words"
