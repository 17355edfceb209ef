"""LazyLogprobs: logprobs of a sample, kept in arrays. The dict of one position is made when it is
read.

    output.logprobs[3] -> {token: Logprob, ...}

A step of 8,192 rows would otherwise make 8,192 dicts, few of which are ever read. Knows numbers and
how a token is spelt; no samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from penstock.request import Logprob, PositionLogprobs
from penstock.schedule.deltas import Deltas, PromptNews

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


# arrays of t tokens: ids [t], chosen logprobs [t], ranks [t]; k likely ids [t, k], their logprobs
# [t, k]
Columns = tuple[NDArray[Any], ...]


class LazyLogprobs(Sequence[PositionLogprobs]):
    """Logprobs of t tokens. Compares equal to a list of the same dicts, and is copied and pickled
    as one."""

    def __init__(
        self, columns: Columns, spell: Callable[[int], str] | None, *, ranked: bool = True
    ) -> None:
        """ranked: True if top_ids are the most likely tokens in order; False if they are the tokens
        named by the request (logprob_token_ids)."""
        self._columns, self._spell, self._ranked = columns, spell, ranked

    @classmethod
    def of(
        cls,
        up: Deltas,
        i: int,
        k: int,
        tokenizer: Tokenizer | None,
        *,
        brief: bool = False,
        ranked: bool = True,
    ) -> LazyLogprobs:
        """Returns the logprobs of entry i of a message, with the k most likely tokens (or the
        tokens that the request names). Its arrays are copied, so that one sample doesn't keep the
        whole message in memory. brief: True: no copy, for an event that is dropped once sent."""
        assert (
            up.chosen is not None
            and up.rank is not None
            and up.top_ids is not None
            and up.top is not None
        ), "tokens came up without the logprobs that were asked for"
        mine = slice(up.start[i], up.start[i + 1])
        views = (
            up.tokens[mine],
            up.chosen[mine],
            up.rank[mine],
            up.top_ids[mine, :k],
            up.top[mine, :k],
        )
        spell = None if tokenizer is None else tokenizer.token_text
        return cls(views if brief else tuple(view.copy() for view in views), spell, ranked=ranked)

    @classmethod
    def of_prompt(
        cls, prompt: list[int], news: PromptNews, k: int, tokenizer: Tokenizer | None
    ) -> LazyLogprobs | None:
        """Returns the logprobs of prompt tokens 1, 2, ...; None if `news` has none."""
        if news.chosen is None or news.rank is None or news.top_ids is None or news.top is None:
            return None
        spell = None if tokenizer is None else tokenizer.token_text
        tokens = np.array(prompt[1:], np.int32)
        return cls((tokens, news.chosen, news.rank, news.top_ids[:, :k], news.top[:, :k]), spell)

    @classmethod
    def joined(cls, parts: list[LazyLogprobs]) -> LazyLogprobs:
        """Returns the parts of one sample joined in order; needs at least one part. Parts without
        tokens may have any width."""
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part._columns for part in parts), strict=True)
        return parts[0]._like(np.concatenate(column) for column in columns)

    def apart(self) -> LazyLogprobs:
        """Returns a copy that keeps no message in memory, for logprobs made with `brief` that have
        to wait."""
        return self._like(column.copy() for column in self._columns)

    def _like(self, columns: Iterable[NDArray[Any]]) -> LazyLogprobs:
        return LazyLogprobs(tuple(columns), self._spell, ranked=self._ranked)

    @property
    def columns(self) -> Columns:
        """The arrays, read-only, for code that writes many tokens and needs no object per token."""
        return self._columns

    def added_to(self, total: float) -> float:
        """Returns `total` plus the chosen tokens' logprobs, summed in order: the same result in
        parts or whole."""
        return float(np.cumsum(np.concatenate(([total], self._columns[1])), dtype=np.float64)[-1])

    def __len__(self) -> int:
        return int(self._columns[0].size)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> LazyLogprobs: ...

    def __getitem__(self, at: int | slice) -> PositionLogprobs | LazyLogprobs:
        if isinstance(at, slice):
            if at.indices(len(self)) == (0, len(self), 1):
                return self  # immutable: no copy needed
            return self._like(column[at] for column in self._columns)
        # negative indices count from the end; raises IndexError like a list
        at = range(len(self))[at]
        (position,) = self[at : at + 1]
        return position

    def __iter__(self) -> Iterator[PositionLogprobs]:
        """Yields a dict per token: the token itself and the k most likely, most likely first, like
        vLLM's."""
        spell = self._spell if self._spell is not None else _unspelt
        for token, chosen, rank, ids, values in zip(
            *(column.tolist() for column in self._columns), strict=True
        ):
            found: PositionLogprobs = {token: Logprob(chosen, rank, spell(token))}
            for place, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
                if other >= 0 and other != token:
                    found[other] = Logprob(value, place if self._ranked else None, spell(other))
            yield found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyLogprobs | list):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class GrowingLogprobs:
    """Collects the logprobs of a sample that arrives in parts, in arrays that double in size, so
    that parts are not copied again each time."""

    def __init__(self) -> None:
        self._last: LazyLogprobs | None = None  # the last part, whose tokenizer is used
        self._held: list[NDArray[Any]] = []  # columns of logprobs, with spare room at the end
        self._count = 0

    def add(self, part: LazyLogprobs) -> None:
        """Appends a copy of the sample's next logprobs."""
        start, self._count, self._last = self._count, self._count + len(part), part
        if not start:
            self._held = [column.copy() for column in part.columns]
            return
        if self._count > len(self._held[0]):
            room = 2 * self._count
            self._held = [np.resize(column, (room, *column.shape[1:])) for column in self._held]
        for held, column in zip(self._held, part.columns if len(part) else (), strict=False):
            held[start : self._count] = column

    def so_far(self) -> LazyLogprobs:
        """Returns the logprobs of all parts so far, as views; later parts don't change them."""
        assert self._last is not None, "there was no part"
        return self._last._like(column[: self._count] for column in self._held)


def _unspelt(_: int) -> None:
    return None
