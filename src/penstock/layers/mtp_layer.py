"""MtpLayer: predicts the token after the next one, from a model's hidden state and the next token
(multi-token prediction, arXiv:2412.19437, section 2.2). Drafts are made by it. T: tokens of a step,
d: hidden size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import wide
from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.block import Block, Keeper
from penstock.layers.linear import Linear
from penstock.layers.maker import Maker
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class MtpLayer:
    """A ChainLayer. Computes block(join(norm(embedding of the next token), norm(hidden))), normed
    for the head.

    on_normed: True: a further prediction continues from the normed output (Qwen's), False: from the
    residual stream (DeepSeek's)."""

    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear  # [d, 2 d]
    block: Block
    norm: Norm
    on_normed: bool

    reads: tuple[int, ...] = ()
    of_model: bool = True
    has_head: bool = False
    embedding: None = None

    def first(self, ops: Ops, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def __call__(
        self, ops: Ops, embeds: Tensor, hidden: Tensor, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        both = (self.embedding_norm.alone(ops, embeds), self.hidden_norm.alone(ops, hidden))
        x, residual = self.block(ops, self.join(ops, torch.cat(both, -1)), None, step, state)
        rows, stream = self.norm(ops, x, residual, None)
        normed = wide(rows)
        return normed, normed if self.on_normed else stream

    def scores(self, ops: Ops, hidden: Tensor) -> None:
        return None

    def keeps(self) -> Sequence[Keeper]:
        return self.block.keeps()

    def weights(self) -> Iterator[Weight]:
        yield from self.embedding_norm.weights()
        yield from self.hidden_norm.weights()
        yield from self.join.weights()
        yield from self.block.weights()
        yield from self.norm.weights()

    def prepare(self, ops: Ops) -> None:
        self.join.prepare(ops)
        self.block = self.block.prepare(ops)


class MtpNames(NamedTuple):
    """Names of an MtpLayer's tensors in a checkpoint, after its prefix."""

    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str


DEEPSEEK = MtpNames("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = MtpNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def make_mtp_layer(
    make: Maker, at: str, names: MtpNames, hidden: int, norm: Callable[[str], Norm], block: Block
) -> MtpLayer:
    """Makes an MtpLayer; its weights are not loaded yet. at: prefix of its tensors' names. hidden:
    the model's hidden size. norm: function from a name to a norm of the model's kind."""
    return MtpLayer(
        norm(f"{at}.{names.embedding_norm}"),
        norm(f"{at}.{names.hidden_norm}"),
        make.linear(f"{at}.{names.join}", hidden, 2 * hidden),
        block,
        norm(f"{at}.{names.norm}"),
        on_normed=names is QWEN,
    )
