"""Ray: a job whose workers and driver are killed, and what is refused. One cluster of this machine
stands for all; the engines compute nothing, but for one job of the demo model's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from at_length import at_length
from batch_client import ROUTE, Asked, Results
from fake_llm import FakeLLM, sample
from fake_process import COMMAND
from fake_runner import Orders, expected, write_orders
from ray_head import SLOW, free_ports, job_cluster
from service import LETTERS, make_folder

import penstock.on_ray.ray_workers as room
from penstock.config import Config
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.jobs.run import run_file
from penstock.on_ray import deployment as ray_deployment
from penstock.on_ray.cluster import nodes_without
from penstock.on_ray.deployment import RayDeployment
from penstock.on_ray.run_service import ServeFile, deploy_on_ray

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray isn't installed: make packaging"
    ),
]
JOB = Path(__file__).parents[1] / "harness" / "ray_job.py"


@dataclass(frozen=True)
class Cluster:
    """Where it is, its folder, and what its drivers begin with."""

    address: str
    folder: Path
    environment: dict[str, str]

    def engines(self) -> list[int]:
        """Processes of workers that have opened an engine, dead ones too, first the newest."""
        found = [path for path in (self.folder / "engines").iterdir() if path.name.isdigit()]
        return [int(path.name) for path in sorted(found, key=lambda path: -path.stat().st_mtime_ns)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with job_cluster(8) as (address, folder, environment):
        yield Cluster(address, folder, environment)


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[Cluster]:
    """This process is one of its drivers."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        usual = signal.getsignal(signal.SIGTERM)
        ray.init(cluster.address, logging_level="error", log_to_driver=False)
        signal.signal(signal.SIGTERM, usual)
        yield cluster
        ray.shutdown()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> dict[Any, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows), "an id was written twice"
    return by_id


def until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    while not true():
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def vouched(out: Path) -> int:
    journal = out.with_name(out.name + ".journal")
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def test_a_worker_and_the_driver_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    rows = [{"id": f"row-{i}", "prompt": f"prompt {i}", "n": 1 + i % 3} for i in range(2000)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    def job() -> subprocess.Popen[str]:
        words = [sys.executable, str(JOB), cluster.address, str(source), str(out)]
        return subprocess.Popen(
            words, env={**os.environ, **cluster.environment}, stderr=subprocess.PIPE, text=True
        )

    (cluster.folder / "engines" / SLOW).touch()  # a minute of work
    first = job()
    until(lambda: vouched(out) >= 30, first)
    os.kill(cluster.engines()[0], signal.SIGKILL)
    until(lambda: len(cluster.engines()) == 3, first)  # another took its place, and the job goes on
    there = vouched(out)
    until(lambda: vouched(out) > there, first)
    first.kill()
    first.communicate()
    assert 30 < vouched(out) < 2000
    (cluster.folder / "engines" / SLOW).unlink()
    second = job()
    assert "rows are done; going on" in second.communicate()[1] and second.returncode == 0
    run_file(source, tmp_path / "here.jsonl", Config(), lambda config: FakeLLM())
    assert read(out) == read(tmp_path / "here.jsonl") and len(read(out)) == 2000
    assert not list((cluster.folder / "home").iterdir())


def on_ray(**how: Any) -> Any:
    from ray_job import open_faulty

    return partial(room.RayWorkers, **{"workers": 2, "open_engine": open_faulty, **how})


def test_an_engine_that_hangs_or_raises_ends_its_actor(
    driver: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["hang", "raise", *(f"prompt {i}" for i in range(20))]
    rows = [{"id": i, "prompt": prompt, "seed": 7} for i, prompt in enumerate(prompts)]
    rows.append({"id": "half", "prompt": "a\ud800"})
    # three pieces, of both workers
    rows.append({"id": "many", "prompt": "x", "n": 2 * room.PIECE + 3, "seed": 1})
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    outcome = run_file(source, out, Config(), on_ray(step_timeout=2.0))
    found = read(out)
    assert (outcome.done, outcome.failed) == (len(rows), 1) and "surrogate" in found["half"][
        "error"
    ]
    assert [o["text"] for o in found["many"]["outputs"]] == [
        sample("x", 1, i).text for i in range(2 * room.PIECE + 3)
    ]
    assert [found[i]["outputs"][0]["text"] for i in range(22)] == [
        sample(p, 7, 0).text for p in prompts
    ]
    assert capsys.readouterr().err.count("a worker died and is started again") >= 2


@at_length
def test_a_worker_that_keeps_dying_ends_the_job(
    driver: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_DEATHS", 2)
    source, out = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "die"}]), tmp_path / "out.jsonl"
    with pytest.raises(EngineError, match=r"died 2 times in a row before it ended one sample"):
        run_file(source, out, Config(), on_ray(workers=1))
    assert not out.exists()


@pytest.mark.parametrize(
    ("asked", "how", "says"),
    [
        (
            {"device": "cuda"},
            {"workers": 3},
            "3 workers of 1 GPU.* ask for 3, and the Ray cluster has 0",
        ),
        ({}, {"workers": 9}, "9 workers ask for a core each, and the Ray cluster has 8"),
        ({"data_parallel_size": 2}, {}, "leave --data-parallel-size out"),
    ],
)
def test_what_a_cluster_lacks(
    driver: Cluster, asked: dict[str, Any], how: dict[str, Any], says: str
) -> None:
    with pytest.raises(PenstockError, match=says):
        on_ray(**how)(Config.of(**asked))


def test_other_versions_and_other_files(
    driver: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(room, "__version__", "9.9")
        with pytest.raises(UsageError, match=r"penstock 0\S+ is installed at \S+ and 9\.9 here"):
            on_ray()(Config())
    with monkeypatch.context() as patch:
        patch.setattr(room, "identity", lambda config: {"model": "here"})
        with pytest.raises(UsageError, match=r"here has other files at \S+ than here"):
            on_ray()(Config())


@at_length
def test_the_demo_model_on_ray_gives_what_it_gives_here(driver: Cluster, tmp_path: Path) -> None:
    rows = [
        {"id": i, "prompt": f"Question: {i} and 8?\nAnswer:", "n": 3, "max_tokens": 6}
        for i in range(12)
    ]
    source = write(
        tmp_path / "in.jsonl",
        [*rows, {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]}],
    )
    config = Config.of(max_num_seqs=4, kv_cache_tokens=4096)
    run_file(source, tmp_path / "here.jsonl", config)
    outcome = run_file(source, tmp_path / "ray.jsonl", config, partial(room.RayWorkers, workers=1))
    assert outcome.done == 13 and read(tmp_path / "ray.jsonl") == read(tmp_path / "here.jsonl")


# --- Serve


@pytest.fixture(scope="module")
def served(driver: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    """An application of no replicas yet,
    over engines that compute nothing and know what is right."""
    from ray import serve

    folder = tmp_path_factory.mktemp("served")
    words = make_folder(folder, Orders(step_seconds=0.02), rows=4, longest=512)
    (port,) = free_ports(1)
    deployment = RayDeployment(
        min_replicas=0,
        max_replicas=2,
        target_seconds=1.0,
        upscale_delay=0.3,
        downscale_delay=0.5,
        host="127.0.0.1",
        served_model_name="fake",
        startup_timeout=60.0,
        knobs={"model": str(folder)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_deployment, "LOOK_BACK", 2.0)
        deploy_on_ray(ServeFile(deployment, port), engine=COMMAND)
    yield FakeService(f"http://127.0.0.1:{port}", folder, words, ServeFile(deployment, port))
    serve.shutdown()


@dataclass(frozen=True)
class FakeService:
    """Where it is, its model's folder, the ids of its letters, and what was deployed."""

    url: str
    folder: Path
    words: list[int]
    file: ServeFile

    def replicas(self) -> int:
        """How many serve."""
        from ray import serve

        states = serve.status().applications["penstock"].deployments["server"].replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")

    def models(self, http: httpx.Client) -> list[str]:
        """What it calls its models; none while it has no replica to ask."""
        answer = http.get("/models")
        return [each["id"] for each in answer.json()["data"]] if answer.status_code == 200 else []

    async def stream(self, client: httpx.AsyncClient, number: int, tokens: int) -> str | None:
        """What is wrong with one stream: None where it is whole and right."""
        prompt = [(number + i) % 200 for i in range(20)]
        body = {
            "model": "fake",
            "prompt": prompt,
            "max_tokens": tokens,
            "seed": number,
            "stream": True,
        }
        text, ended = "", False
        try:
            async with client.stream(
                "POST", f"{self.url}/v1/completions", json={**body, "ignore_eos": True}
            ) as answer:
                if answer.status_code != 200:
                    return f"{number}: {answer.status_code} {(await answer.aread()).decode()[:200]}"
                async for line in answer.aiter_lines():
                    ended = ended or line == "data: [DONE]"
                    if line.startswith("data: {") and "choices" in (event := json.loads(line[6:])):
                        text += event["choices"][0]["text"]
        except httpx.HTTPError as error:
            return f"{number}: {type(error).__name__} after {len(text)} of {tokens}"
        right = "".join(
            LETTERS[self.words.index(token)]
            for token in expected(prompt, tokens, self.words, number)
        )
        return (
            None if ended and text == right else f"{number}: {len(text)} of {tokens}, ended {ended}"
        )

    def streams(
        self,
        lengths: list[int],
        beside: Callable[[], object] = lambda: None,
        *,
        again: bool = False,
    ) -> list[str]:
        """Streams of these lengths at once, and something beside them: what is wrong. again: until
        that is over. Each stream has a connection of its own: when the replicas change, HAProxy
        restarts and closes idle connections, which may meet the next request on one of them (RFC
        9112, 9.5; OpenAI's client sends such a request again)."""

        async def all_of_them() -> list[str | None]:
            async with httpx.AsyncClient(
                timeout=600,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            ) as client:
                other = asyncio.create_task(asyncio.to_thread(beside))

                async def one(number: int, tokens: int) -> list[str | None]:
                    told = [await self.stream(client, number, tokens)]
                    while again and not other.done():
                        told.append(await self.stream(client, number, tokens))
                    return told

                told = await asyncio.gather(*(one(i, tokens) for i, tokens in enumerate(lengths)))
                await other
                return [fault for each in told for fault in each]

        return [fault for fault in asyncio.run(all_of_them()) if fault is not None]


def test_from_zero_and_back_under_load_no_stream_is_lost(served: FakeService) -> None:
    assert served.replicas() == 0
    assert served.streams([5]) == []  # the first answer has a replica started
    # Four rows each, and 18 streams: some wait, so a second replica comes while the first is at
    # work.
    assert (
        served.streams([60] * 18, lambda: until(lambda: served.replicas() == 2), again=True) == []
    )
    # And goes beside one that runs.
    assert served.streams([200], lambda: until(lambda: served.replicas() == 1), again=True) == []
    until(lambda: served.replicas() == 0)


@at_length
def test_a_dead_engine_ends_its_streams_and_an_update_right_after_it_holds(
    served: FakeService,
) -> None:
    """Whoever streams hears of it, Serve starts another replica, and what is deployed meanwhile is
    what is served."""
    asked = {
        "model": "fake",
        "prompt": [1, 2, 3],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.Client(base_url=f"{served.url}/v1", timeout=600) as http:
        for serial in (1, 2):
            with http.stream("POST", "/completions", json=asked) as answer:
                events = (line for line in answer.iter_lines() if line.startswith("data: {"))
                assert "choices" in json.loads(next(events)[6:])
                # written under way: an idle engine would die and be replaced before it is asked
                orders = Orders(step_seconds=0.02, fault="exit", serial=serial)
                write_orders(served.folder, orders)
                error = [json.loads(line[6:]) for line in events][-1]["error"]
            assert error["type"] == "server_error" and "engine died" in error["message"]
            if serial == 1:
                # by another replica; until Serve knows of it, an error
                until(lambda: served.streams([5]) == [])
        changed = replace(
            served.file, deployment=replace(served.file.deployment, served_model_name="renamed")
        )
        deploy_on_ray(changed, engine=COMMAND)
        until(lambda: served.models(http))
        for _ in range(40):  # nothing of the old one comes back
            assert served.models(http) in ([], ["renamed"])
            time.sleep(0.05)
    deploy_on_ray(served.file, engine=COMMAND)


@at_length
def test_a_batch_outlives_its_replica(served: FakeService, tmp_path: Path) -> None:
    folder, asked = tmp_path / "model", Asked(lines=400, bad=4, ids=8)
    folder.mkdir()
    words = make_folder(folder, Orders(step_seconds=0.02), rows=4, longest=512)
    args = {
        "name": "batches",
        "model": str(folder),
        "served_model_name": "fake",
        "host": "127.0.0.1",
    }
    deployment = RayDeployment.of({**args, "state_dir": str(tmp_path / "state")})
    deploy_on_ray(ServeFile(deployment, served.file.port, "/kept"), engine=COMMAND)
    asked.write(tmp_path / "lines.jsonl")
    with httpx.Client(base_url=f"{served.url}/kept/v1", timeout=600) as http:
        file = {"file": ("lines.jsonl", (tmp_path / "lines.jsonl").read_bytes())}
        given = http.post("/files", data={"purpose": "batch"}, files=file).json()["id"]
        wish = {"input_file_id": given, "endpoint": ROUTE, "completion_window": "24h"}
        batch = http.post("/batches", json=wish).json()

        def look() -> bool:
            nonlocal batch
            with suppress(httpx.HTTPError):  # while there is no replica
                answer = http.get(f"/batches/{batch['id']}")
                batch = answer.json() if answer.status_code == 200 else batch
            return bool(batch["status"] == "completed")

        until(lambda: look() or batch["request_counts"]["completed"] > 40)
        assert batch["status"] == "in_progress"
        write_orders(folder, Orders(step_seconds=0.02, fault="exit", serial=1))
        until(look)
        results = Results(asked, words)
        results.output(
            map(json.loads, http.get(f"/files/{batch['output_file_id']}/content").text.splitlines())
        )
        results.errors(
            map(json.loads, http.get(f"/files/{batch['error_file_id']}/content").text.splitlines()),
            False,
        )
    assert results.faults(batch) == []


@at_length
def test_a_replica_that_cannot_start_says_why(
    driver: Cluster, served: FakeService, tmp_path: Path
) -> None:
    args = {"name": "other", "model": str(tmp_path / "nothing"), "host": "127.0.0.1"}
    with pytest.raises(EngineError, match=r"no replica could be started: .*nothing"):
        deploy_on_ray(ServeFile(RayDeployment.of(args), served.file.port, "/other"))


def test_a_state_folder_is_seen_by_all(driver: Cluster, tmp_path: Path) -> None:
    assert nodes_without(tmp_path) == [] and len(nodes_without(tmp_path / "nowhere")) == 1
