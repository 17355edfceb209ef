"""Recommends numbers of ranks and replicas. It takes the fewest tensor parallel ranks that hold
weights and KV cache, and then as many replicas as fit on the remaining GPUs. Knows a model's shapes
and bytes; no running engine.

Ranks spend time on all-reduces and replicas do not, so a model is divided over ranks only if it
does not fit on fewer GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.errors import UsageError
from penstock.status_line import size_of

if TYPE_CHECKING:
    import torch

    from penstock.models.model_config import ModelConfig


def bytes_a_rank(
    config: Config, model_config: ModelConfig, dtype: torch.dtype, rooms: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Returns, for each number of ranks that divides the model, the bytes of a rank's weights and
    of the state of one sequence of full length. rooms: as in `recommend`. A table of per-layer
    embeddings counts if it is to lie on the GPU.
    """
    import torch

    from penstock.execute.kv_dtype import fit_states, narrowest
    from penstock.execute.layer_pages import open_token_bytes, pages_of
    from penstock.execute.limits import BatchLimits
    from penstock.models.build_model import build_model
    from penstock.parallel.layout import Layout
    from penstock.quant.choose import choose_schemes
    from penstock.weights.drafter import drafter_of

    schemes = choose_schemes(config.model.quantization, model_config.quantization)
    length = config.memory.max_model_len or model_config.context
    drafter = drafter_of(config, model_config)
    found, asked, room = {}, config.memory.per_layer_embeddings, _room(rooms)
    for ranks in range(1, len(rooms) + 1):
        try:
            share = build_model(
                model_config,
                dtype,
                torch.device("meta"),
                length,
                Layout(0, ranks),
                schemes,
                drafter=drafter,
            )
        except UsageError as error:
            if error.param == "speculative_config":
                raise
            continue  # heads, groups or sizes cannot be divided by this number
        drafts = BatchLimits(1, 1, 1, speculative=config.speculative).state_drafts
        fit_states(share, config.model.mamba_ssm_cache_dtype, drafts)
        forms = narrowest(share, config.model.kv_cache_dtype)
        token = open_token_bytes(forms, pages_of(share, length, forms))
        weights = share.weights_bytes + share.copied_bytes(None) + share.rope_bytes
        state = token * length + share.slot_bytes
        beside = asked == "host" or (asked == "auto" and weights + state > room)
        found[ranks] = weights - beside * share.table_bytes, state
    return found


def recommend(needs: Mapping[int, tuple[int, int]], rooms: Sequence[int], length: int) -> str:
    """Returns the recommended options and the reason. needs: from `bytes_a_rank`. rooms: usable
    bytes of each GPU. length: tokens of a sequence of full length."""
    room = _room(rooms)
    fits = [
        ranks
        for ranks, (weights, kv) in needs.items()
        if ranks <= len(rooms) and weights + kv <= room
    ]
    least = max(ranks for ranks in needs if ranks <= len(rooms))
    weights, kv = needs[least]
    if not fits:
        return (
            f"none: {least} ranks take {size_of(weights)} of weights and {size_of(kv)} for a"
            f" sequence of {length:,} tokens each, and {size_of(room)} are there: fewer bits"
            " (--quantization fp8), a shorter --max-model-len, or more GPUs"
        )
    ranks = fits[0]
    (weights, kv), (replicas, left) = needs[ranks], divmod(len(rooms), ranks)
    told = [
        f"{size_of(weights)} of weights leave room for {(room - weights) * length // kv:,} tokens"
        " of KV on each"
    ]
    if smaller := [each for each in needs if each < ranks]:
        size = size_of(needs[smaller[-1]][0])
        told.append(f"{smaller[-1]} would not hold {size} and a sequence of {length:,} tokens")
    if left:
        told.append(f"{left} of {len(rooms)} GPUs are left over")
    return f"--tensor-parallel-size {ranks} --data-parallel-size {replicas}: {'; '.join(told)}"


def _room(rooms: Sequence[int]) -> int:
    """Returns the bytes of the smallest GPU, without those that steps take."""
    from penstock.execute.limits import STEP_SHARE

    return int(min(rooms) * (1 - STEP_SHARE))
