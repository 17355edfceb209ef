"""Counts the samples of a sampling job. Makes a tally for each problem, and the summary of all.
Draws nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.jobs.pass_at_k import coverage, majority, powers
from penstock.jobs.problems import Problem


@dataclass(slots=True)
class Tally:
    """The samples of one problem so far. answers, lengths: sample index -> the answer, and the
    length in tokens."""

    problem: Problem
    answers: dict[int, str | None] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def right(self) -> int:
        return sum(answer == self.problem.answer for answer in self.answers.values())

    @property
    def majority(self) -> str | None:
        return majority(self.answers[index] for index in sorted(self.answers))

    @property
    def mean_length(self) -> float:
        return sum(self.lengths.values()) / len(self.lengths) if self.lengths else 0.0

    def row(self) -> dict[str, Any]:
        return {
            "problem": self.problem.index,
            "question": self.problem.question,
            "answer": self.problem.answer,
            "samples": len(self.answers),
            "right": self.right,
            "majority": self.majority,
            "mean_length": round(self.mean_length, 2),
            "prompt_tokens": self.prompt_tokens,
            "error": self.error,
        }


def count_rows(
    problems: Iterable[Problem], rows: Iterable[Mapping[str, Any]], errors: Mapping[int, str]
) -> tuple[list[Tally], Counter[str]]:
    """Counts samples by problem and by finish_reason. rows: the rows of samples.jsonl, in any
    order. errors: problem index -> why it has no samples."""
    tallies = {
        problem.index: Tally(problem, error=errors.get(problem.index)) for problem in problems
    }
    reasons: Counter[str] = Counter()
    for row in rows:
        tally = tallies[row["problem"]]
        tally.answers[row["sample"]] = row["answer"]
        tally.lengths[row["sample"]] = row["token_count"]
        tally.prompt_tokens = row["prompt_tokens"]
        reasons[row["finish_reason"]] += 1
    return list(tallies.values()), reasons


def add_up(
    tallies: list[Tally], reasons: Counter[str], n: int, seed: int, *, early: bool = False
) -> dict[str, Any]:
    """Returns the part of summary.json about samples. Coverage and majority vote are over the
    problems that have all n samples; there must be one. `failed` counts problems that lack samples
    (a prompt too long, non-finite logits). early: True if samples were ended because others agreed;
    coverage is then given for k = n only, since the first k samples to end are not a random choice.
    """
    drawn = [tally for tally in tallies if tally.answers]
    whole = [tally for tally in drawn if len(tally.answers) == n]
    lengths = [length for tally in drawn for length in tally.lengths.values()]
    ks = [n] if early else powers(n)
    return {
        "problems": len(tallies),
        "samples": len(lengths),
        "coverage": [
            asdict(point)
            for point in coverage([n] * len(whole), [t.right for t in whole], ks, seed)
        ],
        "majority_vote": sum(t.majority == t.problem.answer for t in whole) / len(whole),
        "output_tokens": sum(lengths),
        "prompt_tokens": sum(t.prompt_tokens for t in drawn),
        "mean_length": round(sum(lengths) / len(lengths), 2),
        "longest": max(lengths),
        "finish_reasons": dict(sorted(reasons.items())),
        "failed": [
            {"problem": t.problem.index, "error": t.error} for t in tallies if t.error is not None
        ],
        "per_problem": [tally.row() for tally in tallies],
    }
