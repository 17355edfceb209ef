"""LLM's life: streams that are lazy and end early, one user at a time, memory that comes back,
Ctrl-C."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_model import make_folder

from penstock import LLM, SamplingParams
from penstock.errors import CapacityError, EngineError, UsageError
from penstock.llm import Prompt
from penstock.schedule.step import Flight, StepPlan, StepTokens

pytestmark = pytest.mark.torch

PROMPT = [40 + i * 7 % 200 for i in range(30)]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def open_llm(folder: Path, **knobs: Any) -> LLM:
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_tokens": 4096,
        "dtype": "float32",
    }
    return LLM(str(folder), **defaults | knobs)


def test_what_only_a_gpu_has_is_told_of_on_a_cpu(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_llm(folder, device="cpu").close()
    assert not caplog.messages
    open_llm(
        folder, device="cpu", gpu_memory_utilization=0.5, max_cudagraph_capture_size=64
    ).close()
    assert caplog.messages == [
        "nothing reads gpu_memory_utilization, max_cudagraph_capture_size here: this runs on"
        " the CPU"
    ]


def is_at_rest(llm: LLM) -> bool:
    """Nothing lives, no flight is out, and every block is free or kept for its prompt alone."""
    engine, stats = llm._engine, llm.stats()
    engine.scheduler.check()
    return (
        not engine.has_work
        and not engine.flights
        and not llm._client.asked
        and not engine.scheduler.live
        and not list(engine.scheduler.groups)
        and (stats["running"], stats["waiting"], stats["kv_usage"]) == (0, 0, 0)
    )


def test_a_stream_of_endless_prompts_is_pulled_as_rows_come_free_and_cancelled_when_left(
    folder: Path,
) -> None:
    pulled = count()
    most_known = 0

    def endless() -> Iterator[Prompt]:
        for key in pulled:
            yield Prompt(key=key, prompt=[*PROMPT, key % 300], params=SHORT)

    with open_llm(folder, steps_ahead=2) as llm:
        stream = llm.stream(endless())
        for done, finished in enumerate(stream):
            most_known = max(most_known, len(llm._client.asked))
            assert finished.error is None and finished.output is not None
            if done == 50:
                break
        assert next(pulled) <= 50 + 2 * 8 + 8
        assert most_known <= 2 * 8
        stream.close()
        assert is_at_rest(llm)
        (out,) = llm.generate([PROMPT], SHORT, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 4 and is_at_rest(llm)


def test_a_huge_group_and_a_waiting_line_are_cancelled_wherever_they_stand(folder: Path) -> None:
    prompts = [
        Prompt(
            key=i,
            prompt=[*PROMPT, i],
            params=SamplingParams(n=n, max_tokens=5 + 9 * i, ignore_eos=True),
        )
        for i, n in enumerate((3, 1, 4, 100, 2))
    ]
    with open_llm(folder, max_num_batched_tokens=16) as llm:
        stream = llm.stream(prompts)
        next(stream)
        assert llm.stats()["running"] > 0 and llm.stats()["waiting"] > 0
        stream.close()
        assert is_at_rest(llm)


def test_an_error_in_the_callers_generator_leaves_nothing_behind(folder: Path) -> None:
    def falling() -> Iterator[Prompt]:
        yield Prompt(key=0, prompt=PROMPT, params=SHORT)
        raise RuntimeError("the caller's own")

    with open_llm(folder) as llm:
        with pytest.raises(RuntimeError, match="the caller's own"):
            list(llm.stream(falling()))
        assert is_at_rest(llm)
        assert llm.generate([PROMPT], SHORT, use_tqdm=False)[0].error is None


def test_one_at_a_time(folder: Path) -> None:
    with open_llm(folder) as llm:
        stream = llm.stream([Prompt(key=i, prompt=PROMPT, params=SHORT) for i in range(3)])
        next(stream)
        with pytest.raises(UsageError, match="at work"):
            llm.generate([PROMPT], SHORT, use_tqdm=False)
        assert len(list(stream)) == 2
        assert llm.generate([PROMPT], SHORT, use_tqdm=False)[0].error is None


def test_generate_twice_and_two_at_once_and_one_after_the_other(folder: Path) -> None:
    with open_llm(folder) as one, open_llm(folder, seed=5) as two:
        tokens = [
            llm.generate([PROMPT], SHORT, use_tqdm=False)[0].outputs[0].token_ids
            for llm in (one, one, two)
        ]
        assert tokens[0] == tokens[1] == tokens[2]
        free = SamplingParams(n=8, max_tokens=8)
        drawn = [
            [o.token_ids for o in llm.generate([PROMPT], free)[0].outputs]
            for llm in (one, one, two)
        ]
        assert drawn[0] != drawn[1] != drawn[2]  # a request without a seed gets one of its own
    with open_llm(folder) as three, open_llm(folder) as four:
        drawn = [
            [o.token_ids for o in llm.generate([PROMPT], free)[0].outputs] for llm in (three, four)
        ]
        assert drawn[0] == drawn[1]  # they come from the LLM's seed


def in_a_fork(ask: Callable[[], object]) -> str:
    """What `ask` raises in a fork of this process; it is ended where it hangs."""
    end, begin = os.pipe()
    if (child := os.fork()) == 0:
        try:
            ask()
        except BaseException as error:  # noqa: BLE001  told by the pipe
            os.write(begin, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(begin)
    with open(end, "rb") as said:
        if not select.select([said], [], [], 600)[0]:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return said.read().decode()


def test_a_fork_hears_that_the_llm_is_not_its_own(folder: Path) -> None:
    """It has none of the device's threads: it would wait for ever for its first step."""
    with open_llm(folder) as llm:
        stream = llm.stream([Prompt(key=i, prompt=PROMPT, params=SHORT) for i in range(30)])
        next(stream)  # what the fork's end does with this one is to drop it
        asks: list[Callable[[], object]] = [
            lambda: llm.generate([PROMPT], SHORT, use_tqdm=False),
            lambda: llm.chat([{"role": "user", "content": "x"}], SHORT, use_tqdm=False),
            lambda: list(llm.stream([Prompt(key=0, prompt=PROMPT, params=SHORT)])),
            lambda: list(stream),
        ]
        for ask in asks:
            said = in_a_fork(ask)
            assert said.startswith(
                f"UsageError: this LLM was made by process {os.getpid()}, and"
            ), said
            assert "make the LLM behind the fork" in said
        assert in_a_fork(stream.close) == ""
        assert len(list(stream)) == 29 and is_at_rest(llm)


def storages(llm: LLM) -> list[weakref.ref[torch.Tensor]]:
    state = llm._engine.runner._state  # type: ignore[attr-defined]
    return [
        weakref.ref(t)
        for t in (*state.kv.by_block, state.model.embedding.table.value, state.rows.block_table)
    ]


def device_threads() -> int:
    return sum(thread.name.startswith("penstock-device") for thread in threading.enumerate())


@pytest.mark.parametrize("way", ["closed", "dropped", "dropped while streaming"])
def test_memory_comes_back(folder: Path, way: str) -> None:
    gc.collect()
    before = device_threads()
    llm = open_llm(folder)
    llm.generate([PROMPT], SHORT, use_tqdm=False)
    held = storages(llm)
    assert all(ref() is not None for ref in held) and device_threads() == before + 1
    if way == "closed":
        llm.close()
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.generate([PROMPT], SHORT, use_tqdm=False)
    else:
        stream = llm.stream([Prompt(key=i, prompt=PROMPT, params=SHORT) for i in range(3)])
        if way == "dropped while streaming":
            next(stream)
        del llm, stream
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held) and device_threads() == before


def test_closing_under_a_stream_ends_it_with_an_error(folder: Path) -> None:
    llm = open_llm(folder)
    stream = llm.stream([Prompt(key=i, prompt=PROMPT, params=SHORT) for i in range(30)])
    next(stream)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    other = open_llm(folder)
    stream = other.stream([Prompt(key=i, prompt=PROMPT, params=SHORT) for i in range(30)])
    next(stream)
    other.close()
    stream.close()  # nothing to wait for, and nothing to complain about


class Pressing:
    """A runner whose `at`-th flight is waited for with Ctrl-C, or breaks."""

    def __init__(self, inner: Any, error: BaseException | None, at: int = 5) -> None:
        self.inner, self.error, self.at, self.fetched = inner, error, at, 0
        self.close = inner.close

    def launch(self, plan: StepPlan) -> Flight:
        flight = self.inner.launch(plan)
        fetch = flight.fetch

        def pressed() -> StepTokens:
            self.fetched += 1
            if self.fetched == self.at:
                if self.error is not None:
                    raise self.error
                os.kill(os.getpid(), signal.SIGINT)
            return fetch()

        class Late:
            ready = flight.ready
            fetch = staticmethod(pressed)

        return Late()


def events_of(llm: LLM, seen: list[Any]) -> Any:
    """Writes into `seen` how many samples ended in each step that was read; gives the after_step
    that writes "step"."""
    take = llm._client.process

    def taking(up: Any) -> Any:
        news = take(up)
        seen.append(sum(delta.finish_reason is not None for delta in news))
        return news

    llm._client.process = taking  # type: ignore[method-assign]
    return lambda: seen.append("step")


def test_after_a_step_is_when_all_that_ended_in_it_was_handed_out(folder: Path) -> None:
    """Steps that ended nothing are told too: that is when a job brings to the disk what ended
    before."""
    seen: list[Any] = []
    prompts = [Prompt(key=(i,), prompt=[40 + i], params=SHORT) for i in range(20)]
    with open_llm(folder) as llm:
        for finished in llm.stream(prompts, after_step=events_of(llm, seen)):
            seen.append(finished.key)
        assert is_at_rest(llm)
    assert sorted(event for event in seen if isinstance(event, tuple)) == [(i,) for i in range(20)]
    due, quiet = 0, 0
    for event in seen:
        if event == "step":
            assert due == 0, "a sample that had ended was not handed out before the step was over"
        elif isinstance(event, int):
            due, quiet = event, quiet + (event == 0)
        else:
            due -= 1
    assert seen[-1] == "step" and quiet >= 3 and 8 in seen, "8 samples of a length end in one step"


def test_what_after_step_raises_ends_the_stream(folder: Path) -> None:
    def full() -> None:
        raise CapacityError("the disk is full: a test")

    with open_llm(folder) as llm:
        with pytest.raises(CapacityError, match="is full"):
            list(
                llm.stream(
                    [Prompt(key=i, prompt=PROMPT, params=SHORT) for i in range(30)], after_step=full
                )
            )
        assert is_at_rest(llm)
        assert llm.generate([PROMPT], SHORT, use_tqdm=False)[0].error is None


def test_ctrl_c_in_the_step_that_ends_samples_hands_them_out_first(folder: Path) -> None:
    """They may be the work of minutes, and whoever takes them may have a journal."""
    most = 0
    with open_llm(folder) as llm:
        real, take = llm._engine.runner, llm._client.process
        for at in range(1, 9):
            seen: list[Any] = []
            llm._client.process = take  # type: ignore[method-assign]
            events_of(llm, seen)
            llm._engine.runner = Pressing(real, None, at)  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                for finished in llm.stream(
                    Prompt(key=(i,), prompt=[40 + i], params=SHORT) for i in range(40)
                ):
                    seen.append(finished.key)
            llm._engine.runner = real
            ended = [event for event in seen if isinstance(event, int)]
            assert len(seen) - len(ended) == sum(ended), "each sample that ended was handed out"
            assert is_at_rest(llm)
            most = max(most, *ended)
        assert most == 8


def test_what_the_device_raises_reaches_the_caller_as_it_is(folder: Path) -> None:
    with open_llm(folder) as llm:
        real = llm._engine.runner
        llm._engine.runner = Pressing(real, EngineError("the device failed: a test"))  # type: ignore[assignment]
        with pytest.raises(EngineError, match="the device failed: a test"):
            llm.generate([PROMPT] * 20, SHORT, use_tqdm=False)
