"""FairQueue: queue of fork groups, fair between tenants. Within a tenant it is first come, first
served.

Each tenant has a queue of its own. Next is the first group of the tenant that has been given the
fewest tokens; a tenant that comes back after a pause starts level with the others, so that idle
tenants save up nothing (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996). With one
tenant it is a plain queue. A group that had started and was queued again goes before all others, in
order of arrival; its tokens have been counted already. Knows groups; no rows, no blocks.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from penstock.schedule.request_state import ForkGroup


class FairQueue:
    """Waiting groups. Their order depends only on the groups pushed and the tokens charged."""

    def __init__(self) -> None:
        self._back: list[ForkGroup] = []  # groups that had started before, in order of arrival
        # tenant -> its waiting groups; no empty deques
        self._lines: dict[int, deque[ForkGroup]] = {}
        # tenant -> tokens given to it, counted from its starting level
        self._given: dict[int, float] = {}
        # token count of the tenant served last: the starting level of tenants that come back
        self._level = 0.0
        self._newest = -1
        self._next: int | None = None  # tenant whose group is next; None: to be determined

    def __bool__(self) -> bool:
        return bool(self._back or self._lines)

    def __len__(self) -> int:
        return len(self._back) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[ForkGroup]:
        return chain(self._back, *self._lines.values())

    def __contains__(self, group: object) -> bool:
        if not isinstance(group, ForkGroup):
            return False
        return group in self._back or group in self._lines.get(group.live.tenant, ())

    def push(self, group: ForkGroup) -> None:
        arrival, tenant = group.live.arrival, group.live.tenant
        if arrival <= self._newest:
            insort(self._back, group, key=lambda other: other.live.arrival)
            return
        self._newest = arrival
        line = self._lines.get(tenant)
        if line is not None:
            line.append(group)
            return
        self._lines[tenant] = deque((group,))
        self._given[tenant] = max(self._given.get(tenant, 0.0), self._level)
        self._next = None

    @property
    def head(self) -> ForkGroup:
        """Returns the next group. Raises IndexError if the queue is empty."""
        return self._back[0] if self._back else self._lines[self._tenant()][0]

    def pop(self, tokens: float) -> ForkGroup:
        """Removes and returns the head; charges `tokens` to its tenant."""
        if self._back:
            return self._back.pop(0)
        tenant = self._tenant()
        group = self._lines[tenant].popleft()
        self._level = self._given[tenant]
        self._given[tenant] += tokens
        self._drop_if_empty(tenant)
        self._next = None
        return group

    def remove(self, group: ForkGroup) -> None:
        """Removes a group from any place. Raises ValueError if it isn't here."""
        if group in self._back:
            self._back.remove(group)
            return
        self._lines[group.live.tenant].remove(group)
        self._drop_if_empty(group.live.tenant)

    def _tenant(self) -> int:
        if self._next is None:
            if not self._lines:
                raise IndexError("nobody waits in this line")
            self._next = min(
                self._lines,
                key=lambda tenant: (self._given[tenant], self._lines[tenant][0].live.arrival),
            )
        return self._next

    def _drop_if_empty(self, tenant: int) -> None:
        if self._lines[tenant]:
            return
        del self._lines[tenant]
        self._next = None
        if not self._lines:
            self._given, self._level = {}, 0.0
