"""Proposer: what guesses rows' next tokens on the device, so that the host offers their number
alone. Nobody does yet.

It knows rows and what a step left on the device; no plans, no host.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.row_state import RowState


class Proposer(Protocol):
    """Makes drafts behind each draw. Whatever it makes, the tokens are the same: a good guess saves
    a step."""

    def launch(self, rows: RowState, row_ids: Tensor, told: Tensor, hidden: Tensor) -> None:
        """Launches what writes rows.drafts of the step's rows: the tokens, of the vocabulary, that
        are guessed to come at positions length + 1 and on, where the draw has left `length`.

        row_ids [S] int32 of queries: a row's are neighbours; the dead row pads. told [S] int32: the
        token drawn after each query, as the host is told. hidden [S or more, d]: of the queries.
        """
