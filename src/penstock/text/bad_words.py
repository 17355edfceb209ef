"""bad_word_ids: the words that a sample may not say, as the token ids that spell them. vLLM's rule, token for token.

It knows a tokenizer; no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import UsageError
from penstock.row_table import BAD_WORD_IDS
from penstock.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each word, and those of the word behind a space where they are as many and begin otherwise.

    Raises UsageError for a word of more ids than a row looks back for.
    """
    plain = [word.lstrip() for word in words]
    encoded = tokenizer.encode_batch([*plain, *(" " + word for word in plain)], add_special_tokens=False)
    out: list[list[int]] = []
    for ids, spaced in zip(encoded[: len(plain)], encoded[len(plain) :], strict=True):
        out.append(ids)
        if len(spaced) == len(ids) and spaced[0] != ids[0]:
            out.append(spaced)
    longest = max(map(len, out), default=0)
    if longest > BAD_WORD_IDS:
        rule = f"bad_words has a word of more than {BAD_WORD_IDS} tokens: forbid a part of it"
        raise UsageError(rule, param="bad_words", rule=rule)
    return out
