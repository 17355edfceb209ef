"""What the tests of the almanac's page in a browser share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import Reader, chromium, made_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def ask(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page of the given records."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened: list[Reader] = []

    def of(records: list[dict[str, Any]], address: str = "") -> Reader:
        opened.append(Reader(context.new_page(), made_page(tmp_path / str(len(opened)), records)))
        return opened[-1].open(address)

    yield of
    context.close()
    assert [fault for each in opened for fault in each.faults] == []
