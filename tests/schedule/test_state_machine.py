"""The scheduler against what each sample gives alone, with results 0 to 3 steps late, in pools that
are too small."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from fake_device import FakeDevice
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedule_drive import EOS, VOCAB, Drive, submit_random

from penstock.request import REST, SamplingParams
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.state_slots import first_snapshot

RANDOMS = st.randoms(use_true_random=False)


def limits_of(rng: random.Random) -> SchedulerConfig:
    longest = rng.choice([20, 96, 160])
    rows = rng.choice([1, 2, 4, 8, 12])
    return SchedulerConfig(
        num_blocks=-(-longest // 16) + 3 + rng.choice([0, 1, 4, 10, 20, 50]),
        max_rows=rows,
        max_model_len=longest,
        max_batched_tokens=rows + rng.choice([8, 16, 40]),
        mask_slots=rng.choice([1, 2, rows]),
        vocab_size=VOCAB,
        eos_token_ids=tuple(EOS),
        prefix_caching=rng.random() < 0.7,
        prefix_groups=rng.random() < 0.8,
        preempt_every=rng.choice([0, 0, 0, 2, 5]),
        ridge_rows=(0, rows, 40)[rows % 3],
    )


class Machine(RuleBasedStateMachine):
    """Whatever a client and a late device do; what must come of it is Drive's."""

    @initialize(
        rng=RANDOMS,
        lag=st.integers(0, 3),
        bad_in=st.sampled_from([0, 0, 150]),
        misled=st.booleans(),
        windows=st.booleans(),
        states=st.booleans(),
        drafts=st.none() | st.integers(0, 99),
    )
    def start(
        self,
        rng: random.Random,
        lag: int,
        bad_in: int,
        misled: bool,
        windows: bool,
        states: bool,
        drafts: int | None,
    ) -> None:
        limits = with_windows(limits_of(rng), rng) if windows else limits_of(rng)
        limits = with_states(limits, rng) if states else limits
        self.drive, self.lag = Drive(limits, bad_in, misled, drafts), lag

    @rule(rng=RANDOMS)
    def submit(self, rng: random.Random) -> None:
        submit_random(self.drive, rng)

    @precondition(lambda self: self.drive.asked)
    @rule(data=st.data())
    def cancel_request(self, data: st.DataObject) -> None:
        self.drive.cancel(data.draw(st.sampled_from(sorted(self.drive.asked))))

    @precondition(lambda self: self.drive.asked)
    @rule(data=st.data())
    def cut_request(self, data: st.DataObject) -> None:
        self.drive.cancel(data.draw(st.sampled_from(sorted(self.drive.asked))), REST)

    @precondition(lambda self: self.drive.asked)
    @rule(data=st.data())
    def cancel_sample(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.drive.asked)))
        n = self.drive.asked[number].request.sampling.n
        self.drive.cancel(number, data.draw(st.integers(0, n - 1)))

    @precondition(lambda self: len(self.drive.device.results) <= self.lag)
    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        """Launches as far ahead as the lag lets it."""
        for _ in range(steps):
            self.drive.step()
            while len(self.drive.device.results) > self.lag:
                self.drive.read()

    @precondition(lambda self: self.drive.device.results)
    @rule()
    def read(self) -> None:
        self.drive.read()

    @precondition(lambda self: self.drive.asked)
    @rule()
    def sleep(self) -> None:
        self.drive.sleep()

    @invariant()
    def lag_is_kept(self) -> None:
        if hasattr(self, "drive"):
            assert self.drive.scheduler.in_flight == len(self.drive.device.results) <= self.lag

    def teardown(self) -> None:
        if hasattr(self, "drive"):
            self.drive.finish(self.lag)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=35, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def with_windows(limits: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """The same blocks, each with pages for layers that see a window."""
    tables = rng.choice([1, 2, 5])
    window = rng.choice([1, 5, 16, 17, 40, 64])
    return replace(
        limits,
        window=window,
        window_tables=tables,
        num_blocks=(limits.num_blocks - 1) * (1 + tables) + 1,
    )


def with_states(limits: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """Layers have recurrent state, and few slots for prompts."""
    first = first_snapshot(limits.max_rows)
    return replace(limits, snapshots=range(first, first + rng.choice([1, 2, 4, 16])))


def random_replay(
    seed: int, lag: int, few: int = 64, windows: bool = False, states: bool = False
) -> Drive:
    """A few hundred events of a fixed draw."""
    rng = random.Random(seed)
    drafts = seed if seed % 2 else None
    limits = with_windows(limits_of(rng), rng) if windows else limits_of(rng)
    limits = with_states(limits, rng) if states else limits
    drive = Drive(limits, rng.choice([0, 0, 200]), misled=rng.random() < 0.6, drafts=drafts)
    drive.scheduler.batch_order.few = few
    for _ in range(rng.randrange(4, 12)):
        submit_random(drive, rng)
        for _ in range(rng.randrange(8)):
            drive.step()
            while len(drive.device.results) > rng.randrange(lag + 1):
                drive.read()
        if rng.random() < 0.25:
            number = rng.choice(sorted(drive.asked))
            sample = rng.randrange(drive.asked[number].request.sampling.n)
            which = rng.choice([None, sample, sample])
            drive.cancel(number, REST if which is None and seed % 2 else which)
    drive.finish(lag)
    return drive


def tight_replay(
    seed: int,
    lag: int,
    few: int = 64,
    windows: bool = False,
    cut_each: int = 0,
    states: bool = False,
) -> Drive:
    """Long outputs where short ones are expected, in few blocks. cut_each: steps after which a
    request is cut."""
    rng = random.Random(seed)
    limits = SchedulerConfig(
        num_blocks=rng.randrange(10, 17),
        max_rows=8,
        max_model_len=96,
        max_batched_tokens=40,
        mask_slots=8,
        vocab_size=VOCAB,
        eos_token_ids=tuple(EOS),
        prefix_caching=seed % 4 > 0,
    )
    limits = with_windows(limits, rng) if windows else limits
    limits = with_states(limits, rng) if states else limits
    drive = Drive(limits, misled=True, drafts=seed if seed % 2 else None)
    drive.scheduler.batch_order.few = few
    for number in range(6):
        prompt = [number] * rng.choice([1, 15, 16, 17, 33, 66])
        scored = rng.choice([None, 1])
        params = SamplingParams(
            n=rng.choice([1, 3, 10]),
            max_tokens=None,
            seed=number,
            prompt_logprobs=scored,
            logprobs=[None, 0, 2, 0, 3, 1][number],
        )
        drive.submit(prompt, params, stream=rng.random() < 0.3)
    for number in range(6 if cut_each else 0):
        for _ in range(cut_each):
            drive.step()
            while len(drive.device.results) > lag:
                drive.read()
        drive.cancel(number, REST)
    drive.finish(lag)
    return drive


def happened(drive: Drive) -> Counter[str]:
    stats = drive.scheduler.stats()
    forced = bool(drive.limits.preempt_every)
    return Counter(
        preempted=0 if forced else int(stats["preemptions"]),
        forced=int(stats["preemptions"]) if forced else 0,
        requeued=drive.requeued,
        stalled=drive.stalled,
        cached=int(stats["prefix_hit_tokens"]),
        wasted=int(stats["wasted_tokens"]),
        grouped=drive.device.grouped,
        drafted=int(stats["drafted_tokens"]) - drive.device.right,
        drafted_right=drive.device.right,
        right_by_device=drive.device.right_by_device,
        kept_back=drive.kept_back,
        carried=drive.carried,
        constrained=drive.constrained,
        cut=drive.cut,
        cut_waiting=drive.cut_waiting,
        late=int(stats["late_masks"]),
        forced_tokens=drive.device.said,
        snapshots=drive.scheduler.slots.hits,
        evicted=drive.scheduler.slots.evictions,
        folded_again=drive.device.folded_again,
    )


@pytest.mark.parametrize("lag", range(4))
def test_replays_and_what_happens_in_them(lag: int) -> None:
    seen: Counter[str] = Counter()
    for seed, other in ((1, 1), (2, 6), (3, 3)):
        seen += happened(random_replay(seed, lag)) + happened(tight_replay(other, lag))
    for what in (
        "preempted",
        "forced",
        "requeued",
        "cached",
        "grouped",
        "drafted",
        "drafted_right",
        "right_by_device",
        "kept_back",
        "carried",
        "constrained",
        "late",
        "forced_tokens",
    ):
        assert seen[what] > 0, f"the replays are too tame: nothing was {what} in {seen}"
    if lag:  # with every result at hand, blocks come free at once and rows never run too far
        assert seen["stalled"] > 0 and seen["wasted"] > 0, f"the replays are too tame: {seen}"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_may_have_forced_tokens_and_drafts_of_the_device(lag: int) -> None:
    limits = replace(
        limits_of(random.Random(2)),
        max_rows=12,
        max_batched_tokens=40,
        mask_slots=12,
        num_blocks=60,
    )
    drive = Drive(replace(limits, max_model_len=96, preempt_every=0), drafts=3)
    for number in range(4):
        params = SamplingParams(max_tokens=60, seed=number, ignore_eos=True)
        drive.submit([number] * 9, params, constrained=number % 2 == 1)
    drive.finish(lag)
    device = drive.device
    assert device.both_kinds > 0 and device.said > 0 and device.right > device.right_by_device > 0


@pytest.mark.parametrize("lag", [0, 2])
def test_a_cut_request_tells_what_each_sample_made(lag: int) -> None:
    """Running, preempted, waiting with what it had made and its scores, and not begun."""
    seen = Counter[str]()
    for seed in range(4):
        seen += happened(tight_replay(seed, lag, cut_each=60))
    asked = ("preempted", "cut", "cut_waiting")
    assert min(seen[what] for what in asked) > 0, f"the replays are too tame: {seen}"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_replays_of_a_model_with_windows(lag: int) -> None:
    seen: Counter[str] = Counter()
    for seed in (1, 2):
        seen += happened(random_replay(seed, lag, windows=True)) + happened(
            tight_replay(seed, lag, windows=True)
        )
    assert min(seen[what] for what in ("preempted", "cached", "grouped", "drafted_right")) > 0, seen


@pytest.mark.parametrize(
    ("windows", "random_seeds", "tight_seeds"), [(False, (0, 3), (3, 9)), (True, (6,), (10,))]
)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_replays_of_a_model_with_recurrent_state(
    lag: int, windows: bool, random_seeds: tuple[int, ...], tight_seeds: tuple[int, ...]
) -> None:
    seen: Counter[str] = Counter()
    for seed in random_seeds:
        seen += happened(random_replay(seed, lag, windows=windows, states=True))
    for seed in tight_seeds:
        seen += happened(tight_replay(seed, lag, windows=windows, states=True))
    happen = (
        "preempted",
        "requeued",
        "cached",
        "grouped",
        "constrained",
        "late",
        "snapshots",
        "evicted",
        *([] if windows else ["drafted", "drafted_right", "folded_again"]),
    )
    assert min(seen[what] for what in happen) > 0, f"the replays are too tame: {seen}"


@pytest.mark.parametrize("lag", [0, 2])
def test_a_wrong_draft_that_stays_folded_is_seen(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    """A device that keeps the states of drafts."""
    fold_row = FakeDevice._fold_row

    def careless(self: FakeDevice, row: int, tokens: list[int]) -> None:
        fold_row(self, row, tokens)
        self.states[row] = self.after[row][-1]
        self.folded[row] += len(tokens) - 1

    monkeypatch.setattr(FakeDevice, "_fold_row", careless)
    with pytest.raises(AssertionError, match="a row's state is not of its tokens"):
        for seed in (1, 3, 5, 7):
            random_replay(seed, lag, states=True)


def test_prefix_groups_that_are_found_anew_only_now_and_then() -> None:
    """As with very many units: rows come and go between two findings, and fork groups' slots are
    used again."""
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += happened(tight_replay(seed, lag=1, few=0)) + happened(
            random_replay(seed, lag=1, few=0)
        )
    assert seen["grouped"] > 0
