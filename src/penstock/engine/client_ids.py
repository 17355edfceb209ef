"""ClientIds: request ids of clients that share an engine.

Each client counts its requests from 0. The engine's id is client id × number of clients + client
number: unique, and it names the client. Knows ids and columns; no processes, no messages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.engine.engine import Refused
from penstock.schedule.deltas import Deltas, PromptNews


class ClientIds:
    """Converts request ids of `count` clients; with one client, ids are unchanged."""

    def __init__(self, count: int) -> None:
        self.count = count

    def engine_id(self, client: int, request_id: int) -> int:
        return request_id * self.count + client

    def owns(self, client: int, engine_id: int) -> bool:
        return engine_id % self.count == client

    def deltas(self, every: Deltas | None) -> dict[int, Deltas]:
        """Splits a step's deltas by client and converts their request ids to the client's; clients
        without any are left out."""
        if every is None:
            return {}
        owner = every.request % self.count
        prompts: dict[int, list[PromptNews]] = {}
        for news in every.prompts:
            prompts.setdefault(news.request % self.count, []).append(
                replace(news, request=news.request // self.count)
            )
        clients = {*np.flatnonzero(np.bincount(owner, minlength=self.count)).tolist(), *prompts}
        found = {}
        for client in clients:
            found[client] = every.part(np.flatnonzero(owner == client), prompts.get(client, []))
            found[client].request //= self.count
        return found

    def refused(self, every: list[Refused]) -> dict[int, list[Refused]]:
        """Returns each client's refusals, with the client's own request ids."""
        found: dict[int, list[Refused]] = {}
        for one in every:
            mine = replace(one, request_id=one.request_id // self.count)
            found.setdefault(one.request_id % self.count, []).append(mine)
        return found
