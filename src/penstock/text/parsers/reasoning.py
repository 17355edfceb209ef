"""reasoning: separates reasoning from the answer. Reasoning (a "thought") stands between marks,
mostly `<think>` and `</think>`. The prompt's end shows how the answer begins, since templates may
open the thought themselves, or even close it:

    qwen3, glm45, glm47          the model writes `<think>`, unless the template wrote it
    ernie45                      the same, and the answer may stand in `<response>` and
                                 `</response>`
    deepseek_r1, minimax_m2      the answer begins inside a thought, whatever the template wrote
    gemma4                       like qwen3, with other marks

The names are vLLM's names of parsers. Knows these marks and texts. Source: the chat templates of
these models.
"""

from __future__ import annotations

from typing import Literal

from penstock.text.parsers.pieces import find_mark

THINK = OPEN, CLOSE = "<think>", "</think>"
FORMATS = ("qwen3", "deepseek_r1", "ernie45", "gemma4", "glm45", "glm47", "minimax_m2")
# marks of the formats that don't use `<think>`
MARKS = {"gemma4": ("<|channel>thought\n", "<channel|>")}
AT_ONCE = ("deepseek_r1", "minimax_m2")
WRAPPED = {"ernie45": ("<response>", "</response>")}  # marks that may stand around an answer
# state at the start of the answer: inside a thought, before a possible one, or without one
Thinking = Literal["open", "may open", "closed"]


def token_of(mark: str) -> str:
    """Returns the part of a mark that may be a special token: up to its first ">"."""
    return mark[: mark.find(">") + 1]


def thinking_behind(prompt: str, name: str, *, inside_answer: bool = False) -> Thinking:
    """Returns how an answer begins after this end of a prompt. name: format, as in the module's
    docstring. inside_answer: True if the prompt's end is the beginning of the answer itself, so
    that a thought may have been opened earlier in it."""
    begin, end = MARKS.get(name, THINK)
    begin, ending = begin.rstrip(), prompt.rstrip()
    if inside_answer and begin in prompt:
        return "closed" if prompt.rfind(end) > prompt.rfind(begin) else "open"
    if ending.endswith(begin):
        return "open"
    if ending.endswith(end):
        return "closed"
    return "open" if name in AT_ONCE else "may open"


class ReasoningParser:
    """Splits one answer's text into reasoning and the rest. White space next to the marks is
    dropped."""

    def __init__(self, thinking: Thinking, marks: tuple[str, str] = THINK) -> None:
        self._begins, self._ends = marks
        self._held = ""  # text that is not assigned to reasoning or answer yet
        self._at = "answer" if thinking == "closed" else "start"
        self._open = thinking == "open"
        # True once the thought has begun; True once some of its text was returned
        self._thought = self._spoken = False
        self._fed = 0
        # number of characters before the answer itself; of all text until that begins
        self.length = 0

    def feed(self, text: str) -> tuple[str, str]:
        """Reads further text. Returns the reasoning and the answer's text in it."""
        if self._at == "answer":
            return "", text
        self._held += text
        self._fed += len(text)
        if self._at == "start" and not self._begin():
            return "", ""
        reasoning = self._think() if self._at == "thought" else ""
        if self._at == "behind":
            self._held = self._held.lstrip()
            self._at = "answer" if self._held else "behind"
        answer = ""
        if self._at == "answer":
            answer, self._held = self._held, ""
        self.length = self._fed - len(answer) if self._thought else 0
        return reasoning, answer

    def end(self) -> tuple[str, str]:
        """Returns the reasoning and the answer's text held back."""
        text, self._held = self._held, ""
        if self._at == "thought" or (self._at == "start" and self._open):
            return text.rstrip(), ""
        return "", "" if self._at == "behind" else text

    def _begin(self) -> bool:
        """Decides whether the answer begins with a thought.
        Returns False if more text is needed."""
        text = self._held.lstrip()
        if text != self._begins and self._begins.startswith(text):
            return False
        if self._open or text.startswith(self._begins):
            self._held = text.removeprefix(self._begins).lstrip()
            self._at, self._thought = "thought", True
        else:
            self._at = "answer"
        return True

    def _think(self) -> str:
        self._held = self._held if self._spoken else self._held.lstrip()
        at, mark = find_mark(self._held, (self._ends,))
        shown = self._held[:at].rstrip()
        self._spoken = self._spoken or bool(shown)
        if mark:
            self._held, self._at = self._held[at + len(mark) :], "behind"
        else:
            self._held = self._held[len(shown) :]
        return shown


class Unwrapped:
    """Removes the marks that may stand around a text, and the white space next to them."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._held = ""
        # position: "start"; then "within" the marks, "open" in a text without marks, or "behind"
        # the last mark
        self._at = "start"
        self._spoken = False  # True once some text within the marks was returned

    def feed(self, text: str) -> str:
        """Reads further text. Returns the answer in it, without the marks around."""
        self._held += text
        if self._at == "start" and not self._starts():
            return ""
        if self._at == "within":
            self._held = self._held if self._spoken else self._held.lstrip()
            at, mark = find_mark(self._held, (self._end,))
            shown = self._held[:at].rstrip()
            self._spoken = self._spoken or bool(shown)
            if not mark:
                self._held = self._held[len(shown) :]
                return shown
            self._held, self._at = self._held[at + len(mark) :], "behind"
            return shown + self.feed("")
        shown, self._held = self._held, ""
        return shown

    def end(self) -> str:
        """Returns the text held back so far."""
        text, self._held = self._held, ""
        return text

    def _starts(self) -> bool:
        """Decides whether the first mark is present. Returns False if more text is needed."""
        text = self._held.lstrip()
        if text != self._begin and self._begin.startswith(text):
            return False
        self._at = "within" if text.startswith(self._begin) else "open"
        self._held = text.removeprefix(self._begin) if self._at == "within" else self._held
        return True
