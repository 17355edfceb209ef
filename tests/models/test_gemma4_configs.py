"""config.json of Gemma 4: as it is published and as transformers writes it, and what contradicts
itself."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import CheckpointError
from penstock.models.gemma4_text import Gemma4Config
from penstock.models.read_config import model_config_of

LAYERS = [f"{'full' if n % 5 == 4 else 'sliding'}_attention" for n in range(35)]
E2B: dict[str, Any] = {  # the shapes of Gemma 4 E2B
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "audio_config": {"model_type": "gemma4_audio"},
    "vision_config": {"model_type": "gemma4_vision"},
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "image_token_id": 258_880,
    "video_token_id": 258_884,
    "boa_token_id": 256_000,
    "eoa_token_index": 258_883,
    "audio_token_id": 258_881,
    "initializer_range": 0.02,
    "eos_token_id": [1, 106],
    "dtype": "bfloat16",
    "transformers_version": "5.5.0",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "layer_types": LAYERS,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 131_072,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
}


def read(**changes: Any) -> Gemma4Config:
    """E2B's config with other keys in its text; None: without."""
    text = {
        name: value for name, value in (E2B["text_config"] | changes).items() if value is not ...
    }
    config = model_config_of(E2B | {"text_config": text}, "config.json")
    assert isinstance(config, Gemma4Config)
    return config


def test_the_published_one_is_understood() -> None:
    config = read()
    assert (config.readers, config.wide_readers, config.own_inputs, config.experts) == (
        20,
        True,
        256,
        0,
    )
    assert (config.local.width, config.whole.width, config.whole.rope.part) == (256, 512, 0.25)
    assert [config.source(layer) for layer in (0, 14, 15, 19, 33, 34)] == [
        None,
        None,
        13,
        14,
        13,
        14,
    ]
    assert config.logits_cap == 30.0 and config.eos_ids == (1, 106)


def test_heads_of_layers_without_a_window_in_either_spelling() -> None:
    old = read(attention_k_eq_v=True, num_global_key_value_heads=1, num_key_value_heads=4)
    layers = {str(n): {"head_dim": 512, "num_key_value_heads": 1} for n in range(4, 35, 5)}
    new = read(
        attention_k_eq_v=True,
        num_key_value_heads=4,
        per_layer_config=layers,
        global_head_dim=...,
        num_global_key_value_heads=...,
    )
    assert old == new and (old.whole.kv_heads, old.local.kv_heads) == (1, 4)
    assert old.whole.keys_as_values and not old.local.keys_as_values
    assert read(num_global_key_value_heads=2).whole.kv_heads == 1, (
        "which counts where keys are values alone"
    )


def test_the_unified_one_has_no_inputs_of_layers() -> None:
    text = {
        n: v
        for n, v in E2B["text_config"].items()
        if "per_layer" not in n and "moe" not in n and "experts" not in n
    }
    text |= {
        "model_type": "gemma4_unified_text",
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
    }
    whole = E2B | {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
    }
    config = model_config_of(whole | {"text_config": text}, "config.json")
    assert isinstance(config, Gemma4Config) and config.own_inputs == 0 and config.readers == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_kv_shared_layers": 33},
            r"num_kv_shared_layers \(33\) of 35 layers leaves a kind of layer_types no layer",
        ),
        ({"num_kv_shared_layers": 40}, r"num_kv_shared_layers \(40\) of 35 layers"),
        (
            {"vocab_size_per_layer_input": 1000},
            r"vocab_size_per_layer_input \(1000\) is not vocab_size \(262144\)",
        ),
        (
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention 'all' is not supported",
        ),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"enable_moe_block": True}, "key 'num_experts' is missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 8},
            r"top_k_experts \(8\) is above num_experts",
        ),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config must give head_dim"),
        ({"per_layer_config": {str(n): {"head_dim": n} for n in range(4, 35, 5)}}, "all alike"),
        (
            {"rope_parameters": {"full_attention": {}}},
            "must have sliding_attention and full_attention",
        ),
        ({"layer_types": ["chunked_attention"] * 35}, "layer_types holds 'chunked_attention'"),
        ({"a_new_switch": 1}, "key 'a_new_switch' of text_config"),
    ],
)
def test_what_contradicts_itself_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(**changes)
