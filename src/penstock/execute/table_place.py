"""table_in_host: whether a model's table of per-layer embeddings lies in host memory, beside the
GPU.

A step reads a row of it for each of its tokens and nothing more, so that the bus carries it; all
else is read whole. It knows a model's shapes, Config and memory; it takes none.
"""

from __future__ import annotations

import torch

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.execute.kv_fit import narrowest
from penstock.execute.layer_pages import open_token_bytes, pages_of
from penstock.execute.limits import STEP_SHARE, free_memory, room_of
from penstock.models.decoder import Decoder


def table_in_host(shape: Decoder, config: Config, device: torch.device) -> bool:
    """Decides for a model of torch's meta device, whose table is counted as if it lay on the GPU.
    UsageError where a place is told for a table that there isn't; CapacityError where the host has
    no room for it."""
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
    """Returns what a model takes at least: weights, its table among them, and state of a sequence
    of full length, or of as many tokens as are asked for."""
    forms, longest = narrowest(shape.paged_forms, config.model.kv_cache_dtype), shape.positions
    token = open_token_bytes(forms, pages_of(shape, longest, forms))
    tokens = max(longest, config.memory.kv_cache_tokens or 0)
    return shape.weights_bytes + shape.rope_bytes + tokens * token + shape.slot_bytes


def room_beside_steps(config: Config, device: torch.device) -> int:
    """Returns the bytes of a GPU that a model may take, before any of it is there."""
    return room_of(config, device) - int(
        STEP_SHARE * torch.cuda.get_device_properties(device).total_memory
    )


def told_place(shape: Decoder, asked: str) -> str:
    """Says that the table lies in host memory, and why."""
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
