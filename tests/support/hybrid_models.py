"""Configs of tiny models that have recurrent state, as `tiny_runner` and `tiny_model` take them."""

from __future__ import annotations

from typing import Any

from toy_states import build_toy

TOY: dict[str, Any] = {"build": build_toy}
MODELS: dict[str, dict[str, Any]] = {
    "toy": TOY,
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "rms_norm_eps": None,
        "block_multiple_of": 16,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "head_dim": 32,
    },
    "nemotron": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*ME",
        "num_hidden_layers": None,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 32,
    },
    "falcon": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_state": 24,
        "mamba_n_groups": 1,
        "key_multiplier": 0.5,
        "mlp_multipliers": [0.9, 0.6],
        "ssm_multipliers": [0.8, 1.3, 0.6, 0.5, 0.7],
    },
}
# Bytes of a slot that both of two ranks have: windows of B and C, which all heads share, of two
# layers.
REPEATED = dict.fromkeys(("nemotron_h", "falcon_h1"), 2 * 2 * 24 * 4 * 4)
