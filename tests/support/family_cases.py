"""Random small models of every family, an LLM's work on one, and what transformers says of each
token that comes back.

    noise          transformers in bfloat16 less transformers in float32, over all positions and the
    whole vocabulary
    ours           our logprobs of a prompt's and an output's tokens, less float32's over these very
    tokens
    bfloat16       ours is no larger than the noise: its mean within 1.2, its largest within 1.5
    times. Means of sizes,
                   not of squares: of squares a few tokens decide, whose expert is another by a
                   rounding
    float32        ours is 2,000 times smaller than that
    greedy tokens  the likeliest of float32, or one as near to it as two logprobs may be off

Each token is scored behind the tokens that we drew: what comes after a near-tie counts too. No
router may have a near-tie, which float32 rounds either way: numbers of experts are chosen so that
weights moved by 1e-6 of their size move no logprob by 1e-3. It knows no kernels.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.request import RequestOutput

transformers = pytest.importorskip(
    "transformers", reason="what is compared with: carry its wheel to a GPU machine"
)
transformers.utils.logging.disable_progress_bar()

CONTEXT = 256
VOCABULARY = 211
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}
STRETCHED = {"rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **STRETCHED,
    }
}
YARN = {"rope_parameters": {"rope_type": "yarn", **STRETCHED}}
YARN_MSCALE = {
    "rope_parameters": YARN["rope_parameters"]
    | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
}
YARN_ATTENTION = {
    "rope_parameters": YARN["rope_parameters"] | {"attention_factor": 1.3, "beta_fast": 4.0}
}
TIED = {"tie_word_embeddings": True}
BIASES = {"attention_bias": True}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
    },
}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 2}
GEMMA4 = {
    "sliding_window": 37,
    "num_hidden_layers": 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def heads(query: int, kv: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": width}


def windows(size: int, **more: Any) -> dict[str, Any]:
    """As Qwen2 and Qwen3 ask for them."""
    return {"use_sliding_window": True, "sliding_window": size, **more}


LONGROPE = {
    # transformers takes the long factors for longer texts only
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 12,
        "long_factor": [1.0 + 0.5 * wave for wave in range(12)],
    },
}
ONE, THREE = {"num_hidden_layers": 1}, {"num_hidden_layers": 3}
Case = tuple[str, dict[str, Any]]  # transformers' name of the family, what of SMALL is otherwise
CONVS = ["conv", "full_attention", "conv"]
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CASES: dict[str, Case] = {
    "llama 4/2 of 32, linear, tied": ("Llama", heads(4, 2, 32) | LINEAR | TIED | ONE),
    "llama 15/5 of 64, llama3": ("Llama", heads(15, 5, 64) | LLAMA3 | {"hidden_size": 240}),
    "llama 4/4 of 80, yarn, all biases": (
        "Llama",
        heads(4, 4, 80) | YARN | BIASES | {"mlp_bias": True},
    ),
    "llama 3/3 of 96, yarn with mscale": (
        "Llama",
        heads(3, 3, 96) | YARN_MSCALE | THREE | {"hidden_size": 120},
    ),
    "llama 7/1 of 128, dynamic, biases": (
        "Llama",
        heads(7, 1, 128) | DYNAMIC | BIASES | {"hidden_size": 112},
    ),
    "llama 4/2 of 256, theta": ("Llama", heads(4, 2, 256) | THETA),
    "llama 8/1 of 256, yarn with a factor": (
        "Llama",
        heads(8, 1, 256) | YARN_ATTENTION | {"hidden_size": 88},
    ),
    "mistral 4/2 of 64, window 37": ("Mistral", heads(4, 2, 64) | {"sliding_window": 37} | THREE),
    "mistral 7/1 of 128, window 37, yarn": (
        "Mistral",
        heads(7, 1, 128) | {"sliding_window": 37} | YARN,
    ),
    "mistral 3/3 of 256, window 16, linear": (
        "Mistral",
        heads(3, 3, 256) | {"sliding_window": 16} | LINEAR | ONE,
    ),
    "mistral 15/5 of 32, window past the context": (
        "Mistral",
        heads(15, 5, 32) | {"sliding_window": 300} | TIED,
    ),
    "mistral 4/1 of 80, window 64, llama3": (
        "Mistral",
        heads(4, 1, 80) | {"sliding_window": 64} | LLAMA3,
    ),
    "mistral 8/2 of 96, no window, dynamic": (
        "Mistral",
        heads(8, 2, 96) | {"sliding_window": None} | DYNAMIC,
    ),
    "qwen2 7/1 of 64, tied": ("Qwen2", heads(7, 1, 64) | TIED),
    "qwen2 15/5 of 32, windows past the layers": (
        "Qwen2",
        heads(15, 5, 32) | windows(37, max_window_layers=3) | LINEAR | THREE,
    ),
    "qwen2 4/2 of 128, windows from layer 1, yarn": (
        "Qwen2",
        heads(4, 2, 128) | windows(37, max_window_layers=1) | YARN | THREE,
    ),
    "qwen2 3/3 of 96, windows in all layers, theta": (
        "Qwen2",
        heads(3, 3, 96) | windows(21, max_window_layers=0) | THETA,
    ),
    "qwen2 4/2 of 256, dynamic": ("Qwen2", heads(4, 2, 256) | DYNAMIC | ONE),
    "qwen2 6/2 of 80, llama3, tied": ("Qwen2", heads(6, 2, 80) | LLAMA3 | TIED),
    "qwen3 4/2 of 128, tied": ("Qwen3", heads(4, 2, 128) | TIED),
    "qwen3 4/2 of 64, biases, mixed windows": (
        "Qwen3",
        heads(4, 2, 64) | windows(37, layer_types=MIXED) | BIASES | THREE,
    ),
    "qwen3 3/3 of 256, llama3": ("Qwen3", heads(3, 3, 256) | LLAMA3),
    "qwen3 7/1 of 96, yarn, window past the context": (
        "Qwen3",
        heads(7, 1, 96) | windows(1000, max_window_layers=0) | YARN,
    ),
    "qwen3 15/5 of 32, linear, biases": ("Qwen3", heads(15, 5, 32) | LINEAR | BIASES | ONE),
    "qwen3 8/1 of 80, dynamic": ("Qwen3", heads(8, 1, 80) | DYNAMIC),
    "phi3 4/2 of 32, longrope on a part": (
        "Phi3",
        {"num_attention_heads": 4, "num_key_value_heads": 2} | LONGROPE,
    ),
    "olmo2 4/2 of 32": ("Olmo2", heads(4, 2, 32)),
    "olmo3 4/4 of 32, mixed windows": (
        "Olmo3",
        heads(4, 4, 32) | {"sliding_window": 37, "num_hidden_layers": 4},
    ),
    "olmoe 4/4 of 32, clipped": (
        "Olmoe",
        {"num_attention_heads": 4, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 1.5},
    ),
    "mixtral 4/2 of 64, window 37": (
        "Mixtral",
        heads(4, 2, 64) | {"num_local_experts": 6, "sliding_window": 37},
    ),
    "qwen3_moe 4/2 of 64, experts in every second layer": (
        "Qwen3Moe",
        heads(4, 2, 64)
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        }
        | {"decoder_sparse_step": 2}
        | THREE,
    ),
    "gemma2 4/2 of 64, caps, mixed windows": (
        "Gemma2",
        heads(4, 2, 64)
        | {"query_pre_attn_scalar": 48, "sliding_window": 37, "attn_logit_softcapping": 5.0}
        | {"final_logit_softcapping": 8.0, "num_hidden_layers": 4}
        | TIED,
    ),
    "gemma3 4/2 of 256, two ropes, mixed windows": (
        "Gemma3Text",
        heads(4, 2, 256)
        | {
            "query_pre_attn_scalar": 200,
            "sliding_window": 37,
            "layer_types": MIXED,
            "num_hidden_layers": 3,
        }
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {**YARN["rope_parameters"]},
            }
        }
        | TIED,
    ),
    "lfm2 4/2 of 32, convolutions of 3 taps": (
        "Lfm2",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": CONVS} | THREE | TIED,
    ),
    "lfm2 2/1 of 64, 4 taps with biases": (
        "Lfm2",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "conv"],
        }
        | {"conv_L_cache": 4, "conv_bias": True, "tie_word_embeddings": False},
    ),
    "lfm2_moe 4/2 of 32": (
        "Lfm2Moe",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": CONVS, "num_experts": 6}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
        | THREE,
    ),
    "qwen3_5 4/2 of 64, a quarter turns, 2/4 delta heads of 64": (
        "Qwen3_5Text",
        heads(4, 2, 64) | DELTA | THREE,
    ),
    "qwen3_5 2/1 of 256, 2/2 delta heads of 128 and 64": (
        "Qwen3_5Text",
        heads(2, 1, 256) | DELTA | {"linear_key_head_dim": 128, "linear_num_value_heads": 2},
    ),
    "qwen3_5_moe 4/2 of 64": (
        "Qwen3_5MoeText",
        heads(4, 2, 64) | DELTA | SHARED | {"num_experts": 6, "num_experts_per_tok": 2},
    ),
    "olmo_hybrid 4/2 of 32, rates up to 2": (
        "OlmoHybrid",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": HYBRID}
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | THREE,
    ),
    "qwen3_next 4/1 of 64": (
        "Qwen3Next",
        heads(4, 1, 64) | DELTA | SHARED | {"num_experts": 6, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid 4/2 of 32, one group": (
        "GraniteMoeHybrid",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": HYBRID}
        | MAMBA
        | {
            "num_local_experts": 6,
            "shared_intermediate_size": 96,
            "mamba_n_groups": 1,
            "attention_multiplier": 0.2,
        }
        | {"residual_multiplier": 0.8}
        | THREE,
    ),
    "nemotron_h 4/2 of 64": (
        "NemotronH",
        heads(4, 2, 64)
        | {"mamba_num_heads": 4, "mamba_head_dim": 64, "n_groups": 2}
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "moe_intermediate_size": 48,
        }
        | {"moe_shared_expert_intermediate_size": 64, "n_routed_experts": 6, "moe_latent_size": 64}
        | {"time_step_min": 1e-30},
    ),
    "falcon_h1 4/2 of 32": (
        "FalconH1",
        {"num_attention_heads": 4, "num_key_value_heads": 2}
        | MAMBA
        | {
            "mamba_d_ssm": 256,
            "key_multiplier": 0.5,
            "mlp_multipliers": [0.9, 0.6],
            "ssm_out_multiplier": 0.7,
        }
        | {"ssm_multipliers": [0.8, 1.3, 0.6, 0.5, 0.7]},
    ),
    "glm4_moe 4/2 of 64, groups": (
        "Glm4Moe",
        heads(4, 2, 64)
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"n_group": 3, "topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 1.5}
        | BIASES
        | THREE,
    ),
    "ernie4_5_moe 4/2 of 32": (
        "Ernie4_5_Moe",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_num_experts": 6, "moe_k": 3}
        | {"moe_intermediate_size": 48}
        | THREE,
    ),
    "ernie4_5 4/2 of 64, biases, tied": ("Ernie4_5", heads(4, 2, 64) | {"use_bias": True} | TIED),
    "qwen2_moe 4/2 of 64, a gated shared expert": (
        "Qwen2Moe",
        heads(4, 2, 64)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"shared_expert_intermediate_size": 96},
    ),
    "dots1 4/2 of 64": (
        "Dots1",
        heads(4, 2, 64)
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"n_shared_experts": 1, "sliding_window": None},
    ),
    "exaone_moe 4/2 of 64, mixed windows": (
        "ExaoneMoe",
        heads(4, 2, 64)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"sliding_window": 37, "num_hidden_layers": 4}
        | THETA,
    ),
    "hyperclovax 4/2 of 64, multipliers": (
        "HyperCLOVAX",
        heads(4, 2, 64)
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.8}
        | {"logits_scaling": 0.5},
    ),
    "glm4 4/2 of 64": ("Glm4", heads(4, 2, 64) | {"eos_token_id": []}),
    "seed_oss 4/1 of 128, biases": (
        "SeedOss",
        heads(4, 1, 128) | {"attention_out_bias": True, "mlp_bias": True},
    ),
    "exaone4 4/2 of 64, mixed windows": (
        "Exaone4",
        heads(4, 2, 64) | {"sliding_window": 37, "num_hidden_layers": 4},
    ),
    "minimax_m2 4/2 of 64, half turns": (
        "MiniMaxM2",
        heads(4, 2, 64)
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 32}
        | {
            "partial_rotary_factor": 0.5
        },  # which transformers before 5.24 does not take from rotary_dim
    ),
    "hunyuan_v1_dense 4/2 of 128, alpha": (
        "HunYuanDenseV1",
        heads(4, 2, 128)
        | {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "alpha": 50.0,
                "factor": 1.0,
            }
        },
    ),
    "hunyuan_v1_moe 4/2 of 64": (
        "HunYuanMoEV1",
        heads(4, 2, 64) | {"num_experts": 8, "moe_topk": 2},
    ),
    "afmoe 4/2 of 64, a gate, mixed windows": (
        "Afmoe",
        heads(4, 2, 64)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"sliding_window": 37, "num_hidden_layers": 4, "attention_bias": True},
    ),
    "laguna 4/6/2 over 2 of 64, a gate a head": (
        "Laguna",
        heads(4, 2, 64)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {
            "shared_expert_intermediate_size": 48,
            "num_attention_heads_per_layer": [4, 6, 2],
            "sliding_window": 37,
        }
        | {"layer_types": MIXED}
        | THREE,
    ),
    "cohere2 4/2 of 32, mixed windows": (
        "Cohere2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 37,
            "num_hidden_layers": 4,
        }
        | TIED,
    ),
    "cohere2_moe 4/2 of 64": (
        "Cohere2Moe",
        heads(4, 2, 64)
        | {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}
        | {"sliding_window": 37, "first_k_dense_replace": 1, "logit_scale": 1.0}
        | THREE,
    ),
    "gpt_oss 4/2 of 64, window 37": (
        "GptOss",
        heads(4, 2, 64)
        | YARN
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 37},
    ),
    "granite 4/2 of 64": (
        "Granite",
        heads(4, 2, 64)
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.9,
            "logits_scaling": 2.5,
        },
    ),
    "deepseek_v3 4 of 512 + 64": (
        "DeepseekV3",
        LATENT | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v2 8 of 192 + 32, no rank of queries": (
        "DeepseekV2",
        LATENT
        | {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None}
        | {
            "kv_lora_rank": 192,
            "qk_rope_head_dim": 32,
            "n_routed_experts": 9,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
        }
        | {"topk_group": 2},
    ),
    "glm4_moe_lite 16 of 512 + 64": (
        "Glm4MoeLite",
        LATENT
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "v_head_dim": 64}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 1, "topk_group": 1}
        | THREE,
    ),
    "gemma4 4/2 of 64 and 128, layers' own inputs": (
        "Gemma4Text",
        heads(4, 2, 64)
        | GEMMA4
        | {"global_head_dim": 128, "num_kv_shared_layers": 2}
        | {
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4 8/2 of 256 and 512, keys as values, experts": (
        "Gemma4Text",
        heads(8, 2, 256)
        | GEMMA4
        | {"global_head_dim": 512, "num_global_key_value_heads": 1}
        | {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
        }
        | {"top_k_experts": 2, "moe_intermediate_size": 48},
    ),
    "smollm3 4/1 of 64, every second turns": (
        "SmolLM3",
        heads(4, 1, 64) | {"no_rope_layers": [1, 0, 1]} | THREE,
    ),
    "ministral3 4/2 of 64, queries grow": (
        "Ministral3",
        heads(4, 2, 64)
        | {"rope_parameters": YARN["rope_parameters"] | {"llama_4_scaling_beta": 0.3}},
    ),
}


def make_folder(case: Case, folder: Path) -> Path:
    """The model of a case, every weight drawn: biases and norms too, which transformers starts at 0
    and 1."""
    kind, changes = case
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3)
            elif "embed" in parameter_name and not config.tie_word_embeddings:
                weight.normal_()
            else:
                # scores of attention and logits are spread by about 2: no key is the same as
                # another
                weight.normal_(0.0, 1.5 / weight.shape[1] ** 0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("_bias"):  # what routers add for the choice
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


@dataclass(slots=True, frozen=True)
class Work:
    """What is asked of an LLM: prompts one after the other, then prompts at once, scored and not.
    By number of tokens."""

    alone: tuple[int, ...] = (5, 70, 150)
    together: tuple[int, ...] = (1, 15, 16, 17, 36, 37, 38, 64, 100, 180)
    shared: int = 100  # tokens before each of `forks`: of several blocks
    forks: tuple[int, ...] = (1, 17, 40)
    n: int = 4
    tokens: int = 30
    vocabulary: int = VOCABULARY

    def run(self, llm: LLM) -> Iterator[tuple[RequestOutput, bool]]:
        """Answers, and whether they are greedy."""
        rng = random.Random(1)
        for size in self.alone:
            for logprobs in (
                None,
                0,
            ):  # a step of one row has a graph of its own where nothing is asked
                yield (
                    llm.generate([self._ids(rng, size)], [self._greedy(logprobs)], use_tqdm=False)[
                        0
                    ],
                    True,
                )
        header = self._ids(rng, self.shared)
        for scored in (
            {"prompt_logprobs": 0},
            {},
        ):  # beside prompts that aren't, the last layer answers for rows alone
            prompts = [self._ids(rng, size) for size in self.together * (1 if scored else 3)]
            params = [self._greedy(0, **scored) for _ in prompts]
            prompts += [header + self._ids(rng, size) for size in self.forks]
            params += [self._params(n=self.n, logprobs=0, seed=seed) for seed in self.forks]
            answers = llm.generate(prompts, params, use_tqdm=False)
            yield from (
                (answer, asked.temperature == 0)
                for answer, asked in zip(answers, params, strict=True)
            )

    def _greedy(self, logprobs: int | None, **more: Any) -> SamplingParams:
        return self._params(temperature=0, logprobs=logprobs, **more)

    def _params(self, **more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, detokenize=False, **more)

    def _ids(self, rng: random.Random, size: int) -> list[int]:
        return [rng.randrange(self.vocabulary) for _ in range(size)]


@dataclass(slots=True, kw_only=True)
class Judged:
    """How far an LLM is from transformers. A pair: what was seen, and the most that it may be."""

    logprobs: int
    mean: tuple[float, float]  # of what ours are off
    worst: tuple[float, float]
    tokens: int  # greedy ones
    not_the_likeliest: int
    gap: tuple[float, float]  # in float32's logprobs, between a greedy token and the likeliest
    windowed: bool = False
    grouped: int = 0  # rows attended in a prefix group
    graphs: int = 0  # sizes of steps that were captured

    def is_right(self) -> bool:
        """NaN is wrong, too."""
        return all(seen <= most for seen, most in (self.mean, self.worst, self.gap))


@dataclass(slots=True)
class Comparison:
    """Collects what is off, then judges it."""

    exact: Any  # transformers' model in float32
    half: Any  # in bfloat16
    ours: list[Tensor] = field(default_factory=list)
    noise: list[Tensor] = field(default_factory=list)  # at the tokens of `ours`
    # of greedy tokens: how far below the likeliest
    gaps: list[Tensor] = field(default_factory=list)
    largest: float = 0.0  # noise of all

    @classmethod
    def of(cls, folder: Path, device: str) -> Comparison:
        """Attention as plain products: torch 2.11's fused one is wrong on CUDA (float32, a mask,
        one KV head expanded, 65 tokens: 2.4 off)."""
        load = transformers.AutoModelForCausalLM.from_pretrained
        kinds = (torch.float32, torch.bfloat16)
        return cls(
            *(
                load(folder, dtype=kind, attn_implementation="eager").eval().to(device)
                for kind in kinds
            )
        )

    def take(self, answer: RequestOutput, greedy: bool) -> None:
        prompt = list(answer.prompt_token_ids or [])
        for index, out in enumerate(answer.outputs):
            ids = prompt + list(out.token_ids)
            exact, half = self._logprobs(self.exact, ids), self._logprobs(self.half, ids)
            self.largest = max(self.largest, float((half - exact).abs().max()))
            if greedy:
                self.gaps.append((exact.amax(1) - _chosen(exact, ids))[len(prompt) - 1 :])
            if answer.prompt_logprobs is not None and index == 0:
                self._compare(answer.prompt_logprobs[1:], exact, half, ids, 0)
            if out.logprobs is not None:
                self._compare(out.logprobs, exact, half, ids, len(prompt) - 1)

    def judged(self, dtype: str) -> Judged:
        ours, noise, gaps = torch.cat(self.ours), torch.cat(self.noise), torch.cat(self.gaps)
        part = 1.0 if dtype == "bfloat16" else 1 / 2000
        worst = 1.5 * part * self.largest
        return Judged(
            logprobs=ours.numel(),
            mean=(float(ours.abs().mean()), 1.2 * part * float(noise.abs().mean())),
            worst=(float(ours.abs().max()), worst),
            tokens=gaps.numel(),
            not_the_likeliest=int((gaps > 0).sum()),
            gap=(float(gaps.max()), 2 * worst),
        )

    def _compare(self, told: Any, exact: Tensor, half: Tensor, ids: list[int], first: int) -> None:
        tokens = ids[first + 1 : first + 1 + len(told)]
        ours = torch.tensor([each[token].logprob for each, token in zip(told, tokens, strict=True)])
        place = slice(first, first + len(tokens))
        self.ours.append(ours - _chosen(exact, ids)[place])
        self.noise.append((_chosen(half, ids) - _chosen(exact, ids))[place])

    @torch.inference_mode()
    def _logprobs(self, model: Any, ids: list[int]) -> Tensor:
        """[tokens - 1, vocabulary]: of the token behind each."""
        logits = model(torch.tensor([ids[:-1]], device=model.device)).logits[0]
        return logits.float().log_softmax(-1).cpu()


def _chosen(logprobs: Tensor, ids: list[int]) -> Tensor:
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def judge(case: Case, folder: Path, work: Work, *, device: str, dtype: str, **knobs: Any) -> Judged:
    """Makes the model of a case in `folder`, and judges what an LLM says of the work."""
    make_folder(case, folder)
    comparison, grouped = Comparison.of(folder, device), []
    knobs = {"max_num_seqs": 24, "max_num_batched_tokens": 128, "kv_cache_tokens": 8192} | knobs
    with LLM(
        str(folder),
        device=device,
        dtype=dtype,
        skip_tokenizer_init=True,
        prefix_groups="always",
        **knobs,
    ) as llm:
        runner = llm.engine.runner
        launch = runner.launch

        def watched(plan: Any) -> Any:
            grouped.append(int(plan.group_start[-1]))
            return launch(plan)

        runner.launch = watched  # type: ignore[method-assign]
        for answer, greedy in work.run(llm):
            assert answer.error is None, answer.error
            comparison.take(answer, greedy)
        judged = comparison.judged(dtype)
        judged.windowed, judged.grouped = not runner.grouping, sum(grouped)
        judged.graphs = len(llm.facts.about.get("graphs", {}).get("sizes", []))
    print(judged)
    return judged
