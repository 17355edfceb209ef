"""The demo's problems: the split is clean, the files are current."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from problems import NAMES, Side, problems, shipped, side_of

from penstock.demo import problems_file, shots_file


def test_the_split_holds_one_in_sixteen_out() -> None:
    rng = Random(11)
    drawn = [
        (kind, (rng.randrange(1000), rng.randrange(1000))) for kind in NAMES for _ in range(300)
    ]
    share = sum(side_of(*each) == "test" for each in drawn) / len(drawn)
    assert 0.05 < share < 0.075


def test_the_split_is_blind_to_words_and_order() -> None:
    assert side_of("ages", (3, 40, 5)) == side_of("ages", (40, 5, 3))
    # Fixed for good: another hash would put what was trained on among the test problems.
    fixed = [side_of("change", (n, n + 30)) for n in range(100)]
    assert [n for n, side in enumerate(fixed) if side == "test"] == [1, 15, 68]


def test_test_and_training_share_no_kind_and_numbers() -> None:
    trained = {(p.kind, tuple(sorted(p.numbers))) for p in islice(problems(1), 20_000)}
    held_out = {(p.kind, tuple(sorted(p.numbers))) for p in islice(problems(1, "test"), 2_000)}
    held_out |= {(p.kind, tuple(sorted(p.numbers))) for p in shipped("test")}
    assert not trained & held_out
    assert {(p.kind, tuple(sorted(p.numbers))) for p in shipped("train")}.isdisjoint(held_out)


@pytest.mark.parametrize(("side", "path"), [("test", problems_file()), ("train", shots_file())])
def test_the_shipped_files_are_what_the_maker_makes(side: Side, path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    made = shipped(side)
    assert [json.loads(line) for line in lines] == [problem.row() for problem in made]
    assert len(made) >= 200
    assert {problem.kind for problem in made} == set(NAMES)
    assert all(side_of(problem.kind, problem.numbers) == side for problem in made)
