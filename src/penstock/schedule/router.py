"""Router: which replica takes a request, by seconds: those of what a replica has before it, those
of the prompt's tokens that its prefix cache lacks, and those of what was sent to it and isn't in
its numbers yet.

    stats -> said; request -> route -> Share (one a replica that takes part) -> sent

The samples of a fork group are shared out as water finds its level: each part costs a prefill, and
a part that saves less than that stays with the others. All replicas are of one kind, so what a
token takes is their mean: one that measures badly draws no work by it. It knows numbers and token
ids; no clock, no engine, no connection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config import BLOCK_SIZE

FEW_SECONDS = 4.0  # of work that waits for rows: a replica that has less takes more of a job
_UNMEASURED = (
    1e-3  # seconds of a token, drawn or of a prompt, until an engine has said what they take
)
# of its limit is how long a sample gets, while none has ended (as the engine's own forecast has it)
_GUESS = 0.5


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica takes of a request: `samples` of them; tokens that it is expected to draw,
    and to prefill."""

    replica: int
    samples: int
    tokens: float
    prompt_tokens: int


@dataclass(slots=True)
class _Load:
    """A replica as it is known here."""

    up: bool = False
    tokens: float = 0.0  # to be drawn, as it said
    prompt_tokens: float = 0.0  # to be prefilled, as it said
    # by the request's number: sent, and not in those
    unheard: dict[int, Share] = field(default_factory=dict)
    sent_tokens: float = 0.0  # of all those: a burst is thousands, each of which asks
    sent_prompt_tokens: int = 0
    blocks: int = 0  # that its cache holds
    # place of a prompt's block -> when it was sent
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    last: int = 0  # when something was sent to it
    token_seconds: float = 0.0  # 0: not known
    prompt_token_seconds: float = 0.0
    step_seconds: float = 0.0
    mean: float = 0.0  # tokens of its finished samples

    def send(self, number: int, share: Share) -> None:
        self.unheard[number] = share
        self.sent_tokens += share.tokens
        self.sent_prompt_tokens += share.prompt_tokens

    def forget(self, number: int) -> None:
        """It was heard of, or is over."""
        share = self.unheard.pop(number, None)
        if share is not None:
            # no rounding is kept
            self.sent_tokens = self.sent_tokens - share.tokens if self.unheard else 0.0
            self.sent_prompt_tokens -= share.prompt_tokens


class Router:
    """Routes over `count` replicas, none of which is up at first. `first` takes the first request:
    where several processes route, each begins with another."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._loads = [_Load(last=(number - first) % count - count) for number in range(count)]
        self._means: dict[str, float] = {}
        self._clock = 0  # requests that were sent

    # --- what is known of replicas

    def came_up(self, replica: int, blocks: int) -> None:
        """It is ready, has no work, and its prefix cache, of so many blocks, is empty; 0: it keeps
        none."""
        self._means.clear()
        self._loads[replica] = _Load(up=True, blocks=blocks, last=self._loads[replica].last)

    def went_down(self, replica: int) -> None:
        """Nothing more is to be sent to it."""
        self._means.clear()
        self._loads[replica].up = False

    def said(self, replica: int, stats: Mapping[str, float], heard: int) -> None:
        """Takes an engine's stats in. heard: requests of ours that it had taken in when it said so,
        by their numbers from 0 on."""
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
        """Seconds until what it is known to have is done, were it fully loaded."""
        load = self._loads[replica]
        tokens, prompts = (
            load.tokens + load.sent_tokens,
            load.prompt_tokens + load.sent_prompt_tokens,
        )
        return tokens * self.token_seconds + prompts * self.prompt_token_seconds

    @property
    def token_seconds(self) -> float:
        """What a drawn token takes of a loaded replica's time."""
        return self._mean("token_seconds") or _UNMEASURED

    @property
    def prompt_token_seconds(self) -> float:
        """What a token of a prompt takes."""
        return self._mean("prompt_token_seconds") or _UNMEASURED

    def expected_tokens(self, limit: int, *, runs_on: bool = False) -> float:
        """Returns how many tokens a sample will get that may have `limit`. runs_on: it ignores ends
        of its own."""
        mean = self._mean("mean")
        return float(limit) if runs_on else max(1.0, min(limit, mean) if mean else limit * _GUESS)

    def room(self, rows: int, longest: int) -> float:
        """Samples of a job with fewer of which a replica of so many rows would have rows free, or
        next to nothing that waits for them, in a few seconds. longest: tokens that a sample may
        have."""
        each = self.expected_tokens(longest) * self.token_seconds
        return rows + min(FEW_SECONDS / each, rows)

    def _mean(self, name: str) -> float:
        """Over replicas that are up and have said it; kept until one says more: a request asks for
        it many times."""
        if name not in self._means:
            known = [value for load in self._loads if load.up and (value := getattr(load, name))]
            self._means[name] = sum(known) / len(known) if known else 0.0
        return self._means[name]

    # --- who takes what

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
        """Shares a request out over `among`, which are up: `samples` of `tokens` expected tokens
        each. whole: its samples stay together."""
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
        """It went out, as request `number` of ours to that replica."""
        self._loads[share.replica].send(number, share)

    def ended(self, replica: int, number: int) -> None:
        """Request `number` of ours to that replica is over."""
        self._loads[replica].forget(number)

    def _first(self, start: Mapping[int, float], hits: Mapping[int, tuple[int, int]]) -> int:
        """The one that would begin first. Less than a step apart is no difference: then the one
        that has more of the prompt, had it last, or has been sent nothing for longest."""
        least = min(start.values()) + self._mean("step_seconds")
        level = [replica for replica, seconds in start.items() if seconds <= least]
        return max(level, key=lambda replica: (hits[replica], -self._loads[replica].last))

    def _hit(self, replica: int, places: Sequence[int]) -> tuple[int, int]:
        """Blocks of a prompt that were sent to it before, and when the last of them was."""
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
        ):  # a block is forgotten before the one that it follows
            load.cache[place] = self._clock
            load.cache.move_to_end(place)
        while len(load.cache) > load.blocks:
            load.cache.popitem(last=False)


def places_of(prompt: Sequence[int], salt: int) -> list[int]:
    """Returns a number for each full block of a prompt, but for its last token, that stands for all
    up to there."""
    places, place = [], -salt
    for at in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
        place = hash((place, *prompt[at - BLOCK_SIZE : at]))
        places.append(place)
    return places


def fill(start: Sequence[float], price: Sequence[float], each: float, samples: int) -> list[int]:
    """Shares samples of `each` seconds out over replicas that would begin them at `start` seconds,
    in rising order, their prefill (`price`, seconds) in it. The last end and all prefills together
    are made small: a part comes to be where it brings the end forward by more than its prefill
    takes."""
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
    """Whole samples for each, so that the last one ends as early as can be."""
    count, level = len(start), 0.0
    while True:  # who begins behind the level gets none
        level = (sum(start[:count]) + samples * each) / count
        if start[count - 1] <= level:
            break
        count -= 1
    shares = [int((level - begin) / each) for begin in start[:count]]
    for _ in range(samples - sum(shares)):
        next_end = [start[place] + (share + 1) * each for place, share in enumerate(shares)]
        shares[next_end.index(min(next_end))] += 1
    return shares + [0] * (len(start) - count)
