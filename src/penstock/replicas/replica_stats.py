"""ReplicaStats: stats of one replica across restarts. Also combines several replicas' stats as if
they were one engine's. Knows names of stats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# Names of gauges; all other stats are counters, which stay when a replica is down. Over replicas
# some gauges are added, shares and means are averaged, and of others (expected seconds) the largest
# counts.
_ADDED = {"running", "waiting", "tokens_per_second", "tokens_left", "prompt_tokens_left"}
_AVERAGED = {
    "kv_usage",
    "hardware_limit",
    "mean_output_tokens",
    "token_seconds",
    "prompt_token_seconds",
    "step_seconds",
}
_LARGEST = {"expected_seconds_left"}
GAUGES = _ADDED | _AVERAGED | _LARGEST


class ReplicaStats:
    """Stats of one replica. now: the running engine's last stats; empty while none runs. Counters
    of engines that have ended are added."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self._before: Counter[str] = Counter()

    def ended(self) -> None:
        """Adds the counters of an engine that has ended to the kept ones."""
        for name in self.now.keys() - GAUGES:
            self._before[name] += self.now[name]  # type: ignore[assignment]
        self.now = {}

    @staticmethod
    def together(replicas: Sequence[ReplicaStats]) -> dict[str, float]:
        """Returns the replicas' stats combined as one engine's."""
        told = [replica.now for replica in replicas if replica.now]
        found: dict[str, float] = {}
        for name in {name for stats in told for name in stats} | {
            name for r in replicas for name in r._before
        }:
            values = [stats[name] for stats in told if name in stats]
            if name in _AVERAGED:
                found[name] = sum(values) / len(values)
            elif name in _LARGEST:
                found[name] = max(values)
            else:
                found[name] = sum(values) + sum(replica._before[name] for replica in replicas)
        return found
