"""Shapes, prompts and bodies: exact fields, exact lengths, nothing alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.bench.text_prompts import TextPrompts
from penstock.bench.workload import (
    NO_LENGTH,
    SUITES,
    Draw,
    RequestStyle,
    Workload,
    named,
    prompts,
    workload,
)
from penstock.errors import UsageError

IDS = RequestStyle("m", 2000)


def no_texts(length: int, draw: Draw) -> Iterator[str]:
    raise AssertionError("ids need no texts")


def bodies(
    work: Workload, speech: RequestStyle = IDS, seed: int = 0, salt: str = "r.1.p", count: int = 3
) -> list[Any]:
    return [
        json.loads(each.body) for each in islice(prompts(work, speech, seed, salt, no_texts), count)
    ]


def test_shapes_by_their_names() -> None:
    assert workload("128x1024") == Workload("128x1024", "exact", 128, 1024)
    assert (
        workload("monkeys:7").n == 7
        and workload("monkeys").n == 64
        and workload("monkeys").kind == "monkeys"
    )
    assert [work.name for work in named(["9x9", "512x512"], "almanac")] == [
        "9x9",
        "512x512",
        *(name for name in SUITES["almanac"] if name != "512x512"),
    ]
    for wrong in (
        "128",
        "0x5",
        "128x",
        "x",
        "128x1024x2",
        "monkeys:0",
        "monkeys:1000000",
        "1e3x5",
        "",
        "shape.txt",
    ):
        with pytest.raises(UsageError, match="there is no shape"):
            workload(wrong)
    with pytest.raises(UsageError, match="there is no suite 'other': there is almanac"):
        named([], "other")
    with pytest.raises(UsageError, match="say what to measure"):
        named([], None)


def test_a_body_has_exactly_these_fields() -> None:
    (body,) = bodies(workload("5x9"), count=1)
    assert len(body.pop("prompt")) == 5
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    (body,) = bodies(workload("monkeys:3"), count=1)
    assert body["n"] == 3 and "ignore_eos" not in body and "stop" not in body
    speech = RequestStyle(
        "m", 2000, more=(("extra", '{"tokens": {output}}'), ("top_k", 5)), without=("ignore_eos",)
    )
    (body,) = bodies(workload("5x9"), speech, count=1)
    assert body["extra"] == '{"tokens": 9}' and body["top_k"] == 5 and "ignore_eos" not in body


def test_no_two_prompts_begin_alike() -> None:
    """Of a point, of two points, of two runs, of two shapes: not in their first 16 ids."""
    groups = [
        bodies(workload("64x8"), seed=seed, salt=salt, count=200)
        for seed, salt in (
            (0, "run.1.single.0"),
            (0, "run.2.single.0"),
            (0, "nur.1.single.0"),
            (1, "run.1.single.0"),
        )
    ] + [bodies(workload("128x8"), salt="other.1.single.0", count=200)]
    first = [tuple(body["prompt"][:16]) for group in groups for body in group]
    assert len(set(first)) == len(first) == 1000
    drawn = np.concatenate([body["prompt"] for group in groups for body in group])
    assert drawn.min() >= 16 and drawn.max() < 2000 and len(np.unique(drawn)) > 1900
    assert bodies(workload("64x8")) == bodies(workload("64x8"))


def test_conversations_and_questions_come_from_files(tmp_path: Path) -> None:
    talk = [
        {
            "conversations": [
                {"from": "human", "value": "a" * 40},
                {"from": "gpt", "value": "b" * 80},
            ]
        },
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    work = workload(str(tmp_path / "talk.json"))
    assert (work.name, work.kind, work.input, work.output, work.source) == (
        "talk",
        "dataset",
        10,
        20,
        "talk.json",
    )
    (body,) = bodies(work, count=1)
    assert body["prompt"] == "a" * 40 and body["max_tokens"] == 20 and body["ignore_eos"] is True
    (tmp_path / "rows.jsonl").write_text('{"question": "How many?", "answer": "2"}\n\n')
    work = workload(f"monkeys:5@{tmp_path / 'rows.jsonl'}")
    assert (work.name, work.n, work.kind) == ("monkeys:5@rows", 5, "monkeys")
    asked = next(prompts(work, IDS, 0, "s", no_texts))
    body = json.loads(asked.body)
    assert (
        body["prompt"] == "Question: How many?\nAnswer:"
        and body["n"] == 5
        and body["stop"] == ["Question:"]
    )
    assert (asked.asked_prompt, asked.asked_output) == (NO_LENGTH, NO_LENGTH)


# --- texts


def tokenizer(path: Path, words: int, *, special: bool = False) -> Path:
    names = [
        "".join(chr(97 + (number // 26**at) % 26) for at in range(3)) for number in range(words)
    ]
    vocabulary = {"<s>": 0, "?": 1, **{f"Ġ{name}": at + 2 for at, name in enumerate(names)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if special:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    made.save(str(path))
    return path


@pytest.mark.parametrize("special", [False, True])
def test_texts_have_exactly_the_tokens_that_were_asked(tmp_path: Path, special: bool) -> None:
    path = tokenizer(tmp_path / "tokenizer.json", 300, special=special)
    texts, told = TextPrompts(tmp_path), Tokenizer.from_file(str(path))
    for length in (2, 17, 200):
        made = list(islice(texts.of(length, np.random.default_rng(3)), 20))
        assert {len(told.encode(text).ids) for text in made} == {length}
        assert length < 17 or len({text[:64] for text in made}) == 20
    speech = RequestStyle("m", 0, ids=False)
    asked = next(prompts(workload("9x4"), speech, 0, "s", texts.of))
    assert len(told.encode(json.loads(asked.body)["prompt"]).ids) == asked.asked_prompt == 9
