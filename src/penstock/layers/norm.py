"""Norm: an RMS norm, with the residual stream's sum in the same kernel; of what is centred first it
is a layer norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows, wide
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class Norm:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension."""

    weight: (
        Weight  # [d]; float32 where it is multiplied by before the answer is rounded (Gemma's way)
    )
    eps: float
    first: Norm | None = None  # what x passes before it joins the stream
    centred: bool = (
        False  # the mean is subtracted before: a layer norm (arXiv:1607.06450) without a bias
    )
    made: bool = False  # its weight is ones, which no checkpoint has

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, reader: Linear | None
    ) -> tuple[Rows, Tensor]:
        """x `[T, d]` joins the residual `[T, d]` (None: x opens it); returns the normed sum, as
        `reader` takes it (None, or the norm is centred: wide), and the sum."""
        form = "wide" if reader is None else reader.form(x.shape[0])
        if residual is None:
            assert self.first is None, "what opens the stream comes out of no part"
            return self._of(ops, x, form), x
        if self.first is not None and (self.first.eps != self.eps or self.first.centred):
            x, first = self.first.alone(ops, x), None
        else:
            first = None if self.first is None else self.first.weight.value
        if self.centred:
            assert first is None, "norms of one layer are of one kind"
            return self._of(ops, residual.add_(x), form), residual
        return ops.add_rms_norm(x, residual, self.weight.value, self.eps, form, first)

    def alone(self, ops: Ops, x: Tensor) -> Tensor:
        """x `[T, d]` -> its norm, beside the residual stream."""
        return wide(self._of(ops, x, "wide"))

    def _of(self, ops: Ops, x: Tensor, form: Form) -> Rows:
        if not self.centred:
            return ops.rms_norm(x, self.weight.value, self.eps, form)
        full = x.float()  # rounded once, behind the norm
        centred = full - full.mean(-1, keepdim=True)
        return wide(ops.rms_norm(centred, self.weight.value, self.eps, "wide")).to(x.dtype)

    def weights(self) -> Iterator[Weight]:
        if not self.made:
            yield self.weight
        if self.first is not None:
            yield from self.first.weights()

    def last(self, ops: Ops, x: Tensor, residual: Tensor | None) -> Tensor:
        """x, residual `[T, d]` -> the norm of their sum, for the head."""
        return wide(self(ops, x, residual, None)[0])


@dataclass(slots=True)
class WholeNorms:
    """Norms of all query heads and of all key heads of a fused product (OLMo 2, arXiv:2501.00656),
    and OLMo's clip."""

    q: Norm  # of this rank's heads
    k: Norm
    clip: float | None
    layout: Layout

    def __call__(self, ops: Ops, qkv: Tensor) -> Tensor:
        """qkv `[T, (H + 2 Hkv) * D]`, overwritten -> the same with q and k normed, and all of it
        clipped."""
        first, last = self.q.weight.shape[0], self.q.weight.shape[0] + self.k.weight.shape[0]
        for part, norm in zip((qkv[:, :first], qkv[:, first:last]), (self.q, self.k), strict=True):
            part.copy_(
                norm.alone(ops, part) if self.layout.size == 1 else self._over_ranks(part, norm)
            )
        return qkv if self.clip is None else qkv.clamp_(-self.clip, self.clip)

    def _over_ranks(self, part: Tensor, norm: Norm) -> Tensor:
        """Every rank has as many of the heads, and each head is on as many ranks: the mean of means
        is the mean."""
        full, weight = part.float(), norm.weight.value
        mean = self.layout.all_gather(full.square().mean(-1, keepdim=True)).mean(0)
        normed = full * (mean + norm.eps).rsqrt()
        return normed * weight if weight.dtype == torch.float32 else normed.to(part.dtype) * weight
