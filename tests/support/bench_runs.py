"""Short runs of the bench against `fake_engine.py`, for its tests."""

from __future__ import annotations

from pathlib import Path

from penstock.almanac.record import MachineInfo
from penstock.bench.measure_shape import ShapeRun, measure_together
from penstock.bench.peers import Peer
from penstock.bench.point_planner import Settings
from penstock.bench.run_folder import RunFolder
from penstock.bench.run_spec import RunSpec, ServerSpec, fingerprint
from penstock.bench.workload import workload

QUICK = Settings(
    goals=(0.05, 8.0),
    starts=1,
    warm_up=0.1,
    window=0.3,
    longest=600.0,
    drain=0.1,
    enough=10,
    at_once=24,
    alone=3,
    bisections=1,
    ladder=False,
    stall=600.0,
)
MACHINE = MachineInfo(
    gpu=None, cpu="a CPU", cores=2, memory_mib=1000, system="Linux", python="3.11.0"
)
ENGINE = Path(__file__).with_name("fake_engine.py")


def fake_peer(**more: object) -> Peer:
    return Peer(
        **{
            "name": "fake",
            "says": "for tests",
            "install": "nothing",
            "version": ["{python}", "--version"],
            "command": ["{python}", str(ENGINE), "{port}"],
            "ready": "/health",
            "stop": "SIGTERM",
            "path": "/v1/completions",
            "ids": True,
            **more,
        }
    )


def run_of(
    out: Path, *options: str, settings: Settings = QUICK, peer: Peer | None = None, **more: object
) -> RunSpec:
    subject = ServerSpec(
        **{
            "name": "Tiny-1B",
            "model": "tiny",
            "version": "1.2",
            "peer": peer or fake_peer(),
            "vocabulary": 500,
            "options": options,
            **more,
        }
    )
    return RunSpec(subject, [workload("8x4")], settings, out, 0, 1, MACHINE)


def held_run(out: Path) -> RunSpec:
    """A run whose server answers nothing while there is a file `hold` beside its starts."""
    return run_of(out, f"count={out}/starts", f"hold={out}/hold")


def measured(run: RunSpec, shape: str = "8x4") -> RunFolder:
    """Measures a shape into the run's folder; the folder, closed."""
    work = workload(shape)
    folder = RunFolder(run.out / shape.replace(":", "-"), fingerprint(run, work))
    try:
        measure_together(run, [ShapeRun(run, work, folder, lambda plan, load, now: None)])
    finally:
        folder.close()
    return folder
