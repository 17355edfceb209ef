"""The sandbox's process: renders chats and tokenises long texts inside limits that the kernel keeps.

`python -m penstock.text.sandbox_process FD`, started by `sandbox` and by nobody else, with its end of a socket pair. A
job comes in, a reply goes out, one at a time; the socket's end is its own. A job that passes its memory gets an answer;
one that passes its processor time ends the process, which says so by how it ended. It also ends, by itself, when a job
has made it grow: what an allocator keeps is given back so. It knows the tokenizer and its templates; no engine.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ContextLengthError, PenstockError, TokenizerError, UsageError

BYTES_A_TOKEN = 2048  # of a text that is tokenised: 400 were seen, and parts of it have six tokens' characters each
CHARACTERS_A_SECOND = 250_000  # that are tokenised; 600,000 to 2,500,000 were seen
LOADING = 8 * 2**30  # bytes of addresses while the tokenizer loads
HEADER = 8  # bytes of a frame's length, before it


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a job may take: bytes, and BYTES_A_TOKEN more for each token of the context; seconds of processor time to
    render, and as many to tokenise, with one more for each CHARACTERS_A_SECOND. grown: bytes above what the process had
    at first, at which it is given up behind a job."""

    memory: int = 512 * 2**20
    seconds: int = 5
    grown: int = 64 * 2**20


class Start(msgspec.Struct):
    """The first frame: what to load, and for a context of how many tokens."""

    folder: str
    vocab_size: int
    limit: int
    bounds: Bounds


class TextJob(msgspec.Struct, tag="texts"):
    """Texts to tokenise. keep: as Tokenizer.encode_prompt's."""

    texts: list[str]
    add_special_tokens: bool = True
    keep: int | None = None


class ChatJob(msgspec.Struct, tag="chat", kw_only=True):
    """A conversation to render and tokenise. The fields are `render`'s, and TextJob's."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False
    keep: int | None = None


Job = TextJob | ChatJob


class Failure(msgspec.Struct):
    """An error of ours, for the other side to raise. kind: a class of KINDS."""

    kind: str
    message: str
    rule: str | None = None
    param: str | None = None


class Reply(msgspec.Struct):
    """What a job came to; to Start, an empty one, whose failure says why no chat can be rendered.

    ids: int32, of each text in turn.   text: of a chat, as rendered.   last: the process ends behind it.
    """

    ids: list[bytes] = []
    text: str = ""
    failure: Failure | None = None
    last: bool = False


KINDS: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (UsageError, ContextLengthError, TokenizerError)
}


def send(channel: socket.socket, word: Start | Job | Reply) -> None:
    channel.sendall(frame(word))


def frame(word: Start | Job | Reply) -> bytearray:
    """Returns the word's bytes with their length before them."""
    data = bytearray(HEADER)
    msgspec.msgpack.Encoder().encode_into(word, data, HEADER)
    data[:HEADER] = (len(data) - HEADER).to_bytes(HEADER, "little")
    return data


def receive(channel: socket.socket) -> bytearray | None:
    """Returns the next frame's payload; None at the socket's end."""
    header = _exactly(channel, HEADER)
    return None if header is None else _exactly(channel, int.from_bytes(header, "little"))


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data


def main() -> int:
    # Ctrl-C, a terminal's end and a service manager's SIGTERM reach the whole group: the parent says when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            return _serve(channel)
        except (BrokenPipeError, ConnectionResetError):  # the parent has gone
            return 0


def _serve(channel: socket.socket) -> int:
    first = receive(channel)
    if first is None:
        return 0
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, LOADING)
    reply = Reply()
    try:
        desk = _Desk(msgspec.msgpack.decode(first, type=Start))
    except PenstockError as error:
        send(channel, Reply(failure=_failure(error), last=True))
        return 0
    try:
        desk.compile()
    except PenstockError as error:
        reply = Reply(failure=_failure(error))
    with ThreadPoolExecutor(1) as thread:
        # Where the tokenizer was loaded a text takes 2.3 times as long: its memory comes from among the vocabulary's.
        return thread.submit(_work, channel, desk, reply).result()


def _work(channel: socket.socket, desk: _Desk, reply: Reply) -> int:
    while True:
        send(channel, reply)
        if reply.last or (payload := receive(channel)) is None:
            return 0
        reply = desk.answer(payload)


class _Desk:
    """The tokenizer, and what a job may take."""

    def __init__(self, start: Start) -> None:
        from penstock.text.tokenizer import Tokenizer

        self.limit, self.bounds = start.limit, start.bounds
        self.tokenizer = Tokenizer.load(Path(start.folder), vocab_size=start.vocab_size)
        self._addresses, self._resident = _memory()
        if self._addresses:
            _limit(resource.RLIMIT_AS, self._addresses + start.bounds.memory + BYTES_A_TOKEN * start.limit)

    def compile(self) -> None:
        """Raises TokenizerError where no chat can be rendered."""
        from penstock.text.chat import pick_template
        from penstock.text.chat_template import compile_template

        self._allow(self.bounds.seconds)
        compile_template(pick_template(self.tokenizer.chat_templates))

    def answer(self, payload: bytearray) -> Reply:
        self._allow(self.bounds.seconds)
        try:
            reply = self._do(msgspec.msgpack.decode(payload, type=Job))
        except PenstockError as error:
            reply = Reply(failure=_failure(error))
        except msgspec.DecodeError as error:
            message = f"messages and template arguments hold what JSON has no word for ({error})"
            reply = Reply(failure=Failure("UsageError", message, param="messages"))
        except MemoryError:
            message = "this takes more memory to render and tokenise than a request may have: send less text"
            reply = Reply(failure=Failure("UsageError", message, param="prompt"), last=True)
        if self._resident:
            reply.last = reply.last or _memory()[1] > self._resident + self.bounds.grown
        return reply

    def _do(self, job: Job) -> Reply:
        texts = [self._render(job)] if isinstance(job, ChatJob) else job.texts
        self._allow(self.bounds.seconds + sum(map(len, texts)) // CHARACTERS_A_SECOND)
        encode, special = self.tokenizer.encode_prompt, job.add_special_tokens
        ids = [array("i", encode(text, self.limit, keep=job.keep, add_special_tokens=special)) for text in texts]
        text = texts[0] if isinstance(job, ChatJob) else ""
        return Reply(ids=[each.tobytes() for each in ids], text=text)

    def _render(self, job: ChatJob) -> str:
        from penstock.text.chat_template import render

        return render(
            self.tokenizer,
            job.messages,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            template_kwargs=job.template_kwargs,
        )

    def _allow(self, seconds: int) -> None:
        """Has the kernel end this process once it has taken so many more seconds of processor time, or one more."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def _failure(error: PenstockError) -> Failure:
    kind = next((name for name, cls in KINDS.items() if type(error) is cls), "UsageError")
    return Failure(kind, str(error), error.rule if isinstance(error, UsageError) else None, error.param)


def _limit(which: int, most: int) -> None:
    """Sets the soft limit, which is what counts; no higher than the hard one that we were started with."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _memory() -> tuple[int, int]:
    """Bytes of addresses and of memory that the process has; (0, 0) where the system doesn't say."""
    if sys.platform != "linux":
        return 0, 0
    file = os.open("/proc/self/statm", os.O_RDONLY)
    addresses, resident = os.read(file, 128).split()[:2]
    os.close(file)
    return int(addresses) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
