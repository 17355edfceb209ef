"""Conversations as templates of a dozen kinds read them: what OpenAI's form says is in the prompt,
as the model was taught it. (The kinds behave as published templates do:
tests/support/chat_kinds.py.)"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from chat_kinds import (
    ALTERNATING,
    CHANNELS,
    FIRST_PART,
    HYBRID,
    ITEMS,
    KINDS,
    NONE_CALLS,
    ONE_CALL,
    PARTS,
    PLAIN,
    SHORT_IDS,
    SILENT,
    THINKING_PARTS,
    TRIMMED,
)

from penstock.errors import UsageError
from penstock.text.chat_template import render


@dataclass
class Templates:
    chat_templates: dict[str, str]
    special_tokens: dict[str, str] = field(default_factory=dict)


def prompt(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return render(Templates({"default": template}), messages, **options)


def call(number: int, arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }


def result(number: int, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ASK = {"role": "user", "content": "Weather?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call(1, '{"city": "Rome"}')]}
AGENT = [ASK, CALLED, result(1, "sun")]

# What a turn of one call, and its result, becomes.
WRITTEN = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
RESPONSE = "<tool_response>\nsun\n</tool_response>"
ONE_TURN = {
    PLAIN: f"[user]Weather?\n[assistant]{WRITTEN}\n[tool]sun\n[assistant]",
    TRIMMED: f"[user]Weather?\n[assistant]{WRITTEN}\n[tool]sun\n[assistant]",
    HYBRID: (
        '[user]Weather?\n[assistant]<call>look{"city":'
        ' "Rome"}</call>\n[user]<result>sun</result>\n[assistant]'
    ),
    NONE_CALLS: (
        '[user]Weather?\n<call>look|{"city": "Rome"}</call>\n<result>sun</result>\n[assistant]'
    ),
    ALTERNATING: f"[user]Weather?\n[model]{WRITTEN}\n[user]{RESPONSE}\n[model]",
    PARTS: f"[user]Weather?[assistant]{WRITTEN}[tool]sun[assistant]",
    FIRST_PART: f"[user]Weather?\n[assistant]{WRITTEN}\n[tool]sun\n[assistant]",
    SHORT_IDS: (
        '[user]Weather?\n<call>{"name": "look", "arguments": {"city": "Rome"}}74196fe72</call>\n'
        "<result>sun74196fe72</result>\n[assistant]"
    ),
    ONE_CALL: (
        '[user]Weather?\n[assistant]{"name": "look", "parameters": {"city": "Rome"}}\n'
        '[ipython]"sun"\n[assistant]'
    ),
    CHANNELS: (
        '[user]Weather?\n<call>look{"city": "Rome"}</call>\n<result>"sun"</result>\n[assistant]'
    ),
    ITEMS: (
        "[user]Weather?\n[assistant]<call=look><city>Rome</city></call><result>sun</result>\n[assistant]"
    ),
    THINKING_PARTS: (
        '[user]Weather?[assistant]<call>look{"city":'
        ' "Rome"}</call><result>sun</result>\n[assistant]'
    ),
    SILENT: f"[user]Weather?\n[assistant]{WRITTEN}\n[user]{RESPONSE}\n[assistant]",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", [None, "", "left out"])
def test_a_turn_of_calls_alone_is_what_the_template_makes_of_calls(
    kind: str, content: str | None
) -> None:
    turn = {key: value for key, value in CALLED.items() if key != "content"}
    said = turn if content == "left out" else {**turn, "content": content}
    assert prompt(KINDS[kind], ASK, said, result(1, "sun")) == ONE_TURN[KINDS[kind]]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_joined_as_the_template_joins_them_and_by_line_ends_where_it_takes_text(
    kind: str,
) -> None:
    template = KINDS[kind]
    joined = "ab" if template in (ALTERNATING, PARTS, SHORT_IDS, THINKING_PARTS) else "a\nb"
    whole = prompt(template, {"role": "user", "content": parts("a", "b")})
    assert whole == prompt(template, {"role": "user", "content": joined})
    assert f"[user]{joined}" in whole
    assert prompt(template, {"role": "user", "content": parts("a")}) == prompt(
        template, {"role": "user", "content": "a"}
    )
    assert prompt(template, {"role": "user", "content": []}) == prompt(
        template, {"role": "user", "content": ""}
    )


def test_what_a_role_takes_is_asked_of_each_role() -> None:
    def said(template: str, role: str) -> str:
        return prompt(
            template, {"role": role, "content": parts("a", "b")}, {"role": "user", "content": "c"}
        )

    assert said(ALTERNATING, "system") == "[user]a\nb c\n[model]", (
        "of a system's parts it reads the first alone"
    )
    assert said(SHORT_IDS, "system") == "[system]ab\n[user]c\n[assistant]"
    behind = [ASK, {"role": "assistant", "content": parts("a", "b")}, ASK]
    assert "[model]ab\n" in prompt(ALTERNATING, *behind) and "[assistant]a\nb\n" in prompt(
        HYBRID, *behind
    )
    assert "[ipython]" + '"a\\nb"' in prompt(ONE_CALL, ASK, CALLED, result(1, parts("a", "b"))), (
        "no list is written"
    )
    assert "[tool]ab[" in prompt(PARTS, ASK, CALLED, result(1, parts("a", "b")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_developers_message_is_a_systems_where_there_is_no_such_role(kind: str) -> None:
    developer = prompt(KINDS[kind], {"role": "developer", "content": "Be brief."}, ASK)
    if KINDS[kind] == CHANNELS:  # knows neither
        assert developer == "[user]Weather?\n[assistant]"
        return
    assert "Be brief." in developer
    if "[developer]" not in developer:
        assert developer == prompt(KINDS[kind], {"role": "system", "content": "Be brief."}, ASK)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_may_be_of_nothing(kind: str) -> None:
    nothing = prompt(KINDS[kind], ASK, CALLED, result(1, None))
    assert nothing == prompt(KINDS[kind], ASK, CALLED, result(1, "")) and "None" not in nothing


@pytest.mark.parametrize("kind", KINDS)
def test_several_calls_of_a_turn_are_there_with_their_results(kind: str) -> None:
    turn = {
        "role": "assistant",
        "tool_calls": [call(n, f'{{"city": "{city}"}}') for n, city in ((1, "Rome"), (2, "Oslo"))],
    }
    whole = prompt(KINDS[kind], ASK, turn, result(2, "snow"), result(1, "sun"))
    assert all(word in whole for word in ("Rome", "Oslo", "sun", "snow"))
    if KINDS[kind] in (ONE_CALL, CHANNELS):  # each has its own result behind it
        assert [whole.index(word) for word in ("Rome", "sun", "Oslo", "snow")] == sorted(
            whole.index(word) for word in ("Rome", "sun", "Oslo", "snow")
        )
        alone = [{**turn, "tool_calls": [each]} for each in turn["tool_calls"]]
        assert whole == prompt(
            KINDS[kind], ASK, alone[0], result(1, "sun"), alone[1], result(2, "snow")
        )


@pytest.mark.parametrize(
    "given, said",
    [
        ('{"city": "Rom', '{"city": "Rom'),
        ('{"city": "Rome"', '{"city": "Rome"'),
        ("Rome", "Rome"),
        ('["Rome"]', '["Rome"]'),
        ("9" * 5000, "9" * 5000),
    ],
    ids=["in a text", "behind one", "no JSON", "no object", "too long a number"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_are_no_object_stand_as_they_were_written(
    kind: str, given: str, said: str
) -> None:
    whole = prompt(KINDS[kind], ASK, {**CALLED, "tool_calls": [call(1, given)]}, result(1, "sun"))
    raw, inside = said, said.replace('"', '\\"')
    assert raw in whole or f'"INVALID_JSON": "{inside}"' in whole
    if KINDS[kind] in (HYBRID, NONE_CALLS, THINKING_PARTS):  # which take text
        assert raw in whole and "INVALID_JSON" not in whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_end_in_an_argument_is_one(kind: str) -> None:
    raw = prompt(
        KINDS[kind],
        ASK,
        {**CALLED, "tool_calls": [call(1, '{"city": "Ro\nme"}')]},
        result(1, "sun"),
    )
    if KINDS[kind] in (
        NONE_CALLS,
        PLAIN,
        TRIMMED,
        ALTERNATING,
        PARTS,
        FIRST_PART,
        SILENT,
    ):  # the text as it stands
        assert '{"city": "Ro\nme"}' in raw
    else:
        written = prompt(
            KINDS[kind],
            ASK,
            {**CALLED, "tool_calls": [call(1, '{"city": "Ro\\nme"}')]},
            result(1, "sun"),
        )
        assert raw == written and "INVALID" not in raw


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["", " ", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(kind: str, given: Any) -> None:
    whole = prompt(KINDS[kind], ASK, {**CALLED, "tool_calls": [call(1, given)]}, result(1, "sun"))
    assert whole == ONE_TURN[KINDS[kind]].replace('{"city": "Rome"}', "{}").replace(
        "<city>Rome</city>", ""
    )


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_may_be_objects_in_the_messages_too(kind: str) -> None:
    said = {**CALLED, "tool_calls": [call(1, {"city": "Rome"})]}
    assert prompt(KINDS[kind], ASK, said, result(1, "sun")) == ONE_TURN[KINDS[kind]]


def test_reasoning_goes_by_the_name_that_a_template_reads() -> None:
    for name in ("reasoning", "reasoning_content"):
        turn = {**CALLED, name: "hm"}
        for template, thought in (
            (HYBRID, "<think>hm</think>"),
            (CHANNELS, "<thought>hm</thought>"),
        ):
            assert thought in prompt(template, ASK, turn, result(1, "sun"))
        assert "[assistant]<think>hm</think><call>" in prompt(
            THINKING_PARTS, ASK, turn, result(1, "sun")
        )
    both = prompt(
        CHANNELS, ASK, {**CALLED, "reasoning": "hm", "content": "I look."}, result(1, "sun")
    )
    assert "<thought>hm\nI look.</thought><call>" in both
    alone = {"role": "assistant", "content": None, "reasoning": "hm"}
    assert "[assistant]<think>hm</think>[user]" in prompt(THINKING_PARTS, ASK, alone, ASK)


def test_what_is_said_beside_a_call_has_a_turn_before_it_where_the_template_leaves_it_out() -> None:
    turn = {**CALLED, "content": "I look."}
    assert "[assistant]I look.\n<call>look|" in prompt(NONE_CALLS, ASK, turn, result(1, "sun"))
    assert '[assistant]I look.\n[assistant]{"name"' in prompt(ONE_CALL, ASK, turn, result(1, "sun"))
    assert "[assistant]I look.<call=look>" in prompt(ITEMS, ASK, turn, result(1, "sun"))


SAID = [
    {"role": "assistant", "content": content, **thought, **calls}
    for content, thought, calls in itertools.product(
        (None, "", "said", parts("said", "more")),
        ({}, {"reasoning": "hm"}),
        (
            {},
            {"tool_calls": [call(1, '{"city": "Rome"}')]},
            {"tool_calls": [call(1, '{"city": "Rome'), call(2, "Os")]},
        ),
    )
]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_an_assistant_said_can_be_in_the_next_turn(kind: str) -> None:
    for message in SAID:
        calls = message.get("tool_calls", [])
        results = [result(number, f"result{number}") for number in range(1, len(calls) + 1)]
        later = [{"role": "assistant", "content": "ok"}] if calls else []
        for behind in ([*results, *later, {"role": "user", "content": "next"}], results):
            if not behind:
                continue
            whole = prompt(KINDS[kind], ASK, message, *behind)
            words = ["Weather?", *(each["content"] for each in behind)]
            words += ["Rome"] * bool(calls) + ["Os"] * (len(calls) > 1)
            words += ["said"] * bool(message["content"]) + ["more"] * isinstance(
                message["content"], list
            )
            assert all(word in whole for word in words), (message, whole)
            assert "None" not in whole and "'text'" not in whole


def test_a_template_that_refuses_everything_says_why() -> None:
    with pytest.raises(UsageError, match="not today"):
        prompt("{{ raise_exception('not today') }}", ASK)


def test_a_template_that_writes_none_itself_is_no_fault_of_the_messages() -> None:
    template = "None: " + HYBRID
    assert prompt(template, *AGENT) == "None: " + ONE_TURN[HYBRID]


def test_tools_have_the_template_that_is_made_for_them() -> None:
    templates = Templates(
        {
            "default": PLAIN,
            "tool_use": "{% for tool in tools %}({{ tool.function.name }}){% endfor %}" + HYBRID,
        }
    )
    tools = [
        {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    ]
    assert render(templates, AGENT, tools=tools) == "(look)" + ONE_TURN[HYBRID]
    assert render(templates, AGENT) == ONE_TURN[PLAIN]


def test_a_last_message_in_parts_is_continued() -> None:
    last = {"role": "assistant", "content": parts("The answer", " is ")}
    for template, said in (
        (PARTS, "[user]Weather?[assistant]The answer is "),
        (PLAIN, "[user]Weather?\n[assistant]The answer\n is "),
    ):
        assert (
            prompt(template, ASK, last, add_generation_prompt=False, continue_final_message=True)
            == said
        )
    thought = {"role": "assistant", "content": "The answer", "reasoning": "hm"}
    assert (
        prompt(
            THINKING_PARTS, ASK, thought, add_generation_prompt=False, continue_final_message=True
        )
        == "[user]Weather?[assistant]<think>hm</think>The answer"
    )
