"""What routers of a checkpoint may say in config.json and in their tensors, and what is refused in
one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.errors import CheckpointError
from penstock.kernels.choose import choose
from penstock.kernels.routing import Routing
from penstock.layers.gate_form import GateForm
from penstock.layers.rope_config import RopeConfig
from penstock.models.experts import MoeConfig
from penstock.models.lfm2_moe import ConvMoeConfig
from penstock.models.model_config import ModelConfig
from penstock.models.read_config import model_config_of
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "vocab_size": 211,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
}
GLM = COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
ERNIE = COMMON | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_capacity": [8, 8, 8],
    "moe_gate": "topk",
    "moe_intermediate_size": 40,
    "moe_k": 3,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "use_bias": False,
    "use_rmsnorm": True,
    "auto_map": {
        "AutoConfig": "configuration_ernie4_5_moe.Ernie4_5_MoeConfig",
        "AutoModelForCausalLM": "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM",
    },
}
MINIMAX = COMMON | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 4,
    "head_dim": 16,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rotary_dim": 8,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
}
QWEN2 = COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "max_window_layers": 21,
    "moe_intermediate_size": 40,
    "norm_topk_prob": False,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 72,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
EXAONE = COMMON | {
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "topk_group": 1,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
DOTS = COMMON | {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "first_k_dense_replace": 1,
    "max_window_layers": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
}
HUNYUAN = COMMON | {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "attention_bias": False,
    "attention_head_dim": 16,
    "cla_share_factor": 2,
    "eod_token_id": 3,
    "head_dim": 16,
    "mlp_bias": False,
    "moe_intermediate_size": [96] * 4,
    "moe_layer_num_skipped": 0,
    "moe_topk": [2] * 4,
    "norm_type": "rms",
    "num_experts": 8,
    "num_shared_expert": [1] * 4,
    "org_vocab_size": 211,
    "rms_norm_eps": 1e-5,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "rope_scaling": {
        "alpha": 100.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
}
LFM2 = {
    key: value for key, value in COMMON.items() if key not in ("hidden_act", "tie_word_embeddings")
} | {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "moe_intermediate_size": 40,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}

TRINITY = COMMON | {
    "architectures": ["AfmoeForCausalLM"],
    "model_type": "afmoe",
    "global_attn_every_n_layers": 4,
    "head_dim": 16,
    "load_balance_coeff": 0.001,
    "moe_intermediate_size": 40,
    "mup_enabled": True,
    "n_group": 1,
    "num_dense_layers": 2,
    "num_expert_groups": 1,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_limited_groups": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
    "topk_group": 1,
    "use_grouped_mm": True,
}
LAGUNA = {key: value for key, value in COMMON.items() if key != "rope_theta"} | {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "gating": "per-head",
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "moe_routed_scaling_factor": 2.5,
    "num_attention_heads_per_layer": [4, 6, 6, 4],
    "decoder_sparse_step": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "mlp_only_layers": [0],
    "moe_router_logit_softcapping": 0.0,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40,
    "sliding_window": 512,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        },
    },
}
COMMAND = COMMON | {
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "logit_scale": 0.25,
    "layer_norm_eps": 1e-5,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "prefix_dense_intermediate_size": 72,
    "sliding_window": 4096,
    "shared_expert_combination_strategy": "average",
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}


def _read(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return model_config_of(raw | changes, "config.json")


def test_glm_has_grouped_sigmoids_and_a_layer_of_drafts_that_is_left_out() -> None:
    config = _read(GLM, n_group=4, topk_group=2)
    assert (
        isinstance(config, MoeConfig) and config.qk_norm and config.qkv_bias and not config.o_bias
    )
    assert config.routing == Routing(
        top_k=4, renormalise=True, sigmoid=True, groups=4, kept_groups=2, added=1e-20, scale=2.5
    )
    assert (config.expert_layers, config.shared_size, config.rope.part) == ({1, 2, 3}, 40, 0.5)
    assert config.left_out == ("model.layers.4.",)
    assert _read(GLM, num_nextn_predict_layers=0).left_out == ()


def test_ernie_has_a_stretch_of_layers() -> None:
    config = _read(ERNIE, moe_layer_end_index=2)
    assert isinstance(config, MoeConfig) and config.rope.neighbours and not config.mlp_bias
    assert config.routing == Routing(top_k=3, renormalise=True, least=1e-12)
    assert (config.expert_layers, config.shared_size, config.experts) == ({1, 2}, 80, 8)


def test_minimax_turns_what_rotary_dim_says() -> None:
    config = _read(MINIMAX)
    assert isinstance(config, MoeConfig) and config.whole_qk_norm and config.expert_size == 96
    assert (config.rope.part, config.rope.theta, config.windows) == (0.5, 1e6, (None,) * 4)
    assert config.routing == Routing(top_k=2, renormalise=True, sigmoid=True)


def test_lfm2_has_dense_layers_first() -> None:
    config = _read(LFM2)
    assert isinstance(config, ConvMoeConfig) and config.tie_word_embeddings and config.corrected
    assert (config.dense_layers, config.attends) == (2, (False, False, True, False))
    assert config.routing == Routing(top_k=4, renormalise=True, sigmoid=True, added=1e-6)


def test_hunyuan_has_a_larger_base_and_lists_of_one_number() -> None:
    config = _read(HUNYUAN)
    assert isinstance(config, MoeConfig) and config.turned_first and config.qk_norm
    assert config.rope == RopeConfig(theta=1e6 * 100.0 ** (16 / 14))
    assert (config.experts, config.routing, config.shared_size) == (
        8,
        Routing(top_k=2, renormalise=True),
        96,
    )
    assert _read(HUNYUAN, moe_topk=2, num_shared_expert=1, moe_intermediate_size=96) == config
    assert _read(HUNYUAN, rope_parameters=HUNYUAN["rope_scaling"]) == config
    dynamic = _read(HUNYUAN, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert isinstance(dynamic, MoeConfig) and dynamic.rope == RopeConfig(
        theta=1e6, kind="dynamic", factor=2.0
    )


def test_qwen2_has_windows_where_it_says_so() -> None:
    config = _read(QWEN2)
    assert isinstance(config, MoeConfig) and config.qkv_bias and not config.o_bias
    assert (config.windows, config.shared_size, config.expert_layers) == (
        (None,) * 4,
        72,
        {0, 1, 2, 3},
    )
    assert _read(QWEN2, sliding_window=0) == config, "as transformers 5 writes it"
    assert _read(QWEN2, use_sliding_window=True, sliding_window=9, max_window_layers=3).windows == (
        9,
        None,
        9,
        None,
    )


def test_exaone_turns_nothing_where_it_sees_all() -> None:
    config = _read(EXAONE)
    assert isinstance(config, MoeConfig) and not config.norms_behind
    assert (config.windows, config.expert_layers) == ((128, 128, 128, None), {1, 2, 3})
    assert [rope.kind for rope in config.ropes] == ["default"] * 3 + ["none"]


def test_trinity_turns_where_it_has_a_window_and_a_gate_opens_its_answer() -> None:
    config = _read(TRINITY)
    assert (
        isinstance(config, MoeConfig)
        and config.expert_layers == {2, 3}
        and config.embedding_scale == 8.0
    )
    assert config.routing == Routing(
        top_k=4, renormalise=True, sigmoid=True, added=1e-20, scale=2.826
    )
    assert (config.windows, config.gate) == ((2048,) * 3 + (None,), GateForm(name="gate_proj"))
    assert [rope.kind for rope in config.ropes] == ["default"] * 3 + ["none"]


def test_laguna_has_heads_and_ropes_by_layer() -> None:
    config = _read(LAGUNA)
    assert (
        isinstance(config, MoeConfig)
        and config.layer_heads == (4, 6, 6, 4)
        and config.expert_layers == {1, 2, 3}
    )
    assert config.gate == GateForm(name="g_proj", softplus=True, a_head=True)
    assert [(rope.theta, rope.part) for rope in config.ropes] == [
        (5e5, 0.5),
        (1e4, 1.0),
        (1e4, 1.0),
        (5e5, 0.5),
    ]
    assert _read(LAGUNA, gating=True) == config != _read(LAGUNA, gating="per-element")


def test_command_has_means_of_experts_and_dense_layers_of_their_own_size() -> None:
    config = _read(COMMAND)
    assert (
        isinstance(config, MoeConfig)
        and config.parallel
        and config.layer_norms
        and config.expert_layers == {1, 2, 3}
    )
    assert (config.intermediate_size, config.expert_size, config.shared_size) == (72, 96, 192)
    assert (config.shared_scale, config.routing.scale, config.logits_scale) == (0.5, 0.5, 0.25)
    assert config.windows == (None, 4096, 4096, 4096) and all(
        rope.kind == "default" for rope in config.ropes
    )
    assert config.left_out == () and _read(COMMAND, num_nextn_predict_layers=1).left_out == (
        "model.layers.4.",
    )
    config = _read(COMMAND, rms_norm_eps=1e-6, shared_expert_combination_strategy="sum")
    assert isinstance(config, MoeConfig) and not config.layer_norms and config.rms_norm_eps == 1e-6
    assert config.shared_scale == config.routing.scale == 1.0


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (
            TRINITY,
            {"score_func": "softmax"},
            "key 'score_func' (\"softmax\") is not supported for model_type 'afmoe'",
        ),
        (TRINITY, {"route_norm": False}, "key 'route_norm' (false) is not supported"),
        (TRINITY, {"n_group": 2}, "key 'n_group' (2) is not supported"),
        (TRINITY, {"route_scale": 0}, "route_scale must be above 0"),
        (TRINITY, {"num_experts_per_tok": 9}, "num_experts_per_tok (9) is above num_experts (8)"),
        (
            TRINITY,
            {"sliding_window": None},
            "layer_types asks for sliding_attention but sliding_window is null",
        ),
        (TRINITY, {"mup_enabled": 3}, "mup_enabled must be true or false"),
        (LAGUNA, {"gating": False}, "gating must be true, 'per-head' or 'per-element', not False"),
        (LAGUNA, {"gating": 1}, "gating must be true"),
        (
            LAGUNA,
            {"num_attention_heads_per_layer": [4, 6, 6]},
            "must list 4 whole numbers, one a layer",
        ),
        (
            LAGUNA,
            {"num_attention_heads_per_layer": [4, 6, 5, 4]},
            "holds 5, which is no multiple of num_key_value",
        ),
        (
            LAGUNA,
            {"num_attention_heads_per_layer": [4, 6, -2, 4]},
            "holds -2, which is no multiple",
        ),
        (
            LAGUNA,
            {"moe_router_logit_softcapping": -1},
            "moe_router_logit_softcapping must be at least 0",
        ),
        (
            LAGUNA,
            {"moe_apply_router_weight_on_input": True},
            "key 'moe_apply_router_weight_on_input' (true)",
        ),
        (
            LAGUNA,
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters must have an object for full_",
        ),
        (
            LAGUNA,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters must have an object for sliding_attention, which layer_types asks for",
        ),
        (
            LAGUNA,
            {"mlp_layer_types": ["dense", "odd", "sparse", "sparse"]},
            "mlp_layer_types must say of 4 layers",
        ),
        (
            LAGUNA,
            {"mlp_only_layers": [1]},
            "key 'mlp_only_layers' ([1]) is not supported for model_type 'laguna'",
        ),
        (
            LAGUNA,
            {"moe_router_score_func": "softmax"},
            "key 'moe_router_score_func' (\"softmax\") is not supported",
        ),
        (
            LAGUNA,
            {"partial_rotary_factor": 0.5},
            "key 'partial_rotary_factor' (0.5) is not supported",
        ),
        (COMMAND, {"expert_selection_fn": "topk"}, "expert_selection_fn 'topk' is not supported"),
        (
            COMMAND,
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy 'max' is not",
        ),
        (
            COMMAND,
            {"use_qk_norm": True},
            "key 'use_qk_norm' (true) is not supported for model_type 'cohere2_moe'",
        ),
        (COMMAND, {"layer_norm_eps": 0}, "layer_norm_eps must be above 0"),
        (COMMAND, {"logit_scale": -1}, "logit_scale must be above 0"),
        (COMMAND, {"n_group": 2}, "key 'n_group' (2) is not supported"),
        (GLM, {"n_group": 3}, "n_group (3) does not divide the number of experts (8)"),
        (GLM, {"n_group": 4, "topk_group": 5}, "topk_group (5) is above n_group (4)"),
        (GLM, {"n_group": 8, "topk_group": 8}, "n_group (8) leaves a group one expert"),
        (
            GLM,
            {"n_group": 4},
            "num_experts_per_tok (4) is above what topk_group (1) groups of 2 hold",
        ),
        (GLM, {"n_group": 0}, "n_group must be a whole number from 1"),
        (GLM, {"num_experts_per_tok": 9}, "num_experts_per_tok (9) is above n_routed_experts (8)"),
        (GLM, {"routed_scaling_factor": 0}, "routed_scaling_factor must be above 0"),
        (GLM, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (GLM, {"scoring_func": "softmax"}, "key 'scoring_func' (\"softmax\") is not supported for"),
        (GLM, {"num_experts": 4}, "key 'num_experts' (4) is not supported"),
        (GLM, {"num_local_experts": 4}, "num_local_experts (4) and n_routed_experts (8) disagree"),
        (ERNIE, {"use_bias": True}, "key 'use_bias' (true) is not supported"),
        (ERNIE, {"moe_gate": "top2"}, "key 'moe_gate' (\"top2\") is not supported"),
        (ERNIE, {"moe_k": 9}, "moe_k (9) is above moe_num_experts (8)"),
        (ERNIE, {"moe_norm_min": -1}, "moe_norm_min must be at least 0"),
        (ERNIE, {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}, "key 'auto_map'"),
        (MINIMAX, {"scoring_func": "softmax"}, "key 'scoring_func' (\"softmax\") is not supported"),
        (MINIMAX, {"use_routing_bias": False}, "key 'use_routing_bias' (false) is not supported"),
        (
            MINIMAX,
            {"shared_intermediate_size": 8},
            "key 'shared_intermediate_size' (8) is not supported",
        ),
        (MINIMAX, {"attn_type_list": [1, 0, 1, 1]}, "key 'attn_type_list'"),
        (MINIMAX, {"rotary_dim": 17}, "rotary_dim must be a whole number from 1 to 16"),
        (MINIMAX, {"rotary_dim": 5}, "turns 5 numbers of a head: they need pairs"),
        (
            HUNYUAN,
            {"moe_topk": [2, 2, 3, 2]},
            "moe_topk must be one number, or the same for each of 4 layers",
        ),
        (HUNYUAN, {"num_shared_expert": [2] * 4}, "key 'num_shared_expert' (2) is not supported"),
        (
            HUNYUAN,
            {"moe_intermediate_size": 97},
            "key 'moe_intermediate_size' (97) is not supported",
        ),
        (HUNYUAN, {"use_cla": True}, "key 'use_cla' (true) is not supported"),
        (
            HUNYUAN,
            {"rope_scaling": {"type": "yarn", "alpha": 2.0}},
            "alpha belongs to a rope_type 'dynamic', not to",
        ),
        (HUNYUAN, {"rope_scaling": {"type": "dynamic", "alpha": 0}}, "alpha must be above 0"),
        (
            HUNYUAN,
            {"rope_scaling": {"type": "dynamic", "alpha": 1e299}},
            "alpha must be above 0 and at most 1e+09",
        ),
        (
            HUNYUAN,
            {"rope_scaling": {"type": "dynamic", "alpha": 2.0, "odd": 1}},
            "key 'odd' of rope parameters (1)",
        ),
        (
            GLM,
            {"num_nextn_predict_layers": 65},
            "num_nextn_predict_layers must be a whole number from 0 to 64",
        ),
        (GLM, {"n_group": 65}, "n_group must be a whole number from 1 to 64"),
        (
            QWEN2,
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types asks for sliding_attention but",
        ),
        (QWEN2, {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers"),
        (QWEN2, {"n_group": 2}, "key 'n_group' (2) is not supported for model_type 'qwen2_moe'"),
        (DOTS, {"n_routed_experts": None}, "key 'n_routed_experts' is missing"),
        (DOTS, {"n_shared_experts": None}, "key 'n_shared_experts' is missing"),
        (
            DOTS,
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is null",
        ),
        (EXAONE, {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types must say of 4 layers each"),
        (
            EXAONE,
            {"sliding_window": None},
            "layer_types asks for sliding_attention but sliding_window is null",
        ),
        (EXAONE, {"layer_types": None}, "sliding_window_pattern must be a whole number"),
        (LFM2, {"layer_types": None}, "key 'layer_types' is missing"),
        (LFM2, {"use_expert_bias": 3}, "use_expert_bias must be true or false"),
        (LFM2, {"n_group": 2}, "key 'n_group' (2) is not supported for model_type 'lfm2_moe'"),
    ],
)
def test_what_is_wrong_is_one_line(raw: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    _read(raw)
    with pytest.raises(CheckpointError) as caught:
        _read(raw, **changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    changes = {
        key: value
        for key, value in GLM.items()
        if key not in ("architectures", "model_type", "torch_dtype")
    }
    transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**changes)).save_pretrained(folder)
    return folder


def _load(folder: Path) -> None:
    device = torch.device("cpu")
    ops = choose(device, torch.float32)
    load_model(folder, load_format="auto", dtype=torch.float32, device=device, ops=ops, seed=0)


NAME = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("put", "said"),
    [
        ({NAME: torch.zeros(7)}, r"has shape \[7\], config.json asks for \[8\]"),
        ({NAME: None}, "lack tensor"),
        ({NAME: torch.tensor([0.0] * 7 + [torch.nan])}, "holds what is no finite number"),
        ({"model.layers.1.mlp.shared_expert_gate.weight": torch.zeros(1, 64)}, "holds tensor"),
        (
            {"model.layers.5.mlp.gate.weight": torch.zeros(8, 64)},
            "holds tensor 'model.layers.5.mlp.gate.weight'",
        ),
    ],
    ids=[
        "another length",
        "none",
        "no number",
        "a gate that it hasn't",
        "a layer past the drafts'",
    ],
)
def test_a_wrong_tensor_is_one_line(
    folder: Path, put: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tensors = {
        name: each
        for name, each in (load_file(folder / "model.safetensors") | put).items()
        if each is not None
    }
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said) as caught:
        _load(tmp_path)
    assert "\n" not in str(caught.value)


def test_layers_of_drafts_are_left_out(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {
        "model.layers.4.eh_proj.weight": torch.zeros(64, 128)
    }
    raw = json.loads((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"holds tensor 'model\.layers\.4\.eh_proj\.weight'"):
        _load(tmp_path)
