"""A comparison as people read it: a table of ratios, the goals, and in what the runs are not alike."""

from __future__ import annotations

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.bench.compare import CUT, UNKNOWN, Comparison, Ratio, between
from penstock.bench.run_report import title

WIDE = 150


def print_comparison(made: Comparison, out: TextIO) -> None:
    print(f"A: {title(made.a)}, {made.a.engine.configuration.name}, run {made.a.run}", file=out)
    print(f"B: {title(made.b)}, {made.b.engine.configuration.name}, run {made.b.run}", file=out)
    for line in made.differs:
        print(f"not alike: {line}", file=out)
    for line in made.failures:
        print(line, file=out)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("point", "figure", "A", "B", "B / A", "95 % interval", ""):
        table.add_column(name, justify="left" if name in ("point", "figure", "") else "right", no_wrap=True)
    for ratio in made.ratios:
        table.add_row(*_cells(ratio))
    if made.ratios:
        Console(file=out, width=WIDE, highlight=False).print(table)
    else:
        print("no figure is in both: there is nothing to compare", file=out)
    for line in [*made.goals, *made.missing]:
        print(line, file=out)
    known = sum(ratio.verdict not in (UNKNOWN, CUT) for ratio in made.ratios)
    if known > 5:
        print(f"{known} figures are compared: of so many, one in twenty would seem to differ by chance alone", file=out)


def _cells(ratio: Ratio) -> tuple[str, ...]:
    a, b = (
        f"{'≥ ' if cut else ''}{each:,.2f}" if ratio.more_is_better else f"{1e3 * each:,.1f} ms"
        for each, cut in zip((ratio.a, ratio.b), ratio.cut, strict=True)
    )
    bound = {(False, True): "≥ ", (True, False): "≤ "}.get(ratio.cut, "")
    quotient = f"{bound}{ratio.b / ratio.a:.2f}" if ratio.a > 0 and not all(ratio.cut) else "-"
    return ratio.point, ratio.figure, a, b, quotient, between(ratio.low, ratio.high), ratio.verdict
