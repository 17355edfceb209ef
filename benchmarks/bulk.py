"""Measures the server's cost of a row: in POST /v1/bulk, and in a POST /v1/completions of its own.

    python benchmarks/bulk.py --rows 20000 --tokens 16

Prints rows a second of the server's processor time, and their ratio. Everything is real but the
runner, which keeps a pace (streams_engine.py). The client keeps --connections connections open; the
server's processor time is its process's in /proc, without the engine and the client. Both routes
answer the same rows, and the benchmark fails if either misses one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import streams
from random_tokenizer import write_tokenizer
from streams_engine import MAX_STEPS

VOCABULARY = 128_256
HEAD = "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {size}\r\n\r\n"


def write_folder(folder: Path, args: argparse.Namespace) -> None:
    write_tokenizer(folder, None, VOCABULARY)
    streams.np.zeros(MAX_STEPS).tofile(folder / "steps")
    pace = {
        "rate": args.rate,
        "rows": args.batch,
        "longest": 4096,
        "vocab_size": VOCABULARY,
        "words": list(range(1000, 1100)),
        "log": str(folder / "steps"),
    }
    (folder / "pace.json").write_text(json.dumps(pace))


def bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    draw = random.Random(7)
    words = [
        "the",
        "of",
        "and",
        "to",
        "a",
        "in",
        "is",
        "that",
        "for",
        "it",
        "as",
        "was",
        "with",
        "be",
        "by",
        "on",
    ]
    made: list[dict[str, Any]] = []
    for _ in range(args.rows):
        ids = [draw.randrange(1000, 4000) for _ in range(args.prompt)]
        text = " ".join(draw.choice(words) for _ in range(args.prompt))
        made.append(
            {
                "model": "fake",
                "prompt": text if args.text else ids,
                "max_tokens": args.tokens,
                "temperature": 1.0,
            }
        )
    return made


async def read_head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """Returns the answer's status and its length; None for chunked answers."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].partition("\r\n")[0]
    return int(head.split(" ")[1]), int(length) if length else None


async def one_each(port: int, rows: list[bytes], connections: int) -> int:
    """Sends each row in its own request; returns the number of tokens received."""
    left = iter(rows)

    async def connection() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        tokens = 0
        for body in left:
            writer.write(HEAD.format(path="/v1/completions", size=len(body)).encode() + body)
            status, length = await read_head(reader)
            answer = await reader.readexactly(length or 0)
            if status != 200:
                raise SystemExit(f"a request failed: {answer.decode()}")
            tokens += json.loads(answer)["usage"]["completion_tokens"]
        writer.close()
        return tokens

    return sum(await asyncio.gather(*(connection() for _ in range(connections))))


async def bulk(port: int, body: bytes) -> int:
    """Sends all rows in one request; returns the number of tokens received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    writer.write(HEAD.format(path="/v1/bulk", size=len(body)).encode() + body)
    status, _ = await read_head(reader)
    tokens, rest = 0, b""
    if status != 200:
        raise SystemExit((await reader.read(4096)).decode())
    while size := int(await reader.readline(), 16):
        *lines, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        tokens += sum(json.loads(line)["usage"]["completion_tokens"] for line in lines)
    writer.close()
    return tokens


def server_seconds(pid: int) -> float:
    return sum(cpu for role, cpu in streams._cpu_of(pid).values() if role == "server")


def measure(args: argparse.Namespace) -> dict[str, float]:
    made = bodies(args)
    each = [json.dumps(row).encode() for row in made]
    whole = b"".join(
        json.dumps({"custom_id": f"row-{at}", **row, **args.more}).encode() + b"\n"
        for at, row in enumerate(made)
    )
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, args)
        server, port = streams.start_server(folder, args)
        try:
            for way, work in {
                "one request each": lambda: one_each(port, each, args.connections),
                "bulk": lambda: bulk(port, whole),
            }.items():
                if args.only and way != args.only:
                    continue
                before, begun = server_seconds(server.pid), time.monotonic()
                tokens = asyncio.run(work())
                found[f"{way}: rows a second of the server"] = args.rows / (
                    server_seconds(server.pid) - before
                )
                found[f"{way}: rows a second"] = args.rows / (time.monotonic() - begun)
                if tokens != args.rows * args.tokens:
                    raise SystemExit(f"{way}: {tokens} tokens came, not {args.rows * args.tokens}")
        finally:
            server.terminate()
            server.wait(30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument(
        "--prompt", type=int, default=32, help="tokens of a prompt, or words of one in text"
    )
    parser.add_argument(
        "--text", action="store_true", help="prompts as text; left out: as token ids"
    )
    parser.add_argument(
        "--more",
        type=json.loads,
        default={},
        help='further fields of a bulk line: {"packed": true}',
    )
    parser.add_argument(
        "--only", choices=("one request each", "bulk"), help="measure one of them alone"
    )
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024, help="rows of the engine")
    parser.add_argument("--rate", type=float, default=200.0, help="steps a second")
    parser.add_argument(
        "--under", default=[], type=str.split, help="words before the server's command: a profiler"
    )
    args = parser.parse_args()
    args.api_server_count = 1
    found = measure(args)
    for what, value in found.items():
        print(f"{what:>40}  {value:,.0f}")
    ours, theirs = (
        found.get(f"{way}: rows a second of the server") for way in ("bulk", "one request each")
    )
    if ours and theirs:
        print(f"{'times as many rows':>40}  {ours / theirs:.1f}")


if __name__ == "__main__":
    main()
