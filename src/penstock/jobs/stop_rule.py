"""StopRule: when to stop sampling a problem. It is the option `--stop-when`: `right` (one right
answer) or `agree:K` (K equal answers).

Knows problems and answers; the engine's client counts the answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.group_stop import GroupStop
from penstock.errors import UsageError
from penstock.jobs.problems import Problem, find_answer

_RULE = re.compile(r"right|agree:([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class StopRule:
    """The parsed option. agree: number of samples that must have the same answer; None: the first
    right answer ends the problem."""

    agree: int | None

    @classmethod
    def parse(cls, text: str, n: int) -> StopRule:
        """Parses the option --stop-when. Raises UsageError."""
        found = _RULE.fullmatch(text)
        if found is None:
            raise UsageError(
                f"--stop-when must be right or agree:K, as agree:5, not {text!r}", param="stop_when"
            )
        agree = None if found[1] is None else int(found[1])
        if agree is not None and agree > n:
            raise UsageError(
                f"--stop-when {text} asks for more samples than --n {n} draws: lower K",
                param="stop_when",
            )
        return cls(agree)

    def group_stop(self, problem: Problem, known: Iterable[str | None]) -> GroupStop:
        """Returns the GroupStop that counts a problem's answers. known: answers of samples that an
        earlier run has drawn."""
        if self.agree is not None:
            return GroupStop(find_answer, self.agree, known)

        def right(answer: str | None) -> str | None:
            return answer if answer == problem.answer else None

        return GroupStop(lambda text: right(find_answer(text)), 1, map(right, known))
