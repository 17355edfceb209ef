"""SchedulerConfig: the numbers that bound a scheduler. `execute` measures them, the engine hands
them over."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.schedule.prefix_groups import SharingCosts


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    """What the device holds and the model ends with."""

    # pages of the KV pool, the scratch block included: a block takes 1 + window_tables of them
    num_blocks: int
    window: int = 0  # tokens that layers with a page of their own see
    window_tables: int = (
        0  # pages that a block has for layers with windows; 0: its one page holds all layers
    )
    # slots of recurrent state that are no row's (state_slots.py); none: layers have none
    snapshots: range = range(0)
    max_rows: int
    max_model_len: int  # tokens, prompt and output
    max_batched_tokens: int  # of a step; at least max_rows
    mask_slots: int = 1024  # token masks that the device holds
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    prefix_groups: bool = True
    sharing: SharingCosts = field(default_factory=SharingCosts)  # when a prefix group pays
    preempt_every: int = 0
    seed: int = 0
