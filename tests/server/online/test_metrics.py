"""What a running server says of itself: metrics under vLLM's names, a dashboard that names no
other, the access log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine
from service import COMPLETIONS, Serving, make_folder, until

from penstock.engine.async_client import ReplicaState
from penstock.errors import UsageError
from penstock.server.api_server.routes import build_app
from penstock.server.online.access_log import open_log
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.app_state import AppState
from penstock.server.online.metrics import Metrics

pytestmark = pytest.mark.torch

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
# What vLLM's own example dashboards, ask for, after the colon (its v1 metrics loggers).
NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc
prompt_tokens_total generation_tokens_total num_preemptions_total request_success_total
prefix_cache_queries_total prefix_cache_hits_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum
e2e_request_latency_seconds_count request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_inference_time_seconds_bucket request_prompt_tokens_bucket
request_generation_tokens_bucket request_max_num_generation_tokens_bucket request_params_n_bucket
request_params_max_tokens_bucket
"""
KEY = {"authorization": "Bearer s3cret"}
(CALLED,) = (key.name for key in gather_keys(["s3cret"], None, {}))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("fake")
    make_folder(folder)
    with Serving(folder, access_log=str(folder / "access.jsonl"), api_key=["s3cret"]) as made:
        yield made


def ask(serving: Serving, **body: Any) -> httpx.Response:
    return httpx.post(
        serving.url + COMPLETIONS, json={"prompt": [9] * 40, **body}, headers=KEY, timeout=600
    )


def names(serving: Serving) -> dict[str, float]:
    """Sums over labels, by the metric's name after the colon."""
    found: dict[str, float] = {}
    for line in httpx.get(serving.url + "/metrics", headers=KEY).text.splitlines():
        if not line.startswith("#"):
            name = re.match(r"penstock:(\w+)", line)
            assert name is not None, line
            found[name[1]] = found.get(name[1], 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def test_dashboards_of_vllm_need_another_prefix_alone(serving: Serving) -> None:
    ask(serving, max_tokens=3)
    missing = sorted(set(NAMES.split()) - set(names(serving)))
    assert missing == []


def test_drafts_under_vllms_names() -> None:
    """Only where there are drafts, and by their place, with the replica where there are several."""
    drafts = {"spec_drafts": 5, "spec_draft_tokens": 12, "spec_accepted_tokens": 7}
    one = ReplicaState(True, 0, {**drafts, "spec_accepted_at_0": 4, "spec_accepted_at_1": 3})

    def lines(*each: ReplicaState) -> list[str]:
        client = SimpleNamespace(each=lambda: each, weights_version="1")
        text = Metrics(client, "m").text().decode()  # type: ignore[arg-type]
        return [line for line in text.splitlines() if line.startswith("penstock:spec_decode")]

    name = 'penstock:spec_decode_num_{}_total{{model_name="m"'
    assert lines(one) == [
        name.format("drafts") + "} 5.0",
        name.format("draft_tokens") + "} 12.0",
        name.format("accepted_tokens") + "} 7.0",
        name.format("accepted_tokens_per_pos") + ',position="0"} 4.0',
        name.format("accepted_tokens_per_pos") + ',position="1"} 3.0',
    ]
    assert name.format("drafts") + ',replica="1"} 5.0' in lines(one, one)
    assert lines(ReplicaState(True, 0, {"running": 1})) == []


def test_the_dashboard_names_what_there_is(serving: Serving) -> None:
    ask(serving, max_tokens=3)
    board, there = json.loads(DASHBOARD.read_text()), set(names(serving))
    asked = re.findall(r"penstock:(\w+)", json.dumps(board))
    assert len(set(asked)) > 15 and sorted(set(asked) - there) == []
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            assert (
                expression.count("(") == expression.count(")")
                and '{model_name=~"$model"}' in expression
            )


def test_metrics_count(serving: Serving) -> None:
    before = names(serving)
    assert before["jit_compiles_total"] == before["jit_loads_total"] == 0
    assert ask(serving, max_tokens=7, n=3, stream=True).status_code == 200
    assert ask(serving, max_tokens=5).status_code == 200
    made = "generation_tokens_total"  # the engine's own count comes with its next word
    until(lambda: names(serving)[made] == before[made] + 26)
    rise = {name: value - before[name] for name, value in names(serving).items()}
    assert rise["request_success_total"] == 4 and rise["e2e_request_latency_seconds_count"] == 2
    assert rise[made] == rise["request_generation_tokens_sum"] == 26
    assert rise["request_prompt_tokens_sum"] == 80 and rise["request_params_n_sum"] == 4
    assert (
        rise["request_params_max_tokens_sum"] == rise["request_max_num_generation_tokens_sum"] == 12
    )
    assert (
        rise["time_to_first_token_seconds_count"] == 3
        and rise["inter_token_latency_seconds_count"] == 18
    )
    whole = rise["e2e_request_latency_seconds_sum"]
    parts = sum(rise[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert 0 < parts == pytest.approx(whole, rel=1e-3)
    assert (
        rise["request_queue_time_seconds_count"] == rise["request_decode_time_seconds_count"] == 2
    )


def test_expected_finish_and_aborts(tmp_path: Path) -> None:
    make_folder(tmp_path, rows=8)
    with Serving(tmp_path) as serving:
        step, most = 0.2, 20 * 500  # seconds, tokens: it runs until its client leaves
        serving.order(step_seconds=step)
        with httpx.stream(
            "POST",
            serving.url + COMPLETIONS,
            json={"prompt": [9], "n": 20, "max_tokens": 500, "stream": True},
        ):
            expected, limit = "penstock:expected_seconds_left", "penstock:hardware_limit_perc"
            rate = "penstock:generation_tokens_per_second"
            until(lambda: serving.metrics()[limit] > 0)
            said = serving.metrics()
            assert 0 < said[expected] * said[rate] <= most
            assert 0 < said[rate] <= 1.5 * 20 / step
            # 0.24 ms of weights and KV in steps that take this long at least
            assert 0 < said[limit] < 0.3e-3 / step
        until(serving.at_rest)
        said = serving.metrics()
        assert said[expected] == said[rate] == said[limit] == 0
        assert said['penstock:request_success_total{finished_reason="abort"}'] == 20


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "access.jsonl").read_text().splitlines()]


def test_the_access_log(serving: Serving) -> None:
    at = len(lines(serving.folder))
    secret = "the spring behind the mill"
    ask(serving, prompt=secret, max_tokens=4, n=2)
    ask(serving, prompt=secret, max_tokens=3, stream=True)
    ask(serving, prompt=secret, n=-1)
    httpx.post(serving.url + COMPLETIONS, json={"prompt": secret})
    httpx.get(serving.url + "/" + secret.replace(" ", "%20"), headers=KEY)
    httpx.request("PATCH", serving.url + "/v1/models/" + secret, headers=KEY)
    for quiet in ("/health", "/health/live", "/metrics"):
        httpx.get(serving.url + quiet, headers=KEY)
    until(lambda: len(lines(serving.folder)) == at + 6)
    whole, streamed, bad, keyless, nowhere, strange = lines(serving.folder)[at:]
    assert whole["request_id"].startswith("cmpl-") and re.fullmatch(
        r"2\d{3}-\d\d-\d\dT[\d:.]{12}Z", whole["time"]
    )
    assert (whole["route"], whole["status"], whole["key"], whole["n"]) == (
        COMPLETIONS,
        200,
        CALLED,
        2,
    )
    assert (whole["prompt_tokens"], whole["output_tokens"], whole["finish_reasons"]) == (
        26,
        8,
        {"length": 2},
    )
    assert 0 < whole["first_token_seconds"] <= whole["seconds"] and not whole["stream"]
    assert (
        streamed["stream"]
        and streamed["output_tokens"] == 3
        and streamed["first_token_seconds"] > 0
    )
    assert (bad["status"], bad["route"], bad["param"]) == (400, COMPLETIONS, "n") and "n" not in bad
    assert (keyless["status"], keyless["key"], nowhere["status"], nowhere["route"]) == (
        401,
        None,
        404,
        None,
    )
    assert (keyless["code"], nowhere["code"]) == ("invalid_api_key", "not_found")
    assert (strange["status"], strange["method"]) == (405, "PATCH")
    assert "code" not in whole and "param" not in streamed
    assert secret.split()[1] not in (serving.folder / "access.jsonl").read_text()


def test_a_refusal_is_in_the_log_with_its_code_and_param(tmp_path: Path) -> None:
    """And a fault of ours is a 500 there, not a client that left."""
    engine, log = FakeEngine(None), io.BytesIO()
    app = build_app(
        AppState(client=engine, model="fake", metrics=Metrics(engine, "fake")), None, log
    )

    def broken(*prompt: Any, **more: Any) -> None:
        raise RuntimeError("the spring behind the mill")

    async def ask() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for more in (
                {"logits_processors": ["mill"]},
                {"stream_options": {"x": "mill"}, "stream": True},
            ):
                await http.post(COMPLETIONS, json={"prompt": [1], **more})
            await http.post(COMPLETIONS, content=b"{mill")
            engine.submit = broken  # type: ignore[method-assign, assignment]
            await http.post(COMPLETIONS, json={"prompt": [1]})

    asyncio.run(ask())
    told = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["status"], line["code"], line["param"]) for line in told] == [
        (400, "unsupported_parameter", "logits_processors"),
        (400, "unknown_parameter", "stream_options.x"),
        (400, "invalid_json", None),
        (500, "internal", None),
    ]
    assert b"mill" not in log.getvalue()


def test_who_left_is_in_the_log(serving: Serving) -> None:
    at = len(lines(serving.folder))
    serving.order(step_seconds=0.05)
    with httpx.stream(
        "POST",
        serving.url + COMPLETIONS,
        headers=KEY,
        json={"prompt": "x", "max_tokens": 200, "n": 2, "stream": True},
    ) as answer:
        next(answer.iter_raw())
    until(lambda: len(lines(serving.folder)) > at)
    serving.order()
    (left,) = lines(serving.folder)[at:]
    assert left["finish_reasons"] == {"abort": 2} and 0 < left["output_tokens"] < 400


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--access-log"):
        open_log(str(tmp_path / "none" / "log"))
    with open_log(None) as nothing, open_log("-") as stderr:
        assert nothing is None and stderr.writable()


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of this process may have so many bytes, as if the disk were full."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_lines_that_find_no_room_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "log"
    with open_log(str(place)) as log:
        with room_for(15):
            for number in range(4):
                log.write(b'{"line":%d}\n' % number)
        log.write(b'{"line":4}\n')
        log.write(b'{"line":5}\n')
    assert place.read_text().splitlines() == ['{"line":0}', '{"li', '{"line":4}', '{"line":5}']
    said = "penstock: lines of the access log are lost (no room): see that they can be written\n"
    assert capsys.readouterr().err == said
