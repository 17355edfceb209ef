"""Proposer: interface for draft models on the device. A proposer drafts rows' next tokens on the
device, so that the host plans only their number. `ngram_proposer.py` is one.

Knows rows and a step's results on the device; no plans, no host.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.row_state import RowState


class Proposer(Protocol):
    """Makes draft tokens after each draw. Drafts never change the output; a right guess saves a
    step."""

    def launch(self, rows: RowState, row_ids: Tensor, told: Tensor, hidden: Tensor) -> None:
        """Launches kernels that write rows.drafts of the step's rows: guesses of the tokens at
        positions length + 1 and on, where the draw has updated `length`.

        row_ids [S] int32 of queries: a row's are adjacent; padded with the dead row. told [S]
        int32: the token drawn after each query. hidden [S or more, d]: of the queries.
        """
