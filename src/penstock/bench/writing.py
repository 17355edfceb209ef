"""A run's record, out of its folder: everything that is needed to run it again, and figures that the almanac derives.

It knows the folder and the form of a record; nothing is measured here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.almanac.figures import point_of
from penstock.almanac.record import (
    Client,
    Configuration,
    Engine,
    Look,
    Machine,
    Method,
    Model,
    Point,
    Raw,
    Record,
)
from penstock.almanac.record import Shape as RecordShape
from penstock.almanac.samples import read_parquet
from penstock.bench.measure import Ceiling, Subject
from penstock.bench.method import CLOSED, OPEN, Settings
from penstock.bench.run_folder import Measured, RunFolder
from penstock.bench.serving import HOST
from penstock.bench.workload import Workload

_ODD = re.compile(r"[^A-Za-z0-9 ._:+@,()/=-]+")


def write_record(
    folder: RunFolder, subject: Subject, work: Workload, settings: Settings, *, machine: Machine, version: str,
    seed: int, processes: int, ceiling: Ceiling, price: float | None, random_weights: bool, configuration: str,
    run: str, when: float,
) -> Record:  # fmt: skip
    """Makes raw.parquet and record.json of what the folder holds."""
    measured = folder.measured()
    raw = None
    points: list[Point] = []
    if measured:
        path = folder.raw()
        samples = read_parquet(path)
        raw = Raw(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), rows=len(samples))
        points = [_point(name, measured, samples, work, settings, subject) for name in _names(measured)]
    record = Record(
        schema="penstock-almanac/1",
        run=run,
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when)),
        engine=_engine(subject, version, configuration),
        model=_model(subject, random_weights),
        machine=machine,
        shape=RecordShape(
            name=word(work.name), kind=_kind(work), input=work.input, output=work.output, n=work.n, temperature=1.0,
            prompts="ids" if subject.ids and not work.rows else "text",
        ),
        client=Client(
            penstock=__version__, commit=commit(), command=line(shlex.join(["penstock", *sys.argv[1:]])),
            processes=processes, seed=seed, ceiling_events=ceiling.events, ceiling_requests=ceiling.requests,
        ),
        method=Method(
            warm_up=settings.warm_up, window=settings.window, enough=settings.enough,
            starts=1 if subject.peer is None else settings.starts, quantile=settings.quantile,
            goals=list(settings.goals), short=settings.short, price_per_hour=price,
        ),
        points=points,
        failures=folder.failures(),
        raw=raw,
    )  # fmt: skip
    folder.write("record.json", record.model_dump_json(by_alias=True, indent=1))
    return record


def _names(measured: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(one.plan.name for one in measured))


def _point(
    name: str, measured: Sequence[Measured], samples: Any, work: Workload, settings: Settings, subject: Subject
) -> Point:
    """One point of all starts that measured it."""
    mine = [one for one in measured if one.plan.name == name]
    plan = mine[0].plan
    steady = plan.kind in (OPEN, CLOSED)
    kind: Any = plan.kind
    return point_of(
        samples, name=name, kind=kind, rate=plan.rate, concurrency=plan.concurrency,
        seconds=sum(one.plan.window for one in mine) if steady else None,
        opens=settings.warm_up if steady else None, goals=settings.goals, look=worst([one.look for one in mine]),
        marks=[] if subject.ids else ["text prompts"], sharing=work.kind != "exact",
    )  # fmt: skip


def worst(looks: Sequence[Look]) -> Look:
    """Of a point that was measured on several starts."""
    rooms = [look.headroom for look in looks if look.headroom is not None]
    return Look(
        lag_p99=max(look.lag_p99 for look in looks),
        busy=max(look.busy for look in looks),
        headroom=min(rooms) if len(rooms) == len(looks) else None,
        late_p99=max(look.late_p99 for look in looks),
        short=any(look.short for look in looks),
    )


# --- what was measured


def _engine(subject: Subject, version: str, configuration: str) -> Engine:
    flags = [line(each) for each in subject.options]
    if subject.peer is None:
        name, command = "unknown", f"found running at {subject.url}"
    else:
        name = subject.peer.name
        command = shlex.join([*subject.peer.words("python", subject.model, HOST, 8000), *subject.options])
    variables = {**(subject.peer.environment if subject.peer is not None else {}), **subject.environment}
    return Engine(
        name=word(name), version=word(version), command=line(command),
        configuration=Configuration(name=word(configuration), flags=flags, environment=variables),
    )  # fmt: skip


def _kind(work: Workload) -> Any:
    return work.kind


def _model(subject: Subject, random_weights: bool) -> Model:
    told = model_config(subject.model)
    return Model(
        name=word(Path(subject.model).name),
        weights="random" if random_weights else "real",
        parameters=parameters(subject.model),
        dtype=word(str(told.get("dtype") or told.get("torch_dtype") or "unknown")),
        source=line("" if Path(subject.model).is_dir() else subject.model),
    )


def model_config(model: str) -> dict[str, Any]:
    """config.json of a model's folder; empty for a name."""
    path = Path(model) / "config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def parameters(model: str) -> int | None:
    """Counted from the headers of a folder's safetensors files."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    total = 0
    for file in files:
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for size in tensor["shape"]:
                    count *= size
                total += count
    return total or None


def commit() -> str | None:
    """Of the checkout that this package lies in, if it is one."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def word(text: str) -> str:
    """As the record's words are: without odd characters, not empty."""
    return (_ODD.sub("-", text).strip(" -") or "unknown")[:120]


def line(text: str) -> str:
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:2000]
