"""Measures the almanac's page with made-up records: size, build time and speed.

    python benchmarks/almanac_page.py [RECORDS] [--out page.json]          default: 2,000 records

Sizes are after gzip at its highest level. Answers are timed in Chromium, if installed: from the
change to the painted frame's layout; the first load of a subject's records counts separately.
Asserts nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from made_records import made_records

from penstock.almanac.page.build import build

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Moves a control and reads a length of the page, which makes the browser lay it out; ms of each of
# 60 moves.
TIMED = """async ([id, values]) => {
  const control = document.getElementById(id), times = [];
  for (let at = 0; at < 60; at++) {
    control.value = values[at % values.length];
    const from = performance.now();
    control.dispatchEvent(new Event(id === "first-slider" ? "input" : "change", {bubbles: true}));
    await Promise.resolve();
    document.body.getBoundingClientRect();
    times.push(performance.now() - from);
    await new Promise(requestAnimationFrame);
  }
  return times.sort((a, b) => a - b);
}"""
# From choosing another length to its answer, records loaded from the disk.
LOADED = """async () => {
  const control = document.getElementById("ask-input"), answer = document.getElementById("answer"), times = [];
  for (const {value} of [...control.options].filter((each) => each.value !== "other")) {
    if (control.value === value) continue;
    const before = answer.textContent, from = performance.now();
    control.value = value;
    control.dispatchEvent(new Event("change", {bubbles: true}));
    const late = from + 2000;
    while (answer.textContent === before && performance.now() < late) await new Promise((go) => setTimeout(go, 1));
    times.push(performance.now() - from);
  }
  return times;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="?", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked.records, Path(folder))
    for name, value in found.items():
        print(f"{name:40} {value}")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))


def measure(count: int, folder: Path) -> dict[str, Any]:
    records, out = folder / "records", folder / "page"
    records.mkdir()
    for record in made_records(count):
        (records / f"{record.engine.name}.{record.run}.json").write_text(
            record.model_dump_json(by_alias=True)
        )
    began, cpu = time.perf_counter(), time.process_time()
    built = build(records, out)
    found: dict[str, Any] = {
        "records": built.records,
        "built in, s": round(time.perf_counter() - began, 2),
        "processor time of that, s": round(time.process_time() - cpu, 2),
    }
    page = ["index.html", "page.css", "page.js", "data/index.js"]
    for name in page:
        found[f"{name}, kB compressed"] = packed(out / name)
    groups = sorted(packed(path) for path in (out / "data").glob("g*.js"))
    found["the page as it opens, kB compressed"] = round(
        sum(packed(out / name) for name in page), 1
    )
    found["a subject's records, kB compressed"] = (
        f"median {groups[len(groups) // 2]}, most {groups[-1]}"
    )
    return found | in_browser(out)


def packed(path: Path) -> float:
    return round(len(gzip.compress(path.read_bytes(), 9)) / 1e3, 1)


def in_browser(out: Path) -> dict[str, Any]:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        return {"answers": "not timed: no Chromium here"}
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto((out / "index.html").as_uri())
        page.wait_for_selector("#ranking li")
        found["opened to its first answer, ms"] = round(1e3 * (time.perf_counter() - began))
        for name, id, values in (
            ("slider", "first-slider", list(range(150, 450, 7))),
            ("share of first tokens", "ask-quantile", ["0.5", "0.9", "0.99"]),
            ("further limits", "ask-pace", ["0.02", "0.05", "0.1"]),
        ):
            times = page.evaluate(TIMED, [id, [str(value) for value in values]])
            found[f"{name}, ms"] = (
                f"median {times[30]:.1f}, p95 {times[56]:.1f}, most {times[-1]:.1f}"
            )
        times = page.evaluate(LOADED)
        found["another subject, loaded, ms"] = ", ".join(f"{each:.0f}" for each in times)
        opened.close()
    return found


if __name__ == "__main__":
    main()
