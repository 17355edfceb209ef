"""The command `penstock build`. Its --workload is read as `penstock run` reads its input rows."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.engine_options import EngineCommand, engine_options
from penstock.cli.exit_codes import stopped_by_sigterm
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.build.run_build import Rows

Many = list[str] | None


def add_build(app: typer.Typer) -> None:
    """Adds `build` to the command line."""
    app.command(cls=EngineCommand)(build)


_LEFT_OUT = (
    "model",
    "revision",
    "lora",
    "quantization",
    "kv_cache_dtype",
    "load_format",
    "tokenizer",
    "chat_template",
    "skip_tokenizer_init",
    "seed",
)


@engine_options(*_LEFT_OUT, "preempt_every", "sealed", "data_parallel_size")
def build(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model folder, a hub id, or `demo`; an artifact with --retune."
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the artifact, new or empty; the same one goes on where it was."
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="Rows of the work, as `penstock run` takes them: a sample of what will come."
        ),
    ] = None,
    shape: Annotated[
        Many,
        typer.Option(
            help=(
                "INxOUT:CONCURRENCY in place of rows; may be given again. Left out, both:"
                " 256x256:128."
            )
        ),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            help=(
                "auto, none, fp8, int8, int4 or nvfp4. `auto`: fp8 on a GPU of 9.0 or more, int8 on"
                " a CPU "
                "where it wins."
            )
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help=(
                "auto, bfloat16 or fp8, of keys and values. `auto`: fp8 where that measures faster."
            )
        ),
    ] = "auto",
    objective: Annotated[
        str | None,
        typer.Option(
            help=(
                "What choices are timed by: throughput (tok/s of all) or latency (ms of a request)."
                " Left out: "
                "throughput; with --retune the artifact's."
            )
        ),
    ] = None,
    tune_minutes: Annotated[
        float,
        typer.Option(
            help="Minutes that choices are timed for: none begins after them; 0: none is."
        ),
    ] = 5.0,
    revision: Annotated[
        str | None, typer.Option(help="The hub's branch, tag or commit; what it is then is kept.")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            help=(
                "A LoRA adapter, as peft saves it, that is merged into the weights before they are"
                " quantized."
            )
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Bound of the check, nats a token. Left out: 0.02, with int4 and nvfp4 0.15."
        ),
    ] = None,
    keep_wide: Annotated[
        Many,
        typer.Option(
            help=(
                "Matrices that aren't quantized, by name or pattern (`*.down_proj`); may be given"
                " again."
            )
        ),
    ] = None,
    quantize_lm_head: Annotated[
        bool,
        typer.Option(
            "--quantize-lm-head",
            help="With fp8 weights: the head too; the check says what it costs.",
        ),
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(
            help="Dollars an hour of this machine: kept, and told as those of a million tokens.",
            min=0,
            max=1e6,
        ),
    ] = None,
    retune: Annotated[
        bool,
        typer.Option(
            "--retune",
            help="Time an artifact's choices again, on this machine; MODEL is its folder.",
        ),
    ] = False,
    knobs: dict[str, Any],
) -> None:
    """Fit a model to this machine and a workload: an artifact that starts in seconds.

    Quantizes, times choices, compiles, checks. A killed build resumes."""
    from penstock.build.options import BuildOptions
    from penstock.build.run_build import run_build

    if retune and out is not None:
        raise UsageError("--retune changes the artifact itself: leave --out out", param="out")
    if not retune and out is None:
        raise UsageError(
            "a build needs --out DIR, a folder for the artifact: new, or empty", param="out"
        )
    options = BuildOptions(
        model=model,
        out=str(out or model),
        shapes=shape or [],
        workload=None if workload is None else str(workload),
        quantization=quantization,  # type: ignore[arg-type]
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        objective=objective,  # type: ignore[arg-type]
        tune_minutes=tune_minutes,
        revision=revision,
        lora=lora,
        max_kl=max_kl,
        keep_wide=keep_wide or [],
        quantize_lm_head=quantize_lm_head,
        price=price,
        knobs=knobs,
        retune=retune,
    )
    stopped_by_sigterm(lambda: run_build(options, _read_rows))


def _read_rows(path: Path) -> Rows:
    from penstock.jobs.input_rows import read_rows, survey

    found = survey(
        path, lambda rows: print(f"penstock: checked {rows:,} rows", file=sys.stderr, flush=True)
    )
    return found.rows, partial(read_rows, path, 0)
