"""A paged cache driven by hand: runs a Decoder over scattered blocks without scheduler or runner.
For model tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.inputs import ChunkSight, DecodeInputs, PrefillInputs, StateInputs, StepInputs
from penstock.kernels.layer_kv import KvForm, LayerKv
from penstock.kernels.state_forms import LatentForm, RecurrentForm
from penstock.layers.block import Keeper
from penstock.models.decoder import Decoder

BLOCK = 16


class PagedCache:
    """Sequences with `blocks` blocks each, handed out in a random order; block 0 stays scratch."""

    def __init__(self, model: Decoder, sequences: int, blocks: int, seed: int = 0) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sequences * blocks, generator=generator) + 1
        self.tables = order.reshape(sequences, blocks).to(torch.int32)
        views = {id(owner): self._views(owner, sequences, blocks) for owner in model.owners}
        self.kv = [
            tuple(views[id(keeper.source or keeper)] for keeper in each) for each in model.keepers
        ]
        self.lengths = [0] * sequences

    def _views(self, keeper: Keeper, sequences: int, blocks: int) -> Any:
        """What a keeper stores. Pages are never zeros: unwritten must show. A sequence begins with
        a slot of zeros."""
        form = keeper.form
        if isinstance(form, RecurrentForm):
            return form.over(torch.zeros(sequences, form.slot_bytes, dtype=torch.uint8))
        if isinstance(form, LatentForm):
            return form.over(
                torch.full((sequences * blocks + 1, *form.block_shape), 64, dtype=torch.uint8)
            )
        assert isinstance(form, KvForm)
        shape = sequences * blocks + 1, form.kv_heads, 2, BLOCK, form.width
        return LayerKv.plain(torch.full(shape, 7.0, dtype=self.model.dtype))

    @torch.inference_mode()
    def step(
        self, rows: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, Sequence[int]]] = ()
    ) -> Tensor:
        """rows: (sequence, token) decode; chunks: (sequence, tokens) to prefill. Logits of every
        token, rows first."""
        pieces = [(s, [t]) for s, t in rows] + [(s, list(t)) for s, t in chunks]
        ids = torch.tensor([t for _, tokens in pieces for t in tokens])
        positions = torch.cat(
            [torch.arange(self.lengths[s], self.lengths[s] + len(tokens)) for s, tokens in pieces]
        )
        owner = torch.tensor([s for s, tokens in pieces for _ in tokens])
        slots = self.tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        inputs = StepInputs(
            positions=positions,
            slots=slots,
            rows=len(rows),
            decode=self._decode([s for s, _ in rows]) if rows else None,
            prefill=self._prefill(pieces[len(rows) :]) if chunks else None,
            states=StateInputs(
                slots=torch.tensor([s for s, _ in rows], dtype=torch.int64),
                folded=positions[: len(rows)].to(torch.int32),
                offset=torch.zeros(len(rows), dtype=torch.int32),
                chunk_slots=torch.tensor([s for s, _ in chunks], dtype=torch.int64),
            ),
        )
        hidden = self.model.forward(ids, inputs, self.kv)
        for sequence, tokens in pieces:
            self.lengths[sequence] += len(tokens)
        return self.model.logits(hidden)

    def _decode(self, sequences: list[int]) -> DecodeInputs:
        return DecodeInputs(
            rows=torch.tensor(sequences),
            position=torch.tensor([self.lengths[s] for s in sequences]),
            table=self.tables,
            length=torch.tensor(self.lengths, dtype=torch.int32),
            skip=torch.zeros(len(sequences), dtype=torch.int32),
            max_own=1 + max(self.lengths[s] for s in sequences),
            groups=None,
        )

    def _prefill(self, pieces: list[tuple[int, list[int]]]) -> PrefillInputs:
        start = [0]
        for _, tokens in pieces:
            start.append(start[-1] + len(tokens))
        context = [self.lengths[s] for s, _ in pieces]
        return PrefillInputs(
            start=torch.tensor(start, dtype=torch.int32),
            context=torch.tensor(context, dtype=torch.int32),
            block_table=self.tables[[s for s, _ in pieces]],
            seen=ChunkSight.of(np.diff(start), np.array(context)),
        )
