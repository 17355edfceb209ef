"""`build_app`: Penstock's server as a Ray Serve application. Can be called from Serve's config
files and from Python.

    applications:
      - {name: penstock, import_path: "penstock.on_ray.app:build_app", args: {model: ORG/NAME}}

Knows Serve. replica.py runs one replica, deployment.py checks the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.launch import ENGINE
from penstock.on_ray.deployment import RayDeployment
from penstock.on_ray.replica import ServeReplica


def build_app(args: Mapping[str, Any], *, engine: tuple[str, ...] = ENGINE) -> Any:
    """Returns the Serve application. args: fields of RayDeployment and engine options. Raises
    UsageError for invalid args. A replica is a whole engine, with the GPUs of its ranks on one
    machine. engine: command line of the engine process.
    """
    import ray
    from ray import serve

    deployment = RayDeployment.of(args)
    gpus = deployment.gpus(int(ray.cluster_resources().get("GPU", 0)))
    replica = serve.deployment(serve.ingress()(ServeReplica), **deployment.serve_options(gpus))
    return replica.bind(deployment.args(), engine)
