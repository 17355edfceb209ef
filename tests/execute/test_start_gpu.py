"""What a GPU machine may lack is said in one line that names it and the way out: room, Triton, a
kernel, a driver."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock import LLM
from penstock.errors import CapacityError, EngineError, PenstockError
from penstock.kernels.triton.sampling import row_state as step_rows

pytestmark = pytest.mark.gpu

LARGE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TOTAL = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 1


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """4.6 GB of weights in bfloat16, of which no byte is on the disk."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return tmp_path


@pytest.fixture
def little_memory() -> Any:
    """3 GB are left of the GPU, for torch in this process alone: others test beside it."""
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + 3e9) / TOTAL))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def _line(error: PenstockError, *words: str) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 400, text
    assert all(word in text for word in words), text
    return text


def test_weights_without_room(large: Path, little_memory: None) -> None:
    with pytest.raises(CapacityError) as caught:
        LLM(
            str(large),
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
        )
    print(_line(caught.value, "weights", "don't fit", "--device cpu"))
    del caught  # its frames hold what was loaded so far
    gc.collect()
    with LLM(
        "demo", device="cuda", max_num_seqs=16, max_model_len=256, kv_cache_tokens=2048
    ) as llm:
        assert llm.generate("1 + 1 =", use_tqdm=False)[0].outputs[0].token_ids, (
            "what was taken came back"
        )


def test_a_step_without_room(little_memory: None) -> None:
    """The weights fit, and the worst step doesn't."""
    with pytest.raises(CapacityError) as caught:
        LLM("demo", device="cuda", max_num_batched_tokens=1_000_000)
    print(_line(caught.value, "max_num_batched_tokens", "cuda"))


def test_a_cache_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has the GPU's memory: less is free than the share that is to stay free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(0.05 * TOTAL), TOTAL))
    with pytest.raises(CapacityError) as caught:
        LLM("demo", device="cuda")
    print(_line(caught.value, "KV cache", "free"))


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.jit
    def broken(
        row_ids,
        offset,
        draft,
        last_token,
        length,
        done,
        block_table,
        table_width,
        slot_token,
        token_ids,
        positions,
        slots,
        count,
        dump_block,
        SLOTS: tl.constexpr,
        BLOCK: tl.constexpr,
        EARLY: tl.constexpr,
    ):
        tl.static_assert(SLOTS > BLOCK, "a kernel that nobody can compile")

    monkeypatch.setattr(step_rows, "_prepare", broken)
    with pytest.raises(EngineError) as caught:
        LLM("demo", device="cuda", max_num_seqs=16, max_model_len=256)
    print(
        _line(
            caught.value,
            "row_state.prepare",
            "does not compile",
            "--kernels reference",
            "--device cpu",
        )
    )
    with LLM("demo", device="cuda", kernels="reference", max_num_seqs=16, max_model_len=256) as llm:
        assert llm.generate("1 + 1 =", use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "raised, way_out",
    [
        ("ModuleNotFoundError", ""),
        ("ImportError", ""),
        ("ImportError", "--kernels reference"),
        ("ImportError", "--device cpu"),
    ],
)
def test_no_triton(tmp_path: Path, raised: str, way_out: str) -> None:
    """A stub that cannot be imported stands before the real one; both ways out that the line names
    work."""
    told = ", name='triton'" if raised == "ModuleNotFoundError" else ""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(
        f"raise {raised}('libtriton is not what it was'{told})\n"
    )
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "1 + 1 ="}\n')
    command = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        "in.jsonl",
        "out.jsonl",
        "--model",
        "demo",
        "--max-num-seqs",
        "16",
    ]
    command += ["--max-model-len", "256", *way_out.split()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    if way_out:
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "out.jsonl").read_text())["outputs"]
        return
    lines = done.stderr.strip().splitlines()
    print(lines)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in lines[-1] for word in ("triton", "--kernels reference", "--device cpu"))
