"""Ctrl-C in the middle of an LLM's work leaves an LLM that works: what it says afterwards is what it said before."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.llm import LLM
from penstock.request import SamplingParams

pytestmark = pytest.mark.torch


def test_an_interrupted_llm_goes_on() -> None:
    few = SamplingParams(n=2, temperature=0.6, seed=7, max_tokens=12)
    many = SamplingParams(n=64, temperature=1.0, seed=1, max_tokens=512, ignore_eos=True)
    with LLM(dtype="float32", max_num_seqs=8, kv_cache_tokens=8192, prefix_groups="off") as llm:
        before = [o.text for o in llm.generate("Question: Why?\nAnswer:", few, use_tqdm=False)[0].outputs]
        for delay in (0.2, 0.31, 0.423):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["Question: How many?\nAnswer:"] * 3, many, use_tqdm=False)
            after = [o.text for o in llm.generate("Question: Why?\nAnswer:", few, use_tqdm=False)[0].outputs]
            assert after == before
        llm._engine.scheduler.check()
        assert llm.stats()["running"] == 0
