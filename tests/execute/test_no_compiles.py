"""After an engine is ready no kernel is compiled: every launch has a key that the start has
launched already, whatever the request. And no key hangs on what differs between machines of one
GPU: free memory, or lengths that a user names.

Without a GPU: launches are taken down where they would be made (`launch_recorder`).
test_no_compiles_gpu.py asks the counters of real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
    ),
]

RECORDER = Path(__file__).parents[1] / "support" / "launch_recorder.py"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DFLASH = {  # a drafter's config.json
    "speculators_model_type": "dflash",
    "draft_vocab_size": 200,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": 7,
    "transformer_layer_config": LLAMA,
}
ODD = LLAMA | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 48,
    "hidden_size": 96,
    "intermediate_size": 224,
    "vocab_size": 517,
}
WINDOWS = LLAMA | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 48,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
# norms add to what they normed
BEHIND = LLAMA | {
    "model_type": "olmo2",
    "architectures": ["Olmo2ForCausalLM"],
}
LATENT = LLAMA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 20,  # one tile of them, or two where rows are few
    "num_key_value_heads": 20,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENT.pop("head_dim")
# of int4: one row is multiplied in fixed point
FOUR = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 32,
}
EIGHT = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"shape": LLAMA, "knobs": {"max_num_seqs": 2200}},
    "another machine": {  # scratch at a block of a multiple of 16, a table of no multiple
        "shape": LLAMA,
        "knobs": {"max_num_seqs": 2200, "kv_cache_tokens": 77_008, "max_model_len": 460},
        "every": 9,
    },
    "eight bits": {"shape": LLAMA, "knobs": {"max_num_seqs": 1300, **EIGHT}, "every": 5},
    "odd, in groups": {
        "shape": ODD,
        "knobs": {"max_num_seqs": 300, "quantization": "int4", "kv_cache_dtype": "fp8"},
    },
    "four bits": {"shape": LLAMA | FOUR, "knobs": {"max_num_seqs": 300, "quantization": "int4"}},
    "four bits, layers that aren't fused": {
        "shape": WINDOWS | FOUR,
        "knobs": {"max_num_seqs": 300, "quantization": "int4", "prefix_groups": "always"},
    },
    "windows": {"shape": WINDOWS, "knobs": {"max_num_seqs": 500, "prefix_groups": "always"}},
    "wide heads": {
        "shape": WINDOWS | {"head_dim": 256},
        "knobs": {"max_num_seqs": 600},
        "every": 7,
    },
    "norms behind": {"shape": BEHIND, "knobs": {"max_num_seqs": 20}},
    "latent vectors": {"shape": LATENT, "knobs": {"max_num_seqs": 300}},
    "latent vectors, few tokens a step": {
        "shape": LATENT,
        "knobs": {"max_num_seqs": 20, "max_num_batched_tokens": 280, "kv_cache_dtype": "fp8"},
    },
    "latent vectors, many heads": {  # rows below 64 are shared among programs, or are not
        "shape": LATENT | {"num_attention_heads": 64, "num_key_value_heads": 64},
        "knobs": {"max_num_seqs": 64, "max_model_len": 512},
    },
    "latent vectors, prefixes expanded": {
        "shape": LATENT,
        "knobs": {"max_num_seqs": 100, "prefix_groups": "always"},
        "prefixes": True,
    },
    "one row": {"shape": LLAMA, "knobs": {"max_num_seqs": 1, **EIGHT}},
    "drafts": {
        "shape": LLAMA,
        "knobs": {"max_num_seqs": 3, "speculative_config": {"num_speculative_tokens": 8}},
    },
    "dflash": {
        "shape": LLAMA,
        "knobs": {"max_num_seqs": 40, "drafter": DFLASH, "num_speculative_tokens": 7},
        "many": 30,
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(RECORDER), str(tmp_path_factory.mktemp("model"))],
        env=env,
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_launched_that_the_start_has_not_launched(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    assert found[case]["late"] == []
    assert found[case]["noticed"] == 1, "a launch of what nobody warmed is seen"
    kernels = {key.split("'")[1] for key in found[case]["ready"]}
    attention = {"prefill._prefill", "decode._own"}
    if case.startswith("latent"):
        attention = {"latent_kernels._prefill", "latent_kernels._own", "latent_chunks._expanded"}
    assert kernels > attention | {
        "filters.filter_kernel",
        "penalties._adjust",
        "blocks._copy_blocks",
    }
    assert ("ngrams._draft_ngrams" in kernels) == (case == "drafts")
    assert (found[case]["prefixes"] > 0) == ("prefixes" in CASES[case])


def test_keys_hang_on_the_model_alone(found: dict[str, dict[str, Any]]) -> None:
    assert found["plain"]["ready"] == found["another machine"]["ready"]
