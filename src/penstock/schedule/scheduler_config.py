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
    window: int = 0  # sliding window in tokens; 0: no layer has one
    window_tables: int = (
        # pages per block for layers with sliding windows, beside the first; 0: one page holds all
        # layers
        0
    )
    # numbers of the recurrent state slots for snapshots (state_slots.py); empty: no recurrent state
    snapshots: range = range(0)
    max_rows: int
    max_model_len: int  # most tokens of a sample, prompt and output together
    max_batched_tokens: int  # most tokens per step; at least max_rows
    max_queries: int = 0  # most queries per step, rows and drafts; 0: max_rows
    mask_slots: int = 1024  # number of token masks that the device holds
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    prefix_groups: bool = True
    # costs that decide when a prefix group saves time
    sharing: SharingCosts = field(default_factory=SharingCosts)
    # rows of a step that take as long to compute as its weights take to read; 0: unknown
    ridge_rows: int = 0
    preempt_every: int = 0
    seed: int = 0
