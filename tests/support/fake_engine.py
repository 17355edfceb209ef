"""An engine that can be started, killed and led astray: `python fake_engine.py PORT NAME=VALUE
...`. No model.

first=0.01, gap=0.001    seconds dies_above=N   it ends when more than N requests are there at once;
says=TEXT is its last word less=N         it sends N tokens fewer than asked          ending=WORD
the finish_reason that it tells begins=no      it ends before it serves
count=FILE       its process id is added at each start
hold=FILE        it answers nothing while the file is there
metrics=no       it has no /metrics
most=N           it refuses prompts of more than N tokens
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def with_length(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


class Engine:
    def __init__(self, told: dict[str, str]) -> None:
        self.told = told
        self.there = 0
        self.slots = asyncio.Semaphore(4)  # others queue

    def number(self, name: str, usual: float = float("inf")) -> float:
        return float(self.told.get(name, usual))

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if self.told.get("metrics") == "no" and head.startswith(b"GET /metrics"):
                    writer.write(with_length(b"404 Not Found", b"{}"))
                    continue
                if head.startswith(b"GET"):
                    writer.write(with_length(b"200 OK", b"{}"))
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await self.answer(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def answer(self, asked: dict[str, object], writer: asyncio.StreamWriter) -> None:
        prompt, tokens = asked["prompt"], int(str(asked["max_tokens"]))
        count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)  # type: ignore[arg-type]
        if count > self.number("most"):
            writer.write(with_length(b"400 Bad Request", b'{"error": "too long"}'))
            return
        self.there += 1
        if self.there > self.number("dies_above"):
            print(
                "\x1b[31m" + self.told.get("says", "going down") + "\x1b[0m\u200b\x07", flush=True
            )
            os._exit(7)
        try:
            async with self.slots:
                await self.stream(count, tokens - int(self.number("less", 0)), writer)
        finally:
            self.there -= 1

    async def stream(self, prompt: int, tokens: int, writer: asyncio.StreamWriter) -> None:
        while os.path.exists(self.told.get("hold", "")):
            await asyncio.sleep(0.01)
        writer.write(HEAD)
        await asyncio.sleep(self.number("first", 0.01))
        for at in range(tokens):
            finish = self.told.get("ending", "length") if at == tokens - 1 else None
            event = {"choices": [{"index": 0, "text": "a", "finish_reason": finish}]}
            writer.write(chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
            await asyncio.sleep(self.number("gap", 0.001))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        writer.write(chunk(last) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


async def main() -> None:
    told = dict(word.split("=", 1) for word in sys.argv[2:])
    if "count" in told:
        with open(told["count"], "a") as file:
            file.write(f"{os.getpid()}\n")
    if told.get("begins") == "no":
        print(told.get("says", "no"), flush=True)
        sys.exit(3)
    engine = Engine(told)
    server = await asyncio.start_server(engine.meet, "127.0.0.1", int(sys.argv[1]))
    print(f"serving on {sys.argv[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
