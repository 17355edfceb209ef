"""Chat: messages are checked, templates are the model's own, and no template or message can blow up the process.
(That rendering equals transformers' is in tests/cpu.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from fuzz_bounds import bounded

from penstock.errors import TokenizerError, UsageError
from penstock.text.chat import render

USER = [{"role": "user", "content": "hi"}]


@dataclass
class Templates:
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=lambda: {"bos_token": "<s>", "eos_token": "</s>"})


def by(template: str) -> Templates:
    return Templates({"default": template})


LINES = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert render(by(LINES), messages) == "<s>[system:s][user:a\nb]"


def test_generation_prompt_tools_and_variables_reach_the_template() -> None:
    template = "{{ add_generation_prompt }} {{ tools }} {{ thinking }}"
    assert render(by(template), USER) == "True None "
    assert render(by(template), USER, add_generation_prompt=False, template_kwargs={"thinking": 1}) == "False None 1"
    both = Templates({"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert render(both, USER) == "plain"
    assert render(both, USER, tools=[{"name": "f"}]) == "f"


def test_tool_calls_have_their_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments.x[0] }}{{ messages[0].content }}"
    assert render(by(template), [{"role": "assistant", "tool_calls": [call]}]) == "1None"
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(UsageError, match="not JSON"):
        render(by(template), [{"role": "assistant", "tool_calls": [call]}])


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
        ([{"role": "user", "content": 5}], "must be text or a list"),
        ([{"role": "user", "content": "x", "colour": "red"}], "'colour'"),
        ([{"role": "user", "content": "x", "name": 5}], "name must be text"),
        ([*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[1\].*'image_url'"),
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
    with pytest.raises(TokenizerError, match="not valid Jinja at line 2"):
        render(by("a\n{% for"), USER)


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


DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x OUT }}"
MILLION = "{% set s = 'a' * 1000000 %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [1] * 99999999999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ 10 ** (10 ** 9) }}",
        DOUBLING.replace("START", "'ab'").replace("STEP", "ns.x ~ ns.x").replace("OUT", ""),
        DOUBLING.replace("START", "'ab'").replace("STEP", "ns.x + ns.x").replace("OUT", ""),
        DOUBLING.replace("START", "'ab'").replace("STEP", "'%s%s' % (ns.x, ns.x)").replace("OUT", ""),
        DOUBLING.replace("START", "'ab'").replace("STEP", "ns.x.replace('a', ns.x)").replace("OUT", ""),
        DOUBLING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("OUT", ""),
        DOUBLING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("OUT", "| string | length"),
        DOUBLING.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]").replace("OUT", "| tojson | length"),
        "{% set ns = namespace(x='a') %}"
        "{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        MILLION + "{{ ([s] * 1000) | join }}",
        MILLION + "{{ ''.join([s] * 1000) }}",
        MILLION + "{{ s | replace('a', s) }}",
        MILLION + "{% for i in range(1000) %}{{ s }}{% endfor %}",
        MILLION + "{% macro f() %}{% for i in range(1000) %}{{ s }}{% endfor %}{% endmacro %}{{ f() | length }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ lipsum(1000) }}",
        "{{ 'a' * 300000000 }}",
        MILLION + "{{ s.translate({97: 'x' * 1000}) | length }}",
        MILLION + "{{ ('\t' * 1000000).expandtabs(9999) | length }}",
        MILLION + "{{ s.encode('utf-32').decode('latin1').encode('utf-32').decode('latin1') | length }}",
        MILLION + "{{ s | wordwrap(1) | length }}",
    ],
)
def test_bombs_are_refused(template: str) -> None:
    with bounded(), pytest.raises(UsageError):
        render(by(template), USER, max_characters=2_000_000, max_seconds=1.0)


TEXT, MADE, BITS = "a text of more than", "bytes of values", "4096 bits"
NESTED = "{% set ns = namespace(a=FIRST, b=FIRST) %}{% for i in range(TIMES) %}{% set ns.a = NEXT %}{% endfor %}"
DOUBLE = NESTED.replace("FIRST", "[1]").replace("TIMES", "40").replace("NEXT", "[ns.a, ns.a]")
TUPLES = NESTED.replace("FIRST", "(1,)").replace("TIMES", "40").replace("NEXT", "(ns.a, ns.a)")
SPACES = NESTED.replace("FIRST", "1").replace("TIMES", "40").replace("NEXT", "namespace(l=ns.a, r=ns.a)")
DEEP = NESTED.replace("FIRST", "(1,)").replace("TIMES", "2000").replace("NEXT", "(ns.a,)")
GROWING = "{% set ns = namespace(l=[]) %}" + MILLION + "{% for i in range(5000) %}{% set ns.l = NEXT %}{% endfor %}"
SHARED = "([s] * 1000)"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        # a sort makes a key of each item
        *((MILLION + "{{ " + SHARED + f" | {how} | length }}}}", TEXT) for how in ("sort", "unique | list", "max")),
        (MILLION + "{{ " + SHARED + " | select | sort | length }}", TEXT),
        ("{{ [{'a': s}, {'a': s}] | groupby('a') | length }}".replace("s}", "'a' * 1999999}"), TEXT),
        ("{{ {'a': 'A' * 1999999, 'b': 'A' * 1999999} | dictsort(by='value') | length }}", TEXT),
        (MILLION + "{{ [{'a': s}] | sort(attribute='a' ~ ',a' * 3000) | length }}", MADE),
        # numbers
        ("{% set x = 2 ** 399999 %}{{ (x * x - 1) // (x - 1) > 0 }}", BITS),
        ("{{ 2 ** 5000 }}", BITS),
        ("{{ ('f' * 9999) | int(0, 16) > 0 }}", BITS),
        ("{{ (1).from_bytes(('f' * 9999).encode(), 'big') - 1 > 0 }}", BITS),
        ("{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", BITS),
        ("{{ ([2 ** 2000] * 100000) | string | length }}", TEXT),
        # each text is short, all of them are not
        (GROWING.replace("NEXT", "ns.l + [s ~ i]"), MADE),
        (GROWING.replace("NEXT", "ns.l + [s + 'b']"), MADE),
        (GROWING.replace("NEXT", "ns.l + [s[i:]]"), MADE),
        (GROWING.replace("NEXT", "ns.l + [s | upper]"), MADE),
        (GROWING.replace("NEXT", "ns.l + [s.upper()]"), MADE),
        (GROWING.replace("NEXT", "ns.l + [s.split('a', 1)]"), MADE),
        (GROWING.replace("NEXT", "[ns.l, [1] * 100000]"), MADE),
        (MILLION + "{{ " + SHARED + " | map('upper') | list | length }}", MADE),
        (MILLION + "{% macro f() %}{% for i in range(999) %}{{ [s] }}{% endfor %}{% endmacro %}{{ f() }}", MADE),
        ("{{ ([[1] * 1000] * 1999) | sum(start=[]) | length }}", MADE),
        # nested lists double at each level: written, compared, hashed
        (DOUBLE + "{{ {'a': ns.a}.values() | string | length }}", TEXT),
        (DOUBLE + "{{ ns.a is lower }}", TEXT),
        (DOUBLE + DOUBLE.replace("ns", "os") + "{{ ns.a == os.a }}", TEXT),
        (DOUBLE + DOUBLE.replace("ns", "os") + "{{ [ns.a].count(os.a) }}", TEXT),
        (DOUBLE + DOUBLE.replace("ns", "os") + "{{ [ns.a] | select('eq', os.a) | list | length }}", TEXT),
        (SPACES + "{{ ns.a }}", TEXT),
        (TUPLES + "{{ {ns.a: 1} | length }}", TEXT),
        (TUPLES + "{{ {}[ns.a] }}", TEXT),
        (DEEP + "{{ {ns.a: 1} | length }}", "1000 deep"),
        # what a filter or a method is handed beside its text
        ("{{ (('%(a)s' * 10000) % {'a': 'a' * 1000}) | length }}", TEXT),
        ("{{ ('{0:>9999}' * 10000).format(1) | length }}", TEXT),
        ("{{ ('a' * 10000) | replace(new='b' * 10000, old='a') | length }}", TEXT),
        (MILLION + "{{ 'a' | replace('a', [s] * 1999) | length }}", TEXT),
        ("{{ ('a\u2028' * 10000) | indent(9999) | length }}", TEXT),
        ("{{ ('a ' * 9999) | wordwrap(1, wrapstring='b' * 9999) | length }}", TEXT),
        ("{{ [[1]] | tojson(indent='a' * 100000) | length }}", TEXT),
        ("{{ ('a' * 10000).translate(['b' * 10000] * 128) | length }}", TEXT),
        ("{{ ('<!---->' * 60000) | striptags | length }}", "striptags meets"),
        # what takes the square of a text's length
        ("{{ ('a' * 1000000).rfind('ab' ~ 'a' * 100000) }}", "looks for"),
        ("{{ ('b' * 1000000).strip('a' * 1000000 ~ 'b') | length }}", "looks for"),
        ("{{ ('b' * 1000000) | trim('a' * 1000000 ~ 'b') | length }}", "looks for"),
        ("{{ ('a' * 1000).encode('punycode') | length }}", "encodes to"),
        ("{{ strftime_now('%p' * 1000) }}", "asks for a date"),
    ],
)
def test_bombs_are_refused_before_they_go_off(template: str, says: str) -> None:
    """By what they would make: no clock is near."""
    with bounded(), pytest.raises(UsageError, match=says):
        render(by(template), USER, max_characters=2_000_000, max_seconds=1000.0)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in [1] recursive %}{{ loop([1] * 1999999) if loop.depth == 1 }}{% endfor %}",
        "{{ range(99999) | select('odd') | list | length }}",
    ],
)
def test_every_round_looks_at_the_clock(template: str) -> None:
    with bounded(), pytest.raises(UsageError, match="runs too long"):
        render(by(template), USER, max_seconds=-1.0)


def test_a_template_that_adds_up_a_long_conversation_is_served() -> None:
    template = (
        "{% set ns = namespace(x='') %}{% for m in messages %}"
        "{% set ns.x = ns.x + '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' %}{% endfor %}{{ ns.x }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    assert render(by(template), messages) == ("<|im_start|>user\n" + "word " * 200 + "<|im_end|>\n") * 1000


def test_guarded_operators_are_pythons() -> None:
    template = (
        "{{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1 - 2.5 }} {{ 'a' + 'b' + 'c' }} {{ [1] + [2] + [3] }} "
        "{{ 1 + 2 + 3.5 }} {{ 'abc'[::-1] }} {{ [1, 2, 3][1:] }} {{ [3, 1] | sort }} {{ [[1], [2]] | sum(start=[]) }} "
        "{{ [1, 2] == [1, 2] }} {{ 1 < 2 < 3 }} {{ 'B' in ['A', 'B'] }} {{ {'a': (1, 2)} }} {{ ['B', 'a'] | sort }}"
    )
    expected = "3 2 1024 -1.5 abc [1, 2, 3] 6.5 cba [2, 3] [1, 3] [1, 2] True True True {'a': (1, 2)} ['a', 'B']"
    assert render(by(template), USER) == expected


def test_long_messages_are_refused_before_they_are_rendered() -> None:
    with pytest.raises(UsageError, match="more than 1000 characters"):
        render(by("short"), [{"role": "user", "content": "x" * 1001}], max_characters=1000)


def test_user_text_is_never_a_template() -> None:
    assert (
        render(by("{{ messages[0].content }}"), [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
        == "{{ 7 * 7 }}{% raw %}"
    )
