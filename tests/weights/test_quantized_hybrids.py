"""Hybrids and latent attention as they are published in float8: blocks of 128 x 128 or a scale a
row, and a list of what stayed wide. They say what the same model says whose matrices are what those
numbers are worth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, heads, make_folder
from paged_cache import PagedCache
from quantized_forms import HF_FP8, Stored, compressed, floats, fp8_blocks, fp8_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
WIDE = (
    "in_proj_a",
    "in_proj_b",
    "gate",
    "shared_expert_gate",
    "lm_head",
    "embed_tokens",
    "embeddings",
)
LISTED = [
    f"model.layers.{layer}.linear_attn.{name}"
    for layer in range(3)
    for name in ("in_proj_a", "in_proj_b", "conv1d")
]
LISTED += [
    f"model.layers.{layer}.mlp.{name}"
    for layer in range(3)
    for name in ("gate", "shared_expert_gate")
]
QWEN = HF_FP8 | {"modules_to_not_convert": ["lm_head", "model.embed_tokens", *LISTED]}
ROWS = compressed(floats("channel"), "float-quantized") | {
    "ignore": ["lm_head", "re:.*mixer.gate$", "re:.*conv1d"]
}

LATENT = (
    "DeepseekV3",
    heads(4, 4, 64)
    | {"kv_lora_rank": 96, "q_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48}
    | {
        "v_head_dim": 40,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
    }
    | {
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_mtp_layers": 0,
    },
)


def blocks(out: int, into: int, seed: int) -> Stored:
    return fp8_blocks(out, into, seed, "weight_scale_inv")


def rows(out: int, into: int, seed: int) -> Stored:
    stored, whole = fp8_rows(out, into, seed, "channel")
    return {n: stored[n] for n in ("weight", "weight_scale")}, whole


def quantized(folder: Path, out: Path, form: Any, config: dict[str, Any]) -> Path:
    """Writes both: in `out` the quantized checkpoint,
    in `folder` the wide one of the same worth."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    eight, wide = dict(tensors), dict(tensors)
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        at = name.removesuffix(".weight")
        if tensor.dim() != 2 or at.rpartition(".")[2] in WIDE:
            continue
        stored, worth = form(*tensor.shape, seed)
        # so that it is about as large as it was
        size = 2.0 ** (tensor.std() / worth.std()).log2().round()
        (scale,) = stored.keys() - {"weight"}
        del eight[name]
        eight |= {f"{at}.weight": stored["weight"], f"{at}.{scale}": stored[scale] * size}
        wide[name] = worth * size
    for where, what in ((folder, wide), (out, eight)):
        save_file(what, where / "model.safetensors", metadata={"format": "pt"})
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return out


def logits(folder: Path) -> Tensor:
    ops = choose(CPU, torch.float32)
    model = load_model(folder, load_format="auto", dtype=torch.float32, device=CPU, ops=ops, seed=0)
    return PagedCache(model, 1, 9).step([], [(0, list(range(40, 110)))])


@pytest.mark.parametrize(
    ("name", "form", "config"),
    [
        ("qwen3_5 4/2 of 64, a quarter turns, 2/4 delta heads of 64", blocks, QWEN),
        ("qwen3_5_moe 4/2 of 64", blocks, QWEN),
        ("nemotron_h 4/2 of 64", rows, ROWS),
        ("falcon_h1 4/2 of 32", rows, ROWS),
        ("latent", blocks, HF_FP8),
    ],
)
def test_a_hybrid_in_float8_says_what_its_numbers_are_worth(
    name: str, form: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    wide = make_folder(LATENT if name == "latent" else CASES[name], tmp_path / "wide")
    before = logits(wide)
    found, right = logits(quantized(wide, tmp_path / "eight", form, config)), logits(wide)
    torch.testing.assert_close(found, right, rtol=0, atol=2e-4 * float(right.abs().max()))
    assert (right - before).abs().max() > 0.1 * before.abs().max(), "nothing was quantized"
