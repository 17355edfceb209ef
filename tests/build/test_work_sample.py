"""The work: shapes and rows as ids and lengths, what is shared, which rows a sample keeps, what is
refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.build.options import BuildOptions, WorkShape
from penstock.build.work_sample import MOST_PROMPTS, rows_work, shape_work, shared_beginning, spread
from penstock.cli.build_command import _read_rows
from penstock.demo import model_folder
from penstock.errors import UsageError
from penstock.models.read_config import read_model_config
from penstock.request import SamplingParams
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch


@dataclass
class Row:
    number: int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    chat: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_folder())


def test_a_shape_is_so_many_requests_of_so_many_tokens() -> None:
    work = shape_work(WorkShape.parse("64x32:8"), read_model_config(model_folder()), 2304)
    assert [len(prompt) for prompt in work.prompts] == [64] * 8 and work.outputs == [32] * 8
    assert work == shape_work(WorkShape(64, 32, 8), read_model_config(model_folder()), 2304)
    facts = work.facts()
    assert (facts.told, facts.samples, facts.concurrency, facts.shared_tokens) == (
        "64x32:8",
        8,
        8,
        0,
    )


@pytest.mark.parametrize(
    "text",
    ["", "64x32", "64x32:", "0x32:8", "64x0:8", "64x32:0", "-1x2:3", "64 x 32 : 8", "9" * 99],
)
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not INxOUT:CONCURRENCY: give tokens .* as 256x256:128"
    ):
        WorkShape.parse(text)


def test_a_shape_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="longer than the context of 2304 tokens"):
        shape_work(WorkShape(2000, 305, 1), read_model_config(model_folder()), 2304)


def test_rows_become_ids_lengths_and_what_it_costs_to_draw(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=3, temperature=0.5, top_p=0.9, max_tokens=40, stop=["x"])
    rows = [Row(1, prompt="Tom has 3 apples.", params=params), Row(2, prompt=[5, 6, 7])]
    work = rows_work("rows.jsonl", rows, tokenizer, 2304, None)
    assert work.prompts == [tokenizer.encode("Tom has 3 apples."), [5, 6, 7]]
    assert (work.outputs, work.samples, work.concurrency, work.ends) == ([40, 16], 4, 4, True)
    assert work.sampling[0]["top_p"] == 0.9 and "stop" not in work.sampling[0]
    assert rows_work("rows.jsonl", rows, tokenizer, 2304, 2).concurrency == 2


def test_messages_go_through_the_chat_template(tokenizer: Tokenizer) -> None:
    row = Row(1, messages=[{"role": "user", "content": "Hello"}], chat={"chat_template_kwargs": {}})
    (ids,) = rows_work("rows.jsonl", [row], tokenizer, 2304, None).prompts
    assert "Hello" in tokenizer.decode(ids) and len(ids) > len(tokenizer.encode("Hello"))


def test_rows_that_the_model_cannot_take_are_told_together(tokenizer: Tokenizer) -> None:
    rows = [
        Row(1, prompt=[1]),
        Row(4, prompt=[1] * 20),
        Row(5, prompt=[1_000_000]),
        Row(7, prompt="a " * 20),
    ]
    told = (
        r"3 rows are bad: .*row 4: .*length is 20 tokens .*, 20 tokens.*; row 5: .* token outside 0"
        r" to .*; row 7: "
    )
    with pytest.raises(UsageError, match=told):
        rows_work("rows.jsonl", rows, tokenizer, 20, None)


def test_broken_rows_are_told_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n{"id": 2}\n{"id": 1, "prompt": "b"}\nno JSON\n')
    with pytest.raises(UsageError, match=r"3 rows are bad.*row 2: .*row 3: .*row 4 is no JSON"):
        _read_rows(path)
    path.write_text('\n{"id": 1, "prompt": "a"}\n')
    count, rows = _read_rows(path)
    assert count == 1 and [(row.number, row.prompt) for row in rows({})] == [(2, "a")]


def test_a_sample_is_spread_over_the_file() -> None:
    rows = [Row(number, prompt=[1]) for number in range(5000)]
    some = spread(rows, 5000)
    assert len(some) <= MOST_PROMPTS and some[0].number == 0 and some[-1].number > 4900
    many = [Row(number, prompt=[1], params=SamplingParams(n=1024)) for number in range(64)]
    assert [row.number for row in spread(many, 64)] == list(range(0, 64, 8))
    assert len(spread([Row(0, prompt=[1], params=SamplingParams(n=65536))], 1)) == 1


def test_what_all_prompts_begin_with() -> None:
    assert shared_beginning([[1, 2, 3, 4], [1, 2, 3], [1, 2, 9]]) == 2
    assert shared_beginning([[1, 2], [1, 2]]) == 2
    assert shared_beginning([[1, 2]]) == shared_beginning([[1], [2]]) == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"quantization": "fp4"}, "must be one of auto, none, fp8, int8, int4, nvfp4"),
    ({"objective": "fast"}, "must be one of throughput, latency"),
    ({"workload": "a", "shapes": ["1x1:1"]}, "leave one out"),
    ({"tune_minutes": -1.0}, "tune_minutes must be between"),
    ({"max_kl": float("nan")}, "max_kl must be at least 0"),
    ({"shapes": ["1x1"]}, "is not INxOUT"),
    ({"knobs": {"max_num_seqs": 0}}, "max_num_seqs must be between"),
    ({"retune": True, "quantization": "int8"}, "is settled in an artifact"),
    ({"retune": True, "keep_wide": ["a"]}, "is settled in an artifact"),
    ({"retune": True, "quantize_lm_head": True}, "quantize_lm_head is settled in an artifact"),
    (
        {"quantization": "int8", "quantize_lm_head": True},
        "is for fp8 weights, and these are int8: leave it out",
    ),
    (
        {"quantization": "none", "keep_wide": ["a"]},
        "keep_wide is of weights that are quantized, .*: leave it out",
    ),
    ({"retune": True, "tune_minutes": 0.0}, "tune_minutes 0 times none"),
]


@pytest.mark.parametrize(("told", "match"), BAD)
def test_options_that_cannot_be_are_refused(told: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        BuildOptions(model="demo", out="out", **told)
