"""Each model file against transformers: the same logits, the same 64 greedy tokens, however the tokens are cut up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_cache import PagedCache
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.choose import choose
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
YARN_ATTENTION = YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}

MOE = {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": False,
}  # fmt: skip
GEMMA = {
    "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 21, "sliding_window_pattern": 3,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.6, 2.0], "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
}  # fmt: skip
GROWTH = YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 40}
TWO_ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
NOPE = {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.9, "logits_scaling": 2.5,
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 21, "head_dim": 32, "num_hidden_layers": 4,
    "swiglu_limit": 1.2, "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
LFM2 = {
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
CONV_LAST = ["conv", "full_attention", "conv"]
QWEN3_5 = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "full_attention_interval": 2, "rope_parameters":
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}  # fmt: skip
OLMO_HYBRID = {  # q, k and v of one size: transformers writes their convolutions as thirds
    "linear_key_head_dim": 12, "linear_value_head_dim": 12, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 6,
    "intermediate_size": 40, "shared_intermediate_size": 56, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 24, "mamba_n_groups": 2, "residual_multiplier": 0.8, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"], "head_dim": 32,
    "mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 16, "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "time_step_min": 1e-30,  # it bounds dt from below in transformers' prompts, in its rows not, nor anywhere else
}  # fmt: skip
FALCON = {
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 24, "mamba_n_groups": 2, "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7, "mlp_multipliers": [0.9, 0.6], "key_multiplier": 0.4, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9, "ssm_multipliers": [0.8, 1.3, 0.6, 0.5, 0.7], "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 24, "head_dim": 32, "norm_topk_prob": True}
DELTA_LAST = ["full_attention", "linear_attention", "linear_attention"]
LFM2_MOE = {
    "layer_types": CONV_LAST, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "num_dense_layers": 1, "rope_parameters": LFM2["rope_parameters"],
}  # fmt: skip
GLM4_MOE = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40}
MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
HUNYUAN_MOE = {"num_experts": 6, "moe_topk": 2, "head_dim": 16}
QWEN2_MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72,
}  # fmt: skip
DOTS1 = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1}
EXAONE_MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "sliding_window": 21,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "Dots1": DOTS1,
    "Lfm2Moe": {"layer_types": CONV_LAST},
    "Glm4": {"eos_token_id": []},
}  # what transformers has no default for that it computes with
GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 21}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-wide": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN_MSCALE}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": YARN_ATTENTION}),
    "mistral-window": ("Mistral", {"sliding_window": 21}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
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
    "qwen3-moe-unnormed-some-layers": ("Qwen3Moe", MOE | {"mlp_only_layers": [1], "num_experts_per_tok": 1}),
    "qwen3-moe-window": ("Qwen3Moe", MOE | {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3-moe-every-second": ("Qwen3Moe", MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", GEMMA),
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
        "Gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "sliding_window": 21}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.8, "attention_bias": True}),
    "olmoe-renormalised": (
        "Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 4},
    ),
    "phi3-window": ("Phi3", {"sliding_window": 21}),
    "phi3-partial-longrope": (
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "phi3-longrope-short": (
        "Phi3", {"rope_parameters": LONGROPE | {"factor": 2.0}, "original_max_position_embeddings": 256},
    ),
    "olmo2-biases": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 21, "num_hidden_layers": 4, "rope_parameters": TWO_ROPES}),
    "granite": ("Granite", MULTIPLIERS | {"tie_word_embeddings": True}),
    "granite-biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.25}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-windows": ("SmolLM3", NOPE | {"use_sliding_window": True, "sliding_window": 21}),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": GROWTH, "sliding_window": 50}),
    "lfm2": ("Lfm2", LFM2 | {"full_attn_idxs": [1]}),
    "lfm2-biases-last-conv": ("Lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 5, "layer_types": CONV_LAST}),
    "lfm2-whole-mlp": (
        "Lfm2", LFM2 | {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [0, 2], "tie_word_embeddings": False},
    ),
    "qwen3-5": ("Qwen3_5Text", QWEN3_5),
    "qwen3-5-shared-keys": (
        "Qwen3_5Text", QWEN3_5 | {"linear_num_key_heads": 1, "linear_value_head_dim": 24, "layer_types": DELTA_LAST}
        | {"attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
    ),
    "qwen3-5-moe": ("Qwen3_5MoeText", QWEN3_5 | MOE | SHARED),
    "qwen3-next": ("Qwen3Next", QWEN3_5 | MOE | SHARED | {"norm_topk_prob": False, "linear_key_head_dim": 24}),
    "qwen3-next-some-layers": (
        "Qwen3Next", QWEN3_5 | MOE | SHARED | {"mlp_only_layers": [0], "layer_types": DELTA_LAST, "head_dim": 64},
    ),
    "lfm2-moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2-moe-unnormed": (
        "Lfm2Moe", LFM2_MOE | {"norm_topk_prob": False, "routed_scaling_factor": 1.7, "num_dense_layers": 0},
    ),
    "lfm2-moe-no-bias": ("Lfm2Moe", LFM2_MOE | {"use_expert_bias": False, "conv_bias": True, "conv_L_cache": 4}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE | {"attention_bias": True}),
    "glm4-moe-groups": (
        "Glm4Moe", GLM4_MOE | {"n_group": 3, "topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "glm4-moe-unnormed": (
        "Glm4Moe",
        GLM4_MOE
        | {"norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 0, "head_dim": 32}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5-wide": ("Ernie4_5", {"head_dim": 32, "rope_parameters": YARN, "tie_word_embeddings": False}),
    "ernie4_5-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "ernie4_5-moe-bounds": (
        "Ernie4_5_Moe",
        ERNIE_MOE
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2, "num_hidden_layers": 4}
        | {"moe_num_shared_experts": 0, "moe_norm_min": 0.6, "tie_word_embeddings": False},
    ),
    "glm4": ("Glm4", {"head_dim": 16, "eos_token_id": []}),
    "glm4-quarter": (
        "Glm4",
        {"head_dim": 32, "attention_bias": False, "tie_word_embeddings": True, "eos_token_id": []}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "seed-oss-biases": (
        "SeedOss", {"head_dim": 32, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 21, "num_hidden_layers": 4, "rope_parameters": LLAMA3}),
    "exaone4-no-window": (
        "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 32},
    ),
    "exaone4-pattern": ("Exaone4", {"sliding_window": 21, "sliding_window_pattern": 2, "head_dim": 32}),
    "minimax-m2": ("MiniMaxM2", MINIMAX | {"rotary_dim": 8}),
    "minimax-m2-whole": ("MiniMaxM2", MINIMAX | {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan-alpha-biases": (
        "HunYuanDenseV1",
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-moe": ("HunYuanMoEV1", HUNYUAN_MOE),
    "hunyuan-moe-lists": ("HunYuanMoEV1", HUNYUAN_MOE | {"moe_topk": [3] * 3, "attention_bias": True}),
    "qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-windows": (
        "Qwen2Moe",
        QWEN2_MOE
        | {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [1], "tie_word_embeddings": True}
        | {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    ),
    "dots1": ("Dots1", DOTS1 | {"max_window_layers": 1, "sliding_window": 21, "norm_topk_prob": True}),
    "dots1-biases": (
        "Dots1",
        DOTS1
        | {"sliding_window": None, "attention_bias": True, "n_group": 3, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "exaone-moe": ("ExaoneMoe", EXAONE_MOE | {"num_hidden_layers": 4, "n_group": 2, "topk_group": 1}),
    "exaone-moe-types": ("ExaoneMoe", EXAONE_MOE | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "olmo-hybrid": ("OlmoHybrid", OLMO_HYBRID | {"num_key_value_heads": 4}),
    "olmo-hybrid-nope": (
        "OlmoHybrid",
        OLMO_HYBRID | {"linear_allow_neg_eigval": False, "attention_bias": True, "layer_types": DELTA_LAST}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 24}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
    "granite-4": ("GraniteMoeHybrid", GRANITE_HYBRID),
    "granite-4-dense": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "mamba_n_groups": 1, "mamba_proj_bias": True, "attention_bias": True}
        | {"position_embedding_type": "rope", "mamba_conv_bias": False, "tie_word_embeddings": True}
        | {"mamba_d_conv": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "nemotron": ("NemotronH", NEMOTRON),
    "nemotron-latent": (
        "NemotronH",
        NEMOTRON | {"moe_latent_size": 48, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}
        | {"conv_kernel": 2, "norm_topk_prob": False, "use_bias": True, "use_conv_bias": False, "n_groups": 1}
        | {"layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention", "moe"]}
        | {"num_key_value_heads": 1},
    ),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-normed": (
        "FalconH1",
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1, "attention_bias": True}
        | {"mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False, "mlp_bias": True}
        | {"mamba_d_ssm": None, "mamba_n_heads": 8, "tie_word_embeddings": True},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-mha": ("GptOss", GPT_OSS | {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 50}),
}  # fmt: skip
PROMPT = 70  # longer than the windows, and over several blocks
NEW = 64


def _theirs(name: str) -> transformers.PreTrainedModel:
    """A model with every weight drawn: biases and norm weights too, which transformers starts at 0 and 1."""
    torch.manual_seed(len(name))
    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        spread = 0.2 if parameter.dim() > 1 else 0.5
        gemma = kind.startswith("Gemma")
        one_plus = gemma or (kind.startswith(("Qwen3_5", "Qwen3Next")) and "linear_attn" not in parameter_name)
        centre = 1.0 if "norm" in parameter_name and not one_plus else 0.0  # where the norm is w, and 1 + w counts
        if "embed_tokens" in parameter_name and gemma:
            spread = 0.02  # tied, and multiplied by 8: else each token is its own successor
        if kind == "Olmo2" and ("q_norm" in parameter_name or "embed_tokens" in parameter_name):
            centre, spread = 3.0 * (parameter.dim() == 1), 1.0  # else norms even out what a token is
        torch.nn.init.normal_(parameter, centre, spread)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("_bias"):  # what routers add for the choice
            torch.nn.init.normal_(buffer, 0.0, 0.5)
    return model


def _ours(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    device = torch.device("cpu")
    ops = choose(device, dtype, "auto")
    return load_model(folder, load_format="auto", dtype=dtype, device=device, ops=ops, seed=0)


def _assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    theirs = _theirs(request.param)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return theirs, _ours(folder)


@torch.inference_mode()
def _expected(theirs: Any) -> tuple[list[int], list[int], Tensor]:
    """A prompt, its 64 greedy tokens, and the logits of the whole."""
    prompt = torch.randint(0, 211, (PROMPT,), generator=torch.Generator().manual_seed(3))
    whole = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )[0]
    return prompt.tolist(), whole[PROMPT:].tolist(), theirs(whole[None]).logits[0]


def test_logits_and_greedy_tokens_are_those_of_transformers(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    prompt, greedy, logits = _expected(theirs)
    assert len(set(greedy)) > 10, "a model that repeats itself shows little"
    _assert_close(PagedCache(ours, 1, 9).step([], [(0, prompt + greedy)]), logits)

    cache = PagedCache(ours, 3, 9, seed=1)  # chunked prefill of sequence 1, beside another sequence that decodes
    cache.step([], [(0, prompt[:33])])
    cache.step([(0, prompt[33])], [(1, prompt[:19])])
    seen = cache.step([(0, prompt[34])], [(1, prompt[19:20]), (2, prompt[:40])])
    _assert_close(seen[0], logits[34])
    _assert_close(seen[1], logits[19])
    _assert_close(cache.step([], [(1, prompt[20:-1])]), logits[20 : PROMPT - 1])
    token, drawn = prompt[-1], []
    for position in range(PROMPT - 1, PROMPT + NEW - 1):
        scores = cache.step([(1, token)])[0]
        _assert_close(scores, logits[position])
        token = int(scores.argmax())
        drawn.append(token)
    assert drawn == greedy


def test_token_by_token_is_the_same_as_whole(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    prompt, _, logits = _expected(theirs)
    cache = PagedCache(ours, 2, 9, seed=2)
    for position, token in enumerate(prompt):
        both = cache.step([(1, token), (0, prompt[-1 - position])])
        _assert_close(both[0], logits[position])


@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "qwen2-windows", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path, case: str) -> None:
    theirs = _theirs(case)
    theirs.save_pretrained(tmp_path)
    prompt, greedy, exact = _expected(theirs)
    half = theirs.to(torch.bfloat16)
    with torch.inference_mode():
        their_error = (half(torch.tensor([prompt + greedy])).logits[0].float() - exact).square().mean().sqrt()
    logits = PagedCache(_ours(tmp_path, torch.bfloat16), 1, 9).step([], [(0, prompt + greedy)])
    our_error = (logits.float() - exact).square().mean().sqrt()
    assert logits.dtype == torch.bfloat16
    assert 0 < our_error < 1.2 * their_error < 0.2 * exact.std()


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES.values()}))
def test_every_key_that_transformers_can_write_is_understood(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL | NEEDED.get(kind, {}))
    whole, short = (json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True))
    assert len(whole) > len(short)
    assert model_config_of(whole, "whole") == model_config_of(short, "short")


def test_the_spelling_of_transformers_4_computes_the_same(tmp_path: Path) -> None:
    _theirs("llama-llama3").save_pretrained(tmp_path)
    prompt = list(range(50, 120))
    expected = PagedCache(_ours(tmp_path), 1, 9).step([], [(0, prompt)])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": raw.pop("dtype")}
    path.write_text(json.dumps(raw))
    assert torch.equal(PagedCache(_ours(tmp_path), 1, 9).step([], [(0, prompt)]), expected)


SEEN = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.mark.parametrize("since", [4, 5])
@pytest.mark.parametrize(("whole", "text"), [("Gemma3", "gemma3"), ("Mistral3", "ministral3"), ("Mistral3", "mistral")])
def test_the_text_of_a_multimodal_checkpoint(
    whole: str, text: str, since: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out is said, and the text's logits are its own. since: transformers' names of the tensors."""
    kind, changes = CASES[{"gemma3": "gemma3", "ministral3": "ministral3", "mistral": "mistral-window"}[text]]
    inner = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    seen = transformers.SiglipVisionConfig(**SEEN) if whole == "Gemma3" else transformers.PixtralVisionConfig(**SEEN)
    parts = {"text_config": inner.to_dict(), "vision_config": seen.to_dict()}
    config = getattr(transformers, f"{whole}Config")(**parts, tie_word_embeddings=text != "mistral")
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path)
    path, named = tmp_path / "model.safetensors", {4: "language_model.model.", 5: "model.language_model."}
    tensors = {name.replace(named[9 - since], named[since]): tensor for name, tensor in load_file(path).items()}
    assert any(name.startswith(named[since]) for name in tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    prompt = list(range(50, 120))
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0]
    ours = _ours(tmp_path)
    _assert_close(PagedCache(ours, 1, 9).step([], [(0, prompt)]), logits)
    assert "its vision part is left out" in capsys.readouterr().err
    assert ours.config.architecture == f"{kind.removesuffix('Text')}ForCausalLM"


@pytest.mark.parametrize(
    ("whole", "text", "stacked"),
    [("Qwen3_5", "qwen3-5", False), ("Qwen3_5Moe", "qwen3-5-moe", False), ("Qwen3_5Moe", "qwen3-5-moe", True)],
)
def test_the_text_of_qwen3_5(
    whole: str, text: str, stacked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its vision part and its layers that draft are left out aloud; a layer's experts may be one tensor."""
    kind, changes = CASES[text]
    inner = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    seen = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = getattr(transformers, f"{whole}Config")(text_config=inner.to_dict(), vision_config=seen)
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    for name, parameter in theirs.named_parameters():  # experts are empty memory until they are loaded
        torch.nn.init.normal_(parameter, 0.0, 0.2 if "experts" in name else 0.1)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3 if stacked else 0):
        at = f"model.language_model.layers.{layer}.mlp.experts"
        each = [[tensors.pop(f"{at}.{n}.{matrix}_proj.weight") for n in range(6)] for matrix in ("gate", "up", "down")]
        tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(*each[:2], strict=True)])
        tensors[f"{at}.down_proj"] = torch.stack(each[2])
    tensors |= {"mtp.layers.0.input_layernorm.weight": torch.ones(64), "mtp.fc.weight": torch.ones(64, 128)}
    save_file(tensors, path, metadata={"format": "pt"})
    prompt = list(range(50, 120))
    with torch.inference_mode():
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0]
    _assert_close(PagedCache(_ours(tmp_path), 1, 9).step([], [(0, prompt)]), logits)
    told = capsys.readouterr().err
    assert "its vision part is left out" in told and "its layers that predict more tokens (mtp) are left out" in told


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("dt_bias", None, "lack tensor 'model.layers.0.linear_attn.dt_bias'"),
        (
            "conv1d.weight",
            torch.zeros(128 + 64 + 64, 1, 3),
            r"conv1d.weight' has shape \[256, 1, 3\], config.json asks",
        ),
        ("A_log", torch.tensor([0.0, float("nan"), 0.0, 0.0]), "linear_attn.A_log' holds what is no finite number"),
    ],
)
def test_what_a_delta_layer_lacks_is_named(name: str, change: Tensor | None, said: str, tmp_path: Path) -> None:
    _theirs("qwen3-5").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    whole = f"model.layers.0.linear_attn.{name}"
    del tensors[whole]
    save_file(tensors if change is None else tensors | {whole: change}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        _ours(tmp_path)
