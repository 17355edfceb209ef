"""A model whose layers keep state in every form that there is, each layer as simple as its form
allows.

    layer 0   attention, as models have it: keys and values by head
    layer 1   Fold: a sum that every token is folded into (recurrent, fixed per row), cut over ranks
    layer 2   Latent: attention over one vector a token, whose first part is its value
    layer 3   attention again
    layer 4   Reader: queries over the keys and values of layer 3
    layer 5   Fold again: the last layer too has to take a prompt's tokens in

In plain torch, token by token. A state that is stale, another's, or folded twice changes what comes
after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import LatentForm, LatentKv, RecurrentForm, StateForm, StatePart
from penstock.layers.attention import Attention
from penstock.layers.block import Block, Keeper
from penstock.layers.linear import Linear
from penstock.layers.maker import Maker
from penstock.models.decoder import Decoder
from penstock.models.dense import DenseConfig, build_dense
from penstock.models.model_config import ModelConfig
from penstock.parallel.layout import ALONE, Layout
from penstock.parallel.sharded_weight import Weight
from penstock.quant.choose import SchemeOf, all_plain

PIECES, WIDTH = 4, 8  # of what Fold keeps
LATENT, VALUE = 12, 8  # numbers of a latent vector, and of its value
KEEPS = 0.75  # of a sum, when the next token is folded in


@dataclass
class Kept:
    """What a toy layer keeps."""

    name: str
    form: StateForm
    kind: AttentionKind | None = None
    cos_sin: Tensor | None = None
    source: Keeper | None = None


class _Toy:
    """A block of two products and one keeper."""

    def __init__(self, into: Linear, out: Linear, kept: Kept) -> None:
        self.into, self.out, self.kept = into, out, kept

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        (own,) = state
        answer = self.out(ops, torch.tanh(self.mix(ops, self.into(ops, stream), step, own)))
        return step.keep(answer), step.keep(stream)

    def mix(self, ops: Ops, given: Tensor, step: StepInputs, own: Any) -> Tensor:
        """given [T, into's outputs] -> [T, out's inputs]."""
        raise NotImplementedError

    def keeps(self) -> Sequence[Keeper]:
        return (self.kept,)

    def matrices(self) -> Iterator[Linear]:
        yield from (self.into, self.out)

    def weights(self) -> Iterator[Weight]:
        yield from self.into.weights()
        yield from self.out.weights()

    def prepare(self, ops: Ops) -> Block:
        self.into.prepare(ops)
        self.out.prepare(ops)
        return self

    @property
    def experts(self) -> None:
        """There are none."""


class Fold(_Toy):
    """A sum of what every token gives, older ones less."""

    def mix(self, ops: Ops, given: Tensor, step: StepInputs, own: dict[str, Tensor]) -> Tensor:
        states, sums, out = step.states, own["sum"], torch.empty_like(given)
        assert states is not None
        folds = (states.folded <= step.positions[: step.rows]).tolist()
        for row, slot in enumerate(states.slots.tolist()):
            if folds[row]:
                sums[slot] = sums[slot] * KEEPS + given[row]
            out[row] = sums[slot]
        if step.prefill is not None:
            start = (step.prefill.start + step.rows).tolist()
            for chunk, slot in enumerate(states.chunk_slots.tolist()):
                for token in range(start[chunk], start[chunk + 1]):
                    sums[slot] = sums[slot] * KEEPS + given[token]
                    out[token] = sums[slot]
        return out


class Latent(_Toy):
    """One head over latent vectors; a token's query is its own vector."""

    def mix(self, ops: Ops, given: Tensor, step: StepInputs, own: LatentKv) -> Tensor:
        own.latent.view(-1, LATENT)[step.slots] = given
        out = torch.empty(given.shape[0], own.value_width)
        for token, (table, position) in enumerate(_tables(step)):
            seen = own.worth(table[: position // 16 + 1]).flatten(0, 1)[: position + 1]
            out[token] = torch.softmax((seen * given[token]).sum(1), 0) @ seen[:, : own.value_width]
        return out


class Reader(_Toy):
    """Queries of its own over another layer's keys and values."""

    def mix(self, ops: Ops, given: Tensor, step: StepInputs, own: LayerKv) -> Tensor:
        kind = self.kept.kind
        assert kind is not None
        q = given.view(-1, kind.heads, kind.width)
        return ops.attention(q, own, step, kind, step.plans[kind]).flatten(1)


def _tables(step: StepInputs) -> Iterator[tuple[Tensor, int]]:
    """Yields the block table and the position of each token."""
    if step.decode is not None:
        for row, position in zip(
            step.decode.rows.tolist(), step.positions[: step.rows].tolist(), strict=True
        ):
            yield step.decode.table[row], position
    if step.prefill is not None:
        start, context = step.prefill.start.tolist(), step.prefill.context.tolist()
        for chunk, first in enumerate(context):
            for at in range(start[chunk + 1] - start[chunk]):
                yield step.prefill.block_table[chunk], first + at


def build_toy(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    positions: int | None = None,
    layout: Layout = ALONE,
    scheme_of: SchemeOf = all_plain,
) -> Decoder:
    """Makes the model, as `build_model` makes others; of the config's layers it takes the first
    two."""
    assert isinstance(config, DenseConfig)
    make, hidden = (
        Maker(dtype, device, positions or config.context, layout, scheme_of),
        config.hidden_size,
    )
    dense = build_dense(config, make)
    first, second = dense.blocks[:2]
    (source,) = second.keeps()
    assert isinstance(source, Attention)
    kind, inner = source.kind, PIECES * WIDTH
    share = inner // layout.share(PIECES, "pieces")[0]
    folds = [
        Fold(
            make.column_linear([(f"fold{number}.into", inner, PIECES)], hidden),
            make.row_linear(f"fold{number}.out", hidden, inner, PIECES),
            Kept(f"fold{number}", RecurrentForm((StatePart("sum", (share,), torch.float32),))),
        )
        for number in range(2)
    ]
    latent = Latent(
        make.linear("latent.into", LATENT, hidden),
        make.linear("latent.out", hidden, VALUE),
        Kept("latent", LatentForm(LATENT, VALUE, dtype), kind, source.cos_sin),
    )
    heads = config.heads * config.head_dim
    reader = Reader(
        make.column_linear([("reader.into", heads, config.heads)], hidden),
        make.row_linear("reader.out", hidden, heads, config.heads),
        Kept("reader", source.form, kind, source.cos_sin, source),
    )
    return Decoder(config, make, [first, folds[0], latent, second, reader, folds[1]], dense.norm)
