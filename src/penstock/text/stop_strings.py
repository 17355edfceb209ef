"""stop_strings: finds stop strings in a sample's text. Knows which tokens can end one, and which
text a stream must hold back.

Of all occurrences, the one that is completed first counts; of those completed at the same
character, the one that starts first. How the text is split into parts makes no difference. Knows
token bytes; no tokenizers, no engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from penstock.errors import UsageError
from penstock.text.vocabulary import REPLACEMENT, Vocabulary

Bits = np.ndarray[Any, np.dtype[np.bool_]]


class StopIndex:
    """A vocabulary prepared for stop strings, once per tokenizer: its tokens' bytes sorted and
    concatenated.

    Answers two questions: which tokens start with some bytes (binary search), and which contain
    some bytes (one scan over all bytes of the vocabulary, 0.9 MB for 128,256 tokens).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.size = len(vocabulary.pieces)
        # A token that has another spelling at the start of a text has one entry per spelling.
        entries = [*enumerate(vocabulary.pieces), *vocabulary.first_pieces.items()]
        entries.sort(key=lambda entry: entry[1])
        self._sorted = [piece for _, piece in entries]
        self._ids = np.array([index for index, _ in entries], np.int32)  # token id of each entry
        self._bytes = np.frombuffer(b"".join(self._sorted), np.uint8)
        # end of each entry in the concatenated bytes [entries]
        self._ends = np.cumsum(np.fromiter(map(len, self._sorted), np.int64, len(entries)))
        self.longest = max(map(len, self._sorted), default=0)  # bytes of the longest token
        self._counts = np.bincount(self._bytes, minlength=256)

    def starting_with(self, prefix: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the ids of the tokens whose bytes start with `prefix`."""
        low = bisect_left(self._sorted, prefix)
        above = prefix.rstrip(b"\xff")
        high = len(self._sorted)
        if above:
            high = bisect_left(self._sorted, above[:-1] + bytes([above[-1] + 1]), low)
        return self._ids[low:high]

    def containing(self, wanted: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the ids of the tokens whose bytes contain `wanted`. Searches for its rarest byte
        first."""
        anchor = min(range(len(wanted)), key=lambda at: self._counts[wanted[at]])
        places = np.flatnonzero(self._bytes == wanted[anchor]) - anchor
        places = places[(places >= 0) & (places + len(wanted) <= len(self._bytes))]
        for at, byte in enumerate(wanted):
            places = places[self._bytes[places + at] == byte]
        entries = np.searchsorted(self._ends, places, side="right")
        return self._ids[entries[places + len(wanted) <= self._ends[entries]]]


class StopStrings:
    """The stop strings of one request over one vocabulary.

    index: the prepared vocabulary, shared by all requests. skip_special_tokens: True if special
    tokens give no text, so that they cannot end a stop string. Raises UsageError for an empty stop
    string.
    """

    __slots__ = ("_bits", "_bytes", "_index", "_inner", "_skip_special", "max_bytes", "stops")

    def __init__(
        self, stops: Sequence[str], index: StopIndex, *, skip_special_tokens: bool = True
    ) -> None:
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise UsageError(
                "a stop string must be text of at least one character; leave empty ones out",
                param="stop",
            )
        self.stops = tuple(dict.fromkeys(stops))
        try:
            self._bytes = tuple(stop.encode() for stop in self.stops)
        except UnicodeEncodeError as error:
            raise UsageError(
                "a stop string has half a surrogate pair; send valid Unicode", param="stop"
            ) from error
        self.max_bytes = max(map(len, self._bytes), default=0)
        self._index, self._skip_special = index, skip_special_tokens
        self._bits: Bits | None = None
        # all characters of the stop strings except each one's last: a text that ends with another
        # one cannot end inside a stop string
        self._inner = frozenset(letter for stop in stops for letter in stop[:-1])

    @property
    def has_bits(self) -> bool:
        """Returns True if watch_bits has been computed."""
        return self._bits is not None

    def watch_bits(self) -> Bits:
        """Returns a bool per token [vocabulary]: True if it can complete a stop string after some
        text. Read-only.

        A token may complete a stop string if it contains the string, or starts with the end of it;
        any text may stand before. U+FFFD in a stop string can come from any incomplete bytes, so
        then every token is watched.
        """
        if self._bits is None:
            bits = np.zeros(self._index.size, np.bool_)
            for stop, data in zip(self.stops, self._bytes, strict=True):
                if REPLACEMENT in stop:
                    bits[:] = True
                    break
                bits[self._index.containing(data)] = True
                # No token starts with a suffix longer than the longest token.
                for cut in range(max(1, len(data) - self._index.longest), len(data)):
                    bits[self._index.starting_with(data[cut:])] = True
            vocabulary = self._index.vocabulary
            if self._skip_special and vocabulary.special_ids:
                bits[list(vocabulary.special_ids)] = False
            bits.flags.writeable = False
            self._bits = bits
        return self._bits

    def completes(self, ids: Sequence[int]) -> bool:
        """Returns False if the last of `ids` certainly has not completed a stop string. Checks the
        bytes of the last few tokens.

        Takes about a microsecond. After True, the caller decodes the sequence and calls `find`.
        """
        vocabulary = self._index.vocabulary
        if not ids or any(REPLACEMENT in stop for stop in self.stops):
            return True
        table = vocabulary.table(self._skip_special)
        tail, place = table[ids[-1]], len(ids) - 1
        wanted = self.max_bytes - 1 + len(tail)
        while place and len(tail) < wanted:
            place -= 1
            tail = table[ids[place]] + tail
        if vocabulary.first_pieces and not any(table[each] for each in islice(ids, place)):
            # the last few tokens include the text's first token, which may have another spelling
            return True
        return any(data in tail for data in self._bytes)

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Returns (position, stop string) of the occurrence that ends first after `start`, or None.

        start: number of characters that were searched before. An occurrence may begin before
        `start`, and must end after it.
        """
        # (end, begin, stop string) of the best occurrence so far
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            begin, length = text.find(stop, max(0, start - len(stop) + 1)), len(stop)
            if begin >= 0 and (best is None or (begin + length, begin) < best[:2]):
                best = (begin + length, begin, stop)
        return None if best is None else (best[1], best[2])

    def holdback(self, text: str) -> int:
        """Returns the number of characters at the end of `text` that may be the beginning of a stop
        string."""
        if not text or text[-1] not in self._inner:
            return 0
        held = 0
        for stop in self.stops:
            # Tries only the positions of the stop string's first character, the longest beginning
            # first.
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - held:
                if stop.startswith(text[at:]):
                    held = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return held


class StopChecker:
    """Stop check of one streamed sample. Takes its new text, returns the text to send, and reports
    a completed stop string.

    Text before a stop string is sent, and the stop string itself only with `include`. After a stop
    string nothing more is sent.
    """

    __slots__ = ("_include", "_sent", "_stops", "_tail", "stopped")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        # end of the text that may begin a stop string, and was held back (with `include` it was
        # sent)
        self._tail = ""
        self._sent = 0  # number of characters of the tail that were sent
        self.stopped: str | None = None

    def push(self, new_text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Adds text. Returns (text to send, completed stop string or None). armed: False before
        min_tokens: a stop string that ends in this text doesn't count, but one may begin in it."""
        if self.stopped is not None or not new_text:
            return "", self.stopped
        text, seen = self._tail + new_text, len(self._tail)
        found = self._stops.find(text, seen) if armed else None
        if found is not None:
            begin, stop = found
            self.stopped = stop
            end = begin + len(stop) if self._include else begin
            sent, self._tail = self._sent, ""
            return text[sent:end], stop
        held = self._stops.holdback(text)
        end = len(text) if self._include else len(text) - held
        out = text[self._sent : end]
        self._tail = text[len(text) - held :]
        self._sent = held if self._include else 0
        return out, None

    def would_stop(self, new_text: str) -> bool:
        """Returns True if this text would complete a stop string. Doesn't add the text."""
        return self._stops.find(self._tail + new_text, len(self._tail)) is not None

    def flush(self) -> str:
        """Returns the text held back, when the sample has ended without a stop string."""
        out, self._tail, self._sent = self._tail[self._sent :], "", 0
        return out
