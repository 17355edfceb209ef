"""Takes pictures of the almanac's page for docs/pictures/, in Chromium.

    python scripts/almanac_pictures.py [--records almanac/records | --made 800]

The pictures show the given records. --made uses made-up records, of machines and numbers that never
were: for looks alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from made_records import made_records
from page_browser import browser_path

from penstock.almanac.page.build import build
from penstock.almanac.record import Record

ROOT = Path(__file__).resolve().parent.parent
# Made-up numbers stand under no real engine's name.
NAMES = {"penstock": "alpha", "vllm": "beta", "sglang": "gamma", "trtllm": "delta"}

# name -> address, width, theme, what is clicked first, whether the whole page is taken
PICTURES: dict[str, tuple[str, int, str, str | None, bool]] = {
    "almanac_question": ("", 1280, "light", None, True),
    "almanac_dark": ("", 1280, "dark", None, False),
    "almanac_narrow": ("", 400, "dark", None, False),
    "almanac_drawer": ("", 1280, "light", ".rank-name", False),
    "almanac_summary": ("#summary", 1280, "light", None, False),
    "almanac_job": ("#job", 1280, "light", None, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=ROOT / "almanac" / "records")
    parser.add_argument("--made", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = build(
            map(renamed, made_records(asked.made)) if asked.made else asked.records, Path(folder)
        )
        print(f"{built.records} records, {len(built.refused)} refused")
        take(Path(folder), asked.out)


def renamed(record: Record) -> Record:
    name = NAMES[record.engine.name]
    engine = record.engine.model_copy(
        update={"name": name, "version": "1.0", "command": f"{name} serve"}
    )
    return record.model_copy(update={"engine": engine})


def take(folder: Path, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for name, (address, width, theme, clicked, whole) in PICTURES.items():
            scheme: Any = theme
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto((folder / "index.html").as_uri() + address)
            page.wait_for_timeout(500)
            if clicked:
                page.click(f"{clicked} >> nth=0")
                page.wait_for_timeout(300)
            page.screenshot(path=out / f"{name}.png", full_page=whole)
            page.close()
            print(out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
