"""SimulatedEngine: the description of a simulated engine. A table of measured steps and the user's
options give the scheduler's limits, the steps' seconds, and a replica's GPUs and price. Knows
tables and options; of a load only its longest request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.artifact.manifest import TimedEngine
from penstock.artifact.step_file import MeasuredSteps, read_steps
from penstock.config import BLOCK_SIZE, Config
from penstock.errors import UsageError
from penstock.schedule.prefix_groups import SharingCosts
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.state_slots import first_snapshot
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.modelled_outputs import END, VOCABULARY
from penstock.simulate.step_costs import StepCosts

# Options of a scheduler -> the field of TimedEngine that is their upper bound.
_BOUNDED = {
    "max_num_seqs": "max_rows",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_model_len",
}
SCHEDULED = frozenset(
    {*_BOUNDED, "kv_cache_tokens", "enable_prefix_caching", "prefix_groups", "steps_ahead"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """An engine to simulate: its limits, step costs, GPUs and price."""

    name: str
    steps: MeasuredSteps
    limits: SchedulerConfig
    costs: StepCosts
    steps_ahead: int

    @property
    def gpus(self) -> int:
        return self.steps.tensor_parallel_size

    def check(self, load: AskedLoad) -> None:
        """Raises UsageError for a load with a request that can never run."""
        if load.longest() > self.limits.max_model_len:
            raise UsageError(
                f"the longest request, prompt and answer, has {load.longest():,} tokens, and"
                f" {self.name} takes {self.limits.max_model_len:,}: shorten it, or measure with a"
                " larger --max-model-len"
            )


def open_engine(path: Path, knobs: Mapping[str, Any], model: str | None = None) -> SimulatedEngine:
    """Returns the engine described by a built engine's folder or by a file with a table. knobs:
    options of Config. model: name of the model that it must have; None: any. Raises CheckpointError
    if there is no table, UsageError for knobs outside the table."""
    steps = read_steps(path)
    if model is not None and steps.model != model:
        raise UsageError(
            f"{path} was measured with {steps.model}, not {model}: name its own model, or another"
            " table",
            param="model",
        )
    if strange := sorted(knobs.keys() - SCHEDULED):
        raise UsageError(
            f"{strange[0]} is what a table is measured with: name it with --measure, or leave"
            " it out",
            param=strange[0],
        )
    config = Config.of(**knobs)
    engine = steps.step_seconds.engine
    assert engine is not None, "read_steps refuses a table without one"
    name = str(path)
    return SimulatedEngine(
        name=name,
        steps=steps,
        limits=_limits(name, engine, config),
        costs=StepCosts(steps.step_seconds, name, _way_to_more(path)),
        steps_ahead=config.schedule.steps_ahead if "steps_ahead" in knobs else steps.steps_ahead,
    )


def _way_to_more(path: Path) -> str:
    """Returns the hint for a simulated step that is larger than those of the measured table of step
    costs: the command that measures larger ones. path: an artifact or a table's file."""
    if path.is_dir():
        return f"time more (penstock build --retune {path} --tune-minutes N, with more minutes)"
    return "measure a table with more (penstock simulate --measure)"


def _limits(name: str, engine: TimedEngine, config: Config) -> SchedulerConfig:
    told = config.told()
    for knob, field in _BOUNDED.items():
        if told.get(knob) is not None and told[knob] > getattr(engine, field):
            raise UsageError(
                f"{name} was measured with {knob} {getattr(engine, field):,}, and {told[knob]:,}"
                " are asked: measure a table with as many",
                param=knob,
            )
    held = (engine.num_blocks - 1) * BLOCK_SIZE
    kv = config.memory.kv_cache_tokens
    if kv is not None and kv > held:
        raise UsageError(
            f"{name} was measured with {held:,} tokens of KV, and {kv:,} are asked: measure a table"
            " with as many",
            param="kv_cache_tokens",
        )
    tokens = config.batching.max_num_batched_tokens or engine.max_batched_tokens
    return SchedulerConfig(
        num_blocks=(engine.num_blocks if kv is None else kv // BLOCK_SIZE + 1)
        * (1 + engine.window_tables),
        window=engine.window,
        window_tables=engine.window_tables,
        snapshots=range(first_snapshot(engine.max_rows), engine.state_slots),
        max_rows=min(config.batching.max_num_seqs or engine.max_rows, tokens),
        max_model_len=config.memory.max_model_len or engine.max_model_len,
        max_batched_tokens=tokens,
        mask_slots=1,
        vocab_size=VOCABULARY,
        eos_token_ids=(END,),
        prefix_caching=config.memory.enable_prefix_caching,
        prefix_groups=engine.grouping and config.schedule.prefix_groups != "off",
        ridge_rows=engine.ridge_rows,
        sharing=(
            SharingCosts()
            if config.schedule.prefix_groups == "always"
            else SharingCosts(**_sharing(engine))
        ),
    )


def _sharing(engine: TimedEngine) -> dict[str, Any]:
    return {**engine.sharing, "tile_members": int(engine.sharing["tile_members"])}
