"""Sandbox: a process inside limits of memory and time, where chats are rendered and long texts tokenised.

A template and a tokenizer are programs of whoever made the model, and texts come from anybody. What one job takes past
its limits costs that job alone: the process is ended, and another one starts. `Sandbox` waits for its answer as a call
does; `SandboxPool` keeps a few of them for an event loop. It knows processes and jobs; no template, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Sequence

import msgspec

from penstock.errors import CapacityError, FaultError, PenstockError, UsageError
from penstock.text.sandbox_process import HEADER, KINDS, Bounds, Failure, Job, Reply, Start, frame, receive
from penstock.text.tokenizer import Tokenizer

USUAL = Bounds()
PATIENCE = 120.0  # seconds without an answer, by the clock, after which the process is killed: it hangs, or is stopped
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}  # no threads: they would share the limits


class Done:
    """What a job came to. ids: of each text in turn.   text: of a chat, as rendered."""

    def __init__(self, reply: Reply) -> None:
        self.ids = [array("i", ids).tolist() for ids in reply.ids]
        self.text = reply.text


class Sandbox:
    """One process. Made by `open`, in which it is started, or, on an event loop, by SandboxPool."""

    def __init__(self, tokenizer: Tokenizer, limit: int, bounds: Bounds = USUAL) -> None:
        """Starts the process; it loads from now on, and says when it is ready. `limit`: the context, in tokens.
        Raises CapacityError."""
        self._channel, theirs = socket.socketpair()
        self._start = Start(str(tokenizer.folder), tokenizer.vocab_size, limit, bounds)
        self.chat_fault: PenstockError | None = None  # why no chat can be rendered
        self.usable = True
        command = (sys.executable, "-m", "penstock.text.sandbox_process", str(theirs.fileno()))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **_ENVIRONMENT},
                )
        except OSError as error:
            self._channel.close()
            raise CapacityError(
                f"the process that renders chats could not be started: {error.strerror}: free memory or raise the "
                "process limit"
            ) from error

    @classmethod
    def open(cls, tokenizer: Tokenizer, limit: int, bounds: Bounds = USUAL) -> Sandbox:
        """Starts one and waits until it is ready. Raises CapacityError, TokenizerError."""
        sandbox = cls(tokenizer, limit, bounds)
        try:
            sandbox._ready(sandbox._ask(frame(sandbox._start)))
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def run(self, job: Job) -> Done:
        """Does a job. Raises what was wrong with it, and FaultError where the process was ended from outside."""
        return self._done(self._ask(_frame(job)))

    async def open_async(self) -> None:
        """Waits until it is ready, as `open`."""
        self._channel.setblocking(False)
        self._ready(await self._ask_async(frame(self._start)))

    async def run_async(self, job: Job) -> Done:
        """Does a job, as `run`."""
        return self._done(await self._ask_async(_frame(job)))

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self.usable = False
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    # --- the way there and back ---------------------------------------------------------------------------------------

    def _ask(self, data: bytearray) -> bytearray | None:
        self._channel.settimeout(PATIENCE)
        try:
            self._channel.sendall(data)
            return receive(self._channel)
        except OSError:  # it ended, or says nothing: TimeoutError is one
            return None

    async def _ask_async(self, data: bytearray) -> bytearray | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE):
                await loop.sock_sendall(self._channel, data)
                return await self._receive_async(loop)
        except OSError:
            return None

    async def _receive_async(self, loop: asyncio.AbstractEventLoop) -> bytearray | None:
        """As `receive`; a short frame comes in one piece."""
        data = bytearray()
        size = HEADER
        while len(data) < size:
            piece = await loop.sock_recv(self._channel, max(size - len(data), 65_536))
            if not piece:
                return None
            data += piece
            if len(data) >= HEADER:
                size = HEADER + int.from_bytes(data[:HEADER], "little")
        del data[:HEADER]
        return data

    # --- what came back -----------------------------------------------------------------------------------------------

    def _ready(self, payload: bytearray | None) -> None:
        reply = self._reply(payload)
        if reply.failure is not None:
            fault = _error(reply.failure)
            if reply.last:
                raise fault
            self.chat_fault = fault

    def _done(self, payload: bytearray | None) -> Done:
        reply = self._reply(payload)
        if reply.failure is not None:
            raise _error(reply.failure)
        return Done(reply)

    def _reply(self, payload: bytearray | None) -> Reply:
        if payload is None:
            raise self._ended()
        reply = msgspec.msgpack.decode(payload, type=Reply)
        if reply.last:
            self.close()
        return reply

    def _ended(self) -> PenstockError:
        """Why there is no answer. The kernel ends it by SIGXCPU at its time; SIGABRT and SIGSEGV are how libraries take
        a refused allocation, and nesting beyond the stack."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        self.close()
        if code is None or code == -signal.SIGXCPU:
            return UsageError("this takes too long to render and tokenise: send less text", param="prompt")
        if code in (-signal.SIGABRT, -signal.SIGSEGV):
            message = "this takes more memory to render and tokenise than a request may have: send less text"
            return UsageError(message, param="prompt")
        return FaultError(f"the process that renders chats was ended from outside (code {code}): send it again")


class SandboxPool:
    """Sandboxes for an event loop: one is started by `begin`, or by the first job, others when all are busy."""

    def __init__(self, tokenizer: Tokenizer, limit: int, most: int, bounds: Bounds = USUAL) -> None:
        self._tokenizer, self._limit, self._most, self._bounds = tokenizer, limit, most, bounds
        self._idle: asyncio.LifoQueue[Sandbox | PenstockError] = asyncio.LifoQueue()
        self._waiting = 0  # jobs
        self._open: set[Sandbox] = set()  # the busy ones, too
        self._size = 0  # those that are started but not yet open, too
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def begin(self) -> PenstockError | None:
        """Waits until one is there. Returns why no chat can be rendered, where that is so. Raises as `run`."""
        sandbox = await self._take()
        self._idle.put_nowait(sandbox)
        return sandbox.chat_fault

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Does jobs, several at once where there are processes for it, and returns what each came to. Where one fails,
        or nobody waits any more, what was begun goes on and the rest is dropped. Raises what Sandbox.run does, and
        CapacityError where no process can be started."""
        if len(jobs) == 1:
            return [await self._run(jobs[0])]
        tasks = [asyncio.ensure_future(self._run(job)) for job in jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, job: Job) -> Done:
        sandbox = await self._take()
        work = asyncio.create_task(self._use(sandbox, job))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to be told
        return await asyncio.shield(work)

    def close(self) -> None:
        """Ends them all. Idempotent."""
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
        if isinstance(sandbox, PenstockError):
            raise sandbox
        return sandbox

    async def _use(self, sandbox: Sandbox, job: Job) -> Done:
        try:
            return await sandbox.run_async(job)
        finally:
            if sandbox.usable:
                self._idle.put_nowait(sandbox)
            else:
                self._open.discard(sandbox)
                self._size -= 1
                if not self._closed and (self._waiting or not self._size):
                    self._grow()

    def _grow(self) -> None:
        self._size += 1
        task = asyncio.create_task(self._add())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self) -> None:
        """Starts one. Where that fails and there is no other, those who wait are told: they would wait for ever."""
        sandbox = None
        try:
            sandbox = Sandbox(self._tokenizer, self._limit, self._bounds)
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


def _frame(job: Job) -> bytearray:
    try:
        return frame(job)
    except UnicodeEncodeError as error:
        message = f"the text has half a surrogate pair at character {error.start}; send valid Unicode"
        raise UsageError(message, param="prompt") from error
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        message = f"messages and template arguments hold what JSON has no word for, or too large a number ({error})"
        raise UsageError(message, param="messages") from error


def _error(failure: Failure) -> PenstockError:
    kind = KINDS[failure.kind]
    if issubclass(kind, UsageError):
        return kind(failure.message, param=failure.param, rule=failure.rule)
    return kind(failure.message, param=failure.param)
