"""Problems, prompts and answers of the sampling job."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from penstock.errors import CapacityError, UsageError
from penstock.jobs.input_rows import mix
from penstock.jobs.problems import (
    Problem,
    digest,
    draw_shots,
    find_answer,
    load_problems,
    make_prompt,
)

ROWS = [
    {"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"}
    for i in range(6)
]


def write(path: Path, rows: list[object]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("#### 1,080.0", "1080"),
        ("#### $18.", "18"),
        ("#### -$5.50", "-5.5"),
        ("#### $-5", "-5"),
        ("####18 apples", "18"),
        ("#### .5", "0.5"),
        ("#### -0", "0"),
        ("#### 007", "7"),
        ("#### 100", "100"),
        ("#### 5 and then #### 6", "5"),
        ("#### 3/4", None),
        ("#### 10:30", None),
        ("#### 2e5", None),
        ("####\n5", None),
        ("#### none #### 4", None),
        ("18", None),
        ("", None),
    ],
)
def test_find_answer(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer


def test_the_prompt_is_the_contract() -> None:
    a, b = (
        Problem(0, "How many?", "One.\n#### 1", "1"),
        Problem(1, "Which?", "<<1+1=2>>2.\n#### 2", "2"),
    )
    assert (
        make_prompt("Now?", [a, b])
        == "Question: How many?\nAnswer: One.\n#### 1\n\nQuestion: Which?\nAnswer:"
        " <<1+1=2>>2.\n#### 2\n\nQuestion: Now?\nAnswer:"
    )
    assert make_prompt("Now?", []) == "Question: Now?\nAnswer:"


def test_shots_are_drawn_once_and_for_all() -> None:
    pool = [Problem(i, row["question"], row["answer"], str(i + 1)) for i, row in enumerate(ROWS)]
    drawn = [[s.index for s in draw_shots(pool, p.question, 3, 42, p.index)] for p in pool]
    assert (
        drawn
        == [
            [s.index for s in draw_shots(pool, p.question, 3, 42, p.index)] for p in reversed(pool)
        ][::-1]
    )
    assert all(
        p.index not in shots and len(set(shots)) == 3 for p, shots in zip(pool, drawn, strict=True)
    )
    assert drawn != [[s.index for s in draw_shots(pool, p.question, 3, 43, p.index)] for p in pool]
    assert len({tuple(shots) for shots in drawn}) > 1
    with pytest.raises(UsageError, match="lower --few-shot"):
        draw_shots(pool, pool[0].question, 6, 42, 0)


def test_seeds_are_the_same_on_any_machine() -> None:
    assert mix("samples", 42, 0) == 7_719_553_362_934_847_041
    assert len({mix("samples", seed, key) for seed in range(20) for key in range(20)}) == 400
    assert all(0 <= mix("x", seed, "k") < 2**63 for seed in range(200))


def test_digest_is_of_what_they_say(tmp_path: Path) -> None:
    a = load_problems(write(tmp_path / "a.jsonl", [*ROWS]), "test")
    b = load_problems(write(tmp_path / "b.jsonl.gz", [*ROWS]), "test")
    assert digest(a) == digest(b) != digest(a[1:])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{no", "row 3 is no JSON"),
        ("[1]", "row 3: a row is a JSON object"),
        ("[" * 100_000, "row 3 is no JSON"),
        ('{"question": "q"}', "row 3: answer must be a text"),
        ('{"answer": "#### 1"}', "row 3: question must be a text"),
        ('{"question": "q", "answer": "18"}', "row 3: answer doesn't end in `#### number`"),
        ('{"question": " ", "answer": "#### 1"}', "row 3: question must be a text"),
    ],
)
def test_a_broken_row_is_told_by_its_number(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + row + "\n" + json.dumps(ROWS[1]) + "\n")
    with pytest.raises(UsageError) as caught:
        load_problems(str(path), "test")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_no_network_is_one_line() -> None:
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
    with pytest.raises(
        CapacityError, match=r"^no way to the hub for someone/something .*give a file instead$"
    ):
        load_problems("someone/something", "test")
