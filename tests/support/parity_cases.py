"""Small models of every family, each switch reached: a class of transformers' and its config's
changes."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_MSCALE = YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
YARN_ATTENTION = YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}

MOE = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": False,
}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 21,
    "sliding_window_pattern": 3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
}
GROWTH = YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 40}
TWO_ROPES = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
NOPE = {
    "no_rope_layers": [1, 0, 1],
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.9,
    "logits_scaling": 2.5,
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 21,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "swiglu_limit": 1.2,
    "rope_parameters": YARN | {"truncate": False},
}
LFM2 = {
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
CONV_LAST = ["conv", "full_attention", "conv"]
QWEN3_5 = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "full_attention_interval": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
OLMO_HYBRID = {  # q, k and v of one size: transformers writes their convolutions as thirds
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 6,
    "intermediate_size": 40,
    "shared_intermediate_size": 56,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "residual_multiplier": 0.8,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    # it bounds dt from below in transformers' prompts, in its rows not, nor anywhere else
    "time_step_min": 1e-30,
}
FALCON = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.8, 1.3, 0.6, 0.5, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
}
SHARED = {"shared_expert_intermediate_size": 24, "head_dim": 32, "norm_topk_prob": True}
DELTA_LAST = ["full_attention", "linear_attention", "linear_attention"]
LFM2_MOE = {
    "layer_types": CONV_LAST,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_dense_layers": 1,
    "rope_parameters": LFM2["rope_parameters"],
}
GLM4_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40}
MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
HUNYUAN_MOE = {"num_experts": 6, "moe_topk": 2, "head_dim": 16}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
DOTS1 = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
}
EXAONE_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "sliding_window": 21,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
AFMOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 32,
    "sliding_window": 21,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LAGUNA = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "head_dim": 32,
    "sliding_window": 21,
    "num_attention_heads_per_layer": [4, 6, 2],
}
LAGUNA_ROPES = {
    "full_attention": YARN | {"partial_rotary_factor": 0.25},
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.75,
    },
}
COHERE = {"sliding_window": 21, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
COHERE_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "sliding_window": 21,
    "rope_theta": 500.0,
}
# what transformers has no default for that it computes with
NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekV2": {"num_key_value_heads": 4},
    "DeepseekV3": {"num_key_value_heads": 4},
    "Glm4MoeLite": {"num_key_value_heads": 4},
    "Mistral4": {"num_key_value_heads": 4},
    **{
        kind: {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        for kind in ("GraniteMoeHybrid", "Qwen3Next", "Qwen3_5MoeText", "Qwen3_5Text")
    },
    "Dots1": DOTS1,
    "Lfm2Moe": {"layer_types": CONV_LAST},
    "Glm4": {"eos_token_id": []},
    "Gemma4Text": {"vocab_size_per_layer_input": 211},
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 21,
    "vocab_size_per_layer_input": 211,
    "hidden_size_per_layer_input": 12,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "full")
    ],
}
GEMMA4_EXPERTS = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 21,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 21}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-wide": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN_MSCALE}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": YARN_ATTENTION}),
    "mistral-window": ("Mistral", {"sliding_window": 21}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "qwen3-bias-windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3-moe-unnormed-some-layers": (
        "Qwen3Moe",
        MOE | {"mlp_only_layers": [1], "num_experts_per_tok": 1},
    ),
    "qwen3-moe-window": ("Qwen3Moe", MOE | {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3-moe-every-second": (
        "Qwen3Moe",
        MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-experts": ("Gemma4Text", GEMMA4_EXPERTS),
    "gemma4-both": (
        "Gemma4Text",
        GEMMA4
        | GEMMA4_EXPERTS
        | {
            "hidden_size_per_layer_input": 8,
            "layer_types": GEMMA4["layer_types"],
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3-ropes-cap": (
        "Gemma3Text",
        GEMMA
        | {
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma2": ("Gemma2", GEMMA2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-no-caps": (
        "Gemma2",
        GEMMA2
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "sliding_window": 21}),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.8, "attention_bias": True},
    ),
    "olmoe-renormalised": (
        "Olmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
        },
    ),
    "phi3-window": ("Phi3", {"sliding_window": 21}),
    "phi3-partial-longrope": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-longrope-short": (
        "Phi3",
        {"rope_parameters": LONGROPE | {"factor": 2.0}, "original_max_position_embeddings": 256},
    ),
    "olmo2-biases": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 21, "num_hidden_layers": 4, "rope_parameters": TWO_ROPES},
    ),
    "granite": ("Granite", MULTIPLIERS | {"tie_word_embeddings": True}),
    "granite-biases": (
        "Granite",
        {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.25},
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        MULTIPLIERS | {"attention_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "hyperclovax-no-post-norms": (
        "HyperCLOVAX",
        {"use_post_norm": False, "mlp_bias": True, "residual_multiplier": 0.8},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-windows": ("SmolLM3", NOPE | {"use_sliding_window": True, "sliding_window": 21}),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": GROWTH, "sliding_window": 50}),
    "lfm2": ("Lfm2", LFM2 | {"full_attn_idxs": [1]}),
    "lfm2-biases-last-conv": (
        "Lfm2",
        LFM2 | {"conv_bias": True, "conv_L_cache": 5, "layer_types": CONV_LAST},
    ),
    "lfm2-whole-mlp": (
        "Lfm2",
        LFM2
        | {
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [0, 2],
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-5": ("Qwen3_5Text", QWEN3_5),
    "qwen3-5-shared-keys": (
        "Qwen3_5Text",
        QWEN3_5
        | {"linear_num_key_heads": 1, "linear_value_head_dim": 24, "layer_types": DELTA_LAST}
        | {"attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
    ),
    "qwen3-5-moe": ("Qwen3_5MoeText", QWEN3_5 | MOE | SHARED),
    "qwen3-next": (
        "Qwen3Next",
        QWEN3_5 | MOE | SHARED | {"norm_topk_prob": False, "linear_key_head_dim": 24},
    ),
    "qwen3-next-some-layers": (
        "Qwen3Next",
        QWEN3_5
        | MOE
        | SHARED
        | {"mlp_only_layers": [0], "layer_types": DELTA_LAST, "head_dim": 64},
    ),
    "lfm2-moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2-moe-unnormed": (
        "Lfm2Moe",
        LFM2_MOE | {"norm_topk_prob": False, "routed_scaling_factor": 1.7, "num_dense_layers": 0},
    ),
    "lfm2-moe-no-bias": (
        "Lfm2Moe",
        LFM2_MOE | {"use_expert_bias": False, "conv_bias": True, "conv_L_cache": 4},
    ),
    "glm4-moe": ("Glm4Moe", GLM4_MOE | {"attention_bias": True}),
    "glm4-moe-groups": (
        "Glm4Moe",
        GLM4_MOE
        | {"n_group": 3, "topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "glm4-moe-unnormed": (
        "Glm4Moe",
        GLM4_MOE
        | {
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "head_dim": 32,
        }
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            }
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5-wide": (
        "Ernie4_5",
        {"head_dim": 32, "rope_parameters": YARN, "tie_word_embeddings": False},
    ),
    "ernie4_5-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "ernie4_5-moe-bounds": (
        "Ernie4_5_Moe",
        ERNIE_MOE
        | {
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
        }
        | {"moe_num_shared_experts": 0, "moe_norm_min": 0.6, "tie_word_embeddings": False},
    ),
    "glm4": ("Glm4", {"head_dim": 16, "eos_token_id": []}),
    "glm4-quarter": (
        "Glm4",
        {"head_dim": 32, "attention_bias": False, "tie_word_embeddings": True, "eos_token_id": []}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            }
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "seed-oss-biases": (
        "SeedOss",
        {"head_dim": 32, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 21, "num_hidden_layers": 4, "rope_parameters": LLAMA3},
    ),
    "exaone4-no-window": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 32},
    ),
    "exaone4-pattern": (
        "Exaone4",
        {"sliding_window": 21, "sliding_window_pattern": 2, "head_dim": 32},
    ),
    "minimax-m2": ("MiniMaxM2", MINIMAX | {"rotary_dim": 8}),
    "minimax-m2-whole": (
        "MiniMaxM2",
        MINIMAX | {"num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan-alpha-biases": (
        "HunYuanDenseV1",
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "alpha": 50.0,
                "factor": 1.0,
            }
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", HUNYUAN_MOE),
    "hunyuan-moe-lists": (
        "HunYuanMoEV1",
        HUNYUAN_MOE | {"moe_topk": [3] * 3, "attention_bias": True},
    ),
    "qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-windows": (
        "Qwen2Moe",
        QWEN2_MOE
        | {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        }
        | {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    ),
    "dots1": (
        "Dots1",
        DOTS1 | {"max_window_layers": 1, "sliding_window": 21, "norm_topk_prob": True},
    ),
    "dots1-biases": (
        "Dots1",
        DOTS1
        | {
            "sliding_window": None,
            "attention_bias": True,
            "n_group": 3,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        }
        | {"first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        EXAONE_MOE | {"num_hidden_layers": 4, "n_group": 2, "topk_group": 1},
    ),
    "exaone-moe-types": (
        "ExaoneMoe",
        EXAONE_MOE | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "olmo-hybrid": ("OlmoHybrid", OLMO_HYBRID | {"num_key_value_heads": 4}),
    "olmo-hybrid-nope": (
        "OlmoHybrid",
        OLMO_HYBRID
        | {"linear_allow_neg_eigval": False, "attention_bias": True, "layer_types": DELTA_LAST}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 24}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
    "afmoe": ("Afmoe", AFMOE | {"mup_enabled": True, "num_hidden_layers": 4}),
    "afmoe-biases": (
        "Afmoe",
        AFMOE
        | {
            "attention_bias": True,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 2.5,
        }
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "laguna": (
        "Laguna",
        LAGUNA | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "laguna-elements": (
        "Laguna",
        LAGUNA
        | {
            "gating": "per-element",
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        }
        | {
            "num_attention_heads_per_layer": None,
            "moe_routed_scaling_factor": 2.5,
            "sliding_window": 33,
        }
        | {"moe_router_logit_softcapping": 0.7}
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": LAGUNA_ROPES,
        },
    ),
    "cohere2": ("Cohere2", COHERE | {"num_hidden_layers": 4}),
    "cohere2-biases": (
        "Cohere2",
        COHERE
        | {
            "attention_bias": True,
            "logit_scale": 2.5,
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-2,
        }
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "cohere2-moe": ("Cohere2Moe", COHERE_MOE | {"num_hidden_layers": 4, "num_shared_experts": 2}),
    "cohere2-moe-sigmoids": (
        "Cohere2Moe",
        COHERE_MOE
        | {
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
        }
        | {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 72, "attention_bias": True}
        | {"num_hidden_layers": 5, "sliding_window_pattern": 2, "rms_norm_eps": 1e-3},
    ),
    "cohere2-moe-unnormed": (
        "Cohere2Moe",
        COHERE_MOE
        | {
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "prefix_dense_sliding_window_pattern": 2,
        }
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "tie_word_embeddings": False},
    ),
    "granite-4": ("GraniteMoeHybrid", GRANITE_HYBRID),
    "granite-4-dense": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "attention_bias": True,
        }
        | {"position_embedding_type": "rope", "mamba_conv_bias": False, "tie_word_embeddings": True}
        | {
            "mamba_d_conv": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "nemotron": ("NemotronH", NEMOTRON),
    "nemotron-latent": (
        "NemotronH",
        NEMOTRON
        | {"moe_latent_size": 48, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {
            "conv_kernel": 2,
            "norm_topk_prob": False,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        }
        | {
            "layers_block_type": [
                "mlp",
                "full_attention",
                "linear_attention",
                "linear_attention",
                "moe",
            ]
        }
        | {"num_key_value_heads": 1},
    ),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-normed": (
        "FalconH1",
        FALCON
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 1,
            "attention_bias": True,
        }
        | {
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_conv_bias": False,
            "mlp_bias": True,
        }
        | {"mamba_d_ssm": None, "mamba_n_heads": 8, "tie_word_embeddings": True},
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | {"num_mtp_layers": 0}),
    "deepseek-v3-no-query-rank": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "num_mtp_layers": 0,
        }
        | {"first_k_dense_replace": 3, "rope_parameters": YARN_MSCALE},
    ),
    "deepseek-v3-biases": (
        "DeepseekV3",
        DEEPSEEK | {"attention_bias": True, "rope_parameters": YARN_MSCALE, "num_mtp_layers": 0},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        DEEPSEEK
        | {"topk_method": "group_limited_greedy", "n_shared_experts": 2, "q_lora_rank": None},
    ),
    "deepseek-v2-greedy": ("DeepseekV2", DEEPSEEK | {"n_group": None, "topk_group": None}),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        DEEPSEEK
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "v_head_dim": 24, "n_group": 1}
        | {"topk_group": 1},
    ),
    "mistral-4": (
        "Mistral4",
        DEEPSEEK
        | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}
        | {"rope_parameters": GROWTH | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-mha": (
        "GptOss",
        GPT_OSS | {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 50},
    ),
}
