"""`penstock bench shapes`: how fast this machine runs models of named shapes with random weights, and what each step
goes into.

    shape --> model folder --> sessions (works of one engine, one way) --> results.json --> the table, a line of JSON

A session runs in processes of its own: a child that holds an `LLM`, or a server and its clients. What is measured is
written after each work, so nothing is lost when the time ends. It loads no torch itself.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.bench.cores import count_here
from penstock.bench.serving import Server, free_port
from penstock.config import Config
from penstock.errors import CapacityError, EngineError, PenstockError, UsageError
from penstock.jobs.doctor import installed
from penstock.jobs.outputs import write_whole
from penstock.jobs.shapes_child import rows_of
from penstock.jobs.shapes_http import penstock_command, run_http
from penstock.jobs.shapes_llm import Session, spec_line
from penstock.jobs.shapes_model import load_format, write_model
from penstock.jobs.shapes_start import first_token_seconds
from penstock.jobs.shapes_table import print_tables
from penstock.jobs.shapes_tokenizer import rare_pair
from penstock.jobs.shapes_works import STOP_SHARE, WAYS, Family, Work, chosen, family, problem_prompts

LOAD_PATIENCE = 240.0  # seconds for an engine to load and warm up
START_UP = "start-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, with what, and for how long.

    ways: of WAYS.   seconds: a work's longest; then it is cut, and its rate is of what was made.   minutes: of the
    whole run; works that don't begin in time are left out.   model_out: where the model folders go, None: under `out`.
    weights: write safetensors too.   serve_options: more words for `penstock serve`.   knobs: Config's that were given.
    """

    shape: str
    works: tuple[str, ...]
    out: Path
    ways: tuple[str, ...] = WAYS
    seconds: float = 30.0
    minutes: float = 9.0
    tokenizer: Path | None = None
    problems: str | None = None
    shots: str | None = None
    model_out: Path | None = None
    weights: bool = False
    profile: bool = True
    serve_options: tuple[str, ...] = ()
    knobs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for way in self.ways:
            if way not in WAYS:
                raise UsageError(f"--through must be one of {', '.join(WAYS)} or both, not {way!r}", param="through")
        for name in ("seconds", "minutes"):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name} must be above 0, not {getattr(self, name):g}", param=name)


class Results:
    """results.json: what was measured in this folder, each work and way once, the last time counting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"machine": {}, "limits": {}, "works": {}}
        if path.is_file():
            try:
                self.data |= json.loads(path.read_text())
            except ValueError as error:
                raise UsageError(
                    f"{path} is not JSON ({error}): remove it, or name another --out", param="out"
                ) from error

    @property
    def works(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = self.data["works"]
        return rows

    def put(self, key: str, row: dict[str, Any]) -> None:
        self.works[key] = row | {"when": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.save()

    def save(self) -> None:
        write_whole(self.path, (json.dumps(self.data, indent=1) + "\n").encode())


def run_shapes(options: Options, show: Callable[[str], None] = print) -> dict[str, Any]:
    """The whole job. Gives back what results.json holds. Raises UsageError before anything runs, CapacityError for a
    folder that cannot be written, EngineError at the end where works failed (their names and reasons in it)."""
    known = family(options.shape)
    works = chosen(known.works, options.works)
    Config.of(**options.knobs)
    problem_prompts(max(work.count for work in known.works if not work.length), options.problems, options.shots)
    folders = _models(options, known, works)
    results = Results(options.out / "results.json")
    results.data["machine"] = machine(results.data["machine"])
    run = _Run(options, known, folders, results, show)
    try:
        for way, session in _sessions(works, options.ways):
            run.session(way, session)
    finally:
        results.save()
        print_tables(known, results.data, show)
    if run.failed:
        raise EngineError(f"{len(run.failed)} works gave no figure: " + "; ".join(run.failed))
    return results.data


def _models(options: Options, known: Family, works: list[Work]) -> dict[str, Path]:
    """Shape -> its folder, written. Start-up is measured with weights on disk, as a user has them."""
    root = options.model_out or options.out / "models"
    folders = {}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CapacityError(f"--out {options.out} cannot be made ({error.strerror}): name another folder") from error
    for shape in {known.shape_of(work).name: known.shape_of(work) for work in works}.values():
        folders[shape.name] = root / shape.name
        weights = options.weights or (START_UP in (work.name for work in works) and shape is known.shape)
        write_model(shape, folders[shape.name], options.tokenizer, weights=weights)
    return folders


def _sessions(works: list[Work], ways: tuple[str, ...]) -> Iterator[tuple[str, list[Work]]]:
    """Works that one engine serves, with their way: most telling first, start-up last."""
    usual = [work for work in works if work.name != START_UP]
    for groups, big in ((True, False), (False, False), (True, True)):
        here = [work for work in usual if work.groups == groups and work.big == big]
        for way in WAYS:
            if way in ways and (session := [work for work in here if way in work.ways]):
                yield way, session
    if "llm" in ways and len(usual) < len(works):
        yield START_UP, [work for work in works if work.name == START_UP]


class _Run:
    """A run under way."""

    def __init__(
        self, options: Options, known: Family, folders: dict[str, Path], results: Results, show: Callable[[str], None]
    ) -> None:
        self.options, self.known, self.folders, self.results, self.show = options, known, folders, results, show
        self.failed: list[str] = []
        self._probed: dict[str, dict[str, Any]] = {}  # shape -> shapes_limit.Machine's row, measured in this run
        self._begun = False  # whether the session has begun a work
        self._ends = time.monotonic() + 60 * options.minutes

    def session(self, way: str, works: list[Work]) -> None:
        """Runs the works of one engine; what fails is noted and the rest goes on."""
        run = {"llm": self._llm, "http": self._http, START_UP: self._start_up}[way]
        left = list(works)
        while left:
            if time.monotonic() > self._ends:
                self.show(f"no time left for {', '.join(work.name for work in left)} ({way}): raise --minutes")
                return
            self._begun = False
            try:
                run(left)
            except PenstockError as error:
                lost = left[:1] if self._begun else list(left)  # where no work began, none of them can be run
                for work in lost:
                    self.failed.append(f"{work.name} ({way}): {error}")
                    self.show(f"{work.name:18}{way:6}{error}")
                left = [work for work in left if work not in lost]

    def _knobs(self, work: Work) -> dict[str, Any]:
        shape = self.known.shape_of(work)
        folder = self.folders[shape.name]
        knobs = {"max_model_len": shape.max_model_len, **self.options.knobs}
        if not work.groups:
            knobs["prefix_groups"] = "off"
        return knobs | {"model": str(folder), "load_format": load_format(folder)}

    def _llm(self, left: list[Work]) -> None:
        """Takes each work out of `left` once it is done; a work that is begun and not done is the first of it."""
        options, shape = self.options, self.known.shape_of(left[0])
        spec = Session(
            shape=options.shape, works=[work.name for work in left], knobs=self._knobs(left[0]),
            seconds=options.seconds, problems=options.problems, shots=options.shots,
            machine=self._probed.get(shape.name),
            profile=options.profile,
        )  # fmt: skip
        for row in rows_of("penstock.jobs.shapes_llm", spec_line(spec), 2 * options.seconds + LOAD_PATIENCE):
            if "machine" in row:
                self._probed[shape.name] = self.results.data["limits"][shape.name] = row["machine"]
            elif "about" in row:
                self.results.data["machine"]["engine"] = row["about"]
                self.show(f"{shape.name} opened in {row['ready']:.1f} s")
            elif "begin" in row:
                self._begun = True
            elif "result" in row:
                self._keep(left.pop(0), row["result"])
            elif "failed" in row:
                raise EngineError(row["failed"])
        if left:
            raise EngineError("the engine's process ended; its last words are above")

    def _http(self, left: list[Work]) -> None:
        options, shape = self.options, self.known.shape_of(left[0])
        knobs = self._knobs(left[0])
        port = free_port()
        command = penstock_command(knobs, port, list(options.serve_options))
        stop = _stop(Path(knobs["model"]))
        with Server(command, port, knobs["model"], options.out / f"server-{shape.name}.log") as server:
            self.show(f"{shape.name} served after {server.ready_seconds:.1f} s")
            for work in list(left):
                if time.monotonic() > self._ends:
                    return
                self._begun = True
                row = run_http(
                    server, work, shape, stop=stop, problems=options.problems, shots=options.shots,
                    seconds=options.seconds,
                )  # fmt: skip
                self._keep(left.pop(0), row)

    def _start_up(self, left: list[Work]) -> None:
        knobs = self._knobs(left[0])
        cold = first_token_seconds(knobs, cold=True)
        first_token_seconds(knobs, cold=False)  # fills the caches that the next finds full
        warm = first_token_seconds(knobs, cold=False)
        row = {"work": START_UP, "way": "llm", "shape": self.known.shape.name}
        self._keep(left.pop(0), row | {"warm_seconds": warm, "cold_seconds": cold})

    def _keep(self, work: Work, row: dict[str, Any]) -> None:
        works, root = self.results.works, f"{self.options.shape}/{work.name}"
        limit = works.get(f"{root}/llm", {}).get("limit_tokens_per_second")
        if row["way"] == "http" and limit:  # the same steps, so the same limit
            row["limit_percent"] = 100.0 * row["output_tokens_per_second"] / limit
        usual = works.get(f"{self.options.shape}/{work.against}/{row['way']}")
        if usual is not None:
            row["percent_lost"] = 100.0 * (1 - row["output_tokens_per_second"] / usual["output_tokens_per_second"])
        self.results.put(f"{root}/{row['way']}", row)
        rate = row.get("output_tokens_per_second")
        said = f"{rate:,.0f} output tok/s" if rate is not None else f"{row['warm_seconds']:.1f} s"
        self.show(f"{work.name:18}{row['way']:6}{said}{' (cut)' if row.get('cut') else ''}")


def _stop(folder: Path) -> str:
    from penstock.text.tokenizer import Tokenizer

    return rare_pair(Tokenizer.load(folder).token_bytes, STOP_SHARE)


def machine(before: dict[str, Any]) -> dict[str, Any]:
    """What the figures are of: the machine and the versions."""
    found: dict[str, Any] = {**before, "penstock": __version__, "python": platform.python_version()}
    found |= {name: installed(name) for name in ("torch", "triton", "vllm")}
    found["cores"] = count_here()
    found["gpu"] = gpu_name()
    return found


def gpu_name() -> str | None:
    """The first GPU's name and driver, as nvidia-smi has them."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
