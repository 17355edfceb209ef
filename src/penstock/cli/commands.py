"""Commands that need an engine. Each imports what it needs inside its function, so that `--help`
loads no torch.

engine_options.py makes the engine options. Commands that need no engine are in root.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.build_command import add_build
from penstock.cli.deploy_commands import deploy_app
from penstock.cli.engine_options import DEMO, MODEL, EngineCommand, engine_options
from penstock.cli.exit_codes import OneLineCommand, stopped_by_sigterm
from penstock.cli.root import app
from penstock.cli.simulate_command import add_simulate
from penstock.config import Config
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.jobs.open_llm import OpenLLM
from penstock.cli.serve_command import add_serve

app.add_typer(deploy_app, name="deploy")
add_build(app)
add_simulate(app)

Model = Annotated[str, MODEL]
On = Annotated[
    Literal["here", "ray"],
    typer.Option(help="Where the engines run: `ray` spreads the work over a Ray cluster."),
]
Address = Annotated[
    str | None,
    typer.Option(
        help=(
            "The Ray cluster: `auto` or HOST:PORT. Left out: RAY_ADDRESS, else a cluster of this"
            " machine's own."
        )
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Engines on Ray. Left out: as many as its GPUs give; without GPUs one a machine."
    ),
]
Out = Annotated[
    Path,
    typer.Option(help="Folder for samples, summary and report; the same one goes on where it was."),
]


@app.command(cls=EngineCommand)
@engine_options(
    "model", "revision", "load_format", "tokenizer", "chat_template", "skip_tokenizer_init", "seed"
)
def demo(
    *,
    out: Out = Path("demo-out"),
    n: Annotated[int, typer.Option("--n", help="Samples of each problem.")] = 64,
    limit: Annotated[
        int, typer.Option(help="How many of the packaged problems, from the first on.")
    ] = 16,
    knobs: dict[str, Any],
) -> None:
    """Sample packaged problems with the packaged model.

    Runs the main job (`monkeys`) offline in a few minutes."""
    from penstock.jobs.monkeys import run_demo

    stopped_by_sigterm(lambda: run_demo(Config.of(**knobs), out, n=n, limit=limit))


@app.command(cls=EngineCommand)
@engine_options("model", "seed", "skip_tokenizer_init")
def monkeys(
    model: Model,
    *,
    problems: Annotated[
        str,
        typer.Option(
            help=(
                "Rows with question and answer (`#### number` ends it): .jsonl, .jsonl.gz, .parquet"
                " or a hub dataset."
            )
        ),
    ],
    out: Out,
    shots: Annotated[
        str | None,
        typer.Option(
            help="Where the examples come from. Left out: the other problems, never the one asked."
        ),
    ] = None,
    few_shot: Annotated[
        int, typer.Option(help="Examples before each question, drawn for each by itself.")
    ] = 4,
    n: Annotated[int, typer.Option("--n", help="Samples of each problem.")] = 64,
    limit: Annotated[
        int | None, typer.Option(help="How many problems, from the first on. Left out: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same shots and samples.")] = 42,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.6,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this probability together.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens. 0: all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens at least this likely against the likeliest.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="A sample's longest, in tokens.")] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A text that ends a sample; may be given again. Left out: `Question:`."),
    ] = None,
    stop_when: Annotated[
        str | None,
        typer.Option(
            help=(
                "`right`: a problem ends at its first right sample; `agree:K`: once K have the same"
                " answer."
            )
        ),
    ] = None,
    on: On = "here",
    address: Address = None,
    workers: Workers = None,
    knobs: dict[str, Any],
) -> None:
    """Sample each problem n times: coverage, majority vote, report.

    Coverage is pass@k with its interval; the report has the speed too."""
    from penstock.jobs.monkeys import Options, run_monkeys
    from penstock.request import SamplingParams

    sampling = SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        stop=["Question:"] if stop is None else stop,
    )
    options = Options(
        problems=problems,
        out=out,
        sampling=sampling,
        shots=shots,
        few_shot=few_shot,
        limit=limit,
        seed=seed,
        stop_when=stop_when,
    )
    if stop_when is not None and on != "here":
        raise UsageError(
            "--stop-when counts answers where they are drawn: leave --on ray out", param="stop_when"
        )
    config, engine = Config.of(model=model, seed=seed, **knobs), _engine_on(on, address, workers)
    stopped_by_sigterm(lambda: run_monkeys(config, options, engine))


@app.command("run", cls=EngineCommand)
@engine_options()
def run_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help=(
                "Rows with id and prompt or messages, or OpenAI's batch form; .gz too; `-` is"
                " standard input."
            ),
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help=(
                "Rows with id and outputs; the same one goes on where it was. `-`: standard output,"
                " as rows end."
            ),
        ),
    ],
    *,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Columns of IN that go through to OUT, as `prompt,answer`; metadata always does."
        ),
    ] = None,
    fail_on_error: Annotated[
        bool,
        typer.Option(
            "--fail-on-error",
            help="End with 1 where a row of OUT has an error. Left out: only if all have.",
        ),
    ] = False,
    on: On = "here",
    address: Address = None,
    workers: Workers = None,
    knobs: dict[str, Any],
) -> None:
    """Run a file of prompts into a file of outputs.

    Takes files of any size; writes each id exactly once, even after a kill."""
    from penstock.jobs.input_rows import kept_columns
    from penstock.jobs.run import run_file

    if "model" not in knobs:
        raise UsageError(
            f"run has no model: say --model MODEL, a folder or a hub id; {DEMO}", param="model"
        )
    engine, columns = _engine_on(on, address, workers), kept_columns(keep)

    def job() -> None:
        if run_file(source, out, Config.of(**knobs), engine, columns).failed and fail_on_error:
            raise typer.Exit(1)

    stopped_by_sigterm(job)


def _engine_on(on: str, address: str | None, workers: int | None) -> OpenLLM:
    """Returns the function that opens a job's engine: on this machine, or on a Ray cluster with
    --on ray. Raises UsageError for Ray's options without --on ray."""
    if on == "here":
        for param, given in (("address", address), ("workers", workers)):
            if given is not None:
                raise UsageError(f"--{param} is of a Ray cluster: say --on ray too", param=param)
        from penstock.jobs.open_llm import open_llm

        return open_llm
    from penstock.on_ray.ray_workers import RayWorkers

    return partial(RayWorkers, address=address, workers=workers)


add_serve(app)  # added here because --help lists commands in this order


@app.command(cls=OneLineCommand)
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="An artifact: what `penstock build` made.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest, as JSON.")] = False,
) -> None:
    """Show what an artifact holds, and check that it is whole.

    Lists its model, machine and workload, and each choice with its gain.
    """
    from penstock.jobs.inspect_artifact import print_artifact

    print_artifact(folder, as_json=as_json)


@app.command(cls=EngineCommand)
@engine_options(
    "model",
    "skip_tokenizer_init",
    "seed",
    "enable_prefix_caching",
    "prefix_groups",
    "steps_ahead",
    "preempt_every",
    "data_parallel_size",
    "lora",
)
def doctor(model: Model = "demo", *, knobs: dict[str, Any]) -> None:
    """Describe this machine and how a model would run on it.

    Lists the kernels with the reason for each, and how many tokens fit.
    """
    config = Config.of(model=model, **knobs)
    from penstock.jobs.doctor import print_doctor

    print_doctor(config)


@app.command()
def models() -> None:
    """List the models that are served, with what was measured of each."""
    from penstock.models.model_list import print_catalog

    print_catalog()
