"""What may fail while a GPU engine starts is one line that names it and the way out.
Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from penstock.errors import CapacityError, EngineError, UsageError
from penstock.execute.open_runner import _named_failures, find_device
from penstock.kernels.choose import choose, choose_rows

pytestmark = pytest.mark.torch

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def _unload(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Has packages imported anew until the test's end. Then the modules, and the names under which
    their packages hold them, are what they were."""
    for name, module in list(sys.modules.items()):
        if name in packages or name.startswith(tuple(f"{each}." for each in packages)):
            package, _, own = name.rpartition(".")
            if hasattr(sys.modules.get(package), own):
                monkeypatch.setattr(sys.modules[package], own, module)
            monkeypatch.delitem(sys.modules, name)


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _unload(monkeypatch, "penstock.kernels.triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        UsageError, match=r"need triton, which isn't installed.*--kernels reference.*--device cpu"
    ):
        choose(CUDA, torch.bfloat16)
    plain = choose(CUDA, torch.bfloat16, "reference")
    assert not choose_rows(plain).compiled and {column for column, _ in plain.why.values()} == {
        "reference"
    }
    assert not choose_rows(choose(CPU, torch.bfloat16)).compiled


def test_a_triton_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is installed, and a library of its own is missing, say: an ImportError without a name."""
    _unload(monkeypatch, "triton", "penstock.kernels.triton")
    (tmp_path / "triton.py").write_text(
        "raise ImportError('libcuda.so.1: no such file\\nand so on')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        UsageError, match=r"need triton, which cannot be loaded \(libcuda.so.1: no such file\): "
    ):
        choose(CUDA, torch.bfloat16)
    assert choose(CUDA, torch.bfloat16, "reference").why["attention"][0] == "reference"


@pytest.mark.parametrize(
    ("capability", "column"), [((8, 0), "reference"), ((8, 9), "reference"), ((9, 0), "triton")]
)
def test_a_gpu_that_the_tiles_of_e4m3_do_not_fit_widens_such_weights(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], column: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    why = choose(CUDA, torch.bfloat16).why
    assert (
        why["linear_fp8"][0] == why["prepare_linear_fp8"][0] == column
        and why["linear"][0] == "triton"
    )


def test_a_kernel_that_does_not_compile_is_named() -> None:
    Broken = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    source = "def attend_rows(error):\n    raise error\n"
    scope: dict[str, object] = {}
    exec(compile(source, "/anywhere/penstock/kernels/triton/attention/decode.py", "exec"), scope)
    with (
        pytest.raises(
            EngineError,
            match=r"kernel decode.attend_rows does not compile on cuda:0 \(no such dot\)",
        ),
        _named_failures(CUDA),
    ):
        scope["attend_rows"](Broken("at 3:4:\n  x = dot\nno such dot"))  # type: ignore[operator]


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(KeyError), _named_failures(CPU):
        raise KeyError("row")


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_too_little_memory_is_one_line_with_the_way_out(device: torch.device) -> None:
    with (
        pytest.raises(CapacityError, match="max_num_seqs or max_num_batched_tokens lower") as error,
        _named_failures(device),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory\nTried to allocate 2 GiB")
    assert ("--device cpu" in str(error.value)) is (device == CUDA) and "\n" not in str(error.value)


def test_a_cpu_without_memory_is_the_same_line() -> None:
    with (
        pytest.raises(CapacityError, match="max_num_seqs or max_num_batched_tokens lower"),
        _named_failures(CPU),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="a fault of ours"), _named_failures(CPU):
        raise RuntimeError("a fault of ours")


@pytest.mark.parametrize(
    "version, said, wanted",
    [
        (
            "13.0",
            "The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.",
            "is too old",
        ),
        ("13.0", None, "torch finds none"),
        (None, None, "this torch is built without CUDA"),
    ],
)
def test_an_old_driver_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str | None, wanted: str
) -> None:
    def init() -> None:
        if said is not None:
            raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UsageError, match=rf"{wanted}.*: ask for device 'cpu' or 'auto'") as error:
        find_device("cuda")
    assert "\n" not in str(error.value) and find_device("auto") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_why_there_is_no_gpu_is_said() -> None:
    with pytest.raises(
        UsageError, match=r"'cuda' was asked for and .*: ask for device 'cpu' or 'auto'"
    ):
        find_device("cuda")
