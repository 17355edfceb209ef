"""Texts of an exact number of tokens, for servers that take no ids. The server's `usage` confirms each.

It knows a tokenizer.json; no server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from penstock.errors import UsageError

TRIES = 60
FEWEST = 100  # words, that no two texts begin alike


def tokenizer_of(path: Path) -> Tokenizer:
    """Of a file or of a model's folder. Raises UsageError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"{file} is no tokenizer.json ({str(error)[:200]}): name one", param="tokenizer") from error


def texts(tokenizer: Tokenizer, length: int, seed: int, salt: str) -> Iterator[str]:
    """Random texts that this tokenizer, with its special tokens, cuts into exactly `length` tokens. Raises UsageError
    where none can be made."""
    draw = np.random.default_rng([seed, *salt.encode()])
    words = whole_words(tokenizer)
    extra = len(tokenizer.encode("").ids)
    if length <= extra or len(words) < FEWEST:
        raise UsageError(
            f"no text of {length} tokens can be made: the tokenizer adds {extra} and has {len(words)} whole words",
            param="tokenizer",
        )
    while True:
        yield _text(tokenizer, words, length, extra, draw)


def whole_words(tokenizer: Tokenizer) -> list[str]:
    """Words with a space before them that are one token each, so that a text of k of them has k tokens."""
    pieces = (tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size()))
    spaced = {f" {piece.strip()}" for piece in pieces if piece.strip().isascii() and piece.strip().isalpha()}
    return sorted(word for word in spaced if len(tokenizer.encode(word, add_special_tokens=False).ids) == 1)


def _text(tokenizer: Tokenizer, words: list[str], length: int, extra: int, draw: np.random.Generator) -> str:
    for _ in range(TRIES):
        text = "".join(words[at] for at in draw.integers(0, len(words), length - extra))
        if len(tokenizer.encode(text).ids) == length:
            return text
    raise UsageError(f"no text of exactly {length} tokens was found in {TRIES} tries: use a server that takes ids")
