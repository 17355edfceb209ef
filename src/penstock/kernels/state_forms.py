"""State forms: the state that a part of a layer keeps per sequence between steps, as bytes of a
storage.

  paged      a page for each block of 16 tokens. KvForm (layer_kv.py): keys and values of each KV
             head; LatentForm: one vector a token, whose first part is its value
  recurrent  one slot per sequence, of a fixed size. RecurrentForm: named arrays

A form gives the bytes of a page or slot and makes typed views of a storage. Memory budgets,
roofline and the simulator count forms. Knows shapes and bytes; no rows, no owners of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3

ALIGN = 16  # bytes: arrays of a slot are aligned to this for kernels' wide loads


class PagedForm(Protocol):
    """A form with a separate part for each token."""

    @property
    def keys(self) -> torch.dtype:
        """Dtype of stored keys."""

    @property
    def values(self) -> torch.dtype:
        """Dtype of stored values."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a block's bytes in a storage [blocks, *block_shape] of uint8."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 tokens."""

    def over(self, storage: Tensor) -> Any:
        """Returns views of storage [blocks, *block_shape] uint8 for the layer's operations."""

    def plain(self, dtype: torch.dtype) -> PagedForm:
        """Returns the form that stores the same numbers in the model's dtype."""


@dataclass(slots=True)
class LatentKv:
    """A layer's latents in one storage, read by all heads: the whole vector is the key, its first
    part the value."""

    # [blocks, 16, width], a view; with a scale only the part in eight bits, [blocks, 16,
    # value_width] e4m3
    latent: Tensor
    value_width: int  # length of a vector's first part, its value
    beside: Tensor | None = (
        None  # beside a scale: the rest of each vector, [blocks, 16, width - value_width], a view
    )
    scale: Tensor | None = None  # [1] float32, from LatentForm

    scales: None = None  # None: no scales by head
    kv_heads: int = 1

    @property
    def vectors(self) -> Tensor:
        """The vectors' first parts [blocks, 16, value_width], a view."""
        return self.latent[..., : self.value_width]

    @property
    def turned(self) -> Tensor:
        """The vectors' rotated parts [blocks, 16, width - value_width], a view."""
        return self.latent[..., self.value_width :] if self.beside is None else self.beside

    def worth(self, blocks: Tensor) -> Tensor:
        """Returns whole vectors [n, 16, width] of blocks [n] int, in the dtype of the part that
        isn't in eight bits."""
        if self.beside is None or self.scale is None:
            return self.latent.index_select(0, blocks)
        eight = self.latent.view(torch.uint8).index_select(0, blocks).view(E4M3)
        beside = self.beside.index_select(0, blocks)
        return widened(eight, beside, self.scale)


def widened(eight: Tensor, beside: Tensor, scale: Tensor) -> Tensor:
    """Returns whole vectors [..., width] of beside's dtype. eight: [..., value_width] e4m3. beside:
    [..., rest]. scale: [1]."""
    return torch.cat(((eight.float() * scale).to(beside.dtype), beside), -1)


@dataclass(frozen=True, slots=True)
class LatentForm:
    """One vector a token that serves all heads (multi-head latent attention, arXiv:2405.04434): the
    whole vector is the key, its first `value_width` numbers are the value.

    scale: [1] float32, on the layer's device: values are in eight bits and stand for scale * e4m3,
    by the rule of `layer_kv.py`; a block then holds all values, then all rotated parts, which keep
    their dtype. None: all is plain."""

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
    """An array of a sequence's recurrent state. sums: it accumulates over all tokens, and may have
    another dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentForm:
    """Arrays that a layer updates with each token of a sequence."""

    parts: tuple[StatePart, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(_aligned(part.bytes) for part in self.parts)

    def summed_in(self, dtype: torch.dtype) -> RecurrentForm:
        """Returns the form with this dtype for parts that accumulate over all tokens."""
        return RecurrentForm(
            tuple(replace(part, dtype=dtype) if part.sums else part for part in self.parts)
        )

    def over(self, storage: Tensor) -> dict[str, Tensor]:
        """Returns each part's view [slots, *shape] of storage [slots, slot_bytes] uint8."""
        views, first = {}, 0
        for part in self.parts:
            flat = storage[:, first : first + part.bytes].view(part.dtype)
            views[part.name] = flat.unflatten(1, part.shape) if part.shape else flat.squeeze(1)
            first += _aligned(part.bytes)
        return views


StateForm = PagedForm | RecurrentForm


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
