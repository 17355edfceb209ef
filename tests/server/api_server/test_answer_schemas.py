"""What a server answers, streamed or whole, has the fields that /openapi.json says, and no others;
and answers that are joined from bytes are what their structs would be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from batch_fake import Batching, batching, jsonl, line
from server_fake import make_tokenizer
from tool_cases import ANSWER, PARSERS, PING, TEMPLATE, USER, WEATHER

from penstock.request import Delta, SamplingParams
from penstock.server.openai import answer_objects as made
from penstock.server.openai.answers import BaseAnswer, ChatAnswer, CompletionAnswer
from penstock.server.openai.logprobs_json import TokenSpellings
from penstock.server.openai.prompt_ids import TokenizedPrompt
from penstock.server.openai.translate import Call

pytestmark = pytest.mark.torch

Json = dict[str, Any]
JSON = "application/json"
COMPLETIONS, CHAT = "POST /v1/completions", "POST /v1/chat/completions"
GENERATE, RESPONSES = "POST /inference/v1/generate", "POST /v1/responses"
ALL = {"return_token_ids": True, "n": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
IDS = {"token_ids": [1, 2], "stream": False}
THINKS = {"messages": USER, "tools": [WEATHER, PING], "max_tokens": 400}
# operation -> bodies; None: no body
ASKED: dict[str, tuple[Json | None, ...]] = {
    COMPLETIONS: (
        {"prompt": "x"},
        {"prompt": ["x", "yz"], "logprobs": 2, "prompt_logprobs": 1, "echo": True, **ALL},
        {"prompt": "x", "logprobs": 1, **ALL, **STREAM},
        {"prompt": "x", **COUNTED},
    ),
    CHAT: (
        THINKS,
        {**THINKS, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, **ALL},
        {**THINKS, "logprobs": True, **ALL, **STREAM},
        {**THINKS, **COUNTED},
    ),
    GENERATE: (
        {**IDS, "sampling_params": {"logprobs": 1, "prompt_logprobs": 1}},
        {**IDS, "sampling_params": {"logprobs": 1}, "logprobs_format": "columns"},
        {**IDS, **STREAM, "sampling_params": {"logprobs": 1}},
    ),
    RESPONSES: tuple(
        {"input": "x", "tools": [{"type": "function", "name": name} for name in names], **more}
        for names in ((), ("get_weather", "ping"))
        for more in ({}, {"max_output_tokens": 3}, {"stream": True})
    ),
    "POST /generative_scoring": ({"query": "x", "items": ["a"], "label_token_ids": [1, 2]},),
    "POST /tokenize": ({"prompt": "x"}, {"messages": USER, "return_token_strs": True}),
    "POST /detokenize": ({"tokens": [1]},),
    "POST /update_weights": ({"model_path": "/w/3"},),
    "POST /v1/batches": (
        {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    ),
}
NOT_ASKED = {"POST /admin/restart"}  # needs several replicas


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=TEMPLATE)
    folder = tmp_path_factory.mktemp("state")
    with batching(tokenizer, folder, parsers=PARSERS, max_model_len=4096) as running:
        running.running.engine.says = ANSWER
        yield running


@pytest.fixture(scope="module")
def document(server: Batching) -> Json:
    """The document, with no fields allowed beside those named; special tokens may have any name."""
    found: Json = server.http.get("/openapi.json").json()
    for name, schema in found["components"]["schemas"].items():
        if "properties" in schema and name != "TokenizerInfo":
            schema["additionalProperties"] = False
    return found


def check(document: Json, schema: Json, value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def operations(document: Json) -> dict[str, Json]:
    return {
        f"{method.upper()} {path}": told["responses"]
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    }


def test_each_answer_fits_its_schema(server: Batching, document: Json) -> None:
    batch = server.submit(jsonl([line("a"), line("b", max_tokens="many")]))
    over = server.until_over(batch)
    server.upload(jsonl([line("c")]))
    failed = server.until_over(server.submit(b"{}\n"))
    assert failed.errors.data[0].line == 1  # the list of batches has it
    values = {"batch_id": batch, "file_id": over.input_file_id, "model": "fake"}
    tried = set()
    for name, responses in operations(document).items():
        content = responses["200"]["content"]
        if JSON not in content or name in NOT_ASKED:
            continue
        method, path = name.split()
        for key, value in values.items():
            path = path.replace("{" + key + "}", value)
        files = {"file": ("a", jsonl([line("d")]))} if name == "POST /v1/files" else None
        for body in ASKED.get(name, (None,)):
            if name == "POST /v1/batches":
                assert body is not None
                body = {**body, "input_file_id": server.upload(jsonl([line("e")]))}
            form = {"purpose": "batch"} if files else None
            # the fake engine has no labels' logprobs
            server.running.engine.aborts = name == "POST /generative_scoring"
            answer = server.http.request(method, path, json=body, files=files, data=form)
            if name == "POST /v1/batches/{batch_id}/cancel":  # it is over by now
                assert answer.status_code == 409
                check(document, responses["default"]["content"][JSON]["schema"], answer.json())
                continue
            assert answer.status_code == 200, (name, body, answer.text)
            if body is None or not body.get("stream"):
                check(document, content[JSON]["schema"], answer.json())
                continue
            events = [each for each in answer.text.split("\n") if each.startswith("data: {")]
            assert len(events) > 2
            data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"][0]
            for event in events:
                check(document, data["contentSchema"], json.loads(event[6:]))
        tried.add(name)
    assert set(ASKED) <= tried and len(tried) > 30


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("usage", [False, True])
def test_an_event_of_text_alone_is_its_structs(kind: type[BaseAnswer], usage: bool) -> None:
    call = Call(
        prompts=[TokenizedPrompt([1]), TokenizedPrompt([2])],
        sampling=SamplingParams(n=8),
        stream=True,
        include_usage=usage,
    )
    answer = kind(call, 'a"choices":[]{"index":0,"text":""', TokenSpellings(None, 9))
    answer.event(11, Delta(1, 3, "a"), None)
    event = answer.event(11, Delta(1, 3, 'b"\n'), None)
    text = 'b"\n' if kind is CompletionAnswer else made.MessageDelta(content='b"\n')
    struct = kind.chunk(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=[kind.part_of(11, text)],
        usage=None if usage else msgspec.UNSET,
    )
    assert event == b"data: %b\n\n" % msgspec.json.encode(struct)
    assert answer.event(11, Delta(1, 3, ""), None) == b""
