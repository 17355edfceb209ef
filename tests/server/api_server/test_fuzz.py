"""Drawn bodies against the whole application, uploads and lines against what reads them: no 5xx, no
hang.

`make reliability` draws many more of each. What was found once stands below by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz_app import CHAT, COMPLETIONS, RESPONSES, App, canary_free
from fuzz_inputs import (
    BOUNDARY,
    CANARY,
    chats,
    completions,
    examples,
    lines,
    pieces,
    responses,
    rows,
    sometimes_mangled,
    uploads,
)
from fuzz_targets import LineCheck, form, row, split
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

LONG = settings(suppress_health_check=list(HealthCheck))
ENDS = [b"\n", b"\r\n", b"\xe2\x80\xa8", b" ", b"\xef\xbb\xbf", b"\x0b", b"\n\n"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    made = App(tmp_path_factory.mktemp("app"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def check() -> LineCheck:
    return LineCheck()


@settings(LONG, max_examples=examples(120))
@given(body=sometimes_mangled(completions()), data=st.data())
def test_completions(app: App, body: bytes, data: st.DataObject) -> None:
    event(str(app.sample(COMPLETIONS, data.draw(pieces(body)))))


@settings(LONG, max_examples=examples(120))
@given(body=sometimes_mangled(chats()), data=st.data())
def test_chats(app: App, body: bytes, data: st.DataObject) -> None:
    event(str(app.sample(CHAT, data.draw(pieces(body)))))


@settings(LONG, max_examples=examples(80))
@given(body=sometimes_mangled(responses()), data=st.data())
def test_responses(app: App, body: bytes, data: st.DataObject) -> None:
    event(str(app.sample(RESPONSES, data.draw(pieces(body)))))


@settings(LONG, max_examples=examples(60))
@given(
    body=completions() | chats() | responses(), path=st.sampled_from([COMPLETIONS, CHAT, RESPONSES])
)
def test_no_value_is_said_again(app: App, body: bytes, path: str) -> None:
    status, answer = app.ask(path, [body])
    assert status == 200 or canary_free(answer), answer


@settings(LONG, max_examples=examples(100))
@given(upload=uploads(), data=st.data())
def test_an_upload_is_the_same_however_it_comes(
    upload: tuple[bytes, bytes], data: st.DataObject
) -> None:
    kind, body = upload
    whole = form(kind, [body])
    event(str(whole is not None))
    assert form(kind, data.draw(pieces(body))) == whole


def test_an_upload_cut_at_every_byte() -> None:
    kind = f"multipart/form-data; boundary={BOUNDARY}".encode()
    content = b"{}\r\n--x-limi\r\n\r\n--\r"
    parts = {'name="purpose"': b"batch", 'name="file"; filename="a"': content}
    body = b"".join(
        f"--{BOUNDARY}\r\ncontent-disposition: form-data; {name}\r\n\r\n".encode() + part + b"\r\n"
        for name, part in parts.items()
    )
    body += f"--{BOUNDARY}--\r\n".encode()
    for at in range(len(body) + 1):
        assert form(kind, [body[:at], body[at:]]) == ({"purpose": "batch"}, "a", content), at
    assert form(kind, [body[at : at + 1] for at in range(len(body))]) == (
        {"purpose": "batch"},
        "a",
        content,
    )
    assert all(form(kind, [body[:at]]) is None for at in range(len(body) - len("--\r\n")))


# --- lines


@settings(LONG, max_examples=examples(150))
@given(
    data=st.lists(
        st.binary(max_size=20) | st.sampled_from(ENDS),
        max_size=12,
    ).map(b"".join),
    longest=st.integers(1, 20),
    read=st.integers(1, 40),
)
def test_lines_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, longest: int, read: int
) -> None:
    split(tmp_path_factory.getbasetemp() / "lines", data, longest, read)


@settings(LONG, max_examples=examples(120))
@given(
    line=sometimes_mangled(lines()) | st.binary(max_size=40),
    endpoint=st.sampled_from([COMPLETIONS, CHAT]),
)
def test_a_line_is_good_or_a_line_error(check: LineCheck, line: bytes, endpoint: str) -> None:
    event(str(check.good(line, endpoint)))


@settings(LONG, max_examples=examples(120))
@given(line=sometimes_mangled(rows()) | st.binary(max_size=40))
def test_a_row_is_good_or_a_usage_error(line: bytes) -> None:
    event(str(row(line)))


FOUND: list[dict[str, Any]] = [
    {"custom_id": "a", "method": "POST", "url": [], "body": {}},
    {"id": 1, "prompt": "x", "temperature": 10**400},
    {"id": 1, "prompt": "x", "logit_bias": {"1": 10**400}},
    {"id": 1, "messages": [{"role": "assistant", "tool_calls": 5}]},
]


def test_rows_that_were_no_usage_error_once() -> None:
    assert not any(row(json.dumps(found).encode()) for found in FOUND)


def test_a_role_cannot_say_where_it_stands(app: App) -> None:
    message = {"role": f"x' - at `$.{CANARY}", "content": "x"}
    status, answer = app.ask(CHAT, [json.dumps({"messages": [message]}).encode()])
    assert status == 400 and canary_free(answer)
    assert json.loads(answer)["error"]["param"] == "messages[0].role"
