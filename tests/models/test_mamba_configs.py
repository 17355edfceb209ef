"""config.json of models with Mamba2 layers: as they are published, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import CheckpointError
from penstock.kernels.mamba2 import Mamba2Heads
from penstock.models.granitemoehybrid import GraniteHybridConfig
from penstock.models.nemotron_h import NemotronConfig
from penstock.models.read_config import model_config_of

NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NANO: dict[str, Any] = {  # Nemotron 3 Nano 30B-A3B
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": NANO_PATTERN,
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.4",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
TINY: dict[str, Any] = {  # Granite 4.0 H Tiny
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_nemotron_3_nano_as_it_is_published() -> None:
    config = model_config_of(NANO, "config.json")
    assert isinstance(config, NemotronConfig)
    assert config.num_layers == 52 and config.context == 262144 and config.rope.kind == "none"
    assert [config.kinds.count(kind) for kind in ("mamba", "moe", "attention", "mlp")] == [
        23,
        23,
        6,
        0,
    ]
    assert config.mamba.heads == Mamba2Heads(64, 64, 8, 128) and config.mamba.heads.columns == 10304
    assert (config.experts, config.routing.top_k, config.routing.scale, config.latent) == (
        128,
        6,
        2.5,
        None,
    )
    words = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}
    listed = NANO | {
        "layers_block_type": [words[letter] for letter in NANO_PATTERN],
        "hybrid_override_pattern": None,
    }
    assert model_config_of(listed, "config.json") == config


def test_granite_4_tiny_as_it_is_published() -> None:
    config = model_config_of(TINY, "config.json")
    assert isinstance(config, GraniteHybridConfig)
    assert (
        config.attends.count(True) == 4
        and config.rope.kind == "none"
        and config.logits_scale == 1 / 6
    )
    assert (
        config.mamba.heads == Mamba2Heads(48, 64, 1, 128) and config.mamba.state_dtype == "float32"
    )


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (NANO, {"hybrid_override_pattern": "MX"}, "a layer is 'X': supported are M, "),
        (NANO, {"hybrid_override_pattern": None}, "must say what each layer is"),
        (
            NANO,
            {"hybrid_override_pattern": "MEM", "num_hidden_layers": 3},
            "no layer attends: models of recurrent",
        ),
        (TINY, {"layer_types": None}, "no layer attends: models of recurrent"),
        (NANO, {"num_hidden_layers": 51}, "num_hidden_layers is 51, and 52 layers"),
        (NANO, {"layers_block_type": ["mamba", 3]}, "a layer is 3: supported are"),
        (NANO, {"n_groups": 7}, "64 heads of Mamba2 are no multiple of its 7 groups"),
        (NANO, {"norm_eps": 1e-6}, "disagree: remove the wrong one"),
        (NANO, {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' \\(\"silu\"\\) is not supported"),
        (NANO, {"time_step_limit": [0.01, 1.0]}, "'time_step_limit' .* is not supported"),
        (NANO, {"residual_in_fp32": True}, "'residual_in_fp32' \\(true\\) is not supported"),
        (NANO, {"mlp_bias": True}, "'mlp_bias' \\(true\\) is not supported"),
        (
            NANO,
            {"mamba_ssm_cache_dtype": "float8"},
            "mamba_ssm_cache_dtype 'float8' is not supported",
        ),
        (
            TINY,
            {"mamba_n_heads": 50},
            r"mamba_n_heads \(50\) of mamba_d_head \(64\) are not the 3072 numbers",
        ),
        (
            TINY,
            {"mamba_d_head": "auto", "mamba_n_heads": 50},
            r"mamba_d_head \(61\) are not the 3072 numbers",
        ),
        (
            TINY,
            {"position_embedding_type": "alibi"},
            "position_embedding_type 'alibi' is not supported",
        ),
        (TINY, {"layer_types": ["mamba"] * 39}, "layer_types must list 40 layers"),
        (TINY, {"mamba_d_conv": 1}, "mamba_d_conv must be a whole number from 2"),
        (
            TINY,
            {"normalization_function": "layernorm"},
            "'normalization_function' .* is not supported",
        ),
    ],
)
def test_what_contradicts_itself_is_named(
    raw: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        model_config_of(raw | changes, "config.json")
    assert "\n" not in str(raised.value)
