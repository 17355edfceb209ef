"""The runner: the same tokens however a row came to its state and whenever it is read; running too
far; errors."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from execute_drive import END, VOCABULARY, Ask, Host, Row, late_steps, tiny_runner
from service import until

from penstock.errors import EngineError
from penstock.execute import executor
from penstock.execute.executor import Outcome, StreamExecutor
from penstock.execute.runner import TorchRunner
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN

pytestmark = pytest.mark.torch


@pytest.fixture
def runner() -> Iterator[TorchRunner]:
    runner = tiny_runner()
    yield runner
    runner.close()


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, VOCABULARY, length).tolist()


ASKS = [
    Ask(),
    Ask(temperature=0.8, seed=11),
    Ask(temperature=1.5, seed=-3, top_p=0.7),
    Ask(temperature=1.0, seed=2, top_k=9, repetition=1.3, frequency=0.3),
    Ask(temperature=0.7, seed=5, presence=1.0, bias={9: 4.0, 30: -5.0}),
    Ask(temperature=2.0, seed=9, min_p=0.1, min_tokens=6),
]


def _alone(ask: Ask, prompt: list[int], steps: int) -> list[int]:
    runner = tiny_runner()
    host = Host(runner)
    tokens = host.run([host.row(0, prompt, 90, ask)], steps)
    runner.close()
    return tokens[0].tolist()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_alone_is_as_together_and_read_late(ahead: int) -> None:
    runner = tiny_runner()
    host = Host(runner)
    prompts = [_prompt(length, length) for length in (1, 5, 16, 17, 30, 33)]
    rows = [host.row(5 - i, prompts[i], 90, ask) for i, ask in enumerate(ASKS)]
    together = host.run(rows, 20, ahead)
    runner.close()
    assert len(np.unique(together)) > 20  # the model says something
    for i, ask in enumerate(ASKS):
        assert together[i].tolist() == _alone(ask, prompts[i], 20)


def test_chunked_is_as_whole(runner: TorchRunner) -> None:
    host = Host(runner)
    prompt = _prompt(50)
    rows = [
        host.row(i, prompt, 60, ASKS[1], pieces=pieces) for i, pieces in enumerate((1, 2, 7, 49))
    ]
    tokens = host.run(rows, 12)
    assert (tokens == tokens[0]).all()


def test_tails_with_copied_blocks_and_a_group_are_as_alone(runner: TorchRunner) -> None:
    host = Host(runner)
    prompt = _prompt(40)
    blocks = host.take(3)
    host.prefill(prompt, blocks)
    rows, copies = [], []
    for sample in range(6):
        mine = host.take(1)
        copies.append((blocks[2], mine[0]))
        rows.append(
            Row(
                sample,
                prompt,
                40,
                100,
                blocks[:2] + mine,
                Ask(temperature=1.0, seed=4, repetition=1.2),
                sample,
                39,
            )
        )
    flights = [host.launch(rows, joins=rows, copies=copies, prefix=2)]
    flights += [host.launch(rows, prefix=2) for _ in range(11)]
    grouped = np.stack([flight.fetch().tokens for flight in flights], axis=1)
    assert len({tuple(tail) for tail in grouped.tolist()}) == 6
    for sample in range(6):
        alone = host.run([host.row(7, prompt, 60, rows[sample].ask, sample)], 12)
        assert alone[0].tolist() == grouped[sample].tolist()


def test_a_row_that_left_comes_back_with_its_tokens_as_if_it_had_stayed(
    runner: TorchRunner,
) -> None:
    """Preempted: its tokens are prefilled again, in other blocks, and it joins under another
    number."""
    host = Host(runner)
    prompt = _prompt(20)
    for ask in ASKS:
        stayed = host.run([host.row(0, prompt, 60, ask)], 15)[0].tolist()
        back = host.row(3, prompt + stayed[:6], 54, ask)
        back.prompt = 20
        assert host.run([back], 9)[0].tolist() == stayed[6:]


def test_rows_may_rest_for_steps(runner: TorchRunner) -> None:
    host = Host(runner)
    rows = [host.row(i, _prompt(10, i), 60, ASKS[i]) for i in range(3)]
    flights = [host.launch(rows, joins=rows)]
    which = [[0], [1, 0], [2], [2, 1], [0, 1, 2], [1, 2]]
    flights += [host.launch([rows[i] for i in some]) for some in which]
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for some, flight in zip([[0, 1, 2], *which], flights, strict=True):
        for i, token in zip(some, flight.fetch().tokens.tolist(), strict=True):
            got[i].append(token)
    for i in range(3):
        assert got[i] == _alone(ASKS[i], _prompt(10, i), len(got[i]))


def test_a_step_that_draws_late_takes_masks_and_leaves_rows_out(runner: TorchRunner) -> None:
    first, second = late_steps(runner)
    assert first[1] in (40, 41, 42) and second[1] == 70
    # it sat out, and goes on as if it had not been there
    assert [first[2], second[2]] == [
        NO_TOKEN,
        158,
    ]
    alone = _alone(Ask(temperature=1.0, seed=1), [8, 9, 10], 2)
    assert [first[0], second[0]] == alone


def test_slices_of_rows_are_as_the_whole() -> None:
    answers = []
    for slice_rows in (16, 1024):
        runner = tiny_runner(max_rows=40)
        assert runner._state is not None
        runner._state.sampler.slice_rows = slice_rows
        host = Host(runner)
        rows = [host.row(i, _prompt(3 + i % 5, i), 20, ASKS[i % len(ASKS)]) for i in range(40)]
        answers.append(host.run(rows, 4))
        runner.close()
    assert (answers[0] == answers[1]).all()


def _state_of(runner: TorchRunner, row: int) -> list[object]:
    assert runner._state is not None
    rows = runner._state.rows
    return [
        rows.last_token[row].item(),
        rows.length[row].item(),
        rows.done[row].item(),
        rows.block_table[row].tolist(),
    ]


def test_limit_ends_a_row_and_what_runs_too_far_changes_nothing(runner: TorchRunner) -> None:
    host = Host(runner)
    short, long = host.row(0, _prompt(5), 3, ASKS[1]), host.row(1, _prompt(5, 1), 60, ASKS[2])
    host.run([short, long], 3)
    assert runner._state is not None
    before = _state_of(runner, 0)
    assert before[1:3] == [7, True]
    kv = [layer.storage[short.blocks].clone() for (layer,) in runner._state.kv.layers]
    flights = [host.launch([short, long]) for _ in range(40)]
    tokens = np.stack([flight.fetch().tokens for flight in flights], axis=1)
    assert (tokens[0] == NO_TOKEN).all() and (tokens[1] >= 0).all()
    after = _state_of(runner, 0)
    assert after[:3] == before[:3]
    for (layer,), old in zip(runner._state.kv.layers, kv, strict=True):
        assert torch.equal(layer.storage[short.blocks[:1]], old[:1])
    # and its number is as good as new
    again = host.row(0, _prompt(9), 60, ASKS[1])
    assert host.run([again], 8)[0].tolist() == _alone(ASKS[1], _prompt(9), 8)


def test_end_ids_stop_ids_and_ignore_eos(runner: TorchRunner) -> None:
    host = Host(runner)
    prompt = _prompt(6)
    free = _alone(Ask(temperature=1.0, seed=1), prompt, 12)
    stop = free[4]
    first = free.index(stop)
    stopped = host.run(
        [host.row(0, prompt, 60, Ask(temperature=1.0, seed=1, stop_ids=[159, stop]))], 12
    )[0].tolist()
    assert stopped == free[: first + 1] + [NO_TOKEN] * (11 - first)
    push = {END: 100.0}
    ends = host.run(
        [host.row(1, prompt, 60, Ask(temperature=1.0, ignore_eos=False, bias=push))], 3
    )[0].tolist()
    assert ends == [END, NO_TOKEN, NO_TOKEN]
    goes_on = host.run([host.row(2, prompt, 60, Ask(temperature=1.0, bias=push))], 3)[0].tolist()
    assert goes_on == [END] * 3


def test_min_tokens_bars_end_and_stop_ids_until_then(runner: TorchRunner) -> None:
    host = Host(runner)
    ask = Ask(
        temperature=1.0, ignore_eos=False, stop_ids=[20], bias={END: 100.0, 20: 100.0}, min_tokens=4
    )
    rows = [
        host.row(0, _prompt(6), 60, ask),
        host.row(1, _prompt(6), 60, Ask(temperature=1.0, seed=1)),
    ]
    tokens = host.run(rows, 6)
    assert not set(tokens[0, :4].tolist()) & {END, 20}
    assert tokens[0, 4] in (END, 20) and tokens[0, 5] == NO_TOKEN
    assert tokens[1].tolist() == _alone(Ask(temperature=1.0, seed=1), _prompt(6), 6)


def test_frequency_penalty_sees_the_newest_token_and_only_output(runner: TorchRunner) -> None:
    host = Host(runner)
    push = dict.fromkeys((50, 51, 52), 100.0)  # far above the rest, within a few of each other
    ask = Ask(bias=push, presence=2.0, frequency=2.0)
    tokens = host.run([host.row(0, [50] * 30, 60, ask)], 60)[0].tolist()
    assert set(tokens) == {50, 51, 52}
    # 4 a token once, 2 for each more: whatever the logits are, each of the three comes again and
    # again
    assert min(tokens.count(token) for token in (50, 51, 52)) >= 15


def test_logprobs_of_a_sample_are_those_of_the_same_tokens_as_a_prompt(runner: TorchRunner) -> None:
    host = Host(runner)
    prompt = _prompt(18)
    rows = [
        host.row(i, prompt, 60, Ask(temperature=1.5, seed=i, logprobs=k, repetition=1.4))
        for i, k in enumerate((3, -1, 0, 5))
    ]
    steps = [host.launch(rows, joins=rows).fetch()] + [host.launch(rows).fetch() for _ in range(9)]
    for i, place, k in ((0, 0, 3), (2, 1, 0), (3, 2, 5)):
        tokens = [int(step.tokens[i]) for step in steps]
        whole = prompt + tokens
        (flight,) = host.prefill([*whole, 9], host.take(2), prompt_logprobs=5)
        scored = flight.fetch().prompt_logprobs
        assert scored is not None
        assert scored.where.tolist() == list(range(len(whole)))
        for step, answer in enumerate(steps):
            found = answer.logprobs
            assert found is not None and found.where.tolist() == [0, 2, 3]
            there = len(prompt) - 1 + step
            assert found.chosen[place] == pytest.approx(scored.chosen[there], abs=1e-4)
            assert found.rank[place] == scored.rank[there]
            assert found.top_ids[place, :k].tolist() == scored.top_ids[there, :k].tolist()
            assert (found.top_ids[place, k:] == -1).all() and np.isneginf(
                found.top[place, k:]
            ).all()


def test_prompt_logprobs_in_chunks_and_slices_are_as_whole() -> None:
    runner = tiny_runner()
    assert runner._state is not None
    host = Host(runner)
    prompt = _prompt(60)
    (whole,) = [
        flight.fetch().prompt_logprobs
        for flight in host.prefill(prompt, host.take(4), prompt_logprobs=2)
    ]
    runner._state.scorer.slice_rows = 16
    parts = [
        f.fetch().prompt_logprobs
        for f in host.prefill(prompt, host.take(4), pieces=3, prompt_logprobs=2)
    ]
    runner.close()
    assert whole is not None and all(parts)
    np.testing.assert_allclose(
        whole.chosen, np.concatenate([part.chosen for part in parts if part]), atol=1e-4
    )
    assert (whole.top_ids == np.concatenate([part.top_ids for part in parts if part])).all()
    assert sum(part.where.size for part in parts if part) == 59


def test_a_row_that_is_not_finite_ends_alone() -> None:
    poisoned, clean = tiny_runner(poison=3), tiny_runner()
    prompts = [_prompt(20, 1), [*_prompt(5), 3, 9, 9], _prompt(9, 2)]
    answers = []
    for runner in (poisoned, clean):
        host = Host(runner)
        rows = [
            host.row(i, prompt, 60, Ask(temperature=1.0, seed=i, bias={3: -100.0}))
            for i, prompt in enumerate(prompts)
        ]
        answers.append(host.run(rows, 25))
        runner.close()
    bad, good = answers
    assert bad[1].tolist() == [BAD_LOGITS] + [NO_TOKEN] * 24
    assert (bad[[0, 2]] == good[[0, 2]]).all()


def test_blocks_of_a_row_that_was_not_finite_are_as_good_as_new() -> None:
    runner = tiny_runner(poison=3)
    host = Host(runner)
    rows = [host.row(0, [*_prompt(40), 3, 9], 60, Ask()), host.row(1, [3] * 31, 60, Ask())]
    assert host.run(rows, 3).tolist() == [[BAD_LOGITS, NO_TOKEN, NO_TOKEN]] * 2
    host.next_block = 1  # all of them are handed out again
    ask = Ask(temperature=1.0, seed=3, bias={3: -100.0})
    rows = [host.row(i, _prompt(length, i), 60, ask) for i, length in enumerate((1, 17, 5))]
    tokens = host.run(rows, 20)
    runner.close()
    for i, length in enumerate((1, 17, 5)):
        assert tokens[i].tolist() == _alone(ask, _prompt(length, i), 20)


def test_what_fails_in_the_thread_is_raised_where_it_is_read_and_ever_after(
    runner: TorchRunner,
) -> None:
    host = Host(runner)
    rows = [host.row(0, _prompt(5), 60, ASKS[1])]
    assert host.launch(rows, joins=rows).fetch().tokens[0] >= 0
    broken = host.plan(rows)
    broken.rows = np.array([4_000], np.int32)
    flight, behind = runner.launch(broken), runner.launch(host.plan(rows))
    with pytest.raises(EngineError, match="index"):
        flight.fetch()
    with pytest.raises(EngineError, match="index"):
        behind.fetch()
    assert flight.ready() and behind.ready()
    with pytest.raises(EngineError, match="index"):
        runner.launch(host.plan(rows))


def test_after_a_launch_that_failed_a_stream_takes_no_other() -> None:
    """Half a step may have gone out, and the rows are not to be trusted. (The stream is none: it is
    never used.)"""
    executor = StreamExecutor.__new__(StreamExecutor)
    executor._stream, executor._error, executor._closed = None, None, False
    tries = []

    def work() -> Outcome:
        tries.append(1)
        raise KeyError("row")

    for _ in range(2):
        with pytest.raises(EngineError, match="the device failed: KeyError: 'row'"):
            executor.launch(work)
    assert len(tries) == 1


def test_close_is_once_and_for_all() -> None:
    runner = tiny_runner()
    host = Host(runner)
    rows = [host.row(0, _prompt(5), 60, ASKS[1])]
    flight = host.launch(rows, joins=rows)
    tokens = flight.fetch().tokens
    runner.close()
    runner.close()
    assert flight.fetch().tokens is not None and tokens[0] >= 0
    with pytest.raises(EngineError, match="closed"):
        runner.launch(host.plan(rows))


def test_close_gives_weights_and_cache_back() -> None:
    runner = tiny_runner()
    host = Host(runner)
    rows = [host.row(0, _prompt(5), 60, ASKS[1])]
    flight = host.launch(rows, joins=rows)
    flight.fetch()
    assert runner._state is not None
    held = [
        weakref.ref(runner._state.model),
        weakref.ref(runner._state.kv.layers[0][0].storage),
        weakref.ref(runner._state.rows),
    ]
    runner.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_steps_that_wait_when_it_closes_fail_and_end() -> None:
    runner = tiny_runner()
    host = Host(runner)
    rows = [host.row(0, _prompt(5), 110, ASKS[1])]
    flights = [host.launch(rows, joins=rows)] + [host.launch(rows) for _ in range(100)]
    runner.close()
    for flight in flights:
        assert flight.ready()
    with pytest.raises(EngineError, match="closed"):
        flights[-1].fetch()


def test_who_waits_for_a_long_step_sees_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as layers are run: one that hangs is no sign of life."""
    monkeypatch.setattr(executor, "LOOK", 0.02)
    runner, seen, while_it_hung = tiny_runner(), list[int](), list[int]()
    blocks = runner._model.blocks
    assert len(blocks) > 1
    last = blocks[-1]

    def hangs(*given: Any) -> Any:
        until(lambda: seen)  # it goes on once the layers before it were seen
        before = len(seen)
        time.sleep(10 * executor.LOOK)
        while_it_hung.append(len(seen) - before)
        return last(*given)

    runner.watch(lambda: seen.append(runner._model.blocks_run))
    blocks[-1] = hangs
    host = Host(runner)
    host.run([host.row(0, _prompt(20), 90, ASKS[0])], 1)
    assert max(while_it_hung) <= 1  # the layer that ran just before it
    assert seen == sorted(set(seen))
    runner.close()
