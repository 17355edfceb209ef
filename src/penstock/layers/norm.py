"""Norm: a norm fused with the residual addition. It is an RMS norm, or with centring a layer norm.
T: tokens of a step, d: hidden size."""

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

    # [d]; float32 if x is multiplied by it before rounding to the model's dtype (Gemma)
    weight: Weight
    eps: float
    first: Norm | None = None  # norm of x before it is added to the stream
    centred: bool = False  # subtract the mean first: a layer norm (arXiv:1607.06450) without a bias
    made: bool = False  # True: the weight is all ones and not stored in checkpoints

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, reader: Linear | None
    ) -> tuple[Rows, Tensor]:
        """Adds x [T, d] to the residual [T, d] (None: x starts the stream). Returns the norm of the
        sum, and the sum. The norm is quantized as `reader` needs its input; it is not quantized if
        reader is None or the norm is centred."""
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
        full = x.float()  # computed in float32 and rounded once, at the end
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
    """Norms of q over all query heads and of k over all KV heads of a fused product (OLMo 2,
    arXiv:2501.00656). clip: bound of the magnitudes of q, k and v after the product (OLMoE)."""

    q: Norm  # the weight is of this rank's query heads
    k: Norm
    clip: float | None
    layout: Layout

    def __call__(self, ops: Ops, qkv: Tensor) -> Tensor:
        """Norms q and k of qkv [T, (H + 2 Hkv) * D] in place, clips q, k and v, and returns qkv. H
        query heads, Hkv KV heads, D numbers of a head."""
        first, last = self.q.weight.shape[0], self.q.weight.shape[0] + self.k.weight.shape[0]
        for part, norm in zip((qkv[:, :first], qkv[:, first:last]), (self.q, self.k), strict=True):
            part.copy_(
                norm.alone(ops, part) if self.layout.size == 1 else self._over_ranks(part, norm)
            )
        return qkv if self.clip is None else qkv.clamp_(-self.clip, self.clip)

    def _over_ranks(self, part: Tensor, norm: Norm) -> Tensor:
        """Norms q or k whose heads are divided among ranks. The mean of the ranks' means of squares
        is the mean over all heads, since all ranks hold equally many heads and each head is on
        equally many ranks."""
        full, weight = part.float(), norm.weight.value
        mean = self.layout.all_gather(full.square().mean(-1, keepdim=True)).mean(0)
        normed = full * (mean + norm.eps).rsqrt()
        return normed * weight if weight.dtype == torch.float32 else normed.to(part.dtype) * weight
