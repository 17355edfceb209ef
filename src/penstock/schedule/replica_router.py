"""Router: chooses the replica for a request. It estimates the seconds that each replica needs for
its open requests: tokens that the replica reported, prompt tokens that its prefix cache lacks, and
requests sent to it that its reports do not include yet.

    stats -> said; request -> route -> Share (one per replica that takes part) -> sent

Samples of a request are shared out so that all replicas finish at about the same time. Each replica
that takes part prefills the prompt, so a part is split off only if it saves more time than its
prefill costs. All replicas are alike, so their mean seconds per token are used; one replica's bad
measurement then attracts no extra work. Knows numbers and token ids; no clock, no engine, no
connection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config import BLOCK_SIZE

# a replica whose samples that wait for rows need fewer seconds gets more of a job's requests
FEW_SECONDS = 4.0
_UNMEASURED = 1e-3  # seconds per drawn or prompt token until an engine has reported its own
# expected length as a fraction of the limit until a sample has ended (same as the engine's
# forecast)
_GUESS = 0.5


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of a request: the number of samples, and the tokens it is expected to draw
    and to prefill."""

    replica: int
    samples: int
    tokens: float
    prompt_tokens: int


@dataclass(slots=True)
class _Load:
    """State of one replica, as the router knows it."""

    up: bool = False
    tokens: float = 0.0  # tokens still to be drawn, as the replica reported last
    prompt_tokens: float = 0.0  # tokens still to be prefilled, as the replica reported last
    # request number -> its share, for requests that the replica's reports do not include yet
    unheard: dict[int, Share] = field(default_factory=dict)
    # sum of tokens in `unheard`; kept because a burst of thousands of requests reads it each time
    sent_tokens: float = 0.0
    sent_prompt_tokens: int = 0
    blocks: int = 0  # capacity of its prefix cache in blocks
    # number of a prompt's block (places_of) -> clock when it was last sent to the replica
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    last: int = 0  # clock when a request was last sent to it
    token_seconds: float = 0.0  # seconds per drawn token; 0: unknown
    prompt_token_seconds: float = 0.0
    step_seconds: float = 0.0
    mean: float = 0.0  # mean output tokens of the replica's finished samples

    def send(self, number: int, share: Share) -> None:
        self.unheard[number] = share
        self.sent_tokens += share.tokens
        self.sent_prompt_tokens += share.prompt_tokens

    def forget(self, number: int) -> None:
        """Drops a request that the replica's report now includes, or that is over."""
        share = self.unheard.pop(number, None)
        if share is not None:
            # reset to 0 when empty, so that no rounding error stays
            self.sent_tokens = self.sent_tokens - share.tokens if self.unheard else 0.0
            self.sent_prompt_tokens -= share.prompt_tokens


class Router:
    """Routes requests over `count` replicas, which are all down at first. first: the replica for
    the first request; each of several routing processes has another one."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._loads = [_Load(last=(number - first) % count - count) for number in range(count)]
        self._means: dict[str, float] = {}
        self._clock = 0  # number of requests routed so far

    # --- state of replicas

    def came_up(self, replica: int, blocks: int) -> None:
        """Marks a replica as up: no work, and an empty prefix cache of `blocks` blocks (0: no
        cache)."""
        self._means.clear()
        self._loads[replica] = _Load(up=True, blocks=blocks, last=self._loads[replica].last)

    def went_down(self, replica: int) -> None:
        """Marks a replica as down: it gets no more requests."""
        self._means.clear()
        self._loads[replica].up = False

    def said(self, replica: int, stats: Mapping[str, float], heard: int) -> None:
        """Stores an engine's stats. heard: they account for this router's requests 0 to heard - 1;
        later ones are still on their way to the engine."""
        self._means.clear()
        load = self._loads[replica]
        load.tokens, load.prompt_tokens = stats["tokens_left"], stats["prompt_tokens_left"]
        load.token_seconds, load.step_seconds = stats["token_seconds"], stats["step_seconds"]
        load.prompt_token_seconds, load.mean = (
            stats["prompt_token_seconds"],
            stats["mean_output_tokens"],
        )
        for number in [known for known in load.unheard if known < heard]:
            load.forget(number)

    def drain(self, replica: int) -> float:
        """Returns the seconds until all known work of a replica is done at full load."""
        load = self._loads[replica]
        tokens, prompts = (
            load.tokens + load.sent_tokens,
            load.prompt_tokens + load.sent_prompt_tokens,
        )
        return tokens * self.token_seconds + prompts * self.prompt_token_seconds

    @property
    def token_seconds(self) -> float:
        """Seconds per drawn token of a fully loaded replica."""
        return self._mean("token_seconds") or _UNMEASURED

    @property
    def prompt_token_seconds(self) -> float:
        """Mean seconds that replicas need per prompt token."""
        return self._mean("prompt_token_seconds") or _UNMEASURED

    def expected_tokens(self, limit: int, *, runs_on: bool = False) -> float:
        """Returns the expected tokens of a sample with limit `limit`. runs_on: True if it ignores
        end-of-sequence ids."""
        mean = self._mean("mean")
        return float(limit) if runs_on else max(1.0, min(limit, mean) if mean else limit * _GUESS)

    def room(self, rows: int, longest: int) -> float:
        """Returns the number of samples up to which a replica with `rows` rows would, within a few
        seconds, have free rows or almost no waiting work. longest: most tokens of one sample."""
        each = self.expected_tokens(longest) * self.token_seconds
        return rows + min(FEW_SECONDS / each, rows)

    def _mean(self, name: str) -> float:
        """Mean over replicas that are up and have reported a value; cached until the next report,
        since each request reads it many times."""
        if name not in self._means:
            known = [value for load in self._loads if load.up and (value := getattr(load, name))]
            self._means[name] = sum(known) / len(known) if known else 0.0
        return self._means[name]

    # --- choosing replicas for requests

    def route(
        self,
        prompt: Sequence[int],
        salt: int,
        samples: int,
        tokens: float,
        among: Collection[int],
        *,
        whole: bool = False,
    ) -> list[Share]:
        """Shares a request out over the replicas `among`, all up: `samples` samples of `tokens`
        expected tokens each. whole: keep all samples on one replica."""
        if len(self._loads) == 1:
            return [Share(0, samples, samples * tokens, len(prompt))]
        places = places_of(prompt, salt) if any(load.blocks for load in self._loads) else []
        hits = {replica: self._hit(replica, places) for replica in among}
        left = {
            replica: max(0, len(prompt) - 1 - hit * BLOCK_SIZE)
            for replica, (hit, _) in hits.items()
        }
        price = {replica: count * self.prompt_token_seconds for replica, count in left.items()}
        start = {replica: self.drain(replica) + price[replica] for replica in among}
        each = tokens * self.token_seconds
        if whole or samples == 1 or len(start) == 1:
            counts = {self._first(start, hits): samples}
        else:
            order = sorted(
                start,
                key=lambda replica: (start[replica], -hits[replica][1], self._loads[replica].last),
            )
            found = fill([start[r] for r in order], [price[r] for r in order], each, samples)
            counts = {replica: count for replica, count in zip(order, found, strict=True) if count}
        for replica in counts:
            self._note(replica, places)
        return [
            Share(replica, count, count * tokens, left[replica])
            for replica, count in counts.items()
        ]

    def sent(self, share: Share, number: int) -> None:
        """Notes that a share was sent as this router's request `number` to its replica."""
        self._loads[share.replica].send(number, share)

    def ended(self, replica: int, number: int) -> None:
        """Notes that this router's request `number` to the replica is over."""
        self._loads[replica].forget(number)

    def _first(self, start: Mapping[int, float], hits: Mapping[int, tuple[int, int]]) -> int:
        """Returns the replica that would begin first. Differences below one step don't count: then
        the replica with more of the prompt cached, then with the latest use of it, then the one
        idle for longest."""
        least = min(start.values()) + self._mean("step_seconds")
        level = [replica for replica, seconds in start.items() if seconds <= least]
        return max(level, key=lambda replica: (hits[replica], -self._loads[replica].last))

    def _hit(self, replica: int, places: Sequence[int]) -> tuple[int, int]:
        """Returns the number of leading blocks of a prompt sent to this replica before, and when
        the last of them was sent."""
        cache, count, when = self._loads[replica].cache, 0, 0
        for place in places:
            known = cache.get(place)
            if known is None:
                break
            count, when = count + 1, known
        return count, when

    def _note(self, replica: int, places: Sequence[int]) -> None:
        load = self._loads[replica]
        self._clock += 1
        load.last = self._clock
        for place in reversed(
            places[: load.blocks]
            # blocks are evicted from a prompt's end, so the search stops at the first one that is
            # missing
        ):
            load.cache[place] = self._clock
            load.cache.move_to_end(place)
        while len(load.cache) > load.blocks:
            load.cache.popitem(last=False)


def places_of(prompt: Sequence[int], salt: int) -> list[int]:
    """Returns one number per full block of a prompt, except a block with its last token: a hash of
    all tokens up to the block's end."""
    places, place = [], -salt
    for at in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
        place = hash((place, *prompt[at - BLOCK_SIZE : at]))
        places.append(place)
    return places


def fill(start: Sequence[float], price: Sequence[float], each: float, samples: int) -> list[int]:
    """Returns the number of samples for each replica. start: seconds after which each replica would
    begin, prefill included, ascending. price: seconds of each replica's prefill. each: seconds of
    one sample. Minimises the last end plus all prefills: a further replica is used only if it
    brings the end forward by more than its prefill costs."""
    best, least = [samples], start[0] + samples * each + price[0]
    for count in range(2, len(start) + 1):
        shares = _level(start[:count], each, samples)
        used = [place for place, share in enumerate(shares) if share]
        cost = max(start[place] + shares[place] * each for place in used) + sum(
            price[place] for place in used
        )
        if cost < least:
            best, least = shares, cost
    return best + [0] * (len(start) - len(best))


def _level(start: Sequence[float], each: float, samples: int) -> list[int]:
    """Returns the number of samples for each replica that makes the last end as early as
    possible."""
    count, level = len(start), 0.0
    while True:  # replicas that would begin after the common end get none
        level = (sum(start[:count]) + samples * each) / count
        if start[count - 1] <= level:
            break
        count -= 1
    shares = [int((level - begin) / each) for begin in start[:count]]
    for _ in range(samples - sum(shares)):
        next_end = [start[place] + (share + 1) * each for place, share in enumerate(shares)]
        shares[next_end.index(min(next_end))] += 1
    return shares + [0] * (len(start) - count)
