"""RMS norms in plain torch, computed in float32. A weight of the model's dtype is applied after
rounding to that dtype, as in HF's Llama; a float32 weight is applied before it, as in HF's Gemma.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.reference.linear.fp8 import in_form


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: Form = "wide") -> Rows:
    """Returns weight * (x / rms(x)) in x's dtype. x: [..., d], for another form [T, d]. weight:
    [d]."""
    return in_form(_rms_norm(x, weight, eps), form)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    form: Form = "wide",
    first: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    """Returns (norm of the sum, the sum) of x and residual [T, d]; residual is overwritten with the
    sum. first: weight of a norm of x before the sum."""
    residual += x if first is None else _rms_norm(x, first, eps)
    return rms_norm(residual, weight, eps, form), residual


def add_rms_norms(
    x: Tensor, residual: Tensor, first: Tensor, weights: tuple[Tensor, ...], eps: float
) -> tuple[list[Tensor], Tensor]:
    """Returns (norms of the sum, the sum) of residual [T, d] and the norm of x [T, d]; residual is
    overwritten with the sum. first: weight of the norm of x. weights: of the sum's norms."""
    residual += _rms_norm(x, first, eps)
    return [_rms_norm(residual, weight, eps) for weight in weights], residual


def add_normed(
    stream: Tensor,
    parts: tuple[tuple[Tensor, Tensor], ...],
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
) -> Tensor:
    """Returns (stream + made) * scale, written to stream [T, d]. parts: one or two of x [T, d] and
    the weight of its norm. weight: made is the norm of the sum of two normed parts; None: made is
    the one normed part. scale: [1]; None: 1."""
    made, *others = (_rms_norm(x, of_part, eps) for x, of_part in parts)
    if weight is not None:
        made = _rms_norm(made.add_(others[0]), weight, eps)
    stream += made
    return stream if scale is None else stream.mul_(scale)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if weight.dtype == torch.float32 else x
    return F.rms_norm(wide, x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
