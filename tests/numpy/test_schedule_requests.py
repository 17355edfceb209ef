"""What a request becomes: wants, sampling columns, watch tables, and the errors of requests that can never run."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_drive import EOS, VOCAB, Drive

from penstock.errors import ContextLengthError, UsageError
from penstock.request import Request, SamplingParams
from penstock.schedule.request_state import RequestState, sampling_columns, wants_of
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import (
    WANTS_BIAS,
    WANTS_FILTER,
    WANTS_LOGPROBS,
    WANTS_MIN_TOKENS,
    WANTS_PENALTY,
)
from penstock.schedule.stop_token_masks import StopTokenMasks


def limits(**changed: int | bool) -> SchedulerConfig:
    usual = {"num_blocks": 20, "max_rows": 4, "max_model_len": 64, "max_batched_tokens": 32, "vocab_size": VOCAB}
    return SchedulerConfig(**{**usual, **changed}, eos_token_ids=tuple(EOS))  # type: ignore[arg-type]


def live_of(params: SamplingParams, prompt: int = 3) -> RequestState:
    packed = np.zeros(prompt, np.int32).tobytes()
    return RequestState.of(Request(request_id=1, prompt=packed, sampling=params), 0, params.seed or 0, 64, -1)


def submit(prompt: list[int], **fields: object) -> Drive:
    drive = Drive(limits())
    drive.submit(prompt, SamplingParams(seed=1, **fields))  # type: ignore[arg-type]
    drive.finish()
    return drive


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({}, 0),
        ({"top_k": -1, "seed": 4, "ignore_eos": True, "stop_token_ids": [1]}, 0),
        ({"top_k": 5}, WANTS_FILTER),
        ({"top_p": 0.9}, WANTS_FILTER),
        ({"min_p": 0.1}, WANTS_FILTER),
        ({"top_k": 5, "top_p": 0.5, "temperature": 0.0}, 0),
        ({"repetition_penalty": 1.1}, WANTS_PENALTY),
        ({"presence_penalty": -1.0}, WANTS_PENALTY),
        ({"frequency_penalty": 0.5}, WANTS_PENALTY),
        ({"logit_bias": {3: 1.0}}, WANTS_BIAS),
        ({"logit_bias": {}}, 0),
        ({"min_tokens": 1}, WANTS_MIN_TOKENS),
        ({"logprobs": 0}, WANTS_LOGPROBS),
        ({"logprobs": 3, "min_p": 0.2, "logit_bias": {1: 2.0}}, WANTS_LOGPROBS | WANTS_FILTER | WANTS_BIAS),
    ],
)
def test_wants(fields: dict[str, object], wants: int) -> None:
    assert wants_of(SamplingParams(**fields)) == wants  # type: ignore[arg-type]


def test_sampling_columns_repeat_each_request_and_keep_biases_apart() -> None:
    first = live_of(SamplingParams(temperature=0.5, top_p=0.9, top_k=-1, seed=-7, logit_bias={5: 1.0, 2: -3.0}))
    plain = live_of(SamplingParams(min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5))
    last = live_of(SamplingParams(top_k=9, ignore_eos=True, logit_bias={8: 4.0}, logprobs=2, stop_token_ids=[4, 6]))
    columns = sampling_columns([first, plain, last], [2, 1, 3])
    assert columns.temperature.tolist() == [0.5, 0.5, 1, 1, 1, 1]
    assert columns.top_p.tolist() == [np.float32(0.9)] * 2 + [1] * 4
    assert columns.top_k.tolist() == [0, 0, 0, 9, 9, 9] and columns.min_p.tolist() == [0, 0, 0.25, 0, 0, 0]
    assert columns.repetition[2] == 1.5 and columns.presence[2] == 0.5 and columns.frequency[2] == -0.5
    assert columns.seed.tolist() == [-7, -7, 0, 0, 0, 0] and columns.ignore_eos.tolist() == [False] * 3 + [True] * 3
    assert columns.logprobs.tolist() == [-1, -1, -1, 2, 2, 2]
    assert columns.stop_ids[3].tolist() == [4, 6] + [-1] * 6 and (columns.stop_ids[:3] == -1).all()
    assert columns.bias_start.tolist() == [0, 2, 4, 4, 5, 6, 7]
    assert columns.bias_ids.tolist() == [5, 2, 5, 2, 8, 8, 8]
    assert columns.bias_values.tolist() == [1, -3, 1, -3, 4, 4, 4]
    assert all(getattr(columns, name).flags.c_contiguous for name in ("temperature", "seed", "stop_ids", "wants"))


def test_no_request_without_biases_makes_a_bias() -> None:
    columns = sampling_columns([live_of(SamplingParams())], [3])
    assert columns.bias_start.tolist() == [0] * 4 and columns.bias_ids.size == columns.bias_values.size == 0


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1, VOCAB], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], fields: dict[str, object], param: str) -> None:
    with pytest.raises(UsageError) as refused:
        submit(prompt, **fields)
    assert refused.value.param == param and "\n" not in str(refused.value)


@pytest.mark.parametrize("samples", [[], [0, 0], [-1], [2]])
def test_samples_that_are_none_of_the_n(samples: list[int]) -> None:
    request = Request(request_id=1, prompt=b"\1\0\0\0", sampling=SamplingParams(n=2), samples=samples)
    with pytest.raises(UsageError, match="samples"):
        Scheduler(limits()).submit(request)


def test_a_prompt_beyond_the_context_ends_alone() -> None:
    drive = Drive(limits())
    drive.submit([1, 2], SamplingParams(seed=1))
    with pytest.raises(ContextLengthError, match="64 tokens and the context 64"):
        drive.submit([1] * 64, SamplingParams(seed=1))
    drive.submit([1] * 63, SamplingParams(seed=1))  # one token fits behind it
    drive.finish()
    assert len(drive.asked[1].got[0]) == 1


def test_a_pool_too_small_for_one_sequence_is_refused_and_the_smallest_runs() -> None:
    with pytest.raises(UsageError, match="kv_cache_tokens"):
        Scheduler(limits(num_blocks=6))
    drive = Drive(limits(num_blocks=7))
    for first in range(3):
        drive.submit([first] * 17, SamplingParams(n=6, max_tokens=None, ignore_eos=True, seed=first))
    drive.finish(1)
    assert all(len(got) == 47 for asked in drive.asked.values() for got in asked.got.values())


def test_numbers_beyond_32_bits_are_clamped_where_they_mean_the_same() -> None:
    drive = submit([1, 2, 3], top_k=10**12, min_tokens=10**12, max_tokens=10**12)
    assert len(drive.asked[0].got[0]) == 61


def test_requests_without_a_seed_get_one_each_that_others_don_t_move() -> None:
    def seeds(given: list[int | None]) -> list[int]:
        scheduler = Scheduler(limits(seed=3))
        for number, seed in enumerate(given):
            params = SamplingParams(seed=seed)
            scheduler.submit(Request(request_id=number, prompt=b"\1\0\0\0", sampling=params))
        return [int(live.record["seed"][0]) for live in scheduler.live.values()]

    drawn = seeds([None, None, None])
    assert len(set(drawn)) == 3 and seeds([None, 5, None]) == [drawn[0], 5, drawn[2]]


def test_a_long_drain_into_the_tree_is_no_deadlock() -> None:
    """More full blocks of ended single samples than the tree takes in a few steps, and nothing else to do."""
    wide = SchedulerConfig(
        num_blocks=4200, max_rows=64, max_model_len=1024, max_batched_tokens=4096, vocab_size=VOCAB, eos_token_ids=(3,)
    )
    scheduler = Scheduler(wide)
    params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
    for number in range(64):
        scheduler.submit(Request(request_id=number, prompt=np.int32([number]).tobytes(), sampling=params))
    for _ in range(3000):
        plan = scheduler.plan()
        if plan is None:
            assert not scheduler.has_work or not scheduler.plan_is_stuck()
            if not scheduler.has_work:
                break
            continue
        # Each row draws its own number, so that no two sequences share a block.
        scheduler.commit(plan, tokens_of(plan.rows + 70))
    assert not scheduler.has_work and scheduler.pool.held == 0
    assert len(scheduler.tree) == 64 * 62


def tokens_of(tokens: np.ndarray):  # type: ignore[no-untyped-def]
    from penstock.schedule.step import StepTokens

    return StepTokens(tokens.astype(np.int32))


def test_stats_count_a_group_s_prompt_once() -> None:
    drive = Drive(limits(num_blocks=200, max_rows=40, max_batched_tokens=100))
    drive.submit(list(range(50)), SamplingParams(n=32, max_tokens=4, ignore_eos=True, seed=1))
    drive.finish(1)
    stats = drive.scheduler.stats()
    assert stats["prompt_tokens"] == 50 and stats["prefilled_tokens"] == 49
    assert stats["generation_tokens"] == 32 * 4 and stats["requests"] == 1
    drive.submit(list(range(50)), SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=1))
    drive.finish(1)
    assert drive.scheduler.stats()["prefilled_tokens"] == 49 + 1 and drive.scheduler.stats()["prefix_hit_tokens"] == 48


def packed(ids: set[int]) -> bytes:
    return np.packbits(np.isin(np.arange(VOCAB), sorted(ids))).tobytes()


def test_watch_tables_are_shared_and_their_slots_used_again() -> None:
    tables = StopTokenMasks(VOCAB)
    sets = [{1, 2}, {2, 199}, {7}, {8}, {9}, set()]
    slots = [tables.hold(packed(ids)) for ids in sets]
    assert len(set(slots)) == len(sets) and tables.hold(packed({1, 2})) == slots[0]
    tokens = np.arange(VOCAB, dtype=np.int32)
    for ids, slot in zip(sets, slots, strict=True):
        assert np.flatnonzero(tables.hits(np.full(VOCAB, slot, np.int32), tokens)).tolist() == sorted(ids)
    tables.release(slots[0])
    assert tables.hold(packed({1, 2})) == slots[0], "somebody still held it"
    tables.release(slots[0])
    tables.release(slots[0])
    assert tables.hold(packed({3})) == slots[0]
    assert np.flatnonzero(tables.hits(np.full(VOCAB, slots[0], np.int32), tokens)).tolist() == [3]


def test_a_watch_table_that_is_too_short_is_refused() -> None:
    drive = Drive(limits())
    with pytest.raises(UsageError, match="watch table"):
        drive.scheduler.submit(Request(request_id=9, prompt=b"\1\0\0\0", sampling=SamplingParams(), watch=b"\1"))
    assert not drive.scheduler.has_work
