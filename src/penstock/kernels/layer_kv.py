"""LayerKv: the KV cache of one layer, and its storage layout.

  storage [blocks, kv_heads, bytes]      K and V of a block and KV head are adjacent
    plain     | K 16 x width, the model's dtype | V 16 x width, the same |
    values    | K 16 x width, the model's dtype | V 2 x width x 8, e4m3 |
    both      | K 16 x width, e4m3 | V 2 x width x 8 |

K or V in eight bits is e4m3 with one scale per KV head. Writers store e4m3(clamp(x * (1 / scale),
-448, 448)), where x is the number that a plain layout would store. Readers convert it to a wider
dtype before computing, which is exact, so all readers of a token see the same numbers. There is no
layout with only K in eight bits.

V in eight bits is transposed in runs of 8 tokens: for each of the width's numbers, 8 tokens' values
are adjacent. An output is a sum over tokens, and tensor cores need neighbours along the sum in one
register. For 1,000 rows of 640 tokens and width 128 on an H200, attention takes 331 us with runs of
8 tokens, 420 us with 16 and 355 us with 4; copying as many bytes takes 307 us. Knows heads and
bytes; no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3

TURNED = 8  # tokens of a run in which V in eight bits is transposed
# The least scale that is accepted. Kernels mask scores by a large negative number, which must stay
# large when it is multiplied by the scale.
LEAST_KV_SCALE = 2.0**-40


@dataclass(frozen=True, slots=True)
class KvForm:
    """Storage layout of a layer's K and V.

    scales: [2, kv_heads] float32, of K and of V, on the layer's device (1 if K or V is plain);
    None: both are plain. value_width: numbers of a value; None: as many as of a key."""

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
        """A number that tells kernels which of K and V are in eight bits: 0 none, 1 V,
        2 K and V."""
        return (self.keys == E4M3) + (self.values == E4M3)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in a block: K and V of 16 tokens."""
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
        """Returns the layout for the same heads with K and V in `dtype`."""
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
    # [blocks, ...]: a block's bytes are contiguous; between blocks there may be other layers' data
    storage: Tensor
    scales: Tensor | None = None  # [2, kv_heads] float32, from KvForm
    # [kv_heads] int32, zeros between launches: counters of finished programs that share a row
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
        """A number that tells kernels which of K and V are in eight bits; see KvForm.eight."""
        return (self.keys.dtype == E4M3) + (self.values.dtype == E4M3)

    def worth(self, blocks: Tensor) -> Tensor:
        """Returns K and V of some blocks in float32, with scales applied: [n, kv_heads, 2, 16,
        width]. blocks: ids, [n] int64."""
        parts = (take_blocks(part, blocks).float() for part in (self.keys, self.values))
        both = torch.stack(tuple(parts), 2)
        return both if self.scales is None else both * self.scales.T[:, :, None, None]


def in_rows(part: Tensor, numbers: int, step: int) -> tuple[Tensor, int]:
    """Views K or V as a matrix of rows. part: K or V, [blocks, ...], a view with gaps between
    blocks. numbers: of a row. step: distance of two rows' starts, in numbers. Gaps count as rows
    too. Returns the view [rows, numbers], and the number of rows from one block to the next."""
    own = part.shape[1:].numel() // numbers
    if step == numbers and part.is_contiguous():
        return part.view(-1, numbers), own
    apart = part.stride(0) // step
    return part.as_strided(((part.shape[0] - 1) * apart + own, numbers), (step, 1)), apart


@dataclass(slots=True)
class RowIndex:
    """Indices of rows of K or V that count no gaps between blocks."""

    index: Tensor  # int64
    # results of `over_gaps`: the layers of a step ask for the same one
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def over_gaps(self, own: int, apart: int) -> Tensor:
        """Returns the indices into the view of `in_rows`, which has `apart` rows from one block to
        the next, of which `own` are the block's."""
        if own == apart:
            return self.index
        found = self.kept.get((own, apart))
        if found is None:
            found = self.kept[own, apart] = self.index + self.index // own * (apart - own)
        return found


def take_blocks(part: Tensor, index: Tensor) -> Tensor:
    """Returns a copy of some blocks of K or V, [n, kv_heads, 16, width]. part: K or V. index: block
    ids [n]. float8 is viewed as bytes, since torch can't index float8."""
    if part.dtype != E4M3:
        return part.index_select(0, index)
    taken = part.view(torch.uint8).index_select(0, index).view(E4M3)
    return taken if part.dim() == 4 else taken.mT.flatten(2, 3)
