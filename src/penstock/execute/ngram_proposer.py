"""NgramProposer: drafts by prompt lookup on the device. A row's last tokens are looked for earlier
in its own prompt and output, and what followed them there is drafted.

Knows rows and the tokens at their KV slots; no host, no model.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.ops import RowOps
from penstock.kernels.row_state import RowState
from penstock.speculative import SpeculativeConfig


class NgramProposer:
    """A Proposer. slot_token: [blocks, 16] int32, the tokens stored at each KV slot."""

    def __init__(self, ops: RowOps, slot_token: Tensor, asked: SpeculativeConfig) -> None:
        self._ops, self._slot_token = ops, slot_token
        self._longest, self._shortest = asked.prompt_lookup_max, asked.prompt_lookup_min

    def launch(self, rows: RowState, row_ids: Tensor, told: Tensor, hidden: Tensor) -> None:
        """Launches the lookup for the step's rows; see Proposer."""
        self._ops.draft_ngrams(row_ids, rows, self._slot_token, self._longest, self._shortest)
