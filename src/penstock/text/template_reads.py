"""template_reads: finds how a chat template expects messages. Renders small conversations in one
message format after another, until all their words appear in the prompt. So a template's macros,
loops and tests need not be analysed. Knows conversations and `Reads` (turns.py); the caller
renders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.text.turns import Message, Reads, as_read

# function that renders messages; returns None if the template refuses them
Run = Callable[[list[Message]], str | None]

ASK: Message = {"role": "user", "content": "hi"}
# words that no template contains, used as texts of the test messages
FIRST, SECOND, THIRD, FOURTH, NAME, KEY = (
    "zqfirst",
    "zqsecond",
    "zqthird",
    "zqfourth",
    "zqname",
    "zqkey",
)
THOUGHT, SAID, CUT = "zqthought", "zqsaid", '{"zqkey": "zqfirst'
# matches a list of parts or an object that was printed as a whole, instead of its text
_DUMPED = re.compile(r"""(text|thinking)\\*['"]:\s*\\*['"]zq|'zqkey'\s*:""")


def find_reads(run: Run) -> Reads:
    """Returns how a template expects messages. If no format of some property works, that property
    keeps its default."""
    probe, reads = _Probe(run), Reads()
    for role in ("user", "system", "developer", "assistant"):
        reads = _content_of(role, probe, reads)
    reads = (
        probe.first(
            (reads, replace(reads, blank=False)), [ASK, {"role": "assistant", "content": ""}, ASK]
        )
        or reads
    )
    read, written = _call_forms(reads)
    called = (
        probe.first(read, _called(1), FIRST, THIRD)
        # some templates print only arguments that the tool declares
        or probe.first(read, _called(1), NAME, THIRD)
        or probe.first(written, _called(1), FIRST, THIRD)
    )
    return reads if called is None else _beside_calls(probe, called)


class _Probe:
    """Renders test conversations with a chat template, and checks the results."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # number of times that the template itself prints "None"
        self._nones = (run([ASK]) or "").count("None")

    def sees(self, reads: Reads, messages: list[Message], *words: str) -> bool:
        """Returns True if the template, given the messages in the format `reads`, prints all of
        these words, and no dumped Python values."""
        text = self._run(as_read(messages, reads))
        if text is None or _DUMPED.search(text) or text.count("None") > self._nones:
            return False
        if any("tool_calls" in message for message in messages) and not (
            reads.calls and reads.objects
        ):
            # the arguments must be printed as JSON, not as JSON inside a string
            words = (*words, f'"{KEY}": "{FIRST}')
        return all(word in text for word in words)

    def first(self, forms: Iterable[Reads], messages: list[Message], *words: str) -> Reads | None:
        """Returns the first format in which the template prints the words, or None."""
        return next((form for form in forms if self.sees(form, messages, *words)), None)


def _content_of(role: str, probe: _Probe, reads: Reads) -> Reads:
    """Returns `reads` with the fields set that describe the content of this role's messages."""

    def said(content: Any) -> list[Message]:
        message = {"role": role, "content": content}
        return {"user": [message], "assistant": [ASK, message, ASK]}.get(role, [message, ASK])

    forms = (reads, replace(reads, only_parts=reads.only_parts | {role}))
    found = probe.first(forms, said(FIRST), FIRST)
    if found is None:
        return replace(reads, developer=False) if role == "developer" else reads
    taking = replace(found, parts=found.parts | {role})
    return taking if probe.sees(taking, said(_parts(FIRST, SECOND)), FIRST, SECOND) else found


def _parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _called(
    count: int, arguments: str | None = None, result: Any = THIRD, **more: Any
) -> list[Message]:
    """Returns a test conversation with one turn of `count` calls, and their results."""
    calls, results = [], []
    for number, (value, content) in enumerate(((FIRST, result), (SECOND, FOURTH))[:count]):
        known = f"call_{'0123456789abcdef' * 2}{number}"
        function = {"name": NAME, "arguments": arguments or f'{{"{KEY}": "{value}"}}'}
        calls.append({"id": known, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": known, "content": content})
    return [ASK, {"role": "assistant", "tool_calls": calls, **more}, *results]


def _call_forms(reads: Reads) -> tuple[list[Reads], list[Reads]]:
    """Returns two lists of formats to try: with calls as fields of the message, and with calls as
    part of the content."""
    tool = frozenset({"tool"})
    ways = [reads, replace(reads, results=False)]
    if reads.only_parts:
        ways.insert(0, replace(reads, only_parts=reads.only_parts | tool))
    read = [
        replace(way, short_ids=short, empty=empty, objects=objects)
        for way, short, empty, objects in product(ways, (False, True), ("", None), (True, False))
    ]
    return read, [replace(way, calls=0) for way in ways]


def _beside_calls(probe: _Probe, reads: Reads) -> Reads:
    """Returns `reads`, which works for one call and its result, with the properties of several
    calls, and of content and reasoning next to calls."""
    if reads.calls:
        one = replace(reads, calls=1)
        reads = probe.first((reads, one), _called(2), FIRST, SECOND, THIRD, FOURTH) or reads
        raw = replace(reads, raw=True)
        reads = raw if probe.sees(raw, _called(1, CUT), CUT, THIRD) else reads
    taking = replace(reads, parts=reads.parts | {"tool"})
    if reads.results and probe.sees(
        taking, _called(1, result=_parts(THIRD, FOURTH)), FIRST, THIRD, FOURTH
    ):
        reads = taking
    names = (reads.thoughts, (*reads.thoughts, "thinking"), ())
    thinking = [replace(reads, thoughts=each) for each in names]
    found = probe.first(thinking, _called(1, reasoning=THOUGHT), FIRST, THIRD, THOUGHT)
    if found is not None:
        forms = (found, replace(found, thought_beside=False))
        both = _called(1, reasoning=THOUGHT, content=SAID)
        reads = probe.first(forms, both, FIRST, THIRD, THOUGHT, SAID) or found
    said, apart = _called(1, content=SAID), replace(reads, beside=False)
    if probe.sees(reads, said, FIRST, THIRD, SAID):
        return reads
    # templates that require alternating roles may refuse a separate turn only if other turns follow
    later = [
        {"role": "assistant", "content": "ok"},
        ASK,
    ]
    return apart if probe.sees(apart, [*said, *later], FIRST, THIRD, SAID) else reads
