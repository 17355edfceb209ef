"""`penstock simulate`: runs simulations and prints the answers. Takes tables of step seconds, a
source of requests, and latency goals. Joins the room's parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import UsageError
from penstock.simulate.goals import parse_goals
from penstock.simulate.load_source import LoadOptions, LoadSource
from penstock.simulate.planner import FleetAnswer, Planner
from penstock.simulate.scaling import Scaling
from penstock.simulate.simulated_engine import SimulatedEngine
from penstock.simulate.simulation_report import as_json, as_text, write_picture
from penstock.status_line import StatusLine, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation. replicas: None: find the fewest that keep the goals, up to `most`.
    simulated: most replicas to simulate; None: all that may differ. price: dollars an hour of a
    GPU."""

    replicas: int | None = None
    most: int = 4096
    goals: Sequence[str] = ()
    scaling: Scaling | None = None
    simulated: int | None = None
    price: float | None = None
    as_json: bool = False
    picture: Path | None = None


def run_simulation(
    engines: Sequence[SimulatedEngine], load: LoadOptions, options: SimulationOptions
) -> list[FleetAnswer]:
    """Simulates each engine with the load; prints and returns the answers. If the user asks for a
    multiple of a load, the load itself is simulated too. Raises UsageError for options that
    contradict each other, for a load outside a table, and for goals that nothing keeps.
    """
    models = {engine.steps.model for engine in engines}
    if len(models) > 1:
        raise UsageError(
            f"the tables are of different models ({', '.join(sorted(models))}): compare those"
            " of one"
        )
    source = LoadSource(load)
    goals = parse_goals(options.goals, job=source.is_job)
    if options.scaling is not None and source.is_job:
        raise UsageError(
            "scale is for requests that arrive: a job has all its replicas until it is done",
            param="scale",
        )
    line = StatusLine()
    answers = [
        _answer(
            Planner(engine, each, goals, few=options.simulated, watch=partial(_watch, line)),
            options,
        )
        for engine in engines
        for each in _loads(source)
    ]
    line.clear()
    if options.picture is not None:
        write_picture(options.picture, answers)
    print(as_json(answers, options.price) if options.as_json else as_text(answers, options.price))
    if not options.as_json and goals and len(answers) > 1 and options.replicas is None:
        print(_best(answers))
    return answers


def _loads(source: LoadSource) -> list[LoadSource]:
    """Returns the load, preceded by the load of which it is a multiple."""
    factor = source.options.load_times
    return [source] if factor == 1 else [source.times(1 / factor), source]


def _answer(planner: Planner, options: SimulationOptions) -> FleetAnswer:
    if options.scaling is not None:
        return planner.scaled(options.scaling)
    if options.replicas is not None:
        return planner.answer(options.replicas)
    return planner.fewest(options.most) if planner.goals else planner.answer(1)


def _best(answers: Sequence[FleetAnswer]) -> str:
    """Returns a text that names, for each load, the answer with the fewest GPUs."""
    lines = []
    for told in dict.fromkeys(answer.told for answer in answers):
        best = min(
            (answer for answer in answers if answer.told == told), key=lambda answer: answer.gpus
        )
        shape = f"--tensor-parallel-size {best.engine.gpus} --data-parallel-size {best.replicas}"
        lines.append(
            f"{told}: fewest with {best.gpus:,} GPU{'s' * (best.gpus > 1)}, {best.engine.name}:"
            f" {shape}"
        )
    return "\n".join(lines)


def _watch(line: StatusLine, replicas: int, now: float) -> None:
    line.show(f"penstock: simulating, replicas {replicas:,}: {duration(now)} of virtual time")
