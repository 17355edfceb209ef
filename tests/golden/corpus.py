"""The golden record's corpus: three random models, a dozen requests, and the ways in which they are
run.

The models are drawn by numpy, whose streams stay as they are between versions and machines; every
sampling number is asked for by some request, and prompts share headers, so that forks, prefix
groups, chunks and preemption all happen. It knows the public API alone: what is recorded holds
whatever becomes of the engine inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams

VOCABULARY, CONTEXT, END, HIDDEN, MIDDLE = 300, 192, 0, 64, 96
Model = dict[str, Any]

MODELS: dict[str, Model] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1, "n": 2},
    "plain": {"temperature": 0.8, "n": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7, "logprobs": 0, "prompt_logprobs": 1},
    "top_k": {"temperature": 1.2, "top_k": 4, "logprobs": 0, "n": 4},
    "min_p": {"temperature": 1.0, "min_p": 0.1, "logprobs": 5},
    "counted": {
        "temperature": 0.9,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "logprobs": 0,
    },
    "bias": {
        "temperature": 1.0,
        "logit_bias": {5: 4.0, 9: -100.0, END: 2.0},
        "n": 3,
        "logprobs": 1,
    },
    "min_tokens": {
        "temperature": 1.0,
        "min_tokens": 9,
        "stop_token_ids": [60, 61],
        "logit_bias": {60: 5.0, END: 5.0},
    },
    "stop ids": {
        "temperature": 1.0,
        "stop_token_ids": list(range(100, 130)),
        "ignore_eos": True,
        "logprobs": 3,
    },
    "all": {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "logprobs": 1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {7: 1.5},
        "ignore_eos": True,
        "n": 2,
    },
    "scored": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 3, "logprobs": 3},
}

KNOBS: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "kv_cache_tokens": 8192,
    "prefix_groups": "always",
    "seed": 5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "read at once": {"steps_ahead": 0},
    "1 ahead": {"steps_ahead": 1},
    "2 ahead, no groups": {"steps_ahead": 2, "prefix_groups": "off"},
    "3 ahead, preempted": {"steps_ahead": 3, "preempt_every": 2, "max_num_batched_tokens": 64},
    "few blocks, chunked": {
        "kv_cache_tokens": CONTEXT + 32,
        "steps_ahead": 2,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 24,
    },
    "few rows": {"max_num_seqs": 3, "steps_ahead": 1, "enable_prefix_caching": False},
}


def make_model(name: str, folder: Path) -> Path:
    """Writes config.json and float32 weights wide enough that likely tokens are close to each
    other."""
    config = MODELS[name] | {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": 3,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "eos_token_id": END,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(sum(map(ord, name)))
    save_file(dict(_weights(config, rng)), folder / "model.safetensors")
    return folder


def _weights(config: Model, rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
    def normal(out: int, into: int, scale: float) -> NDArray[np.float32]:
        return (rng.standard_normal((out, into)) * scale).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return rng.uniform(0.7, 1.3, size).astype(np.float32)

    width = config.get("head_dim", HIDDEN // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    tied = config["tie_word_embeddings"]
    yield "model.embed_tokens.weight", normal(VOCABULARY, HIDDEN, 0.3 if tied else 1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "q": (queries, HIDDEN),
            "k": (keys, HIDDEN),
            "v": (keys, HIDDEN),
            "o": (HIDDEN, queries),
        }
        for part, (out, into) in shapes.items():
            yield f"{at}self_attn.{part}_proj.weight", normal(out, into, 1.4 / into**0.5)
            if config["model_type"] == "qwen2" and part != "o":
                yield f"{at}self_attn.{part}_proj.bias", normal(1, out, 0.2)[0]
        if config["model_type"] == "qwen3":
            yield f"{at}self_attn.q_norm.weight", norm(width)
            yield f"{at}self_attn.k_norm.weight", norm(width)
        for part in ("gate", "up"):
            yield f"{at}mlp.{part}_proj.weight", normal(MIDDLE, HIDDEN, 1.4 / HIDDEN**0.5)
        yield f"{at}mlp.down_proj.weight", normal(HIDDEN, MIDDLE, 1.4 / MIDDLE**0.5)
        yield f"{at}input_layernorm.weight", norm(HIDDEN)
        yield f"{at}post_attention_layernorm.weight", norm(HIDDEN)
    yield "model.norm.weight", norm(HIDDEN)
    if not tied:
        yield "lm_head.weight", normal(VOCABULARY, HIDDEN, 1.8 / HIDDEN**0.5)


def prompts() -> list[list[int]]:
    """Returns one prompt a setting: of 1 to 120 tokens, some behind one header of two blocks and a
    piece."""
    rng = np.random.default_rng(3)
    drawn = [rng.integers(2, VOCABULARY, n).tolist() for n in (1, 16, 17, 33, 90, 5, 8, 120)]
    header = [40 + i * 7 % 200 for i in range(37)]
    return [*drawn, header + drawn[5], header + drawn[6], header + drawn[1], header + drawn[5]]


def run(folder: Path, variant: str, **knobs: Any) -> dict[str, list[Any]]:
    """Runs the corpus twice, the second time over a warm cache -> setting -> what it gave, first
    and again."""
    params = [
        SamplingParams(**{"seed": 1000 + number, "max_tokens": 24, "detokenize": False} | setting)
        for number, setting in enumerate(SETTINGS.values())
    ]
    told: dict[str, list[Any]] = {}
    with LLM(str(folder), skip_tokenizer_init=True, **KNOBS | VARIANTS[variant] | knobs) as llm:
        for _ in range(2):
            outs = llm.generate(prompts(), params, use_tqdm=False)
            for name, out in zip(SETTINGS, outs, strict=True):
                told.setdefault(name, []).append(
                    {"prompt": _scores(out.prompt_logprobs), "samples": _samples(out)}
                )
    return told


def _samples(out: Any) -> list[Any]:
    return [
        [list(sample.token_ids), sample.finish_reason, _scores(sample.logprobs)]
        for sample in out.outputs
    ]


def _scores(logprobs: Any) -> list[list[float]] | None:
    """Returns each position's logprobs in their order, to four places; None where nobody asked."""
    if logprobs is None:
        return None
    return [[round(score.logprob, 4) for score in (place or {}).values()] for place in logprobs]
