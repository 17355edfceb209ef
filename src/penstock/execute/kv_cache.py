"""KvCache: the memory of a model's KV cache. It also holds recurrent state, for models that have
it.

    pages   [blocks, ...] for each layer with keys and values, and the token ids of each block
    slots   [slots, bytes] for each recurrent layer, and the number of tokens each slot holds

Knows blocks, slots, layers and the blocks a plan gives out; no rows. Penalty kernels count a row's
tokens in `slot_token`, the token ids of each block.

A NaN or inf must not spread from one row to others. Plain torch's attention masks by adding -inf
and multiplying by 0, which leaves a NaN a NaN, so masked values must be finite too. Therefore the
scratch block, which pads block tables, is never written; rows that run past their end write to the
dump, a block behind the scheduler's blocks. And once a row's logits were not finite, every plan
clears the blocks that it gives out. The host sees such a row before it can reuse its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.state_forms import LatentForm, PagedForm, RecurrentForm
from penstock.layers.block import Keeper
from penstock.schedule.step import Int32, Int64, StepPlan

_BYTES = {
    torch.bfloat16: np.uint16,
    torch.float16: np.uint16,
    torch.float32: np.uint32,
    torch.int32: np.uint32,
    torch.uint8: np.uint8,
}
TOKEN_BYTES = 4  # bytes of a token id


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Location of a layer's part of a page: in tensor number `storage`, `bytes` bytes from byte
    `first` of each page on."""

    storage: int
    first: int
    bytes: int


class KvCache:
    """KV cache and recurrent state of all layers, zeros at first. slot_token: token ids, int32
    [blocks, 16]. The last block is the dump.

    layers: for each block of the model, the views of its layers' state. A keeper is a layer that
    stores state.
    """

    def __init__(
        self,
        keepers: Sequence[Sequence[Keeper]],
        blocks: int,
        device: torch.device,
        places: Sequence[PagePlace] | None = None,
        slots: int = 0,
        *,
        shared: bool = False,
    ) -> None:
        """keepers: the layers that store state, for each block of the model. places: location of
        each layer's pages, if layers share tensors; None: each layer has its own. slots: number of
        recurrent state slots. shared: all slots use the same memory, for steps whose results are
        not read."""
        owners = [keeper for each in keepers for keeper in each if keeper.source is None]
        paged = [
            (id(owner), owner.form) for owner in owners if not isinstance(owner.form, RecurrentForm)
        ]
        if places is None:
            places = [
                PagePlace(number, 0, form.block_bytes) for number, (_, form) in enumerate(paged)
            ]
        sizes = dict(sorted((place.storage, place.bytes) for place in places))
        self._pages = [zeros((blocks, size), torch.uint8, device) for size in sizes.values()]
        views: dict[int, Any] = {}
        for place, (own, form) in zip(places, paged, strict=True):
            stretch = self._pages[place.storage].narrow(1, place.first, form.block_bytes)
            views[own] = form.over(stretch.view(blocks, *form.block_shape))
        self._slots: list[Tensor] = []
        for owner in owners:
            if isinstance(owner.form, RecurrentForm):
                self._slots.append(
                    zeros((1 if shared else slots, owner.form.slot_bytes), torch.uint8, device)
                )
                views[id(owner)] = owner.form.over(self._slots[-1].expand(slots, -1))
        self.layers = [
            tuple(views[id(keeper.source or keeper)] for keeper in each) for each in keepers
        ]
        self.slot_token = zeros((blocks, BLOCK_SIZE), torch.int32, device)
        self.dump_block = blocks - 1
        # Number of tokens each slot holds, in the first of four numbers: copies need 16 bytes per
        # slot.
        self._folded = zeros((slots if self._slots else 0, 4), torch.int32, device)

    def clear(self, blocks: Tensor) -> None:
        """Zeroes the blocks with the numbers `blocks`, int64 [m]."""
        for storage in self._pages:
            # written as int64, whatever the dtype, for speed: 1.4 ms per call on an H200
            storage.view(torch.int64).index_fill_(0, blocks, 0)

    def handed_out(self, plan: StepPlan) -> Int64:
        """Returns the blocks that this plan gives to prompts and rows and that hold none of their
        tokens yet."""
        fresh = [plan.new_blocks[:, 2]]
        if plan.joins is not None:
            fresh.append(_past(plan.joins.blocks, plan.joins.records["length"]))
        if plan.chunks is not None:
            fresh.append(_past(plan.chunks.blocks, plan.chunks.context))
        return np.concatenate(fresh).astype(np.int64)

    def store_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Stores tokens [T] int64 at slots [T] int64, beside their K and V."""
        self.slot_token.view(-1).index_copy_(0, slots, tokens.to(torch.int32))

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.by_block, *self.by_slot))

    @property
    def by_block(self) -> list[Tensor]:
        """All tensors indexed by block in their first dimension."""
        return [*self._pages, self.slot_token]

    @property
    def by_slot(self) -> list[Tensor]:
        """All tensors indexed by recurrent state slot in their first dimension; [] without
        recurrent state."""
        return [*self._slots, self._folded] if self._slots else []

    @property
    def folded(self) -> Tensor | None:
        """Number of tokens each recurrent state slot holds, int32 [slots]; None without recurrent
        state."""
        return self._folded[:, 0] if self._slots else None


def token_bytes(forms: Sequence[PagedForm]) -> int:
    """Returns the bytes of the KV cache per token."""
    return sum(form.block_bytes for form in forms) // BLOCK_SIZE + TOKEN_BYTES


def kv_words(forms: Sequence[PagedForm]) -> str:
    """Returns the dtypes of the KV cache as text for users."""
    if any(isinstance(form, LatentForm) for form in forms):
        return _latent_words(forms)
    values = _name(forms[0].values)
    wide = {number: form.keys for number, form in enumerate(forms) if form.keys != form.values}
    if not wide:
        return values
    whose = "all layers" if len(wide) == len(forms) else f"layers {', '.join(map(str, wide))}"
    return f"{values}, keys of {whose} in {_name(next(iter(wide.values())))}"


def _latent_words(forms: Sequence[PagedForm]) -> str:
    wide = [str(number) for number, form in enumerate(forms) if form.keys == form.values]
    plain = _name(forms[0].keys)
    if len(wide) == len(forms):
        return plain
    layers = f" and layers {', '.join(wide)}" if wide else ""
    return f"{_name(E4M3)}, what turns{layers} in {plain}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _past(tables: Int32, stored: Int32) -> Int32:
    """Returns the entries of block tables [k, width] after the blocks that hold `stored` tokens
    [k]. May include scratch blocks, which does no harm."""
    full = -(-stored // BLOCK_SIZE)
    past: Int32 = tables[np.arange(tables.shape[1]) >= full[:, None]]
    return past


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros. Masked attention multiplies stale values by 0, and 0 times NaN or inf is not
    0, so memory must start as zeros.

    On the CPU calloc provides them: memory pages come from the system at the first write, so a
    large pool costs nothing until used.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, _BYTES[dtype])).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
