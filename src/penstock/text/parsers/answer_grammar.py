"""How one answer is held: the grammar of the whole of it, around the form that was asked for, and
calls.

    start: thought? calls                 an answer that must call a tool
    start: thought? (calls | @form)       one that may, or has a form
    start: thought? free                  text, in which each call that begins is held
    start: thought? @form

Marks that are special tokens of the vocabulary are named as tokens: no text spells those. It knows
formats and Lark; no token ids.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from penstock.text.parsers.reader import CallFormat
from penstock.text.parsers.reasoning import THINK, Thinking, token_of
from penstock.text.parsers.tool import Tool, lark_text

TEXT = "TEXT: /(?s:.*)/\n"  # special tokens are no text
THOUGHT = "THOUGHT: /(?s:.*)/\nBEHIND: /[ \\r\\n]{0,4}/\n"
SPACE = "SPACE: /[ \\t\\r\\n]{0,4}/\n"
PLAIN = "PLAIN: /([^{<\\s](?s:.*))?/\n"  # that begins like no call without marks


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
    """Returns the Lark of a whole answer, in which `@form` stands for the form that was asked for,
    if there is one.

    calls, tools: what may be called, or, must_call, has to be; several times, if parallel. special:
    the vocabulary's special tokens. marks: around a thought.
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
    """One call, and the rules that it takes."""
    rules = calls.call_rest(tools)
    if calls.marks is None:
        return "call_rest", rules
    begin, end = calls.marks
    return "call", f"call: {_mark(begin, special)} call_rest {_mark(end, special)}\n{rules}"


def _free(calls: CallFormat, only: str, parallel: bool, special: Container[str]) -> tuple[str, str]:
    """Text with calls in it, and the rules that it takes. only: calls alone."""
    if calls.marks is None:
        return f"({only} | PLAIN)", PLAIN
    begin, end = calls.marks
    one = f"begun call_rest {_mark(end, special)}"
    rules = TEXT + _up_to("begun", "TEXT", begin, special)
    return (f"({one})* TEXT", rules) if parallel else (f"(TEXT | {one} SPACE)", rules + SPACE)


def _thought(
    thinking: Thinking, special: Container[str], marks: tuple[str, str]
) -> tuple[str, str]:
    """The thought before an answer, and the rules that it takes."""
    begin, end = marks
    rules = THOUGHT + _up_to("thought", "THOUGHT", end, special)
    return {
        "closed": ("", ""),
        "open": ("thought BEHIND ", rules),
        "may open": (f"({_mark(begin, special)} thought BEHIND)? ", rules),
    }[thinking]


def _mark(mark: str, special: Container[str]) -> str:
    """A mark that is a special token, begins with one, or is plain text."""
    if mark in special:
        return mark
    if (token := token_of(mark)) in special:
        return f"{token} {lark_text(mark.removeprefix(token))}"
    return lark_text(mark)


def _up_to(rule: str, text: str, mark: str, special: Container[str]) -> str:
    """The rule of a text up to the first such mark, and the mark."""
    lazy = "" if mark in special else "[lazy]"
    return f"{rule}{lazy}: {text} {_mark(mark, special)}\n"
