"""Bad words in token ids: vLLM's rule, against a loop over the tokenizers library's own words."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as FastTokenizer

from penstock import demo
from penstock.errors import UsageError
from penstock.text.bad_words import bad_word_ids
from penstock.text.tokenizer import Tokenizer

WORDS = ["the", " the", "apple", "water tower", "7", "é", "zq", "a b"]


def test_a_word_is_barred_as_it_is_and_behind_a_space_where_that_is_as_many_other_tokens() -> None:
    folder = demo.model_folder()
    tokenizer, fast = Tokenizer.load(folder), FastTokenizer.from_file(str(folder / "tokenizer.json"))
    want, both = [], 0
    for word in WORDS:
        ids = fast.encode(word.lstrip(), add_special_tokens=False).ids
        spaced = fast.encode(" " + word.lstrip(), add_special_tokens=False).ids
        want.append(ids)
        if spaced[0] != ids[0] and len(spaced) == len(ids):
            want.append(spaced)
            both += 1
    assert bad_word_ids(tokenizer, WORDS) == want
    assert 0 < both < len(WORDS) and any(len(ids) > 1 for ids in want)


def test_a_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="bad_words has a word of more than 16 tokens") as caught:
        bad_word_ids(Tokenizer.load(demo.model_folder()), ["fine", "zq" * 40])
    assert caught.value.param == "bad_words"
