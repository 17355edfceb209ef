"""`serve --data-parallel-size 2`: the real processes, channels and router over a runner that
computes nothing. An engine is killed under load, all are restarted in turn, and nothing outlives
the service."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_runner import Orders, expected
from replica_kills import TWO, Load, both_ready
from service import COMPLETIONS, Serving, alive, make_folder, until

from penstock.errors import EngineError, NoReplicaError, ReplicaError
from penstock.server.openai.http_errors import DIED, body_of, error_headers, status_of

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("fake")
    return folder, make_folder(folder, Orders(step_seconds=0.005), longest=512)


@pytest.fixture(scope="module")
def serving(words: tuple[Path, list[int]]) -> Iterator[Serving]:
    with Serving(words[0], servers=2, knobs=TWO) as made:
        yield made


def test_answers_are_one_engines_and_metrics_tell_of_each(
    serving: Serving, words: tuple[Path, list[int]]
) -> None:
    for samples, stream in ((1, False), (40, False), (3, True)):
        body = {
            "prompt": [5] * 30,
            "max_tokens": 9,
            "n": samples,
            "seed": 4,
            "return_token_ids": True,
            "stream": stream,
        }
        answer = httpx.post(serving.url + COMPLETIONS, json=body, timeout=600)
        assert answer.status_code == 200
        if not stream:
            found = [choice["token_ids"] for choice in answer.json()["choices"]]
            assert found == [
                expected([5] * 30, 9, words[1], 4, sample) for sample in range(samples)
            ]
    assert both_ready(serving)
    until(lambda: serving.metrics().get('penstock:num_requests_running{,replica="1"}') == 0)
    page = serving.metrics()
    assert (
        page["penstock:replicas_ready"] == 2
        and page['penstock:replica_restarts_total{,replica="0"}'] == 0
    )
    assert "penstock:num_requests_running" not in page
    assert (
        page['penstock:generation_tokens_total{,replica="0"}']
        + page['penstock:generation_tokens_total{,replica="1"}']
        > 100
    )


def restarts(serving: Serving) -> list[float]:
    page = serving.metrics()
    return [page[f'penstock:replica_restarts_total{{,replica="{n}"}}'] for n in (0, 1)]


def test_one_that_is_killed_costs_no_answer_and_comes_back(
    serving: Serving, words: tuple[Path, list[int]]
) -> None:
    until(lambda: both_ready(serving))
    load, engines = Load(serving.url, words[1]), serving.engines
    until(lambda: load.answered > 10)
    os.kill(engines[1], signal.SIGKILL)
    until(lambda: 1 in restarts(serving))
    until(lambda: both_ready(serving))
    load.stop()
    assert load.wrong == [] and len(serving.engines) == 2 and engines[0] in serving.engines
    assert "was killed by signal 9; it is started again in 1 s" in serving.stderr()
    assert sorted(restarts(serving)) == [0, 1]


def test_all_are_restarted_in_turn_without_a_lost_request(
    serving: Serving, words: tuple[Path, list[int]]
) -> None:
    until(lambda: both_ready(serving))
    load, engines = Load(serving.url, words[1]), serving.engines
    assert httpx.post(serving.url + "/admin/restart").json() == {"restarting": 2}
    until(lambda: "all replicas were restarted" in serving.stderr())
    until(lambda: load.answered > 10)
    load.stop()
    assert load.wrong == []
    assert not set(engines) & set(serving.engines)


def test_nothing_outlives_a_service_that_is_killed(serving: Serving) -> None:
    until(lambda: both_ready(serving))
    children = serving.children
    os.kill(serving.engines[0], signal.SIGSTOP)
    os.kill(serving.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, children)))
    assert len(children) == 4


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(ReplicaError("it died"), 500, "replica_died"), (NoReplicaError("none"), 503, "no_replica")],
)
def test_what_a_client_hears_of_replicas(error: EngineError, status: int, code: str) -> None:
    """In words of their own, for the service goes on; and when to come again, where that helps."""
    said = json.loads(body_of(error))["error"]
    assert (status_of(error), said["code"], said["message"]) == (status, code, str(error))
    assert ("retry-after" in error_headers(error)) == (status == 503)
    assert json.loads(body_of(EngineError("at /a/path")))["error"]["message"] == DIED
