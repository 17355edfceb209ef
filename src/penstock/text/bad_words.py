"""bad_word_ids: token ids of forbidden words. A word has ids with and without a leading space.

Knows a tokenizer; no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import UsageError
from penstock.row_table import BAD_WORD_IDS
from penstock.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the token id sequences to forbid: of each word as spelled inside a text, and with a
    leading space. If the second sequence ends with the first, the first alone forbids both.

    Raises UsageError for a word with more than BAD_WORD_IDS ids.
    """
    plain = [word.lstrip() for word in words]
    encoded = tokenizer.encode_inside([*plain, *(" " + word for word in plain)])
    out: list[list[int]] = []
    for ids, spaced in zip(encoded[: len(plain)], encoded[len(plain) :], strict=True):
        out += [ids] if spaced[-len(ids) :] == ids else [ids, spaced]
    out = [ids for ids in out if ids]  # words that no tokens spell cannot be sampled anyway
    longest = max(map(len, out), default=0)
    if longest > BAD_WORD_IDS:
        rule = f"bad_words has a word of more than {BAD_WORD_IDS} tokens: forbid a part of it"
        raise UsageError(rule, param="bad_words", rule=rule)
    return out
