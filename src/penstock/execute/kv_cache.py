"""KvCache: the pool of blocks. K and V of every layer, and the tokens that lie at each slot, in one geometry.

It knows blocks and layers; no rows, no tables. `slot_token` is what penalties are counted from.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.device_rows import to_device
from penstock.kernels.ops import Ops
from penstock.schedule.step import Int32

_BYTES = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32, torch.int32: np.uint32}


class KvCache:
    """One tensor a layer of `shape` `[blocks, kv_heads, 2, 16, width]`; slot_token `[blocks, 16]` int32. All zeros."""

    def __init__(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        self.layers: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.slot_token = _zeros((shape[0], BLOCK_SIZE), torch.int32, device)
        self._ops = ops

    def copy(self, copies: Int32) -> None:
        """copies [c, 2]: from block, to block; K, V and tokens of all layers."""
        source, target = to_device(copies, self.slot_token.device).unbind(1)
        self._ops.copy_blocks(self.layers, source, target)
        self._ops.copy_blocks([self.slot_token], source, target)

    def store_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """slots [T] int64, tokens [T] int64, as they are stored beside their K and V."""
        self.slot_token.view(-1).index_copy_(0, slots, tokens.to(torch.int32))

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.layers, self.slot_token))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since what is masked out of attention is multiplied by 0, and 0 times what lay there before may be no 0.

    On the CPU they are calloc's: pages come from the system when they are first written, so a large pool costs nothing
    until it is used.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, _BYTES[dtype])).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
