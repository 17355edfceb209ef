"""What `penstock deploy ray` asks of Serve, and what it refuses: without Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import CapacityError, UsageError
from penstock.on_ray import run_service as run_ray
from penstock.on_ray.cluster import RayCluster, RayNode
from penstock.on_ray.deployment import PATH, REQUESTS, RayDeployment
from penstock.on_ray.ray_scaling import SHARE, share_of, wanted_replicas
from penstock.on_ray.replica import site_of
from penstock.on_ray.run_service import (
    ServeFile,
    check_cluster,
    read_serve_file,
    serve_environment,
    write_serve_file,
)

ONE = RayCluster((RayNode("a", 8, 2),), own=True)
TWO = RayCluster((RayNode("a", 8, 2), RayNode("b", 8, 2)), own=False)
ARGS: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "tensor_parallel_size": 2,
    "min_replicas": 0,
    "max_replicas": 4,
    "target_seconds": 5.0,
    "allowed_hosts": ["llm.example"],
    "allow_no_key": True,
    "shutdown_timeout": 100.0,
    "reasoning_parser": "qwen3",
}


def test_args_there_and_back() -> None:
    made = RayDeployment.of(ARGS)
    assert made.args() == ARGS and RayDeployment.of(made.args()) == made
    assert made.knobs == {
        "model": "Qwen/Qwen3-8B",
        "tensor_parallel_size": 2,
    } and made.allowed_hosts == ("llm.example",)
    assert RayDeployment().args() == {} and RayDeployment().most == 1


def test_what_serve_is_asked_for() -> None:
    made = RayDeployment.of(ARGS)
    options = made.serve_options(made.gpus(there=4))
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 2}
    assert options["max_ongoing_requests"] == REQUESTS > 100_000  # refusing is ours
    assert options["graceful_shutdown_timeout_s"] > made.shutdown_timeout
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (0, 4)
    assert (
        scaling["policy"]["policy_function"]
        == f"{wanted_replicas.__module__}:{wanted_replicas.__name__}"
    )
    assert (made.gpus(there=0), RayDeployment.of({"device": "cpu"}).gpus(8)) == (0, 0)
    # and is refused by the cluster's count
    assert RayDeployment.of({"device": "cuda"}).gpus(0) == 1
    environment = serve_environment()
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    # of a stream that outlives a reload
    assert int(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 3600


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_replica": 2}, "unknown option 'max_replica'"),
        ({"data_parallel_size": 2}, "replicas are Serve's"),
        ({"min_replicas": 3, "max_replicas": 2}, r"max_replicas \(2\) is below min_replicas \(3\)"),
        ({"min_replicas": 0, "max_replicas": 0}, "max_replicas"),
        ({"min_replicas": "two"}, "min_replicas must be int, not 'two'"),
        ({"min_replicas": True}, "min_replicas must be int"),
        ({"target_seconds": 0}, "target_seconds must be a number from 0.1 on, not 0"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout must be a number"),
        ({"state_dir": "here"}, "give the whole path"),
        ({"state_dir": "/s", "max_replicas": 2}, "one replica keeps files and batches"),
        ({"state_dir": "/s", "min_replicas": 0}, "one replica keeps files and batches"),
        ({"tool_call_parser": "nobody's"}, "nobody's"),
        ({"name": 7}, "name must be str"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_what_is_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RayDeployment.of(args)


@pytest.mark.parametrize(
    ("cluster", "args", "kind", "says"),
    [
        (
            ONE,
            {"tensor_parallel_size": 4},
            CapacityError,
            r"1 replica of 4 GPUs.* ask for 4, .* has 2 \(2 at a\)",
        ),
        (
            TWO,
            {"min_replicas": 5, "host": "0.0.0.0"},
            CapacityError,
            "5 replicas of 1 GPU, .* ask for 5, .* has 4",
        ),
        (ONE, {"cpus": 9.0}, CapacityError, "1 replica of 9 cores ask for 9, .* has 8"),
        (
            TWO,
            {"host": "127.0.0.1"},
            UsageError,
            "on 127.0.0.1 no machine of the cluster hears another, and it has 2",
        ),
    ],
)
def test_what_a_cluster_lacks(
    cluster: RayCluster, args: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        check_cluster(cluster, RayDeployment.of(args))
    check_cluster(cluster, RayDeployment.of({"host": "0.0.0.0"}))


def test_a_state_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = RayDeployment.of({"state_dir": str(tmp_path / "state"), "host": "0.0.0.0"})
    monkeypatch.setattr(run_ray, "nodes_without", lambda mark: [] if mark.exists() else ["a"])
    check_cluster(TWO, deployment)
    assert not list((tmp_path / "state").iterdir())
    monkeypatch.setattr(run_ray, "nodes_without", lambda mark: ["10.0.0.2"])
    with pytest.raises(
        UsageError, match=r"state isn't shared: 10\.0\.0\.2 of the cluster doesn't see it"
    ):
        check_cluster(TWO, deployment)
    assert not list((tmp_path / "state").iterdir())


def test_who_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said of Serve's address, as in a config file of somebody's own, others are
    taken to reach it."""
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    for args in ({}, {"host": "0.0.0.0"}):
        with pytest.raises(UsageError, match="no API key is set"):
            site_of(RayDeployment.of(args))
    assert not site_of(RayDeployment.of({"host": "127.0.0.1"})).access.keys
    assert not site_of(RayDeployment.of({"allow_no_key": True})).access.keys
    assert site_of(RayDeployment.of(ARGS)).parsers.reasoning_parser == "qwen3"
    monkeypatch.setenv("PENSTOCK_API_KEY", "sesame-sesame")
    assert len(site_of(RayDeployment()).access.keys) == 1


def test_a_config_file_there_and_back(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    file = ServeFile(RayDeployment.of({**ARGS, "name": "mine", "host": "0.0.0.0"}), 8123, "/llm")
    write_serve_file(file, tmp_path / "app.yaml")
    assert read_serve_file(tmp_path / "app.yaml") == file
    told = yaml.safe_load((tmp_path / "app.yaml").read_text())
    assert told["http_options"] == {"host": "0.0.0.0", "port": 8123}
    assert [(a["name"], a["import_path"], a["route_prefix"]) for a in told["applications"]] == [
        ("mine", PATH, "/llm")
    ]
    with pytest.raises(UsageError, match="is there already"):
        write_serve_file(file, tmp_path / "app.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("applications: [", "is no Serve config file"),
        ("applications: []", "is no Serve config file of one application"),
        ("- 1", "is no Serve config file"),
        ("applications: [{import_path: 'a:b'}]", r"imports a:b: bring it to Ray by `serve deploy"),
        (
            f"applications: [{{import_path: '{PATH}', args: {{modell: x}}}}]",
            "unknown option 'modell'",
        ),
        (f"applications: [{{import_path: '{PATH}', args: 3}}]", "is no Serve config file"),
    ],
)
def test_a_config_file_that_is_none(text: str | None, says: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "app.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_serve_file(path)


@dataclass
class Context:
    """Of Serve's, what the policy looks at."""

    shares: list[float]
    total_num_requests: float = 0.0
    aggregated_metrics: dict[str, dict[int, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.aggregated_metrics = {SHARE: dict(enumerate(self.shares))} if self.shares else {}


@pytest.mark.parametrize(
    ("shares", "requests", "wanted"),
    [
        ([], 0, 0),
        ([], 3, 1),
        ([0.0], 0, 0),
        ([0.0], 1, 1),
        ([0.2], 1, 1),
        ([2.5], 9, 3),
        ([0.4, 0.5], 2, 1),
        ([3.0], 0, 3),
    ],
)
def test_how_many_there_should_be(shares: list[float], requests: float, wanted: int) -> None:
    assert wanted_replicas(Context(shares, requests)) == (wanted, {})


def test_a_replica_is_full_where_something_waits() -> None:
    assert share_of({"expected_seconds_left": 90.0, "waiting": 4}, 30.0) == 3.0
    # no second one would speed it up
    assert share_of({"expected_seconds_left": 90.0, "waiting": 0}, 30.0) == 1.0
    assert share_of({"expected_seconds_left": 6.0, "waiting": 0}, 30.0) == 0.2
    assert share_of({}, 30.0) == 0.0


def test_the_command_writes_or_deploys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    pytest.importorskip("ray", reason="ray isn't installed: make packaging")
    deployed: list[tuple[ServeFile, str | None]] = []
    monkeypatch.setattr(
        run_ray, "deploy_on_ray", lambda file, address: deployed.append((file, address))
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["penstock", "deploy", "ray", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    asked = (
        "--model",
        "model",
        "--max-replicas",
        "3",
        "--max-num-seqs",
        "7",
        "--port",
        "81",
        "--state-dir",
        "s",
    )
    assert (
        run(*asked, "--out", "app.yaml") == 2
        and "one replica keeps files" in capsys.readouterr().err
    )
    assert run(*asked[:-2], "--out", "app.yaml") == 0 and not deployed
    file = read_serve_file(tmp_path / "app.yaml")
    # as seen from anywhere
    assert file.deployment.knobs == {
        "model": str(tmp_path / "model"),
        "max_num_seqs": 7,
    }
    assert (file.deployment.most, file.host, file.port) == (3, "127.0.0.1", 81)
    assert run("app.yaml", "--address", "h:1") == 0 and deployed == [(file, "h:1")]
    assert (
        run("app.yaml", "--port", "82") == 2
        and "--port is said in app.yaml" in capsys.readouterr().err
    )
    assert run(*asked[:-2]) == 0 and deployed[1:] == [(file, None)]
