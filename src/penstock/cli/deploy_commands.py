"""`penstock deploy`: writes the files that take Penstock to a cloud or a cluster. It deploys nothing itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.engine_options import EngineCommand, engine_options
from penstock.errors import UsageError

deploy_app = typer.Typer(
    help="Write what takes Penstock to others' machines.", no_args_is_help=True, rich_markup_mode=None
)

_NOT_KEPT = ("model", "revision", "device", "sealed", "load_format", "skip_tokenizer_init", "seed", "preempt_every")


@deploy_app.callback()
def deploy() -> None:
    """Write what takes Penstock to others' machines."""


@deploy_app.command(cls=EngineCommand)
@engine_options(*_NOT_KEPT)
def modal(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id, `demo`, or a folder of the volume: /penstock/...")
    ],
    *,
    out: Annotated[Path, typer.Option(help="The file to write, a new one.")] = Path("app.py"),
    name: Annotated[str | None, typer.Option(help="The app's name. Left out: made of MODEL.")] = None,
    package: Annotated[
        str | None,
        typer.Option(
            help="Where the image takes Penstock from: a checkout's folder, an address (git+https://...), or "
            "penstock==VERSION. Left out: the checkout that this one runs from."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="Modal's word for it, :N for several, ! for exactly that; `none`: CPUs alone.")
    ] = "H100!",
    cpu: Annotated[float, typer.Option(help="Cores of a container, at least.")] = 8.0,
    revision: Annotated[str | None, typer.Option(help="The hub's branch, tag or commit: pin it.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="INxOUT:CONCURRENCY that `build` fits it to; may be given again. Left out: 256x256:128."),
    ] = None,
    volume: Annotated[str, typer.Option(help="Modal volume of artifacts and reports.")] = "penstock",
    hub_volume: Annotated[str, typer.Option(help="Modal volume of the hub's downloads.")] = "huggingface-cache",
    hub_secret: Annotated[str | None, typer.Option(help="Modal secret with HF_TOKEN, for gated models.")] = None,
    key_secret: Annotated[
        str | None, typer.Option(help="Modal secret with PENSTOCK_API_KEY, which is asked for.")
    ] = None,
    unauthenticated: Annotated[
        bool, typer.Option("--unauthenticated", help="Without Modal's proxy auth; wants --key-secret.")
    ] = False,
    routing_region: Annotated[str, typer.Option(help="Where Modal takes requests in.")] = "us-east",
    target_concurrency: Annotated[
        int, typer.Option(help="HTTP requests a container before there are more; one may be of many samples.")
    ] = 256,
    max_concurrency: Annotated[
        int | None, typer.Option(help="HTTP requests a container at most; past it Modal answers 429. Left out: any.")
    ] = None,
    min_containers: Annotated[int, typer.Option(help="Containers that stay while nobody asks.")] = 0,
    max_containers: Annotated[int | None, typer.Option(help="Containers at most. Left out: Modal's own bound.")] = None,
    scaledown_window: Annotated[int, typer.Option(help="Seconds without requests before a container ends.")] = 300,
    startup_timeout: Annotated[int, typer.Option(help="Seconds until a container must listen.")] = 900,
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds that running requests get at a container's end; Modal waits 30 more.")
    ] = 60,
    knobs: dict[str, Any],
) -> None:
    """Write a Modal app: a server from zero and back, `build` into a volume, monkeys.

    A file of plain Modal that is yours to change. Nothing is deployed."""
    from penstock.deploy.modal_deployment import ModalDeployment
    from penstock.deploy.write_modal_app import default_package, modal_missing, write_modal_app

    package = package or default_package()
    if package is None:
        raise UsageError(
            "this Penstock runs from no checkout: say --package, where the image takes it from", param="package"
        )
    deployment = ModalDeployment(
        model=model, name=name or _app_name(model), package=package, cpu=cpu,
        gpu=None if gpu.lower() == "none" else gpu, revision=revision, knobs=knobs,
        shapes=tuple(shape or ["256x256:128"]), volume=volume, hub_volume=hub_volume, hub_secret=hub_secret,
        key_secret=key_secret, unauthenticated=unauthenticated, routing_region=routing_region,
        target_concurrency=target_concurrency, max_concurrency=max_concurrency, min_containers=min_containers,
        max_containers=max_containers, scaledown_window=scaledown_window, startup_timeout=startup_timeout,
        shutdown_timeout=shutdown_timeout,
    )  # fmt: skip
    write_modal_app(deployment, out)
    print(f"{out}: modal run {out}::build, modal deploy {out}, modal run {out}::monkeys")
    if missing := modal_missing():
        print(f"penstock: {missing}", file=sys.stderr)


def _app_name(model: str) -> str:
    """`meta-llama/Llama-3.2-1B` becomes penstock-llama-3.2-1b."""
    last = re.sub(r"[^a-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2].lower())
    return f"penstock-{last}"[:64]
