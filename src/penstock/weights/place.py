"""Place: which checkpoint tensor goes where in a Decoder's fused weights, and the filling of them.

Everything is checked (names, shapes, dtypes) before memory is taken for the first weight. Beyond the model itself
at most one tensor is in memory: shards are mapped, and each tensor is converted into its place.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.decoder import Decoder, Layer
from penstock.models.model_config import ModelConfig
from penstock.weights.checkpoint import AGAIN, ITEM_BYTES, Entry, read_entries, read_tensors, shown

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
UNREAD_SUFFIX = ".rotary_emb.inv_freq"  # early Llama checkpoints store the rope's frequencies; the config gives them
DUMMY_RANGE = 1e-3


def places(model: Decoder) -> dict[str, Tensor]:
    """Checkpoint name -> the part of a parameter that it fills (a view). Before `model.prepare()`."""
    found = {EMBEDDING: model.embedding.table, NORM: model.norm.weight}
    if not model.config.tie_word_embeddings:
        found[HEAD] = model.head.weight
    for number, layer in enumerate(model.layers):
        for name, place in _layer_places(layer, model.config).items():
            found[f"model.layers.{number}.{name}"] = place
    return found


def _layer_places(layer: Layer, config: ModelConfig) -> dict[str, Tensor]:
    q, kv, middle = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate_size
    attention, mlp = layer.attention, layer.mlp
    found = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
    }
    fused = (
        (attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), [q, kv, kv]),
        (attention.out, ("self_attn.o_proj",), [config.hidden_size]),
        (mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj"), [middle, middle]),
        (mlp.down, ("mlp.down_proj",), [config.hidden_size]),
    )
    for linear, names, sizes in fused:
        found |= {f"{name}.weight": part for name, part in zip(names, torch.split(linear.weight, sizes), strict=True)}
        if linear.bias is not None:
            found |= {f"{name}.bias": part for name, part in zip(names, torch.split(linear.bias, sizes), strict=True)}
    if attention.q_norm is not None and attention.k_norm is not None:
        found |= {"self_attn.q_norm.weight": attention.q_norm, "self_attn.k_norm.weight": attention.k_norm}
    return found


def find_weights(model: Decoder, folder: Path) -> dict[str, Entry]:
    """The tensors of `folder`'s safetensors, by their headers. CheckpointError where their names, shapes or dtypes
    aren't those of `model`, which may be on torch's meta device: nothing is taken before all is known to fit."""
    entries = read_entries(folder)
    _check(entries, places(model), model, folder)
    return entries


@torch.inference_mode()
def load_weights(model: Decoder, entries: dict[str, Entry]) -> None:
    """Fills every weight of `model` from what `find_weights` gave. CheckpointError where a number doesn't fit the
    dtype."""
    wanted = places(model)
    for entry, tensor in read_tensors([entry for name, entry in entries.items() if name in wanted]):
        place = wanted[entry.name]
        place.copy_(tensor)
        if model.dtype == torch.float16 and entry.dtype != "F16" and not place.isfinite().all():
            raise CheckpointError(f"{entry.shard}: tensor {entry.name!r} doesn't fit float16: use bfloat16 or float32")
    if HEAD in entries and HEAD not in wanted:
        _check_tied(entries[HEAD], model)


@torch.inference_mode()
def dummy_weights(model: Decoder, seed: int) -> None:
    """Draws every weight from U(-1e-3, 1e-3): the same for the same seed, config, dtype and kind of device."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)


def _check(entries: dict[str, Entry], wanted: dict[str, Tensor], model: Decoder, folder: Path) -> None:
    config = model.config
    for name, entry in entries.items():
        if name in wanted:
            _check_entry(entry, tuple(wanted[name].shape))
        elif name == HEAD:
            _check_entry(entry, tuple(model.embedding.table.shape))
        elif not name.endswith(UNREAD_SUFFIX):
            raise CheckpointError(
                f"{entry.shard} holds tensor {shown(name)}, which a {config.architecture} with this config.json "
                "doesn't have: config.json and weights must be of one model"
            )
    missing = [name for name in wanted if name not in entries]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the safetensors of {folder} lack tensor {missing[0]!r}{more}, which a {config.architecture} with this "
            f"config.json has: {AGAIN}, or mend config.json"
        )


def _check_entry(entry: Entry, shape: tuple[int, ...]) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{entry.shard}: tensor {entry.name!r} is {entry.dtype}, and only unquantized weights are read "
            f"({', '.join(ITEM_BYTES)}): take the model's unquantized checkpoint"
        )
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.shard}: tensor {entry.name!r} has shape {list(entry.shape)}, config.json asks for {list(shape)}: "
            "config.json and weights must be of one model"
        )


def _check_tied(entry: Entry, model: Decoder) -> None:
    """A tied checkpoint may hold its head a second time, as long as it is the same."""
    for _, head in read_tensors([entry]):
        if not torch.equal(head.to(model.device, model.dtype), model.embedding.table):
            raise CheckpointError(
                f"{entry.shard}: {HEAD} differs from {EMBEDDING}, but config.json says tie_word_embeddings: "
                "set it to false, or remove the tensor"
            )
