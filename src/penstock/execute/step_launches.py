"""StepLaunches: launches a step's forward and draw. The launches depend on sizes alone, so that
CUDA graphs can hold them.

    forward    prepare: row numbers -> tokens, positions, slots; then the model
    draw       head and draw in slices; advance

Their inputs stay at one address: the queries in `Staging`, the step's tokens in StepTensors, the
rows' columns, and `few_chunks`. Knows rows, KV, the model and its draw; no plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.device_sampler import EVERY, PLAIN, DeviceSampler
from penstock.execute.graphs import Graphs
from penstock.execute.kv_cache import KvCache
from penstock.execute.packing import StagedChunks
from penstock.execute.padding import BESIDE_CHUNKS, BESIDE_TOKENS, StepSizes
from penstock.execute.rank_sampler import NOBODY, Asking
from penstock.execute.staging_buffer import Staging
from penstock.execute.window_tables import ALIGNED, WindowTables
from penstock.kernels.inputs import (
    ENDED,
    DecodeInputs,
    GroupInputs,
    PrefillInputs,
    PrefixSight,
    Queries,
    StateInputs,
    StepInputs,
)
from penstock.kernels.ops import RowOps
from penstock.kernels.row_state import RowState
from penstock.models.decoder import Decoder


@dataclass(slots=True)
class StepTensors:
    """A step's tokens: first the rows' tokens, which `prepare` writes, then the prompt chunks'. The
    layers read them."""

    tokens: Tensor  # [tokens] int64: token ids
    positions: Tensor  # [tokens] int64: position in the sequence
    slots: Tensor  # [tokens] int64: KV cache slot that the token is written to
    tags: Tensor | None  # [tokens] int32: the request's tag; None: the model reads no tags

    @classmethod
    def of(cls, tokens: int, device: torch.device, reads_tags: bool) -> StepTensors:
        ids, positions, slots = (
            torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        tags = torch.zeros(tokens, dtype=torch.int32, device=device) if reads_tags else None
        return cls(ids, positions, slots, tags)

    def take(self, first: int, chunks: StagedChunks) -> None:
        """Copies the chunks' tokens into the tensors, from index `first` on."""
        last = first + chunks.ids.shape[0]
        self.tokens[first:last].copy_(chunks.ids)
        self.positions[first:last].copy_(chunks.positions)
        self.slots[first:last].copy_(chunks.slots)
        if self.tags is not None and chunks.tags is not None:
            self.tags[first:last].copy_(chunks.tags)


class StepLaunches:
    """Launches forward and draw of steps. capacity: most queries per step, padding included.
    groups: most prefix groups. max_tokens: most tokens of rows and prompt chunks together."""

    def __init__(
        self,
        model: Decoder,
        ops: RowOps,
        rows: RowState,
        kv: KvCache,
        staging: Staging,
        sampler: DeviceSampler,
        sizes: StepSizes,
        windows: WindowTables | None,
        capacity: int,
        groups: int,
        max_tokens: int,
    ) -> None:
        self._model, self._ops, self._rows, self._kv, self._staging = model, ops, rows, kv, staging
        self.sampler, self._sizes, self._windows = sampler, sizes, windows
        device, width = rows.device, rows.block_table.shape[1]
        tokens = capacity + max_tokens + BESIDE_TOKENS[-1] + ALIGNED
        self.columns = StepTensors.of(tokens, device, model.reads_tags)
        # CUDA graphs need group blocks at a fixed address; plain torch reads them from the staging
        # buffer
        self._group_blocks = torch.zeros(
            groups if ops.compiled else 0, width, dtype=torch.int32, device=device
        )
        self.no_skip = torch.zeros(capacity, dtype=torch.int32, device=device)
        # prompt chunks of steps with CUDA graphs, which need fixed addresses; filled as
        # packing.pack_chunks does
        self.few_chunks = PrefillInputs(
            start=torch.zeros(BESIDE_CHUNKS + 1, dtype=torch.int32, device=device),
            context=torch.zeros(BESIDE_CHUNKS, dtype=torch.int32, device=device),
            block_table=torch.zeros(
                (BESIDE_CHUNKS, -(-width // 16) * 16), dtype=torch.int32, device=device
            ),
        )
        self.few_states = (
            None
            if kv.folded is None
            else torch.zeros(BESIDE_CHUNKS, dtype=torch.int64, device=device)
        )
        self.graphs: Graphs | None = None
        # LatentSizes.expands_prefixes of the model's latent attention, without the heads; None: it
        # has none, or its kernels don't expand prefixes
        self.expands_prefixes: Callable[[int, int], bool] | None = None
        for kind in model.kinds if ops.compiled else ():
            if kind.latent is not None:
                self.expands_prefixes = partial(kind.latent.expands_prefixes, kind.heads)

    def size_of(self, rows: int) -> int:
        """Returns the padded number of rows, for draws and for forwards without prompt chunks."""
        size = None if self.graphs is None else self.graphs.size_for(rows)
        return size or self._sizes.rows(rows)

    def take_group_blocks(self, blocks: Tensor) -> None:
        """Sets the group blocks [groups, width] int32 for this and later steps."""
        if self._ops.compiled:
            groups, width = blocks.shape
            self._group_blocks[:groups, :width].copy_(blocks)
        else:
            self._group_blocks = blocks  # without graphs the blocks are read where they were staged

    def take_drafts(self, size: int) -> None:
        """Copies the device's own drafts into the step's queries."""
        self._ops.take_drafts(
            self._staging.rows[:size], self.queries(size, drafts=True), self._rows
        )

    def forward_rows(self, size: int, grouped: bool) -> Tensor:
        """Launches `prepare` and the forward of `size` rows without prompt chunks, with room for as
        many prefix groups as compiled steps have."""
        return self.forward(size, self._sizes.groups(size, 0) if grouped else 0)

    def forward_few(self, size: int, tokens: int, grouped: bool) -> Callable[[], Tensor]:
        """Returns a function that launches the forward of `size` rows and of the prompt chunks in
        `few_chunks`, `tokens` tokens in all."""
        groups = self._sizes.groups(size, 0) if grouped else 0
        return partial(self.forward, size, groups, self.few_chunks, self.few_states, tokens)

    def forward(
        self,
        size: int,
        groups: int,
        chunks: PrefillInputs | None = None,
        chunk_states: Tensor | None = None,
        tokens: int = 0,
        drafts: bool = False,
        scored: bool = False,
        embeds: tuple[Tensor, Tensor] | None = None,
        expanded: PrefixSight | None = None,
    ) -> Tensor:
        """Launches prepare and forward of `size` rows, and of chunks whose tokens follow them in
        the columns. Returns normed hidden states of the rows; with `scored`, or without rows, of
        the chunks too.

        groups: padded number of prefix groups. chunk_states: slots of the chunks' recurrent state.
        tokens: number of rows and chunk tokens together. drafts: True if some rows have several
        queries. embeds: as in Decoder.forward. expanded: as in GroupInputs."""
        columns = self.columns
        tokens = size if chunks is None else tokens
        if size:
            self._ops.prepare(
                self._staging.rows[:size],
                self.queries(size, drafts),
                self._rows,
                self._kv.slot_token,
                self._kv.dump_block,
                columns.tokens,
                columns.positions,
                columns.slots,
            )
            if columns.tags is not None:
                torch.index_select(
                    self._rows.tag, 0, self._staging.rows[:size], out=columns.tags[:size]
                )
        decode = self.decode(size, groups, expanded) if size else None
        inputs = StepInputs(
            columns.positions[:tokens], columns.slots[:tokens], size, decode, chunks
        )
        inputs.tags = None if columns.tags is None else columns.tags[:tokens]
        if decode is not None and groups:
            inputs.alone = replace(decode, groups=None, skip=self.no_skip[:size])
        if (folded := self._kv.folded) is not None:
            inputs.states = self._states(size, folded, chunk_states, drafts)
        if self._windows is not None:
            inputs.by_layer = self._windows.by_layer(
                inputs, columns.slots[: -(-tokens // ALIGNED) * ALIGNED]
            )
        of_rows = chunks is not None and size > 0 and not scored
        hidden = self._model.forward(
            columns.tokens[:tokens], inputs, self._kv.layers, of_rows=of_rows, embeds=embeds
        )
        if folded is not None:
            self._count_folded(folded, inputs, chunks)
        return hidden

    def _states(
        self, size: int, folded: Tensor, chunk_states: Tensor | None, drafts: bool
    ) -> StateInputs:
        """Returns the recurrent state's inputs. Row i uses slot i. folded: number of tokens that
        each slot's state includes. A row has ended if its KV slot is in the dump."""
        rows, queries = self._staging.rows[:size], self.queries(size, drafts)
        ends = self.columns.slots[:size] // BLOCK_SIZE == self._kv.dump_block
        held = folded.index_select(0, rows).masked_fill_(ends, ENDED)
        offset = self.no_skip[:size] if queries is None else queries.offset
        nobody = torch.zeros(0, dtype=torch.int64, device=rows.device)
        return StateInputs(rows, held, offset, nobody if chunk_states is None else chunk_states)

    @staticmethod
    def _count_folded(folded: Tensor, inputs: StepInputs, chunks: PrefillInputs | None) -> None:
        """Updates the number of tokens each slot's state includes: up to its row's newest one.
        Nobody reads the number of a row that has ended."""
        states = inputs.states
        assert states is not None
        newest = inputs.positions[: inputs.rows] - states.offset
        folded.index_copy_(0, states.slots.to(torch.int64), newest.to(torch.int32) + 1)
        if chunks is not None:
            folded.index_copy_(
                0, states.chunk_slots, chunks.context + (chunks.start[1:] - chunks.start[:-1])
            )

    def draw(
        self,
        size: int,
        hidden: Tensor,
        wants: int,
        most: int = 0,
        asking: Asking = NOBODY,
        forces: bool = False,
        drafts: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draws for the step's queries and updates the rows; see `DeviceSampler.launch`."""
        ids, queries, position = (
            self._staging.rows[:size],
            self.queries(size, drafts),
            self.columns.positions[:size],
        )
        return self.sampler.launch(ids, queries, position, hidden, wants, most, asking, forces)

    def draw_for_graph(self, size: int, hidden: Tensor, every: bool, forces: bool) -> None:
        """Launches the draw as it is captured in CUDA graphs. every: True: with all sampling
        options. forces: True: some queries have forced tokens."""
        self.draw(size, hidden, EVERY if every else PLAIN, forces=forces)

    def queries(self, size: int, drafts: bool) -> Queries | None:
        """Returns the queries' offsets and drafts; None if every row has one query, unless compiled
        kernels need both cases alike."""
        if not self._ops.compiled and not drafts:
            return None
        return Queries(self._staging.offset[:size], self._staging.draft[:size])

    def decode(self, size: int, count: int, expanded: PrefixSight | None = None) -> DecodeInputs:
        """Returns the decode inputs of `size` rows, with room for `count` prefix groups."""
        staging, rows, groups = self._staging, self._rows, None
        if count:
            start, length = staging.group_start[: count + 1], staging.group_length[:count]
            groups = GroupInputs(start, self._group_blocks[:count], length, expanded)
        return DecodeInputs(
            rows=staging.rows[:size],
            position=self.columns.positions[:size],
            table=rows.block_table,
            length=rows.length,
            skip=staging.skip[:size],
            max_own=rows.max_model_len,
            groups=groups,
        )
