"""Chromium for tests of the almanac's page. A page that reports an error or asks for anything
outside its folder fails.

It knows the page's controls by their ids; not what they should say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.almanac.page.build import build

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DROP = """([name, text]) => {
  const moved = new DataTransfer();
  moved.items.add(new File([text], name, {type: "application/json"}));
  for (const kind of ["dragenter", "dragover", "drop"])
    document.body.dispatchEvent(new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: moved}));
}"""
LONG = 600_000  # milliseconds after which a test that hangs gives up
# Whether the page has shown what its address asks for.
SHOWN = """() => document.title !== "Almanac" &&
  (document.getElementById("view-question").hidden || document.getElementById("answer").textContent !== "")"""


def missing() -> str | None:
    """Why there is no browser for the tests here; None: there is one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the page's tests need playwright: pip install playwright"
    return None if browser_path() else "the page's tests need Chromium: apt-get install chromium"


def browser_path() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def made_page(folder: Path, records: list[dict[str, Any]]) -> Path:
    """The built page of records on paper."""
    root = folder / "records"
    root.mkdir(parents=True)
    for each in records:
        (root / f"{each['run']}.json").write_text(json.dumps(each))
    built = build(root, folder / "page")
    assert built.refused == []
    return folder / "page"


class Reader:
    """Somebody at the page: `page` is Playwright's."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder = page, folder
        page.set_default_timeout(LONG)
        self.faults: list[str] = []
        inside = folder.as_uri() + "/"
        page.on(
            "console",
            lambda told: self._fault(told.type in ("error", "warning"), f"console: {told.text}"),
        )
        page.on("pageerror", lambda error: self._fault(True, f"error: {error}"))
        page.on(
            "request",
            lambda asked: self._fault(_leaves(asked.url, inside), f"request: {asked.url}"),
        )
        page.on(
            "dialog",
            lambda dialog: (self._fault(True, f"dialog: {dialog.message}"), dialog.dismiss()),
        )

    def _fault(self, happened: bool, what: str) -> None:
        if happened:
            self.faults.append(what)

    def open(self, address: str = "") -> Reader:
        self.page.goto("about:blank")
        self.page.goto((self.folder / "index.html").as_uri() + address)
        self.page.wait_for_function(SHOWN)
        return self

    def text(self, selector: str) -> str:
        """What is shown there, with plain spaces."""
        return " ".join(self.page.inner_text(selector).replace("\xa0", " ").split())

    def texts(self, selector: str) -> list[str]:
        return [
            " ".join(each.replace("\xa0", " ").split())
            for each in self.page.locator(selector).all_inner_texts()
        ]

    def choose(self, control: str, value: str) -> None:
        self.page.select_option(f"#{control}", value)

    def ranking(self) -> list[str]:
        return [each.split(" ", 1)[1] for each in self.texts(".rank-name")]

    def drop(self, name: str, text: str) -> None:
        self.page.evaluate(DROP, [name, text])

    def wait(self, selector: str, text: str) -> None:
        self.page.wait_for_function(
            "([where, text]) => [...document.querySelectorAll(where)]"
            ".some((each) => each.innerText.replaceAll('\\u00a0', ' ').includes(text))",
            arg=[selector, text],
        )


def _leaves(url: str, inside: str) -> bool:
    return not url.startswith((inside, "about:", "data:", "blob:"))


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # Without its sandbox: containers give it none, and what it opens here is our own.
        browser = play.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox"], timeout=LONG
        )
        yield browser
        browser.close()
