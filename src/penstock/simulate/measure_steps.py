"""measure_steps: times a model's steps on this machine. Writes the table of seconds that
simulations use. Knows how to open an engine; no load.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock import __version__
from penstock.artifact.step_file import MeasuredSteps, write_steps
from penstock.config import Config
from penstock.disk import check_writable
from penstock.engine.build_engine import model_folder
from penstock.engine.fitted import fit, open_fitted
from penstock.errors import UsageError
from penstock.execute.built_on import built_on
from penstock.execute.open_runner import find_device
from penstock.execute.step_table import time_steps
from penstock.ranks.rank_runner import open_parallel
from penstock.status_line import duration


def measure_steps(
    config: Config,
    out: Path,
    price: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredSteps:
    """Measures and returns the table, and writes it to `out`. clock: returns seconds. Raises as
    opening a model does, and when `out` exists or cannot be written."""
    config.check()
    if out.exists():
        raise UsageError(
            f"{out} is there already: name another --out, or delete it first", param="out"
        )
    check_writable(out)
    folder = model_folder(config)
    fitted = fit(config, folder)
    config = config if fitted is None else fitted.config
    runner = open_parallel(config, folder) if fitted is None else open_fitted(fitted, open_parallel)
    begun = time.monotonic()
    try:
        table = time_steps(runner, [], clock=clock)
    finally:
        runner.close()
    steps = MeasuredSteps(
        penstock=__version__,
        model=config.model.model,
        built_on=built_on(find_device(config.model.device)),
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        steps_ahead=config.schedule.steps_ahead,
        price=price,
        step_seconds=table,
    )
    write_steps(out, steps)
    took = duration(time.monotonic() - begun)
    print(
        f"penstock: {len(table.rows)} steps of {steps.model} timed in {took}: {out}",
        file=sys.stderr,
    )
    return steps
