"""/update_weights and /reset_prefix_cache: what they have the engine do, what answers say then, and
who may ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import Running, make_tokenizer, running_server

pytestmark = pytest.mark.torch


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running_server(make_tokenizer(tmp_path)) as running:
        yield running


def test_weights_and_caches(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/weights_version").json() == {"weights_version": "default"}
        done = http.post(
            "/update_weights",
            json={"model_path": "/w/step-3", "weights_version": "3", "mode": "keep"},
        )
        assert done.json() == {"success": True, "weights_version": "3"}
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        assert http.get("/weights_version").json() == {"weights_version": "3"}
        assert (
            'penstock:weights_info{model_name="fake",weights_version="3"} 1.0'
            in http.get("/metrics").text
        )
    found = server.service.client.controls  # type: ignore[union-attr]
    assert found == [("update_weights", "keep", "/w/step-3"), ("reset_prefix_cache", "keep", "1")]


def test_what_was_ended_says_so(server: Running) -> None:
    """By every route: no answer takes it for a whole one, none is an error."""
    server.engine.aborts = True
    ends = {"model": "fake", "max_tokens": 4, "n": 2, "logprobs": 1, "prompt": "x"}
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 2}
    with httpx.Client(base_url=server.url) as http:
        for path, body in (
            ("completions", ends),
            ("completions", {**ends, "echo": True, "max_tokens": 0}),
            ("chat/completions", chat),
        ):
            for stream in (False, True):
                answer = http.post(f"/v1/{path}", json={**body, "stream": stream})
                assert (
                    answer.status_code == 200 and answer.text.count('"finish_reason":"abort"') == 2
                ), answer.text
        made = http.post("/v1/responses", json={"input": "x"}).json()
        assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "abort"})
        asked = {"query": "x", "items": ["a", "b"], "label_token_ids": [1, 2]}
        scored = http.post("/generative_scoring", json=asked)
        assert scored.status_code == 200, scored.text
        assert [(each["score"], each["label_probs"]) for each in scored.json()["data"]] == [
            (None, None)
        ] * 2
        line = http.post(
            "/v1/bulk", content=b'{"prompt": "x", "packed": true, "logprobs": 0}'
        ).json()
        assert line["choices"][0]["finish_reason"] == "abort"


def shared_of(size: int = 4, **more: Any) -> dict[str, Any]:
    """A body with a memory and a tensor."""
    tensor = {"name": "a", "dtype": "F32", "shape": [1], **more}
    return {
        "shared": {"memories": [{"kind": "shm", "size": size, "name": "m"}], "tensors": [tensor]}
    }


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "weights come from model_path or from shared: give one of the two"),
        ({"model_path": "/w", "shared": {"memories": [], "tensors": []}}, "give one"),
        ({"shared": {"memories": []}}, "missing required field `tensors`"),
        (
            {"shared": {"memories": [{"kind": "shm", "size": 4, "nam": "x"}], "tensors": []}},
            "unknown field 'nam'",
        ),
        (
            {"shared": {"memories": [{"kind": "cuda", "size": 4, "handle": "%"}], "tensors": []}},
            "Invalid base64",
        ),
        ({"shared": {"memories": [], "tensors": [], "more": 1}}, "unknown field 'more'"),
        ({"model_path": 3}, "Expected `str | null`"),
        ({"model_path": "/w", "mode": "drop"}, "Invalid enum value 'drop'"),
        ({"model_path": "/w", "path": "/w"}, "unknown field `path`"),
        ({"model_path": "/no/folder"}, "no folder /no/folder: name one"),
        (shared_of(size=2**64), "shared has a size that is not from 0 to 2**63 - 1"),
        (shared_of(offset=-1), "shared has a offset that is not"),
        (shared_of(shape=[3, 2**70]), "shared has a shape that is not"),
        (shared_of(memory=2**63), "shared has a memory that is not"),
    ],
)
def test_bad_input(server: Running, body: dict[str, Any], error: str) -> None:
    answer = httpx.post(server.url + "/update_weights", json=body)
    assert answer.status_code == 400 and error in answer.json()["error"]["message"]
    assert httpx.get(server.url + "/weights_version").json() == {"weights_version": "default"}


def test_sleep(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        asleep = {"success": True, "is_sleeping": True, "asleep": ["weights", "kv_cache"]}
        assert http.post("/sleep?level=2&mode=keep").json() == http.post("/sleep").json() == asleep
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up?tags=weights&tags=kv_cache").json()["asleep"] == []
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    found = server.service.client.controls  # type: ignore[union-attr]
    assert found == [("sleep", "keep", "2"), ("sleep", "wait", "1"), ("wake_up", "keep", "1")]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("/sleep?level=0", "level must be 1"),
        ("/sleep?level=one", "level must be 1"),
        ("/sleep?mode=drop", "mode must be 'wait'"),
        ("/sleep?tags=weights", "no parameter 'tags' here"),
        ("/wake_up?level=1", "no parameter 'level' here"),
    ],
)
def test_bad_queries(server: Running, asked: str, error: str) -> None:
    answer = httpx.post(server.url + asked)
    assert answer.status_code == 400 and error in answer.json()["error"]["message"]
    assert httpx.get(server.url + "/is_sleeping").json() == {"is_sleeping": False}
