"""State forms: what a part of a layer keeps of each sequence from one step to the next, as bytes of
a storage.

    paged      a page for each block of 16 tokens    KvForm (layer_kv.py): keys and values of each
    KV head
                                                     LatentForm: one vector a token, whose first
                                                     part is its values
    recurrent  a slot for each sequence, of one size however long it is    RecurrentForm: named
    arrays

A form says how many bytes a page or a slot takes and makes typed views of a storage. Memory
budgets, roofline and the simulator count forms. It knows shapes and bytes; no rows, no blocks'
owners.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3

ALIGN = 16  # bytes: arrays of a slot begin at multiples of so many, which kernels' wide loads want


class PagedForm(Protocol):
    """A form of which each token has its own part."""

    @property
    def keys(self) -> torch.dtype:
        """What keys are stored in."""

    @property
    def values(self) -> torch.dtype:
        """What values are stored in."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a block's bytes in a storage [blocks, *block_shape] of uint8."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 tokens."""

    def over(self, storage: Tensor) -> Any:
        """storage [blocks, *block_shape] uint8 -> views of it,
        as the layer's operations take them."""

    def plain(self, dtype: torch.dtype) -> PagedForm:
        """Returns the same numbers stored in the model's dtype."""


@dataclass(slots=True)
class LatentKv:
    """A layer's latent vectors over one storage, which all heads read: as keys whole, as values
    their first part."""

    # [blocks, 16, width], a view; with a scale what is in eight bits, [blocks, 16, value_width]
    # e4m3
    latent: Tensor
    value_width: int  # the first numbers of a vector, which are its value
    beside: Tensor | None = (
        None  # with a scale: the rest of each vector, [blocks, 16, width - value_width], a view
    )
    scale: Tensor | None = None  # [1] float32: LatentForm's

    scales: None = None  # by head there are none
    kv_heads: int = 1

    @property
    def vectors(self) -> Tensor:
        """Returns the vectors' first parts [blocks, 16, value_width], a view."""
        return self.latent[..., : self.value_width]

    @property
    def turned(self) -> Tensor:
        """Returns the rest of each [blocks, 16, width - value_width], a view."""
        return self.latent[..., self.value_width :] if self.beside is None else self.beside

    def worth(self, blocks: Tensor) -> Tensor:
        """blocks [n] int -> whole vectors [n, 16, width],
        in the dtype of what isn't in eight bits."""
        if self.beside is None or self.scale is None:
            return self.latent.index_select(0, blocks)
        eight = self.latent.view(torch.uint8).index_select(0, blocks).view(E4M3)
        beside = self.beside.index_select(0, blocks)
        return widened(eight, beside, self.scale)


def widened(eight: Tensor, beside: Tensor, scale: Tensor) -> Tensor:
    """eight [..., value_width] e4m3, beside [..., rest], scale [1] -> whole vectors [..., width] of
    beside's dtype."""
    return torch.cat(((eight.float() * scale).to(beside.dtype), beside), -1)


@dataclass(frozen=True, slots=True)
class LatentForm:
    """One vector a token that serves all heads (multi-head latent attention, arXiv:2405.04434): it
    is the key as a whole, and its first `value_width` numbers are the value.

    scale: [1] float32, on the layer's device: values are in eight bits, worth scale * e4m3, by the
    rule of `layer_kv.py`, and of a block all values lie before what turns, which keeps its dtype.
    None: all is plain.
    """

    width: int
    value_width: int
    dtype: torch.dtype
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.value_width <= self.width:
            raise ValueError(
                f"a latent vector of {self.width} numbers has no value of {self.value_width}"
            )

    @property
    def keys(self) -> torch.dtype:
        return self.dtype

    @property
    def values(self) -> torch.dtype:
        return self.dtype if self.scale is None else E4M3

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (
            self._value_bytes + BLOCK_SIZE * (self.width - self.value_width) * self.dtype.itemsize,
        )

    @property
    def block_bytes(self) -> int:
        return self.block_shape[0]

    def over(self, storage: Tensor) -> LatentKv:
        if self.scale is None:
            return LatentKv(
                storage.view(self.dtype).unflatten(1, (BLOCK_SIZE, self.width)), self.value_width
            )
        values, beside = (
            storage[:, : self._value_bytes].view(E4M3),
            storage[:, self._value_bytes :].view(self.dtype),
        )
        by_token = (each.unflatten(1, (BLOCK_SIZE, -1)) for each in (values, beside))
        return LatentKv(next(by_token), self.value_width, next(by_token), self.scale)

    def plain(self, dtype: torch.dtype) -> LatentForm:
        return LatentForm(self.width, self.value_width, dtype)

    @property
    def _value_bytes(self) -> int:
        return BLOCK_SIZE * self.value_width * self.values.itemsize


@dataclass(frozen=True, slots=True)
class StatePart:
    """An array of a recurrent state, of one sequence. sums: it adds up over all tokens, and may be
    of another dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentForm:
    """Arrays that a layer folds each token of a sequence into."""

    parts: tuple[StatePart, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(_aligned(part.bytes) for part in self.parts)

    def summed_in(self, dtype: torch.dtype) -> RecurrentForm:
        """Returns the form whose parts that add up over all tokens are of this dtype."""
        return RecurrentForm(
            tuple(replace(part, dtype=dtype) if part.sums else part for part in self.parts)
        )

    def over(self, storage: Tensor) -> dict[str, Tensor]:
        """storage [slots, slot_bytes] uint8 -> each part's view [slots, *shape]."""
        views, first = {}, 0
        for part in self.parts:
            flat = storage[:, first : first + part.bytes].view(part.dtype)
            views[part.name] = flat.unflatten(1, part.shape) if part.shape else flat.squeeze(1)
            first += _aligned(part.bytes)
        return views


StateForm = PagedForm | RecurrentForm


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
