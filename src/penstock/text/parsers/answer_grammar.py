"""answer_grammar: the Lark grammar of a whole answer. It surrounds tool calls and the requested
structured output, which Lark refers to as `@form`:

    start: thought? calls                 an answer that must call a tool
    start: thought? (calls | @form)       one that may call a tool, or has a structured output
    start: thought? free                  text in which each call, once begun, must be valid
    start: thought? @form

A mark is the text before or after a thought or a call. If it is a special token of the vocabulary,
Lark names it as a token, since no text spells it. Knows formats and Lark; no token ids.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from penstock.text.parsers.parser_registry import CallFormat
from penstock.text.parsers.reasoning import THINK, Thinking, token_of
from penstock.text.parsers.tool import Tool, lark_text

TEXT = "TEXT: /(?s:.*)/\n"  # any text, but no special tokens
THOUGHT = "THOUGHT: /(?s:.*)/\nBEHIND: /[ \\r\\n]{0,4}/\n"
SPACE = "SPACE: /[ \\t\\r\\n]{0,4}/\n"
# text that doesn't begin like a call of a format without marks
PLAIN = "PLAIN: /([^{<\\s](?s:.*))?/\n"


def around(
    thinking: Thinking,
    *,
    form: bool = False,
    calls: CallFormat | None = None,
    tools: Sequence[Tool] = (),
    parallel: bool = True,
    must_call: bool = False,
    special: Container[str] = (),
    marks: tuple[str, str] = THINK,
) -> str:
    """Returns the Lark of a whole answer; `@form` stands for the requested structured output, if
    form is True.

    thinking: how the answer begins (reasoning.py). calls, tools: format and tools of calls.
    must_call: force at least one call. parallel: allow several calls. special: texts of the
    vocabulary's special tokens. marks: texts around a thought.
    """
    if calls is None or not tools:
        answer, rules = "@form", ""
    else:
        one, rules = _call(calls, tools, special)
        many = (
            f" ({lark_text('; ' if calls.marks is None else chr(10))} {one})*" if parallel else ""
        )
        answer = f"({one}{many} | @form)" if form and not must_call else f"({one}{many})"
        if not (form or must_call):
            answer, free = _free(calls, answer, parallel, special)
            rules += free
    thought, more = _thought(thinking, special, marks)
    return f"start: {thought}{answer}\n{more}{rules}"


def _call(calls: CallFormat, tools: Sequence[Tool], special: Container[str]) -> tuple[str, str]:
    """Returns the Lark expression of one call, and the rules that it uses."""
    rules = calls.call_rest(tools)
    if calls.marks is None:
        return "call_rest", rules
    begin, end = calls.marks
    return "call", f"call: {_mark(begin, special)} call_rest {_mark(end, special)}\n{rules}"


def _free(calls: CallFormat, only: str, parallel: bool, special: Container[str]) -> tuple[str, str]:
    """Returns the Lark expression of text with calls in it, and the rules that it uses. only:
    expression of calls without text."""
    if calls.marks is None:
        return f"({only} | PLAIN)", PLAIN
    begin, end = calls.marks
    one = f"begun call_rest {_mark(end, special)}"
    rules = TEXT + _up_to("begun", "TEXT", begin, special)
    return (f"({one})* TEXT", rules) if parallel else (f"(TEXT | {one} SPACE)", rules + SPACE)


def _thought(
    thinking: Thinking, special: Container[str], marks: tuple[str, str]
) -> tuple[str, str]:
    """Returns the Lark expression of the thought before an answer, and the rules that it uses."""
    begin, end = marks
    rules = THOUGHT + _up_to("thought", "THOUGHT", end, special)
    return {
        "closed": ("", ""),
        "open": ("thought BEHIND ", rules),
        "may open": (f"({_mark(begin, special)} thought BEHIND)? ", rules),
    }[thinking]


def _mark(mark: str, special: Container[str]) -> str:
    """Returns the Lark expression of a mark, which may be a special token, begin with one, or be
    plain text."""
    if mark in special:
        return mark
    if (token := token_of(mark)) in special:
        return f"{token} {lark_text(mark.removeprefix(token))}"
    return lark_text(mark)


def _up_to(rule: str, text: str, mark: str, special: Container[str]) -> str:
    """Returns the Lark rule for text up to and including the first such mark. text: terminal of the
    text."""
    lazy = "" if mark in special else "[lazy]"
    return f"{rule}{lazy}: {text} {_mark(mark, special)}\n"
