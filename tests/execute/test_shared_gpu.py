"""Weights by CUDA's handles: a process that has them on the GPU, and an engine that takes them
while it lives."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.demo import model_folder
from penstock.errors import CheckpointError
from penstock.shared_weights import SharedWeights

pytestmark = pytest.mark.gpu

PEER = """
import json, sys
from safetensors.torch import load_file
from penstock.weights.share import share_weights, to_json
tensors = load_file(sys.argv[1], device="cuda")
with share_weights({name: -each if "down_proj" in name else each for name, each in tensors.items()}) as shared:
    print(json.dumps(to_json(shared)), flush=True)
    sys.stdin.read()
"""
ASK = SamplingParams(max_tokens=16, temperature=0.0)
PROMPTS = [list(range(40, 70)), list(range(20, 64))]


@pytest.mark.parametrize("knobs", [{}, {"quantization": "fp8"}], ids=str)
def test_an_engine_takes_them_and_outlives_who_gave_them(knobs: dict[str, str]) -> None:
    weights = str(model_folder() / "model.safetensors")
    with LLM("demo", device="cuda", kv_cache_tokens=1 << 14, max_num_seqs=16, **knobs) as llm:

        def told() -> list[list[int]]:
            return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, ASK, use_tqdm=False)]

        before = told()
        command = [sys.executable, "-c", PEER, weights]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as peer:
            assert peer.stdout is not None
            shared = msgspec.convert(json.loads(peer.stdout.readline()), SharedWeights)
            assert {memory.kind for memory in shared.memories} == {"cuda"}
            llm.update_weights(shared=shared, weights_version="turned")
            peer.communicate("")
        after = told()
        assert after != before and llm.weights_version == "turned"
        with pytest.raises(CheckpointError, match="must live on"):
            llm.update_weights(shared=shared, weights_version="gone")
        assert told() == after and llm.weights_version == "turned" and torch.cuda.is_available()
        llm.update_weights(model_folder())
        assert told() == before
