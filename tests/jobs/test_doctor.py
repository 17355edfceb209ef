"""What the doctor says of a GPU that is not here (made-up properties, as torch would tell them), and of a model in
fewer bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.config import Config
from penstock.demo import model_folder
from penstock.errors import UsageError
from penstock.execute import limits
from penstock.jobs import doctor

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
    config = Config.of(model=str(model_folder()), quantization=quantization, device="cpu", kv_cache_tokens=4096)
    return dict(doctor.model(config, torch.device("cpu"), torch.bfloat16))


def test_a_model_in_fewer_bits_is_counted_so() -> None:
    told = {quantization: told_of_model(quantization) for quantization in ("auto", "fp8", "int8", "int4")}
    sizes = {name: float(facts["weights"].split()[0]) for name, facts in told.items()}
    assert sizes["auto"] > sizes["fp8"] >= sizes["int8"] > sizes["int4"]
    assert told["int4"]["weights"].endswith("in int4 and bfloat16") and told["auto"]["weights"].endswith("in bfloat16")
    assert len({facts["architecture"] for facts in told.values()}) == 1  # as many parameters
    with pytest.raises(UsageError, match="this one is wide"):
        told_of_model("awq")
