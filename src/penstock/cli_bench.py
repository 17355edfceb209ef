"""The bench's commands for servers: parse, import, call. It knows what they are called; the work is the bench's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

UNKNOWN_VOCABULARY = 2000  # ids that every model has


def bench_run(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="A server that is there; or --engine.")] = None,
    *,
    model: Annotated[str, typer.Option(help="A model's folder or id; for a URL the name that it has there.")],
    engine: Annotated[str | None, typer.Option(help="An engine to start, or a .toml file that describes one.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="128x1024, monkeys[:N] or a ShareGPT .json; again.")] = None,
    suite: Annotated[str | None, typer.Option(help="almanac: six exact shapes and monkeys.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; the same one goes on where it was.")] = Path(
        "bench-out"
    ),
    short: Annotated[bool, typer.Option(help="Windows of 10 s, one start, few requests: a hint, marked so.")] = False,
    goal: Annotated[list[float] | None, typer.Option(help="First token within so many seconds; again.")] = None,
    quantile: Annotated[float, typer.Option(help="By which share of the requests.", min=0.01, max=0.999)] = 0.95,
    starts: Annotated[int | None, typer.Option(help="Starts of the server.", min=1, max=100)] = None,
    warm_up: Annotated[float | None, typer.Option(help="Seconds before a window.", min=0.1)] = None,
    window: Annotated[float | None, typer.Option(help="Seconds of a point, at least.", min=0.5)] = None,
    longest: Annotated[float | None, typer.Option(help="Seconds of a point, at most.", min=1.0)] = None,
    enough: Annotated[int | None, typer.Option(help="Requests near a crossing.", min=1)] = None,
    at_once: Annotated[int | None, typer.Option(help="Requests of the saturated point.", min=1)] = None,
    alone: Annotated[int | None, typer.Option(help="Requests of the single point.", min=1)] = None,
    bisections: Annotated[int | None, typer.Option(help="Rates tried a goal.", min=0)] = None,
    ladder: Annotated[bool, typer.Option(help="Also 2, 4, 8, ... at a time.")] = True,
    options: Annotated[str, typer.Option(help="More words for the engine's server, in one text.")] = "",
    configuration: Annotated[str | None, typer.Option(help="A word for these options in the record.")] = None,
    python: Annotated[str, typer.Option(help="The interpreter that has the engine.")] = sys.executable,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of a server that asks for one.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, for servers that take no ids.")] = None,
    text: Annotated[bool, typer.Option(help="Send texts even where ids would do.")] = False,
    vocabulary: Annotated[int | None, typer.Option(help="Ids that prompts are drawn from.", min=32)] = None,
    random_weights: Annotated[bool, typer.Option(help="The model's weights are random: said in the record.")] = False,
    price: Annotated[float | None, typer.Option(help="Dollars an hour of the machine.", min=0)] = None,
    processes: Annotated[int | None, typer.Option(help="Client processes. Left out: a quarter of the cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.", min=0)] = 0,
) -> None:
    """Measure a server: highest rate, lowest latency, and the rates at which first tokens come in time.

    Writes a folder a shape: raw samples, record.json, table.txt. `penstock almanac add` takes it from there."""
    from penstock.cli import with_one_line

    given = {name: value for name, value in locals().items() if name != "with_one_line"}
    with_one_line(lambda: _run(**given))


def _run(
    *, url: str | None, engine: str | None, model: str, shape: list[str] | None, suite: str | None, out: Path,
    short: bool, goal: list[float] | None, options: str, configuration: str | None, python: str, api_key: str | None,
    tokenizer: Path | None, text: bool, vocabulary: int | None, random_weights: bool, price: float | None,
    processes: int | None, seed: int, **settings: Any,
) -> None:  # fmt: skip
    import os
    import shlex

    from penstock.bench.measure import Ceiling, Subject
    from penstock.bench.peers import peer
    from penstock.bench.runs import Run, run_all
    from penstock.bench.workload import named
    from penstock.bench.writing import model_config
    from penstock.errors import UsageError

    if (url is None) == (engine is None):
        raise UsageError("say what to measure: a URL, or --engine NAME; not both", param="engine")
    known = peer(engine) if engine is not None else None
    folder = Path(model)
    words = vocabulary or model_config(model).get("vocab_size") or UNKNOWN_VOCABULARY
    subject = Subject(
        model=model, peer=known, url=url, python=python, options=tuple(shlex.split(options)), api_key=api_key,
        tokenizer=tokenizer or (folder if folder.is_dir() else None), vocabulary=words,
        ids=not text and (known is None or known.ids),
    )  # fmt: skip
    run_all(Run(
        subject=subject, works=named(shape or [], suite), settings=_settings(short, url is not None, goal, settings),
        out=out, seed=seed, processes=processes or max(1, (os.cpu_count() or 1) // 4), ceiling=Ceiling(), price=price,
        random_weights=random_weights, configuration=configuration or ("tuned" if options else "default"),
    ))  # fmt: skip


def _settings(short: bool, found_running: bool, goal: list[float] | None, given: dict[str, Any]) -> Any:
    from dataclasses import replace

    from penstock.bench.method import SHORT, Settings

    usual = SHORT if short else Settings()
    settings = replace(usual, **{name: value for name, value in given.items() if value is not None})
    if goal:
        settings = replace(settings, goals=tuple(sorted(set(goal))))
    return replace(settings, starts=1) if found_running else settings
