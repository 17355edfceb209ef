"""Decoder: a model of embedding, blocks, norm and head. A model type's file chooses the blocks
(layers); `penstock.weights` loads them.

Computes hidden states and logits of a step's tokens. Knows blocks by their interface; no scheduler,
sampling or files. Callers enter torch.inference_mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import PagedForm, RecurrentForm
from penstock.layers.block import Block, Keeper, is_recurrent
from penstock.layers.draft_layer import BlockLayer, ChainLayer, DraftLayer
from penstock.layers.embedding import TiedHead
from penstock.layers.layer_inputs import LayerInputs
from penstock.layers.linear import Linear
from penstock.layers.maker import Maker
from penstock.layers.norm import Norm
from penstock.models.model_config import ModelConfig
from penstock.parallel.sharded_weight import Weight

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head"


class Decoder:
    """A decoder whose weights are not loaded yet.

    embedding_scale, logits_scale: factors of embeddings and of logits. embedding_norm: norm of
    embeddings. logits_cap: logits become cap * tanh(logits / cap); None: no cap. layer_inputs:
    computes per-layer embeddings; None: the model has none. drafter: drafts tokens; None: nothing
    does, or something outside the model."""

    def __init__(
        self,
        config: ModelConfig,
        make: Maker,
        blocks: Sequence[Block],
        norm: Norm,
        *,
        embedding_scale: float = 1.0,
        embedding_norm: Norm | None = None,
        logits_scale: float = 1.0,
        logits_cap: float | None = None,
        layer_inputs: LayerInputs | None = None,
        drafter: DraftLayer | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, make.dtype, make.device
        self.blocks, self.norm, self._logits_cap = list(blocks), norm, logits_cap
        self._logits_scale, self.layer_inputs = logits_scale, layer_inputs
        self.drafter: DraftLayer | None = None
        self._drafter_kinds: dict[AttentionKind, Tensor] = {}
        vocabulary, hidden, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        again = f"{HEAD}.weight" if tied else None
        self.embedding = make.embedding(
            EMBEDDING, vocabulary, hidden, scale=embedding_scale, norm=embedding_norm, tied=again
        )
        self.head: Linear = (
            TiedHead(self.embedding, make.scheme_of(HEAD))
            if tied
            else make.head(HEAD, vocabulary, hidden)
        )
        self._draft_head = self.head  # scores drafts, if the drafter has no head of its own
        # range of tokens that `logits` scores on this rank; None: all tokens
        self.vocabulary = make.vocabulary(vocabulary)
        # layers of each block that keep state (KV cache or recurrent state); the drafter's last
        self.keepers = [tuple(block.keeps()) for block in self.blocks]
        self.kinds = _kinds(self.keepers)
        self._folds_last = any(is_recurrent(keeper) for keeper in self.blocks[-1].keeps())
        self.handed: dict[int, Tensor] = {}  # layer -> buffer for its output, see `hand_out`
        self.positions = make.positions
        self.rope_bytes = sum(table.nbytes for table in make.rope_tables.values())
        # bytes of the weights in the device's memory
        self.weights_bytes = sum(weight.nbytes for weight in self.weights() if not weight.in_host)
        self.table_in_host = make.table_in_host
        self.ranks = make.layout.size
        self.reads_tags = False  # True: a block reads StepInputs.tags
        # blocks run so far, by which another thread sees that a long step progresses
        self.blocks_run = 0
        self._ops: Ops | None = None
        if drafter is not None:
            self.take_drafter(drafter)

    def take_drafter(self, drafter: DraftLayer) -> None:
        """Adds what drafts tokens. Call it before weights are loaded."""
        self.drafter = drafter
        self.keepers.append(tuple(drafter.keeps()))
        self._drafter_kinds = _kinds(self.keepers[-1:])
        self.weights_bytes += sum(weight.nbytes for weight in drafter.weights())

    def prepare(self, ops: Ops) -> None:
        """Arranges each weight for its kernel, one at a time; call it once, after loading."""
        self._ops = ops
        self.blocks = [block.prepare(ops) for block in self.blocks]
        if self.layer_inputs is not None:
            self.layer_inputs.prepare(ops)
        if self.drafter is not None:
            self.drafter.prepare(ops)
            if not self.drafter.has_head:
                self._draft_head = self.head.fp8_copy(ops)
        self.head.prepare(ops)

    def forward(
        self,
        token_ids: Tensor,
        step: StepInputs,
        state: Sequence[Sequence[Any]],
        ops: Ops | None = None,
        *,
        of_rows: bool = False,
        embeds: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Returns normed hidden states [T, hidden] of a step's T tokens. token_ids: [T] int64.
        state: for each block (the drafter's last), views of the state of its parts, updated in
        place.

        of_rows: True returns only the step's decode rows [rows, hidden], at least one row; the last
        block then only stores K and V of the prefill tokens. embeds: indices of tokens [k] int64,
        and the vectors [k, hidden] that replace their embeddings. ops: operations to use instead of
        the prepared ones, for observing."""
        ops = ops or self.ops
        steps = self._plan(step, ops)
        x: Tensor = self.embedding(ops, token_ids)
        if embeds is not None:
            x.index_copy_(0, embeds[0], embeds[1].to(x.dtype))
        if self.layer_inputs is not None:
            given = self.layer_inputs(ops, token_ids, x)
            for seen in steps:
                seen.layer_inputs = given
        if of_rows and not self._folds_last:
            last = len(self.blocks) - 1
            steps = [*steps[:last], replace(steps[last], prefill=None, kept=step.rows)]
        residual: Tensor | None = None
        count = len(self.blocks)
        for number, (block, seen, own) in enumerate(
            zip(self.blocks, steps[:count], state[:count], strict=True)
        ):
            x, residual = block(ops, x, residual, seen, own)
            self.blocks_run += 1
            if number in self.handed:
                self.handed[number][: x.shape[0]] = x if residual is None else x + residual
        # the last block processed the prefill tokens too, as they update recurrent state
        if of_rows and self._folds_last:
            x, residual = x[: step.rows], None if residual is None else residual[: step.rows]
        return self.norm.last(ops, x, residual)

    def _plan(self, step: StepInputs, ops: Ops) -> list[StepInputs]:
        """Plans a step once for each kind of attention.
        Returns the step's inputs for each block."""
        if step.by_layer is None:
            step.plans = {
                kind: ops.plan(step, kind, cos_sin, self.dtype)
                for kind, cos_sin in self.kinds.items()
            }
            return [step] * len(self.keepers)
        count = len(self.blocks)
        for keepers, seen in zip(self.keepers[:count], step.by_layer[:count], strict=True):
            for keeper in keepers:
                if (kind := keeper.kind) is not None and kind not in seen.plans:
                    seen.plans[kind] = ops.plan(seen, kind, self.kinds[kind], self.dtype)
        return step.by_layer

    def hand_out(self, layers: Sequence[int], tokens: int) -> None:
        """Makes `forward` copy the residual stream after each of these layers, before any norm, to
        `handed[layer]` [tokens, hidden]. tokens: the most tokens of a step. Call it before steps
        are captured as graphs."""
        shape = (tokens, self.config.hidden_size)
        self.handed = {
            layer: torch.zeros(shape, dtype=self.dtype, device=self.device) for layer in layers
        }

    def hand_out_for_drafts(self, tokens: int) -> None:
        """Makes `forward` hand out what the drafter reads; see `hand_out`."""
        if self.drafter is not None and self.drafter.reads:
            self.hand_out(self.drafter.reads, tokens)

    def predict(
        self,
        next_ids: Tensor,
        hidden: Tensor,
        step: StepInputs,
        state: Sequence[Sequence[Any]],
        ops: Ops | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the drafter on a step's T tokens, after `forward`. next_ids: [T] int64, the token
        after each. hidden: [T, hidden], of `drafting_from` or of a prediction before. state: as in
        `forward`. Returns the input of `draft_logits` that scores the token after the next one, and
        the hidden state for a further prediction, both [T, hidden]."""
        drafter, ops = cast(ChainLayer, self.drafter), ops or self.ops
        seen = self._plan_drafter(step, ops)
        return drafter(ops, self._draft_embeds(ops, next_ids), hidden, seen, state[-1])

    def store_for_drafts(
        self, hidden: Tensor, step: StepInputs, state: Sequence[Sequence[Any]]
    ) -> None:
        """Stores the K and V that a BlockLayer makes of a step's T tokens, after `forward`. hidden:
        [T, hidden], of `drafting_from`. state: as in `forward`."""
        drafter = cast(BlockLayer, self.drafter)
        drafter.store(self.ops, hidden, self._plan_drafter(step, self.ops), state[-1])

    def predict_blocks(
        self, newest: Tensor, length: int, step: StepInputs, state: Sequence[Sequence[Any]]
    ) -> Tensor:
        """Runs a BlockLayer on drafts of `length` tokens, [n * length] in the step. newest: [n]
        int64, each draft's first token; masks follow. Returns the input of `draft_logits` that
        scores the token at each place, [n, length, hidden]. state: as in `forward`."""
        drafter = cast(BlockLayer, self.drafter)
        ids = newest.new_full((newest.shape[0], length), drafter.mask)
        ids[:, 0] = newest
        seen, embeds = (
            self._plan_drafter(step, self.ops),
            self._draft_embeds(self.ops, ids.view(-1)),
        )
        return drafter(self.ops, embeds, seen, state[-1]).view(*ids.shape, -1)

    def _plan_drafter(self, step: StepInputs, ops: Ops) -> StepInputs:
        """Plans a step for the drafter. Returns its inputs."""
        assert self.drafter is not None, "a model without a drafter predicts nothing"
        seen = step if step.by_layer is None else step.by_layer[-1]
        for keeper in self.keepers[-1]:
            if (kind := keeper.kind) is not None and kind not in seen.plans:
                seen.plans[kind] = ops.plan(seen, kind, self._drafter_kinds[kind], self.dtype)
        return seen

    def _draft_embeds(self, ops: Ops, ids: Tensor) -> Tensor:
        """Returns the embeddings [n, hidden] of ids [n] as the drafter reads them."""
        drafter, own = self.drafter, self.embedding
        assert drafter is not None
        if not drafter.of_model:
            own = drafter.embedding or replace(own, scale=1.0, norm=None)
        return own(ops, ids)

    def drafting_from(self, hidden: Tensor, ops: Ops | None = None) -> Tensor:
        """Returns the hidden states from which the drafter predicts first, [T, hidden]. hidden: of
        `forward`, [T, hidden]."""
        assert self.drafter is not None, "a model without a drafter predicts nothing"
        handed = [self.handed[layer][: hidden.shape[0]] for layer in self.drafter.reads]
        return self.drafter.first(ops or self.ops, handed or [hidden])

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Returns scores as `logits` does, for the drafter's hidden [n, hidden]. The model's head
        is read in fp8 where that is faster: a rounded draft is at worst a wrong one."""
        assert self.drafter is not None, "a model without a drafter predicts nothing"
        scores = self.drafter.scores(self.ops, hidden)
        return self._scores(self._draft_head, hidden) if scores is None else scores

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns scores [n, vocabulary] in the model's dtype for hidden [n, hidden] of `forward`;
        with several ranks, the scores of this rank's tokens."""
        return self._scores(self.head, hidden)

    def _scores(self, head: Linear, hidden: Tensor) -> Tensor:
        scores = head(self.ops, hidden)
        if self._logits_scale != 1.0:
            scores.mul_(self._logits_scale)
        return scores if self._logits_cap is None else self.ops.softcap(scores, self._logits_cap)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Returns the parts of the model that hold weights."""
        heads = self.head, self._draft_head
        return self.embedding, self.layer_inputs, self.blocks, self.norm, heads, self.drafter

    def take_parts_of(self, other: Decoder) -> None:
        """Replaces this model's parts with those of `other`, a prepared model with the same
        config."""
        self.embedding, self.layer_inputs, self.blocks = (
            other.embedding,
            other.layer_inputs,
            other.blocks,
        )
        self.norm, self.head, self.drafter = other.norm, other.head, other.drafter
        self._draft_head = other._draft_head
        self.keepers, self.kinds = other.keepers, other.kinds
        self._drafter_kinds = other._drafter_kinds

    @property
    def rotary_tables(self) -> list[Tensor]:
        """Returns the rotary tables of the model and its drafter."""
        return [*self.kinds.values(), *self._drafter_kinds.values()]

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order; a tied head's weight once."""
        yield self.embedding.table
        if self.layer_inputs is not None:
            yield from self.layer_inputs.weights()
        for block in self.blocks:
            yield from block.weights()
        yield from self.norm.weights()
        if self.drafter is not None and self.drafter.of_model:
            yield from self.drafter.weights()
        if not self.config.tie_word_embeddings:
            yield from self.head.weights()

    def copied_bytes(self, ops: Ops | None) -> int:
        """Bytes of the copies that `prepare` will make of weights that it also keeps. ops: see
        Linear."""
        shares = self.drafter is not None and not self.drafter.has_head
        return self.head.copied_bytes(ops) if shares else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of per-layer embeddings, in device or host memory; 0: no table."""
        return 0 if self.layer_inputs is None else self.layer_inputs.table.table.nbytes

    @property
    def head_rows(self) -> int:
        """Number of tokens that `logits` scores on this rank."""
        return self.embedding.table.shape[0]

    @property
    def owners(self) -> list[Keeper]:
        """Parts that have state of their own, in the order of the blocks."""
        return [keeper for keeper in chain(*self.keepers) if keeper.source is None]

    @property
    def paged_forms(self) -> list[PagedForm]:
        """Layouts of the KV cache, or other state that grows with the tokens, of each part that has
        its own."""
        return [keeper.form for keeper in self.owners if not isinstance(keeper.form, RecurrentForm)]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's recurrent state, over all layers."""
        return sum(
            keeper.form.slot_bytes
            for keeper in self.owners
            if isinstance(keeper.form, RecurrentForm)
        )

    @property
    def kv_share(self) -> float:
        """Size of the KV cache relative to its size if it were stored in the model's dtype: 1, or
        less with eight bits."""
        forms = self.paged_forms
        return sum(form.block_bytes for form in forms) / sum(
            form.plain(self.dtype).block_bytes for form in forms
        )

    @property
    def ops(self) -> Ops:
        assert self._ops is not None, "a model is prepared before it is used"
        return self._ops

    @property
    def all_windowed(self) -> bool:
        """True if every attention layer has a window. Prefix groups have no use then, since no
        layer sees a whole prefix."""
        return all(kind.window is not None for kind in self.kinds)


def _kinds(keepers: Sequence[Sequence[Keeper]]) -> dict[AttentionKind, Tensor]:
    """Returns each kind of attention in the model with its rotary table. keepers: for each block,
    its parts with state."""
    found = {}
    for keeper in chain(*keepers):
        if keeper.kind is not None and keeper.cos_sin is not None:
            found[keeper.kind] = keeper.cos_sin
    return found
