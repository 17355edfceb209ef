"""How many replicas a service on Ray Serve should have, from the seconds of work that each has.
Serve's delays and bounds come behind it. It runs in Serve's controller, and imports nothing of Ray
or of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# of a replica that a replica's work fills: its seconds of drain over those that it may have
SHARE = "penstock_share"


def share_of(stats: Mapping[str, float], target_seconds: float) -> float:
    """Returns the replicas that the work of one would fill, 1.0 being itself.

    What runs already runs no sooner beside another replica: more are worth their start only where
    something waits.
    """
    seconds = stats.get("expected_seconds_left", 0.0) / target_seconds
    return seconds if stats.get("waiting") else min(seconds, 1.0)


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Returns how many replicas there should be, and no state. context: Serve's AutoscalingContext.

    While there are none nobody tells a share: then whoever waits at the door counts. Who is served
    counts too, since the first seconds of a request have no forecast.
    """
    shares: Mapping[Any, float] = (context.aggregated_metrics or {}).get(SHARE, {})
    wanted = math.ceil(sum(shares.values()) - 1e-9)
    return max(wanted, 1 if context.total_num_requests > 0 else 0), {}
