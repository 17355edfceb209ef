"""table_in_host: places a model's per-layer embedding table. The table is kept on the GPU or in
host memory.

Of this table a step reads only one row per token, so it can be read over the bus; all other weights
are read whole. Knows a model's shapes, Config and memory; allocates nothing.
"""

from __future__ import annotations

import torch

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.execute.kv_dtype import narrowest
from penstock.execute.layer_pages import open_token_bytes, pages_of
from penstock.execute.limits import STEP_SHARE, free_memory, room_of
from penstock.models.decoder import Decoder


def table_in_host(shape: Decoder, config: Config, device: torch.device) -> bool:
    """Returns True if the table is to be kept in host memory. shape: the model on torch's meta
    device, with the table counted as if it were on the GPU. Raises UsageError if
    per_layer_embeddings is set and the model has no table, CapacityError if the host has no room.
    """
    asked, table = config.memory.per_layer_embeddings, shape.table_bytes
    if not table and asked != "auto":
        raise UsageError(
            f"per_layer_embeddings {asked} is for models whose layers have embeddings of their own"
            f" (Gemma 4 E2B, E4B), and this {shape.config.architecture} has none: leave it auto",
            param="per_layer_embeddings",
        )
    if not table or device.type != "cuda" or asked == "gpu":
        return False
    if asked == "auto" and least_bytes(shape, config) <= room_beside_steps(config, device):
        return False
    free, taken = free_memory(torch.device("cpu")), table * shape.ranks
    if taken > free:
        each = f", {shape.ranks} ranks one each" if shape.ranks > 1 else ""
        raise CapacityError(
            f"the table of per-layer embeddings takes {taken / 2**30:.2f} GiB of host memory{each},"
            f" and {free / 2**30:.2f} GiB is free: free some, or keep it on the GPU by"
            " per_layer_embeddings gpu",
            param="per_layer_embeddings",
        )
    return True


def least_bytes(shape: Decoder, config: Config) -> int:
    """Returns the least bytes of a model: weights, including the table, and the state of one
    sequence of full length, or of kv_cache_tokens if more."""
    forms, longest = narrowest(shape, config.model.kv_cache_dtype), shape.positions
    token = open_token_bytes(forms, pages_of(shape, longest, forms))
    tokens = max(longest, config.memory.kv_cache_tokens or 0)
    return shape.weights_bytes + shape.rope_bytes + tokens * token + shape.slot_bytes


def room_beside_steps(config: Config, device: torch.device) -> int:
    """Returns the bytes of a GPU available to a model, before any of it is loaded."""
    return room_of(config, device) - int(
        STEP_SHARE * torch.cuda.get_device_properties(device).total_memory
    )


def told_place(shape: Decoder, asked: str) -> str:
    """Returns a message that the table is in host memory, and why."""
    why = (
        "as asked"
        if asked == "host"
        else "since it doesn't fit the GPU beside weights and a sequence of full length"
    )
    size = f"{shape.table_bytes / 2**30:.2f} GiB"
    return (
        f"the table of per-layer embeddings ({size}) lies in host memory, {why}: steps read its"
        " rows over the bus"
    )
