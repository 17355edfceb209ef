"""A batch as its client sees it, in the small: a large one, one that is cancelled; and what is called a fault."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import batch_client
import httpx
import large_batch
import pytest
from batch_client import Asked, Done, Results
from fake_runner import Orders
from service import Serving, make_folder

pytestmark = pytest.mark.torch

ASKED = Asked(lines=20, bad=4, ids=5)
WORDS = [97, 98, 99]
Rows = list[dict[str, Any]]


def test_a_large_batch_in_the_small(tmp_path: Path) -> None:
    """Lines as long as those of 50,000, ten of them bad. How often it is looked at is the reliability run's to say."""
    made = large_batch.run(tmp_path, 400)
    assert made.done.faults == [] and made.done.status == "completed"
    assert made.left == [] and made.at_rest and made.grown["server"] < large_batch.MOST_GROWTH


def test_a_batch_that_is_cancelled_half_way(tmp_path: Path) -> None:
    """Where the machine is so busy that it is over before the cancel comes, it is completed."""
    words = make_folder(tmp_path, Orders(step_seconds=0.02), rows=16)
    asked = Asked(lines=60, bad=4, ids=5, tokens=12, cancelled=True)
    asked.write(tmp_path / "lines.jsonl")
    with Serving(tmp_path, state_dir=str(tmp_path / "state")) as serving:
        done = batch_client.run(serving.url, tmp_path / "lines.jsonl", asked, words)
        assert done.faults == [] and done.status in ("cancelled", "completed")
        assert batch_client.left_behind(tmp_path / "state") == []
        left = httpx.get(serving.url + "/v1/files", timeout=30).json()["data"]
        assert left == []


def good(number: int) -> dict[str, Any]:
    body = {"choices": [{"token_ids": ASKED.answer(number, WORDS)}]}
    return {"custom_id": f"row {number}", "response": {"status_code": 200, "body": body}, "error": None}


def bad(number: int) -> dict[str, Any]:
    if ASKED.is_nonsense(number):
        return {"custom_id": None, "response": None, "error": {"message": f"line {number + 1}: no JSON"}}
    return {"custom_id": f"row {number}", "response": {"status_code": 400}, "error": None}


def unrun(number: int) -> dict[str, Any]:
    return {"custom_id": f"row {number}", "response": None, "error": {"code": "batch_cancelled"}}


BAD = [2, 7, 12, 17]  # the lines that cannot be run; 7 and 17 are no JSON
GOOD = [number for number in range(20) if number not in BAD]


def faults(
    output: Rows,
    errors: Rows,
    status: str = "completed",
    request_counts: dict[str, int] | None = None,
    named: list[int] | None = None,
) -> list[str]:
    results = Results(ASKED, WORDS)
    results.output(output)
    results.errors(errors, status == "cancelled")
    counts = request_counts or {"total": 20, "completed": len(output), "failed": len(errors)}
    lines = {"data": [{"line": line} for line in named or [1 + number for number in BAD]]}
    return results.faults({"status": status, "request_counts": counts, "errors": lines})


def test_a_batch_as_it_should_be_has_no_fault() -> None:
    assert [number for number in range(20) if ASKED.is_bad(number)] == BAD
    assert [number for number in BAD if ASKED.is_nonsense(number)] == [7, 17]
    assert faults(list(map(good, GOOD)), list(map(bad, BAD))) == []
    assert faults(list(map(good, GOOD[:9])), list(map(bad, BAD)) + list(map(unrun, GOOD[9:])), "cancelled") == []


def of_another(output: Rows, errors: Rows) -> None:
    output[3]["response"]["body"] = good(GOOD[4])["response"]["body"]


def refused(output: Rows, errors: Rows) -> None:
    output[3]["response"]["status_code"] = 500


def run_though_bad(output: Rows, errors: Rows) -> None:
    output.append(good(2))
    del errors[0]


def unrun_though_nobody_cancelled(output: Rows, errors: Rows) -> None:
    errors.append(unrun(GOOD[0]))
    del output[0]


CASES: dict[str, tuple[Callable[[Rows, Rows], Any], str]] = {
    "lost": (lambda output, errors: output.pop(), "batch: 1 lines lost"),
    "twice": (lambda output, errors: output.append(output[0]), "batch: 1 lines doubled or nobody's"),
    "nobody's": (lambda output, errors: output.append(good(21)), "batch: 1 lines doubled or nobody's"),
    "a bad one lost": (lambda output, errors: errors.pop(), "batch: 1 lines lost"),
    "another's tokens": (of_another, "batch: 1 lines not as asked"),
    "another status": (refused, "batch: 1 lines not as asked"),
    "run though bad": (run_though_bad, "batch: 1 lines not as asked"),
    "not run": (unrun_though_nobody_cancelled, "batch: 1 lines not as asked"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_batch_is_found(case: str) -> None:
    output, errors = list(map(good, GOOD)), list(map(bad, BAD))
    spoil, told = CASES[case]
    spoil(output, errors)
    assert told in faults(output, errors)


def test_what_a_batch_says_of_itself_is_compared() -> None:
    rows = list(map(good, GOOD)), list(map(bad, BAD))
    counts = {"total": 20, "completed": 15, "failed": 5}
    assert len(faults(*rows, request_counts=counts)) == 1
    assert len(faults(*rows, status="cancelled")) == 0  # a cancel that came when all was done
    assert faults(*rows, named=[3]) == ["batch: it says that lines [3] are bad"]


def test_a_torn_result_and_a_dead_server_are_faults(tmp_path: Path) -> None:
    whole = json.dumps(good(0)).encode() + b"\n"

    def rows(content: bytes) -> list[Any]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
        with httpx.Client(transport=transport, base_url="http://fake") as http:
            return list(batch_client._rows(http, "file-1"))

    assert rows(whole * 2) == [good(0)] * 2
    with pytest.raises(batch_client.BatchError):
        rows(whole + whole[:-1])
    ASKED.write(tmp_path / "lines.jsonl")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert len(batch_client.run(url, tmp_path / "lines.jsonl", ASKED, WORDS).faults) == 1


def test_what_a_large_batch_calls_a_fault() -> None:
    made = large_batch.Large(400, 10, Done(faults=["batch: 1 lines lost"]), {"server": 65.0, "engine": 1.0}, 4.0, ["x"])
    assert len(made.faults()) == 5  # the line, the server, looked at too rarely, a file, not at rest
    fine = replace(made, done=Done(), grown={"server": 63.0}, looks=5.0, left=[], at_rest=True)
    assert fine.faults() == [] and "server +63 MB at most" in fine.line()
