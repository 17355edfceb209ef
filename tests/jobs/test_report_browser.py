"""report.html in a browser: the table of coverage is there whole, at a desk and on a phone. Skipped
without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import page_browser
import pytest

from penstock.jobs.report import render

KS = [1, 2, 4, 8, 16, 32, 64]


def summary() -> dict[str, Any]:
    problem = {
        "problem": 0,
        "question": "How many pebbles does Elena need to have as many as Theo has? " * 3,
        "answer": "501",
        "majority": "501",
        "right": 60,
        "samples": 64,
        "error": None,
    }
    return {
        "problems": 1,
        "samples": 64,
        "coverage": [
            {"k": k, "value": 0.588 + k / 200, "low": 0.5 + k / 999, "high": 0.93} for k in KS
        ],
        "majority_vote": 1.0,
        "finish_reasons": {"stop": 64},
        "mean_length": 12.5,
        "longest": 99,
        "settings": {"model": "demo", "n": 64},
        "speed": {
            "samples": 64,
            "seconds": 9.0,
            "output_tokens_per_second": 5450.0,
            "total_tokens_per_second": 6120.0,
        },
        "per_problem": [problem],
        "failed": [],
    }


def test_a_row_a_k_and_one_spelling_of_per_cent() -> None:
    page = render(summary(), [])
    table = page.split('<table class="coverage">')[1].split("</table>")[0]
    assert re.findall(r'<tr><td class="n">(\d+)</td>', table) == list(map(str, KS))
    shown = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S)
    assert (
        re.findall(r"\d%", shown + page.split("<svg")[1].split("</svg>")[0]) == []
        and "90.8 %" in shown
    )


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (375, 667), (320, 568)])
def test_the_last_column_is_seen(width: int, height: int, tmp_path: Path) -> None:
    if (why := page_browser.missing()) is not None:
        pytest.skip(why)
    (file := tmp_path / "report.html").write_text(render(summary(), []))
    with page_browser.chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(page_browser.LONG)
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (
            "the page is wider than its window"
        )
        for row in page.locator(".coverage tr").all():
            for cell in row.locator("th, td").all():
                box = cell.bounding_box()
                assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
        last = page.locator(".coverage tr").last.inner_text().split()
        assert last[0] == "64"
