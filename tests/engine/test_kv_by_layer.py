"""Layers with windows keep their window's pages only: the same tokens as transformers, and several
times as many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_model import CONTEXT, END, VOCABULARY, Comparison, Twin, logits_of, make_tokenizer
from equal_steps import count_as_equal

from penstock import LLM, SamplingParams

pytestmark = pytest.mark.torch

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = [SLIDING, SLIDING, FULL, SLIDING, SLIDING]  # four tables for one layer that sees everything
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 3, a window of less than a block": (
        "Gemma3Text",
        {"layer_types": GEMMA, "sliding_window": 5},
    ),
    "gemma 3, a window of some blocks": (
        "Gemma3Text",
        {"layer_types": GEMMA, "sliding_window": 40},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "layer_types": [SLIDING, FULL] * 2,
            "sliding_window": 17,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size": 64,
        },
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "preempted, chunked, 3 ahead": {
        "preempt_every": 3,
        "steps_ahead": 3,
        "max_num_batched_tokens": 24,
    },
    "drafts": {"speculative_config": {"prompt_lookup_min": 1}, "steps_ahead": 2},
    "few blocks, read at once": {"kv_cache_tokens": CONTEXT + 32, "steps_ahead": 0},
}
HEADER = [40 + i * 7 % 200 for i in range(53)]
PROMPTS = [[7], HEADER, [*HEADER, 9, 8], [*HEADER[:16], 5], [3 + i * 11 % 290 for i in range(90)]]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("windows")
    kind, changes = MODELS[request.param]
    config = getattr(transformers, f"{kind}Config")(
        **COMMON | changes, num_hidden_layers=len(changes["layer_types"])
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3 if "embed" in name else 1.4 / weight.shape[-1] ** 0.5)
    model.save_pretrained(made)
    make_tokenizer().save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def twin(folder: Path) -> Twin:
    return logits_of(folder)


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    """Greedy and drawn; the second forks."""
    plain = {"max_tokens": 17, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0.8 * (k % 2), seed=k, n=2 if k == 1 else 1, **plain)
        for k in range(5)
    ]


@pytest.fixture(scope="module")
def wanted(twin: Twin, params: list[SamplingParams]) -> list[list[list[int]]]:
    return [
        [twin.run(prompt, p, k) for k in range(p.n)]
        for prompt, p in zip(PROMPTS, params, strict=True)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_transformers_twice(
    variant: str,
    folder: Path,
    twin: Twin,
    params: list[SamplingParams],
    wanted: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count_as_equal(monkeypatch)
    knobs = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_tokens": 2048,
        "max_model_len": CONTEXT,
        "dtype": "float32",
    }
    compared = Comparison(twin)
    with LLM(str(folder), **knobs | {"prefix_groups": "always"} | VARIANTS[variant]) as llm:
        assert llm._engine.scheduler.pool.near, "the layers don't share pages"
        for _ in range(2):
            outs = llm.generate(PROMPTS, params, use_tqdm=False)
            for prompt, p, want, out in zip(PROMPTS, params, wanted, outs, strict=True):
                for index, sample in enumerate(out.outputs):
                    compared.sample(
                        variant, prompt, replace(p, n=1), index, want[index], sample.token_ids
                    )
        stats = llm.stats()
        assert stats["prefix_hit_tokens"] > 0 and stats["kv_usage"] == 0
        assert (stats.get("spec_draft_tokens", 0) > 0) == (variant == "drafts")
    compared.close(variant)
