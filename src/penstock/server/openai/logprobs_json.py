"""Log-probabilities in three JSON formats. They are those of OpenAI's completions, OpenAI's chats
and vLLM's prompt_logprobs.

A sample's logprobs come as columns (LazyLogprobs) and are written straight to bytes, without an
object per token. JSON has no -inf, so the lowest value is -9999, as in vLLM. Shapes: t tokens, k
likeliest alternatives of each. Knows positions (a token's logprobs) and the spelling of tokens; no
HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.engine.logprobs import LazyLogprobs
from penstock.request import PositionLogprobs
from penstock.server.openai.answer_objects import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

_encoder = msgspec.json.Encoder()


class Tables(NamedTuple):
    """Spellings for completions, by token id; each list and array has `size` entries, the
    vocabulary's."""

    words: list[bytes]  # spelling of each token in JSON, as b'"word"'
    lengths: NDArray[np.int32]  # characters of each token's spelling
    # hash of the spelling, equal for equal spellings (different ones collide with probability
    # 2**-64)
    same: NDArray[np.int64]


class ChatTables(NamedTuple):
    """Pieces of JSON for chats, by token id; each list has `size` entries, the vocabulary's."""

    leads: list[bytes]  # beginning of each token's JSON, as b'{"token":"word","logprob":'
    ends: list[bytes]  # the part with each token's bytes, as b',"bytes":[119,111,114,100]'


class Spelling:
    """Spells a vocabulary of `size` ids. A token's spelling is its text; with `as_ids`, or without
    a tokenizer, it is `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None, size: int, *, as_ids: bool = False) -> None:
        self._size = size
        self._tokenizer = None if as_ids else tokenizer
        self._making = asyncio.Lock()

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def bytes(self, token: int) -> list[int]:
        """Returns the token's bytes. For an incomplete character these are its real bytes, while
        the text has U+FFFD."""
        if self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes[token])

    @cached_property
    def tables(self) -> Tables:
        """Spellings for completions. Made at first use, in 80 ms for 128,256 tokens."""
        texts = list(map(self.text, range(self._size)))
        words = _lines(texts)
        lengths = np.fromiter(map(len, texts), np.int32, self._size)
        return Tables(words, lengths, np.fromiter(map(hash, texts), np.int64, self._size))

    @cached_property
    def chat_tables(self) -> ChatTables:
        """Pieces of JSON for chats. Made at first use, in 120 ms for 128,256 tokens."""
        leads = [b'{"token":' + word + b',"logprob":' for word in self.tables.words]
        ends = [b',"bytes":' + line for line in _lines(list(map(self.bytes, range(self._size))))]
        return ChatTables(leads, ends)

    async def prepare(self, *, chat: bool) -> None:
        """Makes, in a thread, the tables that an answer with logprobs needs, so that the event loop
        goes on."""
        name = "chat_tables" if chat else "tables"
        if name not in self.__dict__:
            # if several first requests come at once, only one makes the tables
            async with self._making:
                await asyncio.to_thread(getattr, self, name)


class TokenSpellings:
    """A server's two Spellings, as text and as ids, shared by all its answers."""

    def __init__(self, tokenizer: Tokenizer | None, size: int) -> None:
        self.tokenizer = tokenizer
        self._texts = Spelling(tokenizer, size)
        self._ids = Spelling(tokenizer, size, as_ids=True)

    def of(self, *, as_ids: bool) -> Spelling:
        return self._ids if as_ids else self._texts


def _lines(values: list[Any]) -> list[bytes]:
    """Returns each value as JSON. Encodes all in one call and splits at the newlines, which occur
    only between values."""
    return _encoder.encode_lines(values).split(b"\n")[:-1]


LOWEST = -9999.0
# number of tokens below which dicts are faster than numpy, whose calls take as long as one token
FEW = 3
Positions = Sequence[PositionLogprobs | None]
_encode = msgspec.json.Encoder().encode


class Listed(NamedTuple):
    """The lists of OpenAI's `logprobs` object of completions for some tokens: four lists as JSON
    without their brackets, and the offset where the text of these tokens ends."""

    tokens: bytes
    chosen: bytes
    top: bytes
    offsets: bytes
    end: int


def completion_object(parts: Sequence[Listed]) -> bytes:
    """Returns OpenAI's `logprobs` object of completions, as JSON. parts: lists for consecutive
    tokens."""
    tokens, chosen, top, offsets = parts[0][:4]
    if len(parts) > 1:
        tokens, chosen, top, offsets = (
            b",".join(filter(None, lists)) for lists in list(zip(*parts, strict=True))[:4]
        )
    return b"".join(
        (
            b'{"tokens":[',
            tokens,
            b'],"token_logprobs":[',
            chosen,
            b'],"top_logprobs":[',
            top,
            b'],"text_offset":[',
            offsets,
            b"]}",
        )
    )


def completion_logprobs(
    ids: Sequence[int], positions: Positions, spell: Spelling, offset: int
) -> Listed:
    """Returns the lists of the completions' `logprobs` object for these tokens. offset: character
    at which their text begins; below 0 if the text of the first tokens is not shown, which then get
    offset 0."""
    if len(ids) == 1 and isinstance(positions, LazyLogprobs) and not positions.columns[3].shape[1]:
        return _one(ids[0], positions, spell, offset)
    if len(ids) < FEW or not isinstance(positions, LazyLogprobs):
        return _plain_completion(ids, positions, spell, offset)
    _check_length(ids, positions)
    tokens, chosen, _, likely, values = positions.columns
    tables, numbers = spell.tables, _numbers(chosen)
    words = list(map(tables.words.__getitem__, ids))
    if likely.shape[1]:
        top = _with_likely(tokens, chosen, likely, values, tables)
    else:
        # each value with the brackets after it, as b":-0.5},{", except after the last one
        rest = (b":" + numbers.replace(b",", b"},{\n:")).split(b"\n")
        top = b"{" + _alternating(words, rest) + b"}"
    lengths = tables.lengths[tokens]
    ends = lengths.cumsum(dtype=np.int64) + offset
    return Listed(
        b",".join(words),
        numbers,
        top,
        _encode(np.maximum(ends - lengths, 0).tolist())[1:-1],
        int(ends[-1]),
    )


def _one(token: int, position: LazyLogprobs, spell: Spelling, offset: int) -> Listed:
    """Returns the lists for one token without likely alternatives,
    as in most events of a stream."""
    _check_length((token,), position)
    word, number = spell.tables.words[token], _encode(_floor(float(position.columns[1][0])))
    end = offset + int(spell.tables.lengths[token])
    return Listed(word, number, b"{%b:%b}" % (word, number), b"%d" % max(0, offset), end)


def _with_likely(
    tokens: NDArray[Any],
    chosen: NDArray[Any],
    likely: NDArray[Any],
    values: NDArray[Any],
    tables: Tables,
) -> bytes:
    """Returns, as JSON, the objects of each position: its own token and its likely ones with their
    logprobs. tokens, chosen: own ids and logprobs [t]. likely, values: likely ids (-1: none) and
    logprobs [t, k]. An object has each key only once, so of several ids with one spelling only the
    own token or the likeliest stays."""
    # [t, 1 + k]: the token's own id, then the likely ones
    ids = np.concatenate((tokens[:, None], likely), axis=1)
    missing, same = ids < 0, tables.same[ids]
    stays = ~missing
    for place in range(1, ids.shape[1]):
        other = (same[:, :place] != same[:, place : place + 1]) | missing[:, :place]
        stays[:, place] &= other.all(axis=1)
    words = map(tables.words.__getitem__, ids[stays].tolist())
    firsts = np.flatnonzero(stays.ravel()) % ids.shape[1] == 0
    between = [b"},{" if first else b"," for first in firsts.tolist()]
    scores = np.concatenate((chosen[:, None], values), axis=1)
    return (
        _alternating(between, words, repeat(b":"), _numbers(scores[stays]).split(b","))[2:] + b"}"
    )


def chat_logprobs(ids: Sequence[int], positions: Positions, spell: Spelling, top: int) -> bytes:
    """Returns OpenAI's `logprobs` object of chats for these tokens, with the `top` likeliest of
    each."""
    if len(ids) < FEW or not isinstance(positions, LazyLogprobs):
        return _encode(_plain_chat(ids, positions, spell, top))
    _check_length(ids, positions)
    tokens, chosen, _, likely, values = positions.columns
    entries, scores, there = tokens[:, None], chosen[:, None], np.ones((len(ids), 1), np.bool_)
    # JSON before each entry: the end of the previous entry and the beginning of this one
    before = [b',"top_logprobs":[]},']
    if top:
        before = [b"}]},", b',"top_logprobs":['] + [b"},"] * top
        found = _likeliest(tokens, chosen, likely, values, top)
        entries, scores, there = (
            np.concatenate(pair, axis=1)
            for pair in zip((entries, scores, there), found, strict=True)
        )
    numbers = _numbers(scores[there]).split(b",")
    kept = entries[there].tolist()
    places = np.broadcast_to(np.arange(entries.shape[1]), entries.shape)[there].tolist()
    leads, ends = spell.chat_tables
    joined = _alternating(
        [before[place] for place in places],
        map(leads.__getitem__, kept),
        numbers,
        map(ends.__getitem__, kept),
    )
    last = b"}]}" if top else b',"top_logprobs":[]}'
    return b'{"content":[' + joined[len(before[0]) :] + last + b'],"refusal":null}'


def _likeliest(
    tokens: NDArray[Any], chosen: NDArray[Any], likely: NDArray[Any], values: NDArray[Any], top: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns the `top` likeliest of each position's own token and likely ones, as (ids, logprobs,
    mask of valid entries), each [t, <= top]. tokens, chosen: own ids and logprobs [t]. likely,
    values: likely ids (-1: none) and logprobs [t, k]. Equal values stay in order, the own token
    first."""
    there = (likely >= 0) & (likely != tokens[:, None])
    ids = np.concatenate((tokens[:, None], likely), axis=1).astype(np.int64)
    scores = np.concatenate((np.fmax(chosen, LOWEST)[:, None], np.fmax(values, LOWEST)), axis=1)
    known = np.concatenate((np.ones((len(tokens), 1), np.bool_), there), axis=1)
    order = np.argsort(np.where(known, -scores, np.inf), axis=1, kind="stable")[:, :top]
    return (
        np.take_along_axis(ids, order, axis=1),
        np.take_along_axis(scores, order, axis=1),
        np.take_along_axis(known, order, axis=1),
    )


def _numbers(values: NDArray[Any]) -> bytes:
    """Returns the numbers as JSON with commas in between. NaN and values below LOWEST become
    LOWEST."""
    return _encode(np.fmax(values, LOWEST).tolist())[1:-1]


def _alternating(*columns: Iterable[bytes]) -> bytes:
    """Joins the first piece of every column, then the second of every column, and so on. Ends with
    the shortest column."""
    return b"".join(chain.from_iterable(zip(*columns, strict=False)))


def _check_length(ids: Sequence[int], positions: Positions) -> None:
    if len(ids) != len(positions):
        raise ValueError(f"{len(ids)} tokens came up with the logprobs of {len(positions)}")


# --- logprobs that are dicts, one per position


def _floor(value: float) -> float:
    return value if value > LOWEST else LOWEST  # NaN becomes LOWEST too


def _plain_completion(
    ids: Sequence[int], positions: Positions, spell: Spelling, offset: int
) -> Listed:
    """Returns the lists for positions that are dicts. A position is None if its token has no
    logprob, as a prompt's first token."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, position in zip(ids, positions, strict=True):
        word = spell.text(token)
        tokens.append(word)
        offsets.append(max(0, offset))
        offset += len(word)
        if position is None or token not in position:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(_floor(position[token].logprob))
        row = {word: _floor(position[token].logprob)}
        # several ids may have one spelling: the chosen one stays, or else the likeliest
        for other, value in position.items():
            row.setdefault(spell.text(other), _floor(value.logprob))
        top.append(row)
    lists = [_encode(each)[1:-1] for each in (tokens, chosen, top, offsets)]
    return Listed(lists[0], lists[1], lists[2], lists[3], offset)


def _plain_chat(
    ids: Sequence[int], positions: Positions, spell: Spelling, top: int
) -> ChatLogprobs:
    content = []
    for token, position in zip(ids, positions, strict=True):
        known = position or {}
        entry = _chat_entry(token, known[token].logprob if token in known else LOWEST, spell)
        likeliest = sorted(known.items(), key=lambda item: -_floor(item[1].logprob))[:top]
        entry.top_logprobs = [
            _chat_entry(other, value.logprob, spell) for other, value in likeliest
        ]
        content.append(entry)
    return ChatLogprobs(content)


def _chat_entry(token: int, logprob: float, spell: Spelling) -> TokenLogprob:
    return TokenLogprob(spell.text(token), _floor(logprob), spell.bytes(token))


def prompt_logprobs(positions: Positions, spell: Spelling) -> PromptLogprobs:
    """Returns vLLM's prompt_logprobs: a position is null or has its tokens by id."""
    return [None if position is None else _vllm_position(position, spell) for position in positions]


def _vllm_position(position: PositionLogprobs, spell: Spelling) -> dict[str, PromptLogprob]:
    return {
        str(token): PromptLogprob(_floor(value.logprob), value.rank, spell.text(token))
        for token, value in position.items()
    }
