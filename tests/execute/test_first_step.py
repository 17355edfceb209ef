"""A runner's first step: nothing is ready that has not stored a prompt and drawn a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from corpus import make_model
from execute_drive import tiny_runner
from safetensors.torch import load_file, save_file

from penstock.config import Config
from penstock.errors import CheckpointError, EngineError, PenstockError
from penstock.execute.first_step import StartClock, take_first_step
from penstock.execute.open_runner import end_start, open_runner
from penstock.execute.runner import TorchRunner
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, Flight, StepPlan, StepTokens

pytestmark = pytest.mark.torch


def test_a_prompt_is_stored_and_a_token_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers below an engine's own; the row that draws has ended with it."""
    runner, plans = tiny_runner(), list[StepPlan]()
    launch = runner.launch

    def noted(plan: StepPlan) -> Flight:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", noted)
    take_first_step(runner)
    prompt, drawn = plans
    assert (prompt.number, drawn.number) == (-2, -1)
    assert prompt.chunks is not None and prompt.chunks.tokens.size > 0
    assert drawn.joins is not None and drawn.rows.tolist() == [0]
    drawn.joins, drawn.number = None, 0
    assert launch(drawn).fetch().tokens.tolist() == [NO_TOKEN]
    runner.close()


@pytest.mark.parametrize(
    ("token", "kind"), [(NO_TOKEN, EngineError), (BAD_LOGITS, CheckpointError)]
)
def test_a_step_that_draws_no_token_is_no_start(
    token: int, kind: type[PenstockError], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_runner()
    launch = runner.launch

    class Drew:
        def __init__(self, flight: Flight) -> None:
            self.ready, self._flight = flight.ready, flight

        def fetch(self) -> StepTokens:
            found = self._flight.fetch()
            found.tokens[:] = token
            return found

    monkeypatch.setattr(runner, "launch", lambda plan: Drew(launch(plan)))
    with pytest.raises(kind):
        end_start(runner, StartClock())
    with pytest.raises(EngineError):
        launch(StepPlan.__new__(StepPlan))  # it is closed


def test_weights_that_give_nothing_finite_are_told_at_the_start(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name][:] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        open_runner(
            Config.of(device="cpu", max_num_seqs=2, kv_cache_tokens=256, max_model_len=64), tmp_path
        )


def test_a_start_tells_its_phases(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    runner: TorchRunner = open_runner(
        Config.of(device="cpu", max_num_seqs=2, kv_cache_tokens=256, max_model_len=64), tmp_path
    )
    phases = runner.describe()["start_seconds"]
    assert (
        list(phases) == ["weights", "kernels", "KV and graphs", "first step"]
        and min(phases.values()) >= 0
    )
    runner.close()
