"""Detokenizer: converts a stream's tokens to text. Returns whole characters only, and in total
exactly the text of `decode`.

Each streamed sample has one. A push takes one join over the byte table. Does not look for stop
strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer
from penstock.text.vocabulary import read_run, whole_run


class Detokenizer:
    """Decodes one growing sequence. All results of `push` and the final `flush`, joined, equal
    `Tokenizer.decode` of all ids. begins: see Tokenizer.decode.

    Bytes of an unfinished character are held back. With byte fallback (vocabulary.py), a run of
    byte tokens is held back until it ends, since one wrong byte turns the whole run into U+FFFD.
    """

    __slots__ = ("_held", "_lead", "_run", "_skip_special", "_strip", "_table", "_vocabulary")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, begins: bool = True
    ) -> None:
        vocabulary = tokenizer.vocabulary
        self._vocabulary = vocabulary
        self._table = vocabulary.table(skip_special_tokens)
        self._skip_special = skip_special_tokens
        self._held = b""  # bytes of a character that is not complete yet
        self._run: list[bytes] = []  # byte-fallback tokens of an unfinished run
        # number of leading spaces that may still be stripped
        self._strip = vocabulary.style.strip_left if begins else 0
        # True until the first token comes, if first tokens may have a spelling of their own
        self._lead = begins and bool(vocabulary.first_pieces)

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids, and returns the text that they complete; "" while a character is unfinished."""
        if self._vocabulary.byte_ids:
            return self._stripped(self._push_fallback(ids))
        data = b"".join(map(self._table.__getitem__, ids))
        if self._lead:
            data = self._first(ids, data)
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return self._stripped(text) if self._strip else text

    def held_run(self) -> str:
        """Returns the text of the byte tokens held back; "" if there are none, or they aren't valid
        UTF-8."""
        return whole_run(self._run) or ""

    def flush(self) -> str:
        """Returns the text held back, at the end of the sequence: an unfinished character as
        U+FFFD, an unfinished run of byte tokens decoded."""
        text = self._held.decode("utf-8", "replace") + (read_run(self._run) if self._run else "")
        self._held, self._run = b"", []
        return self._stripped(text)

    def _push_fallback(self, ids: Sequence[int]) -> str:
        vocabulary, out = self._vocabulary, []
        for index in ids:
            if index in vocabulary.byte_ids:
                self._run.append(self._table[index])
            elif not vocabulary.is_silent(index, self._skip_special):
                if self._run:
                    out.append(read_run(self._run))
                    self._run = []
                out.append(self._table[index].decode())
        return "".join(out)

    def _first(self, ids: Sequence[int], data: bytes) -> bytes:
        vocabulary = self._vocabulary
        first = next(
            (index for index in ids if not vocabulary.is_silent(index, self._skip_special)), None
        )
        if first is None:
            return data
        self._lead = False
        return (
            vocabulary.first_pieces.get(first, self._table[first]) + data[len(self._table[first]) :]
        )

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
