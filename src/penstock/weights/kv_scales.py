"""KV cache settings of a checkpoint: its dtype and scales.

  config.json   quantization_config.kv_cache_scheme: {num_bits: 8, type: float, ...},
                compressed-tensors' form
  safetensors   NAME.k_scale, NAME.v_scale beside an attention's matrices, or (ModelOpt)
                NAME.k_proj.k_scale, NAME.v_proj.v_scale: [1] or [kv_heads], stored = x / scale

Knows a folder and the names of attention layers. The code that opens the model decides whether the
cache has eight bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.json_keys import shown
from penstock.kernels.layer_kv import LEAST_KV_SCALE
from penstock.models.model_config import ModelConfig
from penstock.parallel.layout import ALONE, Layout
from penstock.parallel.sharded_weight import FLOATS
from penstock.quant.stored_quantization import StoredQuantization
from penstock.weights.checkpoint import Entry, of_text, read_entries, read_tensors, renamed

SUFFIXES, OF_PRODUCTS = (".k_scale", ".v_scale"), (".k_proj.k_scale", ".v_proj.v_scale")


def asks_for_eight_bits(stored: StoredQuantization | None) -> bool:
    """Returns True if the checkpoint has a `kv_cache_scheme`. Raises CheckpointError unless it is
    e4m3 with static scales."""
    if stored is None or (scheme := stored.kv) is None:
        return False
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    if isinstance(scheme, dict) and all(
        scheme.get(key, value) == value for key, value in wanted.items()
    ):
        return True
    raise CheckpointError(
        f"config.json: kv_cache_scheme {shown(scheme)} is not served, only such of 8 bits of type"
        " float, symmetric and not dynamic: set it to null to have KV in the model's numbers"
    )


def read_kv_scales(
    folder: Path,
    names: list[str],
    kv_heads: list[int],
    layout: Layout = ALONE,
    config: ModelConfig | None = None,
) -> list[Tensor | None]:
    """Returns the scales of K and V of each attention layer, [2, kv_heads] float32, or None for a
    layer without scales.

    names: the attention layers' names in the model. kv_heads: number of KV heads of each layer on
    this rank. config: maps the checkpoint's names to the model's; None: they are the same. Raises
    CheckpointError for scales that are not positive numbers, or of another number of heads."""
    entries = read_entries(folder)
    if config is not None:
        entries = renamed(of_text(entries, config.text_part), config.renames)
    wanted = {
        f"{name}{suffix}" for name in names for suffix in (*SUFFIXES, *OF_PRODUCTS)
    } & entries.keys()
    held = {
        entry.name: _checked(entry, tensor)
        for entry, tensor in read_tensors([entries[name] for name in wanted])
    }
    return [
        _of_attention(name, heads, held, layout)
        for name, heads in zip(names, kv_heads, strict=True)
    ]


def _of_attention(
    name: str, kv_heads: int, held: dict[str, Tensor], layout: Layout
) -> Tensor | None:
    for suffixes in (SUFFIXES, OF_PRODUCTS):
        parts = [f"{name}{suffix}" for suffix in suffixes]
        if held.keys() >= set(parts):
            return torch.stack([_own(part, held[part], kv_heads, layout) for part in parts])
    return None


def _checked(entry: Entry, tensor: Tensor) -> Tensor:
    scale = tensor.float().flatten()
    if entry.dtype not in FLOATS or not (scale.isfinite() & (scale >= LEAST_KV_SCALE)).all():
        raise CheckpointError(
            f"{entry.shard}: tensor {entry.name!r} must hold positive numbers, the scales of a KV"
            " cache: download it again, or have them measured on a copy of the folder without it"
        )
    return scale


def _own(name: str, scale: Tensor, kv_heads: int, layout: Layout) -> Tensor:
    """Returns the scales of this rank's KV heads, [kv_heads]. scale: [1], or [KV heads of all
    ranks]."""
    if scale.numel() == 1:
        return scale.expand(kv_heads)
    shares, share = layout.share(scale.numel(), name, repeats=True)
    if scale.numel() != shares * kv_heads:
        raise CheckpointError(
            f"tensor {name!r} has {scale.numel()} scales, and the model {shares * kv_heads} KV"
            " heads: config.json and weights must be of one model"
        )
    return scale.view(shares, kv_heads)[share]
