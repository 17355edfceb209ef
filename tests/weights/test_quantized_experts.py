"""Experts in integers, each format written by hand: a layer loaded through config.json computes
what its dequantised form does in float32, whole and over ranks; the router is wide; made at load
they are those of any matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_forms import E2M1, FORMS
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.choose import choose
from penstock.layers.moe import Moe
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.fp4 import to_nvfp4
from penstock.quant.integers import to_int
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K = 64, 128, 3, 2
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
ATTENTION = {f"self_attn.{name}_proj": (64, 64) for name in "qkvo"}
NORMS = {
    "input_layernorm": 64,
    "post_attention_layernorm": 64,
    "self_attn.q_norm": 32,
    "self_attn.k_norm": 32,
}
STORED = [
    "awq 32",
    "gptq 32",
    "gptq 64 sym",
    "packed 4",
    "packed 4 zeros",
    "packed 8",
    "int8",
    "nvfp4",
    "mxfp4",
    "modelopt",
]


def expert_shapes() -> dict[str, tuple[int, int]]:
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    return {
        f"mlp.experts.{n}.{name}": shape for n in range(EXPERTS) for name, shape in shapes.items()
    }


def write(folder: Path, name: str | None) -> dict[str, Tensor]:
    """Writes a checkpoint in a form of FORMS; None: wide -> what its matrices are worth."""
    config, make = FORMS[name] if name else (None, None)
    if config is not None and config["quant_method"] == "modelopt":
        config = config | {"ignore": ["lm_head", "*mlp.gate"]}
    elif config is not None and "ignore" in config:
        config = config | {"ignore": ["lm_head", "re:.*gate$"]}
    if config is not None and config["quant_method"] in ("awq", "fp8"):
        config = config | {"modules_to_not_convert": ["gate"]}
    draw = torch.Generator().manual_seed(5)
    tensors = {
        "model.embed_tokens.weight": torch.randn(40, HIDDEN, generator=draw),
        "model.norm.weight": torch.ones(64),
    }
    tensors |= {f"model.layers.0.{norm}.weight": torch.ones(size) for norm, size in NORMS.items()}
    worth = {"mlp.gate": torch.randn(EXPERTS, HIDDEN, generator=draw)}
    tensors["model.layers.0.mlp.gate.weight"] = worth["mlp.gate"]
    for seed, (at, (out, into)) in enumerate((ATTENTION | expert_shapes()).items()):
        if make is None:
            worth[at] = torch.randn(out, into, generator=draw) * 0.1
            stored = {"weight": worth[at]}
        else:
            stored, worth[at] = make(out, into, seed)
        tensors |= {f"model.layers.0.{at}.{suffix}": tensor for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(CONFIG | ({} if config is None else {"quantization_config": config}))
    )
    return worth


def moe_of(folder: Path, layout: Layout = ALONE, quantization: str = "auto") -> Moe:
    model = load_model(
        folder,
        load_format="auto",
        dtype=torch.float32,
        device=CPU,
        ops=choose(CPU, torch.float32),
        seed=0,
        layout=layout,
        quantization=quantization,
    )
    mlp = model.blocks[0].mlp
    assert isinstance(mlp, Moe)
    return mlp


def dequantised(x: Tensor, worth: dict[str, Tensor]) -> Tensor:
    """The layer in float64, a token at a time."""
    worth = {at: matrix.double() for at, matrix in worth.items()}
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        best = torch.softmax(worth["mlp.gate"] @ row, 0).topk(TOP_K)
        for weight, expert in zip(
            best.values / best.values.sum(), best.indices.tolist(), strict=True
        ):
            at = f"mlp.experts.{expert}"
            gate, up = worth[f"{at}.gate_proj"] @ row, worth[f"{at}.up_proj"] @ row
            out[token] += weight * (
                worth[f"{at}.down_proj"] @ (torch.nn.functional.silu(gate) * up)
            )
    return out


def rows() -> Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(7))


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", STORED)
def test_a_layer_computes_what_its_dequantised_form_does(tmp_path: Path, name: str) -> None:
    worth, x = write(tmp_path, name), rows()
    ops = choose(CPU, torch.float32)
    close(moe_of(tmp_path)(ops, x), dequantised(x, worth))
    shares = [moe_of(tmp_path, Layout(rank, 2)) for rank in range(2)]
    scores = x @ worth["mlp.gate"].T
    close(sum(ops.experts(x, scores, share.prepared) for share in shares), dequantised(x, worth))


@pytest.mark.parametrize("made, bits", [("int8", 8), ("int4", 4)])
def test_integers_are_made_at_load_and_the_router_stays(
    tmp_path: Path, made: str, bits: int
) -> None:
    worth, x = write(tmp_path, None), rows()
    for at, (_, into) in expert_shapes().items():
        group = into if bits == 8 else 32  # of rows of fewer than 768 inputs
        numbers, scale = to_int(worth[at], bits, group, torch.float32)
        worth[at] = numbers.float() * scale.repeat_interleave(group, 1)
    close(moe_of(tmp_path, quantization=made)(choose(CPU, torch.float32), x), dequantised(x, worth))


def test_nvfp4_is_made_at_load_and_the_router_stays(tmp_path: Path) -> None:
    worth, x = write(tmp_path, None), rows()
    for at in expert_shapes():
        numbers, scale, whole = to_nvfp4(worth[at])
        worth[at] = torch.tensor(E2M1)[numbers.long()] * (scale.float() / whole).repeat_interleave(
            16, 1
        )
    ops = choose(CPU, torch.float32)
    close(moe_of(tmp_path, quantization="nvfp4")(ops, x), dequantised(x, worth))
    shares = [moe_of(tmp_path, Layout(rank, 2), "nvfp4") for rank in range(2)]
    scores = x @ worth["mlp.gate"].T
    close(sum(ops.experts(x, scores, share.prepared) for share in shares), dequantised(x, worth))


@pytest.mark.parametrize("form", ["hf fp8", "fp8 block"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "lack tensor '{}'"),
        ("doubled", "holds tensor '{}_again'"),
        ("of another shape", r"tensor '{}' has shape \[1, 2\], config.json asks for \[1, 1\]"),
        ("no number", "tensor '{}' holds what is no finite number"),
        ("in integers", "tensor '{}' is I32"),
    ],
)
def test_what_is_wrong_with_an_expert_s_block_scales_is_one_line(
    tmp_path: Path, form: str, change: str, said: str
) -> None:
    write(tmp_path, form)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.experts.1.up_proj.weight_scale{'_inv' if form == 'hf fp8' else ''}"
    scale = tensors.pop(name)
    assert scale.shape == (1, 1)
    changed = {
        "missing": {},
        "doubled": {name: scale, f"{name}_again": scale.clone()},
        "of another shape": {name: scale.expand(1, 2).contiguous()},
        "no number": {name: torch.full_like(scale, float("nan"))},
        "in integers": {name: scale.to(torch.int32)},
    }
    save_file(tensors | changed[change], path)
    with pytest.raises(CheckpointError, match=said.format(name)) as caught:
        moe_of(tmp_path)
    assert "\n" not in str(caught.value)
