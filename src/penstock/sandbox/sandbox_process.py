"""sandbox_process: renders chats and tokenises long texts inside limits that the kernel enforces.

`python -m penstock.sandbox.sandbox_process FD`, started only by sandbox.py, with its end of a
socket pair. Reads a job and sends a reply, one at a time, until the socket closes. A job that
exceeds its memory gets an error reply; one that exceeds its CPU time ends the process by a signal.
The process also ends by itself when a job has made it grow, to return memory held by an allocator.
Knows the tokenizer and its templates; no engine.
"""

from __future__ import annotations

import resource
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.children.carried_error import CarriedError
from penstock.children.frames import frame, receive
from penstock.children.lifetime import leave_signals
from penstock.children.process_limits import ProcessMemory, bound
from penstock.errors import ContextLengthError, PenstockError, TokenizerError, UsageError
from penstock.request import StructuredOutputsParams

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

# bytes of memory per token of context: tokenising was seen to take 400, and parts of a text have
# six times as many characters per token
BYTES_A_TOKEN = 2048
# characters tokenised per second of CPU time; 600,000 to 2,500,000 were measured
CHARACTERS_A_SECOND = 250_000
LOADING = 8 * 2**30  # bytes of address space while the tokenizer loads


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a job. memory: bytes, plus BYTES_A_TOKEN per token of the context. seconds: CPU
    time to render, and again to tokenise, plus one second per CHARACTERS_A_SECOND characters.
    grown: bytes of growth since the start after which the process ends behind a job."""

    memory: int = 512 * 2**20
    seconds: int = 5
    grown: int = 64 * 2**20


class SandboxStart(msgspec.Struct):
    """The first message. folder: the tokenizer's; empty: no tokenizer, all jobs are PatternJobs.
    limit: context length in tokens. template: a file that replaces the folder's chat templates."""

    folder: str
    vocab_size: int
    limit: int
    bounds: Bounds
    template: str | None = None


class TextJob(msgspec.Struct, tag="texts"):
    """Texts to tokenise. keep: see Tokenizer.encode_prompt."""

    texts: list[str]
    add_special_tokens: bool = True
    keep: int | None = None


class TellJob(msgspec.Struct, tag="tell"):
    """A text of any length to tokenise for a reply in JSON, with each token's spelling if `spelt`.
    The process makes the JSON: a million ids in a list take a server 36 MB, and its loop 0.1 s to
    write."""

    text: str
    add_special_tokens: bool = True
    spelt: bool = False


class TokensJob(msgspec.Struct, tag="tokens"):
    """Token ids, int32, to decode, special tokens included. The reply has no ids."""

    ids: bytes


class ChatJob(msgspec.Struct, tag="chat", kw_only=True):
    """A conversation to render and tokenise. The fields are those of `render` and TextJob."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = False
    keep: int | None = None


class GrammarJob(msgspec.Struct, tag="grammar"):
    """A structured output to check: whether its grammar is valid. The reply is empty."""

    asked: StructuredOutputsParams


class PatternJob(msgspec.Struct, tag="pattern"):
    """A regex to compile, and to search for in `text`, if given. seconds: CPU time for the search.
    The reply has the answer and the seconds taken."""

    pattern: str
    text: str | None = None
    seconds: float = 0.0


Job = TextJob | TellJob | TokensJob | ChatJob | GrammarJob | PatternJob


class Reply(msgspec.Struct):
    """The result of a job. The reply to SandboxStart is empty; its failure says why no chat can be
    rendered.

    ids: token ids of each text. text: a rendered chat. told: a TellJob's JSON. answer, seconds: a
    PatternJob's. last: the process ends after this reply.
    """

    ids: list[list[int]] = []
    text: str = ""
    told: bytes = b""
    answer: str | None = None
    seconds: float = 0.0
    failure: CarriedError | None = None
    last: bool = False


# errors passed on with their type; other PenstockErrors become a UsageError
KINDS = (
    UsageError,
    ContextLengthError,
    TokenizerError,
)


# made once: making a decoder for the union of jobs takes six times as long as decoding a job
_REPLY, _JOB = msgspec.msgpack.Decoder(Reply), msgspec.msgpack.Decoder(Job)


def read_reply(data: bytearray | memoryview) -> Reply:
    """Returns the reply in a frame's bytes."""
    return _REPLY.decode(data)


def tokens_json(ids: list[int], limit: int, spelling: Tokenizer | None) -> bytes:
    """Returns vLLM's JSON of a text's tokens. spelling: tokenizer for the tokens' texts; None:
    without texts."""
    spelt = None
    if spelling is not None:  # decode each distinct token once: a million texts would take 80 MB
        texts = {token: spelling.token_text(token) for token in set(ids)}
        spelt = [*map(texts.__getitem__, ids)]
    return msgspec.json.encode(
        {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": spelt}
    )


def main() -> int:
    leave_signals()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            return _serve(channel)
        except (BrokenPipeError, ConnectionResetError):  # the parent has gone
            return 0


def _serve(channel: socket.socket) -> int:
    first = receive(channel)
    if first is None:
        return 0
    bound(resource.RLIMIT_CORE, 0)
    bound(resource.RLIMIT_AS, LOADING)
    reply = Reply()
    try:
        desk = _Desk(msgspec.msgpack.decode(first, type=SandboxStart))
    except PenstockError as error:
        channel.sendall(frame(Reply(failure=_failure(error), last=True)))
        return 0
    try:
        desk.compile()
    except PenstockError as error:
        reply = Reply(failure=_failure(error))
    with ThreadPoolExecutor(1) as thread:
        # In the thread that loaded the tokenizer a text takes 2.3 times as long: its memory is
        # allocated among the vocabulary's.
        return thread.submit(_work, channel, desk, reply).result()


def _work(channel: socket.socket, desk: _Desk, reply: Reply) -> int:
    while True:
        channel.sendall(frame(reply))
        if reply.last or (data := receive(channel)) is None:
            return 0
        reply = desk.answer(data)


class _Desk:
    """The tokenizer, and the limits of jobs."""

    def __init__(self, start: SandboxStart) -> None:
        self.limit, self.bounds = start.limit, start.bounds
        self._tokenizer: Tokenizer | None = None
        if start.folder:
            from penstock.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(
                Path(start.folder), vocab_size=start.vocab_size, chat_template=start.template
            )
        self._memory = ProcessMemory()
        addresses, self._resident = self._memory.read()
        self._seconds = 0  # seconds of CPU time allowed so far
        if addresses:
            bound(resource.RLIMIT_AS, addresses + start.bounds.memory + BYTES_A_TOKEN * start.limit)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "a process without a tokenizer has jobs without texts"
        return self._tokenizer

    def compile(self) -> None:
        """Compiles the chat template. Raises TokenizerError if no chat can be rendered."""
        if self._tokenizer is None:
            return
        from penstock.text.chat import pick_template
        from penstock.text.chat_template import compile_template

        self._allow(self.bounds.seconds)
        compile_template(pick_template(self.tokenizer.chat_templates))

    def answer(self, data: bytearray) -> Reply:
        self._allow(self.bounds.seconds)
        try:
            reply = self._do(_JOB.decode(data))
        except PenstockError as error:
            reply = Reply(failure=_failure(error))
        except msgspec.DecodeError as error:
            message = f"messages and template arguments hold what JSON has no word for ({error})"
            reply = Reply(failure=CarriedError("UsageError", message, "messages"))
        except MemoryError:
            message = (
                "this takes more memory to render and tokenise than a request may have: send less"
                " text"
            )
            reply = Reply(failure=CarriedError("UsageError", message, "prompt"), last=True)
        except Exception as error:  # noqa: BLE001
            # a fault of our own: fails this job alone, not the process
            traceback.print_exception(error)
            reply = Reply(
                failure=CarriedError(
                    "FaultError", "the server failed at this request; its log says how"
                )
            )
        if self._resident:
            reply.last = reply.last or self._memory.read()[1] > self._resident + self.bounds.grown
        return reply

    def _do(self, job: Job) -> Reply:
        if isinstance(job, GrammarJob):
            from penstock.text.grammar import check_grammar

            check_grammar(job.asked)
            return Reply()
        if isinstance(job, TokensJob):
            given = np.frombuffer(job.ids, np.int32)
            self._allow(self.bounds.seconds + given.size // CHARACTERS_A_SECOND)
            return Reply(text=self.tokenizer.decode(given, skip_special_tokens=False))
        if isinstance(job, TellJob):
            self._allow(self.bounds.seconds + len(job.text) // CHARACTERS_A_SECOND)
            found = self.tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens)
            return Reply(told=tokens_json(found, self.limit, self.tokenizer if job.spelt else None))
        if isinstance(job, PatternJob):
            from penstock.text.answer_pattern import AnswerPattern

            pattern = AnswerPattern(job.pattern, job.seconds)
            answer = None if job.text is None else pattern.find(job.text)
            return Reply(answer=answer, seconds=job.seconds - pattern.left)
        texts = [self._render(job)] if isinstance(job, ChatJob) else job.texts
        self._allow(self.bounds.seconds + sum(map(len, texts)) // CHARACTERS_A_SECOND)
        tokenizer, special = self.tokenizer, job.add_special_tokens
        ids = [
            tokenizer.encode_prompt(text, self.limit, keep=job.keep, add_special_tokens=special)
            for text in texts
        ]
        return Reply(ids, texts[0] if isinstance(job, ChatJob) else "")

    def _render(self, job: ChatJob) -> str:
        from penstock.text.chat_template import render

        return render(
            self.tokenizer,
            job.messages,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            template_kwargs=job.template_kwargs,
            tools=job.tools,
        )

    def _allow(self, seconds: int) -> None:
        """Has the kernel end this process after `seconds` (up to one more) of further CPU time."""
        allowed = int(time.process_time()) + 1 + seconds
        if allowed != self._seconds:  # jobs within the same second need no new limit
            bound(resource.RLIMIT_CPU, allowed)
            self._seconds = allowed


def _failure(error: PenstockError) -> CarriedError:
    carried = CarriedError.of(error)
    return (
        carried
        if type(error) in KINDS
        else msgspec.structs.replace(carried, kind=UsageError.__name__)
    )


if __name__ == "__main__":
    sys.exit(main())
