"""A worker of `--on ray` in this process, over the demo model: prompts that come while it works,
and what it tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock import LLM
from penstock.children.carried_error import CarriedError
from penstock.jobs.open_llm import open_llm
from penstock.llm import Finished, Prompt
from penstock.on_ray.ray_worker import RayWorker, TurnNews, WorkerHello
from penstock.request import SamplingParams

pytestmark = pytest.mark.torch
KNOBS: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_tokens": 4096}


def ask(number: int) -> Prompt:
    params = SamplingParams(
        n=3, max_tokens=5 + number, seed=number, logprobs=1 if number == 1 else None
    )
    return Prompt(key=number, prompt=f"Question: {number} and 8?", params=params)


def turn(worker: RayWorker, *numbers: int) -> list[Finished]:
    given = [(number, msgspec.Raw(msgspec.msgpack.encode(ask(number)))) for number in numbers]
    return msgspec.msgpack.decode(
        worker.turn(msgspec.msgpack.encode(given)), type=TurnNews
    ).finished


def test_turns_bring_what_an_engine_gives() -> None:
    worker = RayWorker(msgspec.msgpack.encode(KNOBS), open_llm)
    hello = msgspec.msgpack.decode(worker.open(), type=WorkerHello | CarriedError)
    assert isinstance(hello, WorkerHello) and hello.rows == 4 and hello.identity["model"] == "demo"
    assert turn(worker) == []  # nothing to do
    # 3 comes to an engine that may have had all before
    found = turn(worker, 1, 2) + turn(worker, 3)
    while len(found) < 9:
        found += turn(worker)
    assert turn(worker) == []
    found += turn(worker, 4)  # and 4 to one that rests
    while len(found) < 12:
        found += turn(worker)
    with LLM(**KNOBS) as llm:
        prompts = [ask(number) for number in (1, 2, 3, 4)]
        right = llm.generate(
            [str(p.prompt) for p in prompts], [p.params for p in prompts], use_tqdm=False
        )
    told = {(f.key, f.output.index): f.output for f in found if f.output is not None}
    assert len(told) == 12
    for number, output in enumerate(right, 1):
        for sample in output.outputs:
            assert told[number, sample.index].token_ids == sample.token_ids
            assert told[number, sample.index].text == sample.text
    assert told[1, 0].logprobs == list(right[0].outputs[0].logprobs or [])


def test_a_step_whose_layers_go_on_is_no_hang() -> None:
    worker = RayWorker(msgspec.msgpack.encode(KNOBS), open_llm)
    worker.open()
    assert isinstance(worker._llm, LLM) and worker._watchdog._set is None
    runner = worker._llm.engine.runner
    look = runner._executor._look  # type: ignore[attr-defined]
    look()
    assert worker._watchdog._set is None, "no layer was run"
    runner._model.blocks_run += 1  # type: ignore[attr-defined]
    look()
    assert worker._watchdog._set is not None
    worker._watchdog.idle()
    worker._llm.close()


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    worker = RayWorker(msgspec.msgpack.encode({"model": "/nothing/here"}), open_llm)
    failed = msgspec.msgpack.decode(worker.open(), type=WorkerHello | CarriedError)
    assert isinstance(failed, CarriedError) and "/nothing/here" in failed.message
