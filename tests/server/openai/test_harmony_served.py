"""Answers in gpt-oss's channels over HTTP, by the official client, whole and streamed; what is not
held is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_fake import Running, make_tokenizer, running_server

from penstock.text.parsers.parser_registry import AnswerParsers

pytestmark = pytest.mark.torch

PARSERS = AnswerParsers(
    enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="openai_gptoss"
)
PING: Any = {"type": "function", "function": {"name": "ping"}}
SAYS = (
    "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.ping <|constrain|>json<|message|>{"far": true}<|call|>'
)
USER: Any = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"))
    with running_server(tokenizer, parsers=PARSERS, max_model_len=4096) as running:
        running.engine.says = SAYS
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_whole_answer(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="fake", messages=USER, tools=[PING]).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert choice.message.reasoning == "I ask."  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and (call.function.name, call.function.arguments) == (
        "ping",
        '{"far": true}',
    )


def test_a_stream(client: openai.OpenAI) -> None:
    thought, name, arguments = "", "", ""
    for event in client.chat.completions.create(
        model="fake", messages=USER, tools=[PING], stream=True
    ):
        delta = event.choices[0].delta
        thought += getattr(delta, "reasoning", "") or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (thought, name, arguments) == ("I ask.", "ping", '{"far": true}')


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [PING], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "ping", "strict": True}}]},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["required", "strict", "a form"],
)
def test_what_is_not_held_is_refused(client: openai.OpenAI, more: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="read, not held"):
        client.chat.completions.create(model="fake", messages=USER, **more)
