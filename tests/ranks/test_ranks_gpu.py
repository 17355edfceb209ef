"""Two and four ranks, each on a GPU: the tokens of one, with every sampling number, by graphs and
without; and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import pytest
import torch
from corpus import make_model
from execute_drive import Ask, Host
from record import Differences, _compare

from penstock.config import Config
from penstock.errors import EngineError
from penstock.ranks.rank_runner import RankRunner, open_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def _needs(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.03), ("bfloat16", 0.4)])
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # qwen2's one key head stands on all ranks
def test_ranks_give_the_tokens_of_one(
    name: str, dtype: str, most: float, ranks: int, tmp_path: Path
) -> None:
    """most: the share of samples that may part, at near-ties. In bfloat16 each rank's part of a sum
    is rounded before it is added: 12 of 46 part on a GPU, 14 on a CPU."""
    _needs(ranks)
    folder, found = make_model(name, tmp_path), Differences()
    alone = corpus.run(folder, "1 ahead", device="cuda", dtype=dtype)
    several = corpus.run(folder, "1 ahead", device="cuda", dtype=dtype, tensor_parallel_size=ranks)
    for setting, times in alone.items():
        for old, new in zip(times, several[setting], strict=True):
            _compare(found, setting, old, new)
    print(
        f"{len(found.parted)} of {found.samples} samples part, logprobs within {found.furthest:.4f}"
    )
    assert found.samples > 40 and len(found.parted) <= found.samples * most, found.parted
    assert found.furthest < (2e-3 if dtype == "float32" else 0.15)


@pytest.fixture(params=[2, 4])
def several(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RankRunner]:
    _needs(request.param)
    config = Config.of(
        device="cuda", dtype="bfloat16", max_num_seqs=8, max_model_len=128, kv_cache_tokens=2048
    )
    runner = open_ranks(config, make_model("llama", tmp_path), request.param)
    # Also where this process has had such a model before, as it has in the second test.
    assert runner.describe()["all_reduce"].startswith("memory that all GPUs read")
    yield runner
    runner.close()
    for other in runner.others:
        assert other.process is not None and other.process.returncode is not None, (
            "its process lives"
        )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_is_told_soon(how: signal.Signals, several: RankRunner) -> None:
    host = Host(several, several.vocab_size)
    rows = [host.row(0, list(range(8, 28)), 100, Ask(temperature=1.0, seed=1))]
    assert (host.run(rows, 3, ahead=1) >= 0).all()
    other = several.others[-1]
    assert other.process is not None
    os.kill(other.process.pid, how)
    begun = time.monotonic()
    with pytest.raises(EngineError) as caught:
        for _ in range(50):
            host.launch(rows).fetch()
    print(f"told after {time.monotonic() - begun:.2f} s: {caught.value}")
    assert f"rank {other.rank}" in str(caught.value)
