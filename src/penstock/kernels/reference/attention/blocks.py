"""Copies KV blocks. If a prompt has several samples, each gets its own copy of the prompt's last,
partly filled block."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(kv_layers: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copies block src[i] over block dst[i] in each of kv_layers [blocks, kv_heads, 2, 16, width].
    All sources are read before any target of the same layer is written."""
    if src.numel() == 0:
        return
    to = dst.long()
    for kv in kv_layers:
        kv.index_copy_(0, to, kv.index_select(0, src))


class BlockCopier:
    """Copies blocks within KV tensors, whose first dimension is the block."""

    def __init__(self, layers: list[Tensor]) -> None:
        self._layers = layers

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copies blocks src to dst, both [c] int32 or int64; a pair with src < 0 is skipped."""
        there = src >= 0
        copy_blocks(self._layers, src[there], dst[there])
