"""Layouts of the state that layers keep between steps, as bytes of a storage tensor. A layout is
called a form.

  paged       a page for each block of 16 tokens. KvForm (layer_kv.py): keys and values of each KV
              head; LatentForm: one vector per token, whose first part is its value
  recurrent   a slot of fixed size per sequence. RecurrentForm: named arrays

A form gives the bytes of a page or slot and makes typed views of a storage. Memory budgets, the
roofline and the simulator compute sizes from forms. Knows shapes and bytes; no rows, no allocation
of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3

# arrays in a slot begin at multiples of so many bytes, so that kernels can load 16 bytes at once
ALIGN = 16
_BESIDE = 32  # numbers beside inputs are padded to a multiple of so many, to keep entries aligned


class PagedForm(Protocol):
    """The interface of layouts with a separate part for each token, stored in blocks of 16
    tokens."""

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
        """Returns the layout of the same state stored in `dtype`, without quantization."""


@dataclass(slots=True)
class LatentKv:
    """A layer's latents in one storage. All heads read the same vector of a token: the whole vector
    is the key, its first part is the value."""

    # a view: [blocks, 16, width]; with a scale, the part in eight bits [blocks, 16, value_width]
    # e4m3
    latent: Tensor
    value_width: int  # length of a vector's first part, its value
    beside: Tensor | None = (
        # a view: with a scale, the rest of each vector [blocks, 16, width - value_width]; else None
        None
    )
    scale: Tensor | None = None  # [1] float32, from LatentForm

    scales: None = None  # None: there are no scales by head, as in LayerKv
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
        """Returns the whole vectors of some blocks, [n, 16, width], in the dtype of the part that
        isn't in eight bits. blocks: ids, [n] int."""
        if self.beside is None or self.scale is None:
            return self.latent.index_select(0, blocks)
        eight = self.latent.view(torch.uint8).index_select(0, blocks).view(E4M3)
        beside = self.beside.index_select(0, blocks)
        return widened(eight, beside, self.scale)


def widened(eight: Tensor, beside: Tensor, scale: Tensor) -> Tensor:
    """Returns whole vectors [..., width] in the dtype of `beside`. eight: their first part, e4m3
    [..., value_width]. scale: [1], factor of `eight`. beside: the rest of the vectors [..., width -
    value_width]."""
    return torch.cat(((eight.float() * scale).to(beside.dtype), beside), -1)


@dataclass(frozen=True, slots=True)
class LatentForm:
    """Layout of latents: one vector a token, which all heads read (multi-head latent attention,
    arXiv:2405.04434). The whole vector is the key, its first `value_width` numbers are the value.

    scale: [1] float32, on the layer's device: values are in eight bits and mean scale * e4m3, as in
    `layer_kv.py`; a block then holds all values, followed by all rotated parts in the model's
    dtype. None: nothing is in eight bits."""

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
    """One array of a sequence's recurrent state. sums: True if it accumulates over all tokens; its
    dtype may then differ from the model's. beside: the array is a ring [width, numbers] of the last
    tokens' inputs, to which drafts add so many numbers a token; None: it is no ring."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: bool = False
    beside: int | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentForm:
    """Layout of recurrent state: the arrays that a layer updates with each token of a sequence."""

    parts: tuple[StatePart, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(_aligned(part.bytes) for part in self.parts)

    def summed_in(self, dtype: torch.dtype) -> RecurrentForm:
        """Returns this layout with `dtype` for the arrays that accumulate over all tokens."""
        return RecurrentForm(
            tuple(replace(part, dtype=dtype) if part.sums else part for part in self.parts)
        )

    def for_drafts(self, drafts: int) -> RecurrentForm:
        """Returns this layout with rings for steps with up to `drafts` drafts a row. A ring then
        has the inputs of the step before, from which right drafts are folded again, and of this
        step."""

        def grown(part: StatePart) -> StatePart:
            if part.beside is None or not drafts:
                return part
            width, numbers = part.shape
            more = -(-part.beside // _BESIDE) * _BESIDE
            return replace(part, shape=(width + 2 * drafts, numbers + more))

        return RecurrentForm(tuple(map(grown, self.parts)))

    def over(self, storage: Tensor) -> dict[str, Tensor]:
        """Returns each array by its name, as a view [slots, *shape] of storage [slots, slot_bytes]
        uint8."""
        views, first = {}, 0
        for part in self.parts:
            flat = storage[:, first : first + part.bytes].view(part.dtype)
            views[part.name] = flat.unflatten(1, part.shape) if part.shape else flat.squeeze(1)
            first += _aligned(part.bytes)
        return views


StateForm = PagedForm | RecurrentForm


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
