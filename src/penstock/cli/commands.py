"""The engine's commands: parse, import, call. Each imports what it needs inside itself, so `--help`
loads no torch.

Engine options are not written here: `engine_options` makes them. Commands that need no engine are
in `root`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.build_command import add_build
from penstock.cli.deploy_commands import deploy_app
from penstock.cli.engine_options import EngineCommand, ServeCommand, engine_options
from penstock.cli.exit_codes import OneLineCommand, stopped_by_sigterm
from penstock.cli.root import app
from penstock.cli.simulate_command import add_simulate
from penstock.config import Config
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.jobs.open_llm import OpenLLM

app.add_typer(deploy_app, name="deploy")
add_build(app)
add_simulate(app)

MODEL = typer.Argument(
    metavar="MODEL", help="A model folder, a hub id, or `demo` for the model in the package."
)
Model = Annotated[str, MODEL]
DEMO = "`demo` is the one in the package"
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

    The main job, offline, in a few minutes."""
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

    Files of any size, each id exactly once, through kills."""
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
    """How a job opens its engine. Raises UsageError for words of Ray's where it isn't asked for."""
    if on == "here":
        for param, given in (("address", address), ("workers", workers)):
            if given is not None:
                raise UsageError(f"--{param} is of a Ray cluster: say --on ray too", param=param)
        from penstock.jobs.open_llm import open_llm

        return open_llm
    from penstock.on_ray.ray_workers import RayWorkers

    return partial(RayWorkers, address=address, workers=workers)


@app.command(cls=ServeCommand)
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
    from penstock.text.parsers.reader import AnswerParsers

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


@app.command(cls=OneLineCommand)
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="An artifact: what `penstock build` made.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest, as JSON.")] = False,
) -> None:
    """Say what an artifact holds, and see that it is whole.

    What it was built of, on and for; what was decided and by how much it won."""
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
    """Say what this machine is and how a model would run here.

    Which kernels and why, and how many tokens fit."""
    config = Config.of(model=model, **knobs)
    from penstock.jobs.doctor import print_doctor

    print_doctor(config)


@app.command()
def models() -> None:
    """List the models that are served, with what of each is measured."""
    from penstock.models.catalog import print_catalog

    print_catalog()
