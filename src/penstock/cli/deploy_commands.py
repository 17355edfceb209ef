"""Commands of `penstock deploy`, for Modal and Ray. For Modal the command only writes a file; for
Ray it calls Ray Serve."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.engine_options import EngineCommand, engine_options, given_options, refuse_options
from penstock.errors import UsageError, escaped

deploy_app = typer.Typer(
    help="Take Penstock to others' machines.", no_args_is_help=True, rich_markup_mode=None
)

_NOT_KEPT = (
    "model",
    "revision",
    "device",
    "sealed",
    "load_format",
    "skip_tokenizer_init",
    "seed",
    "preempt_every",
    "tokenizer",
    "chat_template",
)


@deploy_app.callback()
def deploy() -> None:
    """Take Penstock to others' machines."""


@deploy_app.command(cls=EngineCommand)
@engine_options(*_NOT_KEPT)
def modal(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A hub id, `demo`, or a folder of the volume: /penstock/..."
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The file to write, a new one.")] = Path("app.py"),
    name: Annotated[
        str | None, typer.Option(help="The app's name. Left out: made of MODEL.")
    ] = None,
    package: Annotated[
        str | None,
        typer.Option(
            help=(
                "Where the image takes Penstock from: a checkout's folder, an address"
                " (git+https://...), or "
                "penstock==VERSION. Left out: the checkout that this one runs from."
            )
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="Modal's word for it, :N for several, ! for exactly that; `none`: CPUs alone."
        ),
    ] = "H100!",
    cpu: Annotated[float, typer.Option(help="Cores of a container, at least.")] = 8.0,
    revision: Annotated[
        str | None, typer.Option(help="The hub's branch, tag or commit: pin it.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "INxOUT:CONCURRENCY that `build` fits it to; may be given again. Left out:"
                " 256x256:128."
            )
        ),
    ] = None,
    volume: Annotated[
        str, typer.Option(help="Modal volume of artifacts and reports.")
    ] = "penstock",
    hub_volume: Annotated[
        str, typer.Option(help="Modal volume of the hub's downloads.")
    ] = "huggingface-cache",
    hub_secret: Annotated[
        str | None, typer.Option(help="Modal secret with HF_TOKEN, for gated models.")
    ] = None,
    key_secret: Annotated[
        str | None, typer.Option(help="Modal secret with PENSTOCK_API_KEY, which is asked for.")
    ] = None,
    unauthenticated: Annotated[
        bool,
        typer.Option("--unauthenticated", help="Without Modal's proxy auth; wants --key-secret."),
    ] = False,
    routing_region: Annotated[str, typer.Option(help="Where Modal takes requests in.")] = "us-east",
    target_concurrency: Annotated[
        int,
        typer.Option(
            help="HTTP requests a container before there are more; one may be of many samples."
        ),
    ] = 256,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="HTTP requests a container at most; past it Modal answers 429. Left out: any."
        ),
    ] = None,
    min_containers: Annotated[
        int, typer.Option(help="Containers that stay while nobody asks.")
    ] = 0,
    max_containers: Annotated[
        int | None, typer.Option(help="Containers at most. Left out: Modal's own bound.")
    ] = None,
    scaledown_window: Annotated[
        int, typer.Option(help="Seconds without requests before a container ends.")
    ] = 300,
    startup_timeout: Annotated[
        int, typer.Option(help="Seconds until a container must listen.")
    ] = 900,
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            help="Seconds that running requests get at a container's end; Modal waits 30 more."
        ),
    ] = 60,
    knobs: dict[str, Any],
) -> None:
    """Write a Modal app: a server that scales to zero, `build` into a volume, monkeys.

    The file uses Modal's own API and is yours to change. Nothing is deployed."""
    from penstock.deploy.modal_deployment import ModalDeployment
    from penstock.deploy.write_modal_app import default_package, modal_missing, write_modal_app

    package = package or default_package()
    if package is None:
        raise UsageError(
            "this Penstock runs from no checkout: say --package, where the image takes it from",
            param="package",
        )
    deployment = ModalDeployment(
        model=model,
        name=name or _app_name(model),
        package=package,
        cpu=cpu,
        gpu=None if gpu.lower() == "none" else gpu,
        revision=revision,
        knobs=knobs,
        shapes=tuple(shape or ["256x256:128"]),
        volume=volume,
        hub_volume=hub_volume,
        hub_secret=hub_secret,
        key_secret=key_secret,
        unauthenticated=unauthenticated,
        routing_region=routing_region,
        target_concurrency=target_concurrency,
        max_concurrency=max_concurrency,
        min_containers=min_containers,
        max_containers=max_containers,
        scaledown_window=scaledown_window,
        startup_timeout=startup_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    write_modal_app(deployment, out)
    build, serve, monkeys = (_word(f"{out}{what}") for what in ("::build", "", "::monkeys"))
    print(f"{serve}: modal run {build}, modal deploy {serve}, modal run {monkeys}")
    if missing := modal_missing():
        print(f"penstock: {missing}", file=sys.stderr)


@deploy_app.command(cls=EngineCommand)
@engine_options("data_parallel_size", "seed", "preempt_every", "tokenizer", "chat_template")
def ray(
    app: Annotated[
        Path | None,
        typer.Argument(
            metavar="[app.yaml]",
            help="A Serve config file of one Penstock application. Left out: options.",
        ),
    ] = None,
    *,
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            help=(
                "The Ray cluster: `auto` or HOST:PORT. Left out: RAY_ADDRESS, else a cluster of"
                " this machine's own, "
                "which ends with the command."
            )
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the config file there, a new one, and bring nothing anywhere."),
    ] = None,
    name: Annotated[str, typer.Option(help="The application's name in Serve.")] = "penstock",
    host: Annotated[
        str, typer.Option(help="Address that Serve listens on; 0.0.0.0 is all of a machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that Serve listens on.")] = 8000,
    route_prefix: Annotated[str, typer.Option(help="Path that the application is under.")] = "/",
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The name clients give. Left out: the model as it stands here."),
    ] = None,
    cpus: Annotated[float, typer.Option(help="Cores that Ray sets aside for a replica.")] = 1.0,
    min_replicas: Annotated[
        int, typer.Option(help="Replicas that stay while nobody asks; 0 is none.")
    ] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Replicas at most. Left out: as many as at least.")
    ] = None,
    target_seconds: Annotated[
        float, typer.Option(help="Seconds of work that a replica may have before there are more.")
    ] = 30.0,
    upscale_delay: Annotated[
        float, typer.Option(help="Seconds that it must have so much. From zero at once.")
    ] = 10.0,
    downscale_delay: Annotated[
        float, typer.Option(help="Seconds of too little before a replica ends.")
    ] = 300.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="As serve's; the same path on every machine. Else PENSTOCK_API_KEY there."
        ),
    ] = None,
    allow_no_key: Annotated[
        bool,
        typer.Option(
            "--allow-no-key", help="Serve others without a key: a gateway in front checks who asks."
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A Host to answer, beside addresses; * is any. May be given again."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Shared folder of files and batches; wants one replica, no more and no fewer."
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice", help="Let models decide whether they call a tool."
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="As serve's: how calls are written.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="As serve's: keep what the model thinks apart.")
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds after which a start is given up and tried anew.")
    ] = 900.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get at a replica's end.")
    ] = 60.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            help=(
                "Seconds with work and without a step (on a CPU: a layer of one), after which an"
                " engine ends."
            )
        ),
    ] = 120.0,
    knobs: dict[str, Any],
) -> None:
    """Serve a model on Ray Serve, with replicas that scale to zero.

    Each replica runs our server; Serve puts HAProxy in front."""
    from penstock.cli.exit_codes import stopped_by_sigterm
    from penstock.on_ray.cluster import needs_ray
    from penstock.on_ray.deployment import RayDeployment
    from penstock.on_ray.run_service import (
        ServeFile,
        absolute_model,
        deploy_on_ray,
        read_serve_file,
        write_serve_file,
    )

    needs_ray()
    if app is not None:
        refuse_options(
            given_options(context, "app", "address"), f"is said in {app}: change it there"
        )
        stopped_by_sigterm(lambda: deploy_on_ray(read_serve_file(app), address))
        return
    if "model" in knobs:
        knobs["model"] = absolute_model(knobs["model"])
    deployment = RayDeployment(
        name=name,
        served_model_name=served_model_name,
        cpus=cpus,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        target_seconds=target_seconds,
        upscale_delay=upscale_delay,
        downscale_delay=downscale_delay,
        host=host,
        api_key_file=_whole_path(api_key_file),
        allow_no_key=allow_no_key,
        allowed_hosts=tuple(allowed_host or ()),
        state_dir=_whole_path(state_dir),
        startup_timeout=startup_timeout,
        shutdown_timeout=shutdown_timeout,
        step_timeout=step_timeout,
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        knobs=knobs,
    )
    file = ServeFile(deployment, port, route_prefix)
    if out is None:
        stopped_by_sigterm(lambda: deploy_on_ray(file, address))
        return
    write_serve_file(file, out)
    print(f"{_word(str(out))}: penstock deploy ray {_word(str(out))} --address auto")


def _whole_path(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _word(text: str) -> str:
    """Quotes a word for a shell command that the user may copy; characters that cannot be shown are
    escaped."""
    return escaped(shlex.quote(text))


def _app_name(model: str) -> str:
    """Returns the Modal app's name for a model: `meta-llama/Llama-3.2-1B` gives
    penstock-llama-3.2-1b."""
    last = re.sub(r"[^a-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2].lower())
    return f"penstock-{last}"[:64]
