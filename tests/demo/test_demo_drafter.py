"""The demo's drafter as it is shipped, and the maker that trained it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_head import DraftHead, loss_of, save_drafter
from measure import prompts_of
from small_llama import load
from tokenizers import Tokenizer
from toy_proposer import Counts

from penstock import LLM, SamplingParams
from penstock.demo import drafter_folder, model_folder
from penstock.models.read_config import read_model_config
from penstock.models.speculators_format import read_speculator

pytestmark = pytest.mark.torch

DRAFTS = {"speculative_config": {"method": "eagle3", "model": "demo", "num_speculative_tokens": 4}}


def test_most_drafts_are_right_and_no_token_changes() -> None:
    """At temperature 0.6, on held-out problems behind four examples: three of four drafts."""
    prompts, _ = prompts_of(8, 4, seed=1)
    ask = SamplingParams(temperature=0.6, max_tokens=96, stop=["Question:"], seed=5)
    found, drafter = list[Any](), Counts()
    for more in ({}, DRAFTS):
        with LLM("demo", seed=3, dtype="float32", steps_ahead=0, **more) as llm:
            if more:
                llm._engine.scheduler.drafting.drafter = drafter
            outs = llm.generate(prompts, ask, use_tqdm=False)
            found.append([out.outputs[0].text for out in outs])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats["spec_accepted_tokens"] > 2.5 * stats["spec_drafts"] > 100


def test_the_maker_sees_the_same_drafts_in_the_shipped_weights(tmp_path: Path) -> None:
    """By the plain model, on text: shares of right drafts one to three tokens ahead. An untrained
    drafter is read, and has none."""
    from safetensors.torch import load_file

    model = load(model_folder(), "cpu", torch.float32)
    head = DraftHead(model)
    prompts, _ = prompts_of(2, 4, seed=2)
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(text).ids[:160] for text in prompts])
    with torch.no_grad():
        assert (loss_of(head, model, ids, 3)[1] < 0.3).all()
        save_drafter(head, tmp_path)
        shipped = load_file(drafter_folder() / "model.safetensors")
        made = load_file(tmp_path / "model.safetensors")
        assert {name: w.shape for name, w in made.items()} == {
            name: w.shape for name, w in shipped.items()
        }
        head.load_state_dict(shipped)
        assert (loss_of(head, model, ids, 3)[1] > 0.8).all()
    config = read_model_config(model_folder())
    written, read = (
        read_speculator(folder, "eagle3", config) for folder in (tmp_path, drafter_folder())
    )
    assert written.reads == read.reads == (1, 4, 7)
    keys = [
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, drafter_folder())
    ]
    assert keys[0] == keys[1]
