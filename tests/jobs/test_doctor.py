"""What the doctor says of a GPU that is not here (made-up properties, as torch would tell them),
and of a model in fewer bits."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from penstock.config import Config
from penstock.demo import model_folder
from penstock.errors import UsageError
from penstock.execute import limits
from penstock.jobs import doctor
from penstock.jobs.recommend import bytes_a_rank, recommend
from penstock.models.read_config import model_config_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("major", "untested"), [(8, True), (9, False), (12, True)])
def test_a_gpu_that_our_kernels_were_not_tried_on_is_named_so(
    monkeypatch: pytest.MonkeyPatch, major: int, untested: bool
) -> None:
    told = SimpleNamespace(name="A GPU", major=major, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    monkeypatch.setattr(limits, "free_memory", lambda device: 79 << 30)
    line = dict(doctor.machine())["GPU 0"]
    assert f"compute capability {major}.0" in line
    assert ("untested" in line) is untested


def told_of_model(quantization: str) -> dict[str, str]:
    config = Config.of(
        model=str(model_folder()), quantization=quantization, device="cpu", kv_cache_tokens=4096
    )
    return dict(doctor.model(config, torch.device("cpu"), torch.bfloat16))


def test_a_model_in_fewer_bits_is_counted_so() -> None:
    told = {
        quantization: told_of_model(quantization)
        for quantization in ("auto", "fp8", "int8", "int4")
    }
    sizes = {name: float(facts["weights"].split()[0]) for name, facts in told.items()}
    assert sizes["auto"] > sizes["fp8"] >= sizes["int8"] > sizes["int4"]
    assert told["int4"]["weights"].endswith("in int4 and bfloat16") and told["auto"][
        "weights"
    ].endswith("in bfloat16")
    assert len({facts["architecture"] for facts in told.values()}) == 1  # as many parameters
    with pytest.raises(UsageError, match="this one is wide"):
        told_of_model("awq")


@pytest.mark.parametrize(
    ("seconds", "near"), [(1e-4, False), (10.0, True)]
)  # of the product that is timed
def test_a_step_near_the_timeout_is_said_with_the_way_out(
    seconds: float, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0.0, seconds)
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(now))
    said = told_of_model("auto")["a full step"]
    assert said.startswith("2,048 tokens, about ")
    assert ("lower --max-num-batched-tokens" in said) is near


# Llama-3-70B's, 8B's and a model whose heads only 1, 2, 3 and 6 ranks divide.
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SIX_HEADS = LLAMA_8B | {
    "hidden_size": 3072,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 12288,
}


@pytest.mark.parametrize(
    ("shape", "gpus", "knobs", "best"),
    [
        (
            LLAMA_70B,
            [143] * 4,
            {},
            "--tensor-parallel-size 2 --data-parallel-size 2: .* 1 would not hold 131.4 GiB",
        ),
        (LLAMA_70B, [80] * 4, {}, "--tensor-parallel-size 4 --data-parallel-size 1: "),
        (
            LLAMA_70B,
            [143] * 3,
            {"quantization": "fp8"},
            "--tensor-parallel-size 1 --data-parallel-size 3: ",
        ),
        (LLAMA_70B, [80] * 3, {}, "none: 2 ranks take .* fewer bits"),
        (LLAMA_8B, [143] * 8, {}, "--tensor-parallel-size 1 --data-parallel-size 8: "),
        (LLAMA_8B, [143], {}, "--tensor-parallel-size 1 --data-parallel-size 1: "),
        (
            SIX_HEADS,
            [10] * 5,
            {},
            "--tensor-parallel-size 2 --data-parallel-size 2: .* 1 of 5 GPUs are left over",
        ),
    ],
)
def test_the_fewest_ranks_that_hold_it_then_replicas(
    shape: dict[str, int], gpus: list[int], knobs: dict[str, str], best: str
) -> None:
    """gpus: of so many GB."""
    told = {
        "model_type": "llama",
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
    model_config = model_config_of(told | shape, "made up")
    rooms = [each * 920_000_000 for each in gpus]
    needs = bytes_a_rank(Config.of(**knobs), model_config, torch.bfloat16, rooms)
    assert re.match(best, said := recommend(needs, rooms, 8192)), said
    assert set(needs) <= ({1, 2, 3, 6} if shape is SIX_HEADS else {1, 2, 4, 8})


def test_a_rank_of_two_takes_half() -> None:
    whole, half = (
        dict(
            doctor.model(
                Config.of(
                    model=str(model_folder()),
                    device="cpu",
                    kv_cache_tokens=4096,
                    tensor_parallel_size=ranks,
                ),
                torch.device("cpu"),
                torch.bfloat16,
            )
        )
        for ranks in (1, 2)
    )
    sizes = [float(facts["weights"].split()[0]) for facts in (whole, half)]
    assert 0.45 * sizes[0] < sizes[1] < 0.6 * sizes[0] and half["weights"].endswith(
        "on each of 2 ranks"
    )
    assert whole["architecture"] == half["architecture"]
