"""The examples of docs/rl.md, run as they stand but for the model and the port: with LLM, with
AsyncLLM, and over HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import make_folder

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
URL = "http://127.0.0.1:8000"
KNOBS = ["--device", "cpu", "--max-num-seqs", "8", "--kv-cache-tokens", "2048"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where the page writes its folders
    return make_folder(tmp_path)


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    command = ["-m", "penstock", "serve", str(folder), "--port", "0", "--allow-admin-without-key"]
    with subprocess.Popen(
        [sys.executable, *command, *KNOBS], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            server.send_signal(signal.SIGTERM)


def names_of(example: str, folder: Path, url: str = URL) -> dict[str, Any]:
    """The names that the page's example with this import leaves."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (text,) = [each for each in examples if re.search(rf"import (.*\b)?{example}\b", each)]
    assert text.count("str(model_folder())") == 1 and (url == URL or text.count(URL) == 1)
    said = text.replace("str(model_folder())", repr(str(folder))).replace(URL, url)
    names: dict[str, Any] = {}
    exec(compile(said, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize(
    ("example", "first", "last"), [("LLM", "step-1", "step-2"), ("AsyncLLM", "default", "step-1")]
)
def test_in_the_trainers_script(example: str, first: str, last: str, folder: Path) -> None:
    names = names_of(example, folder)
    for out in names["outs"]:
        assert len(out.outputs) == 8
        for sample in out.outputs:
            tokens, logprobs, *_ = sample.logprobs.columns
            assert tokens.tolist() == sample.token_ids
            assert sample.cumulative_logprob == pytest.approx(
                float(np.sum(logprobs, dtype=np.float64))
            )
            assert sample.weights_version == first
    assert names["version"] == last


def test_over_http(folder: Path, url: str) -> None:
    names = names_of("httpx", folder, url)
    assert len(names["ids"]) == len(names["logprobs"]) > 0
    assert names["version"] == "step-1"
    names["server"].close()
