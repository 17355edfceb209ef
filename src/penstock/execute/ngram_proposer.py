"""NgramProposer: drafts by prompt lookup on the device. A row's last tokens are looked for earlier
in its own prompt and output, and what followed them there is drafted.

Knows rows and the tokens at their KV slots; no host, no model.
"""

from __future__ import annotations

from torch import Tensor

from penstock.execute.proposer import Drawn
from penstock.execute.staging_buffer import Staging
from penstock.kernels.ops import RowOps
from penstock.kernels.row_state import RowState
from penstock.speculative import SpeculativeConfig


class NgramProposer:
    """A Proposer. staging: holds the rows of a step's queries. slot_token: [blocks, 16] int32, the
    tokens stored at each KV slot."""

    follows = False

    def __init__(
        self,
        ops: RowOps,
        rows: RowState,
        staging: Staging,
        slot_token: Tensor,
        asked: SpeculativeConfig,
    ) -> None:
        self._ops, self._rows, self._staging, self._slot_token = ops, rows, staging, slot_token
        self._longest, self._shortest = asked.prompt_lookup_max, asked.prompt_lookup_min

    def launch(self, drawn: Drawn) -> None:
        """Launches the lookup for the step's rows; see Proposer."""
        self._look_up(drawn.size)

    def warm(self, sizes: list[int]) -> None:
        """Compiles the lookup, whose kernel is the same for every number of queries."""
        self._look_up(1)

    def _look_up(self, size: int) -> None:
        row_ids = self._staging.rows[:size]
        self._ops.draft_ngrams(row_ids, self._rows, self._slot_token, self._longest, self._shortest)
