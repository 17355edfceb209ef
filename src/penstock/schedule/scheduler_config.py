"""SchedulerConfig: the sizes and limits of a scheduler. The room `execute` determines them from the
device."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.schedule.prefix_groups import SharingCosts


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes of the device's pools, and the model's end ids."""

    # pages of the KV pool, the scratch block included: a block takes 1 + window_tables pages
    num_blocks: int
    window: int = 0  # tokens seen by layers with windows; 0: no such layers
    window_tables: int = (
        0  # pages per block for layers with windows; 0: its one page holds all layers
    )
    # slots of recurrent state beyond the rows' own (state_slots.py); empty: no recurrent state
    snapshots: range = range(0)
    max_rows: int
    max_model_len: int  # tokens of prompt and output
    max_batched_tokens: int  # tokens per step; at least max_rows
    mask_slots: int = 1024  # token masks on the device
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    prefix_groups: bool = True
    # costs that decide when a prefix group pays
    sharing: SharingCosts = field(default_factory=SharingCosts)
    preempt_every: int = 0
    seed: int = 0
