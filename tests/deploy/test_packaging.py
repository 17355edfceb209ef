"""The files of deploy/: linted by tools that install as wheels, their commands read by our own
parser, the Slurm script run. No image is built and no cluster asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from penstock.cli import app

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
MANIFESTS = ["kubernetes.yaml", "autoscaler.yaml"]
YAML_RULES = (
    "{extends: default, rules: {line-length: {max: 120}, document-start: disable, "
    "comments: {min-spaces-from-content: 1}}}"
)
LINTERS = [
    ("hadolint", ["--failure-threshold", "info"], "Dockerfile"),
    ("shellcheck", [], "run_array.sh"),
    ("check-jsonschema", ["--builtin-schema", "vendor.compose-spec"], "compose.yaml"),
    *(("kubernetes-validate", ["--strict"], name) for name in MANIFESTS),
    *(("yamllint", ["--strict", "-d", YAML_RULES], name) for name in [*MANIFESTS, "compose.yaml"]),
]


def tool(name: str) -> str:
    """Where a linter is: beside this Python, or on the path;
    else the test is skipped by its name."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} isn't installed: make packaging")
    return found


@pytest.mark.parametrize(("linter", "options", "name"), LINTERS)
def test_a_file_is_in_order(linter: str, options: list[str], name: str) -> None:
    done = subprocess.run(
        [tool(linter), *options, str(DEPLOY / name)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("linter", "options", "name", "good", "bad"),
    [
        (*LINTERS[0], "apt-get install -y", "apt-get install"),
        (*LINTERS[1], '"$child"', "$child"),
        (*LINTERS[2], "shm_size", "shm_sice"),
        (*LINTERS[3], "startupProbe", "startProbe"),
        (*LINTERS[4], "maxReplicas: 8", "maxReplicas: many"),
    ],
)
def test_a_linter_sees_what_is_wrong(
    linter: str, options: list[str], name: str, good: str, bad: str, tmp_path: Path
) -> None:
    text = (DEPLOY / name).read_text()
    assert good in text
    (tmp_path / name).write_text(text.replace(good, bad))
    assert (
        subprocess.run(
            [tool(linter), *options, str(tmp_path / name)], capture_output=True
        ).returncode
        != 0
    )


# --- what they start


def parsed(words: list[str]) -> dict[str, Any]:
    command: Any = get_command(app)
    values: dict[str, Any] = command.commands[words[0]].make_context(words[0], words[1:]).params
    return values


def instructions(name: str) -> dict[str, list[str]]:
    """The Dockerfile's instructions by their word, continued lines joined."""
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", (DEPLOY / name).read_text()).splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
    return found


def deployment() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (found,) = (each for each in documents if each["kind"] == "Deployment")
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def test_the_image_starts_our_command_and_copies_what_there_is() -> None:
    image = instructions("Dockerfile")
    assert json.loads(image["ENTRYPOINT"][0]) == ["penstock"]
    assert parsed(json.loads(image["CMD"][0]))["port"] == int(image["EXPOSE"][0])
    copied = [path for line in image["COPY"] for path in line.split()[:-1]]
    allowed = re.findall(r"^!(.+)", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    assert sorted(copied) == sorted(allowed) and all(
        (REPOSITORY / path).exists() for path in copied
    )


def test_compose_waits_longer_than_the_server_drains() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["penstock"]
    asked = parsed(service["command"])
    assert (asked["host"], str(asked["state_dir"])) == ("0.0.0.0", "/state")
    assert int(service["stop_grace_period"].removesuffix("s")) > asked["shutdown_timeout"]
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert mounted == set(json.loads(instructions("Dockerfile")["VOLUME"][0]))


def test_kubernetes_waits_longer_than_the_server_drains_and_takes_no_drain_for_death() -> None:
    spec = deployment()
    (container,) = spec["containers"]
    asked = parsed(container["args"])
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > before + asked["shutdown_timeout"]
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > asked["shutdown_timeout"]
    assert container["ports"][0]["containerPort"] == asked["port"]


@pytest.mark.torch
def test_every_probe_asks_for_a_route_that_wants_no_key() -> None:
    from penstock.server.online.auth import OPEN_PATHS

    (container,) = deployment()["containers"]
    probes = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert set(probes.values()) <= set(OPEN_PATHS)
    assert probes["liveness"] == "/health/live" and probes["readiness"] == "/health"


def test_the_autoscaler_counts_by_a_metric_that_there_is() -> None:
    scaler = yaml.safe_load((DEPLOY / "autoscaler.yaml").read_text())
    (metric,) = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].removeprefix("penstock_")
    assert f'"{name}"' in (REPOSITORY / "src/penstock/server/online/metrics.py").read_text()
    assert (
        scaler["spec"]["scaleTargetRef"]["name"] == "penstock"
        and scaler["spec"]["minReplicas"] == 1
    )


# --- the Slurm array


def array(folder: Path, task: int, tasks: int, *options: str, **more: str) -> subprocess.Popen[str]:
    """Task `task` of an array over folder/in, as Slurm starts it; programs of folder/bin come
    first."""
    environment = os.environ | {
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_COUNT": str(tasks),
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_JOB_ID": "7",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        **more,
    }
    script = [str(DEPLOY / "run_array.sh"), str(folder / "in"), str(folder / "out"), *options]
    return subprocess.Popen(
        script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def prompts(folder: Path, files: int) -> None:
    (folder / "in").mkdir()
    for number in range(files):
        row = {"id": f"{number}", "prompt": "Tom has 3", "max_tokens": 2}
        (folder / "in" / f"{number}.jsonl").write_text(json.dumps(row) + "\n")


def test_a_task_takes_every_nth_file(tmp_path: Path) -> None:
    prompts(tmp_path, 5)
    program(tmp_path, "penstock", 'echo "$@"; [[ $2 != */0.jsonl ]]')
    told, _ = (first := array(tmp_path, 0, 2, "--model", "demo")).communicate(timeout=600)
    folders = f"run {tmp_path}/in/%d.jsonl {tmp_path}/out/%d.jsonl --model demo"
    assert told.splitlines() == [folders % (number, number) for number in (0, 2, 4)]
    asked = parsed(told.splitlines()[0].split())
    assert (asked["source"], asked["out"]) == (
        tmp_path / "in" / "0.jsonl",
        tmp_path / "out" / "0.jsonl",
    )
    assert first.returncode == 1  # one of its files failed, and the others were run
    told, _ = (second := array(tmp_path, 1, 2)).communicate(timeout=600)
    assert (len(told.splitlines()), second.returncode) == (2, 0)


def test_a_task_whose_time_is_over_stops_its_job_and_is_queued_again(tmp_path: Path) -> None:
    prompts(tmp_path, 3)
    job = (
        f'sleep 600 & trap "sleep 0.3; kill $!; echo ended; exit 143" TERM; touch {tmp_path}/up;'
        " wait"
    )
    program(tmp_path, "penstock", job)
    program(tmp_path, "scontrol", 'echo "scontrol $*"')
    task = array(tmp_path, 0, 1)
    while not (tmp_path / "up").exists() and task.poll() is None:
        time.sleep(0.02)
    task.send_signal(signal.SIGTERM)
    told, _ = task.communicate(timeout=600)
    assert told.splitlines()[0] == "ended" and told.splitlines()[-1] == "scontrol requeue 7_0"
    assert task.returncode == 143
