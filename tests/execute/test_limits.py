"""Knobs left to the engine, knobs that contradict, memory that is really free, and a runner opened
from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from execute_drive import CONFIG, Ask, Host

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.execute import limits as limits_module
from penstock.execute.limits import BatchLimits, batch_limits, with_kv
from penstock.execute.open_runner import (
    cpu_multiplies_bfloat16,
    find_device,
    find_dtype,
    open_runner,
)

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
GIB = 1 << 30


def test_batch_knobs_left_open() -> None:
    assert batch_limits(Config.of(), 4096, CPU) == BatchLimits(1024, 2048, 4096)
    assert batch_limits(Config.of(), 4096, torch.device("cuda")) == BatchLimits(8192, 16384, 4096)
    assert batch_limits(Config.of(max_num_seqs=5000, max_model_len=100), 4096, CPU) == BatchLimits(
        5000, 5000, 100
    )
    assert batch_limits(Config.of(max_num_batched_tokens=64), 4096, CPU) == BatchLimits(
        64, 64, 4096, mask_slots=64
    )


def test_batch_knobs_that_contradict() -> None:
    with pytest.raises(UsageError, match="max_num_batched_tokens"):
        batch_limits(Config.of(max_num_seqs=65, max_num_batched_tokens=64), 4096, CPU)
    with pytest.raises(UsageError, match="4096 or less") as error:
        batch_limits(Config.of(max_model_len=4097), 4096, CPU)
    assert error.value.param == "max_model_len"


def test_kv_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "free_memory", lambda device: 4 * GIB)
    batch = BatchLimits(1024, 2048, 1000)
    some = with_kv(batch, Config.of(), 16384, CPU)  # a quarter of 4 GiB at 16 KiB a token
    assert (some.kv_tokens, some.num_blocks) == (65536, 65536 // 16 + 3)
    # no more than its rows can use
    most = with_kv(BatchLimits(4, 2048, 1000), Config.of(), 16384, CPU)
    assert most.kv_tokens == 4 * 1008
    with pytest.raises(CapacityError, match="set max_model_len to 1024 or less"):
        with_kv(batch, Config.of(), 1 << 20, CPU) and with_kv(
            BatchLimits(1, 1, 1025), Config.of(), 1 << 20, CPU
        )


def test_no_room_for_any_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "free_memory", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 100 * GIB))
    cuda = torch.device("cuda")
    with pytest.raises(
        CapacityError,
        match=r"2.00 GiB is free and 0.00 GiB ours.* gpu_memory_utilization, or --dev",
    ):
        with_kv(BatchLimits(1024, 2048, 1000), Config.of(), 16384, cuda)
    with pytest.raises(CapacityError, match="or take a smaller model"):
        with_kv(BatchLimits(1024, 2048, 1000), Config.of(), 1 << 26, CPU)


def test_kv_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "free_memory", lambda device: GIB)
    batch = BatchLimits(8, 64, 1000)
    assert with_kv(batch, Config.of(kv_cache_tokens=1001), 1024, CPU).num_blocks == 63 + 3
    with pytest.raises(UsageError, match="max_model_len to 999 or less"):
        with_kv(batch, Config.of(kv_cache_tokens=999), 1024, CPU)
    with pytest.raises(CapacityError, match=r"1.95 GiB and 1.00 GiB is free"):
        with_kv(batch, Config.of(kv_cache_tokens=2000), 1 << 20, CPU)


def test_free_memory_is_a_part_of_the_machine() -> None:
    assert 0 < limits_module.free_memory(CPU) < 1 << 50


def test_cgroups_of_both_kinds(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "self"
    two, one = root / "a" / "b", root / "memory" / "c"
    two.mkdir(parents=True)
    one.mkdir(parents=True)
    (two / "memory.max").write_text("max\n")
    (two / "memory.current").write_text("5\n")
    (two.parent / "memory.max").write_text("1000\n")
    (two.parent / "memory.current").write_text("700\n")
    (two.parent / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    (one / "memory.limit_in_bytes").write_text("300\n")
    (one / "memory.usage_in_bytes").write_text("400\n")
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (root / "memory" / "memory.usage_in_bytes").write_text("1\n")
    own.write_text("7:cpu,cpuacct:/x\n4:memory:/c\n0::/a/b\n")
    assert sorted(limits_module._cgroup_rooms(root, own)) == [0, 350]
    assert limits_module._cgroup_rooms(root, tmp_path / "nothing") == []


def test_devices_and_dtypes(tmp_path: Path) -> None:
    assert find_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert find_device("auto") == CPU
        with pytest.raises(UsageError, match="device 'cpu' or 'auto'"):
            find_device("cuda")
    assert find_dtype("float16", CPU) == torch.float16
    for flags, has in (
        ("fpu avx512_bf16 sse", True),
        ("fpu amx_bf16", True),
        ("fpu avx512f", False),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert cpu_multiplies_bfloat16(tmp_path / "cpuinfo") is has
    (tmp_path / "cpuinfo").write_text("Features : fp asimd bf16\n")
    assert cpu_multiplies_bfloat16(tmp_path / "cpuinfo")
    assert not cpu_multiplies_bfloat16(tmp_path / "nothing")


def _folder(path: Path, **generation: object) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 3}))
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_open_runner_runs_what_the_folder_says(tmp_path: Path) -> None:
    folder = _folder(tmp_path, eos_token_id=[5, 6], temperature=0.6, top_k=20)
    knobs = {"max_model_len": 48, "max_num_seqs": 4, "kv_cache_tokens": 400}
    runner = open_runner(
        Config.of(load_format="dummy", device="cpu", dtype="bfloat16", **knobs), folder
    )
    assert (runner.max_rows, runner.max_model_len, runner.max_batched_tokens) == (4, 48, 2048)
    assert (runner.num_blocks, runner.vocab_size, runner.grouping) == (28, 160, True)
    assert runner.eos_token_ids == (5, 6) and runner.sampling_defaults == {
        "temperature": 0.6,
        "top_k": 20,
    }
    about = runner.describe()
    assert (
        about["dtype"] == "bfloat16"
        and about["device"].startswith("cpu")
        and about["kv_tokens"] == 400
    )
    assert about["kernels"]["sample"].startswith("reference") and about["weights_bytes"] > 0
    # layers x heads x (K, V) x width x 2 bytes; the id
    assert about["kv_bytes"] == 29 * 16 * (2 * 2 * 2 * 8 * 2 + 4)
    host = Host(runner)
    tokens = host.run([host.row(0, [9] * 20, 20, Ask(temperature=1.0))], 5)
    assert (tokens >= 0).all() and np.unique(tokens).size > 1
    runner.close()


def test_open_runner_takes_end_ids_of_the_config_where_generation_says_none(tmp_path: Path) -> None:
    runner = open_runner(
        Config.of(load_format="dummy", device="cpu", kv_cache_tokens=200), _folder(tmp_path)
    )
    runner.close()
    assert runner.eos_token_ids == (3,) and runner.sampling_defaults == {}


def test_no_memory_for_the_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "free_memory", lambda device: 1 << 62)
    knobs = {"load_format": "dummy", "device": "cpu", "kv_cache_tokens": 1 << 46}
    with pytest.raises(
        CapacityError, match="set kv_cache_tokens, max_num_seqs or max_num_batched_tokens lower"
    ):
        open_runner(Config.of(**knobs), _folder(tmp_path))


def test_no_memory_for_the_model_is_told_before_any_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.execute.open_runner.free_memory", lambda device: 1000)
    monkeypatch.setattr("penstock.weights.load.dummy_weights", None)
    with pytest.raises(
        CapacityError,
        match=r"the weights of .*, 48 positions .* is free on cpu: take a smaller model",
    ):
        open_runner(
            Config.of(load_format="dummy", device="cpu", max_model_len=48), _folder(tmp_path)
        )


def test_recurrent_state_is_counted_before_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB free, 4 of them ours: a row's state with 1,000 tokens beside it, a twentieth for
    snapshots."""
    monkeypatch.setattr(limits_module, "free_memory", lambda device: 16 * GIB)
    batch = BatchLimits(1024, 2048, 1000)
    small = with_kv(batch, Config.of(), 4000, CPU, slot_bytes=1 << 10)
    assert small.max_rows == 1024 and small.state_slots == 1024 + 2 + 8 * 1024
    large = with_kv(batch, Config.of(), 4000, CPU, slot_bytes=8 << 20)
    assert large.state_slots == large.max_rows + 2 + max(
        int(4 * GIB * 0.05) >> 23, large.max_rows // 8
    )
    taken = large.state_slots * (8 << 20) + large.max_rows * 1000 * 4000
    assert 4 * GIB * 0.97 < taken <= 4 * GIB
    assert large.mask_slots == large.max_rows and large.kv_tokens < small.kv_tokens
    costly = with_kv(batch, Config.of(), 16384, CPU, slot_bytes=8 << 20)
    assert costly.max_rows < large.max_rows and costly.kv_tokens >= 1000 * costly.max_rows
    with pytest.raises(
        CapacityError,
        match=r"the recurrent state of 900 sequences takes .*: set max_num_seqs to \d+ or",
    ):
        with_kv(
            BatchLimits(900, 2048, 1000),
            Config.of(max_num_seqs=900),
            16384,
            CPU,
            slot_bytes=8 << 20,
        )
    with pytest.raises(CapacityError, match="take a larger device"):
        with_kv(batch, Config.of(), 16384, CPU, slot_bytes=1 << 30)
