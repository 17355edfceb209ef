"""What a token is called in an answer, and how that is written in JSON: tables over the vocabulary, made once.

    b",".join(map(spelling.tables.words.__getitem__, ids))     a list of tokens as JSON, at the speed of a look-up

It knows the tokenizer's texts and JSON; no logprobs, no answers.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

_encoder = msgspec.json.Encoder()


class Tables(NamedTuple):
    """By token id; each [size]."""

    words: list[bytes]  # b'"word"'
    lengths: NDArray[np.int32]  # characters
    same: NDArray[np.int64]  # equal where the spelling is (its hash: an accident is one in 2**64 a pair)


class ChatTables(NamedTuple):
    """By token id; each [size]."""

    leads: list[bytes]  # b'{"token":"word","logprob":'
    ends: list[bytes]  # b',"bytes":[119,111,114,100]'


class Spelling:
    """Spells one vocabulary of `size` ids: a token's text, or `token_id:N` with `as_ids` or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, size: int, *, as_ids: bool = False) -> None:
        self._size = size
        self._tokenizer = None if as_ids else tokenizer
        self._making = asyncio.Lock()

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def bytes(self, token: int) -> list[int]:
        """The token's own bytes: of a torn character the part that it has, not the text's U+FFFD."""
        if self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes[token])

    @cached_property
    def tables(self) -> Tables:
        """Made at first use: 80 ms at 128,256 tokens."""
        texts = list(map(self.text, range(self._size)))
        words = _lines(texts)
        lengths = np.fromiter(map(len, texts), np.int32, self._size)
        return Tables(words, lengths, np.fromiter(map(hash, texts), np.int64, self._size))

    @cached_property
    def chat_tables(self) -> ChatTables:
        """Made at first use: 120 ms at 128,256 tokens."""
        leads = [b'{"token":' + word + b',"logprob":' for word in self.tables.words]
        ends = [b',"bytes":' + line for line in _lines(list(map(self.bytes, range(self._size))))]
        return ChatTables(leads, ends)

    async def prepare(self, *, chat: bool) -> None:
        """Makes the tables that an answer with logprobs needs, in a thread, so that the loop turns meanwhile."""
        name = "chat_tables" if chat else "tables"
        if name not in self.__dict__:
            async with self._making:  # of many first requests one makes them
                await asyncio.to_thread(getattr, self, name)


class TokenSpellings:
    """The two ways to spell of one server, shared by all its answers."""

    def __init__(self, tokenizer: Tokenizer | None, size: int) -> None:
        self.tokenizer = tokenizer
        self._texts = Spelling(tokenizer, size)
        self._ids = Spelling(tokenizer, size, as_ids=True)

    def of(self, *, as_ids: bool) -> Spelling:
        return self._ids if as_ids else self._texts


def _lines(values: list[Any]) -> list[bytes]:
    """Each value as JSON, encoded in one call: JSON has no newline but between values."""
    return _encoder.encode_lines(values).split(b"\n")[:-1]
