"""The number of replicas that a service on Ray Serve should have, computed from each replica's
seconds of work; Serve then applies its delays and bounds. Runs in Serve's controller, and imports
nothing of Ray or of an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# name of the metric: a replica's seconds of work divided by target_seconds
SHARE = "penstock_share"


def share_of(stats: Mapping[str, float], target_seconds: float) -> float:
    """Returns how many replicas the work of one replica would fill; 1.0 is itself.

    Running requests don't get faster by another replica, so that a share above 1.0 needs waiting
    ones.
    """
    seconds = stats.get("expected_seconds_left", 0.0) / target_seconds
    return seconds if stats.get("waiting") else min(seconds, 1.0)


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Returns the number of replicas wanted, and no state. context: Serve's AutoscalingContext.

    Without replicas there are no shares, so that requests waiting at Serve's proxy count as one
    replica. Requests in progress count too, since they have no forecast in their first seconds.
    """
    shares: Mapping[Any, float] = (context.aggregated_metrics or {}).get(SHARE, {})
    wanted = math.ceil(sum(shares.values()) - 1e-9)
    return max(wanted, 1 if context.total_num_requests > 0 else 0), {}
