"""A drafter that knows what is coming; it knows the scheduler's rows, no device."""

from __future__ import annotations

import numpy as np

from penstock.request import RequestOutput
from penstock.row_table import MAX_DRAFTS
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import Drafts, Int32


class Oracle:
    """A drafter that offers what samples gave alone, every third token spoilt."""

    def __init__(self, scheduler: Scheduler, alone: list[RequestOutput]) -> None:
        self.scheduler = scheduler
        self.told = {tuple(out.prompt_token_ids): out.outputs[0].token_ids for out in alone}

    most, reach = MAX_DRAFTS, MAX_DRAFTS
    proposes, follows, idle = 0, False, False

    def wants(self, rows: Int32) -> bool:
        return True

    def settled(self, rows: Int32, offered: Int32, right: Int32) -> None:
        """Learns nothing."""

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        start, tokens, columns = [0], list[int](), self.scheduler.rows
        for row, length, longest in zip(
            rows.tolist(), lengths.tolist(), most.tolist(), strict=True
        ):
            prompt = (
                self.scheduler.groups[int(columns.group[row])]
                .tokens[: columns.prompt[row]]
                .tolist()
            )
            ahead = self.told[tuple(prompt)][length + 1 - len(prompt) :][: min(longest, length % 5)]
            tokens += [token if (length + i) % 3 else 1 for i, token in enumerate(ahead)]
            start.append(len(tokens))
        return Drafts(np.array(start, np.int32), np.array(tokens, np.int32))
