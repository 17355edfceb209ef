"""StepCosts: estimates a step's seconds from timed steps.

A step's seconds are a sum. Each part comes from timed steps that differ in that part alone, with
linear interpolation:

    rows       by the tokens that each row reads alone, and by how far these numbers spread
    prompts    added by the prompt tokens beside the rows, for prompts of usual length
    chunks     added by more prompts, or longer ones: by prompts, and by pairs of a token and a
               token before it
    groups     added by a prefix that rows read together: by rows, and by pairs of a row and a
               token, in steps of few rows and of many

A step that is launched while the device is busy takes less of the device's time than one launched
on an idle device, which waits for the host: `waits` gives the difference.

Lines are extended past the last timed step up to twice its tokens, since K and V are read at one
rate; numbers of rows are not extended. A step outside is refused with a message. Knows a table and
step plans; no scheduler, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.artifact.manifest import USUAL_PROMPT, StepSeconds
from penstock.errors import UsageError
from penstock.schedule.step import Chunks, Int32, Int64, StepPlan

BEYOND = 2.0  # a line is extended to this many times the tokens of its last timed step
Float64 = NDArray[np.float64]


class _Line:
    """Linear interpolation through at least two points; the outer segments are extended."""

    def __init__(self, points: Mapping[int, float]) -> None:
        x, y = np.array(sorted(points), float), np.array([points[each] for each in sorted(points)])
        self.last = float(x[-1])
        self._x, self._y, self._slope = x, y, np.diff(y) / np.diff(x)
        self._xs: list[float] = x.tolist()
        self._ys: list[float] = y.tolist()
        self._slopes: list[float] = self._slope.tolist()

    def one(self, x: float) -> float:
        """Returns the value at one x, in a tenth of the time of `at`."""
        place = min(max(bisect_left(self._xs, x), 1), len(self._xs) - 1) - 1
        return self._ys[place] + (x - self._xs[place]) * self._slopes[place]

    def at(self, x: Float64) -> Float64:
        place = np.clip(np.searchsorted(self._x, x), 1, self._x.size - 1) - 1
        found: Float64 = self._y[place] + (x - self._x[place]) * self._slope[place]
        return found


class _Sheet:
    """Lines (seconds by tokens) at several numbers of rows, with linear interpolation between
    them."""

    def __init__(self, lines: Mapping[int, Mapping[int, float]]) -> None:
        self._lines = {
            rows: _Line(points) for rows, points in sorted(lines.items()) if len(points) > 1
        }
        self.rows = list(self._lines)

    def one(self, rows: int, x: float) -> float:
        """Returns the seconds at this number of rows, which must lie within the sheet."""
        low, high, part = self._between(rows)
        below = low.one(x)
        return below + (high.one(x) - below) * part if part else below

    def at(self, rows: int, x: Float64) -> Float64:
        """Returns the seconds at this number of rows, for each of x (tokens)."""
        low, high, part = self._between(rows)
        below = low.at(x)
        return below + (high.at(x) - below) * part if part else below

    def _between(self, rows: int) -> tuple[_Line, _Line, float]:
        """Returns the lines on both sides, and the fraction of the way from the first to the
        second."""
        place = bisect_left(self.rows, rows)
        high = self.rows[place]
        low = high if high == rows else self.rows[place - 1]
        return (
            self._lines[low],
            self._lines[high],
            0.0 if low == high else (rows - low) / (high - low),
        )

    def reach(self, rows: int) -> float:
        """Returns the largest x that is covered at this number of rows; -1: none."""
        if not self.rows or not self.rows[0] <= rows <= self.rows[-1]:
            return -1.0
        return BEYOND * self._lines[self.rows[bisect_right(self.rows, rows) - 1]].last


class _Groups:
    """The cost of prefix groups in steps with a given number of rows. Tables by the number of
    members of a group, [members + 1], hold the seconds per row, and the seconds per pair of a row
    and a shared token. They are interpolated over the logarithm of the members.
    """

    def __init__(self, rows: int, extra: Mapping[int, Mapping[int, float]]) -> None:
        """Fits the costs. extra: members -> shared tokens -> seconds a row."""
        self.rows = rows
        timed, by_row, by_shared = list[int](), list[float](), list[float]()
        for members, points in sorted(extra.items()):
            (few, cheap), (many, dear) = (f(points.items()) for f in (min, max))
            timed.append(members)
            by_shared.append(max(0.0, dear - cheap) / (many - few) if many > few else dear / many)
            by_row.append(max(0.0, dear - by_shared[-1] * many))
        every = np.log(np.maximum(1, np.arange(timed[-1] + 1)))
        self._by_row, self._by_shared = (
            np.interp(every, np.log(timed), each) for each in (by_row, by_shared)
        )

    def seconds(self, members: Int32, pairs: Int64) -> float:
        """Returns the cost of groups, by their members [groups] and pairs [groups]. A group larger
        than any timed one costs as much a member as the largest timed one."""
        each = np.minimum(members, self._by_row.size - 1)
        return float(self._by_row.take(each) @ members + self._by_shared.take(each) @ pairs)


class StepCosts:
    """A table, prepared for lookups. name: the table's origin; more: how to measure a larger table.
    Both are for error messages."""

    def __init__(self, table: StepSeconds, name: str, more: str) -> None:
        self._name, self._more = name, more
        none = [0] * len(table.rows)
        columns = (
            table.rows,
            table.context,
            table.prompt_tokens,
            table.prompt_length or none,
            table.shared or none,
            table.members or none,
            table.spread or none,
        )
        steps = list(zip(*columns, strict=True))
        self._seen = dict(zip(steps, table.seconds, strict=True))
        device = dict(zip(steps, table.device_seconds or table.seconds, strict=True))
        plain: dict[int, dict[int, float]] = defaultdict(dict)
        for (rows, context, prompts, _, shared, _, spread), seconds in self._seen.items():
            if rows and not prompts and not shared and not spread:
                plain[rows][context] = seconds
        self._plain = _Sheet(plain)
        if not self._plain.rows:
            raise UsageError(f"{name} times no step of rows at two contexts: {more}")
        self._spread_rows, self._by_spread = self._spread_timed()
        self._prompts, self._waits = map(_Sheet, self._beside(device))
        self._by_prompt, self._by_pair = self._by_length()
        self._groups = self._groups_timed()
        self._group_rows = np.array([each.rows for each in self._groups])

    # --- the seconds of a step --------------------------------------------------------------------

    def seconds(self, plan: StepPlan) -> float:
        """Returns the seconds of a step. Raises UsageError for a step outside the table."""
        rows, found, shared, tokens = int(plan.rows.size), 0.0, 0, 0
        if plan.group_length.size:
            found, shared = self._together(plan)
        if rows:
            own = int(plan.lengths.sum(dtype=np.int64)) - shared
            self._check(rows, own / rows)
            found += self._plain.one(rows, own / rows) + self._apart(plan)
        if plan.chunks is not None and (tokens := plan.chunks.tokens.size):
            found += self._chunks(rows, tokens, plan.chunks)
        return found

    def waits(self, plan: StepPlan) -> float:
        """Returns how many of a step's seconds an idle device waits for the launch."""
        if plan.chunks is None or not (tokens := plan.chunks.tokens.size):
            return 0.0
        return max(0.0, self._waits.one(plan.rows.size, tokens))

    def next_seconds(self, plan: StepPlan, steps: int) -> Float64:
        """Returns the seconds of the steps after this one [steps], each with one more token a row
        and no prompts."""
        together, shared = self._together(plan) if plan.group_length.size else (0.0, 0)
        own = (int(plan.lengths.sum(dtype=np.int64)) - shared) / plan.rows.size
        contexts: Float64 = own + np.arange(1.0, steps + 1)
        self._check(plan.rows.size, float(contexts[-1]))
        return self._plain.at(plan.rows.size, contexts) + together + self._apart(plan)

    def _check(self, rows: int, context: float) -> None:
        """Raises UsageError for a step of this many rows at this mean context if it is outside the
        table."""
        if context > (reach := self._plain.reach(rows)):
            few, many = self._plain.rows[0], self._plain.rows[-1]
            has = f"{few:,} to {many:,} rows"
            if reach >= 0:
                has = f"at most {reach / BEYOND:,.0f} tokens each at so many rows"
            raise UsageError(
                f"{self._name} has steps of {has}, and this load makes one of {rows:,} rows at"
                f" {context:,.0f} tokens each: {self._more}, or bound it (--max-num-seqs,"
                " --max-model-len)"
            )

    def _apart(self, plan: StepPlan) -> float:
        """Returns the seconds added because the rows' context lengths differ."""
        if not self._spread_rows.size:
            return 0.0
        own = plan.lengths.astype(np.float32)
        if plan.group_length.size:
            own[: plan.group_start[-1]] -= plan.group_skip
        own -= own.sum() / own.size
        # half-width of the even distribution that has the rows' standard deviation; np.std is
        # slower
        evenly = math.sqrt(3 * float(own @ own) / own.size)
        return evenly * float(np.interp(plan.rows.size, self._spread_rows, self._by_spread))

    def _chunks(self, rows: int, tokens: int, chunks: Chunks) -> float:
        if tokens > self._prompts.reach(rows):
            raise UsageError(
                f"{self._name} has no steps of {tokens:,} prompt tokens beside {rows:,} rows:"
                f" {self._more}, or bound them (--max-num-batched-tokens, --max-num-seqs)"
            )
        sizes = np.diff(chunks.start).astype(np.int64)
        pairs = int((sizes * chunks.context + sizes * (sizes + 1) // 2).sum())
        usual = min(USUAL_PROMPT, tokens)
        more = float(self._by_prompt) * (sizes.size - tokens / usual)
        more += float(self._by_pair) * (pairs - tokens * (usual + 1) / 2)
        return max(0.0, self._prompts.one(rows, tokens) + more)

    def _together(self, plan: StepPlan) -> tuple[float, int]:
        """Returns the seconds that prefix groups add to a step, and their number of pairs of a row
        and a prefix token."""
        members = plan.group_start[1:] - plan.group_start[:-1]
        pairs, rows = members * plan.group_length.astype(np.int64), plan.rows.size
        if not self._groups:
            raise UsageError(
                f"{self._name} has no steps of rows that share a prefix, and this load makes some:"
                f" {self._more}, or leave sharing out (--prefix-groups off)"
            )
        # Scale the groups to each timed step's number of rows and interpolate between them; beyond
        # both ends the cost is proportional to the rows.
        seconds = np.array(
            [each.seconds(members, pairs) * each.rows / rows for each in self._groups]
        )
        near = min(max(rows, self._groups[0].rows), self._groups[-1].rows)
        return float(np.interp(near, self._group_rows, seconds) * rows / near), int(pairs.sum())

    # --- tables that are made once ----------------------------------------------------------------

    def _spread_timed(self) -> tuple[Float64, Float64]:
        """Returns timed numbers of rows, and for each the added seconds per token of `spread`
        (StepSeconds)."""
        found = {}
        for (rows, context, *_, spread), seconds in self._seen.items():
            if spread and self._plain.rows[0] <= rows <= self._plain.rows[-1]:
                found[rows] = max(0.0, seconds - self._plain.one(rows, context)) / spread
        return np.array(sorted(found), float), np.array(
            [found[rows] for rows in sorted(found)], float
        )

    def _beside(self, device: Mapping[tuple[int, ...], float]) -> list[dict[int, dict[int, float]]]:
        """Returns two maps, rows -> prompt tokens -> seconds: the seconds that prompts add to a
        step, and the part of them in which the device waits for the host. 0 tokens add 0."""
        found, waits = (defaultdict[int, dict[int, float]](lambda: {0: 0.0}) for _ in range(2))
        for step, seconds in self._seen.items():
            rows, context, prompts, length, *_ = step
            if prompts and length == min(prompts, USUAL_PROMPT) and rows <= self._plain.rows[-1]:
                alone = self._plain.one(rows, context) if rows else 0.0
                added, needed = (max(0.0, each - alone) for each in (seconds, device[step]))
                found[rows][prompts], waits[rows][prompts] = added, added - needed
        return [found, waits]

    def _by_length(self) -> tuple[float, float]:
        """Returns the seconds added by one more prompt at the same total of prompt tokens, and by
        one more pair of a token and a token before it."""
        by_prompt, by_pair = 0.0, 0.0
        alone = {
            (n, length): s for (rows, _, n, length, *_), s in self._seen.items() if n and not rows
        }
        for tokens in sorted({n for n, _ in alone}):
            lengths = [length for n, length in alone if n == tokens]
            usual, short, long = min(USUAL_PROMPT, tokens), min(lengths), max(lengths)
            if (tokens, usual) not in alone:
                continue
            base = alone[tokens, usual]
            if short < usual:
                by_prompt = max(
                    0.0, (alone[tokens, short] - base) / (tokens / short - tokens / usual)
                )
            if long > usual:
                fewer = by_prompt * (tokens / usual - tokens / long)
                by_pair = max(
                    0.0, (alone[tokens, long] - base + fewer) / (tokens * (long - usual) / 2)
                )
        return by_prompt, by_pair

    def _groups_timed(self) -> list[_Groups]:
        """Returns the costs of prefixes in steps of each timed number of rows, fewest first."""
        extra: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for (rows, context, _, _, shared, members, _), seconds in self._seen.items():
            if members > 1:
                alone = self._plain.one(rows, context)
                extra[rows][members][shared] = max(0.0, seconds - alone) / rows
        return [_Groups(rows, by_members) for rows, by_members in sorted(extra.items())]
