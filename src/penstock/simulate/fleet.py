"""Fleet: simulated replicas behind the real router. They share one virtual clock.

    arrival -> Router.route -> a part for each replica that takes samples -> ModelledReplica ->
    FleetOutcome

A load is the list of simulated requests (AskedLoad). A job's requests have no arrival times:
replicas get requests whenever they have room (Router.room), as in `penstock run`. Replicas send
stats to the router as often as an engine does. Requests that arrive while no replica is up are
held. Knows loads and replicas; no goals.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.schedule.replica_router import Router, Share
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.simulate.asked_load import AskedLoad, Float64
from penstock.simulate.modelled_replica import ModelledReplica
from penstock.simulate.scaling import Scaler, Scaling
from penstock.simulate.step_costs import StepCosts

# turns that one replica runs before the next replica does; its data is then in the CPU's caches
FEW_TURNS = 4
STATS_EVERY = 0.1  # seconds between two stats messages, as in engine/process.py
# samples of a job that a replica gets in advance, as a multiple of its rows; LLM.stream uses the
# same
AHEAD = 2


@dataclass(slots=True, kw_only=True)
class FleetOutcome:
    """The result of a load: times in seconds from its beginning, NaN where the simulation ended
    before."""

    load: AskedLoad
    first: Float64  # [requests] time at which the first sample's first token was read
    end: Float64  # [requests] time at which the last sample ended
    seconds: float  # seconds from the first arrival to the last end
    output_tokens: int
    busy: list[float]  # seconds in which each replica's device had work
    up: float  # seconds in which replicas were up or starting, summed over replicas
    steps: int
    preemptions: int


class Fleet:
    """`count` identical replicas, which serve one load. scaling: the number of replicas over time;
    None: all, always. shortcuts: as in ModelledReplica."""

    def __init__(
        self,
        load: AskedLoad,
        limits: SchedulerConfig,
        costs: StepCosts,
        count: int = 1,
        steps_ahead: int = 1,
        *,
        scaling: Scaling | None = None,
        shortcuts: bool = True,
    ) -> None:
        # A cache that can find nothing is left out.
        self.load, limits = (
            load,
            replace(limits, prefix_caching=limits.prefix_caching and load.shares),
        )
        self.limits = limits
        # Block tables as short as the load's longest row stay in the CPU's caches.
        short = replace(limits, max_model_len=min(limits.max_model_len, load.reach()))
        self.replicas = [
            ModelledReplica(load, short, costs, steps_ahead, shortcuts=shortcuts)
            for _ in range(count)
        ]
        self.router = Router(count)
        self._blocks = (
            limits.num_blocks // (1 + limits.window_tables) if limits.prefix_caching else 0
        )
        self._scaler = None if scaling is None else Scaler(scaling, count)
        for number in range(count if scaling is None else 0):
            self.router.came_up(number, self._blocks)
        self._told = [0.0] * count
        self._open = [0] * count  # number of samples of each replica that have not ended
        self._next = 0  # index of the request that arrives next
        self._held: deque[int] = deque()  # requests that arrived while no replica was up
        self._left: list[int] = load.samples.tolist()
        # per replica: request number in the load -> its number at the replica
        self._parts: list[dict[int, int]] = [{} for _ in range(count)]
        # (time, ended samples, tokens) of each step that was read
        self._done: list[tuple[float, int, int]] = []
        self.first = np.full(len(load), np.nan)
        self.end = np.full(len(load), np.nan)

    def run(
        self, until: float = np.inf, watch: Callable[[float], object] = lambda now: None
    ) -> FleetOutcome:
        """Runs all replicas until everything is done, the time is past `until`, or `watch` returns
        True. watch: called with the virtual time now and then."""
        turns, now = 0, 0.0
        while now <= until:
            working = [
                (replica.now, number)
                for number, replica in enumerate(self.replicas)
                if replica.has_work
            ]
            soon, number = min(working, default=(np.inf, 0))
            coming, look = self._coming(), self._look(bool(working))
            if soon < min(coming, look):
                now = soon
                turns += self._turns(number, min(coming, look))
                if turns % 1024 < FEW_TURNS and watch(now) is True:
                    break
            elif coming <= look and coming < np.inf:
                self._take(coming)
            elif look < np.inf:
                now = look
                self._scale(look)
            else:
                break
        return self._outcome(now)

    def rate_between(self, few: int, many: int) -> float:
        """Returns the tokens a second of all replicas between the times at which `few` and `many`
        samples had ended."""
        when, samples, tokens = (
            np.array(column) for column in zip(*sorted(self._done), strict=True)
        )
        ended = np.cumsum(samples)
        low, high = (int(np.searchsorted(ended, count)) for count in (few, many))
        return float(tokens[low + 1 : high + 1].sum() / (when[high] - when[low]))

    # --- arrivals and routing of requests ---------------------------------------------------------

    def _coming(self) -> float:
        """Returns the arrival time of the next request; infinity if there is none, or if a job's
        next request waits until a replica has room."""
        if self._next == len(self.load):
            return np.inf
        if not self.load.at_once:
            return float(self.load.arrival[self._next])
        return -np.inf if self._wanting() else np.inf

    def _take(self, now: float) -> None:
        number, load = self._next, self.load
        self._next += 1
        if load.at_once:
            among = self._wanting()
            now = min(self.replicas[each].now for each in among)
        elif not (among := self._up()):
            self._held.append(number)
            return
        self._send(number, now, among)

    def _send(self, number: int, now: float, among: Sequence[int]) -> None:
        samples = int(self.load.samples[number])
        for share, mine in self._shares(number, samples, among, self._whole()):
            taken = list(mine) if len(mine) < samples else None
            name = self.replicas[share.replica].submit(self.load, number, now, taken)
            self.router.sent(share, name)
            self._parts[share.replica][number] = name
            self._open[share.replica] += len(mine)

    def _up(self) -> list[int]:
        return list(range(len(self.replicas))) if self._scaler is None else self._scaler.up

    def _shares(
        self, number: int, samples: int, among: Sequence[int], whole: bool
    ) -> list[tuple[Share, range]]:
        """Divides a request among the replicas `among`; returns each share with the range of its
        sample indices."""
        if len(self.replicas) == 1:
            return [(Share(0, samples, 0.0, 0), range(samples))]
        load, room = self.load, self.limits.max_model_len - int(self.load.prompt[number])
        limit, exact = int(load.limit[number]), not load.limit[number]
        most = (
            int(load.output[load.start[number] : load.start[number + 1]].max()) if exact else limit
        )
        expected = self.router.expected_tokens(min(most, room), runs_on=exact)
        prompt = load.prompt_ids(number).tolist()
        shares = self.router.route(prompt, 0, samples, expected, among, whole=whole)
        stops = np.cumsum([share.samples for share in shares]).tolist()
        return [
            (share, range(stop - share.samples, stop))
            for share, stop in zip(shares, stops, strict=True)
        ]

    def _whole(self) -> bool:
        """Returns True if all samples of the next request must go to one replica. In a job this
        holds for all but the last requests, as in llm/replicas.py."""
        return self.load.at_once and len(self.load) - self._next >= len(self.replicas)

    def _wanting(self) -> list[int]:
        rows, longest = self.limits.max_rows, self.limits.max_model_len
        if len(self.replicas) == 1:
            return [0] if self._open[0] < AHEAD * rows else []
        room = self.router.room(rows, longest)
        return [number for number, mine in enumerate(self._open) if mine < room]

    def _turns(self, number: int, coming: float) -> int:
        """Runs a few turns of replica `number` (a turn is one pass of its engine's loop), at most
        until the next arrival; returns their number."""
        replica, turns = self.replicas[number], 0
        while turns < FEW_TURNS and replica.has_work and replica.now < coming:
            self._turn(number, coming)
            turns += 1
        return turns

    def _turn(self, number: int, coming: float) -> None:
        replica, alone = self.replicas[number], len(self.replicas) == 1
        news = replica.turn(coming if alone else min(coming, self._told[number] + STATS_EVERY))
        if news is not None:
            if news.first.size:
                first = news.first[np.isnan(self.first[news.first])]
                self.first[first] = replica.now
            self._done.append((replica.now, len(news.ended), news.tokens))
            self._open[number] -= len(news.ended)
            for request, count in Counter(news.ended).items():
                self._left[request] -= count
                if not self._left[request]:
                    self.end[request] = replica.now
                    if not alone:
                        self._over(request)
        if not alone and (not replica.has_work or replica.now - self._told[number] > STATS_EVERY):
            self._told[number] = replica.now
            self.router.said(number, replica.stats(), replica.heard)

    def _over(self, request: int) -> None:
        for replica, parts in enumerate(self._parts):
            if (name := parts.pop(request, None)) is not None:
                self.router.ended(replica, name)

    # --- replicas that start and end --------------------------------------------------------------

    def _look(self, working: bool) -> float:
        """Adjusts the number of replicas; returns the time of the next adjustment, infinity when
        everything is done."""
        if self._scaler is None or not (working or self._held or self._next < len(self.load)):
            return np.inf
        return self._scaler.next_look

    def _scale(self, now: float) -> None:
        assert self._scaler is not None
        drain = sum(self.router.drain(each) for each in self._scaler.up)
        opened = any(self._open) or bool(self._held)
        change = self._scaler.look(
            now, drain, opened, [each for each, mine in enumerate(self._open) if not mine]
        )
        for number in change.came_up:
            self.replicas[number].now = now
            self.router.came_up(number, self._blocks)
        for number in change.went_down:
            self.router.went_down(number)
        while self._held and self._scaler.up:
            self._send(self._held.popleft(), now, self._scaler.up)

    @property
    def counts(self) -> list[tuple[float, int]]:
        """Returns (time, replicas up or starting) for each change of the number."""
        return [] if self._scaler is None else self._scaler.counts

    def _outcome(self, now: float) -> FleetOutcome:
        begin = 0.0 if self.load.at_once else float(self.load.arrival[0])
        over = now if np.isnan(self.end).any() else float(self.end.max())
        seconds = max(over - begin, 1e-9)
        return FleetOutcome(
            load=self.load,
            first=self.first,
            end=self.end,
            seconds=seconds,
            output_tokens=sum(each.scheduler.counts["generation_tokens"] for each in self.replicas),
            busy=[each.busy for each in self.replicas],
            up=(
                seconds * len(self.replicas)
                if self._scaler is None
                else self._scaler.up_seconds(over)
            ),
            steps=sum(each.steps for each in self.replicas),
            preemptions=sum(each.scheduler.preempter.preemptions for each in self.replicas),
        )
