"""Makes the demo's word problems: rows as in GSM8K, `question` and `answer`; an answer ends with
`#### n`.

Picks a kind, lets it draw a problem, and keeps the problem if it is on the wanted side of the
split. The side depends on the kind and its numbers alone, so no (kind, numbers) is on both sides,
whatever the words are. Standard library only. Knows no token and no model.

`python scripts/demo/problems.py` writes the two files that the package ships.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import kinds_count
import kinds_measure
import kinds_money
from words import Draft, pick

from penstock.demo import problems_file, shots_file

Side = Literal["train", "test"]

KINDS: dict[str, Callable[[Random], Draft]] = {
    kind.__name__: kind
    for kind in (
        kinds_count.how_many_more,
        kinds_count.more_and_total,
        kinds_count.times_as_many,
        kinds_count.packs_left,
        kinds_count.share_equally,
        kinds_count.left_over,
        kinds_count.bus_stops,
        kinds_count.orchard,
        kinds_count.machines,
        kinds_count.part_of_group,
        kinds_count.work_backwards,
        kinds_money.change,
        kinds_money.two_goods,
        kinds_money.tickets,
        kinds_money.saving_up,
        kinds_money.wages,
        kinds_money.discount,
        kinds_money.profit,
        kinds_money.eggs,
        kinds_money.compare_savings,
        kinds_money.split_bill,
        kinds_measure.two_legs,
        kinds_measure.fence,
        kinds_measure.area_left,
        kinds_measure.ages,
        kinds_measure.recipe,
        kinds_measure.tank,
        kinds_measure.reading,
        kinds_measure.average,
        kinds_measure.ribbon,
        kinds_measure.loaded_truck,
        kinds_measure.practice,
        kinds_measure.film_night,
    )
}
NAMES = tuple(KINDS)
TEST_SHARE = 16  # one (kind, numbers) in 16 is held out
SHORT_SHARE = 0.7  # answers with steps taken together, where the kind has such
TEST_SEED, SHOTS_SEED, SHIPPED = 20_000, 30_000, 256


class Problem(NamedTuple):
    """One problem. `question` and `answer` are the row; `kind` and `numbers` decide its side of the
    split."""

    kind: str
    numbers: tuple[int, ...]
    question: str
    answer: str

    def row(self) -> dict[str, str]:
        """Returns the problem as a row of GSM8K's form."""
        return {"question": self.question, "answer": self.answer}


def side_of(kind: str, numbers: tuple[int, ...]) -> Side:
    """Returns the side of the split, by a hash of the kind and its sorted numbers: the same on
    every machine and Python version."""
    key = f"{kind}:{','.join(map(str, sorted(numbers)))}"
    held_out = blake2b(key.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(held_out, "big") % TEST_SHARE == 0 else "train"


def make_problem(rng: Random, kind: str | None = None, side: Side = "train") -> Problem:
    """Draws one problem of `kind` (None: a random kind, all equally likely) on `side` of the split.

    Raises KeyError for a kind that does not exist.
    """
    name = pick(rng, NAMES) if kind is None else kind
    draw = KINDS[name]
    while True:
        draft = draw(rng)
        if side_of(name, draft.numbers) == side:
            steps = (
                draft.short
                if draft.short is not None and rng.random() < SHORT_SHARE
                else draft.steps
            )
            answer = "\n".join((*steps, f"#### {draft.answer}"))
            return Problem(name, draft.numbers, draft.question, answer)


def problems(seed: int, side: Side = "train") -> Iterator[Problem]:
    """Yields problems endlessly, the same for the same seed and side."""
    rng = Random(seed)
    while True:
        yield make_problem(rng, side=side)


def shipped(side: Side) -> list[Problem]:
    """Returns the `SHIPPED` problems of a side that the package carries: every kind equally often,
    all different."""
    rng = Random(TEST_SEED if side == "test" else SHOTS_SEED)
    chosen: list[Problem] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()
    while len(chosen) < SHIPPED:
        problem = make_problem(rng, NAMES[len(chosen) % len(NAMES)], side)
        if (problem.kind, problem.numbers) not in seen:
            seen.add((problem.kind, problem.numbers))
            chosen.append(problem)
    rng.shuffle(chosen)
    return chosen


def write_rows(path: Path, rows: list[Problem]) -> None:
    """Writes problems as JSON lines of `question` and `answer`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row.row()) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Writes the shipped files, or prints a few problems with `--show N`."""
    parser = argparse.ArgumentParser(description="make the demo's word problems")
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        help="print this many problems of each kind and write nothing",
    )
    options = parser.parse_args()
    if options.show:
        rng = Random(1)
        for name in NAMES:
            for _ in range(options.show):
                problem = make_problem(rng, name)
                print(f"[{name}]\n{problem.question}\n{problem.answer}\n")
        return
    write_rows(problems_file(), shipped("test"))
    write_rows(shots_file(), shipped("train"))


if __name__ == "__main__":
    main()
