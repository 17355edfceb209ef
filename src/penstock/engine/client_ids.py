"""ClientIds: whose request is whose, where several clients share an engine.

Each client counts its requests from 0. The engine's id of a request is the client's times the number of clients, plus
the client's own number: unique, and it names its owner. It knows ids and columns; no processes, no messages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.engine.engine import Refused
from penstock.schedule.deltas import Deltas, PromptNews
from penstock.schedule.rows import spread
from penstock.schedule.step import Int64


class ClientIds:
    """Ids of `count` clients; with one client they stay as they are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def engine_id(self, client: int, request_id: int) -> int:
        return request_id * self.count + client

    def owns(self, client: int, engine_id: int) -> bool:
        return engine_id % self.count == client

    def deltas(self, every: Deltas | None) -> dict[int, Deltas]:
        """Each client's own of a step's news, in its own ids; clients without any are left out."""
        if every is None:
            return {}
        owner = every.request % self.count
        prompts: dict[int, list[PromptNews]] = {}
        for news in every.prompts:
            prompts.setdefault(news.request % self.count, []).append(replace(news, request=news.request // self.count))
        clients = {*np.flatnonzero(np.bincount(owner, minlength=self.count)).tolist(), *prompts}
        found = {client: self._part(every, np.flatnonzero(owner == client)) for client in clients}
        for client, mine in prompts.items():
            found[client].prompts = mine
        return found

    def refused(self, every: list[Refused]) -> dict[int, list[Refused]]:
        """As `deltas`, of requests that never ran."""
        found: dict[int, list[Refused]] = {}
        for one in every:
            mine = replace(one, request_id=one.request_id // self.count)
            found.setdefault(one.request_id % self.count, []).append(mine)
        return found

    def _part(self, every: Deltas, samples: Int64) -> Deltas:
        """News of these samples: indices [k] into the columns."""
        counts = np.diff(every.start)[samples].astype(np.int64)
        start = np.zeros(samples.size + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        # Where each sample has one token, as in most steps of streams, the tokens' places are the samples'.
        one = every.tokens.size == every.count
        places = samples if one else np.repeat(every.start[samples].astype(np.int64), counts) + spread(counts)
        return Deltas(
            request=every.request[samples] // self.count,
            sample=every.sample[samples],
            finish=every.finish[samples],
            stop_id=every.stop_id[samples],
            start=start,
            tokens=every.tokens[places],
            chosen=None if every.chosen is None else every.chosen[places],
            rank=None if every.rank is None else every.rank[places],
            top_ids=None if every.top_ids is None else every.top_ids[places],
            top=None if every.top is None else every.top[places],
        )
