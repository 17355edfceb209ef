"""A wide folder written as a quantized one: it loads as what `--quantization` makes of the wide
one, number for number; packed as the library packs; cut short, it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.demo import model_folder
from penstock.errors import CheckpointError
from penstock.execute.runner import SLOW_FP8
from penstock.kernels.choose import choose
from penstock.models.decoder import Decoder
from penstock.quant import integers
from penstock.quant.fp8 import to_fp8
from penstock.quant.write_compressed import MadeKind, pack_int32
from penstock.weights.checkpoint import INDEX
from penstock.weights.load import load_model
from penstock.weights.write_quantized import write_quantized

pytestmark = pytest.mark.torch

PROMPTS = [list(range(40, 60)), list(range(90, 97))]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def answers(model: Path, **knobs: str) -> list[list[int]]:
    with LLM(str(model), device="cpu", dtype="bfloat16", **knobs) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_written_folder_answers_as_what_is_made_at_load(
    kind: MadeKind,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a folder has one size of groups, and the demo's rows would have two
    monkeypatch.setattr(integers, "SHORT", 0)
    write_quantized(model_folder(), tmp_path / "out", kind)
    assert answers(tmp_path / "out") == answers(model_folder(), quantization=kind)
    # a CPU widens it, and says so
    assert capsys.readouterr().err.count(SLOW_FP8) == (2 if kind == "fp8" else 0)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name
        for p in model_folder().iterdir()
        if p.suffix in (".json", ".safetensors", ".jinja", ".txt")
    )
    with pytest.raises(CheckpointError, match="is quantized already"):
        write_quantized(tmp_path / "out", tmp_path / "twice", kind)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_fp8_is_made_of_what_scores_the_vocabulary(tied: bool, tmp_path: Path) -> None:
    """Also of an embedding that is the head too, which stays wide; kept wide, it is what it was."""
    wide, out = tmp_path / "wide", tmp_path / "out"
    wide.mkdir()
    tensors = load_file(model_folder() / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    head = table if tied else table.flip(0)
    save_file(
        tensors if tied else tensors | {"lm_head.weight": head.contiguous()},
        wide / "model.safetensors",
    )
    config = json.loads((model_folder() / "config.json").read_text()) | {
        "tie_word_embeddings": tied
    }
    (wide / "config.json").write_text(json.dumps(config))
    write_quantized(wide, out, "fp8", fp8_head=True)
    numbers, scale = to_fp8(head)
    stored = load_file(out / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"].view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(stored["lm_head.weight_scale"], scale)
    assert torch.equal(stored["model.embed_tokens.weight"], table)
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    # by its name, as vLLM asks it
    assert [group["targets"] for group in groups.values()] == [
        ["lm_head"],
        ["Linear"],
    ]
    hidden = torch.randn(20, head.shape[1], generator=torch.Generator().manual_seed(1))
    scores = loaded(out).logits(hidden)
    torch.testing.assert_close(
        scores, hidden @ (numbers.float() * scale.float()).T, atol=0.05, rtol=0.02
    )
    write_quantized(wide, tmp_path / "kept", "fp8", keep_wide=["lm_head"], fp8_head=True)
    assert torch.equal(loaded(tmp_path / "kept").logits(hidden), loaded(wide).logits(hidden))


def loaded(folder: Path) -> Decoder:
    ops, cpu = choose(torch.device("cpu"), torch.float32), torch.device("cpu")
    return load_model(folder, load_format="auto", dtype=torch.float32, device=cpu, ops=ops, seed=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("into", [64, 70])
def test_numbers_are_packed_as_the_library_packs_them(bits: int, into: int) -> None:
    draw = torch.Generator().manual_seed(bits)
    numbers = torch.randint(
        -(2 ** (bits - 1)), 2 ** (bits - 1), (6, into), dtype=torch.int8, generator=draw
    )
    assert torch.equal(pack_int32(numbers, bits), pack_to_int32(numbers, bits))


def test_what_was_cut_short_goes_on_at_its_shard(tmp_path: Path) -> None:
    sharded, out = tmp_path / "sharded", tmp_path / "out"
    sharded.mkdir()
    tensors = load_file(model_folder() / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, sharded / shard)
    where = {name: shard for shard, held in shards.items() for name in held}
    (sharded / INDEX).write_text(json.dumps({"weight_map": where}))
    for path in model_folder().iterdir():
        if path.suffix in (".json", ".jinja"):
            (sharded / path.name).write_bytes(path.read_bytes())
    told: list[str] = []
    write_quantized(sharded, out, "int8", told.append)
    assert told == ["shard 1 of 2: a.safetensors", "shard 2 of 2: b.safetensors"]
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "b.safetensors").rename(out / "b.safetensors.part")  # as a kill leaves it
    (out / "config.json").unlink()
    before = (out / "a.safetensors").stat().st_mtime_ns
    write_quantized(sharded, out, "int8")
    assert (out / "a.safetensors").stat().st_mtime_ns == before
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
