"""Writes model folders of named shapes: config, generation config, tokenizer, and optional weights.

    python benchmarks/random_model.py llama-3.2-1b FOLDER [--tokenizer tokenizer.json] [--weights]

The shapes are those of real models; the weights are random. With weights from U(-1e-3, 1e-3) all
logits are about 0, so every token is equally likely, and a sample ends with the share of ids that
are end-of-sequence ids: one in 128 gives geometric lengths with a mean of 128. vLLM reads the same
folder. Knows no engine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_tokenizer import write_tokenizer

END_SEED = 7
WEIGHT_SEED = 0
RANGE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's sizes. ends: number of token ids that end a sample. max_model_len: context that the
    works need.

    other: keys of another family's config, beside or in place of a Llama's.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    theta: float
    context: int
    ends: int
    max_model_len: int = 4096
    rope_scaling: dict[str, Any] | None = None
    other: dict[str, Any] = field(default_factory=dict)
    # (in, out) of a layer's matrix products
    products: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        products = (
            (self.hidden, queries + 2 * kv),
            (queries, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        )
        object.__setattr__(self, "products", products)

    @property
    def layer_weights(self) -> int:
        """Returns the number of weights in the matrices of one layer."""
        return sum(into * out for into, out in self.products)

    def config(self) -> dict[str, Any]:
        """Returns config.json as transformers 4 writes it."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
            "rope_theta": self.theta,
            "rope_scaling": self.rope_scaling,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
        } | self.other
        if "hidden_activation" in self.other:  # Gemma's name for it
            del config["hidden_act"]
        if "rope_parameters" in self.other:  # other readers prefer the older names, even if null
            del config["rope_theta"], config["rope_scaling"]
        return config

    def end_ids(self) -> list[int]:
        """Returns the ids that end a sample: drawn once, the same on any machine."""
        return sorted(random.Random(END_SEED).sample(range(self.vocab), self.ends))


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_70B = {**_LLAMA3, "factor": 8.0}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": None,
    "router_aux_loss_coef": 0.001,
}
_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "initial_context_length": 4096,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "rope_local_base_freq": 10_000.0,
    "layer_types": [
        ("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(34)
    ],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "mlp_bias": None,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
_GEMMA4_26B = _GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_GEMMA4_31B = _GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}
_GEMMA4_E4B = _GEMMA4 | {
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 18,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
}
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}
_QWEN3_5_MOE = _QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mamba_ssm_cache_dtype": "float32",
}
_MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
}
_GLM_FLASH = _MOONLIGHT | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
}
_GLM_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
}
_ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_use_aux_free": True,
    "use_bias": False,
}
_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "rms_norm_eps": None,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-3.2-1b",
            hidden=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            head_dim=64,
            intermediate=8192,
            vocab=128_256,
            tied=True,
            theta=500_000.0,
            context=131_072,
            ends=1000,
            rope_scaling=_LLAMA3,
        ),
        Shape(
            name="llama-3-8b",
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14_336,
            vocab=128_256,
            tied=False,
            theta=500_000.0,
            context=8192,
            ends=1000,
        ),
        Shape(
            name="llama-3.3-70b",
            hidden=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=28_672,
            vocab=128_256,
            tied=False,
            theta=500_000.0,
            context=131_072,
            ends=1000,
            rope_scaling=_LLAMA3_70B,
        ),
        Shape(
            name="qwen3-30b-a3b",
            hidden=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=6144,
            vocab=151_936,
            tied=False,
            theta=1_000_000.0,
            context=40_960,
            ends=1187,
            other=_QWEN3_MOE,
        ),
        Shape(
            name="gpt-oss-20b",
            hidden=2880,
            layers=24,
            heads=64,
            kv_heads=8,
            head_dim=64,
            intermediate=2880,
            vocab=201_088,
            tied=False,
            theta=150_000.0,
            context=131_072,
            ends=1571,
            rope_scaling=_OSS_YARN,
            other=_GPT_OSS,
        ),
        Shape(
            name="gemma-3-4b",
            hidden=2560,
            layers=34,
            heads=8,
            kv_heads=4,
            head_dim=256,
            intermediate=10_240,
            vocab=262_208,
            tied=True,
            theta=1_000_000.0,
            context=131_072,
            ends=2048,
            other=_GEMMA3,
        ),
        Shape(
            name="gemma-4-26b-a4b",
            hidden=2816,
            layers=30,
            heads=16,
            kv_heads=8,
            head_dim=256,
            intermediate=2112,
            vocab=262_144,
            tied=True,
            theta=1_000_000.0,
            context=262_144,
            ends=2048,
            other=_GEMMA4_26B,
        ),
        Shape(
            name="gemma-4-31b",
            hidden=5376,
            layers=60,
            heads=32,
            kv_heads=16,
            head_dim=256,
            intermediate=21_504,
            vocab=262_144,
            tied=True,
            theta=1_000_000.0,
            context=262_144,
            ends=2048,
            other=_GEMMA4_31B,
        ),
        Shape(
            name="gemma-4-e4b",
            hidden=2560,
            layers=42,
            heads=8,
            kv_heads=2,
            head_dim=256,
            intermediate=10_240,
            vocab=262_144,
            tied=True,
            theta=1_000_000.0,
            context=131_072,
            ends=2048,
            other=_GEMMA4_E4B,
        ),
        Shape(
            name="qwen3.5-9b",
            hidden=4096,
            layers=32,
            heads=16,
            kv_heads=4,
            head_dim=256,
            intermediate=12_288,
            vocab=248_320,
            tied=False,
            theta=10_000_000.0,
            context=262_144,
            ends=1940,
            other=_QWEN3_5,
        ),
        Shape(
            name="qwen3.5-35b-a3b",
            hidden=2048,
            layers=40,
            heads=16,
            kv_heads=2,
            head_dim=256,
            intermediate=512,
            vocab=248_320,
            tied=False,
            theta=10_000_000.0,
            context=262_144,
            ends=1940,
            other=_QWEN3_5_MOE,
        ),
        Shape(
            name="nemotron-3-nano",
            hidden=2688,
            layers=52,
            heads=32,
            kv_heads=2,
            head_dim=128,
            intermediate=1856,
            vocab=131_072,
            tied=False,
            theta=10_000.0,
            context=262_144,
            ends=1024,
            other=_NEMOTRON,
        ),
        Shape(
            name="moonlight-16b-a3b",
            hidden=2048,
            layers=27,
            heads=16,
            kv_heads=16,
            head_dim=64,
            intermediate=11_264,
            vocab=163_840,
            tied=False,
            theta=50_000.0,
            context=8192,
            ends=1280,
            other=_MOONLIGHT,
        ),
        Shape(
            name="glm-4.7-flash",
            hidden=2048,
            layers=47,
            heads=20,
            kv_heads=20,
            head_dim=64,
            intermediate=10_240,
            vocab=154_880,
            tied=False,
            theta=1_000_000.0,
            context=202_752,
            ends=1210,
            other=_GLM_FLASH,
        ),
        Shape(
            name="glm-4.5-air",
            hidden=4096,
            layers=46,
            heads=96,
            kv_heads=8,
            head_dim=128,
            intermediate=10_944,
            vocab=151_552,
            tied=False,
            theta=1_000_000.0,
            context=131_072,
            ends=3,
            other=_GLM_AIR,
        ),
        Shape(
            name="ernie-4.5-21b-a3b",
            hidden=2560,
            layers=28,
            heads=20,
            kv_heads=4,
            head_dim=128,
            intermediate=12_288,
            vocab=103_424,
            tied=True,
            theta=500_000.0,
            context=131_072,
            ends=1,
            other=_ERNIE,
        ),
        Shape(
            name="lfm2-350m",
            hidden=1024,
            layers=16,
            heads=16,
            kv_heads=8,
            head_dim=64,
            intermediate=4608,
            vocab=65_536,
            tied=True,
            theta=1_000_000.0,
            context=128_000,
            ends=512,
            other=_LFM2,
        ),
        Shape(  # of no real model: what two cores can serve, and larger than the demo
            name="llama-40m",
            hidden=512,
            layers=12,
            heads=8,
            kv_heads=4,
            head_dim=64,
            intermediate=1536,
            vocab=4096,
            tied=True,
            theta=10_000.0,
            context=4096,
            ends=32,
        ),
        Shape(
            name="tiny",
            hidden=64,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            intermediate=128,
            vocab=4096,
            tied=True,
            theta=10_000.0,
            context=2048,
            ends=256,
            max_model_len=1024,
        ),
    )
}


def write_model(
    shape: Shape, folder: Path, tokenizer: Path | None = None, *, weights: bool = False
) -> None:
    """Writes the folder; existing files are overwritten. weights: also write bf16 safetensors (2
    bytes a parameter); without them an engine must draw its own (`--load-format dummy`).

    tokenizer: a tokenizer.json, plain or .gz, or a folder with one; None: the demo's, extended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", shape.config())
    _write_json(folder / "generation_config.json", {"eos_token_id": shape.end_ids()})
    write_tokenizer(folder, tokenizer, shape.vocab)
    if weights and shape.other:
        raise SystemExit(
            f"the weights of {shape.name} are not written here: engines draw their own"
        )
    if weights:
        _write_weights(shape, folder)


def load_format(folder: Path) -> str:
    """Returns the load format for this folder: read the weights, or draw them."""
    return "auto" if any(folder.glob("*.safetensors")) else "dummy"


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of a checkpoint's tensors, as in transformers."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        names: dict[str, tuple[int, ...]] = {
            "input_layernorm": (shape.hidden,),
            "self_attn.q_proj": (q, shape.hidden),
            "self_attn.k_proj": (kv, shape.hidden),
            "self_attn.v_proj": (kv, shape.hidden),
            "self_attn.o_proj": (shape.hidden, q),
            "post_attention_layernorm": (shape.hidden,),
            "mlp.gate_proj": (shape.intermediate, shape.hidden),
            "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate),
        }
        for name, size in names.items():
            yield f"model.layers.{layer}.{name}.weight", size
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _write_weights(shape: Shape, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(WEIGHT_SEED)
    drawn = {}
    for name, size in tensors(shape):
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
        drawn[name] = tensor.uniform_(-RANGE, RANGE, generator=generator).cpu()
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json (.gz too); left out: the demo's, filled up"
    )
    parser.add_argument(
        "--weights", action="store_true", help="write safetensors too; else engines draw their own"
    )
    options = parser.parse_args()
    write_model(SHAPES[options.shape], options.folder, options.tokenizer, weights=options.weights)


if __name__ == "__main__":
    main()
