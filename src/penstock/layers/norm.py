"""Norm: an RMS norm fused with the addition to the residual stream; with centring, a layer norm."""

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

    weight: Weight  # [d]; float32 if the multiplication comes before rounding (Gemma)
    eps: float
    first: Norm | None = None  # norm of x before it joins the stream
    centred: bool = False  # subtract the mean first: a layer norm (arXiv:1607.06450) without a bias
    made: bool = False  # True: the weight is all ones and in no checkpoint

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, reader: Linear | None
    ) -> tuple[Rows, Tensor]:
        """Adds x [T, d] to the residual [T, d] (None: x starts the stream). Returns the norm of the
        sum, in the form that `reader` takes (unquantized if reader is None or the norm is centred),
        and the sum."""
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
        """Returns the norm of x [T, d], without the residual stream."""
        return wide(self._of(ops, x, "wide"))

    def _of(self, ops: Ops, x: Tensor, form: Form) -> Rows:
        if not self.centred:
            return ops.rms_norm(x, self.weight.value, self.eps, form)
        full = x.float()  # rounded once, after the norm
        centred = full - full.mean(-1, keepdim=True)
        return wide(ops.rms_norm(centred, self.weight.value, self.eps, "wide")).to(x.dtype)

    def weights(self) -> Iterator[Weight]:
        if not self.made:
            yield self.weight
        if self.first is not None:
            yield from self.first.weights()

    def last(self, ops: Ops, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the norm of x + residual [T, d] for the head."""
        return wide(self(ops, x, residual, None)[0])


@dataclass(slots=True)
class WholeNorms:
    """Norms over all query heads and over all key heads of a fused product (OLMo 2,
    arXiv:2501.00656), and OLMo's clip."""

    q: Norm  # over this rank's heads
    k: Norm
    clip: float | None
    layout: Layout

    def __call__(self, ops: Ops, qkv: Tensor) -> Tensor:
        """Norms q and k of qkv [T, (H + 2 Hkv) * D] in place, clips all of it, and returns it."""
        first, last = self.q.weight.shape[0], self.q.weight.shape[0] + self.k.weight.shape[0]
        for part, norm in zip((qkv[:, :first], qkv[:, first:last]), (self.q, self.k), strict=True):
            part.copy_(
                norm.alone(ops, part) if self.layout.size == 1 else self._over_ranks(part, norm)
            )
        return qkv if self.clip is None else qkv.clamp_(-self.clip, self.clip)

    def _over_ranks(self, part: Tensor, norm: Norm) -> Tensor:
        """Norms a part divided over ranks. All ranks hold equally many heads and all heads are on
        equally many ranks, so the mean of the ranks' means is the mean."""
        full, weight = part.float(), norm.weight.value
        mean = self.layout.all_gather(full.square().mean(-1, keepdim=True)).mean(0)
        normed = full * (mean + norm.eps).rsqrt()
        return normed * weight if weight.dtype == torch.float32 else normed.to(part.dtype) * weight
