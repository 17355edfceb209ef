"""ModelledOutputs: reads a modelled device's tokens. The modelled device says which rows end, and
its tokens have no meaning, so none is stored or sent to a client; that saves most of the time of
reading a step. Lengths and ends are the same as the engine's own OutputProcessor gives
(tests/simulate/test_modelled_replica.py).
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.deltas import NO_STOP_ID, STOP, Deltas, empty_deltas
from penstock.schedule.output_processor import OutputProcessor, Read
from penstock.schedule.step import NO_TOKEN, Int32, StepPlan, StepTokens

# token ids: END ends an answer, WORD is each of its other tokens, prompts use ids from FIRST on
END, WORD, FIRST, VOCABULARY = (0, 1, 2, 65_536)
_NO_ROWS, _NO_PLACES = np.zeros(0, np.int32), np.zeros(0, np.int64)


class ModelledOutputs(OutputProcessor):
    """Reads steps of a device that draws WORD for each token of an answer, then END."""

    def read(self, plan: StepPlan, result: StepTokens) -> Read:
        """Reads one step. A row's read length is stored only at its end, because no code needs it
        before."""
        rows, over = plan.rows, result.tokens == END
        ended, taken = rows[over], int(np.count_nonzero(result.tokens != NO_TOKEN))
        self.rows.read_length[ended] = plan.lengths[over] + 1
        deltas = self._ends_of(ended)
        return Read(
            ended, _NO_PLACES, _NO_ROWS, over[:0], _NO_ROWS, deltas, taken, rows.size - taken
        )

    def tokens_of(self, row: int) -> Int32:
        """Returns the tokens that a row has generated, once all its steps are read; no two samples
        of a prompt have equal ones."""
        made = int(self.rows.planned_length[row] + 1 - self.rows.prompt[row])
        mark = int(self.rows.request[row]) * 7919 + int(self.rows.sample[row])
        return np.full(made, FIRST + mark % (VOCABULARY - FIRST), np.int32)

    def _ends_of(self, rows: Int32) -> Deltas:
        if not rows.size:
            return empty_deltas()
        return Deltas(
            request=self.rows.request[rows],
            sample=self.rows.sample[rows],
            finish=np.full(rows.size, STOP, np.int8),
            stop_id=np.full(rows.size, NO_STOP_ID, np.int32),
            start=np.zeros(rows.size + 1, np.int32),
            tokens=_NO_ROWS,
        )
