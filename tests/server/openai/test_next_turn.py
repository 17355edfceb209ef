"""What the server answers is taken back in the next turn, by chats and by responses, whatever the
model's template reads: each answer that a model can give is sent as it came, and is in the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_kinds import CHANNELS, HYBRID, KINDS, THINKING_PARTS
from server_fake import Running, make_tokenizer, running_server
from tool_cases import PARSERS, PING, WEATHER

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")

THOUGHT = "<think>\nhmm\n</think>\n\n"
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
RAW = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro\nme"}}\n</tool_call>'
OSLO = ROME.replace("Rome", "Oslo")
NO_ARGUMENTS = '<tool_call>\n{"name": "ping"}\n</tool_call>'
# What a model says -> after how many characters it is cut, or None.
SAYS: list[tuple[str, int | None]] = [
    ("", None),
    ("Just text.", None),
    (THOUGHT + "Just text.", None),
    (THOUGHT, None),
    (THOUGHT, len("<think>\nhm")),
    (ROME, None),
    (ROME, ROME.index("me")),
    (ROME, ROME.index('"}}') + 1),
    (ROME, ROME.index('{"city') + 1),
    (ROME, ROME.index('{"city')),
    (RAW, None),
    (RAW, RAW.index("me")),
    (NO_ARGUMENTS, None),
    (f"{ROME}\n{OSLO}\n{NO_ARGUMENTS}", None),
    (f"{ROME}\n{OSLO}", len(ROME) + OSLO.index("lo")),
    (f"{THOUGHT}Let me look.\n{ROME}\n{OSLO}", None),
    (f"{THOUGHT}{ROME}", None),
    (f"Let me look.\n{ROME}\nThat was it.", None),
]


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"), template=KINDS[request.param])
    with running_server(tokenizer, parsers=PARSERS, max_model_len=4096) as running:
        yield running


def post(server: Running, path: str, says: str, **body: Any) -> Any:
    server.engine.says = says
    answer = httpx.post(
        f"{server.url}/v1/{path}", json={"tools": body.pop("tools"), **body}, timeout=600
    )
    assert answer.status_code == 200, (answer.text, body)
    return answer.json()


def prompt_of(server: Running) -> str:
    return str(server.engine.tokenizer.decode(server.engine.submitted[-1].ids))


def words_of(calls: list[Any]) -> list[str]:
    return [
        word
        for call in calls
        for word in (call["name"], *re.findall(r"\w+", call["arguments"].replace("\\n", "\n")))
    ]


def check(server: Running, words: list[str], thought: str) -> None:
    """The prompt has these words, and the thought where the template reads it."""
    prompt, template = prompt_of(server), server.engine.tokenizer.chat_template
    assert [word for word in words if word not in prompt] == [] and "None" not in prompt, prompt
    assert thought in prompt or template not in (HYBRID, CHANNELS, THINKING_PARTS)


ASK = {"role": "user", "content": "Weather?"}
FINE = {"role": "assistant", "content": "Fine."}


@pytest.mark.parametrize(("says", "cut"), SAYS)
def test_a_chats_answer_goes_back(server: Running, says: str, cut: int | None) -> None:
    asked = {"path": "chat/completions", "tools": [WEATHER, PING]}
    first = post(server, says=says, messages=[ASK], max_tokens=cut or 1000, **asked)
    message = first["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    results = [
        {"role": "tool", "tool_call_id": each["id"], "content": f"result{at}"}
        for at, each in enumerate(calls)
    ]
    words = [
        *(message["content"] or "").split("\n"),
        *words_of([each["function"] for each in calls]),
        *(result["content"] for result in results),
    ]
    if calls:  # the turn that its thought still belongs to
        post(server, says="ok", messages=[ASK, message, *results], **asked)
        check(server, words, message.get("reasoning", ""))
        results.append(FINE)
    post(server, says="ok", messages=[ASK, message, *results, ASK], **asked)
    check(server, words, "")


@pytest.mark.parametrize(("says", "cut"), SAYS)
def test_a_responses_items_go_back(server: Running, says: str, cut: int | None) -> None:
    tools = [{"type": "function", **each["function"]} for each in (WEATHER, PING)]
    asked = {"path": "responses", "tools": tools}
    items = post(server, says=says, input=[ASK], max_output_tokens=cut or 1000, **asked)["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    texts = {
        item["type"]: item["content"][0]["text"]
        for item in items
        if item["type"] in ("message", "reasoning")
    }
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": f"result{at}"}
        for at, each in enumerate(calls)
    ]
    words = [
        *texts.get("message", "").split("\n"),
        *words_of(calls),
        *(result["output"] for result in results),
    ]
    if calls:
        post(server, says="ok", input=[ASK, *items, *results], **asked)
        check(server, words, texts.get("reasoning", ""))
        results.append(FINE)
    post(server, says="ok", input=[ASK, *items, *results, ASK], **asked)
    check(server, words, "")
