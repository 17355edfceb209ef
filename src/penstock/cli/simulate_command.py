"""The command `penstock simulate`. Turns its options into a workload, engines and latency goals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.engine_options import EngineCommand, engine_options, given_options, refuse_options
from penstock.errors import UsageError

Many = list[Path] | None


def add_simulate(app: typer.Typer) -> None:
    """Adds `simulate` to the command line."""
    app.command(cls=EngineCommand)(simulate)


@engine_options(
    "model",
    "data_parallel_size",
    "seed",
    "tokenizer",
    "chat_template",
    "skip_tokenizer_init",
    "preempt_every",
    "speculative_config",
    "draft_from",
    "sealed",
)
def simulate(
    *,
    context: typer.Context,
    artifact: Annotated[
        Many,
        typer.Option(
            help="An artifact of `penstock build`, whose table of steps is used; again to compare."
        ),
    ] = None,
    table: Annotated[
        Many, typer.Option(help="A table's file, as --measure writes it; again to compare.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model that the tables have to be of. Left out: any.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="INxOUT: tokens of a prompt and of an answer.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers to each prompt of a shape.", min=1)] = 1,
    lengths: Annotated[
        str,
        typer.Option(
            help="Of a shape's answers: exact, or geometric with that mean, as answers that end."
        ),
    ] = "exact",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="An answer's longest. Left out: 8 times OUT, or a trace's longest.", min=1
        ),
    ] = None,
    shared_tokens: Annotated[
        int, typer.Option(help="Tokens that all prompts of a shape begin with.", min=0)
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Requests from a file: .jsonl with lengths, Azure's .csv, or what `penstock run`"
                " wrote."
            )
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Of each prompt, where the trace doesn't say: a run's.", min=1),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second, by chance (Poisson). Left out: the trace's own times."
        ),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(help="Heights, times the rate, of equal parts of --seconds: 0,0.2,1,0.6."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="For which requests come at the rate.")] = 600.0,
    requests: Annotated[
        int | None,
        typer.Option(help="A job of so many requests, which wait; in place of a rate.", min=1),
    ] = None,
    load_times: Annotated[
        float, typer.Option(help="So many times the load, beside the load itself.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.", min=0)] = 0,
    replicas: Annotated[
        int | None,
        typer.Option(help="Replicas. Left out: the fewest that keep the goals, or 1.", min=1),
    ] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "ttft_p95=1.0, tpot_p50=0.03, e2e_p99=20 (seconds); hours=2 of a job. May be given"
                " again."
            )
        ),
    ] = None,
    most: Annotated[
        int, typer.Option(help="Of --goal: replicas up to which the fewest are looked for.", min=1)
    ] = 4096,
    scale: Annotated[
        str | None,
        typer.Option(help="LEAST:MOST replicas, up and down by the work there is; LEAST may be 0."),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(help="Of --scale: seconds of work a replica has before there is one more."),
    ] = 10.0,
    cold_start: Annotated[
        float, typer.Option(help="Of --scale: seconds until a started replica takes requests.")
    ] = 60.0,
    idle: Annotated[
        float, typer.Option(help="Of --scale: seconds with too many before one goes.")
    ] = 300.0,
    simulated: Annotated[
        int | None,
        typer.Option(
            help="Replicas that are simulated of many alike. Left out: 4, of a job 2.", min=1
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="Dollars an hour of a GPU. Left out: the table's.", min=0, max=1e6),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="A PNG of the times; wants penstock[plot].")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Time this model's steps here, and write them to --out."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file that --measure writes.")] = None,
    knobs: dict[str, Any],
) -> None:
    """Say how many GPUs a load takes, from measured steps: no model is run.

    Runs the real scheduler and router over a modelled device, in virtual time.
    """
    from penstock.config import Config

    if (measure is None) != (out is None):
        raise UsageError("--measure MODEL and --out FILE go together", param="out")
    given = given_options(context, "measure", "out", "price", *knobs)
    if measure is not None and out is not None:
        from penstock.simulate.measure_steps import measure_steps

        refuse_options(given, "is for simulating: leave it out beside --measure")
        measure_steps(Config.of(model=measure, **knobs), out, price)
        return
    if scale is None:
        of_scale = {
            name: flag for name, flag in given.items() if name in ("drain", "cold_start", "idle")
        }
        refuse_options(of_scale, "is of --scale LEAST:MOST: give that too, or leave it out")
    if "most" in given and (not goal or replicas is not None or scale is not None):
        refuse_options(
            {"most": "--most"},
            "bounds the search for the fewest replicas that keep a --goal: leave it out",
        )
    from penstock.simulate.load_source import LoadOptions
    from penstock.simulate.run_simulation import SimulationOptions, run_simulation
    from penstock.simulate.simulated_engine import open_engine

    engines = [open_engine(path, knobs, model) for path in [*(artifact or ()), *(table or ())]]
    if not engines:
        raise UsageError("say what is simulated: --artifact DIR or --table FILE", param="artifact")
    run_simulation(
        engines,
        LoadOptions(
            shape=shape,
            trace=trace,
            samples=samples,
            lengths=lengths,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            rate=rate,
            seconds=seconds,
            curve=_heights(curve),
            requests=requests,
            load_times=load_times,
            seed=seed,
        ),
        SimulationOptions(
            replicas=replicas,
            most=most,
            goals=goal or (),
            scaling=_scaling(scale, drain, cold_start, idle, replicas),
            simulated=simulated,
            price=price,
            as_json=as_json,
            picture=picture,
        ),
    )


def _heights(curve: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in curve.split(",")) if curve is not None else ()
    except ValueError as error:
        raise UsageError(
            f"a curve is of numbers with commas between, not {curve!r}", param="curve"
        ) from error


def _scaling(
    scale: str | None, drain: float, cold_start: float, idle: float, replicas: int | None
) -> Any:
    from penstock.simulate.scaling import Scaling

    if scale is None:
        return None
    least, _, most = scale.partition(":")
    if not (least.isdigit() and most.isdigit() and int(least) <= int(most) > 0):
        raise UsageError(f"scale is LEAST:MOST replicas, as 0:4, not {scale!r}", param="scale")
    if replicas is not None:
        raise UsageError(
            "--scale says how many replicas there are: leave --replicas out", param="replicas"
        )
    if min(drain, cold_start, idle) < 0 or not drain:
        raise UsageError("drain must be above 0, cold_start and idle not below it", param="drain")
    return Scaling(least=int(least), most=int(most), drain=drain, cold_start=cold_start, idle=idle)
