"""The corpus against the real app, connection limits and all, over a fake engine: each status
exactly, no 5xx, no hang, nothing said again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from bad_input_corpus import CANARY, CORPUS, MAX_BODY, NUMBER, Case
from bare_http import exchange
from batch_fake import Batching, batching
from server_fake import make_tokenizer

from penstock.server.openai.http_limits import HttpLimits

pytestmark = pytest.mark.torch

PATHS = ("/tmp", "site-packages", ".py", "Traceback", "penstock.server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tok"))
    folder = tmp_path_factory.mktemp("state")
    with batching(tokenizer, folder, server_limits=HttpLimits(max_body_bytes=MAX_BODY)) as running:
        yield running


def test_the_corpus_is_large_and_its_cases_are_apart() -> None:
    assert len(CORPUS) >= 450
    assert len({case.data for case in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize(
    "case", CORPUS, ids=lambda case: case.name.encode("ascii", "backslashreplace").decode()[:80]
)
def test_case(server: Batching, case: Case) -> None:
    before = len(server.engine.submitted)
    status, body = exchange(server.url, case.data)
    assert status == case.status, body[:600]
    assert not any(path.encode() in body for path in PATHS)
    if status == 200:
        return
    assert len(server.engine.submitted) == before, "it reaches nobody"
    # a field is named by its name
    assert CANARY.encode() not in body or CANARY in str(case.param), body[:600]
    assert str(NUMBER).encode() not in body, body[:600]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 600
    if case.param is not ...:
        assert error["param"] == case.param, error
    if case.code is not ...:
        assert error["code"] == case.code, error


def test_as_lines_of_bulk_they_are_told_as_by_themselves(server: Batching) -> None:
    cases = [
        case
        for case in CORPUS
        if case.status in (400, 404) and (line := _line_of(case)) and b"prompt" in line
    ]
    body = b"".join(_line_of(case) + b"\n" for case in cases)
    before = len(server.engine.submitted)
    answer = server.http.post("/v1/bulk", content=body)
    told = {line["line"]: line for line in map(json.loads, answer.text.splitlines())}
    assert (
        answer.status_code == 200
        and len(cases) > 150
        and told.keys() == set(range(1, len(cases) + 1))
    )
    assert len(server.engine.submitted) == before, "it reaches nobody"
    for number, case in enumerate(cases, start=1):
        error = told[number]["error"]
        assert CANARY not in error["message"] or CANARY in str(case.param)
        if case.param is not ... and "prompt" not in str(case.param):
            # a line takes one prompt
            assert error["param"] in (case.param, "prompt"), (
                case.name,
                error,
            )


def _line_of(case: Case) -> bytes:
    """A completion's body, where it is one line that is read to its end."""
    head, _, body = case.data.partition(b"\r\n\r\n")
    plain = head.startswith(b"POST /v1/completions ") and b"encoding" not in head.lower()
    plain = plain and case.code != "invalid_http"
    return (
        body
        if plain and b"\n" not in body and len(body) < 100_000 and b'"stream"' not in body
        else b""
    )


def test_afterwards_nothing_is_left_and_it_serves(server: Batching) -> None:
    queue = server.running.service.request_limits
    server.running.wait_for(lambda: not server.engine.open)
    assert (
        queue.reqs.total,
        queue.tokens.total,
        server.running.service.intake.receiving.bytes,
    ) == (0, 0, 0)
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
