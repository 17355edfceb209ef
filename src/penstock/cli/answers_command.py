"""`penstock bench answers`: whether an engine answers rightly. Knows the command's options;
penstock.bench does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.bench_commands import (
    EngineName,
    EnginePython,
    EngineVersion,
    ServerEnv,
    ServerKey,
    ServerUrl,
    bench_app,
)
from penstock.cli.bench_subject import subject_of
from penstock.cli.exit_codes import OneLineCommand, stopped_by_sigterm

BENCH = bench_app  # importing this module adds `answers` to it
# options of `bench run` that have no meaning here
LEFT_OUT = ("starts", "server_cores", "text", "tokenizer", "vocabulary", "folder", "dtype", "lacks")


@bench_app.command("answers", cls=OneLineCommand)
def bench_answers(
    url: ServerUrl = None,
    *,
    model: Annotated[str, typer.Option(help="The reference's checkpoint, as the engine gets it.")],
    reference: Annotated[
        Path, typer.Option(help="What benchmarks/reference_logprobs.py made of the checkpoint.")
    ],
    out: Annotated[Path, typer.Option(help="File for `bench run --answers`.")],
    engine: Annotated[str | None, typer.Option(help="An engine to start, or a .toml file.")] = None,
    options: Annotated[str, typer.Option(help="More words for the engine's server.")] = "",
    env: ServerEnv = None,
    python: EnginePython = None,
    engine_name: EngineName = None,
    engine_version: EngineVersion = None,
    api_key: ServerKey = None,
) -> None:
    """Compare an engine's top-20 logprobs with those of transformers in float32.

    Writes the divergence to a file, which `bench run --answers` puts into the records of the same
    engine and version."""
    given = dict(locals())
    stopped_by_sigterm(lambda: _answers(given))


def _answers(given: dict[str, Any]) -> None:
    from penstock.bench.answer_check import measure_answers, read_reference
    from penstock.bench.measure_shape import serving
    from penstock.bench.run_folder import write_whole
    from penstock.bench.write_record import without_folders
    from penstock.errors import UsageError

    reference, checksum = read_reference(given["reference"])
    more = dict.fromkeys([*LEFT_OUT, "machine", "model_name"])
    subject = subject_of({**given, **more, "random_weights": False})
    if not subject.ids:
        raise UsageError(
            f"{given['engine']} takes no token ids, and the reference's prompts are ids: ask another"
            " engine",
            param="engine",
        )
    out = given["out"]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{out.parent} cannot be made ({error.strerror}): give another --out", param="out"
        ) from error
    name = f"{subject.peer.name if subject.peer else subject.engine} {subject.version}"
    with serving(subject, out.with_suffix(".log")) as (target, _):
        flags = [without_folders(each) for each in subject.options]
        told = measure_answers(target, reference, checksum, name, flags)
    write_whole(out, told.model_dump_json(indent=1))
    verdict = "wrong" if told.wrong else "right"
    typer.echo(
        f"{name} answers {verdict}: divergence {told.kl:.3g} nats in the mean, at most"
        f" {told.kl_most:.3g}, over {told.positions} positions; {told.agree:.1%} of all tokens are"
        f" the reference's. {out}: for `bench run --answers`"
    )
