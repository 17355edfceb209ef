"""A model of one layer whose matrices lie in a checkpoint in one of the forms of
quantized_forms.py, and its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from quantized_forms import FORMS
from safetensors.torch import save_file
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.models.decoder import Decoder
from penstock.parallel.layout import ALONE, Layout
from penstock.weights.load import load_model

CPU = torch.device("cpu")
HIDDEN, MIDDLE, KV = 128, 192, 64
CONFIG = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MIDDLE, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}


def wide_tensors() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(99)
    ones = {
        f"model.layers.0.{name}.weight": torch.ones(HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    return {
        "model.embed_tokens.weight": torch.randn(40, HIDDEN, generator=rng),
        "model.norm.weight": torch.ones(HIDDEN),
        **ones,
    }


def write(folder: Path, name: str) -> dict[str, Tensor]:
    """Writes a quantized checkpoint -> what each of its matrices is worth."""
    config, make = FORMS[name]
    tensors, worth = wide_tensors(), {}
    for seed, (at, (out, into)) in enumerate(SHAPES.items()):
        stored, worth[at] = make(out, into, seed)
        tensors |= {f"model.layers.0.{at}.{suffix}": tensor for suffix, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    return worth


def load(
    folder: Path, dtype: torch.dtype = torch.float32, layout: Layout = ALONE, **more: Any
) -> Decoder:
    return load_model(
        folder,
        load_format=more.pop("load_format", "auto"),
        dtype=dtype,
        device=CPU,
        ops=choose(CPU, dtype),
        seed=0,
        layout=layout,
        **more,
    )


def linears(model: Decoder) -> dict[str, Any]:
    block: Any = model.blocks[0]
    return {
        "qkv": block.mixer.qkv,
        "o": block.mixer.out,
        "gate_up": block.mlp.gate_up,
        "down": block.mlp.down,
    }


FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def fused(worth: dict[str, Tensor], name: str) -> Tensor:
    return torch.cat(
        [next(w for at, w in worth.items() if at.endswith(f".{part}_proj")) for part in FUSED[name]]
    )


def times(linear: Any, x: Tensor) -> Tensor:
    product = linear.product
    found: Tensor = product.multiply(x, product.matrix, None)
    return found


def rows(into: int) -> Tensor:
    return torch.randn(5, into, generator=torch.Generator().manual_seed(7))
