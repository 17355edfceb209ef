"""Rows of `penstock run`: both forms, and every refusal by name with the row's number."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.jobs.input_rows import Row, parse_row, read_rows, survey


def parse(row: Any) -> Row:
    return parse_row(json.dumps(row).encode(), 7, seed=1)


def batch(url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": body}


CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_own_form() -> None:
    row = parse(
        {
            "id": "a",
            "prompt": "Hi",
            "n": 3,
            "temperature": 0.5,
            "stop": "\n",
            "logit_bias": {"5": -1},
        }
    )
    assert (row.id, row.prompt, row.messages) == ("a", "Hi", None)
    assert (row.params.n, row.params.temperature, row.params.stop) == (3, 0.5, ["\n"])
    assert row.params.logit_bias == {5: -1.0}
    assert parse({"id": 4, "prompt": [1, 2]}).prompt == [1, 2]
    assert parse({"id": 4, "messages": HELLO}).messages == HELLO
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert parse({"id": 4, "messages": parts}).messages == parts


def test_batch_form() -> None:
    row = parse(batch(model="m", prompt="Hi", max_tokens=5, seed=9))
    assert (row.id, row.prompt, row.model, row.params.max_tokens, row.params.seed) == (
        "c",
        "Hi",
        "m",
        5,
        9,
    )
    chat = parse(
        batch(
            CHAT, messages=HELLO, max_completion_tokens=7, logprobs=True, top_logprobs=2, stop=None
        )
    )
    assert (chat.messages, chat.params.max_tokens, chat.params.logprobs) == (HELLO, 7, 2)
    assert parse(batch(CHAT, messages=HELLO)).params.max_tokens is None
    assert parse(batch(prompt="Hi")).params.max_tokens == 16


def test_a_body_with_a_custom_id_needs_no_envelope() -> None:
    asked = {"messages": HELLO, "max_tokens": 5, "seed": 9, "temperature": 0.5}
    assert parse({"custom_id": "c", **asked}) == parse(batch(CHAT, **asked))
    kept = parse_row(
        json.dumps({"custom_id": "c", **asked, "answer": 42}).encode(), 1, 0, keep=("answer",)
    )
    assert kept.carried == {"answer": 42} and kept.messages == HELLO


def test_chat_options_of_both_forms() -> None:
    asked = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"thinking": False},
    }
    own, batched = (
        parse({"id": 1, "messages": HELLO, **asked}),
        parse(batch(CHAT, messages=HELLO, **asked)),
    )
    assert own.chat == batched.chat == asked
    assert parse({"id": 1, "messages": HELLO, "chat_template_kwargs": None}).chat == {}


def test_a_row_without_a_seed_gets_its_own() -> None:
    seeds = [parse({"id": i, "prompt": "x"}).params.seed for i in ("a", "b", 1, "1")]
    assert len(set(seeds)) == 4 and None not in seeds
    assert parse({"id": "a", "prompt": "y"}).params.seed == seeds[0]
    assert parse({"id": "a", "prompt": "x", "seed": 5}).params.seed == 5
    assert parse_row(b'{"id": "a", "prompt": "x"}', 1, seed=2).params.seed != seeds[0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([1], "Expected `object`, got `array`"),
        (0, "Expected `object`, got `int`"),
        (None, "Expected `object`, got `null`"),
        ("prompt", "Expected `object`, got `str`"),
        (True, "Expected `object`, got `bool`"),
        ({"prompt": "x"}, "Object missing required field `id`"),
        ({"custom_id": "", "method": "POST"}, "missing required field url"),
        ({"id": None, "prompt": "x"}, "Expected `int | str`, got `null` - at `$.id`"),
        ({"id": True, "prompt": "x"}, "Expected `int | str`, got `bool` - at `$.id`"),
        ({"id": "", "prompt": "x"}, "Expected `str` of length >= 1 - at `$.id`"),
        ({"id": "a"}, "either prompt or messages"),
        ({"id": "a", "prompt": "x", "messages": HELLO}, "either prompt or messages"),
        ({"id": "a", "prompt": ["x", "y"]}, "Expected `int`, got `str` - at `$.prompt[0]`"),
        ({"id": "a", "prompt": [1, -2]}, "Expected `int` >= 0 - at `$.prompt[1]`"),
        ({"id": "a", "prompt": [True]}, "Expected `int`, got `bool` - at `$.prompt[0]`"),
        ({"id": "a", "prompt": []}, "Expected `array` of length >= 1 - at `$.prompt`"),
        (batch(prompt=["x", "y"]), "Expected `int`, got `str`"),
        ({"id": "a", "prompt": "x", "temprature": 1}, "unknown field `temprature`"),
        (
            {"id": "a", "prompt": "x", "answer": "5"},
            "`answer`: leave it out, or let the column through to OUT by --k",
        ),
        ({"id": "a", "prompt": "x", "prompt_logprobs": 1}, "unknown field `prompt_logprobs`"),
        ({"id": "a", "prompt": "x", "temperature": -1}, "temperature must be between"),
        ({"id": "a", "prompt": "x", "n": 0}, "n must be between"),
        ({"id": "a", "prompt": "x", "n": "2"}, "n must be a whole number"),
        ({"id": "a", "prompt": "x", "stop": 5}, "stop must be a list"),
        ({"id": "a", "prompt": "x", "logit_bias": [1]}, "logit_bias must map"),
        (
            {"id": "a", "prompt": "x", "n": 3, "stop_when": {"pattern": "("}},
            "stop_when.pattern is no regex that can be",
        ),
        (
            {"id": "a", "prompt": "x", "stop_when": {"pattern": "x", "k": 2}},
            "object contains unknown field k",
        ),
        (
            {"id": "a", "prompt": "x", "logprob_token_ids": [1, 1]},
            "logprob_token_ids must be a list of 1 to 20",
        ),
        ({"id": "a", "messages": []}, "messages is empty"),
        ({"id": "a", "messages": [{"role": "user", "content": 5}]}, "content must be text"),
        ({"id": "a", "prompt": "x", "ignore_eos": "no"}, "ignore_eos must be true or false"),
        ({"id": "a", "custom_id": "b"}, "unknown field id"),
        (batch("/v1/embeddings", input="x"), "url must be /v1/completions"),
        ({**batch(prompt="x"), "method": "GET"}, "method must be POST"),
        ({"custom_id": "c", "method": "POST", "url": CHAT}, "missing required field body"),
        (batch(prompt="x", temprature=1), "unknown field temprature: leave it out"),
        (batch(prompt="x", stream=True), "stream is not served in a batch"),
        (
            {"id": 1, "prompt": "x", "chat_template_kwargs": {}},
            "chat_template_kwargs belongs to messages",
        ),
        (
            {"id": 1, "messages": HELLO, "add_generation_prompt": 1},
            "add_generation_prompt must be true or false",
        ),
        (
            {"id": 1, "messages": HELLO, "continue_final_message": True},
            "exclude each other: set one of them to false",
        ),
    ],
)
def test_refusals(row: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(row)
    assert str(caught.value).startswith("row 7: ") and says in str(caught.value)


def test_no_json() -> None:
    for line in (b"{", b"\xff\xfe", b"{'id': 1}", b"[" * 100_000):
        with pytest.raises(UsageError, match="row 3 is no JSON"):
            parse_row(line, 3, seed=0)
    with pytest.raises(UsageError, match="'utf-8' codec"):  # whatever else its bytes might be
        parse_row(b'\xff\xfe{"id": 1}', 3, seed=0)
    # a byte-order mark
    assert parse_row(b'\xef\xbb\xbf{"id": 1, "prompt": "x"}', 3, seed=0).id == 1


def test_survey_counts_and_finds_doubles(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "y"}, batch(prompt="z", model="m")]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = survey(path, lambda rows: None)
    assert (found.rows, found.models) == (3, ["m"])
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert survey(packed, lambda rows: None) == found
    assert [row.id for row in read_rows(packed, 0, {})] == [1, "1", "c"]
    path.write_text("\n".join(map(json.dumps, [*rows, {"id": "c", "prompt": "w"}])))
    with pytest.raises(UsageError, match=r"row 4: id 'c' was there before"):
        survey(path, lambda rows: None)
    with pytest.raises(UsageError, match="no file"):
        survey(tmp_path / "none.jsonl", lambda rows: None)


def test_survey_holds_no_rows(tmp_path: Path) -> None:
    """20 MB of rows; ids alone stay, a few dozen bytes each."""
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for i in range(5_000):
            file.write(json.dumps({"id": f"row-{i}", "prompt": "x" * 4_000}) + "\n")
    tracemalloc.start()
    try:
        assert survey(path, lambda rows: None).rows == 5_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_survey_tells_every_bad_row_at_once(tmp_path: Path) -> None:
    """The first twenty in full, the others by their numbers: one run, one line."""
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": i, "prompt": "x"}) for i in range(1, 101)]
    for number in (7, *range(30, 60), 80, 82, 83, 100):
        lines[number - 1] = "{"
    lines[89] = json.dumps({"id": 1, "prompt": "again"})
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError) as caught:
        survey(path, lambda rows: None)
    said = str(caught.value)
    assert said.startswith("36 rows are bad") and said.endswith(
        "; and 16 more: 49-59, 80, 82-83, 90, 100"
    )
    assert [number for number in range(1, 101) if f"row {number} is no JSON" in said] == [
        7,
        *range(30, 49),
    ]
    lines[6] = lines[89]
    path.write_text("\n".join(lines[:7] + lines[29:30]))
    with pytest.raises(
        UsageError, match=r"row 7: id 1 was there before: .*; row 8 is no JSON.*out$"
    ):
        survey(path, lambda rows: None)
