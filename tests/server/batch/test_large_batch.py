"""A batch as its client sees it: a large one in the small; and what is called a fault. Cancelled ones: the soak."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import batch_client
import httpx
import large_batch
import pytest
from batch_client import Asked, Done, Results

pytestmark = pytest.mark.torch

ASKED = Asked(lines=20, bad=4, ids=5)
WORDS = [97, 98, 99]
BAD = [2, 7, 12, 17]  # the lines that cannot be run; 7 and 17 are no JSON
GOOD = [number for number in range(20) if number not in BAD]
Rows = list[dict[str, Any]]


def test_a_large_batch_in_the_small(tmp_path: Path) -> None:
    """Lines as long as those of 50,000, ten of them bad. How often it is looked at is the reliability run's to say."""
    made = large_batch.run(tmp_path, 400)
    assert made.done.faults == [] and made.done.status == "completed"
    assert made.left == [] and made.at_rest and made.grown["server"] < large_batch.MOST_GROWTH


def good(number: int) -> dict[str, Any]:
    body = {"choices": [{"token_ids": ASKED.answer(number, WORDS)}]}
    return {"custom_id": f"row {number}", "response": {"status_code": 200, "body": body}, "error": None}


def bad(number: int) -> dict[str, Any]:
    if ASKED.is_nonsense(number):
        return {"custom_id": None, "response": None, "error": {"message": f"line {number + 1}: no JSON"}}
    return {"custom_id": f"row {number}", "response": {"status_code": 400}, "error": None}


def unrun(number: int) -> dict[str, Any]:
    return {"custom_id": f"row {number}", "response": None, "error": {"code": "batch_cancelled"}}


def faults(output: Rows, errors: Rows, status: str = "completed", completed: int | None = None) -> list[str]:
    results = Results(ASKED, WORDS)
    results.output(output)
    results.errors(errors, status == "cancelled")
    counts = {"total": 20, "completed": len(output) if completed is None else completed, "failed": len(errors)}
    lines = {"data": [{"line": 1 + number} for number in BAD]}
    return results.faults({"status": status, "request_counts": counts, "errors": lines})


def test_a_batch_as_it_should_be_has_no_fault() -> None:
    assert faults([*map(good, GOOD)], [*map(bad, BAD)]) == []
    assert faults([*map(good, GOOD[:9])], [*map(bad, BAD), *map(unrun, GOOD[9:])], "cancelled") == []
    assert len(faults([*map(good, GOOD)], [*map(bad, BAD)], completed=15)) == 1


def another(row: dict[str, Any]) -> None:
    row["response"]["body"] = good(GOOD[4])["response"]["body"]


CASES: dict[str, tuple[Callable[[Rows, Rows], Any], str]] = {
    "lost": (lambda output, errors: output.pop(), "batch: 1 lines lost"),
    "twice": (lambda output, errors: output.append(output[0]), "batch: 1 lines doubled or nobody's"),
    "a bad one lost": (lambda output, errors: errors.pop(), "batch: 1 lines lost"),
    "another's tokens": (lambda output, errors: another(output[3]), "batch: 1 lines not as asked"),
    "run though bad": (lambda output, errors: (output.append(good(2)), errors.pop(0)), "batch: 1 lines not as asked"),
    "not run": (lambda output, errors: (errors.append(unrun(0)), output.pop(0)), "batch: 1 lines not as asked"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_batch_is_found(case: str) -> None:
    output, errors = [*map(good, GOOD)], [*map(bad, BAD)]
    spoil, told = CASES[case]
    spoil(output, errors)
    assert told in faults(output, errors)


def test_a_torn_result_is_a_fault() -> None:
    whole = json.dumps(good(0)).encode() + b"\n"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=whole + whole[:-1]))
    with httpx.Client(transport=transport, base_url="http://fake") as http, pytest.raises(batch_client.BatchError):
        list(batch_client._rows(http, "file-1"))


def test_what_a_large_batch_calls_a_fault() -> None:
    made = large_batch.Large(400, 10, Done(faults=["batch: 1 lines lost"]), {"server": 65.0, "engine": 1.0}, 4.0, ["x"])
    assert len(made.faults()) == 5  # the line, the server, looked at too rarely, a file, not at rest
    fine = replace(made, done=Done(), grown={"server": 63.0}, looks=5.0, left=[], at_rest=True)
    assert fine.faults() == [] and "server +63 MB at most" in fine.line()
