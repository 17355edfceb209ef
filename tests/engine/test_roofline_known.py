"""For which devices and models the hardware's limit is known, and what /metrics says of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from random_model import SHAPES
from server_fake import FakeEngine

from penstock.config import Config
from penstock.engine.build_engine import build_engine
from penstock.execute.gpu_specs import GpuSpecs
from penstock.models.build_model import build_model
from penstock.models.read_config import model_config_of
from penstock.models.sizes import ModelSizes
from penstock.request import Request, SamplingParams
from penstock.server.online.metrics import Metrics

pytestmark = pytest.mark.torch


def sizes_of(config: Any) -> ModelSizes | None:
    return ModelSizes.of(build_model(config, torch.bfloat16, torch.device("meta")))


def config_of(name: str) -> Any:
    return model_config_of(json.loads(json.dumps(SHAPES[name].config())), "config.json")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b"])
def test_sizes_are_those_that_the_shapes_are_reckoned_with(name: str) -> None:
    sizes, shape = sizes_of(config_of(name)), SHAPES[name]
    assert sizes is not None
    for field in ModelSizes.__slots__:
        assert getattr(sizes, field) == getattr(shape, field), field


def test_a_real_engines_steps_have_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is known: the runner says what it is rated at, and the plans are a real scheduler's."""
    monkeypatch.setattr("penstock.execute.runner.rated", lambda device, dtype: GpuSpecs(item=2, copy=1e12, flops=1e14))
    engine, _ = build_engine(Config.of(model="demo", device="cpu", max_num_seqs=8, kv_cache_tokens=4096))
    assert engine.limit is not None
    engine.limit.every = 0.02
    try:
        prompt = (np.arange(40, dtype=np.int32) + 1).tobytes()
        params = SamplingParams(n=4, max_tokens=32, ignore_eos=True, seed=1)
        assert engine.submit(Request(request_id=1, prompt=prompt, sampling=params)) is None
        seen = []
        while engine.has_work:
            engine.step()
            seen.append(engine.stats()["hardware_limit"])
        assert 0 < max(seen) < 1 and seen[-1] == 0
    finally:
        engine.runner.close()


def test_the_page_has_it_where_the_engine_tells_it() -> None:
    client: Any = FakeEngine(None)
    assert b"hardware_limit" not in Metrics(client, "m").text()
    stats = client.stats() | {"hardware_limit": 0.625}
    client.stats = lambda: stats
    assert b'\npenstock:hardware_limit_perc{model_name="m"} 0.625\n' in Metrics(client, "m").text()
