"""The command `penstock serve`. Has the server's own options;
engine_options.py makes the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.engine_options import DEMO, MODEL, ServeCommand, engine_options
from penstock.config import Config
from penstock.errors import UsageError


def add_serve(app: typer.Typer) -> None:
    """Adds `serve` to the command line."""
    app.command(cls=ServeCommand)(serve)


@engine_options("model")
def serve(
    model: Annotated[str | None, MODEL] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name clients give. Left out: MODEL as it stands here.")
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(
            help="Samples that may wait or run; past it 429 (of vLLM's name). Left out: 8 a row.",
            min=1,
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens of what waits or runs; past it 429. Left out: 16 Mi.", min=1
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            help=(
                "Seconds a request may take, whatever its own `timeout` says; past it 408. Left"
                " out: any."
            )
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Ask clients for this key; may be given again. PENSTOCK_API_KEY shows in no list of"
                " processes."
            )
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="TOML with a [[key]] for each: name, key or sha256, and its own limits."),
    ] = None,
    allow_no_key: Annotated[
        bool,
        typer.Option(
            "--allow-no-key", help="Serve others without a key: a gateway in front checks who asks."
        ),
    ] = False,
    allow_admin_without_key: Annotated[
        bool,
        typer.Option(
            "--allow-admin-without-key",
            help=(
                "Without keys: let everybody change weights, empty caches, put engines to sleep,"
                " restart them."
            ),
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A Host, or a page's host, to answer, beside addresses; * is any. May be given"
                " again. "
                "Where there are keys, neither is asked until one is given."
            )
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A page's site that may ask from browsers, as https://app.example; may be given"
                " again. Left out: none."
            )
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Serve HTTPS by this certificate, with its chain (PEM); read again when it changes."
            )
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="The certificate's key (PEM). Left out: in the certificate's file."),
    ] = None,
    api_server_count: Annotated[
        int,
        typer.Option(
            help=(
                "Processes that answer HTTP, over all engines; more than one where one core is"
                " short."
            )
        ),
    ] = 1,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of files and batches; the same one goes on where it was. Left out: none."
        ),
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            help="File for a line of JSON a request, without prompts; - is standard error."
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice", help="Let models decide whether they call a tool."
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help=(
                "How calls are written: hermes, gemma4, glm45, lfm2, llama3_json, minimax_m2,"
                " qwen3_coder, openai "
                "(gpt-oss's), or as the model's response_template says (docs/tools.md has all). "
                "Left out: as its chat template does."
            )
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help=(
                "Keep what the model thinks apart: qwen3, deepseek_r1, ernie45, gemma4, glm45,"
                " minimax_m2, "
                "openai_gptoss. Left out: it stays in content."
            )
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests get after SIGTERM; a second one ends them.", min=0.0
        ),
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            help=(
                "Seconds with work and without a step (on a CPU: a layer of one), after which an"
                " engine ends."
            ),
            min=1.0,
        ),
    ] = 120.0,
    knobs: dict[str, Any],
) -> None:
    """Serve a model over OpenAI's HTTP API."""
    if model is None:
        raise UsageError(
            f"serve has no model: say penstock serve MODEL, a folder or a hub id; {DEMO}",
            param="model",
        )
    config = Config.of(model=model, **knobs)
    from penstock.server.api_server.serve import serve as serve_http
    from penstock.server.openai.http_limits import HttpLimits
    from penstock.text.parsers.parser_registry import AnswerParsers

    parsers = AnswerParsers(
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    limits = HttpLimits(
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        request_seconds=request_timeout,
        drain_seconds=shutdown_timeout,
        step_timeout=step_timeout,
    )
    serve_http(
        config,
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_server_count=api_server_count,
        api_key=api_key or (),
        api_key_file=api_key_file,
        allow_no_key=allow_no_key,
        allow_admin_without_key=allow_admin_without_key,
        allowed_hosts=allowed_host or (),
        state_dir=state_dir,
        allowed_origins=allowed_origin or (),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        access_log=access_log,
        limits=limits,
        parsers=parsers,
        own_process=True,
    )
