"""Compiles every kernel of the package for given chips, as engines of some models would launch
them.

    python scripts/compile_kernels.py [--chips 80 86 89 90] [--models plain eight ...]
                                      [--kernels NAME ...]

No such chip is needed. Prints for each chip how many kernels compile, and names kernels that do not
compile or need more shared memory than a program has there. Nothing is run; docs/kernels.md lists
the chips on which kernels were run. Exits with 1 if a kernel fails that was expected to compile:
e4m3 is for chips from 8.9 on, its streamed products from 9.0 on (`kernels/choose.py` widens such
weights elsewhere).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]
os.environ.pop("TRITON_INTERPRET", None)

from launch_recorder import Launch, open_recorded, recorded  # noqa: E402

from penstock.config import Config  # noqa: E402
from penstock.kernels.triton.grid import LEAST_SHARED, SHARED  # noqa: E402

CHIPS = (80, 86, 89, 90)
E4M3 = 89  # compute capability from which on chips have it
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WIDE = LLAMA | {
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3 = WIDE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
EXPERTS = WIDE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
GROUPED = EXPERTS | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 128,
    "n_group": 8,
    "topk_group": 4,
    "use_qk_norm": True,
}
GROUPED.pop("num_experts")
TURNED_FIRST = WIDE | {
    "model_type": "hunyuan_v1_dense",
    "architectures": ["HunYuanDenseV1ForCausalLM"],
}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_parameters": {"rope_type": "default"},
}
LATENT = LLAMA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
LATENT.pop("head_dim")
GLM_FLASH = LATENT | {
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "sliding_window": 512,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4 = LLAMA | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
DELTA = LLAMA | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA2 = LLAMA | {
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_ssm": 256,
    "mamba_n_heads": 4,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
SHORT_CONV = LLAMA | {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "rms_norm_eps": None,
}
FEW = {"max_num_seqs": 64}
DRAFTED = {"speculative_config": '{"num_speculative_tokens": 8}'}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (LLAMA, {}),
    "wide": (WIDE, {}),
    "float16": (WIDE, {"dtype": "float16"}),
    "qwen3": (QWEN3, {}),
    "gemma": (GEMMA, {}),
    "gemma4": (GEMMA4, {}),
    "gemma4-float32": (GEMMA4, {"dtype": "float32"}),
    "experts": (EXPERTS, {}),
    "turned-first": (TURNED_FIRST, {}),
    "grouped-experts": (GROUPED, {}),
    "eight-experts": (EXPERTS, {"quantization": "fp8"}),
    "int4-experts": (EXPERTS, {"quantization": "int4"}),
    "int8-experts": (EXPERTS, {"quantization": "int8"}),
    "gpt-oss": (GPT_OSS, {}),
    "latent": (LATENT, {}),
    "glm-flash": (GLM_FLASH, {}),
    "int4": (WIDE, {"quantization": "int4"}),
    "nvfp4": (WIDE, {"quantization": "nvfp4"}),
    "nvfp4-experts": (EXPERTS, {"quantization": "nvfp4"}),
    "int8": (LLAMA, {"quantization": "int8"}),
    "eight": (WIDE, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "eight-kv": (LLAMA, {"kv_cache_dtype": "fp8"}),
    "delta": (DELTA, FEW),
    "mamba2": (MAMBA2, FEW),
    "short-conv": (SHORT_CONV, FEW),
    "drafts": (LLAMA, DRAFTED),
    "delta-drafts": (DELTA, FEW | DRAFTED),
    "mamba2-drafts": (MAMBA2, FEW | DRAFTED),
    "short-conv-drafts": (SHORT_CONV, FEW | DRAFTED),
    "eight-latent": (LATENT, {"kv_cache_dtype": "fp8"}),
}


def launches_of(name: str, chip: int) -> dict[tuple[str, str, str], Launch]:
    """Returns the launches of a model's engine until it is ready, on such a chip."""
    shape, knobs = MODELS[name]
    config = {
        "max_num_seqs": 1200,
        "max_num_batched_tokens": 2048,
        "kv_cache_tokens": 8192,
        "dtype": "bfloat16",
    } | knobs
    with tempfile.TemporaryDirectory() as folder, recorded(chip) as launches:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        made = Config.of(
            model=folder, device="cpu", load_format="dummy", skip_tokenizer_init=True, **config
        )
        open_recorded(made, Path(folder)).close()
        return dict(launches)


def fault_of(launch: Launch, chip: int) -> str | None:
    """Returns the reason why a kernel cannot run on a chip; None if it compiles and fits."""
    try:
        shared = int(launch.compile(chip).metadata.shared)
    except Exception as error:  # noqa: BLE001  it is what is asked for
        return next(
            (line for line in reversed(str(error).splitlines()) if line.strip()),
            type(error).__name__,
        ).strip()
    most = SHARED.get(chip, LEAST_SHARED)
    return f"{shared:,} bytes of shared memory, of {most:,}" if shared > most else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", type=int, nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--kernels", nargs="+", help="of these names alone, as prefill._prefill")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        return int(compile_all(asked))


def compile_all(asked: argparse.Namespace) -> bool:
    """Compiles the chosen kernels and prints the results. Returns True if something failed
    unexpectedly."""
    failed = False
    for chip in asked.chips:
        begun, wanted = time.monotonic(), dict[tuple[str, str, str], tuple[str, Launch]]()
        names: set[str] = set()
        for name in asked.models:
            for key, launch in launches_of(name, chip).items():
                names.add(key[0])
                if asked.kernels is None or key[0] in asked.kernels:
                    wanted.setdefault(key, (name, launch))
        if unknown := set(asked.kernels or ()) - names:
            raise SystemExit(
                f"{', '.join(sorted(unknown))}: no kernel that these models launch. They launch"
                f" {', '.join(sorted(names))}"
            )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            faults = list(
                pool.map(fault_of, [launch for _, launch in wanted.values()], [chip] * len(wanted))
            )
        bad = [
            (key[0], name, why)
            for (key, (name, _)), why in zip(wanted.items(), faults, strict=True)
            if why
        ]
        took = time.monotonic() - begun
        print(
            f"sm{chip}: {len(wanted) - len(bad)} of {len(wanted)} kernels compile and fit"
            f" ({took:.0f} s)",
            flush=True,
        )
        for kernel, name, why in sorted(set(bad)):
            expected = (chip < E4M3 and name.startswith("eight")) or (
                chip < 90 and kernel.startswith("linear_fp8.")
            )
            failed = failed or not expected
            print(f"  {kernel} ({name}{', as expected' if expected else ''}): {why}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
