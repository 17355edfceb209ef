"""LayerKv: K and V of one layer as kernels write and read them, and the numbers that they are
stored in.

    storage [blocks, kv_heads, bytes]      K and V of a block and KV head lie together
        plain     | K 16 x width, the model's dtype      | V 16 x width, the same          |
        values    | K 16 x width, the model's dtype      | V 2 x width x 8, e4m3 |
        both      | K 16 x width, e4m3  | V 2 x width x 8   |

A number in eight bits is worth scale * e4m3, a scale a KV head: what is written is e4m3(clamp(x *
(1 / scale))), within 448, of the x that a plain layer would store, and what is read is widened
before anything is computed, which loses nothing: all that read a token read the same numbers. Keys
alone are never in eight bits.

V in eight bits lies turned, 8 tokens beside each other: an answer is a sum over tokens, of which
tensor cores take neighbours out of one register. (1,000 rows of 640 tokens, width 128, on an H200:
16 beside each other 420 us, 8 331, 4 355; copied 307.) It knows heads and bytes; no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3

TURNED = 8  # tokens whose V lies beside each other, where it is in eight bits
# that a scale may be: kernels mask scores by a large number, which is scaled too
LEAST_KV_SCALE = 2.0**-40


@dataclass(frozen=True, slots=True)
class KvForm:
    """What a layer's K and V are stored as.

    scales: [2, kv_heads] float32, of K and of V, on the layer's device (1 for what is plain); None:
    nothing is in eight bits. value_width: numbers of a value; None: as many as of a key.
    """

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
        """What is in eight bits: 0 nothing, 1 values, 2 keys and values."""
        return (self.keys == E4M3) + (self.values == E4M3)

    @property
    def head_bytes(self) -> int:
        """Bytes of a block of one KV head."""
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
        """storage [blocks, kv_heads, head_bytes] uint8 -> its K and V."""
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
        """Returns the same numbers stored in the model's dtype."""
        return replace(self, keys=dtype, values=dtype, scales=None)

    @property
    def _key_bytes(self) -> int:
        return BLOCK_SIZE * self.width * self.keys.itemsize

    @property
    def _value_width(self) -> int:
        return self.width if self.value_width is None else self.value_width


@dataclass(slots=True)
class LayerKv:
    """K and V over one storage, of which `storage` is what is theirs."""

    keys: Tensor  # [blocks, kv_heads, 16, width], a view
    # [blocks, kv_heads, 16, value width], or in eight bits [blocks, kv_heads, 2, value width, 8]
    values: Tensor
    # [blocks, ...], a block's bytes in one piece, blocks perhaps apart: other layers lie between
    # them
    storage: Tensor
    scales: Tensor | None = None  # [2, kv_heads] float32: KvForm's
    # [kv_heads] int32, zeros between launches: programs that share a row meet here
    arrived: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = torch.zeros(self.kv_heads, dtype=torch.int32, device=self.keys.device)

    @classmethod
    def plain(cls, kv: Tensor) -> LayerKv:
        """kv [blocks, kv_heads, 2, 16, width] of any float dtype, nothing in eight bits."""
        return cls(kv[:, :, 0], kv[:, :, 1], kv)

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def eight(self) -> int:
        """What is in eight bits: as KvForm's."""
        return (self.keys.dtype == E4M3) + (self.values.dtype == E4M3)

    def worth(self, blocks: Tensor) -> Tensor:
        """blocks [n] int64 -> what is stored there, scaled: [n, kv_heads, 2, 16, width] float32."""
        parts = (take_blocks(part, blocks).float() for part in (self.keys, self.values))
        both = torch.stack(tuple(parts), 2)
        return both if self.scales is None else both * self.scales.T[:, :, None, None]


def in_rows(part: Tensor, numbers: int, step: int) -> tuple[Tensor, int]:
    """part [blocks, ...], whose blocks may lie apart -> rows of so many numbers, each `step` behind
    the one before [rows, numbers], a view; and how many rows a block is from the next."""
    apart = part.stride(0) // step
    rows = (part.shape[0] - 1) * apart + part[0].numel() // numbers
    return part.as_strided((rows, numbers), (step, 1)), apart


def over_gaps(index: Tensor, own: int, apart: int) -> Tensor:
    """Returns for rows of blocks with `own` each, counted without what lies between blocks, their
    numbers where a block is `apart` rows from the next."""
    return index if own == apart else index + index // own * (apart - own)


def take_blocks(part: Tensor, index: Tensor) -> Tensor:
    """Returns entries of K or V along their first dimension, [n, kv_heads, 16, width]. torch has no
    float8 form of it: bytes are moved."""
    if part.dtype != E4M3:
        return part.index_select(0, index)
    taken = part.view(torch.uint8).index_select(0, index).view(E4M3)
    return taken if part.dim() == 4 else taken.mT.flatten(2, 3)
