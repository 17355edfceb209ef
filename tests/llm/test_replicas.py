"""An LLM of two replicas: the samples of one engine, in the jobs too; a replica that dies amid a
job; a life like LLM's own. Real engines of a small model, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_model import make_folder

from penstock import LLM, SamplingParams
from penstock.config import Config
from penstock.errors import EngineError, NoReplicaError, UsageError
from penstock.jobs.monkeys import Options, run_monkeys
from penstock.jobs.run import run_file
from penstock.llm import Prompt, replicas
from penstock.llm.replicas import _Asked, _Job
from penstock.replicas.launch_replicas import OwnReplicas
from penstock.replicas.replica_stream import Seeds
from penstock.schedule.replica_router import Router

pytestmark = pytest.mark.torch

KNOBS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_tokens": 4096,
    "dtype": "float32",
}
PROMPTS = [[40 + (i + k) * 7 % 200 for k in range(20 + i)] for i in range(6)]


class Pair:
    """The same model by one engine here, and by two beside us."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.one, self.two = (
            LLM(str(folder), **KNOBS),
            LLM(str(folder), data_parallel_size=2, **KNOBS),
        )

    @property
    def replicas(self) -> OwnReplicas:
        assert self.two._replicas is not None
        return cast(OwnReplicas, self.two._replicas.replicas)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.replicas.supervisor.processes]

    def at_rest(self) -> bool:
        clients = [replica.client for replica in self.replicas._replicas]
        return all(
            client is not None and client.idle and not client._client.asked for client in clients
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(make_folder(tmp_path_factory.mktemp("model")))
    yield made
    made.one.close()
    processes = made.replicas.supervisor.processes
    made.two.close()
    made.two.close()
    # -9: it was still loading
    assert processes and all(process.returncode in (0, -9) for process in processes)
    with pytest.raises(EngineError, match="closed"):
        made.two.generate([PROMPTS[0]], SamplingParams())


def drawn(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[Any]:
    outs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (out.error, [(o.index, o.token_ids, o.finish_reason) for o in out.outputs]) for out in outs
    ]


def test_samples_are_those_of_one_engine_with_a_seed_or_without(pair: Pair) -> None:
    several = [
        SamplingParams(n=1 + i % 5, max_tokens=5 + i, temperature=i % 3, min_tokens=2)
        for i in range(6)
    ]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=9),
        SamplingParams(n=12, max_tokens=9),
        several,
    ):
        assert drawn(pair.two, params) == drawn(pair.one, params)
    bad = [PROMPTS[0], [5] * 10_000, PROMPTS[1]]
    first, second = (
        drawn(pair.two, SamplingParams(max_tokens=3), bad),
        drawn(pair.one, SamplingParams(max_tokens=3), bad),
    )
    assert first == second and first[1][0] is not None
    scored = SamplingParams(n=3, logprobs=2, prompt_logprobs=1, max_tokens=3, seed=1)
    (one,), (two,) = (
        llm.generate(PROMPTS[:1], scored, use_tqdm=False) for llm in (pair.one, pair.two)
    )
    assert [list(o.logprobs or ()) for o in one.outputs] == [
        list(o.logprobs or ()) for o in two.outputs
    ]
    assert one.prompt_logprobs == two.prompt_logprobs and len(two.prompt_logprobs or ()) == len(
        PROMPTS[0]
    )
    assert all(replica.stats["requests"] > 5 for replica in pair.replicas.each())


def test_a_stream_is_pulled_as_rows_come_free_and_cancelled_when_left(pair: Pair) -> None:
    pulled, turns = [0], [0]

    def endless() -> Iterator[Prompt]:
        while True:
            pulled[0] += 1
            params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
            yield Prompt(key=pulled[0], prompt=[*PROMPTS[0], pulled[0] % 200], params=params)

    stream = pair.two.stream(endless(), after_step=lambda: turns.__setitem__(0, turns[0] + 1))
    for done, finished in enumerate(stream):
        assert finished.error is None
        if done == 60:
            break
    with pytest.raises(UsageError, match="at work"):
        pair.two.generate(PROMPTS, SamplingParams())
    stream.close()
    assert pulled[0] < 61 + 2 * 2 * 8 + 2 * 2 * 8 and turns[0] > 3 and pair.at_rest()
    with pytest.raises(UsageError, match="several engines"):
        _ = pair.two.engine


def test_what_replicas_have_room_for_is_handed_out_before_news_is_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled, waited, own = [0], list[int](), replicas._next

    def several() -> Iterator[Prompt]:
        for pulled[0] in range(
            1, 25
        ):  # more than is pulled at once, and fewer than both have room for
            yield Prompt(
                key=pulled[0],
                prompt=PROMPTS[0],
                params=SamplingParams(max_tokens=4, ignore_eos=True),
            )

    def watched(news: Any, seconds: float) -> Any:
        waited.extend([pulled[0]] if seconds else [])
        return own(news, seconds)

    monkeypatch.setattr(replicas, "_next", watched)
    assert len(list(pair.two.stream(several()))) == 24 and waited and set(waited) == {24}


class Kept:
    """An LLM that a job doesn't close."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        """It is used again."""


def test_a_run_has_the_same_rows_though_a_replica_dies_amid_it(pair: Pair, tmp_path: Path) -> None:
    rows = [
        {"id": i, "prompt": PROMPTS[i % 6], "n": 1 + i % 4, "max_tokens": 8 + i % 20}
        for i in range(36)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    victim, before = pair.pids[0], pair.replicas.stats()["generation_tokens"]

    class Killing(Kept):
        def stream(self, *given: Any, **more: Any) -> Iterator[Any]:
            for done, finished in enumerate(self._llm.stream(*given, **more)):
                if done == 20:
                    os.kill(victim, signal.SIGKILL)
                yield finished

    found = []
    for name, llm in (("one", Kept(pair.one)), ("two", Killing(pair.two))):
        run_file(
            tmp_path / "in.jsonl",
            tmp_path / name,
            Config.of(model=str(pair.folder)),
            lambda _, llm=llm: llm,
        )  # type: ignore[misc]
        found.append(
            sorted(map(json.dumps, map(json.loads, (tmp_path / name).read_text().splitlines())))
        )
    assert found[0] == found[1] and len(found[0]) == 36
    assert pair.two.generation_tokens > before and victim not in pair.pids
    assert drawn(pair.two, SamplingParams(temperature=0.0)) == drawn(
        pair.one, SamplingParams(temperature=0.0)
    )


def test_monkeys_draws_the_same_samples(pair: Pair, tmp_path: Path) -> None:
    problems = [{"question": f"{i} and {i + 1}?", "answer": f"#### {2 * i + 1}"} for i in range(5)]
    (tmp_path / "problems.jsonl").write_text(
        "".join(json.dumps(problem) + "\n" for problem in problems)
    )
    found = []
    for name, llm in (("one", Kept(pair.one)), ("two", Kept(pair.two))):
        sampling = SamplingParams(n=7, temperature=0.8, max_tokens=6)
        options = Options(
            problems=str(tmp_path / "problems.jsonl"),
            out=tmp_path / name,
            sampling=sampling,
            few_shot=1,
        )
        run_monkeys(Config.of(model=str(pair.folder)), options, lambda _, llm=llm: llm)  # type: ignore[misc]
        found.append(sorted((tmp_path / name / "samples.jsonl").read_text().splitlines()))
    assert found[0] == found[1] and len(found[0]) >= 35


class Taking:
    """A ReplicaSet that wants everything and notes what it is given."""

    count, facts = 2, SimpleNamespace(max_model_len=1000)

    def __init__(self) -> None:
        self.router, self.given = Router(2), list[tuple[int, bool]]()

    def wanting(self) -> set[int]:
        return {0, 1}

    def submit(self, ids: list[int], params: SamplingParams, *, whole: bool, **more: Any) -> Any:
        self.given.append((params.n, whole))
        raise NoReplicaError("it only takes notes")


def test_of_the_last_prompts_the_longest_go_first_and_the_very_last_is_shared_out() -> None:
    taking = Taking()
    job = _Job(cast(Any, taking), Seeds(0))
    for n in (3, 9, 1, 5):
        job.backlog.append(
            _Asked(Prompt(key=n, prompt=[1], params=SamplingParams(n=n, max_tokens=10)), [1])
        )
    asyncio.run(job.submit_some())
    assert taking.given == [(3, True), (9, True), (1, True), (5, True)]  # more may come
    taking.given.clear()
    job.backlog.extend(one for _, one in job.open.values())
    job.last = True
    asyncio.run(job.submit_some())
    assert taking.given == [(9, True), (5, True), (3, True), (1, False)]
