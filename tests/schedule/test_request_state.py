"""What a request becomes: wants, sampling columns, watch tables, and the errors of requests that
can never run."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_drive import EOS, VOCAB, Drive

from penstock.errors import ContextLengthError, UsageError
from penstock.request import Request, SamplingParams
from penstock.row_table import (
    FIELDS,
    WANTS_BIAS,
    WANTS_FILTER,
    WANTS_LOGPROBS,
    WANTS_MASK,
    WANTS_MIN_TOKENS,
    WANTS_PENALTY,
)
from penstock.schedule.request_state import RequestState, wants_of
from penstock.schedule.rows import ENDED, RUNNING, Rows
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.stop_token_masks import StopTokenMasks


def limits(**changed: int | bool) -> SchedulerConfig:
    usual = {
        "num_blocks": 20,
        "max_rows": 4,
        "max_model_len": 64,
        "max_batched_tokens": 32,
        "vocab_size": VOCAB,
    }
    return SchedulerConfig(**{**usual, **changed}, eos_token_ids=tuple(EOS))  # type: ignore[arg-type]


def live_of(params: SamplingParams, prompt: int = 3) -> RequestState:
    packed = np.zeros(prompt, np.int32).tobytes()
    return RequestState.of(
        Request(request_id=1, prompt=packed, sampling=params), 0, params.seed or 0, 64, -1
    )


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
        ({"allowed_token_ids": [0]}, WANTS_MASK),
        ({"logprobs": 0}, WANTS_LOGPROBS),
        (
            {"logprobs": 3, "min_p": 0.2, "logit_bias": {1: 2.0}},
            WANTS_LOGPROBS | WANTS_FILTER | WANTS_BIAS,
        ),
    ],
)
def test_wants(fields: dict[str, object], wants: int) -> None:
    assert wants_of(SamplingParams(**fields)) == wants  # type: ignore[arg-type]


def test_a_row_carries_what_its_request_asks() -> None:
    asks = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=-1, seed=-7, logit_bias={5: 1.0, 2: -3.0}, min_tokens=4
    )
    first, plain = (
        live_of(asks).record[0],
        live_of(SamplingParams(min_p=0.25, repetition_penalty=1.5)).record[0],
    )
    assert (first["temperature"], first["top_p"], first["top_k"], first["seed"]) == (
        0.5,
        np.float32(0.9),
        0,
        -7,
    )
    assert (first["bias_count"], first["prompt_length"], first["min_length"], first["limit"]) == (
        2,
        3,
        7,
        19,
    )
    assert (plain["min_p"], plain["repetition"], plain["temperature"], plain["logprobs"]) == (
        0.25,
        1.5,
        1.0,
        -1,
    )
    last = live_of(
        SamplingParams(top_k=9, ignore_eos=True, logprobs=2, stop_token_ids=[4, 6])
    ).record[0]
    assert (last["top_k"], last["ignore_eos"], last["logprobs"]) == (9, 1, 2)
    assert last["stop_ids"].tolist() == [4, 6] + [-1] * 6 and (first["stop_ids"] == -1).all()


def test_each_sampling_number_of_the_table_is_carried_as_it_was_asked() -> None:
    for column in FIELDS:
        if column.param is not None and column.range is not None:
            value = (column.range.low + column.range.high) / 4 + 0.125
            record = live_of(SamplingParams(**{column.param: value})).record[0]  # type: ignore[arg-type]
            assert record[column.name] == np.float32(value), column.name
            if column.name != "temperature":  # each draw reads it
                assert record["wants"] & column.wants, column.name


def test_joining_rows_repeat_their_requests_and_keep_biases_apart() -> None:
    drive = Drive(limits())
    biased = SamplingParams(seed=1, n=2, logit_bias={5: 1.0, 2: -3.0})
    for number, params in enumerate(
        [biased, SamplingParams(seed=2), SamplingParams(seed=3, logit_bias={8: 4.0})]
    ):
        drive.submit([number], params)
    plan = drive.scheduler.plan()
    assert plan is not None and plan.joins is not None
    joins, records = plan.joins, plan.joins.records
    by_seed = np.lexsort((records["sample"], records["seed"]))
    assert records["seed"][by_seed].tolist() == [1, 1, 2, 3] and records["sample"][
        by_seed
    ].tolist() == [0, 1, 0, 0]
    assert np.diff(joins.bias_start).tolist() == records["bias_count"].tolist()
    held = {}
    for row, seed in enumerate(records["seed"].tolist()):
        mine = slice(joins.bias_start[row], joins.bias_start[row + 1])
        held[seed] = dict(
            zip(joins.bias_ids[mine].tolist(), joins.bias_values[mine].tolist(), strict=True)
        )
    assert held == {1: {5: 1.0, 2: -3.0}, 2: {}, 3: {8: 4.0}}


@pytest.mark.parametrize("samples", [[], [0, 0], [-1], [2]])
def test_samples_that_are_none_of_the_n(samples: list[int]) -> None:
    request = Request(
        request_id=1, prompt=b"\1\0\0\0", sampling=SamplingParams(n=2), samples=samples
    )
    with pytest.raises(UsageError, match="samples"):
        Scheduler(limits()).submit(request)


def test_a_row_that_went_to_another_sample_is_not_its_own_any_more() -> None:
    rows, live = Rows(8, 4), live_of(SamplingParams(n=4))
    live.row_of[:] = [2, 3, 5, -1]
    rows.state[[2, 3, 5]], rows.sample[[2, 3, 5]], rows.request[:] = (
        RUNNING,
        [0, 1, 2],
        live.request_id,
    )
    assert live.living(rows).tolist() == [2, 3, 5]
    rows.request[2], rows.sample[3], rows.state[5] = 9, 3, ENDED
    assert live.living(rows).size == 0
    rows.state[7], rows.sample[7] = RUNNING, 3
    assert live.living(rows).size == 0, "it never had a row: -1 is no row's number"


def test_samples_are_cancelled_together() -> None:
    """Of two requests, by the next plan: running ones, one without a row, one twice, and numbers
    that no sample has."""
    drive = Drive(limits())
    scheduler, params = drive.scheduler, SamplingParams(n=3, max_tokens=9, ignore_eos=True)
    first, second = (drive.submit([5, 6, number], params) for number in (7, 8))
    drive.step()
    drive.read()
    lives = [scheduler.live[number] for number in (first, second)]
    waiting = [sample for sample in range(3) if lives[1].row_of[sample] < 0]
    assert waiting, "four rows, six samples"
    for number, sample in ((first, 1), (second, waiting[0]), (first, 1), (first, 99), (first, -2)):
        scheduler.cancel(number, sample)
    assert [live.outstanding for live in lives] == [3, 3] and scheduler.has_work
    scheduler.plan()
    assert [live.outstanding for live in lives] == [2, 2]
    for sample in range(3):
        scheduler.cancel(first, sample)
    scheduler.plan()
    assert first not in scheduler.live and second in scheduler.live
    scheduler.cancel(second, 0)
    scheduler.cancel(second)
    assert not scheduler.live, "a request is cancelled at once, and its samples before it"


def test_a_prompt_beyond_the_context_ends_alone() -> None:
    drive = Drive(limits())
    drive.submit([1, 2], SamplingParams(seed=1))
    with pytest.raises(
        ContextLengthError,
        match="context length is 64 tokens and the prompt is too long, 64 tokens",
    ):
        drive.submit([1] * 64, SamplingParams(seed=1))
    drive.submit([1] * 63, SamplingParams(seed=1))  # one token fits behind it
    drive.finish()
    assert len(drive.asked[1].got[0]) == 1


def test_a_pool_too_small_for_one_sequence_is_refused_and_the_smallest_runs() -> None:
    with pytest.raises(UsageError, match="kv_cache_tokens"):
        Scheduler(limits(num_blocks=6))
    drive = Drive(limits(num_blocks=7))
    for first in range(3):
        drive.submit(
            [first] * 17, SamplingParams(n=6, max_tokens=None, ignore_eos=True, seed=first)
        )
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
    """More full blocks of ended single samples than the tree takes in a few steps, and nothing else
    to do."""
    wide = SchedulerConfig(
        num_blocks=4200,
        max_rows=64,
        max_model_len=1024,
        max_batched_tokens=4096,
        vocab_size=VOCAB,
        eos_token_ids=(3,),
    )
    scheduler = Scheduler(wide)
    params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
    for number in range(64):
        scheduler.submit(
            Request(request_id=number, prompt=np.int32([number]).tobytes(), sampling=params)
        )
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
    assert (
        drive.scheduler.stats()["prefilled_tokens"] == 49 + 1
        and drive.scheduler.stats()["prefix_hit_tokens"] == 48
    )


def packed(ids: set[int]) -> bytes:
    return np.packbits(np.isin(np.arange(VOCAB), sorted(ids))).tobytes()


def test_watch_tables_are_shared_and_their_slots_used_again() -> None:
    tables = StopTokenMasks(VOCAB)
    sets = [{1, 2}, {2, 199}, {7}, {8}, {9}, set()]
    slots = [tables.hold(packed(ids)) for ids in sets]
    assert len(set(slots)) == len(sets) and tables.hold(packed({1, 2})) == slots[0]
    tokens = np.arange(VOCAB, dtype=np.int32)
    for ids, slot in zip(sets, slots, strict=True):
        assert np.flatnonzero(
            tables.hits(np.full(VOCAB, slot, np.int32), tokens)
        ).tolist() == sorted(ids)
    tables.release(slots[0])
    assert tables.hold(packed({1, 2})) == slots[0], "somebody still held it"
    tables.release(slots[0])
    tables.release(slots[0])
    assert tables.hold(packed({3})) == slots[0]
    assert np.flatnonzero(tables.hits(np.full(VOCAB, slots[0], np.int32), tokens)).tolist() == [3]


def test_a_watch_table_that_is_too_short_is_refused() -> None:
    drive = Drive(limits())
    with pytest.raises(UsageError, match="watch table"):
        drive.scheduler.submit(
            Request(request_id=9, prompt=b"\1\0\0\0", sampling=SamplingParams(), watch=b"\1")
        )
    assert not drive.scheduler.has_work
