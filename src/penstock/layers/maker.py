"""Maker: makes layers for one dtype, device and rank, each weight with its names in a checkpoint.

A model's file says what is made of what; here is how a fused product, its cut and its scheme come together. It knows
no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import CheckpointError, UsageError
from penstock.kernels.inputs import AttentionKind
from penstock.kernels.layer_kv import KvForm
from penstock.layers.attention import Attention
from penstock.layers.embedding import Embedding
from penstock.layers.linear import Linear
from penstock.layers.mlp import Activation, Mlp
from penstock.layers.moe import Moe
from penstock.layers.norm import Norm
from penstock.layers.rope import rope_table
from penstock.layers.rope_config import RopeConfig
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.choose import SchemeOf, all_plain
from penstock.quant.scheme import PLAIN
from penstock.quant.weight import Part, Weight


@dataclass(slots=True, kw_only=True)
class Heads:
    """The shape of an attention, whole, over all ranks."""

    heads: int
    kv_heads: int
    width: int


@dataclass(slots=True)
class Maker:
    """positions: how many a rotary table holds. On torch's meta device nothing takes memory."""

    dtype: torch.dtype
    device: torch.device
    positions: int
    layout: Layout = ALONE
    scheme_of: SchemeOf = all_plain
    rope_tables: dict[tuple[RopeConfig, int], Tensor] = field(default_factory=dict)

    def norm(self, name: str, size: int, eps: float, *, one_plus: bool = False) -> Norm:
        """one_plus: the checkpoint has w, the norm multiplies by 1 + w, before it rounds."""
        if one_plus:
            return Norm(Weight([Part(name, (size,))], torch.float32, self.device, transform=_one_plus), eps)
        return Norm(Weight([Part(name, (size,))], self.dtype, self.device), eps)

    def embedding(
        self, name: str, vocabulary: int, size: int, *, scale: float = 1.0, tied: str | None = None
    ) -> Embedding:
        """tied: the name under which a checkpoint may hold the table once more, as the head."""
        again = () if tied is None else (tied,)
        table = Weight([Part(name, (vocabulary, size))], self.dtype, self.device, again=again)
        return Embedding(table, torch.tensor(scale, dtype=self.dtype).item())

    def linear(self, name: str, out: int, into: int, *, bias: bool = False) -> Linear:
        """A matrix that every rank holds whole."""
        return self._linear([Part(name, (out, into))], bias)

    def column_linear(self, parts: Sequence[tuple[str, int, int]], into: int, *, bias: bool = False) -> Linear:
        """Fuses matrices whose outputs are divided among ranks. parts: name, outputs, and in how many pieces (heads)
        they come."""
        share = self.layout.share
        cut = [Part(name, (out, into), 0, *share(pieces, name, repeats=True)) for name, out, pieces in parts]
        return self._linear(cut, bias)

    def row_linear(self, name: str, out: int, into: int, pieces: int, *, bias: bool = False) -> Linear:
        """A matrix whose inputs are divided among ranks, which add up their answers."""
        if self.layout.size == 1:
            return self.linear(name, out, into, bias=bias)
        return self._linear([Part(name, (out, into), 1, *self.layout.share(pieces, name))], bias, summed=self.layout)

    def attention(
        self, at: str, hidden: int, shape: Heads, rope: RopeConfig, *, window: int | None = None,
        scale: float | None = None, softcap: float | None = None, qkv_bias: bool = False, out_bias: bool = False,
        norms: tuple[Norm, Norm] | None = None,
    ) -> Attention:  # fmt: skip
        """at: the name before `.q_proj`.   scale: of scores, None: width ** -0.5.   norms: of q's and k's heads."""
        heads, kv_heads, width = shape.heads, shape.kv_heads, shape.width
        kind = AttentionKind(
            heads=heads // self.layout.share(heads, f"heads of {at}")[0],
            kv_heads=kv_heads // self.layout.share(kv_heads, f"key and value heads of {at}", repeats=True)[0],
            width=width,
            rope=self._rope_number(rope, width),
            window=window,
            scale=width**-0.5 if scale is None else scale,
            softcap=softcap,
        )
        fused = [
            (f"{at}.q_proj", heads * width, heads),
            *((f"{at}.{n}_proj", kv_heads * width, kv_heads) for n in "kv"),
        ]
        q_norm, k_norm = norms or (None, None)
        return Attention(
            at,
            kind,
            KvForm(kind.kv_heads, width, self.dtype, self.dtype),
            self.rope_tables[rope, width],
            self.column_linear(fused, hidden, bias=qkv_bias),
            self.row_linear(f"{at}.o_proj", hidden, heads * width, heads, bias=out_bias),
            q_norm,
            k_norm,
        )

    def mlp(self, at: str, hidden: int, middle: int, *, activation: Activation = "silu", bias: bool = False) -> Mlp:
        """at: the name before `.gate_proj`."""
        gate_up = self.column_linear([(f"{at}.{n}_proj", middle, middle) for n in ("gate", "up")], hidden, bias=bias)
        return Mlp(gate_up, self.row_linear(f"{at}.down_proj", hidden, middle, middle, bias=bias), activation)

    def moe(self, at: str, hidden: int, middle: int, experts: int, top_k: int, *, renormalise: bool) -> Moe:
        """at: the name before `.gate` (the router's) and `.experts`."""
        names = [f"{at}.experts.{number}" for number in range(experts)]
        if self.scheme_of(f"{names[0]}.gate_proj") is not PLAIN:
            raise UsageError(
                "experts are not quantized yet: leave --quantization out, and take the model's unquantized checkpoint",
                param="quantization",
            )
        gate_up = [Part(f"{name}.{n}_proj.weight", (middle, hidden)) for name in names for n in ("gate", "up")]
        down = [Part(f"{name}.down_proj.weight", (hidden, middle)) for name in names]
        return Moe(
            self.linear(f"{at}.gate", experts, hidden),
            Weight(gate_up, self.dtype, self.device, shape=(experts, 2 * middle, hidden)),
            Weight(down, self.dtype, self.device, shape=(experts, hidden, middle)),
            top_k,
            renormalise,
        )

    def _rope_number(self, rope: RopeConfig, width: int) -> int:
        """The number of a table in `rope_tables`: layers that turn alike share one."""
        if (rope, width) not in self.rope_tables:
            self.rope_tables[rope, width] = rope_table(rope, width, self.positions, self.device)
        return list(self.rope_tables).index((rope, width))

    def _linear(self, parts: list[Part], bias: bool, summed: Layout | None = None) -> Linear:
        schemes = {self.scheme_of(part.name) for part in parts}
        if len(schemes) > 1:
            names = ", ".join(part.name for part in parts)
            raise CheckpointError(
                f"{names} are multiplied together and must have one scheme, and the checkpoint has them in several: "
                "take another quantization of this model"
            )
        (scheme,) = schemes
        loaded = scheme.weights(parts, self.dtype, self.device)
        added = None
        if bias:
            rows = [Part(f"{p.name}.bias", p.shape[:1], 0 if p.cut == 0 else None, p.shares, p.share) for p in parts]
            added = Weight(rows, self.dtype, self.device)
        return Linear(loaded, added, scheme=scheme, summed=summed)


def _one_plus(weight: Tensor) -> Tensor:
    return weight + 1.0
