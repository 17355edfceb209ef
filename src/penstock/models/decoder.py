"""Decoder: the body that all models share. ModelConfig says what is switched on; `weights` fills it.

It computes hidden states and logits of a step's tokens. It doesn't know rows, chunks, groups, sampling or files.
Callers enter torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import AttentionInputs
from penstock.kernels.ops import OneRowOps, Ops
from penstock.layers.attention import Attention
from penstock.layers.embedding import Embedding
from penstock.layers.linear import Linear
from penstock.layers.mlp import Mlp
from penstock.layers.norm import Norm
from penstock.layers.rope import rope_table
from penstock.models.model_config import ModelConfig


@dataclass(slots=True)
class Layer:
    """Attention and MLP, each behind a norm and beside the residual stream."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        if ops.one_row is not None and x.shape[0] == 1 and self._fits_one_row(inputs):
            return self._one_row(ops, ops.one_row, x, residual, inputs, kv, cos_sin)
        x, residual = self.attention_norm(ops, x, residual)
        x = self.attention(ops, x, inputs, kv, cos_sin)
        x, residual = self.mlp_norm(ops, x, residual)
        return self.mlp(ops, x), residual

    def _fits_one_row(self, inputs: AttentionInputs) -> bool:
        alone = inputs.decode is not None and inputs.decode.groups is None
        return alone and self.attention.q_norm is None and self.mlp.gate_up.bias is None

    def _one_row(
        self, ops: Ops, one: OneRowOps, x: Tensor, residual: Tensor | None, inputs: AttentionInputs, kv: Tensor,
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        at, mlp = self.attention, self.mlp
        q, residual = one.norm_qkv(
            x, residual, self.attention_norm.weight, self.attention_norm.eps, at.qkv.weight, at.qkv.bias, cos_sin,
            inputs, kv, at.heads, at.kv_heads, at.width,
        )  # fmt: skip
        x = one.attention_out(q, kv, inputs, at.width**-0.5, at.window, at.out.weight, at.out.bias)
        gated, residual = one.norm_gate(x, residual, self.mlp_norm.weight, self.mlp_norm.eps, mlp.gate_up.weight)
        return mlp.down(ops, gated), residual


class Decoder:
    """A decoder whose weights are not filled yet: see `penstock.weights`.

    positions: how many the rotary table holds; None: the config's context. On torch's meta device it costs no memory.
    weights_bytes: of the weights in `dtype`, a tied head once; a kernel's own arrangement of them may take more.
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, dtype: torch.dtype, device: torch.device, positions: int | None = None
    ) -> None:
        self.config, self.ops, self.dtype, self.device = config, ops, dtype, device
        self.cos_sin = rope_table(config.rope, config.head_dim, positions or config.context, device)
        self.embedding = Embedding(self._empty(config.vocab_size, config.hidden_size))
        self.layers = [self._layer(window) for window in config.windows]
        self.norm = self._norm()
        self.head = self.embedding.tied_head()
        if not config.tie_word_embeddings:
            self.head = self._linear(config.vocab_size, config.hidden_size, bias=False)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self.parameters())

    def forward(self, token_ids: Tensor, inputs: AttentionInputs, kv: list[Tensor]) -> Tensor:
        """token_ids `[T]` int64, kv: a tensor of `kv_shape` for each layer -> normed hidden states `[T, hidden]`."""
        ops, cos_sin = self.ops, self.cos_sin
        x: Tensor = self.embedding(ops, token_ids)
        residual: Tensor | None = None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x, residual = layer(ops, x, residual, inputs, layer_kv, cos_sin)
        return self.norm(ops, x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden `[n, hidden]` of `forward` -> scores `[n, vocabulary]` in the model's dtype."""
        return self.head(self.ops, hidden)

    def kv_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's KV: K and V of a block and head lie together."""
        return (num_blocks, self.config.kv_heads, 2, BLOCK_SIZE, self.config.head_dim)

    def parameters(self) -> Iterator[Tensor]:
        """Every tensor of weights, a tied head once, always in the same order. Only before `prepare`."""
        yield self.embedding.table
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            yield from (layer.attention_norm.weight, layer.mlp_norm.weight)
            yield from (norm for norm in (attention.q_norm, attention.k_norm) if norm is not None)
            for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
                yield from (part for part in (linear.weight, linear.bias) if part is not None)
        yield self.norm.weight
        if not self.config.tie_word_embeddings:
            yield self.head.weight

    def prepare(self) -> None:
        """Once, after the weights are filled: arranges each for its kernel, one at a time."""
        for layer in self.layers:
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
                linear.prepare(self.ops)
        self.head.prepare(self.ops)

    def _layer(self, window: int | None) -> Layer:
        c = self.config
        attention = Attention(
            qkv=self._linear((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden_size, bias=c.qkv_bias),
            out=self._linear(c.hidden_size, c.heads * c.head_dim, bias=c.o_bias),
            q_norm=self._empty(c.head_dim) if c.qk_norm else None,
            k_norm=self._empty(c.head_dim) if c.qk_norm else None,
            eps=c.rms_norm_eps,
            heads=c.heads,
            kv_heads=c.kv_heads,
            width=c.head_dim,
            window=window,
        )
        mlp = Mlp(
            gate_up=self._linear(2 * c.intermediate_size, c.hidden_size, bias=c.mlp_bias),
            down=self._linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias),
        )
        return Layer(self._norm(), attention, self._norm(), mlp)

    def _norm(self) -> Norm:
        return Norm(self._empty(self.config.hidden_size), self.config.rms_norm_eps)

    def _linear(self, out: int, into: int, *, bias: bool) -> Linear:
        return Linear.empty(out, into, bias=bias, dtype=self.dtype, device=self.device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)
