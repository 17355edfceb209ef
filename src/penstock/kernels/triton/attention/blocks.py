"""Copies KV blocks of all layers in one launch. The kernel reads a table of the layers' base
addresses. The stored token ids of a block may be copied in the same launch.

Knows blocks and addresses; no rows. Targets are newly allocated blocks, so no block is both a
source and a target of a call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv

_WORDS = 2048  # 4-byte words that a program copies


@triton.jit
def _copy_blocks(pointers, words, src, dst, WORDS: tl.constexpr):
    layer = tl.program_id(1)
    each = tl.load(words + layer)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    base = tl.load(pointers + layer).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    each = tl.multiple_of(each, 4)
    source = tl.load(src + tl.program_id(0)).to(tl.int64)
    target = tl.load(dst + tl.program_id(0)).to(tl.int64)
    there = (word < each) & (source >= 0)
    tl.store(
        base + target * each + word, tl.load(base + source * each + word, mask=there), mask=there
    )


class BlockCopier:
    """Copies KV blocks within tensors. layers: contiguous tensors [blocks, ...] whose blocks have a
    multiple of 16 bytes. Their addresses are sent to the device once."""

    def __init__(self, layers: list[Tensor]) -> None:
        sizes = [x[0].numel() * x.element_size() for x in layers]
        if any(
            not x.is_contiguous() or x.data_ptr() % 16 or size % 16
            for x, size in zip(layers, sizes, strict=True)
        ):
            raise ValueError("blocks must be contiguous and of a multiple of 16 bytes")
        self._layers = layers  # keeps the tensors alive, so that their addresses stay valid
        device = layers[0].device
        self._pointers = torch.tensor(
            [x.data_ptr() for x in layers], dtype=torch.int64, device=device
        )
        self._words = torch.tensor([size // 4 for size in sizes], dtype=torch.int64, device=device)
        self._pieces = cdiv(max(sizes) // 4, _WORDS)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copies blocks src to dst, both [c] int32 or int64; a pair with src < 0 is skipped, so
        that src and dst can be padded to a fixed size."""
        if src.shape[0]:
            _copy_blocks[(src.shape[0], len(self._layers), self._pieces)](
                self._pointers, self._words, src, dst, WORDS=_WORDS, num_warps=4
            )


def copy_blocks(kv_layers: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copies block src[i] over block dst[i] in all layers. It sends the layers' addresses to the
    device in each call; a BlockCopier sends them once."""
    if src.numel():
        BlockCopier(kv_layers).copy(src.contiguous(), dst.contiguous())
