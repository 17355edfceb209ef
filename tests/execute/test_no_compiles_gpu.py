"""On a GPU: after an engine is ready its counters of compiled and loaded kernels stay 0, whatever
is asked; and an artifact's binaries, moved and with an empty cache elsewhere, are all that a sealed
engine needs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_requests import with_drafter
from odd_requests import odd_requests

from penstock import LLM

pytestmark = pytest.mark.gpu

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA = {name: value for name, value in SHAPE.items() if name != "model_type"} | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}
BARE = {name: value for name, value in LLAMA.items() if name not in ("model_type", "architectures")}
GLM = BARE | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
QWEN = BARE | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
# a drafter's config.json beside SHAPE or LLAMA
DFLASH = {
    "speculators_model_type": "dflash",
    "draft_vocab_size": 8000,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": 7,
    "transformer_layer_config": SHAPE,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, "max_num_seqs": 20}
KNOBS: dict[str, Any] = {
    "device": "cuda",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_tokens": 100_000,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (LLAMA, {}),
    "few rows": (LLAMA, {"max_num_seqs": 24, "max_model_len": 500}),
    "one row": (LLAMA, {"max_num_seqs": 1, "quantization": "fp8"}),
    "drafts": (LLAMA, {"speculative_config": {"prompt_lookup_min": 1}, "max_num_seqs": 20}),
    "mtp": (GLM, MTP),
    "mtp over states": (QWEN, MTP),
    "dflash": (LLAMA, {"drafter": DFLASH, "num_speculative_tokens": 7, "max_num_seqs": 40}),
    "fp16": (SHAPE, {"dtype": "float16", "max_num_seqs": 600}),
    "eight bits": (LLAMA, {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_seqs": 3000}),
    "int4": (SHAPE, {"quantization": "int4", "max_num_seqs": 300, "prefix_groups": "always"}),
    "int8": (LLAMA, {"quantization": "int8", "kv_cache_dtype": "fp8", "max_num_seqs": 64}),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_requests_compile_nothing(case: str, tmp_path: Path) -> None:
    shape, knobs = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    knobs = with_drafter(tmp_path / "drafter", knobs)
    rng = random.Random(0)
    with LLM(str(tmp_path), **KNOBS | knobs) as llm:
        for count in (1, 1, 3, 40, 7, 200):
            asked = odd_requests(
                rng, count if knobs.get("max_num_seqs") != 1 else 2, 32_000, llm.facts.max_model_len
            )
            llm.generate(
                [prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False
            )
        assert (llm.stats()["jit_compiles"], llm.stats()["jit_loads"]) == (0, 0)
        assert llm.stats()["completed_steps"] > 50
        state = llm.engine.runner._state  # type: ignore[attr-defined]
        width = 16 << list(CASES).index(case)  # a kernel of its own: a process compiles each once
        table = torch.zeros(8, width, dtype=torch.float64, device="cuda")
        state.model.ops.embed(torch.zeros(1, dtype=torch.int64, device="cuda"), table)
        stats = llm.stats()
        assert stats["jit_compiles"] + stats["jit_loads"] >= 1, (
            "a kernel that nobody warmed is counted"
        )


# A process that opens a model: `into` writes what it launches to a folder, `sealed` reads an
# artifact's alone.
START = """
import json, sys, time
from pathlib import Path
from penstock import LLM
from penstock.kernels.triton import disk_cache
how, folder, knobs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
binaries = disk_cache.install()
if how == "into":
    binaries.into = folder / "kernels"
begun = time.monotonic()
with LLM(str(folder), sealed=how == "sealed", **knobs) as llm:
    took = time.monotonic() - begun
    tokens = llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids
    print(json.dumps([len(tokens), *binaries.counts(), llm.stats()["jit_compiles"], llm.stats()["jit_loads"], took]))
"""


def start(how: str, folder: Path, home: Path) -> list[Any]:
    env = os.environ | {
        "TRITON_CACHE_DIR": str(home),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    knobs = json.dumps(KNOBS | {"max_num_seqs": 64})
    done = subprocess.run(
        [sys.executable, "-c", START, how, folder, knobs], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_moved_artifact_starts_sealed_with_an_empty_cache(tmp_path: Path) -> None:
    from made_artifact import seal_folder

    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tokens, compiled, loaded, late, _, cold = start("into", folder, tmp_path / "first")
    assert tokens and compiled and not late
    seal_folder(folder, torch.device("cuda"))
    moved = folder.rename(tmp_path / "moved")
    # what it met late it loaded
    tokens, compiled, loaded, late, _, took = start("sealed", moved, tmp_path / "empty")
    assert tokens and (compiled, late) == (0, 0) and loaded > 20
    print(f"start: {cold:.1f} s with an empty cache, {took:.1f} s from the artifact's binaries")
    binary = next(moved.glob("kernels/*/*.cubin"))
    binary.write_bytes(binary.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(AssertionError, match=rf"{binary.name} has .* bytes and was built with"):
        start("sealed", moved, tmp_path / "third")
