"""step_kinds: the kinds of steps, each with `launch`. It is called once the plan's changes to rows
and blocks have been launched.

    Decode    rows alone: one graph, or a forward graph and a draw graph; else single launches
    Beside    prompt chunks, with or without rows: a graph for few sizes, else single launches
    Late      a late step: the forward of one of the above at its launch, masks and draw later

StepDraw launches the draw that ends a step of any kind. Knows staged plans, launches and graphs; no
sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.execute.device_sampler import EVERY, MOST, PLAIN
from penstock.execute.executor import Outcome
from penstock.execute.prompt_scorer import Logprobs, PromptScorer
from penstock.execute.proposer import Drawn, Proposer
from penstock.execute.rank_sampler import NOBODY, Asking
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staged_plan import StagedPlan
from penstock.execute.staging_buffer import MappedMasks, Staging, to_device
from penstock.execute.step_launches import StepLaunches
from penstock.kernels.inputs import PrefixSight, VocabularyPart
from penstock.kernels.latent import PREFIX_ROWS
from penstock.row_table import WANTS_FILTER, WANTS_LABELS, WANTS_LOGPROBS
from penstock.schedule.step import LateMasks, StepPlan

NO_TOKENS = torch.empty(0, dtype=torch.int32)


class StepDraw:
    """Draws the tokens of a step's queries, by a graph or single launches, and scores its prompts.

    compiled: True if kernels are compiled, and so for few combinations of sampling options only.
    part: this rank's part of the vocabulary, `model.vocabulary`.
    """

    def __init__(
        self,
        launches: StepLaunches,
        asked: SamplingMirror,
        scorer: PromptScorer,
        part: VocabularyPart | None,
        compiled: bool,
    ) -> None:
        self._launches, self._asked, self._scorer, self._part = launches, asked, scorer, part
        self._compiled = compiled
        self.proposer: Proposer | None = None  # makes drafts after each draw; None: no drafts

    @property
    def follows(self) -> bool:
        """True if a proposer reads the hidden states of all tokens."""
        return self.proposer is not None and self.proposer.follows

    def launch(self, staged: StagedPlan, hidden: Tensor, forces: bool = False) -> Outcome:
        """Launches the draw. hidden [tokens, d]: the forward's result. forces: some queries have
        forced tokens."""
        plan, outcome, queries = staged.plan, Outcome(NO_TOKENS), staged.queries
        if queries:
            size = min(self._launches.size_of(queries), staged.sizes.rows)
            outcome.logprobs = self._drawn(staged, size, hidden, forces)
            outcome.tokens = self._launches.sampler.sampled_ids[:queries]
        self._propose(staged, hidden)
        if plan.chunks is not None and plan.chunks.scored:
            outcome.prompt_logprobs = self._scorer.score(hidden[staged.sizes.rows :], plan.chunks)
        return outcome

    def _propose(self, staged: StagedPlan, hidden: Tensor) -> None:
        """Launches drafts for the drawn step's rows, and what the proposer does with chunks."""
        plan, proposer = staged.plan, self.proposer
        if proposer is None:
            assert not plan.proposes, "a plan proposes where nothing drafts"
        elif plan.proposes or (proposer.follows and (plan.follows or staged.chunks is not None)):
            proposer.launch(
                Drawn(staged.sizes.rows, plan.rows.size, hidden, staged.chunks, plan.proposes)
            )

    def _drawn(
        self, staged: StagedPlan, size: int, hidden: Tensor, forces: bool
    ) -> Logprobs | None:
        """Draws a token for each query, padded to `size`, into `sampled_ids`, and updates the rows;
        returns the logprobs of rows that want them."""
        launches, sampler, plan = self._launches, self._launches.sampler, staged.plan
        where, k = np.zeros(0, np.int64), np.zeros(0, np.int32)
        if plan.wants & WANTS_LOGPROBS:
            rows = plan.query_rows
            where = np.flatnonzero(self._asked.wants[rows] & WANTS_LOGPROBS)
            k = self._asked.logprobs[rows[where]]
        most = (MOST if self._compiled else int(k.max())) if k.any() else 0
        every, asking = bool(plan.wants), self._asking(plan, where)
        ids = top = sampler.nothing
        graph, graphs = None, launches.graphs
        fits = not most and asking is NOBODY and not (every and sampler.pool_moved)
        if graphs is not None and hidden is graphs.hidden and fits:
            graph = graphs.draw(size, every, forces, launches.draw_for_graph)
        if graph is not None:
            graph.replay()
        else:
            wants = (
                (EVERY if every else PLAIN) | plan.wants & WANTS_LABELS
                if self._compiled
                else plan.wants
            )
            ids, top = launches.draw(
                size, hidden, wants, most, asking, forces, plan.drafts is not None
            )
        if not where.size:
            return None
        chosen, rank, ids, top = (
            told[: staged.queries] for told in (sampler.chosen, sampler.rank, ids, top)
        )
        return Logprobs(where, k, chosen, rank, ids, top, where)

    def _asking(self, plan: StepPlan, logprobs: np.ndarray) -> Asking:
        """Returns the queries with filters and with logprobs, if ranks share the vocabulary."""
        if self._part is None or not plan.wants & (WANTS_FILTER | WANTS_LOGPROBS):
            return NOBODY
        filters = np.flatnonzero(self._asked.wants[plan.query_rows] & WANTS_FILTER)
        return Asking(filters=filters, logprobs=logprobs)


class Decode:
    """Launches steps that have rows and no prompt chunks."""

    def __init__(self, launches: StepLaunches, draw: StepDraw) -> None:
        self._launches, self._draw = launches, draw

    def launch(self, staged: StagedPlan) -> Outcome:
        """Launches the step's forward and its draw."""
        if (whole := self._whole(staged)) is not None:
            whole.replay()
            return Outcome(self._launches.sampler.sampled_ids[: staged.queries])
        return self._draw.launch(staged, self.forward(staged))

    def forward(self, staged: StagedPlan) -> Tensor:
        """Launches the forward; returns hidden states [size or more, d]."""
        launches, graphs, size = self._launches, self._launches.graphs, staged.sizes.rows
        expanded = _expanded(launches, staged)
        if graphs is not None and expanded is None:
            graph = graphs.forward(size, staged.groups > 0, launches.forward_rows)
            if graph is not None:
                graph.replay()
                return graphs.hidden
        drafts = staged.plan.drafts is not None
        return launches.forward(size, staged.groups, drafts=drafts, expanded=expanded)

    def _whole(self, staged: StagedPlan) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of forward and plain draw in one, if this step has one."""
        graphs = self._launches.graphs
        plan = staged.plan
        if graphs is None or staged.groups or plan.wants or plan.proposes:
            return None
        if plan.follows and self._draw.follows:
            return None
        return graphs.whole(staged.sizes.rows)


class Beside:
    """Launches steps with prompt chunks, with or without rows."""

    def __init__(self, launches: StepLaunches, draw: StepDraw) -> None:
        self._launches, self._draw = launches, draw

    def launch(self, staged: StagedPlan) -> Outcome:
        """Launches the step's forward and its draw."""
        return self._draw.launch(staged, self.forward(staged))

    def forward(self, staged: StagedPlan) -> Tensor:
        """Launches the forward; returns hidden states [size or more, d] of rows, and of chunks too
        if they are scored."""
        launches, graphs, sizes, plan = (
            self._launches,
            self._launches.graphs,
            staged.sizes,
            staged.plan,
        )
        assert staged.chunks is not None and plan.chunks is not None
        chunks, few = staged.chunks.inputs, launches.few_chunks
        embeds, states = staged.chunks.embeds, staged.chunks.states
        # a graph's forward returns the hidden states of rows alone
        scored = plan.chunks.scored or self._draw.follows
        expanded = _expanded(launches, staged)
        fits = (
            sizes.few
            and expanded is None
            and chunks.context.shape == few.context.shape
            and not scored
            and embeds is None
        )
        if graphs is not None and fits:
            grouped = staged.groups > 0
            launch = launches.forward_few(sizes.rows, sizes.tokens, grouped)
            graph = graphs.with_chunks(sizes.rows, sizes.tokens, grouped, launch)
            if graph is not None:
                count, width = chunks.block_table.shape
                few.start.copy_(chunks.start)
                few.context.copy_(chunks.context)
                few.block_table[:count, :width].copy_(chunks.block_table)
                if states is not None and launches.few_states is not None:
                    launches.few_states.copy_(states)
                graph.replay()
                return graphs.hidden
        drafts = plan.drafts is not None
        return launches.forward(
            sizes.rows,
            staged.groups,
            chunks,
            states,
            sizes.tokens,
            drafts,
            scored,
            embeds,
            expanded,
        )


def _expanded(launches: StepLaunches, staged: StagedPlan) -> PrefixSight | None:
    """Returns the counts of a step's prefix groups if latent attention is to expand them: their
    number differs from step to step, so that the step is no graph. None: it isn't."""
    expands, plan = launches.expands_prefixes, staged.plan
    if expands is None or not staged.groups or staged.queries < PREFIX_ROWS:
        return None
    seen = PrefixSight.of(plan.group_queries, plan.group_length)
    return seen if expands(seen.stored, seen.pairs) else None


class Late:
    """Late steps: rows have constraints, whose masks depend on tokens in flight at the launch."""

    def __init__(
        self,
        decode: Decode,
        beside: Beside,
        draw: StepDraw,
        launches: StepLaunches,
        staging: Staging,
        masks: MappedMasks,
        max_rows: int,
    ) -> None:
        self._decode, self._beside, self._draw, self._sampler = (
            decode,
            beside,
            draw,
            launches.sampler,
        )
        self._staging, self._masks, self._max_rows = staging, masks, max_rows
        self._waits: tuple[StagedPlan, Tensor] | None = (
            None  # the step whose draw has not been launched yet
        )

    def launch(self, staged: StagedPlan) -> Outcome:
        """Launches only the forward; returns an Outcome without tokens."""
        kind = self._decode if staged.chunks is None else self._beside
        self._waits = staged, kind.forward(staged)
        return Outcome(NO_TOKENS)

    def draw(self, late: LateMasks) -> Outcome:
        """Launches the draw of the step whose forward was launched last."""
        assert self._waits is not None, "no forward waits for its draw"
        (staged, hidden), self._waits = self._waits, None
        self._take(staged.plan, late)
        return self._draw.launch(staged, hidden, forces=late.forced.size > 0)

    def _take(self, plan: StepPlan, late: LateMasks) -> None:
        """Copies token masks to their slots. Rows whose mask is missing are replaced by the dead
        row for this draw, so that they draw no token."""
        device = self._staging.device
        if late.slots.size:
            slots = to_device(late.slots.astype(np.int64), device)
            self._sampler.masks.index_copy_(0, slots, self._masks.take(late.words, late.places))
        if late.forced.size:
            self._sampler.force(late.forced, late.tokens)
        if late.sit_out.size:
            sits = np.zeros(self._max_rows + 1, np.bool_)
            sits[late.sit_out] = True
            out = np.flatnonzero(sits.take(plan.query_rows))
            self._staging.rows.index_fill_(0, to_device(out, device), self._max_rows)
            self._staging.forget()
