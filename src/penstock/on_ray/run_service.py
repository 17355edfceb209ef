"""Deploys a service on Ray Serve. Does the work of `penstock deploy ray`, on a running cluster or
on one started on this machine. Reads and writes Serve's config files. deployment.py defines the
settings.
"""

from __future__ import annotations

import os
import re
import resource
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.disk import read_plain, write_new
from penstock.engine.launch import ENGINE
from penstock.errors import CapacityError, EngineError, UsageError
from penstock.on_ray.cluster import RayCluster, nodes_without, ray_cluster
from penstock.on_ray.deployment import PATH, SLACK, RayDeployment
from penstock.on_ray.replica import site_of
from penstock.server.api_server.port import url_of
from penstock.server.online.auth import is_loopback

# Seconds of an answer's stream. HAProxy restarts when the replicas change, and cuts streams from
# before the restart after this time; its default is 120.
LONGEST_STREAM = 86_400
MOST_CONNECTIONS = 65_536  # most connections of HAProxy, whose default is 4,096
LARGEST_FILE = 1 << 20  # bytes of a Serve config file
MOST_PARTS = 10_000  # most YAML values of one file
CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_REASON = re.compile(r"penstock\.errors\.\w+: (.+)")


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A Serve config file of one Penstock application."""

    deployment: RayDeployment
    port: int = 8000
    route_prefix: str = "/"

    @property
    def host(self) -> str:
        return self.deployment.host or "127.0.0.1"

    def text(self) -> str:
        """Returns the content of the Serve config file, in YAML."""
        import yaml

        application = {
            "name": self.deployment.name,
            "route_prefix": self.route_prefix,
            "import_path": PATH,
            "args": self.deployment.args(),
        }
        told = {
            "proxy_location": "EveryNode",
            "http_options": {"host": self.host, "port": self.port},
            "applications": [application],
        }
        return str(yaml.safe_dump(told, sort_keys=False))


def write_serve_file(file: ServeFile, out: Path) -> None:
    """Writes a new file. Raises UsageError if it exists."""
    write_new(out, file.text().encode())


def read_serve_file(path: Path) -> ServeFile:
    """Reads a Serve config file with one application, ours. Raises UsageError."""
    import yaml

    try:
        found = yaml.safe_load(read_plain(path, LARGEST_FILE).decode("utf-8"))
        if _parts(found) > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} parts, aliases followed")
        (application,) = found["applications"]
        http = found.get("http_options", {})
        if application["import_path"] != PATH:
            raise UsageError(
                f"{path} imports {application['import_path']}: bring it to Ray by `serve deploy"
                f" {path}`"
            )
        args = dict(application.get("args", {}))
        args.setdefault("name", application.get("name", "penstock"))
        if "host" in http:
            args.setdefault("host", http["host"])
        prefix = str(application.get("route_prefix", "/"))
        return ServeFile(RayDeployment.of(args), int(http.get("port", 8000)), prefix)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): name a Serve config file"
        ) from error
    except (
        yaml.YAMLError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        if isinstance(error, UsageError):
            raise
        why = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} is no Serve config file of one application ({why}): `penstock deploy ray --out"
            " FILE` writes one"
        ) from error


def _parts(value: object) -> int:
    """Counts the values inside a YAML value, each as often as it is referenced. Stops just above
    MOST_PARTS, since nine lines of aliases may expand to a billion values."""
    open_parts, count = [value], 0
    while open_parts and count <= MOST_PARTS:
        part, count = open_parts.pop(), count + 1
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        open_parts += inner
    return count


def serve_environment() -> dict[str, str]:
    """Returns environment variables that Serve reads at its import. They put HAProxy in front of
    the replicas, since Serve's usual proxy passes on only half as many stream events per second."""
    # HAProxy needs two and a half file descriptors per connection
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = (
        MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, files // 3)
    )
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_MAXCONN": str(most),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(LONGEST_STREAM),
        # seconds over which idle connections are closed after HAProxy restarts
        "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "5",
        # the default of 5 s is too short for HAProxy's start on a busy machine
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # Penstock's handlers never block the event loop, so they need no second thread
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # the default lets an idle replica wait 30 s before it ends
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    }


def deploy_on_ray(
    file: ServeFile, address: str | None = None, engine: tuple[str, ...] = ENGINE
) -> None:
    """Deploys the application and prints its address. On a cluster started here, stays until SIGINT
    or SIGTERM raises KeyboardInterrupt, then lets running requests end.

    Raises UsageError or CapacityError for what the cluster lacks, EngineError with the cause if a
    replica dies.
    """
    deployment = file.deployment
    name = site_of(deployment).name  # raises UsageError for invalid keys and addresses
    with ray_cluster(address, serve_environment()) as cluster:
        check_cluster(cluster, deployment)
        _serve(file, cluster, engine)
        print(
            f"penstock serves {name} at"
            f" {url_of(file.host, file.port)}{file.route_prefix.rstrip('/')}/v1",
            flush=True,
        )
        if not cluster.own:
            return
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            _end(deployment)


def _end(deployment: RayDeployment) -> None:
    """Deletes the application and waits for its running requests. Serve's own shutdown would end
    HAProxy and cut them. A second signal ends the wait."""
    from ray import serve

    seconds = deployment.shutdown_timeout
    print(
        f"penstock: lets running requests end, for {seconds:g} s at most; a second signal ends it"
        " at once",
        file=sys.stderr,
        flush=True,
    )
    serve.delete(deployment.name, _blocking=False)
    until = time.monotonic() + seconds + 2 * SLACK
    with suppress(KeyboardInterrupt):
        while deployment.name in serve.status().applications and time.monotonic() < until:
            time.sleep(0.2)
    serve.shutdown()


def check_cluster(cluster: RayCluster, deployment: RayDeployment) -> None:
    """Raises CapacityError or UsageError if the cluster cannot run the least number of replicas."""
    least = max(1, deployment.min_replicas)
    cluster.check_gpus(deployment.gpus(cluster.gpus), least, "replica")
    asked = least * deployment.cpus
    if asked > cluster.cpus:
        raise CapacityError(
            f"{least} replica{'s' * (least > 1)} of {deployment.cpus:g} cores ask for {asked:g},"
            f" and the Ray cluster has {cluster.cpus}: lower --cpus or --min-replicas, or start"
            " more nodes first"
        )
    if len(cluster.nodes) > 1 and is_loopback(deployment.host or "0.0.0.0"):
        raise UsageError(
            f"on {deployment.host} no machine of the cluster hears another, and it has"
            f" {len(cluster.nodes)}: say --host 0.0.0.0",
            param="host",
        )
    if deployment.state_dir is not None:
        _check_shared(Path(deployment.state_dir))


def _check_shared(folder: Path) -> None:
    """Raises UsageError if some machine of the cluster doesn't see the folder of files and
    batches."""
    mark = folder / f".seen-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written here ({error.strerror}): name a shared folder"
        ) from error
    try:
        blind = nodes_without(mark)
    finally:
        mark.unlink(missing_ok=True)
    if blind:
        raise UsageError(
            f"the state folder {folder} isn't shared: {', '.join(blind)} of the cluster doesn't see"
            " it. Name a folder that all machines mount, for the replica may run on any of them",
            param="state_dir",
        )


def _serve(file: ServeFile, cluster: RayCluster, engine: tuple[str, ...]) -> None:
    """Starts Serve and the application. Raises EngineError if the start fails, with only the last
    PenstockError of Serve's traceback."""
    import ray
    from ray import serve

    from penstock.on_ray.app import build_app

    actors: list[Mapping[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    if any(actor["name"] == CONTROLLER for actor in actors):
        print(
            "penstock: Serve runs there already: its address and its proxy stay as they are"
            " (docs/on_ray.md)",
            file=sys.stderr,
            flush=True,
        )
    logging = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(http_options={"host": file.host, "port": file.port}, logging_config=logging)
    app = build_app(file.deployment.args(), engine=engine)
    name = file.deployment.name
    there, old = name in serve.status().applications, _replicas(name)
    try:
        serve.run(app, name=name, route_prefix=file.route_prefix)
    except RuntimeError as error:
        why = _why_not_started(name, str(error))
        if not there:
            serve.delete(name)
        raise EngineError(f"no replica could be started: {why}") from error
    _wait_for_the_end_of(old, name)


def _why_not_started(name: str, said: str) -> str:
    """Returns why a start failed: the last PenstockError in Serve's messages."""
    from ray import serve

    told = serve.status().applications.get(name)
    said = "\n".join(
        [said, *(each.message for each in told.deployments.values())] if told else [said]
    )
    reasons = _REASON.findall(said)
    return reasons[-1] if reasons else " ".join(said.split())[-300:]


def _replicas(name: str) -> set[str]:
    """Returns the actor names of an application's replicas, starting and ending ones included."""
    import ray

    actors: list[Mapping[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return {
        actor["name"] for actor in actors if actor["name"].startswith(f"SERVE_REPLICA::{name}#")
    }


def _wait_for_the_end_of(old: set[str], name: str) -> None:
    """Waits until the replicas from before an update are gone. Serve reports success earlier: a
    starting replica may still have the old settings, and no replica is replaced while another one
    drains."""
    from ray import serve

    told = False
    while left := old & _replicas(name):
        if serve.status().applications[name].status == "DEPLOY_FAILED":
            raise EngineError(
                "the update was given up, and the old settings are served:"
                f" {_why_not_started(name, '')}"
            )
        if not told:
            print(
                f"penstock: {len(left)} replica{'s' * (len(left) > 1)} of before the update let"
                " running requests end",
                file=sys.stderr,
                flush=True,
            )
            told = True
        time.sleep(0.2)


def absolute_model(model: str) -> str:
    """Returns the absolute path of a model folder, since replicas run in other folders; keeps a hub
    id."""
    return os.path.abspath(model) if Path(model).is_dir() else model
