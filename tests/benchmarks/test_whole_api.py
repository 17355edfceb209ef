"""benchmarks/whole_api.py at tiny size: its schemas, and the parts of it that take little from end
to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from random_schemas import long_schema, made_schemas
from whole_api import TINY, arguments, line_of, run

from penstock.demo import model_folder
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import GrammarCompiler, grammar_text
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch
pytest.importorskip("llguidance")


def test_schemas_are_apart_and_can_be_served() -> None:
    schemas = made_schemas(100, 42)
    assert schemas == made_schemas(100, 42) and len({json.dumps(each) for each in schemas}) == 100
    compiler = GrammarCompiler(Tokenizer.load(model_folder(), vocab_size=2048), (0,))
    for schema in [*schemas[:20], long_schema(1000)]:
        assert (
            compiler.compile(grammar_text(StructuredOutputsParams(json=schema)))
            .matcher()
            .mask()
            .any()
        )


def test_parts_run_and_are_told(tmp_path: Path) -> None:
    parts = ["labels", "logprobs", "swap"]
    words = ["--out", str(tmp_path), "--shape", "tiny", "--knob", "device=cpu"]
    found = run(arguments([*words, *(word for part in parts for word in ("--part", part))]))
    assert [*found] == parts == [*json.loads((tmp_path / "results.json").read_text())]
    assert found["labels"]["computed_tokens"] == TINY.items * (TINY.item + 8) + TINY.header - 8, (
        "the header but once"
    )
    assert all(
        found[part]["share"] > 0 and "share" in line_of(part, found[part]) for part in parts[:2]
    )
    assert all(len(found["swap"][way]) == TINY.swaps for way in ("folder", "shared"))
