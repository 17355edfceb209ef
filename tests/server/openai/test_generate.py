"""/inference/v1/generate, vLLM's route of token ids: what goes down and comes back, in one body and
in events, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from server_fake import Running, make_tokenizer, running_server

from penstock.engine.logprobs import LazyLogprobs
from penstock.server.openai.generate_answer import columns_of

pytestmark = pytest.mark.torch

PATH = "/inference/v1/generate"
ASK: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(make_tokenizer(tmp_path_factory.mktemp("tok"))) as running:
        yield running


def generate(server: Running, **body: Any) -> Any:
    return httpx.post(server.url + PATH, json=ASK | body)


def test_ids_in_and_ids_out(server: Running) -> None:
    answer = generate(server, request_id="step-3.rollout:7")
    body = answer.json()
    assert answer.headers["x-request-id"] == body["request_id"] == "step-3.rollout:7"
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 8
    assert body["prompt_logprobs"] is None and body["kv_transfer_params"] is None
    asked = server.engine.submitted[-1]
    assert list(asked.ids) == [5, 6, 7] and not asked.sampling.detokenize and asked.sampling.n == 2
    for index, choice in enumerate(body["choices"]):
        assert (
            choice["index"] == index
            and choice["finish_reason"] == "length"
            and len(choice["token_ids"]) == 4
        )
        assert not {"text", "message", "prompt_token_ids"} & choice.keys()
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert all(
            entry["logprob"] == -0.25 and len(entry["top_logprobs"]) == 1 for entry in entries
        )


def test_columns(server: Running) -> None:
    answer = generate(
        server, logprobs_format="columns", sampling_params={"max_tokens": 3, "logprobs": 0}
    )
    body = answer.json()
    (choice,) = body["choices"]
    assert choice["logprobs"] == {
        "logprobs": [-0.25] * 3,
        "ranks": [1] * 3,
        "top_token_ids": [[]] * 3,
        "top_logprobs": [[]] * 3,
    }
    assert body["request_id"].startswith("gen-")
    assert answer.headers["x-request-id"] == body["request_id"]
    ids, top = np.array([[4, 9], [9, -1]]), np.array([[-0.5, -1.0], [-0.1, -np.inf]])
    columns = (np.array([9, 9]), np.array([-1.0, np.nan]), np.array([2, 1]), ids, top)
    told = columns_of([9, 9], LazyLogprobs(columns, None), 2)
    assert told.logprobs == [-1.0, -9999.0] and told.ranks == [2, 1]
    assert told.top_token_ids == [[4, 9], [9, -1]]
    assert told.top_logprobs == [[-0.5, -1.0], [-0.1, -9999.0]]
    first = [next(iter(LazyLogprobs(tuple(each[:1] for each in columns), None)))]
    dicts = columns_of([9], first, 2)
    for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
        assert getattr(dicts, name) == getattr(told, name)[:1]


def test_events_are_of_ids_and_end_as_vllms(server: Running) -> None:
    found: list[int] = []
    asked = ASK | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {"max_tokens": 5},
    }
    with httpx.stream("POST", server.url + PATH, json=asked) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["usage"]["completion_tokens"] == 5
    events = [json.loads(line) for line in lines[:-2]]
    assert len({event["request_id"] for event in events}) == 1
    for event in events:
        assert event["usage"] is None and "object" not in event
        found += event["choices"][0]["token_ids"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert found == server.engine.spelling[:5]


def test_text_is_made_where_a_stop_string_needs_it(server: Running) -> None:
    generate(
        server, sampling_params={"max_tokens": 4, "stop": ["d"], "detokenize": False, "seed": None}
    )
    assert server.engine.submitted[-1].sampling.detokenize


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids[0]"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [10**9]}, "token_ids"),
        ({"prompt": "x"}, "token_ids"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
        ({"sampling_params": {"colour": 1}}, "sampling_params.colour"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"logprobs": 21}}, "logprobs"),
        ({"request_id": "a\r\nset-cookie: b"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"logprobs_format": "rows"}, "logprobs_format"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"priority": 3}, "priority"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"model": "another"}, "model"),
    ],
    ids=str,
)
def test_bad_input(server: Running, body: dict[str, Any], param: str) -> None:
    before = len(server.engine.submitted)
    answer = generate(server, **body)
    error = answer.json()["error"]
    assert (
        answer.status_code in (400, 404)
        and error["param"] == param
        and "\n" not in error["message"]
    ), error
    assert len(server.engine.submitted) == before
