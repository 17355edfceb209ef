"""LayerKv: K and V of one layer as kernels write and read them, and the dtypes they are stored in.

  storage [blocks, kv_heads, bytes]      K and V of a block and KV head are adjacent
    plain     | K 16 x width, the model's dtype | V 16 x width, the same |
    values    | K 16 x width, the model's dtype | V 2 x width x 8, e4m3 |
    both      | K 16 x width, e4m3 | V 2 x width x 8 |

A number in eight bits stands for scale * e4m3, with one scale a KV head. Writers store e4m3(clamp(x
* (1 / scale))), within 448, of the x that a plain layer would store. Readers widen it before
computing, which is exact, so all readers of a token see the same numbers. Keys alone are never in
eight bits.

V in eight bits is transposed, 8 tokens side by side: an output is a sum over tokens, and tensor
cores take neighbours along the sum from one register. (1,000 rows of 640 tokens, width 128, on an
H200: 16 side by side 420 us, 8 331, 4 355; copied 307.) Knows heads and bytes; no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3

TURNED = 8  # tokens whose V is side by side in eight bits
# least scale allowed: kernels mask scores by a large number, which is multiplied by the scale too
LEAST_KV_SCALE = 2.0**-40


@dataclass(frozen=True, slots=True)
class KvForm:
    """Storage form of a layer's K and V.

    scales: [2, kv_heads] float32, of K and of V, on the layer's device (1 for a plain one); None:
    both are plain. value_width: numbers of a value; None: as many as of a key."""

    kv_heads: int
    width: int
    keys: torch.dtype
    values: torch.dtype
    scales: Tensor | None = None
    value_width: int | None = None

    def __post_init__(self) -> None:
        if (self.values == E4M3) != (self.scales is not None) or (
            self.keys != self.values and not self.eight
        ):
            raise ValueError(
                "numbers in eight bits have scales, plain ones have none; keys are never narrower"
                " alone"
            )

    @property
    def eight(self) -> int:
        """Parts in eight bits: 0 none, 1 values, 2 keys and values."""
        return (self.keys == E4M3) + (self.values == E4M3)

    @property
    def head_bytes(self) -> int:
        """Bytes of one block of one KV head."""
        return self._key_bytes + BLOCK_SIZE * self._value_width * self.values.itemsize

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a block's bytes."""
        return self.kv_heads, self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all heads."""
        return self.kv_heads * self.head_bytes

    def over(self, storage: Tensor) -> LayerKv:
        """Returns K and V as views of storage [blocks, kv_heads, head_bytes] uint8."""
        width, key_bytes = self._value_width, self._key_bytes
        keys = storage[..., :key_bytes].view(self.keys).unflatten(2, (BLOCK_SIZE, self.width))
        values = storage[..., key_bytes:].view(self.values)
        plain, turned = (BLOCK_SIZE, width), (BLOCK_SIZE // TURNED, width, TURNED)
        return LayerKv(
            keys,
            values.unflatten(2, plain if self.scales is None else turned),
            storage,
            self.scales,
        )

    def plain(self, dtype: torch.dtype) -> KvForm:
        """Returns the form that stores the same numbers in the model's dtype."""
        return replace(self, keys=dtype, values=dtype, scales=None)

    @property
    def _key_bytes(self) -> int:
        return BLOCK_SIZE * self.width * self.keys.itemsize

    @property
    def _value_width(self) -> int:
        return self.width if self.value_width is None else self.value_width


@dataclass(slots=True)
class LayerKv:
    """Views of a layer's K and V in one storage."""

    keys: Tensor  # [blocks, kv_heads, 16, width], a view
    # [blocks, kv_heads, 16, value width]; in eight bits [blocks, kv_heads, 2, value width, 8]
    values: Tensor
    # [blocks, ...]: each block's bytes are contiguous; other layers may lie between blocks
    storage: Tensor
    scales: Tensor | None = None  # [2, kv_heads] float32, from KvForm
    # [kv_heads] int32, zeros between launches: counters for programs that share a row
    arrived: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = torch.zeros(self.kv_heads, dtype=torch.int32, device=self.keys.device)

    @classmethod
    def plain(cls, kv: Tensor) -> LayerKv:
        """Returns a LayerKv over kv [blocks, kv_heads, 2, 16, width] of any float dtype, without
        eight bits."""
        return cls(kv[:, :, 0], kv[:, :, 1], kv)

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def eight(self) -> int:
        """Parts in eight bits; see KvForm."""
        return (self.keys.dtype == E4M3) + (self.values.dtype == E4M3)

    def worth(self, blocks: Tensor) -> Tensor:
        """Returns the stored numbers of blocks [n] int64, scaled: [n, kv_heads, 2, 16, width]
        float32."""
        parts = (take_blocks(part, blocks).float() for part in (self.keys, self.values))
        both = torch.stack(tuple(parts), 2)
        return both if self.scales is None else both * self.scales.T[:, :, None, None]


def in_rows(part: Tensor, numbers: int, step: int) -> tuple[Tensor, int]:
    """Returns a view of part [blocks, ...], whose blocks may lie apart, as rows [rows, numbers],
    each `step` after the one before; and the distance of two blocks in rows."""
    own = part.shape[1:].numel() // numbers
    if step == numbers and part.is_contiguous():
        return part.view(-1, numbers), own
    apart = part.stride(0) // step
    return part.as_strided(((part.shape[0] - 1) * apart + own, numbers), (step, 1)), apart


def over_gaps(index: Tensor, own: int, apart: int) -> Tensor:
    """Converts indices of rows. index: counted with `own` rows a block. Returns them for blocks
    that are `apart` rows from each other."""
    return index if own == apart else index + index // own * (apart - own)


def take_blocks(part: Tensor, index: Tensor) -> Tensor:
    """Returns entries of K or V along the first dimension, [n, kv_heads, 16, width]. torch can't
    index float8, so bytes are moved."""
    if part.dtype != E4M3:
        return part.index_select(0, index)
    taken = part.view(torch.uint8).index_select(0, index).view(E4M3)
    return taken if part.dim() == 4 else taken.mT.flatten(2, 3)
