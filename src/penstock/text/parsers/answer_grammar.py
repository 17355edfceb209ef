"""answer_grammar: the grammar of a whole answer, around the requested structured output (`@form`)
and tool calls.

    start: thought? calls                 an answer that must call a tool
    start: thought? (calls | @form)       one that may call a tool, or has a structured output
    start: thought? free                  text in which each call, once begun, must be valid
    start: thought? @form

Marks that are special tokens of the vocabulary are named as tokens, since no text spells them.
Knows formats and Lark; no token ids.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from penstock.text.parsers.reader import CallFormat
from penstock.text.parsers.reasoning import THINK, Thinking, token_of
from penstock.text.parsers.tool import Tool, lark_text

TEXT = "TEXT: /(?s:.*)/\n"  # matches no special tokens
THOUGHT = "THOUGHT: /(?s:.*)/\nBEHIND: /[ \\r\\n]{0,4}/\n"
SPACE = "SPACE: /[ \\t\\r\\n]{0,4}/\n"
PLAIN = "PLAIN: /([^{<\\s](?s:.*))?/\n"  # text that doesn't begin like a call without marks


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

    calls, tools: format and tools of calls; must_call: at least one call; parallel: several calls.
    special: the vocabulary's special tokens. marks: the marks around a thought.
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
    """Returns the Lark of one call, and its rules."""
    rules = calls.call_rest(tools)
    if calls.marks is None:
        return "call_rest", rules
    begin, end = calls.marks
    return "call", f"call: {_mark(begin, special)} call_rest {_mark(end, special)}\n{rules}"


def _free(calls: CallFormat, only: str, parallel: bool, special: Container[str]) -> tuple[str, str]:
    """Returns the Lark of text with calls in it, and its rules. only: the Lark of calls alone."""
    if calls.marks is None:
        return f"({only} | PLAIN)", PLAIN
    begin, end = calls.marks
    one = f"begun call_rest {_mark(end, special)}"
    rules = TEXT + _up_to("begun", "TEXT", begin, special)
    return (f"({one})* TEXT", rules) if parallel else (f"(TEXT | {one} SPACE)", rules + SPACE)


def _thought(
    thinking: Thinking, special: Container[str], marks: tuple[str, str]
) -> tuple[str, str]:
    """Returns the Lark of the thought before an answer, and its rules."""
    begin, end = marks
    rules = THOUGHT + _up_to("thought", "THOUGHT", end, special)
    return {
        "closed": ("", ""),
        "open": ("thought BEHIND ", rules),
        "may open": (f"({_mark(begin, special)} thought BEHIND)? ", rules),
    }[thinking]


def _mark(mark: str, special: Container[str]) -> str:
    """Returns the Lark of a mark that is a special token, begins with one, or is plain text."""
    if mark in special:
        return mark
    if (token := token_of(mark)) in special:
        return f"{token} {lark_text(mark.removeprefix(token))}"
    return lark_text(mark)


def _up_to(rule: str, text: str, mark: str, special: Container[str]) -> str:
    """Returns the rule for text up to the first such mark, and the mark."""
    lazy = "" if mark in special else "[lazy]"
    return f"{rule}{lazy}: {text} {_mark(mark, special)}\n"
