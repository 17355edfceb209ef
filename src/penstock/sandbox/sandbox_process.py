"""sandbox_process: the process of a Sandbox. Renders chats and tokenises long texts within limits
that the kernel enforces.

sandbox.py starts it as `python -m penstock.sandbox.sandbox_process FD`, with one end of a socket
pair as file descriptor FD. Reads a job and sends a reply, one at a time, until the socket closes. A
job that exceeds its memory gets an error reply; one that exceeds its CPU time ends the process by a
signal. The process also ends by itself after a job that made it grow, since its allocator would
keep the memory. Knows the tokenizer and its templates; no engine.
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

# bytes of memory per token of context; tokenising takes up to 400, and some parts of a text have
# six times as many characters per token
BYTES_A_TOKEN = 2048
# characters that must be tokenised per second of CPU time; 600,000 to 2,500,000 were measured
CHARACTERS_A_SECOND = 250_000
LOADING = 8 * 2**30  # bytes of address space while the tokenizer loads


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a job. memory: bytes, to which BYTES_A_TOKEN per token of the context are added.
    seconds: CPU time to render, and again to tokenise; one second per CHARACTERS_A_SECOND
    characters is added. grown: if the process has grown by more bytes than this since its start, it
    ends after the job."""

    memory: int = 512 * 2**20
    seconds: int = 5
    grown: int = 64 * 2**20


class SandboxStart(msgspec.Struct):
    """First message to the process. folder: folder of the tokenizer; "": no tokenizer, and all jobs
    are PatternJobs. limit: context length in tokens. template: file that replaces the folder's chat
    templates."""

    folder: str
    vocab_size: int
    limit: int
    bounds: Bounds
    template: str | None = None


class TextJob(msgspec.Struct, tag="texts"):
    """A job for the sandbox: texts to tokenise. keep: see Tokenizer.encode_prompt."""

    texts: list[str]
    add_special_tokens: bool = True
    keep: int | None = None


class TellJob(msgspec.Struct, tag="tell"):
    """A job: a text of any length to tokenise for an answer in JSON, with each token's spelling if
    `spelt`. The process makes the JSON itself, since a list of a million ids takes 36 MB in the
    server, and its event loop 0.1 s to write."""

    text: str
    add_special_tokens: bool = True
    spelt: bool = False


class TokensJob(msgspec.Struct, tag="tokens"):
    """A job: token ids (int32) to decode, including special tokens. The reply holds only text."""

    ids: bytes


class ChatJob(msgspec.Struct, tag="chat", kw_only=True):
    """A job: a conversation to render and tokenise. Fields:
    see chat_template.render and TextJob."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = False
    keep: int | None = None


class GrammarJob(msgspec.Struct, tag="grammar"):
    """A job: checks that the grammar of a structured output is valid. The reply is empty."""

    asked: StructuredOutputsParams


class PatternJob(msgspec.Struct, tag="pattern"):
    """A job: compiles a regex, and searches for it in `text` if that is given. seconds: CPU time
    for the search. The reply has the match and the seconds taken."""

    pattern: str
    text: str | None = None
    seconds: float = 0.0


Job = TextJob | TellJob | TokensJob | ChatJob | GrammarJob | PatternJob


class Reply(msgspec.Struct):
    """The result of a job. The reply to SandboxStart is empty; its failure says why no chat can be
    rendered.

    ids: token ids of each text. text: the rendered chat. told: JSON of a TellJob. answer, seconds:
    match of a PatternJob and its CPU time. last: True if the process ends after this reply.
    """

    ids: list[list[int]] = []
    text: str = ""
    told: bytes = b""
    answer: str | None = None
    seconds: float = 0.0
    failure: CarriedError | None = None
    last: bool = False


# error classes that are sent as they are; other PenstockErrors become a UsageError
KINDS = (
    UsageError,
    ContextLengthError,
    TokenizerError,
)


# made once, since making the decoder for all kinds of jobs takes six times as long as decoding a
# job
_REPLY, _JOB = msgspec.msgpack.Decoder(Reply), msgspec.msgpack.Decoder(Job)


def read_reply(data: bytearray | memoryview) -> Reply:
    """Decodes a sandbox's reply to a job."""
    return _REPLY.decode(data)


class Tokens(msgspec.Struct):
    """The answer of vLLM's /tokenize. token_strs: the tokens' texts, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


def tokens_json(ids: list[int], limit: int, spelling: Tokenizer | None) -> bytes:
    """Returns a text's Tokens as JSON. limit: context length in tokens. spelling: tokenizer that
    gives the tokens' texts; None: leave them out."""
    spelt = None
    if spelling is not None:  # decode each distinct token once: a million texts would take 80 MB
        texts = {token: spelling.token_text(token) for token in set(ids)}
        spelt = [*map(texts.__getitem__, ids)]
    return msgspec.json.encode(Tokens(len(ids), limit, ids, spelt))


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
        # Jobs run in another thread than the one that loaded the tokenizer. In that thread a text
        # takes 2.3 times as long, since its memory is allocated between the vocabulary's.
        return thread.submit(_work, channel, desk, reply).result()


def _work(channel: socket.socket, desk: _Desk, reply: Reply) -> int:
    while True:
        channel.sendall(frame(reply))
        if reply.last or (data := receive(channel)) is None:
            return 0
        reply = desk.answer(data)


class _Desk:
    """Does the jobs. Holds the tokenizer, and the limits of a job."""

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
        self._seconds = 0  # seconds of CPU time that the process may have used so far
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
            # a bug fails this job alone, not the process
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
        """Has the kernel end this process after `seconds` (up to one more) of further CPU time,
        with SIGXCPU."""
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
