"""Commands of `penstock bench`, which measure servers. Knows the commands' options; penstock.bench
does the work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.exit_codes import OneLineCommand, stopped_by_sigterm

if TYPE_CHECKING:
    from penstock.almanac.record import Answers
    from penstock.bench.calibrate import Rung
    from penstock.bench.point_planner import Settings
    from penstock.bench.run_spec import ServerSpec
from penstock.cli.bench_subject import option_value, subject_of, words_of

bench_app = typer.Typer(
    help="Measure: any server's speed, or this machine's.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# default length of a run: below 30, since the last load level and the server's start take extra
# time
MINUTES = 28.0
# options of engines' servers that change which answers they give
PRECISION = ("--dtype", "--quantization", "--kv-cache-dtype")
MOST_GOALS = 20  # most latency goals that a benchmark record holds

# Options of the server that is measured, which `run` and `answers` share.
ServerUrl = Annotated[
    str | None, typer.Argument(metavar="[URL]", help="A server that is there; or --engine.")
]
ServerEnv = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for the engine's server; again.")
]
EnginePython = Annotated[
    str | None, typer.Option(help="The interpreter that has the engine. Left out: this one.")
]
EngineName = Annotated[str | None, typer.Option(help="What serves at the URL.")]
EngineVersion = Annotated[str | None, typer.Option(help="Its version.")]
ServerKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of a server that asks for one.")
]


@bench_app.command("run", cls=OneLineCommand)
def bench_run(
    url: ServerUrl = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            help="A model's folder, file or id, or `demo`; for a URL the name that it has there."
        ),
    ],
    engine: Annotated[
        str | None, typer.Option(help="An engine to start, or a .toml file that describes one.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="128x1024, monkeys[:N][@ROWS.jsonl] or a ShareGPT-form .json; again."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="almanac: six exact shapes and monkeys.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the same one goes on where it was.")
    ] = Path("bench-out"),
    minutes: Annotated[
        float | None,
        typer.Option(
            help="For all shapes together, about; 28 without --short, --edition or --full.", min=1
        ),
    ] = None,
    short: Annotated[
        bool, typer.Option(help="Windows of 10 s, one start, few requests: a hint, marked so.")
    ] = False,
    edition: Annotated[
        bool,
        typer.Option(
            help="The almanac's short method: two starts shared by all shapes, windows of 20 s, at"
            " most 8 minutes a shape."
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option(help="The whole method, whatever it takes: three starts, 1,000 at once.")
    ] = False,
    goal: Annotated[
        list[float] | None, typer.Option(help="First token within so many seconds; again.")
    ] = None,
    quantile: Annotated[
        float | None, typer.Option(help="By which share of the requests.", min=0.01, max=0.999)
    ] = None,
    starts: Annotated[
        int | None, typer.Option(help="Starts of the server.", min=1, max=100)
    ] = None,
    warm_up: Annotated[
        float | None, typer.Option(help="Seconds before a window.", min=0.1, max=1e5)
    ] = None,
    window: Annotated[
        float | None, typer.Option(help="Seconds of a point, at least.", min=0.5, max=1e5)
    ] = None,
    longest: Annotated[
        float | None, typer.Option(help="Seconds of a point, at most.", min=1.0, max=1e5)
    ] = None,
    drain: Annotated[
        float | None,
        typer.Option(help="Seconds that a window's requests may go on, at least.", min=0.1),
    ] = None,
    stall: Annotated[
        float | None, typer.Option(help="Seconds a server may be silent.", min=1.0)
    ] = None,
    enough: Annotated[int | None, typer.Option(help="Requests near a crossing.", min=1)] = None,
    at_once: Annotated[
        int | None, typer.Option(help="Requests of the saturated point.", min=1)
    ] = None,
    alone: Annotated[int | None, typer.Option(help="Requests of the single point.", min=1)] = None,
    bisections: Annotated[int | None, typer.Option(help="Rates tried a goal.", min=0)] = None,
    ladder: Annotated[bool | None, typer.Option(help="Also 2, 4, 8, ... at a time.")] = None,
    options: Annotated[
        str, typer.Option(help="More words for the engine's server, in one text.")
    ] = "",
    env: ServerEnv = None,
    server_cores: Annotated[
        int | None,
        typer.Option(
            help="Of an engine that we start. Left out: all but one a client process.", min=1
        ),
    ] = None,
    configuration: Annotated[
        str | None, typer.Option(help="A word for these options in the record.")
    ] = None,
    python: EnginePython = None,
    engine_name: EngineName = None,
    engine_version: EngineVersion = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="A .json in the record's form, of a server elsewhere or with some of several GPUs."
        ),
    ] = None,
    api_key: ServerKey = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name in the record.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="With the model's config.json and tokenizer.json, where --model is no folder."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights, where no config.json tells.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, for servers that take no ids.")
    ] = None,
    text: Annotated[bool, typer.Option(help="Send texts even where ids would do.")] = False,
    vocabulary: Annotated[
        int | None, typer.Option(help="Ids that prompts are drawn from.", min=32)
    ] = None,
    random_weights: Annotated[
        bool, typer.Option(help="The model's weights are random: said in the record.")
    ] = False,
    price: Annotated[
        float | None, typer.Option(help="Dollars an hour of the machine.", min=0, max=1e6)
    ] = None,
    lacks: Annotated[
        list[str] | None,
        typer.Option(help="A part that the engine's installation has not, as FlashInfer; again."),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="What `bench answers` measured of this engine and version.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Client processes. Left out: a quarter of the cores.", min=1, max=1024),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.", min=0, max=2**63 - 1)] = 0,
) -> None:
    """Measure a server: highest rate, lowest latency, and the rates at which first tokens come in
    time.

    Writes one folder per shape: raw samples, record.json, table.txt, report/index.html. `penstock
    almanac add` takes it from there."""
    given = dict(locals())
    stopped_by_sigterm(lambda: _run(given))


def _run(given: dict[str, Any]) -> None:
    import os
    from dataclasses import replace

    from penstock.bench.cpu_pinning import clients_at_once, cores_here, server_share
    from penstock.bench.machine_probe import machine_of
    from penstock.bench.run_spec import RunSpec
    from penstock.bench.runs import run_all
    from penstock.bench.workload import named
    from penstock.bench.write_record import commit

    works = named(given["shape"] or [], given["suite"])
    settings = _settings(given, len(works))
    processes = given["processes"] or _processes()
    subject = subject_of(given)
    cores = cores_here()
    share = (
        server_share(cores, processes, given["server_cores"]) if subject.peer is not None else []
    )
    subject = replace(subject, cores=tuple(share))
    machine = machine_of(
        given["machine"],
        given["url"],
        {**os.environ, **subject.environment},
        started=subject.peer is not None,
    )
    if share:
        machine = machine.model_copy(update={"server_cores": len(share)})
    run_all(
        RunSpec(
            subject=subject,
            works=works,
            settings=settings,
            out=given["out"],
            seed=given["seed"],
            processes=processes,
            machine=machine,
            ceiling=_ceiling(clients_at_once(cores, share, processes)),
            price=given["price"],
            configuration=given["configuration"]
            or ("tuned" if given["options"] or given["env"] else "default"),
            commit=commit(),
            answers=_answers_of(given["answers"], subject),
        )
    )


def _answers_of(path: Path | None, subject: ServerSpec) -> Answers | None:
    """Returns the answers to put into the record. Raises UsageError for those of another engine,
    version or precision."""
    from penstock.bench.answer_check import read_answers
    from penstock.bench.write_record import word
    from penstock.errors import UsageError

    if path is None:
        return None
    told = read_answers(path)
    name = word(f"{subject.peer.name if subject.peer else subject.engine} {subject.version}")
    if told.engine != name:
        raise UsageError(
            f"{path} is of {told.engine}, and {name} is measured: `penstock bench answers` asks it",
            param="answers",
        )
    for option in PRECISION:
        theirs, ours = option_value(told.flags, option), option_value(subject.options, option)
        if theirs != ours:
            raise UsageError(
                f"{path} is of answers with {option} {theirs or 'left out'}, and"
                f" {ours or 'none'} is measured: `penstock bench answers` asks with the same options",
                param="answers",
            )
    return told


def _processes() -> int:
    from penstock.bench.cpu_pinning import count_here

    return max(1, count_here() // 4)


def _ceiling(processes: int) -> Rung | None:
    """Returns the highest event rate of the client, as `bench calibrate` measured it on this
    machine, or None if it hasn't."""
    from penstock.bench.calibrate import read_ceiling

    told = read_ceiling()
    return told.of(processes) if told is not None else None


def _settings(given: dict[str, Any], shapes: int) -> Settings:
    from dataclasses import fields, replace

    from penstock.bench.point_planner import EDITION, SHORT, Settings, within
    from penstock.errors import UsageError

    methods = [name for name in ("short", "full", "edition") if given[name]]
    if len(methods) > 1:
        raise UsageError(
            f"--{methods[0]} and --{methods[1]} are two things: give one", param=methods[0]
        )
    if given["edition"] and (given["url"] or given["minutes"]):
        raise UsageError(
            "--edition starts the engine twice and has its own time: give --engine, and no"
            " --minutes",
            param="edition",
        )
    minutes = given["minutes"] or (None if methods else MINUTES)
    budget = 60 * minutes / shapes if minutes else None
    usual = {"short": SHORT, "full": Settings(), "edition": EDITION}.get(
        methods[0] if methods else ""
    ) or within(budget or 0.0)
    budget = budget or usual.budget
    names = {each.name for each in fields(Settings)} - {"edition"}
    said = {name: value for name, value in given.items() if name in names and value is not None}
    if given["goal"]:
        said["goals"] = _goals(given["goal"])
    settings = replace(usual, budget=budget, **said)
    if settings.longest < settings.window:
        raise UsageError(
            f"--longest {settings.longest:g} is less than --window {settings.window:g}",
            param="longest",
        )
    return replace(settings, starts=1) if given["url"] else settings


def _goals(given: list[float]) -> tuple[float, ...]:
    """Returns the goals (seconds to the first token) sorted and without duplicates. Raises
    UsageError for an invalid time, and for more than MOST_GOALS."""
    from penstock.errors import UsageError

    goals = tuple(sorted(set(given)))
    if wrong := [goal for goal in goals if not 0 < goal < 1e6]:
        raise UsageError(f"--goal {wrong[0]} is no time: give seconds above 0", param="goal")
    if len(goals) > MOST_GOALS:
        raise UsageError(
            f"{len(goals)} goals: a record holds {MOST_GOALS}, leave some out", param="goal"
        )
    return goals


@bench_app.command("compare", cls=OneLineCommand)
def bench_compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A record, or a run's folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same shape.")],
) -> None:
    """Compare two measured runs: ratios with their intervals, and whether they differ at all."""
    from penstock.bench.compare import compare, print_comparison, record_at

    print_comparison(compare(record_at(a), record_at(b)), sys.stdout)


@bench_app.command("calibrate", cls=OneLineCommand)
def bench_calibrate(
    *,
    most: Annotated[
        int | None, typer.Option(help="Client processes, at most. Left out: the cores.", min=1)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each trial.", min=0.5)] = 2.0,
) -> None:
    """Measure how many events and requests a second the bench's client can receive on this machine.

    The server it talks to computes nothing. `bench run` compares each point's load with this
    ceiling.
    """
    from penstock.bench.calibrate import calibrate, write_ceiling

    path = write_ceiling(calibrate(most=most, seconds=seconds, say=typer.echo))
    typer.echo(f"{path}: `penstock bench run` reads it")


@bench_app.command("import", cls=OneLineCommand)
def bench_import(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Of vllm bench serve --save-result --save-detailed."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder for the record and its raw data: a new one.")],
    engine_name: Annotated[str, typer.Option(help="What was measured.")] = "vllm",
    engine_version: Annotated[str, typer.Option(help="Its version.")],
    command: Annotated[str, typer.Option(help="What started it, as one would type it.")],
    dtype: Annotated[str, typer.Option(help="Of the model's weights.")],
    random_weights: Annotated[bool, typer.Option(help="The model's weights were random.")] = False,
    machine: Annotated[
        Path | None, typer.Option(help="A .json in the record's form. Left out: this machine.")
    ] = None,
    goal: Annotated[
        list[float] | None, typer.Option(help="First token within so many seconds; again.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Dollars an hour of the machine.", min=0, max=1e6)
    ] = None,
) -> None:
    """Make a record from the results of vLLM's own client. Unknown fields are marked; no point is
    ranked."""
    _import(dict(locals()))


def _import(given: dict[str, Any]) -> None:
    from penstock.almanac.record import Configuration, EngineInfo
    from penstock.bench.machine_probe import machine_of
    from penstock.bench.point_planner import Settings
    from penstock.bench.run_folder import room, write_whole
    from penstock.bench.run_report import print_table
    from penstock.bench.vllm_import import read_vllm, record_of
    from penstock.bench.write_record import line, word

    goals = _goals(given["goal"]) if given["goal"] else Settings().goals
    engine = EngineInfo(
        name=word(given["engine_name"]),
        version=word(given["engine_version"]),
        command=line(given["command"]),
        configuration=Configuration(
            name="imported",
            flags=[line(each) for each in words_of(given["command"], "command")[1:]],
        ),
    )
    results = read_vllm(given["file"])
    machine, out = machine_of(given["machine"], None, started=False), given["out"]
    with _new_folder(out), room(out):
        record = record_of(
            results,
            out / "raw.parquet",
            engine=engine,
            machine=machine,
            goals=goals,
            dtype=word(given["dtype"]),
            weights="random" if given["random_weights"] else "real",
            price=given["price"],
        )
        write_whole(out / "record.json", record.model_dump_json(by_alias=True, indent=1))
    print_table(record, sys.stdout)
    typer.echo(f"{out}: `penstock almanac add` takes it from there")


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Makes the folder `out`, and removes it if the block raises, so that the same command can be
    tried again. Raises UsageError if it exists or cannot be made."""
    import shutil

    from penstock.errors import UsageError

    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be made ({error.strerror}): give a new folder", param="out"
        ) from error
    try:
        yield
    except BaseException:
        shutil.rmtree(out)
        raise
