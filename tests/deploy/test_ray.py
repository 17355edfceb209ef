"""Ray: a job whose workers and driver are killed, and what is refused. One cluster of this machine stands for all; the
engines compute nothing, but for one job of the demo model's."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, sample

import penstock.jobs.ray_workers as room
from penstock.config import Config
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.jobs.run import run_file

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray isn't installed: make packaging"),
]
JOB = Path(__file__).parents[1] / "support" / "ray_job.py"


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
    from ray_head import ray_environment, ray_head

    folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
    (folder / "engines").mkdir()
    (folder / "home").mkdir()
    environment = ray_environment(folder / "home") | {"FAKE_ENGINES": str(folder / "engines")}
    try:
        with ray_head(folder / "ray", 8, environment) as address:
            yield Cluster(address, folder, environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[Cluster]:
    """This process is one of its drivers."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        usual = signal.getsignal(signal.SIGTERM)
        ray.init(cluster.address, logging_level="warning", log_to_driver=False)
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
    rows = [{"id": f"row-{i}", "prompt": f"prompt {i}", "n": 1 + i % 3} for i in range(300)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    def job() -> subprocess.Popen[str]:
        words = [sys.executable, str(JOB), cluster.address, str(source), str(out)]
        return subprocess.Popen(words, env={**os.environ, **cluster.environment}, stderr=subprocess.PIPE, text=True)

    first = job()
    until(lambda: vouched(out) >= 30, first)
    os.kill(cluster.engines()[0], signal.SIGKILL)
    until(lambda: len(cluster.engines()) == 3, first)  # another took its place, and the job goes on
    there = vouched(out)
    until(lambda: vouched(out) > there, first)
    first.kill()
    first.communicate()
    assert 30 < vouched(out) < 300
    second = job()
    assert "rows are done; going on" in second.communicate()[1] and second.returncode == 0
    run_file(source, tmp_path / "here.jsonl", Config(), lambda config: FakeLLM())
    assert read(out) == read(tmp_path / "here.jsonl") and len(read(out)) == 300
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
    rows.append({"id": "many", "prompt": "x", "n": 2 * room.PIECE + 3, "seed": 1})  # three pieces, of both workers
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    outcome = run_file(source, out, Config(), on_ray(step_timeout=1.0))
    found = read(out)
    assert (outcome.done, outcome.failed) == (len(rows), 1) and "surrogate" in found["half"]["error"]
    assert [o["text"] for o in found["many"]["outputs"]] == [sample("x", 1, i).text for i in range(2 * room.PIECE + 3)]
    assert [found[i]["outputs"][0]["text"] for i in range(22)] == [sample(p, 7, 0).text for p in prompts]
    assert capsys.readouterr().err.count("a worker died and is started again") == 2


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
        ({"device": "cuda"}, {"workers": 3}, "3 workers of 1 GPU.* ask for 3, and the Ray cluster has 0"),
        ({}, {"workers": 9}, "9 workers ask for a core each, and the Ray cluster has 8"),
        ({"data_parallel_size": 2}, {}, "leave --data-parallel-size out"),
    ],
)
def test_what_a_cluster_lacks(driver: Cluster, asked: dict[str, Any], how: dict[str, Any], says: str) -> None:
    with pytest.raises(PenstockError, match=says):
        on_ray(**how)(Config.of(**asked))


def test_other_versions_and_other_files(driver: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(room, "__version__", "9.9")
        with pytest.raises(UsageError, match=r"penstock 0\S+ is installed at \S+ and 9\.9 here"):
            on_ray()(Config())
    with monkeypatch.context() as patch:
        patch.setattr(room, "identity", lambda config: {"model": "here"})
        with pytest.raises(UsageError, match=r"here has other files at \S+ than here"):
            on_ray()(Config())


def test_the_demo_model_on_ray_gives_what_it_gives_here(driver: Cluster, tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"Question: {i} and 8?\nAnswer:", "n": 3, "max_tokens": 6} for i in range(12)]
    source = write(tmp_path / "in.jsonl", [*rows, {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]}])
    config = Config.of(max_num_seqs=4, kv_cache_tokens=4096)
    run_file(source, tmp_path / "here.jsonl", config)
    outcome = run_file(source, tmp_path / "ray.jsonl", config, partial(room.RayWorkers, workers=1))
    assert outcome.done == 13 and read(tmp_path / "ray.jsonl") == read(tmp_path / "here.jsonl")
