"""Makes prompts of an exact number of tokens. They are for servers that take no token ids. The
server's `usage` confirms each length.

Knows a tokenizer.json; no server.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRIES = 60
FEWEST = 100  # least number of usable words, so that no two texts begin alike


class TextPrompts:
    """Random texts of an exact number of tokens, special tokens included."""

    def __init__(self, path: Path) -> None:
        """Reads a tokenizer.json or a model's folder. Raises UsageError."""
        self._tokenizer = _tokenizer(path)
        self._extra = len(self._tokenizer.encode("").ids)
        self._words = _whole_words(self._tokenizer)

    def of(self, length: int, draw: np.random.Generator) -> Iterator[str]:
        """Yields texts endlessly. Raises UsageError if the length is impossible."""
        if length <= self._extra or len(self._words) < FEWEST:
            raise UsageError(
                f"no text of {length} tokens can be made: the tokenizer adds {self._extra} and has"
                f" {len(self._words)} whole words",
                param="tokenizer",
            )
        while True:
            yield self._one(length, draw)

    def _one(self, length: int, draw: np.random.Generator) -> str:
        for _ in range(TRIES):
            text = "".join(
                self._words[at] for at in draw.integers(0, len(self._words), length - self._extra)
            )
            if len(self._tokenizer.encode(text).ids) == length:
                return text
        raise UsageError(
            f"no text of exactly {length} tokens was found in {TRIES} tries: use a server that"
            " takes ids",
            param="tokenizer",
        )


def _tokenizer(path: Path) -> Tokenizer:
    if find_spec("tokenizers") is None:
        raise UsageError(
            "texts of an exact length need the tokenizers library: pip install"
            " 'penstock-client[text]'",
            param="text",
        )
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UsageError(
            f"{file} is no tokenizer.json ({str(error)[:200]}): name one", param="tokenizer"
        ) from error


def _whole_words(tokenizer: Tokenizer) -> list[str]:
    """Returns the ASCII words of the vocabulary that are one token each with a leading space. A
    text of k of them usually has k tokens."""
    pieces = (tokenizer.decode([number]).strip() for number in range(tokenizer.get_vocab_size()))
    spaced = sorted({f" {piece}" for piece in pieces if piece.isascii() and piece.isalpha()})
    encoded = tokenizer.encode_batch(spaced, add_special_tokens=False)
    return [word for word, told in zip(spaced, encoded, strict=True) if len(told.ids) == 1]
