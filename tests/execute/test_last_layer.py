"""The last layer of a step answers for rows alone: of prompts beside them it makes K and V."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.demo import model_folder

pytestmark = pytest.mark.torch

KNOBS = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
    "max_model_len": 256,
}


def forwards(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> list[tuple[int, int, int]]:
    """Runs prompts that come into steps of others -> of each step with both: its rows, its tokens,
    and the states that came back. Where they are the rows' alone, they and all K and V are held
    against a forward of everything."""
    found = list[tuple[int, int, int]]()
    with LLM(str(model_folder()), **KNOBS) as llm:
        model: Any = llm.engine.runner._state.model  # type: ignore[attr-defined]
        whole = model.forward

        def held(
            ids: Tensor, step: Any, kv: list[Any], of_rows: bool = False, embeds: Any = None
        ) -> Tensor:
            states = whole(ids, step, kv, of_rows=of_rows, embeds=embeds)
            if step.rows and step.prefill is not None:
                found.append((step.rows, len(ids), len(states)))
            if of_rows:
                stored = [layer.storage.clone() for (layer,) in kv]
                step.plans.clear()
                everything = whole(ids, step, kv, embeds=embeds)[: step.rows]
                torch.testing.assert_close(states, everything, rtol=1e-4, atol=1e-4)
                for before, (layer,) in zip(stored, kv, strict=True):
                    torch.testing.assert_close(before, layer.storage, rtol=0, atol=0)
            return states

        monkeypatch.setattr(model, "forward", held)
        llm.generate(
            ["Tom has " * times for times in (3, 20, 9, 30, 14, 25)], params, use_tqdm=False
        )
    return found


def test_states_of_rows_alone_are_those_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    found = forwards(monkeypatch, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert len(found) > 2
    assert all(states == rows < tokens for rows, tokens, states in found)


def test_prompts_that_are_scored_have_states_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
    found = forwards(monkeypatch, scored)
    assert any(states == tokens > rows for rows, tokens, states in found)
