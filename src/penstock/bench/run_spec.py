"""The specification of a run. It holds the server and its model, the workload shapes and the
settings. A fingerprint of these tells whether a stopped run may be continued.

Knows words and numbers; starts nothing and reads no file.
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
from penstock.almanac.record import Answers, MachineInfo
from penstock.bench.calibrate import Rung
from penstock.bench.peers import Peer
from penstock.bench.point_planner import Settings
from penstock.bench.workload import Workload


@dataclass(frozen=True)
class ServerSpec:
    """The server under test: a peer that the bench starts, or a running server (peer None, url
    given).

    name: the model's name in the record. model: the model as the server gets it: a folder, a file,
    an id or a name. folder: the local folder with the model's config.json and tokenizer.json, if
    any. version: the engine's version. engine: the engine's name, where there is no peer file.
    options, environment: words and variables for the server beside the peer's own. files: contents
    of files that the options name. cores: cores of a server that the bench starts; empty: any. ids:
    prompts are token ids below `vocabulary`; otherwise texts, made with `tokenizer`. lacks:
    optional parts that the engine's installation does not have.
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
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """The arguments of `bench run`. machine: the server's machine. ceiling: the client's calibrated
    limits (calibrate.py); None: not calibrated. price: dollars an hour of the machine.
    configuration: a name for the set of options. commit: the last commit of the measuring sources.
    answers: how right the engine's answers are; None: not measured.
    """

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
    answers: Answers | None = None

    @property
    def short(self) -> bool:
        """Returns True if the run is below the full method. A server that somebody else started has
        a single start; that alone does not make the run short."""
        return self.settings.below_full(starts=self.subject.peer is not None)


def fingerprint(run: RunSpec, work: Workload) -> dict[str, Any]:
    """Returns the settings that measured load levels depend on. A run continues in a folder only if
    all of them are equal to the folder's."""
    subject = run.subject
    rows = hashlib.sha256(json.dumps(work.rows).encode()).hexdigest() if work.rows else None
    told = {
        "penstock": __version__,
        "commit": run.commit,
        "machine": run.machine.model_dump(exclude={"gpu": {"clocks"}, "identity": True}),
        "python": subject.python,
        "engine": msgspec.structs.asdict(subject.peer) if subject.peer is not None else subject.url,
        "version": subject.version,
        "model": subject.model,
        "options": subject.options,
        "environment": subject.environment,
        **({"files": subject.files} if subject.files else {}),
        **({"lacks": subject.lacks} if subject.lacks else {}),
        "cores": subject.cores,
        "prompts": "ids" if subject.ids else "text",
        "vocabulary": subject.vocabulary,
        "shape": work.name,
        "rows": rows,
        "settings": asdict(run.settings),
        "processes": run.processes,
        "seed": run.seed,
    }
    plain: dict[str, Any] = json.loads(json.dumps(told))  # JSON turns tuples into lists
    return plain
