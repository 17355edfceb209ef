"""Decides how many Ray Serve replicas are needed. Adds up the seconds that each replica needs for
its queued requests; Serve then applies its delays and bounds. Runs in Serve's controller, and
imports nothing of Ray or of an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# name of the metric: seconds that a replica needs for its queued requests, over target_seconds
SHARE = "penstock_share"


def share_of(stats: Mapping[str, float], target_seconds: float) -> float:
    """Returns how many replicas the work of one replica would fill; 1.0 means just itself. Another
    replica doesn't make running requests faster, so the result exceeds 1.0 only if requests wait.
    """
    seconds = stats.get("expected_seconds_left", 0.0) / target_seconds
    return seconds if stats.get("waiting") else min(seconds, 1.0)


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Returns the number of replicas wanted, and an empty state. context: Serve's
    AutoscalingContext. If any request waits at Serve's proxy or runs, at least one replica is
    wanted: without replicas nothing reports work, and new requests have no forecast in their first
    seconds.
    """
    shares: Mapping[Any, float] = (context.aggregated_metrics or {}).get(SHARE, {})
    wanted = math.ceil(sum(shares.values()) - 1e-9)
    return max(wanted, 1 if context.total_num_requests > 0 else 0), {}
