"""Libraries that agents are made with, unchanged: typed answers in every mode that they have, tools
called and answered, streams; over chats and over responses. `make reliability` brings them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from server_fake import Running, make_tokenizer, running_server
from tool_cases import PARSERS, TEMPLATE

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")


class City(BaseModel):
    """A city."""

    name: str
    size: int


ROME = City(name="Rome", size=3)


def call(name: str, arguments: str = ROME.model_dump_json()) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make reliability brings it")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"), template=TEMPLATE)
    with running_server(tokenizer, parsers=PARSERS, max_model_len=16_384) as running:
        yield running


def held(server: Running) -> Any:
    """What holds the last answer to a form."""
    return server.engine.submitted[-1].sampling.structured_outputs


# --- langchain


def chat(server: Running, **more: Any) -> Any:
    needs("langchain_openai")
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="fake", base_url=server.url + "/v1", api_key="none", max_retries=0, **more
    )


@pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchain_with_structured_output(server: Running, method: str, responses: bool) -> None:
    model = chat(server, use_responses_api=responses)
    server.engine.says = call("City") if method == "function_calling" else ROME.model_dump_json()
    assert model.with_structured_output(City, method=method).invoke("Which city? In JSON.") == ROME
    assert held(server) is not None


@pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])
def test_langchain_calls_a_tool_and_goes_on(server: Running, responses: bool) -> None:
    model = chat(server, use_responses_api=responses)
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    bound = model.bind_tools([add])
    server.engine.says = "Let me see.\n" + call("add", '{"a": 1, "b": 2}')
    first = bound.invoke("1 + 2?")
    (made,) = first.tool_calls
    assert (made["name"], made["args"]) == ("add", {"a": 1, "b": 2})
    streamed: Any = None
    for chunk in bound.stream("1 + 2?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [
        ("add", {"a": 1, "b": 2})
    ]
    assert streamed.text == first.text == "Let me see."
    server.engine.says = "Three."
    assert bound.invoke([HumanMessage("1 + 2?"), first, add.invoke(made)]).text == "Three."


# --- pydantic-ai


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(server: Running, request: pytest.FixtureRequest) -> Any:
    needs("pydantic_ai")
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    return getattr(openai, request.param)(
        "fake", provider=OpenAIProvider(base_url=server.url + "/v1", api_key="none")
    )


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_pydantic_ai_typed_output(server: Running, model: Any, kind: str) -> None:
    import pydantic_ai

    server.engine.says = call("final_result") if kind == "ToolOutput" else ROME.model_dump_json()
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, kind)(City))
    assert agent.run_sync("Which city?").output == ROME

    async def streamed() -> Any:
        async with agent.run_stream("Which city?") as stream:
            return [each async for each in stream.stream_output(debounce_by=None)][-1]

    assert asyncio.run(streamed()) == ROME


def test_pydantic_ai_calls_a_tool_and_goes_on(server: Running, model: Any) -> None:
    from pydantic_ai import Agent

    agent, seen = Agent(model, output_type=str), list[tuple[int, int]]()

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        server.engine.says = "Three."
        seen.append((a, b))
        return a + b

    server.engine.says = call("add", '{"a": 1, "b": 2}')
    assert agent.run_sync("1 + 2?").output == "Three." and seen == [(1, 2)]
