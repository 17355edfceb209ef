"""Measures the delay of a first token by a schema that is new to the server: milliseconds, over
HTTP.

    python benchmarks/new_schema.py --tokenizer tokenizer.json.gz

A server of a tiny model with a vocabulary of 128,256 answers one request at a time: without a form,
with a new schema, and with the same schema again, by turns. Figures are differences to the request
without a form just before. The schemas are made up; a `large` one has ten properties like a usual
schema. The vocabulary is read once, before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from random_model import SHAPES
from random_schemas import made_schemas, record_of
from whole_api import write_folder

VOCABULARY = 128_256
SEED = 7


def first_token(http: httpx.Client, **form: Any) -> float:
    """Returns the milliseconds to the first event of a stream."""
    begin, first = time.perf_counter(), None
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 2, "stream": True, "structured_outputs": form}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if first is None and line.startswith("data:"):
                first = time.perf_counter() - begin
    if answer.status_code != 200 or first is None:
        raise SystemExit(f"no token came: status {answer.status_code}, for {form}")
    return 1e3 * first


def measure(http: httpx.Client, schemas: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the delays of new and of known schemas."""
    later: dict[str, list[float]] = {"new": [], "known": []}
    for schema in schemas:
        plain = first_token(http)
        for found in later.values():
            found.append(first_token(http, json=schema) - plain)
    return later


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json (.gz too); left out: the demo's, filled up"
    )
    parser.add_argument("--count", type=int, default=100, help="schemas of each kind")
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    usual = made_schemas(options.count, SEED)
    parts = made_schemas(10 * options.count, SEED + 1)
    large = [record_of(parts[at : at + 10]) for at in range(0, len(parts), 10)]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(replace(SHAPES["tiny"], vocab=VOCABULARY), Path(folder), options.tokenizer)
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            folder,
            "--device",
            "cpu",
            "--port",
            str(options.port),
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if not server.stdout.readline().startswith("penstock serves"):
                raise SystemExit("the server did not start: its last words are above")
            with httpx.Client(base_url=f"http://127.0.0.1:{options.port}", timeout=60) as http:
                first_token(http, regex="ab")
                for kind, schemas in (("usual", usual), ("large", large)):
                    for name, found in measure(http, schemas).items():
                        p50, p95 = np.percentile(found, (50, 95))
                        print(
                            f"{kind} schemas, {name:6} p50 {p50:+6.1f} ms, p95 {p95:+6.1f} ms",
                            flush=True,
                        )
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
