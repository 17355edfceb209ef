"""Sleep and end on a GPU: memory that others can have, captured steps that answer as before behind
a sleep."""

from __future__ import annotations

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.demo import model_folder

pytestmark = pytest.mark.gpu

ASK = SamplingParams(max_tokens=24, temperature=0.8, seed=4, n=3, ignore_eos=True)
PROMPTS = [list(range(40, 40 + length)) for length in (20, 75, 33)]
KV_TOKENS = 1 << 19


@pytest.mark.parametrize("knobs", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_memory_is_the_devices_again_and_answers_stay(knobs: dict[str, str]) -> None:
    with LLM("demo", device="cuda", kv_cache_tokens=KV_TOKENS, max_num_seqs=64, **knobs) as llm:
        before, about = llm.generate(PROMPTS, ASK, use_tqdm=False), llm.engine.runner.describe()
        for level in (1, 2):
            # of this process: tests beside each other share the GPU
            awake = torch.cuda.memory_reserved()
            llm.sleep(level)
            assert awake - torch.cuda.memory_reserved() > 0.9 * (
                about["kv_bytes"] + about["weights_bytes"]
            )
            llm.wake_up()
            if level == 2:
                llm.update_weights(model_folder())
            after = llm.generate(PROMPTS, ASK, use_tqdm=False)
            told = [
                [[o.token_ids for o in out.outputs] for out in outs] for outs in (before, after)
            ]
            assert told[0] == told[1], f"behind a sleep of level {level}"
            assert llm.engine.runner.describe()["graphs"]["sizes"] == about["graphs"]["sizes"]


def test_a_closed_engine_leaves_its_memory_to_the_next() -> None:
    before = torch.cuda.memory_reserved()
    with LLM("demo", device="cuda", kv_cache_tokens=KV_TOKENS, max_num_seqs=64) as llm:
        llm.generate(PROMPTS, ASK, use_tqdm=False)
        held = llm.engine.runner.describe()["kv_bytes"]
    assert torch.cuda.memory_reserved() - before < 0.1 * held
