"""Drafts that a LayerProposer makes, taken down by the tokens before them, and held against those of
a slow twin (draft_models.py)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import BLOCK_SIZE
from penstock.execute.layer_proposer import LayerProposer
from penstock.execute.proposer import Drawn
from penstock.kernels.row_state import SCRATCH_BLOCK

NEAR = 1e-4  # scores closer than that may change places in the last digit
Seen = dict[tuple[int, ...], list[int]]  # a row's tokens -> its drafts


def seen_drafts(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What rows draft from now on, of rows with room for all that the drafter stores."""
    seen: Seen = {}
    launch = LayerProposer.launch

    def look(self: LayerProposer, drawn: Drawn) -> None:
        launch(self, drawn)
        rows, tokens = self._rows, self._kv.slot_token
        for row in set(self._staging.rows[: drawn.size].tolist()) if drawn.proposes else ():
            if row != self._dead and not rows.done[row]:
                length, table = int(rows.length[row]), rows.block_table[row].long()
                if int((table != SCRATCH_BLOCK).sum()) * BLOCK_SIZE > length + self._most:
                    text = tokens[table].flatten()[:length].tolist()
                    drafts = rows.drafts[row, : self._most].tolist()
                    seen[*text, int(rows.last_token[row])] = drafts

    monkeypatch.setattr(LayerProposer, "launch", look)
    return seen


def check_drafts(seen: Seen, twin: Any, every: int) -> None:
    """Asserts that drafts are the twin's, of one in `every` texts."""
    assert len(seen) > 40
    for text, drafts in list(seen.items())[::every]:
        for mine, (theirs, lead) in zip(drafts, twin.drafts(list(text), 3), strict=True):
            assert mine == theirs or lead < NEAR
            if mine != theirs:
                break
