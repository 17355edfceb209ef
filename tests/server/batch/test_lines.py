"""The check of a batch's lines: every bad one told by its number, none run, the others run; what a
line is, byte for byte; and the same lines by `penstock run`, by `penstock batch` and by a server's
own check: one acceptance, one sampling."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from batch_fake import CHAT, COMPLETIONS, Batching, batching, jsonl, line
from hypothesis import given
from hypothesis import strategies as st
from server_fake import Facts, make_tokenizer

from penstock.errors import UsageError
from penstock.jobs.input_rows import UNSERVED, ModelDefaults, Row, parse_row
from penstock.jobs.remote import Remote
from penstock.jobs.remote_batch import submit
from penstock.server.batch import bulk
from penstock.server.batch.input_file import (
    BatchJobLimits,
    InputSurvey,
    LineCheck,
    survey,
    verdicts,
)
from penstock.server.openai import batch_line
from penstock.server.openai.batch_line import LineError
from penstock.server.openai.http_limits import LONG_BODY
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

GOOD = line("good")
LIMITS = BatchJobLimits(max_lines=1_000, max_line_bytes=4_096, max_errors=50)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path_factory.mktemp("state"), LIMITS) as running:
        yield running


def raw(text: bytes) -> bytes:
    return body().replace(b'"bad"', text)


def but(**changes: Any) -> bytes:
    changed = {**line("bad"), **changes}
    return json.dumps(
        {name: value for name, value in changed.items() if value is not None}
    ).encode()


def body(**changes: Any) -> bytes:
    return json.dumps(line("bad", **changes)).encode()


BAD = {
    "no JSON": (b"{", "invalid_json_line", None),
    "half a line": (body()[:-5], "invalid_json_line", None),
    "two on one": (body() * 2, "invalid_json_line", None),
    "a list": (b"[]", "invalid_request", None),
    "a number": (b"3", "invalid_request", None),
    "null": (b"null", "invalid_request", None),
    "NaN": (raw(b"NaN"), "invalid_json_line", None),
    "bad UTF-8": (raw(b'"\xff"'), "invalid_json_line", None),
    "half a surrogate": (raw(b'"\\ud800"'), "invalid_json_line", None),
    "NUL": (b"\x00", "invalid_json_line", None),
    "a BOM amid": (b"\xef\xbb\xbf" + body(), "invalid_json_line", None),
    "deep": (but(body="X").replace(b'"X"', b"[" * 3_000), "invalid_json_line", None),
    "no custom_id": (but(custom_id=None), "missing_required_parameter", None),
    "no method": (but(method=None), "missing_required_parameter", None),
    "no url": (but(url=None), "missing_required_parameter", None),
    "no body": (but(body=None), "missing_required_parameter", None),
    "custom_id a number": (but(custom_id=3), "invalid_request", None),
    "custom_id empty": (but(custom_id=""), "invalid_custom_id", "custom_id"),
    "custom_id long": (but(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
    "custom_id again": (but(custom_id="good"), "duplicate_custom_id", "custom_id"),
    "GET": (but(method="GET"), "invalid_method", "method"),
    "post": (but(method="post"), "invalid_method", "method"),
    "another endpoint": (json.dumps(line("bad", CHAT)).encode(), "mismatched_endpoint", "url"),
    "a whole URL": (but(url="http://127.0.0.1/v1/completions"), "mismatched_endpoint", "url"),
    "one field more": (but(priority=1), "invalid_request", None),
    "body a text": (but(body="x"), "invalid_json", None),
    "no prompt": (but(body={"model": "fake"}), "invalid_request", "body.prompt"),
    "no model": (but(body={"prompt": "a"}), "missing_required_parameter", "body.model"),
    "another model": (body(model="gpt-4"), "model_not_found", "body.model"),
    "stream": (body(stream=True), "unsupported_parameter", "body.stream"),
    "temperature": (body(temperature=-1), "invalid_request", "body.temperature"),
    "penalty": (body(repetition_penalty=1e-38), "invalid_request", "body.repetition_penalty"),
    "salt": (body(cache_salt=""), "invalid_request", "body.cache_salt"),
    "empty model": (body(model=""), "missing_required_parameter", "body.model"),
    "timeout": (body(timeout=-1), "invalid_request", "body.timeout"),
    "n": (body(n=0), "invalid_request", "body.n"),
    "n too large": (
        json.dumps(line("bad")).replace('"prompt"', '"n": 1e400, "prompt"').encode(),
        None,
        None,
    ),
    "stops": (body(stop=["a"] * 65), "invalid_request", "body.stop"),
    "long stops": (body(stop=["a" * 1_024, "b" * 1_025]), "invalid_request", "body.stop"),
    "max_tokens": (body(max_tokens=0), "invalid_request", "body.max_tokens"),
    "unknown field": (body(colour="red"), "unknown_parameter", "body.colour"),
    "tools": (body(guided_json={"type": "object"}), "unsupported_parameter", "body.guided_json"),
    "two forms": (
        body(structured_outputs={"regex": "a", "json_object": True}),
        "invalid_request",
        "body.structured_outputs",
    ),
    "too long": (body(user="x" * 5_000), "line_too_long", None),
}


# Those whose line has no custom_id of its own to be told under, and those that are the body's alone
# to answer for.
NAMELESS = (
    set(list(BAD)[: list(BAD).index("no custom_id") + 1])
    | {"too long"}
    | {name for name in BAD if name.startswith("custom_id ")}
)
OF_THE_BODY = list(BAD)[list(BAD).index("body a text") :]
NOT_ONLINE = {"no model", "empty model", "stream", "too long"}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_told_by_its_number_and_the_others_run(server: Batching, name: str) -> None:
    text, code, param = BAD[name]
    other = json.dumps(line("other")).encode()
    batch = server.until_over(
        server.submit(b"\n".join([json.dumps(GOOD).encode(), b"", text, other]))
    )
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1)
    (error,) = batch.errors.data
    assert error.line == 3 and (code is None or (error.code, error.param) == (code, param))
    assert sorted(row["custom_id"] for row in server.rows(batch.output_file_id)) == [
        "good",
        "other",
    ]
    (row,) = server.rows(batch.error_file_id)
    if name in NAMELESS:
        said = {"code": error.code, "message": f"line 3: {error.message}"}
        assert (row["custom_id"], row["response"], row["error"]) == (None, None, said)
        return
    assert row["custom_id"] == "bad" and row["error"] is None
    assert row["response"]["status_code"] == (404 if name == "another model" else 400)
    said = row["response"]["body"]["error"]
    assert said["message"] == error.message and said["param"] == (
        error.param and error.param.removeprefix("body.")
    )


@pytest.mark.parametrize("name", [name for name in OF_THE_BODY if name not in NOT_ONLINE])
def test_a_bad_body_gets_the_routes_own_answer(server: Batching, name: str) -> None:
    text = BAD[name][0]
    content = text.split(b'"body": ', 1)[1][:-1]
    online = server.http.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json"}
    )
    batch = server.until_over(server.submit(json.dumps(GOOD).encode() + b"\n" + text))
    (row,) = server.rows(batch.error_file_id)
    assert (row["response"]["status_code"], row["response"]["body"]) == (
        online.status_code,
        online.json(),
    )


def test_beyond_those_told_in_full_their_numbers_are(server: Batching) -> None:
    content = b"\n".join([b"{"] * 60 + [json.dumps(GOOD).encode()] + [b"{"] * 2)
    batch = server.until_over(server.submit(content))
    errors = batch.errors.data
    assert [error.line for error in errors[:50]] == list(range(1, 51))
    assert (
        errors[50].message == "more lines are bad, 12 of them: 51-60, 62-63" and len(errors) == 51
    )
    said = [row["error"]["message"].split(":")[0] for row in server.rows(batch.error_file_id)]
    assert said == [f"line {number}" for number in [*range(1, 61), 62, 63]]


def test_a_line_needs_no_envelope(server: Batching) -> None:
    plain = [{"custom_id": "a", "prompt": "x", "max_tokens": 2}, {"id": 7, "prompt": "x", "n": 2}]
    other = {"custom_id": "c", "messages": [{"role": "user", "content": "x"}]}
    batch = server.until_over(
        server.submit(jsonl([*plain, other, {"custom_id": 3, "prompt": "x"}]))
    )
    assert [error.code for error in batch.errors.data] == ["mismatched_endpoint", "invalid_request"]
    rows = {row["custom_id"]: row["response"]["body"] for row in server.rows(batch.output_file_id)}
    assert {name: len(body["choices"]) for name, body in rows.items()} == {"a": 1, "7": 2}


def test_a_custom_id_is_the_first_lines_that_has_it(server: Batching) -> None:
    first, again = body(n=0), json.dumps(line("bad")).encode()
    batch = server.until_over(
        server.submit(b"\n".join([first, again, json.dumps(GOOD).encode(), again]))
    )
    assert [error.code for error in batch.errors.data] == ["invalid_request"] + [
        "duplicate_custom_id"
    ] * 2
    rows = server.rows(batch.error_file_id)
    assert [row["custom_id"] for row in rows] == ["bad", None, None]
    assert [row["error"] and row["error"]["message"].split(":")[0] for row in rows] == [
        None,
        "line 2",
        "line 4",
    ]


@pytest.mark.parametrize(
    "lines",
    [[line(str(i), n=0) for i in range(3)], [line(str(i), model="gpt-4") for i in range(3)]],
)
def test_without_a_good_line_a_batch_fails_at_once(
    server: Batching, lines: list[dict[str, Any]]
) -> None:
    batch = server.until_over(server.submit(jsonl(lines)))
    assert (
        batch.status == "failed" and batch.failed_at is not None and batch.request_counts.total == 0
    )
    assert [error.line for error in batch.errors.data] == [1, 2, 3]
    assert batch.output_file_id is batch.error_file_id is None and batch.in_progress_at is None


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\r\n  \n", "empty_file"),
        (b"\xef\xbb\xbf", "empty_file"),
        (jsonl([line(str(i)) for i in range(1_001)]), "too_many_requests"),
    ],
)
def test_a_file_may_be_bad_as_a_whole(server: Batching, content: bytes, code: str) -> None:
    batch = server.until_over(server.submit(content))
    assert batch.status == "failed" and [error.code for error in batch.errors.data] == [code]


def answers(server: Batching, content: bytes, endpoint: str = COMPLETIONS) -> dict[str, Any]:
    batch = server.until_over(server.submit(content, endpoint))
    assert batch.status == "completed", batch.errors
    rows = {row["custom_id"]: row["response"]["body"] for row in server.rows(batch.output_file_id)}
    assert batch.request_counts.total == batch.request_counts.completed == len(rows)
    server.engine.submitted.clear()
    return rows


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n\n"])
def test_ends_and_starts_of_lines(server: Batching, start: bytes, end: bytes) -> None:
    content = start + (end or b"\n").join(json.dumps(line(str(i))).encode() for i in range(3)) + end
    assert sorted(answers(server, content)) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x7f", "\U0001f600", "\u0000"]
)
def test_what_other_readers_take_for_ends_is_text(server: Batching, odd: str) -> None:
    plain = "\\u0000" if odd == "\u0000" else odd
    content = json.dumps(line("x", prompt="AB", echo=True), ensure_ascii=False).replace(
        "AB", f"a{plain}b"
    )
    content = content.replace('"x"', f'"x{plain}"')
    if ord(odd) < 32:
        content = content.replace(odd, f"\\u{ord(odd):04x}")
    rows = answers(server, content.encode())
    assert rows[f"x{odd}"]["choices"][0]["text"] == f"a{odd}babc"


def test_escapes_and_names_are_kept(server: Batching) -> None:
    names = ['"', "\\", "/../..", "\n", "a" * 512, "é", "null", "0", " "]
    assert sorted(answers(server, jsonl([line(name) for name in names]))) == sorted(names)


def test_chats_may_have_what_the_route_takes(server: Batching) -> None:
    rows = answers(
        server,
        jsonl([line("a", CHAT, max_completion_tokens=3, logprobs=True, top_logprobs=2)]),
        CHAT,
    )
    assert len(rows["a"]["choices"][0]["logprobs"]["content"]) == 3


def checked(content: bytes, folder: Path, limits: BatchJobLimits = LIMITS) -> InputSurvey:
    path = folder / "input"
    path.write_bytes(content)
    return asyncio.run(survey(path, LineCheck(COMPLETIONS, "fake", Facts(), limits), limits))  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=60), max_size=12))
def test_any_bytes_are_checked_and_counted(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    content = b"\n".join(lines)
    found = checked(content, tmp_path_factory.mktemp("any"))
    numbers = [
        n
        for n, each in enumerate(content.split(b"\n"), 1)
        if each.removeprefix(b"\xef\xbb\xbf" * (n == 1)).strip()
    ]
    assert found.lines == len(numbers) and not found.good
    assert [error.line for error in found.errors] == (numbers or [None]), (
        "random bytes are never a request"
    )


def test_a_long_line_is_told_though_it_begins_with_nothing(tmp_path: Path) -> None:
    """A blank one is none, however long."""
    found = checked(b" " * 9_000 + body() + b"\n" + b" " * 9_000 + b"\n" + b" " * 9_000, tmp_path)
    assert (found.lines, found.good, [error.code for error in found.errors]) == (
        1,
        0,
        ["line_too_long"],
    )


PIECES = [
    body(),
    body(n=0),
    but(url=None),
    but(custom_id="good"),
    but(custom_id="good", method="GET"),
    b"{",
    b" ",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_each_line_has_one_key_whenever_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("keys") / "input"
    path.write_bytes(b"\n".join(lines))

    async def keys() -> list[str | int]:
        check = LineCheck(COMPLETIONS, "fake", Facts(), LIMITS)  # type: ignore[arg-type]
        found = [each async for each in verdicts(path, check, LIMITS)]
        return [
            number if verdict.custom_id is None else verdict.custom_id for number, verdict in found
        ]

    first = asyncio.run(keys())
    assert len(set(first)) == len(first) == sum(bool(each.strip()) for each in lines)
    assert asyncio.run(keys()) == first


# --- three readers


DEFAULTS = {"temperature": 0.25, "top_k": 7, "max_tokens": 11}
ASKED: list[dict[str, Any]] = [
    {"url": COMPLETIONS},
    {"url": COMPLETIONS, "max_tokens": None, "temperature": 0, "n": 2},
    {
        "url": COMPLETIONS,
        "prompt": [1, 2, 3],
        "logit_bias": {"5": -1},
        "stop": "x",
        "logprobs": 2,
        "seed": 5,
    },
    {
        "url": COMPLETIONS,
        "user": "me",
        "metadata": {"a": "b"},
        "bad_words": [],
        "guided_json": None,
        "best_of": 1,
    },
    {"url": CHAT},
    {"url": CHAT, "allowed_token_ids": [5, 6], "bad_words": ["a", "b c"]},
    {"url": CHAT, "bad_words": [" "]},
    {"url": COMPLETIONS, "allowed_token_ids": []},
    {
        "url": CHAT,
        "max_tokens": None,
        "top_p": 0.5,
        "logprobs": True,
        "top_logprobs": 1,
        "store": False,
    },
    {
        "url": CHAT,
        "max_tokens": None,
        "max_completion_tokens": 4,
        "messages": [{"role": "user", "content": "hi"}],
    },
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
TORN = [
    b"{",
    b"[]",
    b'{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}',
]


@pytest.fixture(scope="module")
def defaulting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
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
def test_all_take_the_same_lines_with_the_same_sampling(
    defaulting: Batching, tmp_path: Path, url: str
) -> None:
    lines, file = lines_of(url), tmp_path / "in.jsonl"
    rows = [run_reads(data, number) for number, data in enumerate(lines, 1)]
    good = [number for number, row in enumerate(rows, 1) if row is not None]
    assert 2 < len(good) < len(lines) - 2
    check = LineCheck(url, "fake", defaulting.engine.facts, defaulting.manager.limits)
    assert [number for number, data in enumerate(lines, 1) if batch_takes(check, data)] == good
    file.write_bytes(b"\n".join(lines))
    before = len(defaulting.engine.submitted)
    batch = defaulting.until_over(submit(Remote(defaulting.url), file, url))
    assert (batch.request_counts.completed, batch.request_counts.total) == (len(good), len(lines))
    ours = sorted((row.params for row in rows if row is not None), key=repr_of)
    theirs = sorted(
        (stream.sampling for stream in defaulting.engine.submitted[before:]), key=repr_of
    )
    assert list(map(repr_of, ours)) == list(map(repr_of, theirs))
    assert {params.top_k for params in ours} == {7}, "the model's defaults are everybody's"


def repr_of(params: Any) -> str:
    """All but the seed, which `penstock run` gives to a row that brings none."""
    return repr({name: value for name, value in asdict(params).items() if name != "seed"})


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_what_a_row_of_outputs_has_no_place_for_is_refused_by_name(name: str) -> None:
    given = {"timeout": 5.0, "cache_salt": "x"}.get(
        name, 1 if name.endswith(("tokens", "logprobs")) else True
    )
    given = True if name in ("add_special_tokens",) or name.startswith("return_") else given
    given = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": "low",
    }.get(name, given)
    url = CHAT if name in ("tools", "reasoning_effort") else COMPLETIONS
    data = json.dumps(line("a", url=url, **{name: given})).encode()
    with pytest.raises(
        UsageError, match=rf"{name} is not served by penstock run: .*penstock batch"
    ) as caught:
        parse_row(data, 1, seed=0)
    assert caught.value.param == f"body.{name}"


def test_the_loop_doesnt_read_a_long_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # by whether a line is long: threads that read it
    said: dict[bool, set[int]] = {
        False: set(),
        True: set(),
    }

    def noted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(body: bytes, *more: Any) -> Any:
            said[len(body) > LONG_BODY].add(threading.get_ident())
            return plain(body, *more)

        return read

    monkeypatch.setattr(batch_line, "read_completion", noted(batch_line.read_completion))
    monkeypatch.setattr(bulk, "read_object", noted(bulk.read_object))
    with batching(make_tokenizer(tmp_path_factory.mktemp("tok")), tmp_path) as server:
        lines = [line("short"), line("long", user="y" * LONG_BODY)]
        batch = server.until_over(server.submit(jsonl(lines)))
        assert batch.status == "completed" and len(server.rows(batch.output_file_id)) == 2
        assert len(said[False]) == 1 and said[True] and not said[True] & said[False]
        said[True].clear()
        bodies = [{"prompt": "a"}, {"prompt": "a", "user": "y" * LONG_BODY}]
        answer = server.http.post("/v1/bulk", content=jsonl(bodies))
        assert answer.status_code == 200 and answer.text.count('"line"') == 2
        assert len(said[False]) == 1 and said[True] and not said[True] & said[False]
