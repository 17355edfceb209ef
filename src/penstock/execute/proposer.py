"""Proposer: interface for what drafts tokens on the device. It drafts rows' next tokens there, so
that the host plans only their number. `ngram_proposer.py` and `layer_proposer.py` are two.

Knows rows and a step's results on the device; no plans, no host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.execute.packing import StagedChunks


@dataclass(slots=True)
class Drawn:
    """A step whose tokens have been drawn. T: its tokens, S of them decode queries, which come
    first."""

    size: int  # S, padding included
    rows: int  # number of rows with queries, without padding
    hidden: Tensor  # [T or more, d] of the step's tokens; without chunks [S or more, d]
    chunks: StagedChunks | None  # prompt chunks of the step
    proposes: int  # most drafts of a row that are wanted; 0: none


class Proposer(Protocol):
    """Makes draft tokens after each draw. Drafts never change the output; a right guess saves a
    step."""

    @property
    def follows(self) -> bool:
        """True if it keeps K and V of its own: then `launch` is called for every step with prompt
        chunks or with StepPlan.follows, with the hidden states of all tokens."""

    def launch(self, drawn: Drawn) -> None:
        """Launches kernels that write rows.drafts of the step's rows: guesses of the tokens at
        positions length + 1 and on, where the draw has updated `length`."""

    def warm(self, sizes: list[int]) -> None:
        """Compiles the kernels of `launch` for steps of so many queries, all of the dead row."""
