"""bad_word_ids: the words that a sample may not say, as the token ids that spell them, with and
without a space before.

It knows a tokenizer; no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import UsageError
from penstock.row_table import BAD_WORD_IDS
from penstock.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each word as it is spelt inside a text, and those of the word behind a
    space, unless they end with the former, which bar both.

    Raises UsageError for a word of more ids than a row looks back for.
    """
    plain = [word.lstrip() for word in words]
    encoded = tokenizer.encode_inside([*plain, *(" " + word for word in plain)])
    out: list[list[int]] = []
    for ids, spaced in zip(encoded[: len(plain)], encoded[len(plain) :], strict=True):
        out += [ids] if spaced[-len(ids) :] == ids else [ids, spaced]
    out = [ids for ids in out if ids]  # what no tokens spell cannot be said
    longest = max(map(len, out), default=0)
    if longest > BAD_WORD_IDS:
        rule = f"bad_words has a word of more than {BAD_WORD_IDS} tokens: forbid a part of it"
        raise UsageError(rule, param="bad_words", rule=rule)
    return out
