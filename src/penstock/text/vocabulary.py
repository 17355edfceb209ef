"""vocabulary: tables of every token's bytes. They decode ids fast, whole or token by token.

Supports three kinds of decoders in tokenizer.json, and gives exactly the text of the `tokenizers`
library's `decode`. Reads no files and does not encode.

    byte-level     a token is letters of GPT-2's byte alphabet; the bytes of all tokens are joined,
                   then decoded as UTF-8
    byte fallback  a token is text with "▁" for a space, or one byte "<0x0A>"; a run of such bytes
                   that isn't valid UTF-8 becomes one U+FFFD per byte; one space is stripped from
                   the start of the text
    Metaspace      a token is text with "▁" for a space; the first token of a text loses its "▁"
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from penstock.errors import TokenizerError, UsageError

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class DecoderStyle:
    """The decoder of a tokenizer.json. metaspace: the character that stands for a space, which the
    first token of a text loses; "": none."""

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0
    metaspace: str = ""

    @classmethod
    def read(cls, spec: dict[str, Any] | None) -> DecoderStyle:
        """Reads the `decoder` of a tokenizer.json. Raises TokenizerError for an unsupported one."""
        steps = (
            [] if spec is None else spec["decoders"] if spec.get("type") == "Sequence" else [spec]
        )
        kinds = [step.get("type") for step in steps]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            return cls(byte_level=True)
        if kinds == ["Metaspace"]:
            mark, scheme = (
                steps[0].get("replacement", "▁"),
                str(steps[0].get("prepend_scheme", "always")).lower(),
            )
            if steps[0].get("add_prefix_space") is False:
                scheme = "never"
            return cls(replaced=((mark, " "),), metaspace="" if scheme == "never" else mark)
        body = [kind for kind in kinds if kind != "Replace"]
        known = body in (
            ["Fuse"],
            ["ByteFallback"],
            ["ByteFallback", "Fuse"],
            ["ByteFallback", "Fuse", "Strip"],
            ["Fuse", "Strip"],
        )
        if not known or kinds[: len(kinds) - len(body)] != ["Replace"] * (len(kinds) - len(body)):
            raise TokenizerError(
                f"the tokenizer's decoder {' + '.join(map(str, kinds)) or 'is missing and'} is not"
                " served; use a model whose tokenizer.json decodes as byte-level BPE, Metaspace,"
                " or replace + byte fallback"
            )
        return cls(
            byte_fallback="ByteFallback" in body,
            replaced=tuple(_replacement(step) for step in steps if step["type"] == "Replace"),
            strip_left=_strip_left(steps[-1]) if body[-1] == "Strip" else 0,
        )


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise TokenizerError(
            "the tokenizer's decoder replaces by a regular expression, which is not served"
        )
    return pattern, step["content"]


def _strip_left(step: dict[str, Any]) -> int:
    if step.get("content") != " " or step.get("stop"):
        raise TokenizerError(
            "the tokenizer's decoder strips more than leading spaces, which is not served"
        )
    return int(step["start"])


@dataclass(slots=True)
class Vocabulary:
    """The tables of a vocabulary's token bytes, and functions to decode with them.

    `pieces[id]` are an id's bytes inside a text (b"" for an id without a token); `kept` is the same
    with b"" for special ids. `byte_ids` are the byte-fallback tokens. `first_pieces` has the bytes
    of ids with another spelling as the first token of a text (Metaspace).
    """

    style: DecoderStyle
    pieces: list[bytes]
    kept: list[bytes]
    unknown_ids: frozenset[int]
    special_ids: frozenset[int]
    byte_ids: frozenset[int] = frozenset()
    first_pieces: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def build(
        cls, tokens: list[str | None], special_ids: frozenset[int], style: DecoderStyle
    ) -> Vocabulary:
        """Builds the tables. tokens: the text of each id's token as written in tokenizer.json, or
        None for an id without a token."""
        unknown = frozenset(index for index, token in enumerate(tokens) if token is None)
        words = ["" if token is None else token for token in tokens]
        byte_ids: frozenset[int] = frozenset()
        first_pieces: dict[int, bytes] = {}
        if style.byte_level:
            pieces = _byte_level_pieces(words)
        else:
            pieces = [_spell(word, style.replaced) for word in words]
            if style.byte_fallback:
                found = {
                    index: byte
                    for index, word in enumerate(words)
                    if (byte := _fallback_byte(word)) is not None
                }
                byte_ids = frozenset(found)
                for index, byte in found.items():
                    pieces[index] = byte
            if style.metaspace:
                mark = style.metaspace
                first_pieces = {
                    i: word.replace(mark, "").encode()
                    for i, word in enumerate(words)
                    if mark in word
                }
        kept = list(pieces)
        for index in special_ids:
            kept[index] = b""
        return cls(style, pieces, kept, unknown, special_ids, byte_ids, first_pieces)

    def table(self, skip_special: bool) -> list[bytes]:
        return self.kept if skip_special else self.pieces

    def is_silent(self, token_id: int, skip_special: bool) -> bool:
        """Returns True for an id that decoding skips."""
        return (skip_special and token_id in self.special_ids) or token_id in self.unknown_ids

    def begins_behind(self, ids: Sequence[int], skip_special: bool) -> bool:
        """Returns True if a text after these ids is decoded as a whole text, since none of them
        gives text, or if that makes no difference."""
        return not (self.style.strip_left or self.first_pieces) or all(
            self.is_silent(i, skip_special) for i in ids
        )

    def join(self, ids: Sequence[int], skip_special: bool, begins: bool = True) -> bytes:
        """Returns the bytes of a text, before decoding as UTF-8 and stripping leading spaces.
        begins: see `decode`."""
        table = self.table(skip_special)
        try:
            data = b"".join(map(table.__getitem__, ids))
        except IndexError:
            raise _outside(ids, len(table)) from None
        if ids and min(ids) < 0:
            raise _outside(ids, len(table))
        if begins and self.first_pieces:
            first = next((index for index in ids if not self.is_silent(index, skip_special)), None)
            if first is not None and first in self.first_pieces:
                data = self.first_pieces[first] + data[len(table[first]) :]
        return data

    def decode(self, ids: Sequence[int], skip_special: bool, begins: bool = True) -> str:
        """Returns the text of a sequence, equal to the tokenizers library's `decode`. begins: True
        for a whole text; False for one that continues other text and keeps its first token's
        leading space."""
        data = self.join(ids, skip_special, begins)
        if not self.byte_ids:
            return self.strip(data.decode("utf-8", "replace"), begins)
        try:
            return self.strip(data.decode(), begins)
        except UnicodeDecodeError:
            heard = [index for index in ids if not self.is_silent(index, skip_special)]
            runs = groupby(heard, self.byte_ids.__contains__)
            parts = [(torn, [self.pieces[index] for index in run]) for torn, run in runs]
            text = "".join(read_run(run) if torn else b"".join(run).decode() for torn, run in parts)
            return self.strip(text, begins)

    def settled(self, ids: Sequence[int], skip_special: bool, begins: bool = True) -> str:
        """Returns the text of a sequence that may continue, without an incomplete character at its
        end. A run of byte tokens at the end is left out until it is valid UTF-8."""
        if not self.byte_ids:
            data = self.join(ids, skip_special, begins)
            return self.strip(codecs.utf_8_decode(data, "replace", False)[0], begins)
        heard = [index for index in ids if not self.is_silent(index, skip_special)]
        end = len(heard)
        while end and heard[end - 1] in self.byte_ids:
            end -= 1
        run = [self.pieces[index] for index in heard[end:]]
        return self.decode(heard[:end] if whole_run(run) is None else heard, skip_special, begins)

    def strip(self, text: str, begins: bool = True) -> str:
        """Removes the leading spaces that the decoder strips from the start of a text."""
        count = self.style.strip_left if begins else 0
        return text[min(count, len(text) - len(text.lstrip(" "))) :] if count else text

    def tokens_until(
        self, ids: Sequence[int], end: int, skip_special: bool, begins: bool = True
    ) -> int:
        """Returns how many of `ids` make up the first `end` characters of their decoded text."""
        if end <= 0:
            return 0
        data = self.join(ids, skip_special, begins)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            # The bytes are no valid UTF-8, since some character is incomplete. That is rare, so a
            # slow binary search is enough.
            shown = self.decode(ids, skip_special, begins)[:end]
            counts = range(len(ids))
            return bisect_left(
                counts,
                True,
                key=lambda n: self.settled(ids[:n], skip_special, begins).startswith(shown),
            )
        stripped = len(text) - len(self.strip(text, begins))
        wanted = len(text[: end + stripped].encode())
        table, left = self.table(skip_special), len(data)
        # Goes from the end, since a stop string nearly always ends in the last token. Only the
        # first token's length can differ from its table entry (Metaspace), and it comes last.
        for place in range(len(ids) - 1, -1, -1):
            left -= len(table[ids[place]])
            if left < wanted:
                return place + 1
        return 0


def whole_run(run: list[bytes]) -> str | None:
    """Returns the text of a run of byte-fallback tokens, or None if the run isn't valid UTF-8."""
    try:
        return b"".join(run).decode()
    except UnicodeDecodeError:
        return None


def read_run(run: list[bytes]) -> str:
    """Returns the text of a run of byte-fallback tokens, or one U+FFFD per byte if the run isn't
    valid UTF-8."""
    text = whole_run(run)
    return REPLACEMENT * len(run) if text is None else text


def _outside(ids: Sequence[int], size: int) -> UsageError:
    wrong = next(index for index in ids if not 0 <= index < size)
    return UsageError(
        f"token id {wrong} is outside the vocabulary of {size}; give ids from 0 to {size - 1}"
    )


def _spell(word: str, replaced: tuple[tuple[str, str], ...]) -> bytes:
    for old, new in replaced:
        word = word.replace(old, new)
    return word.encode()


def _fallback_byte(word: str) -> bytes | None:
    if len(word) != 6 or not word.startswith("<0x") or not word.endswith(">"):
        return None
    try:
        return bytes.fromhex(word[3:5])
    except ValueError:
        return None


def _byte_alphabet() -> np.ndarray[Any, np.dtype[np.int16]]:
    """Returns GPT-2's byte alphabet as a table: code point -> byte, or -1 if it is no letter of the
    alphabet. The 188 printable bytes stand for themselves; the other 68, in order, are U+0100 and
    up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = np.full(0x145, -1, np.int16)
    table[printable] = printable
    table[0x100 : 0x100 + 256 - len(printable)] = sorted(set(range(256)) - set(printable))
    return table


def _byte_level_pieces(words: list[str]) -> list[bytes]:
    """Returns the bytes of all tokens, which are written in GPT-2's byte alphabet: one letter per
    byte. A token with a letter outside the alphabet (an added token with a space, say) gets its own
    UTF-8 bytes, as in the library."""
    alphabet = _byte_alphabet()
    codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    values = alphabet[np.minimum(codes, 0x144)]
    values[codes > 0x143] = -1
    data = values.astype(np.uint8).tobytes()
    ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
    starts = ends - np.fromiter(map(len, words), np.int64, len(words))
    pieces = [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    for index in np.unique(
        np.searchsorted(ends, np.flatnonzero(values < 0), side="right")
    ).tolist():
        pieces[index] = words[index].encode()
    return pieces
