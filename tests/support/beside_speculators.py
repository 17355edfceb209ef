"""Holds the twin of DFlash drafters (dflash_models.py) against the forward of `speculators` 0.9.0,
in float32 over random weights: a check by hand, since that package brings others. In a virtual
environment that has it:

    PYTHONPATH=src:tests/support python tests/support/beside_speculators.py

prints the largest difference of a score, 6e-6 of scores up to 14."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from dflash_models import FEW, READS, make_dflash_model
from safetensors.torch import load_file
from torch import Tensor

TOKENS = 40
LENGTHS = (3, 8)  # drafts at once


@torch.no_grad()
def difference(folder: Path, kind: str, most: int) -> tuple[float, float]:
    """The largest difference of a score, and the largest score, over blocks at all places."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    twin = make_dflash_model(folder, kind)
    keys = json.loads((folder / "drafter" / "config.json").read_text())
    config = DFlashSpeculatorConfig(**keys | {"block_size": most + 1})
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = DFlashDraftModel(config).float().eval()
    theirs.load_state_dict(load_file(folder / "drafter" / "model.safetensors"), strict=False)
    theirs.embed_tokens.weight.copy_(twin.model.model.embed_tokens.weight)
    if not FEW[kind]:
        theirs.lm_head.weight.copy_(twin.model.lm_head.weight)
    ids = torch.tensor([[(7 * k * k + 3 * k + 11) % 300 for k in range(TOKENS)]])
    states = twin.model.model(ids, output_hidden_states=True).hidden_states
    read, anchors = torch.cat([states[layer] for layer in READS], -1), torch.zeros(1, TOKENS)
    anchors[0, 4 : TOKENS - most - 1] = 1
    whole: tuple[Any, ...] = theirs._backbone_forward(
        read, ids, anchors, states[-1], torch.zeros_like(ids), max_anchors=int(anchors.sum())
    )
    scores: Tensor = whole[1].view(-1, most + 1, whole[1].shape[-1])
    apart = [
        float((twin.scores(read[0, :at], int(ids[0, at]), most) - one).abs().max())
        for at, one in zip(whole[-1].view(-1, most + 1)[:, 0].tolist(), scores, strict=True)
    ]
    return max(apart), float(scores.abs().max())


if __name__ == "__main__":
    for kind in FEW:
        for most in LENGTHS:
            with tempfile.TemporaryDirectory() as made:
                print(kind, most, *difference(Path(made), kind, most))
