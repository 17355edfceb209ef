"""RowTurns: the order in which a step's decode rows take their tokens into recurrent states, in
plain torch.

A row's tokens have turns: below 0 drafts of the step before, which are folded again; 0 the newest
token, after which the state is stored; above 0 this step's drafts. All rows take a token at turn 0,
and at other turns those that have one. Knows slots and positions; no formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import StateInputs, StepInputs

At = Tensor | slice  # indices


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of some rows, one each. Indices of tokens count those that are folded again first,
    then the step's. rows: numbers of their rows among the step's. folds: [n, 1, 1, 1], True if a
    token updates its row's state; None: all do."""

    at: At
    rows: Tensor
    folds: Tensor | None


@dataclass(frozen=True, slots=True)
class RowTurns:
    """The turns of a step with R rows and A tokens that are folded again."""

    slots: Tensor  # [R] int64: slot of each row
    again: int  # A
    again_slots: Tensor  # [A] int64
    again_positions: Tensor  # [A] int64
    turns: dict[int, Turn]  # ascending

    @classmethod
    def of(cls, inputs: StepInputs) -> RowTurns:
        """Returns the turns of a step, which are made once and kept in `inputs.states`."""
        states = inputs.states
        assert states is not None, "a layer with a recurrent matrix has slots"
        if states.order is None:
            states.order = cls._made(states, inputs.positions[: inputs.rows])
        made: RowTurns = states.order
        return made

    @classmethod
    def _made(cls, states: StateInputs, positions: Tensor) -> RowTurns:
        offset, slots = states.offset.to(torch.int64), states.slots.to(torch.int64)
        lag = torch.where(offset == 0, positions - states.folded, 0).clamp_(min=0)
        queries = torch.arange(offset.shape[0], device=offset.device)
        again = queries.repeat_interleave(lag)  # the query of each token's row
        back = torch.arange(again.shape[0], device=offset.device) - lag.cumsum(0)[again]
        turns, count = torch.cat((back, offset)), again.shape[0]
        rows = ((offset == 0).cumsum(0) - 1)[torch.cat((again, queries))]
        folds = torch.cat((again >= 0, states.folded <= positions))
        found = dict[int, Turn]()
        for turn in turns.unique().tolist():
            at: At = (turns == turn).nonzero()[:, 0]
            own = None if folds[at].all() else folds[at][:, None, None, None]
            found[turn] = Turn(at, rows[at], own)
        if len(found) == 1:
            found[0] = Turn(slice(0, turns.shape[0]), rows, found[0].folds)
        return cls(slots[offset == 0], count, slots[again], positions[again] + back, found)

    def scan(
        self,
        matrix: Tensor,
        out: Tensor,
        fold: Callable[[Tensor, At], Tensor],
        answer: Callable[[Tensor, At], Tensor],
    ) -> None:
        """Updates the rows' states in `matrix` [slots, heads, ...] up to their newest tokens, and
        writes each token's output to `out` [A + S or more, heads, numbers].

        fold: (states [n, heads, ...] float32, indices of n tokens) -> the states after these
        tokens. answer: the same arguments -> outputs of these tokens, for the states after them."""
        held = matrix.index_select(0, self.slots).float()
        for number, turn in self.turns.items():
            states = held if number == 0 else held[turn.rows]
            new = fold(states, turn.at)
            if turn.folds is not None:
                new = torch.where(turn.folds, new, states)
            out[turn.at] = answer(new, turn.at)
            if number == 0:
                matrix.index_copy_(0, self.slots, new.to(matrix.dtype))
                held = new
            else:
                held[turn.rows] = new
