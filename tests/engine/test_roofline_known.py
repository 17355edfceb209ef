"""For which devices and models the hardware's limit is known, and what /metrics says of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from alike_sizes import alike_sizes
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


def sizes_of(config: Any) -> ModelSizes:
    return ModelSizes.of(build_model(config, torch.bfloat16, torch.device("meta")))


def config_of(name: str) -> Any:
    return model_config_of(json.loads(json.dumps(SHAPES[name].config())), "config.json")


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b"])
def test_sizes_are_those_that_the_shapes_are_reckoned_with(name: str) -> None:
    shape = SHAPES[name]
    told = {
        field: getattr(shape, field) for field in ("layers", "hidden", "heads", "head_dim", "vocab")
    }
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim
    assert sizes_of(config_of(name)) == alike_sizes(
        **told, layer_weights=shape.layer_weights, kv_numbers=kv
    )


def test_rows_whose_products_take_as_long_as_reading_the_weights() -> None:
    """8B: 206 on an H200, and a thirteenth for the head. 26B-A4B: all experts are read, and a token
    goes through a sixteenth of them."""
    ridge = GpuSpecs(item=2, copy=4.8e12, flops=989e12).ridge
    assert ridge == pytest.approx(206, abs=0.1)
    assert sizes_of(config_of("llama-3-8b")).ridge_rows(ridge) == 222
    assert sizes_of(config_of("gemma-4-26b-a4b")).ridge_rows(ridge) == 1_691


def test_gemma_4s_layers_differ_in_what_they_read() -> None:
    """E4B: 20 of 24 layers that store see 512 tokens, in heads of half the width; 18 more read
    theirs. 26B-A4B: experts beside the MLP, and no values in the product of layers that see
    everything."""
    sizes = sizes_of(config_of("gemma-4-e4b"))
    near, whole = 2 * 2 * 256 * 2, 2 * 2 * 512 * 2  # bytes a token
    assert {(each.window, each.layers, each.numbers, each.read) for each in sizes.attending} == {
        (512, 35, 2 * 8 * 256, near),
        (None, 7, 2 * 8 * 512, whole),
    }
    assert sizes.stored == 20 * near + 4 * whole and sizes.windows == (512,)
    own, hidden = 256, 2560  # inputs of a layer's own; numbers of the stream
    assert (sizes.ahead, sizes.row_bytes) == (42 * own * hidden, 42 * own * 2)
    mlp, beside = 3 * hidden * 10_240, 2 * own * hidden
    # Queries, keys and values of layers that store; queries alone of those that read.
    heads = 2 * 8 * (35 * 256 + 7 * 512) + 2 * 2 * (20 * 256 + 4 * 512)
    assert sizes.layer_weights == round(mlp + beside + hidden * heads / 42)
    sizes = sizes_of(config_of("gemma-4-26b-a4b"))
    ((experts, layers),) = sizes.routed
    assert (layers, experts.experts, experts.top_k, experts.numbers) == (30, 128, 8, 3 * 2816 * 704)
    assert experts.bytes == 2 * experts.numbers and sizes.ahead == sizes.row_bytes == 0
    heads = 25 * 256 * (2 * 16 + 2 * 8) + 5 * 512 * (2 * 16 + 2)
    assert sizes.layer_weights == round(3 * 2816 * 2112 + 2816 * heads / 30)


def test_a_double_wide_mlp_counts_twice_where_it_is() -> None:
    config = SHAPES["gemma-4-e4b"].config()
    single, double = (
        sizes_of(model_config_of(config | {"use_double_wide_mlp": wide}, ""))
        for wide in (False, True)
    )
    more = 3 * 2560 * 10_240 * 18 / 42
    assert double.layer_weights - single.layer_weights == pytest.approx(more, abs=1)


def test_a_real_engines_steps_have_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is known: the runner says what it is rated at, and the plans are a real
    scheduler's."""
    monkeypatch.setattr(
        "penstock.execute.runner.rated",
        lambda device, dtype: GpuSpecs(item=2, copy=1e12, flops=1e14),
    )
    engine, _ = build_engine(
        Config.of(model="demo", device="cpu", max_num_seqs=8, kv_cache_tokens=4096)
    )
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
