"""What a run was asked for: the server and its model, the shapes, the settings. And its
fingerprint.

It knows words and numbers; it starts nothing and reads no file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.almanac.record import MachineInfo
from penstock.bench.calibrate import Rung
from penstock.bench.peers import Peer
from penstock.bench.point_planner import Settings
from penstock.bench.workload import Workload


@dataclass(frozen=True)
class ServerSpec:
    """What is measured: a peer that we start, or a server that is there (peer None, url given).

    name: of the model, in the record.      model: as the server is told it: a folder, a file, an id
    or a name. folder: with config.json and tokenizer.json of the model, if there is one here.
    version: of the engine.                 engine: its name, where no peer file has it. options,
    environment: words and variables for the server beside the peer's own. files: that the options
    name. cores: that the server we start runs on; empty: wherever it may. ids: prompts are token
    ids, drawn below `vocabulary`; else texts, made with `tokenizer`.
    """

    name: str
    model: str
    version: str
    peer: Peer | None = None
    url: str | None = None
    engine: str = "unknown"
    folder: Path | None = None
    python: str = sys.executable
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    api_key: str | None = None
    tokenizer: Path | None = None
    vocabulary: int = 0
    ids: bool = True
    dtype: str | None = None
    random_weights: bool = False


@dataclass(frozen=True)
class RunSpec:
    """What `bench run` was asked for. machine: the server's. ceiling: what the clients reach
    against a server that does nothing; None: not calibrated. price: dollars an hour of the machine.
    configuration: a word for the options. commit: the last one of the sources that measure."""

    subject: ServerSpec
    works: list[Workload]
    settings: Settings
    out: Path
    seed: int
    processes: int
    machine: MachineInfo
    ceiling: Rung | None = None
    price: float | None = None
    configuration: str = "default"
    commit: str | None = None

    @property
    def short(self) -> bool:
        """Returns whether it is less than the method asks for. A server that we don't start has one
        start, and no more."""
        return self.settings.below_full(starts=self.subject.peer is not None)


def fingerprint(run: RunSpec, work: Workload) -> dict[str, Any]:
    """Returns what a folder's points depend on. A run goes on in a folder only when all of it is
    the same."""
    subject = run.subject
    rows = hashlib.sha256(json.dumps(work.rows).encode()).hexdigest() if work.rows else None
    told = {
        "penstock": __version__,
        "commit": run.commit,
        "machine": run.machine.model_dump(exclude={"gpu": {"clocks"}}),
        "python": subject.python,
        "engine": msgspec.structs.asdict(subject.peer) if subject.peer is not None else subject.url,
        "version": subject.version,
        "model": subject.model,
        "options": subject.options,
        "environment": subject.environment,
        **({"files": subject.files} if subject.files else {}),
        "cores": subject.cores,
        "prompts": "ids" if subject.ids else "text",
        "vocabulary": subject.vocabulary,
        "shape": work.name,
        "rows": rows,
        "settings": asdict(run.settings),
        "processes": run.processes,
        "seed": run.seed,
    }
    plain: dict[str, Any] = json.loads(json.dumps(told))  # tuples are lists there
    return plain
