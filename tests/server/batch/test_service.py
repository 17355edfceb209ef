"""Batches on a whole service, in processes of its own: real channel, scheduler and loop over an
engine that computes nothing. The server is killed, told to end, and started again; tokens are what
they would be alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_fake import jsonl, line, points
from fake_runner import Orders, expected
from service import Serving, make_folder, until

from penstock.jobs.remote import Remote
from penstock.jobs.remote_batch import fetch, submit, watch

pytestmark = pytest.mark.torch

LINES, TOKENS = 200, 12


def requests(path: Path) -> None:
    def request(number: int) -> dict[str, Any]:
        prompt, samples = [number % 250, 7, number // 250], 1 + number % 2
        return line(
            str(number),
            prompt=prompt,
            max_tokens=TOKENS,
            seed=number,
            n=samples,
            return_token_ids=True,
        )

    path.write_bytes(jsonl(list(map(request, range(LINES)))))


def long_requests(path: Path, lines: int) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True}
    path.write_bytes(jsonl([line(str(number), **body) for number in range(lines)]))


def check(path: Path, words: list[int]) -> None:
    """Every line once, each sample's tokens its own."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(LINES))
    for row in rows:
        number = int(row["custom_id"])
        for choice in row["response"]["body"]["choices"]:
            prompt, sample = [number % 250, 7, number // 250], choice["index"]
            assert choice["token_ids"] == expected(prompt, TOKENS, words, number, sample), (
                f"line {number}"
            )


def done(remote: Remote, batch_id: str) -> int:
    return int(remote.batch(batch_id)["request_counts"]["completed"])


def kill(serving: Serving) -> None:
    serving.process.kill()
    serving.process.wait()


def tell(serving: Serving) -> None:
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(600) == 0


@pytest.mark.parametrize("end", [kill, tell], ids=["killed", "told to end"])
def test_a_batch_outlives_its_server(tmp_path: Path, end: Callable[[Serving], None]) -> None:
    words = make_folder(tmp_path, Orders(step_seconds=0.005), rows=16)
    requests(tmp_path / "in.jsonl")
    more: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "limits": {"drain_seconds": 1.0}}
    with Serving(tmp_path, **more) as first:
        batch_id = submit(Remote(first.url), tmp_path / "in.jsonl", None)
        until(lambda: done(Remote(first.url), batch_id) > 40)
        end(first)
        engine = first.engine
    until(lambda: not Path(f"/proc/{engine}").exists() or _zombie(engine))
    with Serving(tmp_path, **more) as second:
        remote = Remote(second.url)
        assert done(remote, batch_id) > 40, "what was counted is on the disk"
        with open(os.devnull, "w") as nowhere:
            assert watch(remote, batch_id, nowhere, 0.1)["status"] == "completed"
        fetch(remote, batch_id, tmp_path / "out.jsonl")
        check(tmp_path / "out.jsonl", words)
        until(second.at_rest)


def test_a_batch_goes_on_through_a_replicas_death(tmp_path: Path) -> None:
    """Its lines there are run again on the other, and each once for whoever reads them."""
    words = make_folder(tmp_path, Orders(step_seconds=0.01), rows=16)
    requests(tmp_path / "in.jsonl")
    with Serving(
        tmp_path, state_dir=str(tmp_path / "state"), knobs={"data_parallel_size": 2}
    ) as serving:
        remote = Remote(serving.url)
        batch_id = submit(remote, tmp_path / "in.jsonl", None)
        until(lambda: done(remote, batch_id) > 20)
        os.kill(serving.engines[0], signal.SIGKILL)
        with open(os.devnull, "w") as nowhere:
            assert watch(remote, batch_id, nowhere, 0.1)["status"] == "completed"
        fetch(remote, batch_id, tmp_path / "out.jsonl")
        check(tmp_path / "out.jsonl", words)
        assert set(points(tmp_path / "state", batch_id).values()) <= {1}


def _zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_a_line_that_kills_the_engine_is_known_by_the_servers_that_follow(tmp_path: Path) -> None:
    """Nothing gets done before the engine is killed, and all were there. What later deaths say:
    test_killers."""
    make_folder(tmp_path, Orders(step_seconds=0.2), rows=16, longest=512)
    long_requests(tmp_path / "in.jsonl", 6)
    with Serving(tmp_path, state_dir=str(tmp_path / "state")) as serving:
        batch_id = submit(Remote(serving.url), tmp_path / "in.jsonl", None)
        runs(serving, 6)
        os.kill(serving.engine, signal.SIGKILL)
        check_death(serving)
    assert points(tmp_path / "state", batch_id) == dict.fromkeys(range(1, 7), 1)


def runs(serving: Serving, lines: int) -> None:
    """Waits until so many run."""
    until(lambda: serving.metrics().get("penstock:num_requests_running") == lines)


def check_death(serving: Serving) -> None:
    code, said = serving.ended()
    assert code == 1 and "the engine died while serving" in said


def test_online_requests_find_rows_beside_a_batch(tmp_path: Path) -> None:
    """Long lines hold all rows that they may; short requests, more at once than rows are kept, are
    done in their own time and not in a line's, which is 100 s."""
    make_folder(tmp_path, Orders(step_seconds=0.2), rows=16, longest=512)
    long_requests(tmp_path / "in.jsonl", 60)
    with Serving(tmp_path, state_dir=str(tmp_path / "state")) as serving:
        remote = Remote(serving.url)
        batch_id = submit(remote, tmp_path / "in.jsonl", None)
        runs(serving, 14)
        asked = {"model": "fake", "prompt": [[9, number] for number in range(10)], "max_tokens": 4}
        answer = httpx.post(serving.url + "/v1/completions", json=asked, timeout=600)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 10
        assert done(remote, batch_id) == 0, "they waited for no line to end"
        until(lambda: serving.metrics()["penstock:num_preemptions_total"] >= 8)
        remote.cancel(batch_id)
