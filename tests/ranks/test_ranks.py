"""Several ranks over gloo give the tokens of one; a rank that ends is told in one line, and nothing
stays behind.

Most of it in threads of this process, each a rank that gets every plan as bytes; then processes, as
they really run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
import torch
from corpus import make_model
from execute_drive import Ask, Host, tiny_runner
from growing_patience import patiently
from ranks_together import Together, met
from record import replay
from service import until

from penstock.config import Config
from penstock.errors import CapacityError, EngineError, UsageError
from penstock.execute import open_runner as opening
from penstock.execute.limits import Limits, agreed
from penstock.execute.runner import TorchRunner
from penstock.parallel.collectives import Gloo
from penstock.parallel.layout import Layout
from penstock.ranks import rank_runner
from penstock.ranks.rank_channel import PLANS, RankStart, decode_start, encode
from penstock.ranks.rank_runner import RankFlight, RankRunner, open_ranks
from penstock.ranks.remote_rank import RemoteRank
from penstock.schedule.step import BAD_LOGITS, Flight, Runner

pytestmark = pytest.mark.torch

VOCABULARY = 600  # five tiles: four ranks have one each but for the last, whose second is short
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY}
EXPERTS = SHAPE | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}
FUSED = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
NORMED = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": True}
FOUR = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 192,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_parameters": {"rope_type": "default"},
}
SHARED = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
PARTS = {
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "num_local_experts": 5,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "rotary_dim": 4,
}
GATED = EXPERTS | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 40,
}
GATED.pop("head_dim")
OPENED = {
    "model_type": "afmoe",
    "architectures": ["AfmoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "sliding_window": 20,
    "num_dense_layers": 0,
    "attention_bias": True,
    "global_attn_every_n_layers": 2,
}
SOFT = {
    "model_type": "laguna",
    "architectures": ["LagunaForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "head_dim": 8,
    "attention_bias": True,
    "rope_theta": None,
}
ONE_NORM = {
    "model_type": "cohere2_moe",
    "architectures": ["Cohere2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 20,
    "num_shared_experts": 1,
    "sliding_window_pattern": 2,
}
ASKS = [
    Ask(),
    Ask(temperature=1.0, seed=3),
    Ask(temperature=1.2, top_p=0.8, seed=4),
    Ask(temperature=1.0, repetition=1.3, frequency=0.5, seed=5),
    Ask(temperature=1.0, bias={9: 3.0}, seed=6),
    Ask(temperature=0.9, top_k=5, seed=7),
    Ask(temperature=1.5, min_p=0.02, min_tokens=3, stop_ids=[9, 300], seed=8),
    Ask(
        temperature=1.5, top_k=40, top_p=0.6, allowed=[*range(20, 500, 3)], bias={400: 2.0}, seed=10
    ),
]


def together(folder: Path, ranks: int, poison: int | None = None, **config: Any) -> Together:
    layouts = [
        Layout(rank, ranks, end.all_reduce, end.all_gather)
        for rank, end in enumerate(met(folder, ranks))
    ]
    return Together(
        [tiny_runner(poison=poison, layout=layout, **SHAPE | config) for layout in layouts]
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    # the first three tiles, and those of the corpus
    return [8 + (seed * 31 + i * 37) % 280 for i in range(length)]


def drive(runner: Runner, kinds: Sequence[int] = range(len(ASKS))) -> list[list[list[int]]]:
    """Rows of every kind, or of some, prefilled in chunks and read late; then a fork group of six
    that share two blocks."""
    host = Host(runner, VOCABULARY)
    rows = [
        host.row(at, prompt(5 + 9 * i, i), 60, ASKS[i], pieces=1 + i % 3)
        for at, i in enumerate(kinds)
    ]
    told = [host.run(rows, 5, ahead=2).tolist()]
    shared = host.row(0, prompt(41), 60, Ask(temperature=1.0, seed=9))
    forks, copies = [], []
    for sample in range(6):
        own = host.take(1)[0]
        forks.append(
            type(shared)(
                sample, shared.tokens, 41, 101, [*shared.blocks[:2], own], shared.ask, sample, 40
            )
        )
        copies.append((shared.blocks[2], own))
    told.append(host.run(forks, 4, copies=copies, prefix=2).tolist())
    return told


@pytest.mark.parametrize(
    "ranks", [2, 4]
)  # four ranks have two key heads: each stands on two of them
def test_ranks_give_the_tokens_of_one(ranks: int, tmp_path: Path) -> None:
    one, several = tiny_runner(**SHAPE), together(tmp_path, ranks)
    shapes = {runner._state.kv.layers[0][0].kv_heads for runner in several.runners}  # type: ignore[union-attr]
    assert shapes == {1}, "heads are not divided"
    want, got = drive(one), drive(several)
    assert want == got and len({tuple(tail) for tail in want[1]}) > 3
    for runner in (one, *several.runners):
        runner.close()


def test_experts_are_shared_out(tmp_path: Path) -> None:
    """Every rank has a share of each, and a tied head is cut with its table."""
    shape = EXPERTS | {"tie_word_embeddings": True}
    one, several = tiny_runner(**shape), together(tmp_path, 2, **shape)
    whole, *shares = [
        runner._state.model.weights_bytes  # type: ignore[union-attr]
        for runner in (one, *several.runners)
    ]
    assert max(shares) < 0.6 * whole
    assert drive(one) == drive(several)
    for runner in (one, *several.runners):
        runner.close()


@pytest.mark.parametrize(
    "shape",
    [FUSED, NORMED, FOUR, SHARED, PARTS, GATED, OPENED, SOFT, ONE_NORM],
    ids=[
        "fused tensors",
        "norms over all heads",
        "experts in one tensor",
        "experts beside a shared one",
        "norms of turned parts",
        "a gated shared expert",
        "a gate of its own",
        "a gate a head",
        "both parts behind one norm",
    ],
)
def test_families_are_cut_as_they_lie(shape: dict[str, Any], tmp_path: Path) -> None:
    """Four ranks and two key heads: of one tensor for q, k and v a rank takes three stretches. Of
    experts in one tensor six groups of 32: two ranks have one more."""
    one, several = tiny_runner(**SHAPE | shape), together(tmp_path, 4, **shape)
    some = (2, 4, 7)  # how rows are drawn hangs on no family; prompts are longer than windows
    assert drive(one, some) == drive(several, some)
    for runner in (one, *several.runners):
        runner.close()


def test_blocks_are_cleared_on_every_rank(tmp_path: Path) -> None:
    several = together(tmp_path, 2, poison=100)
    host = Host(several)
    ask = Ask(bias={100: -100.0})
    bad = host.row(0, [*range(8, 20), 100], 40, ask)
    assert host.run([bad], 2)[0, 0] == BAD_LOGITS
    host.next_block = 1  # all are handed out again
    host.run([host.row(1, prompt(13), 40, ask)], 2)
    blocks = torch.tensor(bad.blocks)
    for runner in several.runners:
        assert all(layer.worth(blocks).isfinite().all() for (layer,) in runner._state.kv.layers)  # type: ignore[union-attr]
        runner.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_to_the_bit_on_every_rank_and_rounded_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    parts = [
        torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(3)
    ]
    want = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    with ThreadPoolExecutor(3) as threads:
        sums = list(threads.map(lambda end, part: end.all_reduce(part), met(tmp_path, 3), parts))
    assert all(torch.equal(each, want) for each in sums)


def test_limits_are_the_least_of_all_ranks_and_rank_0s_graphs() -> None:
    own = Limits(8, 512, 128, kv_tokens=3200, num_blocks=203, graph_sizes=(8, 4, 1))
    assert agreed([own, Limits(9, 256, 128, kv_tokens=1600, num_blocks=103)]) == Limits(
        8, 256, 128, kv_tokens=1600, num_blocks=103, graph_sizes=(8, 4, 1)
    )


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("ranks") / "llama")


KNOBS = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 128,
    "kv_cache_tokens": 2048,
}


def test_two_processes_give_the_golden_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sampling number, forks, prefix groups, chunks, preempted rows, three flights out."""
    monkeypatch.setitem(corpus.KNOBS, "tensor_parallel_size", 2)
    found = replay("llama", "3 ahead, preempted", "cpu-float32", tmp_path)
    assert found.samples > 40 and found.scores > 500
    assert not found.parted, found.parted[:3]
    assert found.furthest < 3e-4 and not found.regrouped
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("penstock-rank")
    ]


def test_every_rank_has_drawn_a_token_when_they_are_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(
        RemoteRank,
        "compare",
        lambda self, number, tokens: compared.append((number, tokens.tokens.tolist())),
    )
    runner = open_ranks(Config.of(**KNOBS), folder, 2)
    told = runner.others[0]
    assert [number for number, _ in compared] == [-2, -1] and len(compared[1][1]) == 1
    until(lambda: len(told._heard) == 2)
    assert [word.number for word in told._heard] == [-2, -1]
    phases = (
        "weights",
        "waiting for other ranks",
        "meeting",
        "kernels",
        "KV and graphs",
        "first step",
    )
    assert set(runner.describe()["start_seconds"]) == set(phases)
    assert "2 ranks are ready: weights" in capsys.readouterr().err
    runner.close()


@contextmanager
def two_ranks(folder: Path, seconds: float) -> Iterator[RankRunner]:
    """seconds: a stopped rank is waited for so long."""
    runner = open_ranks(Config.of(**KNOBS), folder, 2, seconds=seconds)
    try:
        yield runner
    finally:
        runner.close()
    (other,) = runner.others
    assert other.process is not None and other.process.returncode is not None, "its process lives"
    assert not other._thread.is_alive()


def test_an_artifacts_numbers_come_to_all_ranks() -> None:
    scales = {"model.layers.0.self_attn": ([1.0], [2.0])}
    tuned = {"attention.few_programs": 256}
    start = RankStart(1, 2, "folder", {"device": "cpu"}, "meeting", 1, 30.0, tuned, scales, 5)
    config = decode_start(encode(start)).config()
    assert (config.tuned, config.kv_scales, config.end_of_text) == (tuned, scales, 5)
    assert config.told() == {"device": "cpu"}


def test_kv_in_eight_bits_has_the_scales_of_a_ranks_own_heads(folder: Path) -> None:
    """They meet before they measure: the sample runs over all ranks."""
    asks = [Ask(temperature=1.0, seed=1), Ask()]
    told, scales = [], []
    for ranks in (1, 2):
        config = Config.of(**KNOBS, kv_cache_dtype="fp8")
        runner = (
            open_ranks(config, folder, 2) if ranks == 2 else opening.open_runner(config, folder)
        )
        assert runner._state is not None and runner.describe()["kv_cache_dtype"] == "float8_e4m3fn"
        scales.append([form.scales for form in runner._state.model.paged_forms])
        host = Host(runner)
        told.append(
            host.run(
                [host.row(i, prompt(20, i), 100, ask) for i, ask in enumerate(asks)], 12
            ).tolist()
        )
        runner.close()
    assert told[0] == told[1] and told[0][0] != told[0][1]
    (other,) = runner.others  # type: ignore[union-attr]
    assert other.counts == {"jit_compiles": 0, "jit_loads": 0}, "each rank tells its own"
    other.counts = {"jit_compiles": 2}
    assert runner.counts() == {"jit_compiles": 2, "jit_loads": 0}
    for whole, own in zip(*scales, strict=True):
        assert whole is not None and own is not None and torch.equal(whole[:, :1], own)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "rank 1 was killed by signal 9"),
        (signal.SIGSTOP, "rank 0 lost the others"),
        ("junk", "rank 1: a step's plan cannot be read"),
        ("another plan", "rank 1 drew other tokens than rank 0"),
    ],
)
def test_a_rank_that_fails_ends_the_steps_with_one_error(
    how: int | str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(seconds: float) -> None:
        with two_ranks(folder, seconds) as two:
            _fails(two, how, why)

    if how == signal.SIGSTOP:
        patiently(lambda seconds: trial(4 * seconds))
    else:
        monkeypatch.setattr(RankRunner.reason, "__defaults__", (600.0,))  # rank 1 may end slowly
        trial(600.0)


def _fails(two: RankRunner, how: int | str, why: str) -> None:
    host = Host(two)
    rows = [host.row(0, prompt(20), 100, Ask(temperature=1.0, seed=1))]
    assert (host.run(rows, 3, ahead=1) >= 0).all()
    (other,) = two.others
    assert other.process is not None
    if isinstance(how, int):
        os.kill(other.process.pid, how)
    elif how == "junk":
        other.send(b"junk")
    with pytest.raises(EngineError, match=why) as caught:
        if how == "another plan":
            _launch_apart(two, host).fetch()
        for _ in range(50):
            host.launch(rows).fetch()
    assert "\n" not in str(caught.value)
    if how != "another plan":
        with pytest.raises(EngineError):
            host.launch(rows).fetch()


def _launch_apart(runner: RankRunner, host: Host) -> Flight:
    """Rank 1 gets a row that ends at its first token; rank 0's goes on."""
    plans = []
    for ask in (Ask(bias={5: 100.0}), Ask(bias={5: 100.0}, stop_ids=[5])):
        row = type(host.row(1, [9], 50, ask))(1, [9], 1, 51, [3], ask)
        plans.append(host.plan([row], joins=[row]))
    plans[1].number = plans[0].number
    runner.others[0].send(PLANS.encode(plans[1]))
    first = RankFlight(plans[0].number, TorchRunner.launch(runner, plans[0]), runner)
    assert first.fetch().tokens.tolist() == [5]
    row.planned = 1
    return host.launch([row])


class Hung(Gloo):
    """Waits for rank 1 in vain in the steps of the start, and says so as GPUs' collectives do:
    behind them."""

    def check(self) -> None:
        raise EngineError("rank 0 lost the others: rank 1 did not come to a sum of the step")


def test_a_start_whose_steps_hung_fails_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RemoteRank] = []

    class Started(RemoteRank):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(rank_runner, "open_collectives", lambda *told: Hung(*told[:4]))
    monkeypatch.setattr(rank_runner, "RemoteRank", Started)
    with pytest.raises(EngineError, match="rank 1 did not come to a sum of the step"):
        open_ranks(Config.of(**KNOBS), folder, 2)
    (other,) = started
    assert other.process is not None and other.process.returncode is not None, "its process lives"


def test_a_rank_that_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="rank 1 ended with code 1"):
        open_ranks(Config.of(**KNOBS), folder, 2)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(CapacityError, match="rank 1 could not be started: No such file"):
        open_ranks(Config.of(**KNOBS), folder, 2)


def test_what_does_not_divide_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(
        UsageError, match=r"heads of model.layers.0.self_attn: 4 cannot be divided over 3 ranks"
    ):
        open_ranks(Config.of(**KNOBS), folder, 3)


ALONE = """
import sys, time
from pathlib import Path
from penstock.config import Config
from penstock.ranks.rank_channel import PLANS
from penstock.ranks.rank_runner import open_ranks
runner = open_ranks(Config.of(device="cpu", max_model_len=64, kv_cache_tokens=512), Path(sys.argv[1]), 2)
print(runner.others[0].process.pid, flush=True)
time.sleep(60)
"""


def test_no_rank_outlives_rank_0(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, str(folder)], stdout=subprocess.PIPE
    ) as rank_0:
        assert rank_0.stdout is not None
        status = Path("/proc") / rank_0.stdout.readline().decode().strip() / "stat"
        assert status.exists()
        rank_0.kill()
    until(lambda: _ended(status))


def _ended(status: Path) -> bool:
    """Whether a process has: status is its /proc/PID/stat."""
    try:
        return status.read_text().rsplit(") ")[-1][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_rank_draws_its_share_of_the_same_dummy_weights(folder: Path) -> None:
    from penstock.models.build_model import build_model
    from penstock.models.read_config import read_model_config
    from penstock.weights.place import dummy_weights

    models = []
    for layout in (Layout(), Layout(0, 2), Layout(1, 2)):
        models.append(
            build_model(read_model_config(folder), torch.float32, torch.device("cpu"), 8, layout)
        )
        dummy_weights(models[-1], 3)
    for whole, *shares in zip(*(model.weights() for model in models), strict=True):
        numbers = np.concatenate([share.value.numpy().ravel() for share in shares])
        assert (
            np.isin(numbers, whole.value.numpy()).all()
            and np.isin(whole.value.numpy(), numbers).all()
        )
