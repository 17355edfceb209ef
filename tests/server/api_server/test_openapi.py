"""/openapi.json tells the truth: every operation, methods and keys;
and schemathesis finds nothing."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_schema
import httpx
import pytest
from batch_fake import Batching, batching
from server_fake import make_tokenizer, running_server

pytestmark = pytest.mark.torch

Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with batching(tokenizer, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Batching) -> Json:
    found: Json = server.http.get("/openapi.json").json()
    assert server.http.get("/openapi.json").json() == found
    return found


def operations(document: Json) -> dict[str, Json]:
    paths = document["paths"]
    return {
        f"{method.upper()} {path}": paths[path][method] for path in paths for method in paths[path]
    }


def test_every_schema_is_one_that_is_used(document: Json) -> None:
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert len(operations(document)) == 36 and named == set(document["components"]["schemas"])


def test_no_keys_are_told_where_none_are_asked_for(document: Json) -> None:
    assert "securitySchemes" not in document["components"]
    assert all("security" not in each for each in operations(document).values())


def test_keys_are_told(tmp_path: Path) -> None:
    with running_server(make_tokenizer(tmp_path), api_key="k") as running:
        answer = httpx.get(running.url + "/openapi.json", headers={"authorization": "Bearer k"})
        found = operations(answer.json())
        open_ones = {name for name, each in found.items() if "security" not in each}
        assert open_ones == {"GET /health", "GET /health/live"}
        for name in found:
            method, path = name.split()
            status = httpx.request(
                method, running.url + path.replace("{", "").replace("}", "")
            ).status_code
            assert (status == 401) == (name not in open_ones), name


def test_what_is_told_of_the_model(document: Json) -> None:
    form = document["components"]["schemas"]["CompletionForm"]["properties"]
    assert form["repetition_penalty"]["anyOf"][0] == {
        "type": "number",
        "minimum": 1e-6,
        "maximum": 100,
    }
    assert (
        form["model"]["anyOf"][0]["enum"] == ["fake", ""]
        and form["min_tokens"]["anyOf"][0]["maximum"] == 255
    )
    assert form["prompt"]["anyOf"][1]["items"]["maximum"] == 255


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", "GET, POST"),
        ("/v1/files/x", "DELETE, GET"),
        ("/v1/completions", "POST"),
        ("/version", "GET"),
    ],
)
def test_a_wrong_method_hears_all_the_right_ones(server: Batching, path: str, methods: str) -> None:
    for method in ("PUT", "PATCH", "OPTIONS"):
        answer = server.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """A small part of what `make reliability` tries."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: make reliability brings it")
    tried = fuzz_schema.run(tmp_path, 2, phases="coverage,fuzzing")
    assert tried.faults() == [], tried.said
    assert tried.cases > 500 and tried.operations == len(tried.described)
