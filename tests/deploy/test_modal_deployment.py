"""What a Modal deployment comes to: bounds told in a line each, and command lines that our own
parser takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from penstock.cli import app
from penstock.deploy.modal_deployment import LONGEST_GRACE, ModalDeployment
from penstock.errors import UsageError

HUB = "meta-llama/Llama-3.2-1B"


def deployment(**more: Any) -> ModalDeployment:
    return ModalDeployment(
        **{"model": HUB, "name": "penstock-llama", "package": "penstock==1", **more}
    )


def parsed(words: list[str]) -> dict[str, Any]:
    """The values that a command's own parser reads from its words; it exits where it cannot."""
    command: Any = get_command(app)
    values: dict[str, Any] = command.commands[words[0]].make_context(words[0], words[1:]).params
    return values


def test_the_server_listens_for_modal_and_leaves_who_asks_to_its_proxy() -> None:
    asked = parsed(["serve", HUB, *deployment().serve_options()])
    assert (asked["host"], asked["port"], asked["served_model_name"]) == ("0.0.0.0", 8000, HUB)
    assert asked["allow_no_key"] and asked["allowed_host"] == ["*"]


def test_a_key_takes_the_place_of_allowing_none() -> None:
    with_key = deployment(key_secret="penstock-key", unauthenticated=True, hub_secret="huggingface")
    asked = parsed(["serve", HUB, *with_key.serve_options()])
    assert not asked["allow_no_key"] and with_key.secrets() == ["huggingface", "penstock-key"]


def test_modal_waits_longer_than_the_server_drains() -> None:
    asked = parsed(["serve", HUB, *deployment(shutdown_timeout=100).serve_options()])
    assert (
        asked["shutdown_timeout"]
        == 100
        < deployment(shutdown_timeout=100).exit_grace_period
        <= LONGEST_GRACE
    )


def test_the_build_keeps_the_engine_options_and_the_server_gets_what_no_artifact_keeps() -> None:
    knobs = {
        "max_num_seqs": 512,
        "quantization": "fp8",
        "data_parallel_size": 2,
        "enable_prefix_caching": False,
    }
    made = deployment(gpu="H200:2", knobs=knobs, revision="abc", shapes=("128x128:8", "1x1:1"))
    built = parsed(made.build_command()[1:])
    assert (built["model"], str(built["out"]), built["shape"]) == (
        HUB,
        made.artifact,
        ["128x128:8", "1x1:1"],
    )
    assert (built["max_num_seqs"], built["quantization"], built["revision"]) == (512, "fp8", "abc")
    assert built["enable_prefix_caching"] is False
    served = parsed(["serve", made.artifact, *made.serve_options()])
    assert served["data_parallel_size"] == 2 and served["max_num_seqs"] is None
    unbuilt = parsed(["serve", *made.from_hub(), *made.serve_options()])
    assert (unbuilt["max_num_seqs"], unbuilt["revision"], unbuilt["data_parallel_size"]) == (
        512,
        "abc",
        2,
    )


def test_monkeys_options_are_its_own() -> None:
    asked = parsed(
        [
            "monkeys",
            HUB,
            *deployment().monkeys_options(),
            "--problems",
            "openai/gsm8k",
            "--out",
            "o",
        ]
    )
    assert (asked["few_shot"], asked["temperature"], asked["max_tokens"]) == (4, 0.6, 1024)


@pytest.mark.parametrize("gpu", ["H100!", "H100", "L40S", "A100-80GB", "B200!"])
def test_a_gpu_is_modals_word(gpu: str) -> None:
    assert deployment(gpu=gpu).gpus == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "no such model", "modal volume put"),
        ("model", str(Path(__file__).parent), "modal volume put"),
        ("name", "with space", "letters"),
        ("hub_secret", "", "letters"),
        ("gpu", "H100:9", "word of Modal's"),
        ("gpu", "H100:2", "engine options want 1"),
        ("knobs", {"tensor_parallel_size": 2}, "say H100!:2"),
        ("shapes", ("256",), "INxOUT"),
        ("unauthenticated", True, "PENSTOCK_API_KEY"),
        ("target_concurrency", 0, "1 or more"),
        ("max_concurrency", 8, "above max_concurrency 8"),
        ("max_containers", 0, "1 or more"),
        ("min_containers", -1, "0 or more"),
        ("startup_timeout", 0, "1 or more"),
        ("scaledown_window", 1, "2 or more"),
        ("shutdown_timeout", 3600, "an hour"),
        ("cpu", 0.0, "cores"),
    ],
)
def test_what_modal_could_not_do_is_a_line(field: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deployment(**{field: value})


def test_a_revision_is_of_the_hub() -> None:
    with pytest.raises(UsageError, match="leave it out"):
        deployment(model="/penstock/models/mine", revision="main")
    assert deployment(model="/penstock/models/mine").from_hub() == ["/penstock/models/mine"]
