"""Which model a job's samples are of: told before it is loaded, by its name, its knobs and its
files."""

from __future__ import annotations

from pathlib import Path

from penstock.config import Config
from penstock.jobs.open_llm import LOOK, identity


def test_a_model_trained_on_is_another(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10 * LOOK))
    (tmp_path / "notes.txt").write_text("not looked at")
    config = Config.of(model=str(tmp_path))
    before = identity(config)
    (tmp_path / "notes.txt").write_text("changed")
    assert identity(config) == before
    for place in (100, 5 * LOOK + 7, 10 * LOOK - 1):
        data = bytearray(10 * LOOK)
        data[place] = 1
        weights.write_bytes(data)
        assert identity(config) != before, place
    weights.write_bytes(bytes(10 * LOOK + 1))
    assert identity(config) != before


def test_what_decides_and_what_doesnt() -> None:
    plain = identity(Config.of(model="owner/name"))
    assert plain["model_files"] is None
    assert (
        identity(Config.of(model="owner/name", max_num_seqs=3, kv_cache_tokens=64, steps_ahead=0))
        == plain
    )
    for change in (
        {"dtype": "float32"},
        {"max_model_len": 9},
        {"revision": "v2"},
        {"load_format": "dummy"},
    ):
        assert identity(Config.of(model="owner/name", **change)) != plain
    assert identity(Config())["model_files"]


def test_a_template_and_a_tokenizer_are_known_by_what_they_hold(tmp_path: Path) -> None:
    (file := tmp_path / "chat.jinja").write_text("a")
    (tmp_path / "tokenizer.json").write_text("{}")
    plain = identity(Config())
    config = Config.of(chat_template=str(file), tokenizer=str(tmp_path))
    named = identity(config)
    assert named != plain and identity(config) == named
    file.write_text("b")
    changed = identity(config)
    assert changed["chat_template"] != named["chat_template"]
    (tmp_path / "tokenizer.json").write_text("{} ")
    assert identity(config)["tokenizer_files"] != changed["tokenizer_files"]
