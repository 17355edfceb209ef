"""Sandbox: a process with limits on memory and time. It renders chats and tokenises long texts.

Templates and tokenizers are programs by the model's authors, and texts come from anyone. A job that
exceeds its limits fails alone: its process is ended, and another one starts. `Sandbox` blocks until
it has the answer; `SandboxPool` keeps several sandboxes for an event loop. Knows processes and
jobs; no template, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
import subprocess
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from penstock.children.frames import HEADER, PIECE, frame, missing_of, receive
from penstock.children.spawn import QUIET, command_of, how_ended, spawn
from penstock.errors import CapacityError, FaultError, PenstockError, UsageError
from penstock.sandbox.sandbox_process import Bounds, ChatJob, Job, Reply, SandboxStart, read_reply
from penstock.text.tokenizer import Tokenizer

USUAL = Bounds()
# seconds of wall time without an answer after which the process is killed, since it hangs or is
# stopped
PATIENCE = 120.0
# Seconds (whole milliseconds) that an event loop blocks for the answer to a short job. Waiting
# without blocking would take 0.2 ms more, and tokenising such a text in the loop takes 2 ms
# (prompt_ids.LONG_TEXT). After a late answer, as from a slow template, the loop blocks for only one
# job in RETRY + 1, which costs 0.1 ms per job.
HOLD = 0.001
SHORT = 8_192  # bytes of a job for which the loop may block
RETRY = 8  # jobs after a late one until the loop blocks again for jobs of its size
# fields of a ChatJob except its messages -> names of the request parameters
_FIELDS = {
    "template_kwargs": "chat_template_kwargs",
    "tools": "tools",
}
# errors of encoding a value that msgpack cannot represent
_NO_WORDS = (
    TypeError,
    OverflowError,
    RecursionError,
    ValueError,
)
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # no threads, since they would share the process's limits
    "RUST_BACKTRACE": "0",
    # Bytes of freed memory kept by GNU's allocator. By default it kept 64 MB after a long text, so
    # that the process was replaced each time, which costs a second of CPU time.
    "MALLOC_TRIM_THRESHOLD_": str(2**20),
}


class Sandbox:
    """One sandbox process. Made by `open`, which waits until it is ready, or on an event loop by
    SandboxPool."""

    def __init__(
        self, tokenizer: Tokenizer | None, limit: int, bounds: Bounds = USUAL, hold: float = HOLD
    ) -> None:
        """Starts the process, which loads the tokenizer and reports when it is ready. tokenizer:
        None if all jobs are PatternJobs. limit: the context length in tokens. bounds: memory and
        time per job. hold: seconds that `begin` blocks. Raises CapacityError."""
        self._channel, theirs = socket.socketpair()
        self._hold, self._poll = hold, select.poll()
        self._poll.register(self._channel, select.POLLIN)
        # bytes of the last job whose answer was late; number of jobs since then
        self._late, self._since = SHORT, 0
        folder, vocab_size = (
            ("", 0) if tokenizer is None else (str(tokenizer.folder), tokenizer.vocab_size)
        )
        template = (
            None
            if tokenizer is None or tokenizer.template_file is None
            else str(tokenizer.template_file)
        )
        self._start = SandboxStart(folder, vocab_size, limit, bounds, template)
        # why this sandbox can render no chats, or None
        self.chat_fault: PenstockError | None = None
        self.usable = True
        command = command_of("penstock.sandbox.sandbox_process", theirs.fileno())
        try:
            with theirs:
                self._process = spawn(
                    command,
                    "the process that renders chats",
                    fds=(theirs.fileno(),),
                    environment=_ENVIRONMENT,
                    stdout=QUIET,
                )
        except CapacityError:
            self._channel.close()
            raise

    @classmethod
    def open(cls, tokenizer: Tokenizer, limit: int, bounds: Bounds = USUAL) -> Sandbox:
        """Starts a sandbox and waits until it is ready. Raises CapacityError or TokenizerError."""
        sandbox = cls(tokenizer, limit, bounds)
        try:
            sandbox._ready(sandbox._ask(frame(sandbox._start)))
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def run(self, job: Job) -> Reply:
        """Runs a job and returns its reply. Raises the job's error, or FaultError if the process
        was killed from outside."""
        return self._done(self._ask(_frame(job)))

    async def open_async(self) -> None:
        """Waits until the process is ready, like `open`."""
        self._channel.setblocking(False)
        self._ready(await self._ask_async(frame(self._start), bytearray()))

    def begin(self, job: Job) -> Reply | Coroutine[Any, Any, Reply]:
        """Starts a job. Returns its reply if the job is short and answered within `hold` seconds,
        else a coroutine that waits for the reply."""
        data = _frame(job)
        self._since += 1
        if self._since > RETRY:
            self._late = SHORT
        if len(data) >= self._late:
            return self._finish(data, bytearray())
        got = self._ask_soon(data)
        if got is None or not missing_of(got):
            return self._done(got and memoryview(got)[HEADER:])
        self._late, self._since = len(data), 0
        return self._finish(bytearray(), got)

    async def _finish(self, data: bytearray, got: bytearray) -> Reply:
        return self._done(await self._ask_async(data, got))

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self.usable = False
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    # --- sending jobs and receiving replies -------------------------------------------------------

    def _ask(self, data: bytearray) -> bytearray | None:
        self._channel.settimeout(PATIENCE)
        try:
            self._channel.sendall(data)
            return receive(self._channel)
        except OSError:  # the process has ended, or doesn't answer (TimeoutError is an OSError)
            return None

    def _ask_soon(self, data: bytearray) -> bytearray | None:
        """Sends `data` and returns the part of the answer received within `hold` seconds, with its
        length prefix; None if the process has ended."""
        try:
            # a short message fits into the socket's buffer, since no other message is being sent
            self._channel.sendall(data)
            if not self._poll.poll(self._hold * 1000):
                return bytearray()
            return bytearray(self._channel.recv(PIECE)) or None
        except OSError:
            return None

    async def _ask_async(self, data: bytearray, got: bytearray) -> memoryview | None:
        """Sends `data`; returns the answer's bytes without the length prefix. got: part of the
        answer that was already received."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE):
                await loop.sock_sendall(self._channel, data)
                while missing := missing_of(got):
                    piece = await loop.sock_recv(self._channel, max(missing, PIECE))
                    if not piece:
                        return None
                    got += piece
        except OSError:
            return None
        return memoryview(got)[HEADER:]

    # --- what replies mean ------------------------------------------------------------------------

    def _ready(self, data: bytearray | memoryview | None) -> None:
        reply = self._reply(data)
        if reply.failure is not None:
            fault = reply.failure.error()
            if reply.last:
                raise fault
            self.chat_fault = fault

    def _done(self, data: bytearray | memoryview | None) -> Reply:
        reply = self._reply(data)
        if reply.failure is not None:
            raise reply.failure.error()
        return reply

    def _reply(self, data: bytearray | memoryview | None) -> Reply:
        if data is None:
            raise self._ended()
        reply = read_reply(data)
        if reply.last:
            self.close()
        return reply

    def _ended(self) -> PenstockError:
        """Returns the error for a missing answer, from the signal that ended the process. The
        kernel sends SIGXCPU at the time limit. Libraries end in SIGABRT or SIGSEGV after a refused
        allocation or too deep nesting.
        """
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        self.close()
        if code is None or code == -signal.SIGXCPU:
            return UsageError(
                "this takes too long to render and tokenise: send less text, or a simpler chat"
                " template",
                param="prompt",
            )
        if code in (-signal.SIGABRT, -signal.SIGSEGV):
            message = (
                "this takes more memory to render and tokenise than a request may have: send less"
                " text"
            )
            return UsageError(message, param="prompt")
        return FaultError(f"the process that renders chats {how_ended(code)}: send it again")


class SandboxPool:
    """The sandboxes of one event loop. `begin` or the first job starts the first one; another one
    starts when all are busy."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limit: int,
        most: int,
        bounds: Bounds = USUAL,
        hold: float = HOLD,
    ) -> None:
        self._made_of, self._most = (tokenizer, limit, bounds, hold), most
        self._idle: asyncio.LifoQueue[Sandbox | PenstockError] = asyncio.LifoQueue()
        self._waiting = 0  # number of jobs that wait for a sandbox
        self._open: set[Sandbox] = set()  # all ready sandboxes, also busy ones
        self._size = 0  # number of sandboxes, including those that are not ready yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def begin(self) -> PenstockError | None:
        """Waits until a sandbox is ready. Returns why no chat can be rendered, or None. Raises the
        errors of `run`."""
        sandbox = await self._take()
        self._idle.put_nowait(sandbox)
        return sandbox.chat_fault

    def run(self, jobs: Sequence[Job]) -> asyncio.Future[list[Reply]]:
        """Runs jobs, several at once if there are processes for them. Returns a future of their
        replies, which is already done if a single short job was answered within `hold` seconds. If
        a job fails, or the future is cancelled, running jobs go on and the others are dropped. The
        future raises the errors of Sandbox.run, and CapacityError if no process can be started."""
        if len(jobs) == 1 and not self._waiting and not self._idle.empty():
            return self._begin(_there(self._idle.get_nowait()), jobs[0])
        return asyncio.ensure_future(self._run_all(jobs))

    async def _run_all(self, jobs: Sequence[Job]) -> list[Reply]:
        tasks = [asyncio.ensure_future(self._run(job)) for job in jobs]
        try:
            return [reply for (reply,) in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, job: Job) -> list[Reply]:
        return await self._begin(await self._take(), job)

    def _begin(self, sandbox: Sandbox, job: Job) -> asyncio.Future[list[Reply]]:
        begun: Reply | Coroutine[Any, Any, Reply] | Exception
        try:
            begun = sandbox.begin(job)
        except Exception as error:  # noqa: BLE001 - raised by the returned future
            begun = error
        if isinstance(begun, Coroutine):
            work = asyncio.create_task(self._finish(sandbox, begun))
            # retrieves the exception, since the awaiting task may be gone and asyncio would log it
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            return asyncio.shield(work)
        self._put_back(sandbox)
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        if isinstance(begun, Reply):
            future.set_result([begun])
        else:
            future.set_exception(begun)
        return future

    async def _finish(self, sandbox: Sandbox, begun: Coroutine[Any, Any, Reply]) -> list[Reply]:
        try:
            return [await begun]
        finally:
            self._put_back(sandbox)

    def _put_back(self, sandbox: Sandbox) -> None:
        if sandbox.usable:
            self._idle.put_nowait(sandbox)
            return
        self._open.discard(sandbox)
        self._size -= 1
        if not self._closed and (self._waiting or not self._size):
            self._grow()

    def close(self) -> None:
        """Ends all sandboxes. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for sandbox in self._open:
            sandbox.close()
        self._open.clear()

    async def _take(self) -> Sandbox:
        self._waiting += 1
        try:
            if self._idle.empty() and self._size < self._most:
                self._grow()
            sandbox = await self._idle.get()
        finally:
            self._waiting -= 1
        return _there(sandbox)

    def _grow(self) -> None:
        self._size += 1
        task = asyncio.create_task(self._add())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self) -> None:
        """Starts a sandbox. If this fails and there is no other, waiting jobs get the error, since
        they would wait forever otherwise."""
        sandbox = None
        try:
            sandbox = Sandbox(*self._made_of)
            self._open.add(sandbox)
            await sandbox.open_async()
            self._idle.put_nowait(sandbox)
        except PenstockError as error:
            self._size -= 1
            if sandbox is not None:
                self._open.discard(sandbox)
                sandbox.close()
            if not self._size:
                for _ in range(self._waiting):
                    self._idle.put_nowait(error)


def _there(sandbox: Sandbox | PenstockError) -> Sandbox:
    if isinstance(sandbox, PenstockError):
        raise sandbox
    return sandbox


def _frame(job: Job) -> bytearray:
    try:
        return frame(job)
    except UnicodeEncodeError as error:
        message = (
            f"the text has half a surrogate pair at character {error.start}; send valid Unicode"
        )
        raise UsageError(message, param=_fault_of(job, "prompt")) from error
    except _NO_WORDS as error:
        param = _fault_of(job, "messages")
        message = (
            f"{param}: this holds what JSON has no word for, or too large a number ({error}): send"
            " it as text"
        )
        raise UsageError(message, param=param) from error


def _fault_of(job: Job, otherwise: str) -> str:
    """Returns the request parameter that msgpack cannot represent in a chat. otherwise: the result
    for any other job."""
    for name, called in _FIELDS.items() if isinstance(job, ChatJob) else ():
        try:
            msgspec.msgpack.encode(getattr(job, name))
        except _NO_WORDS:
            return called
    return otherwise
