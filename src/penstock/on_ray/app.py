"""`build_app`: a Ray Serve application of Penstock's own server, for Serve's config files and for
Python.

    applications: [{name: penstock, import_path: "penstock.on_ray.app:build_app", args: {model:
    Qwen/Qwen3-8B}}]

It knows Serve; what a replica does is ray_replica's, what is asked for ray_deployment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.launch import ENGINE
from penstock.on_ray.deployment import RayDeployment
from penstock.on_ray.replica import ServeReplica


def build_app(args: Mapping[str, Any], *, engine: tuple[str, ...] = ENGINE) -> Any:
    """Returns the Serve application of RayDeployment's `args`. Raises UsageError for what can't be.

    A replica is a whole engine, with its ranks' GPUs on one machine. engine: as ServeReplica's.
    """
    import ray
    from ray import serve

    deployment = RayDeployment.of(args)
    gpus = deployment.gpus(int(ray.cluster_resources().get("GPU", 0)))
    replica = serve.deployment(serve.ingress()(ServeReplica), **deployment.serve_options(gpus))
    return replica.bind(deployment.args(), engine)
