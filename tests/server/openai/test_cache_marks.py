"""cache_control, which clients of Anthropic's models send to every server: taken in messages, parts
and tools, told of in /openapi.json, and without a trace in the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import make_tokenizer, running_server

from penstock.server.openai.forms import read_chat
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.responses_forms import read_responses
from penstock.server.openai.unsupported_fields import CACHE_MARK

pytestmark = pytest.mark.torch

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}


def chat(mark: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", **mark}]},
            {"role": "user", "content": "Who?", **mark},
        ],
        "tools": [{"type": "function", "function": FUNCTION | mark, **mark}],
    }


def test_a_marked_chat_is_the_plain_one() -> None:
    assert read_chat(json.dumps(chat(MARK)).encode()) == read_chat(json.dumps(chat({})).encode())
    assert read_chat(json.dumps(chat({"cache_control": None})).encode()) == read_chat(
        json.dumps(chat({})).encode()
    )


def test_a_marked_response_is_the_plain_one() -> None:
    def body(mark: dict[str, Any]) -> bytes:
        part = {"type": "input_text", "text": "Who?", **mark}
        tool = {"type": "function", **FUNCTION, **mark}
        return json.dumps(
            {"input": [{"role": "user", "content": [part]}], "tools": [tool]}
        ).encode()

    assert read_responses(body(MARK)).messages == read_responses(body({})).messages
    assert read_responses(body(MARK)).tools == read_responses(body({})).tools


@pytest.mark.parametrize(
    ("where", "param"),
    [
        (("messages", 0, "content", 0), "messages[0].content[0].cache_control"),
        (("messages", 1), "messages[1].cache_control"),
        (("tools", 0), "tools[0].cache_control"),
        (("tools", 0, "function"), "tools[0].function.cache_control"),
    ],
)
def test_a_mark_that_is_none_is_named(where: tuple[Any, ...], param: str) -> None:
    body = chat({})
    place: Any = body
    for name in where:
        place = place[name]
    place["cache_control"] = "ephemeral"
    with pytest.raises(HttpError) as refused:
        read_chat(json.dumps(body).encode())
    assert refused.value.param == param and "not served with this value" in str(refused.value)
    del place["cache_control"]
    place["cache_controls"] = {}
    with pytest.raises(HttpError):  # another name is unknown, as ever
        read_chat(json.dumps(body).encode())


def test_it_is_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running_server(make_tokenizer(tmp_path)) as server:
        lines = []
        for mark in ({}, MARK, MARK):
            part = {"type": "text", "text": "Who?", **mark}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
            told = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert told.status_code == 200, told.text
            lines.append(
                capfd.readouterr().err.count("cache_control is taken, and changes nothing")
            )
        assert lines == [0, 1, 0]
        forms = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    (note,) = {argument.note for argument in CACHE_MARK.values()}
    for name in ("Message", "TextPart", "ToolForm", "FunctionForm", "FunctionTool"):
        assert forms[name]["properties"]["cache_control"]["description"] == note, name
