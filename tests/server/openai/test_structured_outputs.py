"""Forms of answers over HTTP: what OpenAI's and vLLM's fields become, and what is refused, with its
way out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import Running, make_tokenizer, running_server

from penstock.errors import UsageError
from penstock.request import MAX_GRAMMAR, StructuredOutputsParams
from penstock.sandbox.sandbox import Sandbox
from penstock.sandbox.sandbox_process import GrammarJob

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ONE_OF = {
    "oneOf": [
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"b": {}}},
    ]
}
TEXT = json.dumps(SCHEMA)
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(make_tokenizer(tmp_path_factory.mktemp("tok"))) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    return httpx.post(f"{server.url}/v1/{path}", json={**said, "max_tokens": 2, **body})


def as_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **more}}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "body, want",
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": as_schema(schema=SCHEMA, strict=True)},
            StructuredOutputsParams(json=TEXT),
        ),
        (
            {"response_format": as_schema(schema=SCHEMA)},
            StructuredOutputsParams(json=TEXT, lenient=True),
        ),
        (
            {"response_format": as_schema(schema=ONE_OF)},
            StructuredOutputsParams(json=ONE_OF, lenient=True),
        ),
        (
            {"response_format": as_schema()},
            StructuredOutputsParams(json={"type": "object"}, lenient=True),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=TEXT)),
        ({"structured_outputs": {"json": TEXT, "regex": None}}, StructuredOutputsParams(json=TEXT)),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            StructuredOutputsParams(choice=["a", "b"]),
        ),
        (
            {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}},
            StructuredOutputsParams(regex="a+"),
        ),
        ({"structured_outputs": {}, "response_format": None}, None),
        ({"response_format": TAG}, StructuredOutputsParams(structural_tag=TAG)),
        (
            {
                "response_format": as_schema(schema=SCHEMA, strict=True),
                "structured_outputs": {"whitespace_pattern": " "},
            },
            StructuredOutputsParams(json=TEXT, whitespace_pattern=" "),
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            StructuredOutputsParams(structural_tag=TAG),
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_form_becomes(server: Running, path: str, body: dict[str, Any], want: Any) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 200, answer.text
    assert server.engine.submitted[-1].sampling.structured_outputs == want


@pytest.mark.parametrize(
    "body, param, says",
    [
        ({"guided_json": SCHEMA}, "guided_json", "structured_outputs: {json: ...}"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs: {choice: [...]}"),
        (
            {"guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "structured_outputs: {json: ..., whitespace_pa",
        ),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs",
            "takes exactly one of",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        (
            {"structured_outputs": {"json": ONE_OF}},
            "structured_outputs",
            "oneOf constraints are not supported",
        ),
        ({"response_format": as_schema(schema=ONE_OF, strict=True)}, "response_format", "oneOf"),
        (
            {"structured_outputs": {"structural_tag": {"x": 1}}},
            "structured_outputs",
            "unknown field `x`",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format",
            "takes structures and triggers",
        ),
        (
            {"response_format": {"type": "text", "triggers": ["a"]}},
            "response_format",
            "triggers is of",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "structured_outputs",
            "ignore_eos",
        ),
        (
            {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR + 1)}},
            "structured_outputs",
            "at most 262,144",
        ),
        (
            {"response_format": as_schema(schema={"$ref": "http://10.0.0.1/x"})},
            "response_format",
            "does not fetch",
        ),
        (
            {"response_format": as_schema(schema={"enum": ["a" * MAX_GRAMMAR]})},
            "response_format",
            "response_format holds at most 262,144",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_served_is_a_400(
    server: Running, body: dict[str, Any], param: str, says: str
) -> None:
    before = len(server.engine.submitted)
    answer = post(server, "completions", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"] and "\n" not in error["message"]
    assert len(server.engine.submitted) == before


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body, field",
    [
        ("completions", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        (
            "completions",
            {"prompt": ["a", "b"], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            "completions",
            {"prompt": ["a", "b"], "response_format": as_schema(schema=SCHEMA)},
            "response_format",
        ),
        ("chat/completions", {"response_format": as_schema(schema=SCHEMA)}, "response_format"),
        ("chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "tools"),
        (
            "chat/completions",
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tools",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "text.format",
        ),
    ],
)
def test_a_form_that_the_engine_refuses_is_called_by_its_field(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    field: str,
    stream: bool,
) -> None:
    rule = "structured_outputs cannot be served: no"
    monkeypatch.setattr(
        server.engine, "refuses", UsageError(rule, param="structured_outputs", rule=rule)
    )
    if path == "responses":
        answer = httpx.post(
            f"{server.url}/v1/responses", json={"input": "x", "stream": stream, **body}
        )
        told = json.loads(answer.text.rpartition("data: ")[2]) if stream else answer.json()["error"]
    else:
        answer = post(server, path, stream=stream, **body)
        (data,) = (
            [line[6:] for line in answer.text.splitlines() if '"error"' in line]
            if stream
            else [answer.text]
        )
        told = json.loads(data)["error"]
    assert (told["param"], told["message"]) == (field, f"{field} cannot be served: no")
    assert answer.status_code == (200 if stream else 400)


def test_a_form_that_was_good_is_not_looked_at_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    plain = server.service.sandboxes._do  # type: ignore[attr-defined]

    def watched(job: Any) -> Any:
        looked.append(job.asked) if isinstance(job, GrammarJob) else None
        return plain(job)

    monkeypatch.setattr(server.service.sandboxes, "_do", watched)
    for asked in (
        {"regex": "only once"},
        {"regex": "only once"},
        {"regex": "only once", "lenient": True},
    ):
        assert post(server, "completions", structured_outputs=asked).status_code == 200
    for _ in range(2):
        assert post(server, "completions", structured_outputs={"regex": "(only"}).status_code == 400
    assert [(form.regex, form.lenient) for form in looked] == [
        ("only once", False),
        ("only once", True),
        ("(only", False),
        ("(only", False),
    ]


def test_the_sandbox_looks_at_forms(tmp_path: Path) -> None:
    sandbox = Sandbox.open(make_tokenizer(tmp_path), 256)
    try:
        assert sandbox.run(GrammarJob(StructuredOutputsParams(json=SCHEMA))).ids == []
        with pytest.raises(UsageError, match="unclosed group"):
            sandbox.run(GrammarJob(StructuredOutputsParams(regex="(")))
    finally:
        sandbox.close()
