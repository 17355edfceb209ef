"""The same lines by `penstock run`, by `penstock batch` and by a server's own check: one acceptance, one sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from batch_fake import CHAT, COMPLETIONS, Batching, batching, line
from server_fake import make_tokenizer

from penstock.errors import UsageError
from penstock.jobs.input_rows import UNSERVED, ModelDefaults, Row, parse_row
from penstock.jobs.remote import Remote
from penstock.jobs.remote_batch import submit
from penstock.server.batch.input_file import LineCheck
from penstock.server.openai.batch_line import LineError

pytestmark = pytest.mark.torch

DEFAULTS = {"temperature": 0.25, "top_k": 7, "max_tokens": 11}
ASKED: list[dict[str, Any]] = [
    {"url": COMPLETIONS},
    {"url": COMPLETIONS, "max_tokens": None, "temperature": 0, "n": 2},
    {"url": COMPLETIONS, "prompt": [1, 2, 3], "logit_bias": {"5": -1}, "stop": "x", "logprobs": 2, "seed": 5},
    {"url": COMPLETIONS, "user": "me", "metadata": {"a": "b"}, "bad_words": [], "guided_json": None, "best_of": 1},
    {"url": CHAT},
    {"url": CHAT, "allowed_token_ids": [5, 6], "bad_words": ["a", "b c"]},
    {"url": CHAT, "bad_words": [" "]},
    {"url": COMPLETIONS, "allowed_token_ids": []},
    {"url": CHAT, "max_tokens": None, "top_p": 0.5, "logprobs": True, "top_logprobs": 1, "store": False},
    {"url": CHAT, "max_tokens": None, "max_completion_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
    {"url": COMPLETIONS, "temprature": 1},
    {"url": COMPLETIONS, "temperature": -1},
    {"url": COMPLETIONS, "stream": True},
    {"url": COMPLETIONS, "best_of": 2},
    {"url": COMPLETIONS, "prompt": 5},
    {"url": COMPLETIONS, "max_tokens": 0},
    {"url": CHAT, "messages": []},
    {"url": CHAT, "messages": [{"role": "user", "content": "hi", "tool_calls": [{}]}]},
    {"url": CHAT, "tools": [{}]},
    {"url": CHAT, "top_logprobs": 1},
    {"url": CHAT, "continue_final_message": True},
]
TORN = [b"{", b"[]", b'{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}']


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    folder = tmp_path_factory.mktemp("state")
    with batching(make_tokenizer(folder), folder / "state", sampling_defaults=DEFAULTS) as running:
        yield running


def lines_of(url: str) -> list[bytes]:
    made = [line(f"{at}", **asked) for at, asked in enumerate(ASKED) if asked["url"] == url]
    return [*(json.dumps(each).encode() for each in made), *TORN]


def run_reads(data: bytes, number: int) -> Row | None:
    try:
        return parse_row(data, number, seed=0, facts=ModelDefaults(DEFAULTS))
    except UsageError as error:
        assert str(error).startswith(f"row {number}")
        return None


def batch_takes(check: LineCheck, data: bytes) -> bool:
    try:
        check.line(data)
    except LineError:
        return False
    return True


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_all_take_the_same_lines_with_the_same_sampling(server: Batching, tmp_path: Path, url: str) -> None:
    lines, file = lines_of(url), tmp_path / "in.jsonl"
    rows = [run_reads(data, number) for number, data in enumerate(lines, 1)]
    good = [number for number, row in enumerate(rows, 1) if row is not None]
    assert 2 < len(good) < len(lines) - 2
    check = LineCheck(url, "fake", server.engine.facts, server.manager.limits)
    assert [number for number, data in enumerate(lines, 1) if batch_takes(check, data)] == good
    file.write_bytes(b"\n".join(lines))
    before = len(server.engine.submitted)
    batch = server.until_over(submit(Remote(server.url), file, url))
    assert (batch.request_counts.completed, batch.request_counts.total) == (len(good), len(lines))
    ours = sorted((row.params for row in rows if row is not None), key=repr_of)
    theirs = sorted((stream.sampling for stream in server.engine.submitted[before:]), key=repr_of)
    assert list(map(repr_of, ours)) == list(map(repr_of, theirs))
    assert {params.top_k for params in ours} == {7}, "the model's defaults are everybody's"


def repr_of(params: Any) -> str:
    """All but the seed, which `penstock run` gives to a row that brings none."""
    return repr({name: value for name, value in asdict(params).items() if name != "seed"})


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_what_a_row_of_outputs_has_no_place_for_is_refused_by_name(name: str) -> None:
    given = {"timeout": 5.0, "cache_salt": "x"}.get(name, 1 if name.endswith(("tokens", "logprobs")) else True)
    given = True if name in ("add_special_tokens",) or name.startswith("return_") else given
    data = json.dumps(line("a", **{name: given})).encode()
    with pytest.raises(UsageError, match=rf"{name} is not served by penstock run: .*penstock batch") as caught:
        parse_row(data, 1, seed=0)
    assert caught.value.param == f"body.{name}"
