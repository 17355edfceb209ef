"""gpt-oss in four bits: a checkpoint as it is published against transformers' own widening of the
same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_cache import PagedCache
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.errors import CheckpointError, PenstockError, UsageError
from penstock.kernels.choose import choose
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 13,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
FOUR = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def make_both(folder: Path) -> tuple[Any, Path]:
    """Transformers' model, its experts widened from four bits, and a folder that has them in four
    bits."""
    torch.manual_seed(2)
    model: Any = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SHAPE)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    drawn: dict[str, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            wide = getattr(layer.mlp.experts, name)
            experts, into, out = wide.shape
            blocks = torch.randint(0, 256, (experts, out, into // 32, 16)).to(torch.uint8)
            scales = torch.randint(121, 126, (experts, out, into // 32)).to(torch.uint8)
            wide.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            at = f"model.layers.{number}.mlp.experts.{name}"
            drawn |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    wide = ("experts.gate_up_proj", "experts.down_proj")
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(wide)}
    save_file(kept | drawn, path, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": FOUR}))
    return model, folder


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(
        folder, load_format="auto", dtype=dtype, device=CPU, ops=choose(CPU, dtype, "auto"), seed=0
    )


def test_a_checkpoint_in_four_bits_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    theirs, folder = make_both(tmp_path)
    ours = opened(folder)
    prompt = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = theirs(prompt[None]).logits[0]
    got = PagedCache(ours, 1, 9).step([], [(0, prompt.tolist())])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    wide = sum(
        p.numel() * 4
        for name, p in theirs.named_parameters()
        if "experts" in name and "bias" not in name
    )
    held = sum(w.nbytes for w in ours.weights() if w.dtype == torch.uint8)
    assert wide / 8 < held < wide / 7


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    _, folder = make_both(tmp_path)
    path, name = folder / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)
    with pytest.raises(CheckpointError, match=name):
        opened(folder)


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    _, folder = make_both(tmp_path)
    path, name = folder / "model.safetensors", "model.layers.1.mlp.experts.gate_up_proj_scales"
    tensors = load_file(path)
    tensors[name][2, 3, 1] = 255
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"{name}' holds what is no finite number"):
        opened(folder)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (SHAPE | {"model_type": "gpt_oss", "hidden_size": 72}, "multiples of 32"),
        ({"model_type": "llama", "quantization_config": FOUR}, "read for gpt_oss alone"),
    ],
)
def test_what_is_not_served_is_refused(raw: dict[str, Any], error: str) -> None:
    with pytest.raises(PenstockError, match=error):
        model_config_of(raw, "config.json")


def test_a_checkpoint_in_another_form_is_told_what_to_take(tmp_path: Path) -> None:
    eight = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    raw = SHAPE | {
        "model_type": "gpt_oss",
        "rope_parameters": {"rope_type": "default"},
        "quantization_config": eight,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        PenstockError,
        match=r"in mxfp4 or wide: leave --quantization out, or take such a checkpoint",
    ):
        opened(tmp_path)


def test_experts_are_not_made_of_eight_bits(tmp_path: Path) -> None:
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**SHAPE)).save_pretrained(tmp_path)
    ops = choose(CPU, torch.float32, "auto")
    with pytest.raises(UsageError, match="served as the checkpoint has them"):
        load_model(
            tmp_path,
            load_format="auto",
            dtype=torch.float32,
            device=CPU,
            ops=ops,
            seed=0,
            quantization="fp8",
        )
