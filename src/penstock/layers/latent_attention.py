"""LatentAttention: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The cache stores
one vector a token, the latent, which all heads read.

A head's key and value are two linear maps of the latent, both in the matrix `up`.
`ops.AttentionOverLatents` either makes keys and values, or multiplies queries and outputs by `up`
instead.

Shapes: T tokens, S of them whose output is needed, d hidden size, rank numbers of a latent, turning
numbers of the shared rotated key, still numbers of a head's key that don't rotate, value numbers of
a head's value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.latent import LatentSizes
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import LatentForm, LatentKv, StateForm
from penstock.layers.linear import Linear
from penstock.layers.maker import Maker
from penstock.layers.norm import Norm
from penstock.layers.rope_config import RopeConfig
from penstock.parallel.sharded_weight import Part, Weight

NORM_EPS = 1e-6  # eps of both latent norms; the config's eps is for other norms


@dataclass(slots=True)
class LatentAttention:
    """The layer. into: one product that gives the query latent (or this rank's queries, if queries
    have no latent), then the latent to store."""

    name: str  # prefix of its tensors' names in a checkpoint, before `.kv_b_proj`
    kind: AttentionKind  # has one KV head, of rank + turning numbers
    form: StateForm
    cos_sin: Tensor  # rotary table [positions, 2, turning / 2] float32
    sizes: LatentSizes
    # [query rank + rank + turning, d], or [heads * (still + turning) + rank + turning, d]
    into: Linear
    query_norm: Norm | None  # norm of the query latent; None: queries have no latent
    query: Linear | None  # [heads * (still + turning), query rank]: makes queries of their latent
    norm: Norm  # [rank]: norm of the latent to store
    up: Linear  # [heads * (still + value), rank]: makes keys and values of a latent
    out: Linear  # [d, heads * value]: output projection
    # True: the checkpoint rotates neighbours together; prepare() moves even numbers first
    pairs: bool
    query_scale: Tensor | None  # [positions]: factor of a query at each position
    by_head: Tensor = field(init=False)  # [heads, still + value, rank]: `up` in the model's dtype

    source: None = None

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, kv: LatentKv) -> Tensor:
        """Returns [S, d] for the S tokens of the step whose output is needed. x: [T, d]."""
        s, plan = self.sizes, step.plans[self.kind]
        whole = self.into(ops, x)
        given = whole[:, -s.width :]
        q = whole[:, : -s.width]
        if self.query is not None and self.query_norm is not None:
            q = self.query(ops, self.query_norm.alone(ops, q))
        q = q.reshape(-1, self.kind.heads, s.head)
        if self.query_scale is not None:
            q.mul_(self.query_scale.index_select(0, step.positions)[:, None, None])
        norm, up = self.norm, self.by_head
        asked = ops.latent_store(
            given, q, norm.weight.value, norm.eps, self.cos_sin, step, kv, plan, up
        )
        q = step.keep(q)
        if asked is not None:
            asked = step.keep(asked)
        return self.out(
            ops, ops.latent_attention(q, up, kv, step, self.kind, plan, asked).flatten(1)
        )

    @property
    def reader(self) -> Linear:
        return self.into

    def matrices(self) -> Iterator[Linear]:
        yield self.into
        if self.query is not None:
            yield self.query
        # `up` is left out: `by_head`, in the model's dtype, is used instead
        yield self.out

    def weights(self) -> Iterator[Weight]:
        yield self.norm.weight
        if self.query_norm is not None:
            yield self.query_norm.weight
        for matrix in (*self.matrices(), self.up):
            yield from matrix.weights()

    def prepare(self, ops: Ops) -> None:
        if self.pairs:
            self._reorder()
        for matrix in (*self.matrices(), self.up):
            matrix.prepare(ops)
        s = self.sizes
        one = torch.eye(s.rank, dtype=ops.dtype, device=self.cos_sin.device)
        # [rank, heads * (still + value)]: `up` in the model's dtype, however it is quantized
        made = self.up(ops, one)
        self.by_head = made.T.contiguous().view(self.kind.heads, s.still + s.value, s.rank)
        self.up.product = None

    def _reorder(self) -> None:
        """Permutes the rotated rows so that the halves of a head rotate together."""
        s = self.sizes
        turned = torch.cat((torch.arange(0, s.turning, 2), torch.arange(1, s.turning, 2)))
        q = torch.arange(self.kind.heads * (s.head)).view(self.kind.heads, -1)
        q[:, s.still :] = q[:, s.still + turned]
        stored = torch.cat((torch.arange(s.rank), s.rank + turned))
        if self.query is None:
            self.into.reorder(torch.cat((q.flatten(), q.numel() + stored)))
            return
        self.query.reorder(q.flatten())
        assert self.query_norm is not None, "the queries' vector is normed"
        ahead = self.query_norm.weight.shape[0]
        self.into.reorder(torch.cat((torch.arange(ahead), ahead + stored)))


def make_latent_attention(
    make: Maker,
    at: str,
    hidden: int,
    heads: int,
    sizes: LatentSizes,
    rope: RopeConfig,
    *,
    scale: float,
    query_rank: int | None,
    pairs: bool,
    bias: bool = False,
    query_growth: float = 0.0,
) -> LatentAttention:
    """Makes a layer from a checkpoint's q_proj (with query_rank: q_a_proj, q_a_layernorm and
    q_b_proj), kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj.

    at: prefix of these names. hidden: hidden size. heads: number over all ranks, which divide the
    heads; every rank stores whole latents. query_rank: size of the query latent; None: queries have
    none. scale: factor of scores. pairs: see LatentAttention. bias: True if the products that read
    x, and o_proj, have biases. query_growth: see DenseConfig."""
    s, cut = sizes, make.layout.share(heads, f"heads of {at}")
    own = heads // cut[0]
    stored, queries = Part(f"{at}.kv_a_proj_with_mqa", (s.width, hidden)), heads * s.head
    first = Part(f"{at}.q_proj", (queries, hidden), 0, *cut)
    query = query_norm = None
    if query_rank is not None:
        first = Part(f"{at}.q_a_proj", (query_rank, hidden))
        query = make.column_linear([(f"{at}.q_b_proj", queries, heads)], query_rank)
        query_norm = make.norm(f"{at}.q_a_layernorm.weight", query_rank, NORM_EPS)
    kind = AttentionKind(
        heads=own,
        kv_heads=1,
        width=s.width,
        rope=make.rope_number(rope, s.turning),
        window=None,
        scale=scale,
        value_width=s.rank,
        latent=s,
    )
    return LatentAttention(
        at,
        kind,
        LatentForm(s.width, s.rank, make.dtype),
        make.rope_tables[rope, s.turning],
        s,
        make.fused_linear([first, stored], bias),
        query_norm,
        query,
        make.norm(f"{at}.kv_a_layernorm.weight", s.rank, NORM_EPS),
        make.column_linear([(f"{at}.kv_b_proj", heads * (s.still + s.value), heads)], s.rank),
        make.row_linear(f"{at}.o_proj", hidden, heads * s.value, heads, bias=bias),
        pairs,
        make.query_scale(rope, query_growth),
    )
