"""KvCache: the pool of blocks. K and V of every layer, and the tokens that lie at each slot, in one geometry.

It knows blocks, layers and which blocks a plan hands out; no rows. `slot_token` is what penalties are counted from.

Numbers that are not finite must stay with the row that made them, and plain torch's attention masks by adding -inf
and multiplying by 0, which a NaN survives. So what is masked has to be finite: the scratch block, which pads tables,
is never written (rows that run too far write to a block behind the scheduler's, the dump), and once a row's logits
were not finite every plan says that the blocks which it hands out are to be cleared. The host sees such a row before
it can hand its blocks on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.layer_kv import KvForm
from penstock.schedule.step import Int32, Int64, StepPlan

_BYTES = {
    torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.int32: np.uint32,
    torch.uint8: np.uint8,
}  # fmt: skip
TOKEN_BYTES = 4  # of a token's id


class KvCache:
    """K and V of each layer; slot_token `[blocks, 16]` int32. All zeros. The last block is the dump."""

    def __init__(
        self, forms: list[KvForm], blocks: int, device: torch.device, places: tuple[int, ...] | None = None
    ) -> None:
        """places: number of each layer's storage, where layers share them; None: each has its own."""
        places = tuple(range(len(forms))) if places is None else places
        held = dict(zip(places, forms, strict=True))
        self._storage = [
            zeros((blocks, held[place].kv_heads, held[place].head_bytes), torch.uint8, device) for place in sorted(held)
        ]
        self.layers = [form.over(self._storage[place]) for form, place in zip(forms, places, strict=True)]
        self.slot_token = zeros((blocks, BLOCK_SIZE), torch.int32, device)
        self.dump_block = blocks - 1

    def clear(self, blocks: Tensor) -> None:
        """blocks [m] int64."""
        for storage in self._storage:
            storage.view(torch.int64).index_fill_(0, blocks, 0)  # by bytes: 1.4 ms a call, H200

    def handed_out(self, plan: StepPlan) -> Int64:
        """Blocks that this plan gives to prompts and rows and that hold nothing of theirs yet."""
        fresh = [plan.new_blocks[:, 2]]
        if plan.joins is not None:
            fresh.append(_past(plan.joins.blocks, plan.joins.records["length"]))
        if plan.chunks is not None:
            fresh.append(_past(plan.chunks.blocks, plan.chunks.context))
        return np.concatenate(fresh).astype(np.int64)

    def store_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """slots [T] int64, tokens [T] int64, as they are stored beside their K and V."""
        self.slot_token.view(-1).index_copy_(0, slots, tokens.to(torch.int32))

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.by_block)

    @property
    def by_block(self) -> list[Tensor]:
        """Everything that a block holds, each tensor's first dimension the block."""
        return [*self._storage, self.slot_token]


def token_bytes(forms: list[KvForm]) -> int:
    """Returns what a token takes of the cache."""
    return sum(form.block_bytes for form in forms) // BLOCK_SIZE + TOKEN_BYTES


def kv_words(forms: list[KvForm]) -> str:
    """Says what K and V are stored as."""
    values = _name(forms[0].values)
    wide = {number: form.keys for number, form in enumerate(forms) if form.keys != form.values}
    if not wide:
        return values
    whose = "all layers" if len(wide) == len(forms) else f"layers {', '.join(map(str, wide))}"
    return f"{values}, keys of {whose} in {_name(next(iter(wide.values())))}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _past(tables: Int32, stored: Int32) -> Int32:
    """Entries of tables [k, width] past the blocks that hold `stored` tokens [k]; scratch among them is no harm."""
    full = -(-stored // BLOCK_SIZE)
    past: Int32 = tables[np.arange(tables.shape[1]) >= full[:, None]]
    return past


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since what is masked out of attention is multiplied by 0, and 0 times what lay there before may be no 0.

    On the CPU they are calloc's: pages come from the system when they are first written, so a large pool costs nothing
    until it is used.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, _BYTES[dtype])).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
