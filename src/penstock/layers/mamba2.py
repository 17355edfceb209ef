"""Mamba2: the Mamba2 recurrent layer (arXiv:2405.21060). Its state is a matrix per head, and its
decay depends on the token. kernels/mamba2.py has the formulas. Shapes: T tokens, S of them whose
output is needed, d hidden size, size numbers of a token's x."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import RecurrentForm, StateForm, StatePart
from penstock.layers.delta_net import MATRIX
from penstock.layers.linear import Linear
from penstock.layers.maker import Maker
from penstock.layers.short_conv import WINDOW
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Part, Weight


@dataclass(slots=True)
class GatedGroupNorm:
    """Computes the RMS norm of x * silu(gate) in groups of neighbouring numbers, times weight.
    weight None: no norm. spans: number of neighbouring ranks that share a group."""

    weight: Weight | None  # [size]: weight of the norm
    groups: int  # number of groups on this rank
    eps: float
    layout: Layout
    spans: int

    def __call__(self, ops: Ops, x: Tensor, gate: Tensor, reader: Linear) -> Rows:
        """Returns [T, size], quantized as `reader` needs its input. x, gate: [T, size]."""
        weight = None if self.weight is None else self.weight.value
        if weight is None or self.spans == 1:
            return ops.gated_norm(x, gate, weight, self.groups, self.eps, reader.form(x.shape[0]))
        wide = x.float() * torch.nn.functional.silu(gate.float())
        means = self.layout.all_gather(wide.square().mean(-1, keepdim=True))
        first = self.layout.rank // self.spans * self.spans
        mean = means[first : first + self.spans].mean(0)
        return (wide * (mean + self.eps).rsqrt()).to(x.dtype) * weight


@dataclass(slots=True)
class Mamba2:
    """Computes out(norm(recurrence(conv(x, B, C), dt), z)). One product gives z, x, B, C and dt.
    Shapes: d is the hidden size, taps the number of tokens that the convolution sees; heads, size,
    channels and columns are those of Mamba2Heads."""

    name: str  # prefix of its tensors' names in a checkpoint, before `.in_proj`
    form: StateForm
    heads: Mamba2Heads
    into: Linear  # [columns, d]: z, x, B, C, dt
    taps: Weight  # [channels, 1, taps]: weights of the convolution
    taps_bias: Weight | None  # [channels]: bias of the convolution
    decay: Weight  # [heads] float32: the checkpoint's A_log
    step_bias: Weight  # [heads] float32: the checkpoint's dt_bias
    skip: Weight  # [heads] float32: the checkpoint's D
    norm: GatedGroupNorm
    out: Linear  # [d, size]: output projection
    column_scales: Tensor | None  # [columns]: factors of the outputs of `into`
    small: Mamba2Weights | None = field(default=None, init=False)

    kind: None = None  # None: the layer is not attention
    cos_sin: None = None
    source: None = None

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: dict[str, Tensor]) -> Tensor:
        """Returns [S, d] for the S tokens of the step whose output is needed. x: [T, d]. state: the
        layer's named arrays, updated in place."""
        assert self.small is not None, "a layer is prepared before it is used"
        given = self.into(ops, x)
        if self.column_scales is not None:
            given.mul_(self.column_scales)
        mixed = step.keep(
            ops.mamba2(given, self.heads, self.small, state[WINDOW], state[MATRIX], step)
        )
        return self.out(
            ops, self.norm(ops, mixed, step.keep(given)[:, : self.heads.size], self.out)
        )

    @property
    def reader(self) -> Linear:
        return self.into

    def weights(self) -> Iterator[Weight]:
        yield from (self.taps, self.decay, self.step_bias, self.skip)
        yield from (weight for weight in (self.taps_bias, self.norm.weight) if weight is not None)
        for matrix in self.matrices():
            yield from matrix.weights()

    def matrices(self) -> Iterator[Linear]:
        yield from (self.into, self.out)

    def prepare(self, ops: Ops) -> None:
        for matrix in self.matrices():
            matrix.prepare(ops)
        self.small = Mamba2Weights(
            self.taps.value.squeeze(1),
            None if self.taps_bias is None else self.taps_bias.value,
            -torch.exp(self.decay.value),
            self.step_bias.value,
            self.skip.value,
        )


def make_mamba2(
    make: Maker,
    at: str,
    hidden: int,
    heads: Mamba2Heads,
    taps: int,
    eps: float | None,
    state: torch.dtype,
    *,
    bias: bool = False,
    out_bias: bool = False,
    taps_bias: bool = True,
    columns: Sequence[float] = (),
) -> Mamba2:
    """Makes a layer from a checkpoint's in_proj, conv1d, A_log, dt_bias, D, norm and out_proj.

    at: prefix of these names. hidden: hidden size. heads: heads over all ranks, which divide the
    heads, and the groups as far as possible. taps: tokens that the convolution sees. eps: of the
    norm; None: no norm. state: dtype of the state matrices. bias, out_bias, taps_bias: True if
    in_proj, out_proj and conv1d have a bias. columns: factors of z, x, B, C and dt after in_proj;
    empty: all 1."""
    h, device = heads, make.device
    of_heads = make.layout.share(h.heads, f"heads of {at}")
    of_groups = make.layout.share(h.groups, f"groups of {at}", repeats=True)
    own = replace(h, heads=h.heads // of_heads[0], groups=h.groups // of_groups[0])
    convolved = [
        ("x", h.size, of_heads),
        ("B", h.group_size, of_groups),
        ("C", h.group_size, of_groups),
    ]

    def parts(name: str, columns: list[tuple[str, int, tuple[int, int]]], *shape: int) -> Part:
        cut = [
            Part(f"{at}.{name}.{letter}", (size, *shape), 0, *share)
            for letter, size, share in columns
        ]
        return Part.of_fused(f"{at}.{name}", cut)

    def by_head(name: str, size: int = 1, dtype: torch.dtype = torch.float32) -> Weight:
        return Weight([Part(f"{at}.{name}", (h.heads * size,), 0, *of_heads)], dtype, device)

    of_all = [("z", h.size, of_heads), *convolved, ("dt", h.heads, of_heads)]
    keeps = (
        StatePart(WINDOW, (taps, own.channels), make.dtype, beside=own.heads),
        StatePart(MATRIX, (own.heads, own.state_width, own.head_width), state, sums=True),
    )
    norm = None if eps is None else by_head("norm.weight", h.head_width, make.dtype)
    spans = max(1, make.layout.size // h.groups)
    sizes = torch.tensor([own.size, own.size, own.group_size, own.group_size, own.heads])
    scales = (
        torch.tensor(columns).repeat_interleave(sizes).to(device, make.dtype) if columns else None
    )
    return Mamba2(
        at,
        RecurrentForm(keeps),
        own,
        make.fused_linear([parts("in_proj", of_all, hidden)], bias),
        Weight([parts("conv1d.weight", convolved, 1, taps)], make.dtype, device),
        Weight([parts("conv1d.bias", convolved)], make.dtype, device) if taps_bias else None,
        by_head("A_log"),
        by_head("dt_bias"),
        by_head("D"),
        GatedGroupNorm(norm, own.groups, eps or 0.0, make.layout, spans),
        make.row_linear(f"{at}.out_proj", hidden, h.size, h.heads, bias=out_bias),
        scales,
    )
