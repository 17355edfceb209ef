"""Makes a benchmark record from a run's folder. The record has everything needed to repeat the run,
and the figures that the almanac derives.

Knows the folder and the format of a record; measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock import __version__
from penstock.almanac.figures import point_of
from penstock.almanac.machine_spread import EDITION as EDITION_TERM
from penstock.almanac.record import (
    BUSY,
    ClientHealth,
    ClientInfo,
    Configuration,
    EngineInfo,
    Method,
    ModelInfo,
    Point,
    Raw,
    Record,
)
from penstock.almanac.record import ShapeInfo as RecordShape
from penstock.almanac.samples import Samples
from penstock.bench.point_planner import (
    CLOSED,
    OPEN,
    SATURATION,
    fewer_than_aimed,
    next_plan,
)
from penstock.bench.run_folder import MeasuredPoint, RunFolder, RunState
from penstock.bench.run_spec import RunSpec, ServerSpec
from penstock.bench.server_process import HOST
from penstock.bench.workload import TEMPERATURE, Workload
from penstock.errors import CheckpointError, UsageError
from penstock.json_keys import read_json

SECRETS = ("--api-key",)
# endings of files whose content a benchmark record may hold
CONFIGURATIONS = (
    ".json",
    ".yaml",
    ".yml",
    ".toml",
    ".jinja",
    ".ini",
    ".cfg",
    ".conf",
)
# bytes of a configuration file that a record holds; characters of one of its lines
LONGEST_FILE, LONGEST_LINE = 20_000, 2000
HOUSE = Path(__file__).parent.parent  # folder of the penstock package
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_ODD = re.compile(r"[^A-Za-z0-9 ._:+@,()/=-]+")
# matches the folders of an absolute path, but no part of a URL
_FOLDERS = re.compile(r"""(?<![\w./~-])/(?:[^\s/'"=,;:()]+/)+""")


def write_record(run: RunSpec, work: Workload, folder: RunFolder) -> Record:
    """Writes raw.parquet and record.json from the folder's load levels and failures."""
    measured = folder.state.points
    method = method_of(run, work, folder.state)
    raw, points = None, []
    if measured:
        path, samples, board = folder.raw()
        raw = Raw(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), rows=len(samples))
        by_name: dict[str, list[MeasuredPoint]] = {}
        for one in measured:
            by_name.setdefault(one.result.plan.name, []).append(one)
        points = [
            _point(run, work, samples, starts, edition=method.edition, board=board)
            for starts in by_name.values()
        ]
    record = Record(
        schema="penstock-almanac/1",
        run=folder.state.run,
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(folder.state.when)),
        engine=_engine(run),
        model=_model(run.subject),
        machine=run.machine.model_copy(
            update={"identity": folder.state.machines.get(0) if measured else run.machine.identity}
        ),
        shape=_shape(run.subject, work),
        client=_client(run),
        method=method,
        points=points,
        failures=[one.failure for one in folder.state.failures],
        raw=raw,
        answers=run.answers,
    )
    folder.write("record.json", record.model_dump_json(by_alias=True, indent=1))
    return record


def _point(
    run: RunSpec,
    work: Workload,
    samples: Samples,
    starts: Sequence[MeasuredPoint],
    **more: Any,
) -> Point:
    """Makes one load level of the benchmark record from all server starts that measured it."""
    plan = starts[0].result.plan
    drafted = [one.accepted_drafts for one in starts if one.accepted_drafts is not None]
    steady = plan.kind in (OPEN, CLOSED)
    kind: Any = plan.kind
    marks = ["text prompts"] if _prompts(run.subject, work) == "text" else []
    if fewer_than_aimed(run.settings, plan):
        marks.append("fewer requests than aimed at")
    return point_of(
        samples,
        name=plan.name,
        kind=kind,
        rate=plan.rate,
        concurrency=plan.concurrency,
        seconds=sum(one.result.plan.window for one in starts) if steady else None,
        opens=plan.opens if steady else None,
        goals=run.settings.goals,
        look=worst([one.look for one in starts]),
        accepted_drafts=float(f"{sum(drafted) / len(drafted):.6g}") if drafted else None,
        marks=marks,
        sharing=work.kind != "exact",
        **more,
    )


def worst(looks: Sequence[ClientHealth]) -> ClientHealth:
    """Joins the client's measurements of a load level on several server starts: the worst values
    count. If one start has no calibrated headroom, the result has none."""
    rooms, busy = (
        [look.headroom for look in looks if look.headroom is not None],
        max(look.busy for look in looks),
    )
    headroom = min(rooms) if len(rooms) == len(looks) else None
    return ClientHealth(
        lag_p99=max(look.lag_p99 for look in looks),
        busy=busy,
        headroom=headroom,
        late_p99=max(look.late_p99 for look in looks),
        short=any(look.short for look in looks) or (headroom is None and busy > BUSY),
    )


# --- the engine and the method of a run


def _engine(run: RunSpec) -> EngineInfo:
    subject, peer = run.subject, run.subject.peer
    if peer is None:
        name, command = subject.engine, f"found running at {subject.url}"
    else:
        name = peer.name
        # leave the names of local folders out of the record
        here = subject.name if Path(subject.model).exists() else subject.model
        command = shlex.join([*peer.words("python", here, HOST, 8000), *subject.options])
    variables = {**(peer.environment if peer is not None else {}), **subject.environment}
    return EngineInfo(
        name=word(name),
        version=word(subject.version),
        command=line(without_folders(command)),
        lacks=[word(each) for each in subject.lacks],
        # the commit of this checkout, if the server runs from it too
        commit=(run.commit if name == "penstock" and subject.python == sys.executable else None),
        configuration=Configuration(
            name=word(run.configuration),
            flags=[line(without_folders(each)) for each in subject.options],
            files={word(each): text for each, text in subject.files.items()},
            environment={
                word(each): line(without_folders(value)) for each, value in variables.items()
            },
        ),
    )


def _model(subject: ServerSpec) -> ModelInfo:
    told = model_config(subject.folder)
    return ModelInfo(
        name=word(subject.name),
        weights="random" if subject.random_weights else "real",
        parameters=parameters(subject.folder),
        dtype=word(subject.dtype or str(told.get("dtype") or told.get("torch_dtype") or "unknown")),
        source="" if Path(subject.model).exists() else line(subject.model),
    )


def _shape(subject: ServerSpec, work: Workload) -> RecordShape:
    kind: Any = work.kind
    return RecordShape(
        name=word(work.name),
        kind=kind,
        input=work.input,
        output=work.output,
        n=work.n,
        temperature=TEMPERATURE,
        source=line(work.source),
        prompts=_prompts(subject, work),
    )


def _prompts(subject: ServerSpec, work: Workload) -> Literal["ids", "text"]:
    return "ids" if subject.ids and not work.rows else "text"


def _client(run: RunSpec) -> ClientInfo:
    return ClientInfo(
        penstock=__version__,
        commit=run.commit,
        command=line(command_of(sys.argv)),
        processes=run.processes,
        seed=run.seed,
        ceiling_events=run.ceiling.events if run.ceiling else None,
        ceiling_requests=run.ceiling.requests if run.ceiling else None,
    )


def method_of(run: RunSpec, work: Workload, state: RunState) -> Method:
    """Returns the method as it was carried out. If time or failures ended the run, it has the
    number of server starts that took place, and the run is marked short."""
    settings = run.settings
    plans = [one.result.plan for one in state.points]
    steady = [plan for plan in plans if plan.kind in (OPEN, CLOSED)]
    ended = next_plan(replace(settings.of_samples(work.n), budget=None), state.found) is None
    fewer = any(fewer_than_aimed(settings, plan) for plan in plans)
    began = {plan.start for plan in plans if plan.kind == SATURATION}
    return Method(
        warm_up=max((plan.opens for plan in steady), default=settings.warm_up),
        window=max((plan.window for plan in steady), default=settings.window),
        enough=settings.enough,
        starts=1 + max((plan.start for plan in plans), default=0),
        quantile=settings.quantile,
        goals=list(settings.goals),
        short=run.short or fewer or not ended,
        price_per_hour=run.price,
        machines=names if len(set(names := list(state.machines.values()))) > 1 else [],
        edition=EDITION_TERM if settings.keeps_edition and len(began) >= settings.starts else None,
    )


def command_of(arguments: Sequence[str]) -> str:
    """Returns the command line as typed, without secrets and folders."""
    words = ["penstock", *(without_folders(each.rstrip("/")) for each in arguments[1:])]
    for at, each in enumerate(words):
        name, _, value = each.partition("=")
        if name in SECRETS and value:
            words[at] = f"{name}=SECRET"
        elif name in SECRETS and at + 1 < len(words):
            words[at + 1] = "SECRET"
    return shlex.join(words)


def without_folders(text: str) -> str:
    """Returns the text with this machine's paths cut to their last part: records must not show
    local folders."""
    return _FOLDERS.sub(lambda found: "" if Path(found[0]).is_dir() else found[0], text)


def option_files(options: Sequence[str]) -> dict[str, str]:
    """Returns the files that an engine's options name, by name: a configuration's text, and for any
    other file only its checksum (it may be a key, or gigabytes). Raises UsageError for two files of
    one name.
    """
    found: dict[str, str] = {}
    for path in (
        Path(each.partition("=")[2] if each.startswith("--") and "=" in each else each)
        for each in options
    ):
        if not _is_file(path):
            continue
        if path.name in found:
            raise UsageError(
                f"two files of --options are called {path.name}: give one another name",
                param="options",
            )
        with path.open("rb") as data:
            told = (
                f"sha256 {hashlib.file_digest(data, 'sha256').hexdigest()}, {path.stat().st_size}"
                " bytes"
            )
        kept = path.suffix in CONFIGURATIONS and path.stat().st_size <= LONGEST_FILE
        found[path.name] = (
            plain(path.read_text(encoding="utf-8", errors="replace")) if kept else told
        )
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the text is too long for a path
        return False


def model_config(folder: Path | None) -> dict[str, Any]:
    """Reads config.json of a model's folder; empty where there is none. Raises CheckpointError for
    invalid JSON."""
    path = folder / "config.json" if folder is not None else None
    return {} if path is None or not path.is_file() else read_json(path)


def parameters(folder: Path | None) -> int | None:
    """Counts a model's parameters from the headers of a folder's safetensors files. Raises
    CheckpointError for a truncated file."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        try:
            with file.open("rb") as data:
                header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
            total += sum(
                math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__"
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            MemoryError,
        ) as error:
            raise CheckpointError(f"{file} is no whole safetensors file: {error}") from error
    return total or None


def commit() -> str | None:
    """Returns the commit that this package came from: the archived commit (`git archive` writes it
    into archived.txt), or the last one that touched the package in its checkout, with `+changed.`
    and a checksum of the difference if its files differ. Other files of a checkout do not matter,
    so a run continues when a note beside the package changes. None where there is neither, for
    instance for a package inside somebody else's checkout, as a virtual environment is.
    """
    if told := archived(HOUSE / "archived.txt"):
        return told
    if not _git("ls-files", "--", "."):
        return None
    last = _git("log", "-1", "--format=%H", "--", ".")
    changed = _git("diff", "HEAD", "--no-ext-diff", "--no-color", "--full-index", "--", ".")
    if not last or changed is None:
        return None
    return (
        f"{last[:12]}+changed.{hashlib.sha256(changed.encode()).hexdigest()[:12]}"
        if changed
        else last[:12]
    )


def _git(*words: str) -> str | None:
    """Returns git's output for the package's folder; None if git fails."""
    try:
        command = ["git", "-C", str(HOUSE), *words]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def archived(file: Path) -> str | None:
    """Returns the commit that `git archive` wrote; None for the file as checked in."""
    told = re.search(r"^[0-9a-f]{12}", file.read_text(), re.M) if file.is_file() else None
    return told[0] if told else None


def word(text: str) -> str:
    """Returns the text in the format of a benchmark record's `Word`: other characters replaced,
    never empty."""
    return (re.sub(r"^[^A-Za-z0-9]+", "", _ODD.sub("-", text)).strip(" -") or "unknown")[:120]


def plain(text: str) -> str:
    """Returns a log or file fit for a record: no colours, no control characters."""
    return "".join(c for c in _COLOURS.sub("", text) if c.isprintable() or c in "\n\t")


def line(text: str) -> str:
    """Returns the text on one line; a text too long for a benchmark record ends in an ellipsis."""
    told = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return told if len(told) <= LONGEST_LINE else told[: LONGEST_LINE - 1] + "…"
