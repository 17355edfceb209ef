"""The loops of docs/rl.md, run as they stand: with LLM, and with AsyncLLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import make_folder
from safetensors.torch import load_file

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
KNOBS = 'device="cpu", dtype="float32", max_num_seqs=8, kv_cache_tokens=2048, max_model_len=160'


class Trainer:
    """Has the weights of a folder, as a module has them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.safetensors"

    def state_dict(self) -> dict[str, Any]:
        return load_file(self._path)


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_the_pages_loop_runs(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    loops = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (loop,) = [text for text in loops if re.search(rf"import .*\b{name}\b", text)]
    said = loop.replace('"folder-or-hub-id"', f"{str(folder)!r}, {KNOBS}").replace(
        "max_tokens=512", "max_tokens=9"
    )
    assert said.count(KNOBS) == 1 and "max_tokens=9" in said, "the page's loop has other words"
    names: dict[str, Any] = {"prompts": [[5, 6, 7], "the pump lifts"], "trainer": Trainer(folder)}
    exec(compile(said, str(PAGE), "exec"), names)
    outs = names["outs"]
    assert [len(out.outputs) for out in outs] == [16, 16]
    for sample in (sample for out in outs for sample in out.outputs):
        tokens, logprobs, *_ = sample.logprobs.columns
        assert tokens.tolist() == sample.token_ids
        assert sample.cumulative_logprob == pytest.approx(float(np.sum(logprobs, dtype=np.float64)))
        assert sample.weights_version == "default"
    assert names["version"] == "step-1"
