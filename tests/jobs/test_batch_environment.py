"""Where `penstock batch` asks: its own variables, else those that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.jobs import remote


@pytest.mark.parametrize(
    ("environment", "options", "asked"),
    [
        ({}, [], ("http://127.0.0.1:8000", None)),
        ({"OPENAI_BASE_URL": "http://a:1/v1", "OPENAI_API_KEY": "k"}, [], ("http://a:1/v1", "k")),
        (
            {
                "OPENAI_BASE_URL": "http://a:1/v1",
                "OPENAI_API_KEY": "k",
                "PENSTOCK_URL": "http://b:2",
                "PENSTOCK_API_KEY": "p",
            },
            [],
            ("http://b:2", "p"),
        ),
        ({"OPENAI_BASE_URL": "http://a:1/v1"}, ["--url", "http://c:3"], ("http://c:3", None)),
    ],
)
@pytest.mark.parametrize(
    "words", [["watch", "batch_1"], ["cancel", "batch_1"], ["fetch", "batch_1", "out.jsonl"]]
)
def test_the_environment_is_read(
    words: list[str],
    environment: dict[str, str],
    options: list[str],
    asked: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    class AskedError(Exception):
        """Ends a command where it would ask."""

    def note(url: str, api_key: str | None) -> None:
        seen.append((url, api_key))
        raise AskedError

    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PENSTOCK_URL", "PENSTOCK_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "Remote", note)
    ended = CliRunner().invoke(app, ["batch", *words, *options])
    assert isinstance(ended.exception, AskedError) and seen == [asked]
