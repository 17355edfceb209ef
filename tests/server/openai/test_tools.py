"""Tools and reasoning over HTTP, by the official client: what a request becomes, and what it is
answered with, streamed and not, where the model says a given text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from server_fake import Running, make_tokenizer, running_server
from tool_cases import ANSWER, CALLS, CITY, PARSERS, PING, STRICT, TEMPLATE, USER, WEATHER

from penstock.errors import UsageError
from penstock.server.api_server.site import check_template
from penstock.text.parsers.parser_registry import AnswerParsers
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"), template=TEMPLATE)
    with running_server(tokenizer, parsers=PARSERS, max_model_len=4096) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, server: Running, says: str | None, **more: Any) -> Any:
    """The message of an answer and how it ended; streamed, put together as clients do."""
    server.engine.says = says
    body = {"model": "fake", "messages": USER, **more}
    if not body.get("stream"):
        choice = client.chat.completions.create(**body).choices[0]
        return choice.message, choice.finish_reason
    told = SimpleNamespace(role=None, content=None, reasoning=None, tool_calls=None)
    finish, calls = None, dict[int, Any]()
    for event in client.chat.completions.create(**body):
        (choice,) = event.choices
        assert finish is None
        told.role = choice.delta.role or told.role
        for name in ("content", "reasoning"):
            if (text := getattr(choice.delta, name, None)) is not None:
                setattr(told, name, (getattr(told, name) or "") + text)
        for part in choice.delta.tool_calls or []:
            if part.index not in calls:
                assert part.index == len(calls) and part.type == "function"
                calls[part.index] = SimpleNamespace(
                    id=part.id, function=SimpleNamespace(name=part.function.name, arguments="")
                )
            else:
                assert part.id is None and part.function.name is None
            calls[part.index].function.arguments += part.function.arguments
        finish = choice.finish_reason
    told.tool_calls, told.content = list(calls.values()) or None, told.content or None
    return told, finish


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_content_and_calls_are_told_apart(
    client: openai.OpenAI, server: Running, stream: bool
) -> None:
    message, finish = ask(client, server, ANSWER, tools=[WEATHER, PING], stream=stream)
    assert (message.role, message.content, message.reasoning) == (
        "assistant",
        "Of course.",
        "Let me see.",
    )
    assert (
        calls_of(message) == [("get_weather", '{"city": "Genoa"}'), ("ping", "{}")]
        and finish == "tool_calls"
    )
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    assert server.engine.submitted[-1].sampling.structured_outputs is None, (
        "what the model writes is read, not held"
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_one_by_one_cut_short_and_not_at_all(
    client: openai.OpenAI, server: Running, stream: bool
) -> None:
    asked = {"tools": [WEATHER, PING], "stream": stream}
    message, finish = ask(client, server, ANSWER, parallel_tool_calls=False, **asked)
    assert calls_of(message) == [("get_weather", '{"city": "Genoa"}')] and finish == "tool_calls"
    message, finish = ask(
        client,
        server,
        CALLS,
        max_tokens=len('<tool_call>\n{"name": "get_weather", "arguments": {"c'),
        **asked,
    )
    assert calls_of(message) == [("get_weather", '{"c')] and finish == "length"
    message, finish = ask(client, server, "Just text.\n", **asked)
    assert (message.content, calls_of(message), finish) == ("Just text.\n", [], "stop")
    message, finish = ask(client, server, CALLS, tool_choice="none", **asked)
    assert (message.content, calls_of(message), finish) == (CALLS, [], "stop")
    message, _ = ask(client, server, ANSWER, extra_body={"include_reasoning": False}, **asked)
    assert message.content == "Of course." and getattr(message, "reasoning", None) is None
    message, _ = ask(client, server, "<think>\nLong", **asked)
    assert (message.content, message.reasoning) == (None, "Long")


def test_a_whole_answer_has_openais_shape(client: openai.OpenAI, server: Running) -> None:
    server.engine.says = ANSWER
    raw = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": USER, "tools": [WEATHER, PING]}
    ).json()
    message = raw["choices"][0]["message"]
    assert list(message) == [
        "role",
        "content",
        "refusal",
        "reasoning",
        "reasoning_content",
        "tool_calls",
    ]
    assert message["reasoning"] == message["reasoning_content"]
    assert list(message["tool_calls"][0]) == ["id", "type", "function"]
    server.engine.says = CALLS
    raw = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": USER, "tools": [WEATHER, PING]}
    ).json()
    assert raw["choices"][0]["message"]["content"] is None
    asked = {
        "messages": USER,
        "tools": [PING],
        "n": 2,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
    }
    server.engine.says = '<tool_call>{"name": "ping"}</tool_call>'
    events = httpx.post(f"{server.url}/v1/chat/completions", json=asked).text.split("\n\n")
    choices = [
        json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")
    ]
    assert all(len(each["token_ids"]) == len(each["logprobs"]["content"]) == 1 for each in choices)
    assert len(choices) == 2 * len(server.engine.says)


@pytest.mark.parametrize(
    "choice, called, never",
    [
        ("required", ["get_weather", "ping"], ")*"),
        ({"type": "function", "function": {"name": "ping"}}, ["ping"], "get_weather"),
    ],
)
def test_what_has_to_be_called_is_held(
    client: openai.OpenAI, server: Running, choice: Any, called: list[str], never: str
) -> None:
    message, finish = ask(
        client, server, CALLS, tools=[WEATHER, PING], tool_choice=choice, parallel_tool_calls=False
    )
    assert len(message.tool_calls) == 1 and finish == "tool_calls"
    form = server.engine.submitted[-1].sampling.structured_outputs
    assert form.kinds == 0 and all(f'\\"name\\": \\"{name}\\"' in form.around for name in called)
    assert never not in form.around and "thought" in form.around


def test_strict_tools_and_forms_are_held_where_the_model_decides(
    client: openai.OpenAI, server: Running
) -> None:
    def form(**more: Any) -> Any:
        ask(client, server, "x", **more)
        return server.engine.submitted[-1].sampling.structured_outputs

    assert "begun" in form(tools=[STRICT, PING]).around
    assert form(tools=[STRICT, PING], tool_choice="none") is None
    json_form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": CITY, "strict": True},
    }
    either = form(tools=[PING], response_format=json_form)
    assert " | @form)" in either.around and json.loads(either.json) == CITY
    behind = form(response_format=json_form)
    assert behind.around.startswith('start: ("<think>" thought BEHIND)? @form')
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    assert form(response_format=json_form, extra_body=plain).around is None, (
        "the template has closed the thought"
    )
    only = form(tools=[PING], tool_choice="required", response_format=json_form)
    assert only.json is None and "@form" not in only.around


def test_what_the_template_is_told(client: openai.OpenAI, server: Running) -> None:
    said = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    ask(client, server, "x", tools=[STRICT], messages=said)
    prompt = server.engine.tokenizer.decode(server.engine.submitted[-1].ids)
    assert prompt.startswith(json.dumps([WEATHER])) and prompt.endswith(
        "<user>Weather?\n<assistant>(hm)<tool_call>get_weather"
        " Rome</tool_call>\n<tool>sunny[call_1]\n<assistant>"
    )
    message, _ = ask(client, server, "Hi", extra_body={"reasoning_effort": "none"})
    assert server.engine.tokenizer.decode(server.engine.submitted[-1].ids).endswith("</think>\n\n")
    assert message.content == "Hi"


def test_an_answer_goes_back_as_it_came(client: openai.OpenAI, server: Running) -> None:
    message, _ = ask(client, server, ANSWER, tools=[WEATHER, PING])
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls
    ]
    after, finish = ask(
        client, server, "Done.", tools=[WEATHER, PING], messages=[*USER, message, *results]
    )
    assert (after.content, finish) == ("Done.", "stop")


def test_parse_gives_pythons_objects(client: openai.OpenAI, server: Running) -> None:
    from pydantic import BaseModel

    class GetWeather(BaseModel):
        city: str

    def sent_back(message: Any) -> None:
        """The message is the next request's, with what parse() put into it."""
        server.engine.says = "Done."
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "ok"}
            for call in message.tool_calls or ()
        ]
        made = client.chat.completions.create(model="fake", messages=[*USER, message, *results])
        assert made.choices[0].message.content == "Done."

    server.engine.says = (
        '<tool_call>{"name": "GetWeather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    tools = [openai.pydantic_function_tool(GetWeather)]
    made = client.chat.completions.parse(
        model="fake", messages=USER, tools=tools, tool_choice="required"
    )
    assert made.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(
        city="Rome"
    )
    sent_back(made.choices[0].message)
    server.engine.says = '{"city": "Oslo"}'
    made = client.chat.completions.parse(model="fake", messages=USER, response_format=GetWeather)
    assert made.choices[0].message.parsed == GetWeather(city="Oslo")
    sent_back(made.choices[0].message)
    server.engine.says = (
        '<tool_call>{"name": "GetWeather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    with client.chat.completions.stream(model="fake", messages=USER, tools=tools) as stream:
        kinds = {event.type for event in stream}
        made = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert made.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(
        city="Rome"
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_the_model_leaves_open_is_closed(
    client: openai.OpenAI, server: Running, stream: bool
) -> None:
    asked = {"tools": [WEATHER, PING], "stream": stream}
    left = '<tool_call>\n{"name": "get_weather", "arguments": {"city": NaN, "at": ["no'
    message, finish = ask(client, server, left, **asked)
    assert (
        calls_of(message) == [("get_weather", '{"city": "NaN", "at": ["no"]}')]
        and finish == "tool_calls"
    )
    message, finish = ask(client, server, left, max_tokens=len(left) - 1, **asked)
    assert (
        calls_of(message) == [("get_weather", '{"city": "NaN", "at": ["n')] and finish == "length"
    )
    server.engine.says = left
    items = client.responses.create(
        model="fake",
        input="x",
        tools=[{"type": "function", **WEATHER["function"], "strict": False}],
    ).output
    assert [item.arguments for item in items if item.type == "function_call"] == [
        '{"city": "NaN", "at": ["no"]}'
    ]


def test_calls_in_tags_are_held_and_read(tmp_path: Any) -> None:
    parsers = AnswerParsers(enable_auto_tool_choice=True, tool_call_parser="qwen3_coder")
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    note = {"type": "function", "function": {"name": "note", "parameters": schema}}
    with running_server(
        make_tokenizer(tmp_path, template=TEMPLATE), max_model_len=4096, parsers=parsers
    ) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        left_out = "<parameter=a>\nx\n<parameter=b>\n5\n</parameter>\n"
        says = f"<tool_call>\n<function=note>\n{left_out}</function>\n</tool_call>"
        message, _ = ask(client, server, says, tools=[note])
        assert calls_of(message) == [("note", '{"a": "x", "b": 5}')]
        message, _ = ask(client, server, says, tools=[note], tool_choice="required")
        assert calls_of(message) == [("note", '{"a": "x\\n<parameter=b>\\n5"}')], (
            "nothing is left out where it is held"
        )
        strict = {**note["function"], "strict": True, "parameters": {**schema, "minProperties": 1}}
        for choice in ("auto", "required"):
            with pytest.raises(
                openai.BadRequestError, match="calls of the tool note cannot be held: minProp"
            ) as refused:
                ask(
                    client,
                    server,
                    says,
                    tools=[{"type": "function", "function": strict}],
                    tool_choice=choice,
                )
            assert refused.value.param == "tools"


def test_a_models_own_template_reads_its_answers(tmp_path: Any) -> None:
    make_tokenizer(tmp_path, template=TEMPLATE)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    spec = {
        "start_anchor": "<assistant>",
        "fields": {
            "reasoning": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {"open": "[CALLS]", "close": "[/CALLS]", "content": "json"},
            "content": {},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "response_template": spec})
    )
    parsers = AnswerParsers(enable_auto_tool_choice=True, tool_call_parser="response_template")
    tokenizer = Tokenizer.load(tmp_path)
    check_template(tokenizer, parsers)
    with pytest.raises(UsageError, match="has no response_template"):
        check_template(None, parsers)
    with running_server(tokenizer, max_model_len=4096, parsers=parsers) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        made = [{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "ping"}]
        own = f"[THINK]hm[/THINK]Sure. [CALLS]{json.dumps(made)}[/CALLS]"
        for stream in (False, True):
            message, finish = ask(client, server, own, tools=[WEATHER, PING], stream=stream)
            assert (message.reasoning, message.content, finish) == ("hm", "Sure.", "tool_calls")
            assert calls_of(message) == [("get_weather", '{"city": "Oslo"}'), ("ping", "{}")]
        assert server.engine.submitted[-1].sampling.skip_special_tokens is False
        message, _ = ask(client, server, "[THINK]hm[/THINK]Hello")
        assert (message.reasoning, message.content) == ("hm", "Hello")
        message, _ = ask(client, server, CALLS, tools=[WEATHER, PING], tool_choice="required")
        assert len(calls_of(message)) == 2, (
            "what has to be called is written, and read, in a format of ours"
        )
        with pytest.raises(
            openai.BadRequestError, match="strict tools are held here with tool_choice required"
        ):
            ask(client, server, "x", tools=[STRICT])


def test_a_server_without_parsers(tmp_path: Any) -> None:
    with running_server(make_tokenizer(tmp_path), max_model_len=4096) as server:
        server.engine.says = CALLS
        asked = {"messages": USER, "tools": [WEATHER, PING]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=asked)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"
        assert "--enable-auto-tool-choice" in refused.json()["error"]["message"]
        held = httpx.post(
            f"{server.url}/v1/chat/completions", json={**asked, "tool_choice": "required"}
        ).json()
        assert len(held["choices"][0]["message"]["tool_calls"]) == 2
        server.engine.says = "<think>a</think>b"
        plain = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": USER}).json()
        assert plain["choices"][0]["message"] == {
            "role": "assistant",
            "content": "<think>a</think>b",
            "refusal": None,
        }
