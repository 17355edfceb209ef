"""Chat: messages are checked, templates are the model's own. (That rendering equals transformers'
is in test_against_transformers, what a template may take in test_sandbox.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.errors import TokenizerError, UsageError
from penstock.text.chat_template import render

USER = [{"role": "user", "content": "hi"}]


@dataclass
class Templates:
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(
        default_factory=lambda: {"bos_token": "<s>", "eos_token": "</s>"}
    )


def by(template: str) -> Templates:
    return Templates({"default": template})


LINES = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert render(by(LINES), messages) == "<s>[system:s][user:a\nb]"


def test_generation_prompt_and_variables_reach_the_template() -> None:
    template = "{{ add_generation_prompt }} {{ tools }} {{ thinking }}"
    assert render(by(template), USER) == "True None "
    assert (
        render(by(template), USER, add_generation_prompt=False, template_kwargs={"thinking": 1})
        == "False None 1"
    )
    assert render(Templates({"default": "plain", "tool_use": "x"}), USER) == "plain"


def test_a_final_message_is_continued() -> None:
    """As transformers does it: tests/text/test_against_transformers.py."""

    def continued(template: str, last: dict[str, Any], *, generate: bool = False) -> str:
        return render(
            by(template), [*USER, last], add_generation_prompt=generate, continue_final_message=True
        )

    said = {"role": "assistant", "content": [{"type": "text", "text": "The answer is "}]}
    assert continued(LINES, said) == "<s>[user:hi][assistant:The answer is "
    assert (
        continued(LINES.replace("m.content", "m.content | trim"), said)
        == "<s>[user:hi][assistant:The answer is"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for template, wrong, generate, says in (
        (LINES, said, True, "exclude each other"),
        (LINES, {"role": "assistant", "tool_calls": [call]}, False, "some text"),
        ("{{ messages[0].content }}", said, False, "changes the last message"),
        ("{{ messages[1].content | upper }}", said, False, "changes the last message"),
        ("{{ messages[1].content[5:] }}", said, False, "changes the last message"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            continued(template, wrong, generate=generate)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], "role"),
        ([{"role": 5, "content": "x"}], "role"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "system", "content": None}], "content is missing"),
        ([{"role": "user", "content": 5}], "must be text or a list"),
        ([{"role": "user", "content": "x", "colour": "red"}], "'colour'"),
        ([{"role": "user", "content": "x", "name": 5}], "name must be text"),
        (
            [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[1\].*'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "'text'"),
        ([{"role": "user", "content": [5]}], "'int'"),
        ([{"role": "assistant", "tool_calls": [5]}], "function"),
    ],
)
def test_wrong_messages_are_named(messages: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        render(by(LINES), messages)
    assert caught.value.param == "messages"


def test_no_template_says_the_way_out() -> None:
    with pytest.raises(TokenizerError, match="no chat template; use plain prompts"):
        render(Templates({}), USER)
    with pytest.raises(TokenizerError, match="it has tool_use"):
        render(Templates({"tool_use": "x"}), USER)


def test_a_templates_own_refusal_is_told() -> None:
    with pytest.raises(UsageError, match="roles must alternate") as told:
        render(by("{{ raise_exception('roles must alternate') }}"), USER)
    assert told.value.rule == str(told.value)
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        render(by("{{ 1 / 0 }}"), USER)


@pytest.mark.parametrize(
    ("template", "says", "kind"),
    [
        ("{{ raise_exception('no ' ~ messages[0].content) }}", ": no zq7", "TemplateError"),
        ("{{ raise_exception(messages[0].content) }}", ": zq7", "TemplateError"),
        ("{{ raise_exception('') }}", r"messages \(TemplateError\)$", "TemplateError"),
        ("{{ messages[0][messages[0].content].more }}", "has no attribute 'zq7'", "UndefinedError"),
    ],
)
def test_a_templates_words_of_a_message_are_no_rule(template: str, says: str, kind: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        render(by(template), [{"role": "user", "content": "zq7"}])
    assert caught.value.rule == f"the model's chat template refuses these messages ({kind})"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("a\n{% for", "at line 2"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{% break %}", "outside loop"),
        ("{{ " + "9" * 5000 + " }}", "digits"),
        ("{{ 1 | no_such_filter }}", "no_such_filter"),
    ],
)
def test_what_compiles_badly_is_no_valid_template(template: str, says: str) -> None:
    with pytest.raises(TokenizerError, match="not valid Jinja.*" + says):
        render(by(template), USER)


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ open('x') }}"]
)
def test_what_reaches_beyond_the_messages_is_refused(template: str) -> None:
    with pytest.raises(UsageError):
        render(by(template), USER)


def test_a_template_that_adds_up_a_long_conversation_is_served() -> None:
    template = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + '<|im_start|>' +"
        " m.role + '\n' + m.content + '<|im_end|>\n' %}{% endfor %}{{ ns.x }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    assert (
        render(by(template), messages)
        == ("<|im_start|>user\n" + "word " * 200 + "<|im_end|>\n") * 1000
    )


def test_user_text_is_never_a_template() -> None:
    assert (
        render(
            by("{{ messages[0].content }}"), [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]
        )
        == "{{ 7 * 7 }}{% raw %}"
    )
