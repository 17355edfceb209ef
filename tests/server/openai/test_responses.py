"""/v1/responses by the official client: what a body becomes, its answer, and its events in OpenAI's
order, where the model says a given text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_fake import Running, make_tokenizer, running_server
from tool_cases import ANSWER, CITY, PARSERS, TEMPLATE

from penstock.server.openai.output_items import OutputItems
from penstock.server.openai.responses_forms import read_responses
from penstock.text.parsers.pieces import AnswerPiece

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells it.",
    "parameters": CITY,
    "strict": False,
}
PING = {"type": "function", "name": "ping", "parameters": None, "strict": None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"), template=TEMPLATE)
    with running_server(tokenizer, parsers=PARSERS, max_model_len=4096) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_of(server: Running) -> str:
    return str(server.engine.tokenizer.decode(server.engine.submitted[-1].ids))


def test_a_text_becomes_an_answer(client: openai.OpenAI, server: Running) -> None:
    server.engine.says = "Hello."
    made = client.responses.create(
        model="fake", input="Hi", instructions="Be brief.", max_output_tokens=20, temperature=0.5
    )
    assert (made.output_text, made.status, made.object) == ("Hello.", "completed", "response")
    assert (
        made.id.startswith("resp_") and made.instructions == "Be brief." and made.temperature == 0.5
    )
    assert prompt_of(server) == "<system>Be brief.\n<user>Hi\n<assistant>"
    usage = made.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        len(prompt_of(server)),
        6,
        len(prompt_of(server)) + 6,
    )
    assert (
        usage.input_tokens_details.cached_tokens % 16 == 0
        and usage.output_tokens_details.reasoning_tokens == 0
    )
    cut = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == (
        "Hel",
        "incomplete",
        "max_output_tokens",
    )
    assert cut.output[0].status == "incomplete"


def test_items_become_messages_and_an_answers_own_go_back(
    client: openai.OpenAI, server: Running
) -> None:
    server.engine.says = ANSWER
    said: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        }
    ]
    first = client.responses.create(model="fake", input=said, tools=[WEATHER, PING])
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert first.output[0].content[0].text == "Let me see." and first.output_text == "Of course."
    assert [(item.name, item.arguments) for item in first.output[2:]] == [
        ("get_weather", '{"city": "Genoa"}'),
        ("ping", "{}"),
    ]
    assert first.usage.output_tokens_details.reasoning_tokens == len(
        "<think>\nLet me see.\n</think>\n\n"
    )
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output[2:]
    ]
    server.engine.says = "Done."
    second = client.responses.create(
        model="fake", input=[*said, *first.output, *results], tools=[WEATHER, PING]
    )
    assert second.output_text == "Done."
    ids = [item.call_id for item in first.output[2:]]
    assert prompt_of(server).partition("\n")[2] == (
        "<user>a\nb\n<assistant>Of course.(Let me see.)"
        "<tool_call>get_weather Genoa</tool_call><tool_call>ping </tool_call>\n"
        f"<tool>sunny[{ids[0]}]\n<tool>sunny[{ids[1]}]\n<assistant>"
    )


def test_what_the_assistant_thinks_says_and_calls_is_one_turn() -> None:
    def turns(*items: Any) -> list[tuple[Any, ...]]:
        body = json.dumps({"input": [{"role": "user", "content": "x"}, *items]}).encode()
        return [
            (m.thought, m.text, [call.id for call in m.tool_calls or []])
            if m.role == "assistant"
            else m.role
            for m in read_responses(body).messages[1:]
        ]

    def think(*texts: str) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": t} for t in texts],
        }

    def say(text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [part],
        }

    def call(known: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": known, "name": "f", "arguments": "{"}

    gave = {"type": "function_call_output", "call_id": "c", "output": "y"}
    user = {"role": "user", "content": "z"}
    assert turns(think("a", "b"), think("c"), say("d"), call("e"), call("f")) == [
        ("a\nb\nc", "d", ["e", "f"])
    ]
    assert turns(think("a")) == [("a", "", [])] == turns(think("a"), user)[:1]
    assert turns(think("a"), call("c"), gave, think("b"), call("d")) == [
        ("a", "", ["c"]),
        "tool",
        ("b", "", ["d"]),
    ]
    assert turns(say("a"), call("c"), say("b")) == [(None, "ab", ["c"])]
    assert turns(call("c"), think("a"), call("d")) == [("a", "", ["c", "d"])]
    assert turns(think("a"), say("b"), think("c"), say("d")) == [("a", "b", []), ("c", "d", [])]
    assert turns(say("a"), say("b"), user) == [(None, "a", []), (None, "b", []), "user"]
    assert turns(say("a"), think("b")) == [("b", "a", [])]


def test_an_answer_of_nothing_is_a_message(client: openai.OpenAI, server: Running) -> None:
    server.engine.says = ""
    made = client.responses.create(model="fake", input="x")
    assert (made.output_text, [item.type for item in made.output]) == ("", ["message"])
    items = OutputItems()
    events = [*items.take(AnswerPiece("content", "")), *items.close("completed")]
    assert [name for name, _ in events] == [
        name for name in EVENTS[8:14] if not name.endswith("delta")
    ]


EVENTS = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "reasoning_text.delta",
    "reasoning_text.done",
    "content_part.done",
    "output_item.done",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
    "completed",
]


def test_events_come_in_openais_order(client: openai.OpenAI, server: Running) -> None:
    server.engine.says = ANSWER
    events = list(
        client.responses.create(model="fake", input="x", tools=[WEATHER, PING], stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [
        kind for at, kind in enumerate(kinds) if kind != (kinds[at - 1] if at else "")
    ] == EVENTS
    whole = events[-1].response
    for event in events:
        if hasattr(event, "item_id"):
            assert whole.output[event.output_index].id == event.item_id
    texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (
        texts == whole.output_text == "Of course."
        and whole.status == "completed"
        and whole.usage.output_tokens == len(ANSWER)
    )
    assert [item.status for item in whole.output] == ["completed"] * 4
    not_streamed = client.responses.create(model="fake", input="x", tools=[WEATHER, PING])

    def told(response: Any) -> Any:
        dumped = response.model_dump(exclude={"id", "created_at"})
        return dumped | {
            "output": [
                {k: v for k, v in item.items() if k not in ("id", "call_id")}
                for item in dumped["output"]
            ]
        }

    assert told(whole) == told(not_streamed)


def test_the_clients_helpers(client: openai.OpenAI, server: Running) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    server.engine.says = '{"city": "Rome"}'
    made = client.responses.parse(model="fake", input="x", text_format=City)
    assert made.output_parsed == City(city="Rome")
    form = server.engine.submitted[-1].sampling.structured_outputs
    assert json.loads(form.json)["properties"]["city"]["type"] == "string" and not form.lenient
    with client.responses.stream(model="fake", input="x", text_format=City) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        assert stream.get_final_response().output_parsed == City(city="Rome")
    server.engine.says = (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    named = {"type": "function", "name": "get_weather"}
    with client.responses.stream(
        model="fake", input="x", tools=[WEATHER], tool_choice=named
    ) as stream:
        (call,) = stream.get_final_response().output
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert "call_rest" in server.engine.submitted[-1].sampling.structured_outputs.around


def test_an_answer_of_changed_weights_says_so(client: openai.OpenAI, server: Running) -> None:
    server.engine.says = "Hello"
    assert "weights_version" not in client.responses.create(model="fake", input="x").model_extra
    server.engine.weights_version = "7"
    try:
        assert (
            client.responses.create(model="fake", input="x").model_extra["weights_version"] == "7"
        )
        *_, last = client.responses.create(model="fake", input="x", stream=True)
        assert last.response.model_extra["weights_version"] == "7"
        made = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}]
        )
        assert made.choices[0].model_extra["weights_version"] == "7"
    finally:
        server.engine.weights_version = "default"


def test_an_error_amid_a_stream_is_its_last_event(client: openai.OpenAI, server: Running) -> None:
    server.engine.says, server.engine.fail_with = "Hello", "its logits were not finite"
    try:
        events = list(client.responses.create(model="fake", input="x", stream=True))
        assert events[-1].type == "error" and events[-1].code == "numerical_error"
        raw = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "stream": True})
        assert raw.status_code == 200 and "[DONE]" not in raw.text
        assert httpx.post(f"{server.url}/v1/responses", json={"input": "x"}).status_code == 500
    finally:
        server.engine.fail_with = None


@pytest.mark.parametrize(
    "body, param",
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "strict": True, "schema": {"format": "no"}}
                }
            },
            "text.format",
        ),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"messages": []}, "input"),
        ({"max_tokens": 3}, "max_output_tokens"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"n": 2}, "n"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_not_served_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    before = len(server.engine.submitted)
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "x", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and "\n" not in error["message"]
    assert len(server.engine.submitted) == before
