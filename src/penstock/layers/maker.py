"""Maker: makes layers for one dtype, device and rank. Their weights are not loaded; each weight
knows its names in a checkpoint.

A model's file chooses the layers. This module chooses, for each matrix, the fused checkpoint
tensors, the share of this rank and the scheme. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.inputs import TILE, AttentionKind, VocabularyPart
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.state_forms import RecurrentForm, StatePart
from penstock.layers.attention import Attention
from penstock.layers.embedding import Embedding
from penstock.layers.gate_form import GateForm
from penstock.layers.linear import Linear
from penstock.layers.mlp import Activation, Mlp, Relu2Mlp
from penstock.layers.norm import Norm, WholeNorms
from penstock.layers.rope import lanes, rope_table
from penstock.layers.rope_config import RopeConfig
from penstock.layers.short_conv import WINDOW, ShortConv
from penstock.parallel.layout import ALONE, Layout
from penstock.parallel.sharded_weight import Part, Weight
from penstock.quant.choose import SchemeOf, all_plain
from penstock.quant.gathered import Gathered
from penstock.quant.scheme import Scheme

SHOWN = 4  # most names listed in an error


@dataclass(slots=True, kw_only=True)
class Heads:
    """Numbers of query heads and KV heads, over all ranks, and the width of a head."""

    heads: int
    kv_heads: int
    width: int


@dataclass(slots=True)
class Maker:
    """Makes layers. positions: length of rotary tables. table_in_host: True puts `own_table` in
    host memory if the model is on a GPU. predicts: True makes the model's mtp layer too, for
    drafts. On torch's meta device no memory is allocated."""

    dtype: torch.dtype
    device: torch.device
    positions: int
    layout: Layout = ALONE
    scheme_of: SchemeOf = all_plain
    table_in_host: bool = False
    predicts: bool = False
    rope_tables: dict[tuple[RopeConfig, int], Tensor] = field(default_factory=dict)
    # cached by rope alone, since a model has one growth
    query_scales: dict[RopeConfig, Tensor] = field(default_factory=dict)

    def norm(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        one_plus: bool = False,
        wide: bool = False,
        first: Norm | None = None,
        centred: bool = False,
        scale: float = 1.0,
    ) -> Norm:
        """Makes a norm. wide: multiply by the weight before rounding to the model's dtype.
        one_plus: like wide, but multiply by 1 + the stored weight. first: norm of x before it is
        added to the stream. centred: make a layer norm. scale: factor of the norm, which its weight
        takes in at load."""
        assert scale == 1.0 or not one_plus, "a weight has one transform"
        dtype = torch.float32 if wide or one_plus else self.dtype
        transform = (
            _one_plus if one_plus else None if scale == 1.0 else partial(torch.mul, other=scale)
        )
        return Norm(
            Weight([Part(name, (size,))], dtype, self.device, transform=transform),
            eps,
            first,
            centred,
        )

    def bare_norm(self, size: int, eps: float) -> Norm:
        """Makes a norm that has no weight in the checkpoint: its weight is 1."""
        ones = Weight([Part("", (size,))], torch.float32, self.device)
        ones.value.fill_(1.0)
        return Norm(ones, eps, made=True)

    def whole_norms(
        self,
        names: Sequence[str],
        shape: Heads,
        eps: float,
        *,
        wide: bool = False,
        clip: float | None = None,
    ) -> WholeNorms:
        """Makes norms of q and k over all heads; a rank holds the weights of its heads. names:
        names of q's and k's norm."""
        dtype, norms = torch.float32 if wide else self.dtype, []
        for name, heads in zip(names, (shape.heads, shape.kv_heads), strict=True):
            cut = self.layout.share(heads, name, repeats=True)
            part = Part(f"{name}.weight", (heads * shape.width,), 0, *cut)
            norms.append(Norm(Weight([part], dtype, self.device), eps))
        return WholeNorms(norms[0], norms[1], clip, self.layout)

    def embedding(
        self,
        name: str,
        vocabulary: int,
        size: int,
        *,
        scale: float = 1.0,
        norm: Norm | None = None,
        tied: str | None = None,
    ) -> Embedding:
        """Makes the embedding. scale: factor of its vectors. norm: norm of its vectors. tied: name
        under which a checkpoint may store the table a second time, as the head."""
        again = () if tied is None else (tied,)
        rows = self._of_vocabulary(name, vocabulary, size)
        table = Weight([rows], self.dtype, self.device, again=again)
        summed, first = (None, 0) if rows.cut is None else (self.layout, rows.bounds[0])
        return Embedding(table, torch.tensor(scale, dtype=self.dtype).item(), first, summed, norm)

    def own_table(self, name: str, vocabulary: int, size: int, *, scale: float) -> Embedding:
        """Makes a second embedding table, for per-layer inputs, which every rank holds whole.
        scale: factor of its rows."""
        table = Gathered(
            Part(name, (vocabulary, size)), self.dtype, self.device, in_host=self.table_in_host
        )
        return Embedding(table, torch.tensor(scale, dtype=self.dtype).item())

    def head(self, name: str, vocabulary: int, into: int) -> Linear:
        """Makes the head, the product that scores all tokens. Ranks divide the tokens as in the
        embedding."""
        return self.fused_linear([self._of_vocabulary(name, vocabulary, into)], bias=False)

    def vocabulary(self, size: int) -> VocabularyPart | None:
        """Returns the range of tokens that this rank's head scores; None: all tokens."""
        rows = self._of_vocabulary("", size, 0)
        if rows.cut is None:
            return None
        return VocabularyPart(
            rows.bounds[0], size, self.layout.rank, self.layout.size, self.layout.all_gather
        )

    def vocabulary_range(self, size: int) -> slice:
        """Returns the tokens, of `size`, that this rank's head scores."""
        rows = self._of_vocabulary("", size, 0)
        if rows.cut is None:
            return slice(None)
        first, count = rows.bounds
        return slice(first, first + count)

    def linear(self, name: str, out: int, into: int, *, bias: bool = False) -> Linear:
        """Makes a matrix that every rank holds whole."""
        return self.fused_linear([Part(name, (out, into))], bias)

    def column_linear(
        self,
        parts: Sequence[tuple[str, int, int]],
        into: int,
        *,
        bias: bool = False,
        fused: str | None = None,
    ) -> Linear:
        """Makes one product of several matrices whose outputs are divided among ranks. parts:
        (name, outputs, number of indivisible pieces such as heads) of each matrix. fused: name of
        the one tensor, if the checkpoint stores all matrices in it."""
        share = self.layout.share
        cut = [
            Part(name, (out, into), 0, *share(pieces, name, repeats=True))
            for name, out, pieces in parts
        ]
        return self.fused_linear(cut if fused is None else [Part.of_fused(fused, cut)], bias)

    def row_linear(
        self,
        name: str,
        out: int,
        into: int,
        pieces: int,
        *,
        bias: bool = False,
        in_parts: bool = False,
    ) -> Linear:
        """Makes a matrix whose inputs are divided among ranks, which add their results. pieces:
        number of indivisible pieces of the inputs. in_parts: True: the ranks don't add, and the
        caller does."""
        assert not (bias and in_parts), "a bias is added once, behind the sum"
        if self.layout.size == 1:
            return self.linear(name, out, into, bias=bias)
        part = Part(name, (out, into), 1, *self.layout.share(pieces, name))
        return self.fused_linear([part], bias, None if in_parts else self.layout)

    def attention(
        self,
        at: str,
        hidden: int,
        shape: Heads,
        rope: RopeConfig,
        *,
        into: int | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norms: tuple[Norm, Norm] | None = None,
        between: WholeNorms | None = None,
        fused: bool = False,
        query_growth: float = 0.0,
        sinks: bool = False,
        gate: GateForm | None = None,
        out: str = "o_proj",
        turned_first: bool = False,
        keys_as_values: bool = False,
        normed_values: bool = False,
    ) -> Attention:
        """Makes attention. at: prefix of `.q_proj` (fused: `.qkv_proj`) and of `out`. into: size of
        its input; None: hidden. window: see AttentionKind. scale: factor of scores; None: width **
        -0.5. norms: norms of q's and k's heads, before rotation, or after it with turned_first.
        between: norms over all heads. query_growth: see DenseConfig. sinks: True loads a score per
        head from `.sinks`. keys_as_values, normed_values: see AttentionKind."""
        heads, kv_heads, width = shape.heads, shape.kv_heads, shape.width
        kind = AttentionKind(
            heads=heads // self.layout.share(heads, f"heads of {at}")[0],
            kv_heads=kv_heads
            // self.layout.share(kv_heads, f"key and value heads of {at}", repeats=True)[0],
            width=width,
            rope=self.rope_number(rope, width),
            window=window,
            scale=width**-0.5 if scale is None else scale,
            softcap=softcap,
            turned_first=turned_first,
            keys_as_values=keys_as_values,
            normed_values=normed_values,
        )
        parts = [
            (
                f"{at}.q_proj",
                heads * width * (2 if gate is not None and gate.name is None else 1),
                heads,
            ),
            *(
                (f"{at}.{n}_proj", kv_heads * width, kv_heads)
                for n in ("k" if keys_as_values else "kv")
            ),
        ]
        opening = None
        if gate is not None and gate.name is not None:
            opening = self.column_linear(
                [(f"{at}.{gate.name}", heads if gate.a_head else heads * width, heads)], hidden
            )
        q_norm, k_norm = norms or (None, None)
        return Attention(
            at,
            kind,
            KvForm(kind.kv_heads, width, self.dtype, self.dtype),
            self.rope_tables[rope, width],
            self.column_linear(
                parts, into or hidden, bias=qkv_bias, fused=f"{at}.qkv_proj" if fused else None
            ),
            self.row_linear(f"{at}.{out}", hidden, heads * width, heads, bias=out_bias),
            q_norm,
            k_norm,
            between,
            lanes(rope, width),
            self.query_scale(rope, query_growth),
            self._sinks(at, heads) if sinks else None,
            gate,
            opening,
        )

    def mlp(
        self,
        at: str,
        hidden: int,
        middle: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        fused: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        in_parts: bool = False,
    ) -> Mlp:
        """Makes an MLP with `middle` numbers between its matrices. at: prefix of the `names` of
        gate, up and down (fused: of `.gate_up_proj`). in_parts: True: the ranks don't add their
        results, and the caller does."""
        *first, down = (f"{at}.{name}" for name in names)
        both = f"{at}.gate_up_proj" if fused else None
        gate_up = self.column_linear(
            [(name, middle, middle) for name in first], hidden, bias=bias, fused=both
        )
        return Mlp(
            gate_up,
            self.row_linear(down, hidden, middle, middle, bias=bias, in_parts=in_parts),
            activation,
        )

    def short_conv(self, at: str, channels: int, taps: int, *, bias: bool = False) -> ShortConv:
        """Makes a short convolution. at: prefix of `.in_proj`, `.conv` and `.out_proj`. Ranks
        divide the channels."""
        parts = [
            (f"{at}.in_proj.{part}", channels, channels) for part in ("gate", "out_gate", "value")
        ]
        cut = self.layout.share(channels, f"channels of {at}")
        own = channels // cut[0]
        return ShortConv(
            at,
            RecurrentForm((StatePart(WINDOW, (taps, own), self.dtype, beside=0),)),
            self.column_linear(parts, channels, bias=bias, fused=f"{at}.in_proj"),
            Weight(
                [Part(f"{at}.conv.weight", (channels, 1, taps), 0, *cut)], self.dtype, self.device
            ),
            (
                Weight([Part(f"{at}.conv.bias", (channels,), 0, *cut)], self.dtype, self.device)
                if bias
                else None
            ),
            self.row_linear(f"{at}.out_proj", channels, channels, channels, bias=bias),
        )

    def relu2_mlp(self, at: str, hidden: int, middle: int, *, in_parts: bool = False) -> Relu2Mlp:
        """Makes an ungated MLP with squared ReLU. at: prefix of `.up_proj` and `.down_proj`.
        in_parts: see `mlp`."""
        up = self.column_linear([(f"{at}.up_proj", middle, middle)], hidden)
        return Relu2Mlp(
            up, self.row_linear(f"{at}.down_proj", hidden, middle, middle, in_parts=in_parts)
        )

    def _sinks(self, at: str, heads: int) -> Weight:
        part = Part(f"{at}.sinks", (heads,), 0, *self.layout.share(heads, f"heads of {at}"))
        return Weight([part], torch.float32, self.device)

    def _of_vocabulary(self, name: str, vocabulary: int, size: int) -> Part:
        """Returns the Part of a matrix [vocabulary, size] whose tokens are divided among ranks.
        Cuts go between sampling's tiles of 128 tokens. If there are fewer tiles than ranks, every
        rank holds the whole matrix and samples alone."""
        if self.layout.size == 1 or vocabulary <= TILE * (self.layout.size - 1):
            return Part(name, (vocabulary, size))
        return Part(name, (vocabulary, size), 0, self.layout.size, self.layout.rank, TILE)

    def query_scale(self, rope: RopeConfig, growth: float) -> Tensor | None:
        """Returns the factor of queries at each position, [positions]. None: the factor is 1
        everywhere, as no position exceeds the rope's original context. growth: see
        DenseConfig.query_growth."""
        if growth == 0.0 or self.positions <= rope.original_context:
            return None
        if rope not in self.query_scales:
            at = torch.arange(self.positions, device=self.device) // rope.original_context
            self.query_scales[rope] = (1 + growth * torch.log(1 + at)).to(self.dtype)
        return self.query_scales[rope]

    def rope_number(self, rope: RopeConfig, width: int) -> int:
        """Returns the index of the rotary table in `rope_tables`, which layers with the same
        rotation share. width: of a head."""
        if (rope, width) not in self.rope_tables:
            self.rope_tables[rope, width] = rope_table(rope, width, self.positions, self.device)
        return list(self.rope_tables).index((rope, width))

    def fused_linear(
        self, parts: list[Part], bias: bool = False, summed: Layout | None = None
    ) -> Linear:
        """Makes the product with several checkpoint tensors, one below the other. parts: this
        rank's shares of them. summed: see Linear."""
        scheme = self.scheme_for(parts)
        loaded = scheme.weights(parts, self.dtype, self.device)
        added = None
        if bias:
            rows = [
                (
                    p.over(f"{p.name}.bias", p.shape[:1])
                    if p.cut == 0
                    else Part(f"{p.name}.bias", p.shape[:1])
                )
                for p in parts
            ]
            added = Weight(rows, self.dtype, self.device)
        return Linear(loaded, added, scheme=scheme, summed=summed)

    def scheme_for(self, parts: list[Part]) -> Scheme:
        """Returns the scheme of matrices that are to be fused. Raises CheckpointError if they have
        different schemes."""
        schemes = {self.scheme_of(part.name) for part in parts}
        if len(schemes) > 1:
            names = ", ".join([part.name for part in parts][:SHOWN]) + (
                ", ..." if len(parts) > SHOWN else ""
            )
            raise CheckpointError(
                f"{names} are multiplied together and must have one scheme, and the checkpoint has"
                " them in several: take another quantization of this model"
            )
        return schemes.pop()


def _one_plus(weight: Tensor) -> Tensor:
    return weight + 1.0
