"""Attention: the layer of attention over a paged cache. It computes one fused product of q, k and
v, rotates q and k, stores k and v, attends, and multiplies by the output matrix.

`ops.attention` handles prefill, decode and prefix groups. This layer knows its AttentionKind and
uses the plan that the step has for that kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import StateForm
from penstock.layers.gate_form import GateForm
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm, WholeNorms
from penstock.parallel.sharded_weight import Weight

LARGE = 20.0  # log(1 + exp(x)) equals x from here on, in float32


@dataclass(slots=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. Shapes: T tokens of a step,
    S of them whose output is needed, d the hidden size, H query heads, D numbers of a head. width
    is D."""

    name: str  # prefix of its tensors' names in a checkpoint, before `.q_proj`
    kind: AttentionKind
    # storage of K and V; may be replaced between loading and the allocation of the cache
    form: StateForm
    cos_sin: Tensor  # rotary table [positions, 2, width / 2] float32, shared with other layers
    # [(heads + 2 kv_heads) * width, d]: rows of q, then k, then v (none with `kind.keys_as_values`)
    qkv: Linear
    out: Linear  # [d, heads * width]: output projection
    q_norm: Norm | None = None  # [width]: norm of each head of q before rotation (k_norm: of k)
    k_norm: Norm | None = None
    between: WholeNorms | None = None  # norms of q and k over all heads, before rotation
    lanes: list[int] | None = (
        # order in which kernels need the numbers of q's and k's heads; None: the checkpoint's order
        None
    )
    query_scale: Tensor | None = None  # [positions]: factor of the query at each position
    # [heads] float32: a score per head that takes part in the softmax, without a value
    sinks: Weight | None = None
    gate: GateForm | None = None
    opening: Linear | None = (
        # product that computes the gate; None: qkv computes it after v's rows, or there is no gate
        None
    )

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, kv: LayerKv) -> Tensor:
        """Returns [T, d], or [S, d] for the tokens that the step keeps. x: [T, d]. kv: this layer's
        cache, in `form`."""
        kind = self.kind
        q, whole = self.store(ops, x, step, kv)
        if self.query_scale is not None:
            q = q.mul_(self.query_scale.index_select(0, step.positions)[:, None, None])
        seen = ops.attention(step.keep(q), kv, step, kind, step.plans[kind], self.sink_scores)
        flat = seen.reshape(-1, kind.heads * kind.width)
        if self.gate is None:
            return self.out(ops, flat)
        gate = whole[:, self._qkv_size :] if self.opening is None else self.opening(ops, x)
        return self.out(ops, self._opened(ops, self.gate, flat, step.keep(gate)))

    def store(self, ops: Ops, x: Rows, step: StepInputs, kv: LayerKv) -> tuple[Tensor, Tensor]:
        """Stores K and V of x [T, d] without attending. Returns the rotated queries [T, H, D], and
        the whole product of qkv, which they may be a view of."""
        q_norm = None if self.q_norm is None else self.q_norm.weight.value
        k_norm = None if self.k_norm is None else self.k_norm.weight.value
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        qkv = whole = self.qkv(ops, x)
        if self._has_gates_in_q:
            qkv = whole[:, : self._qkv_size]
        if self.between is not None:
            qkv = self.between(ops, qkv)
        kind, plan = self.kind, step.plans[self.kind]
        q = ops.rotary_and_store(qkv, self.cos_sin, step, kv, kind, plan, q_norm, k_norm, eps)
        return q, whole

    def _opened(self, ops: Ops, form: GateForm, flat: Tensor, gate: Tensor) -> Rows:
        """Returns attention's output `flat` [S, H * D] times the gate's function. gate: its input
        [S, H * D], or one number a head [S, H]."""
        if not form.softplus:
            return ops.sigmoid_mul(flat, gate, self.out.form(flat.shape[0]))
        # Not torch's softplus: it computes the last elements of a thread's share by another
        # exponential, so a row's last bits would depend on the number of rows.
        full = gate.float()
        opened = torch.where(full > LARGE, full, full.exp().log1p()).to(flat.dtype)
        if not form.a_head:
            return flat * opened
        return (flat.view(-1, self.kind.heads, self.kind.width) * opened[:, :, None]).flatten(1)

    @property
    def source(self) -> None:
        """None: the layer stores its own K and V."""

    @property
    def reader(self) -> Linear | None:
        return self.qkv if self.opening is None else None

    def matrices(self) -> Iterator[Linear]:
        yield from (self.qkv, self.out)
        if self.opening is not None:
            yield self.opening

    def weights(self) -> Iterator[Weight]:
        norms = (
            (self.q_norm, self.k_norm) if self.between is None else (self.between.q, self.between.k)
        )
        for norm in norms:
            if norm is not None:
                yield from norm.weights()
        if self.sinks is not None:
            yield self.sinks
        for matrix in self.matrices():
            yield from matrix.weights()

    def prepare(self, ops: Ops) -> None:
        if self.lanes is not None or self._has_gates_in_q:
            self._reorder()
        for matrix in self.matrices():
            matrix.prepare(ops)

    @property
    def sink_scores(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.value

    @property
    def is_rotation_alone(self) -> bool:
        """True if queries and keys are rotated, but not normed or scaled."""
        return (
            self.q_norm is None
            and self.between is None
            and self.query_scale is None
            and self.gate is None
        )

    @property
    def _qkv_size(self) -> int:
        """Numbers of q, k and v in the product, before gates."""
        return (self.kind.heads + 2 * self.kind.kv_heads) * self.kind.width

    @property
    def _has_gates_in_q(self) -> bool:
        return self.gate is not None and self.opening is None

    def _reorder(self) -> None:
        """Permutes the rows of q's and k's heads, and their norms, to the kernels' order, where the
        halves of a head rotate together. If a checkpoint stores gate rows after each head of q,
        they are moved behind all other rows."""
        kind, width = self.kind, self.kind.width
        turned, gates = kind.heads + kind.kv_heads, kind.heads if self._has_gates_in_q else 0
        rows = torch.arange((turned + kind.kv_heads + gates) * width).view(-1, width)
        if gates:
            rows = torch.cat((rows[: 2 * gates : 2], rows[2 * gates :], rows[1 : 2 * gates : 2]))
        if self.lanes is not None:
            rows[:turned] = rows[:turned, torch.tensor(self.lanes)]
        self.qkv.reorder(rows.flatten())
        norms = (
            (self.q_norm, self.k_norm) if self.between is None else (self.between.q, self.between.k)
        )
        for norm in norms if self.lanes is not None else ():
            if norm is not None:
                order = torch.arange(norm.weight.shape[0]).view(-1, width)[:, self.lanes].flatten()
                norm.weight.reorder(order.to(norm.weight.value.device))
