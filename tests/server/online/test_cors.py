"""Pages of other sites: a preflight without a key, headers on every answer, and origins that cannot
be."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from bare_http import connect, read_all
from server_fake import make_tokenizer, running_server
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import UsageError
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy, check_origins

pytestmark = pytest.mark.torch

PAGE, OTHER = "https://app.example", "https://app.example.evil"
ASKS = {  # what a browser sends before the official client's request
    "access-control-request-method": "POST",
    "access-control-request-headers": (
        "authorization,content-type,x-stainless-arch,x-stainless-lang"
    ),
}
BODY = {"prompt": [5, 6], "max_tokens": 2, "stream": True}
ALLOWED, SHOWN = "access-control-allow-origin", "access-control-expose-headers"


@pytest.mark.parametrize("key", ["secret", None])
def test_a_page_of_an_allowed_origin_is_answered_and_no_other(
    tmp_path: Path, key: str | None
) -> None:
    access = AccessPolicy(
        keys=gather_keys([key] if key else (), None, {}), origins=check_origins([PAGE])
    )
    with (
        running_server(make_tokenizer(tmp_path), access=access) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        asked = http.options("/v1/completions", headers={"origin": PAGE, **ASKS})
        assert asked.status_code == 200 and asked.headers[ALLOWED] == PAGE
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert (
            asked.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
        )
        assert "access-control-allow-credentials" not in asked.headers
        local = http.options(
            "/v1/models",
            headers={"origin": PAGE, **ASKS, "access-control-request-private-network": "true"},
        )
        assert local.headers["access-control-allow-private-network"] == "true"

        refused = http.options("/v1/completions", headers={"origin": OTHER, **ASKS})
        assert refused.status_code == 403 and ALLOWED not in refused.headers
        assert "--allowed-origin" in refused.json()["error"]["message"]

        head = {"authorization": f"Bearer {key}"} if key else {}
        answer = http.post("/v1/completions", json=BODY, headers={"origin": PAGE, **head})
        assert (
            answer.status_code == 200 and answer.headers[ALLOWED] == PAGE and "data:" in answer.text
        )
        assert "x-request-id" in answer.headers[SHOWN] and "Origin" in answer.headers["vary"]
        for path, status in (("/v1/nowhere", 404), ("/v1/completions", 405)):
            missing = http.get(path, headers={"origin": PAGE, **head})
            assert missing.status_code == status and missing.headers[ALLOWED] == PAGE
        if key:
            unknown = http.get("/v1/models", headers={"origin": PAGE})
            assert unknown.status_code == 401 and unknown.headers[ALLOWED] == PAGE
        elsewhere = http.get("/v1/models", headers={"origin": OTHER, **head})
        assert ALLOWED not in elsewhere.headers and elsewhere.status_code == (200 if key else 403)
        with connect(server.url) as early:  # refused by the connection, around the application
            early.sendall(
                f"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: {PAGE}\r\nX: {'x' * 70_000}\r\n\r\n".encode()
            )
            assert f"{ALLOWED}: {PAGE}".encode() in read_all(early)


def test_without_origins_nothing_is_sent(tmp_path: Path) -> None:
    with (
        running_server(make_tokenizer(tmp_path)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        own = http.get("/v1/models", headers={"origin": server.url})
        assert own.status_code == 200 and not any(
            name.startswith("access-control") for name in own.headers
        )
        assert http.options("/v1/models", headers={"origin": PAGE, **ASKS}).status_code == 403


def test_origins_are_compared_as_browsers_write_them() -> None:
    given = [
        "HTTPS://App.Example:443",
        "http://localhost:3000",
        "http://[::1]:80",
        "chrome-extension://abc",
    ]
    wanted = (
        "https://app.example",
        "http://localhost:3000",
        "http://[::1]",
        "chrome-extension://abc",
    )
    assert check_origins(given) == wanted


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("https://app.example/chat", "has a path: leave '/chat' out"),
        ("https://app.example/", "leave '/' out"),
        ("app.example", "has no scheme"),
        ("null", "has no scheme"),
        ("*", "every page"),
        ("https://", "names no host"),
        ("https://a b", "names no host"),
        ("https://a:99999", "names no host"),
        ("https://user@a", "names no host"),
    ],
)
def test_origins_that_cannot_be_are_one_line(origin: str, said: str) -> None:
    with pytest.raises(UsageError, match="--allowed-origin"):
        check_origins([origin])
    ended = CliRunner().invoke(app, ["serve", "no-such-model", "--allowed-origin", origin])
    assert ended.exit_code == 2 and said in ended.output and ended.output.count("\n") == 1, (
        ended.output
    )
