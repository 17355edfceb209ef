"""Which layers share pages where they store different bytes: real Gemma 4s, and what each byte of a
page is for."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from execute_drive import tiny_model
from random_model import SHAPES

from penstock.execute.kv_cache import KvCache, PagePlace, token_bytes
from penstock.execute.kv_dtype import narrowest
from penstock.execute.layer_pages import LayerPages, open_token_bytes, pages_of
from penstock.models.build_model import build_model
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of

pytestmark = pytest.mark.torch

E2B = SHAPES["gemma-4-e4b"].config() | {
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "intermediate_size": 6144,
}
UNIFIED_12B = SHAPES["gemma-4-31b"].config() | {
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "intermediate_size": 15_360,
}
SMALL: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 20,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
    ],
    "attention_k_eq_v": True,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "vocab_size": 160,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 0,
}


def shape_of(config: dict[str, Any]) -> Decoder:
    return build_model(model_config_of(config, "config.json"), torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize(
    ("config", "tables", "places", "open_times", "far_part"),
    # places of a page; what a token takes of what it would: while windows are open, and behind them
    [
        (SHAPES["gemma-4-26b-a4b"].config(), 9, 3, 1.09, 9.1),
        (SHAPES["gemma-4-31b"].config(), 10, 5, 1.0, 11),
        (
            SHAPES["gemma-4-e4b"].config(),
            2,
            5,
            1.07,
            2.8,
        ),  # four places would leave an eighth of all empty
        (E2B, 2, 3, 1.0, 3),
        (UNIFIED_12B, 20, 2, 1.0, 21),
        (SHAPES["gemma-3-4b"].config(), 6, 5, 1.03, 6.8),
        (SHAPES["gpt-oss-20b"].config(), 1, 12, 1.0, 2),
    ],
    ids=["26B-A4B", "31B", "E4B", "E2B", "12B", "gemma 3 4B", "gpt-oss"],
)
def test_memory_behind_windows_is_free_in_real_ones(
    config: dict[str, Any], tables: int, places: int, open_times: float, far_part: float
) -> None:
    model = shape_of(config)
    pages = pages_of(model, 131_072)
    assert pages is not None and pages.tables == tables
    assert pages.page_bytes == places * max(form.block_bytes for form in model.paged_forms)
    plain = token_bytes(model.paged_forms)
    assert open_token_bytes(model.paged_forms, pages) == pytest.approx(open_times * plain, rel=0.01)
    assert plain / (pages.page_bytes / 16) == pytest.approx(far_part, rel=0.01)
    check_bytes(model, pages)
    narrow = narrowest(model, "fp8")
    halves = tuple(
        PagePlace(place.storage, place.first // 2, place.bytes // 2) for place in pages.place
    )
    assert pages_of(model, 131_072, narrow) == LayerPages(pages.table, halves, pages.window)


def check_bytes(model: Decoder, pages: LayerPages) -> None:
    """No byte of a page is two layers' of a table, and none lies outside; layers that read find
    their source's."""
    held = defaultdict[int, list[tuple[int, int, int]]](list)
    owners = iter(zip(model.paged_forms, pages.place, strict=True))
    for (keeper,), table in zip(model.keepers, pages.table, strict=True):
        assert keeper.kind is not None and (table == 0) is (keeper.kind.window is None)
        if keeper.source is None:
            form, place = next(owners)
            assert place.first + form.block_bytes <= place.bytes
            held[table].append((place.storage, place.first, place.first + form.block_bytes))
    for stretches in held.values():
        stretches.sort()
        for (storage, _, end), (other, begin, _) in pairwise(stretches):
            assert (storage, end) <= (other, begin) if storage == other else storage < other


def test_layers_write_their_own_bytes_of_a_page() -> None:
    """Each number of K and V lies where no other layer of the table has any, and views are of the
    storages."""
    model = tiny_model(**SMALL)
    pages = pages_of(model, 128)
    assert pages is not None
    check_bytes(model, pages)
    assert {place.bytes for place in pages.place} == {2 * 4 * 8 * 16 * 4} and len(
        {p.storage for p in pages.place}
    ) == 1
    cache = KvCache(model.keepers, 7, model.device, pages.place)
    assert cache.bytes() == 7 * (pages.page_bytes + 16 * 4)
    for layer in (1, 4):  # the two of table 0
        kv = cache.layers[layer][0]
        kv.keys[5], kv.values[5] = layer, 10 * layer
    both = [cache.layers[layer][0] for layer in (1, 4)]
    assert [(kv.keys[5].unique().tolist(), kv.values[5].unique().tolist()) for kv in both] == [
        ([1], [10]),
        ([4], [40]),
    ]
    (pool,) = cache.by_block[:-1]
    assert pool[5].view(torch.float32).all() and not pool[4].any() and not pool[6].any()


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"sliding_window": 128}, 128),  # as long as a sequence
        ({"layer_types": ["full_attention"] * 5}, 128),
        # One that sees everything stores three times what the others do: pages would be two thirds
        # empty, or all.
        (
            {
                "num_key_value_heads": 1,
                "global_head_dim": 24,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            128,
        ),
    ],
)
def test_layers_that_keep_all(changes: dict[str, Any], length: int) -> None:
    assert pages_of(tiny_model(**SMALL), length) is not None
    assert pages_of(tiny_model(**SMALL | changes), length) is None
