"""One HTTP exchange: body in, streams of the engine, answer out; and what ends it early.

A client that goes away, a server that shuts down and an engine that dies all end here, and whatever ends it, every
stream is cancelled. It knows the engine by its client alone; what bodies and answers look like is forms', translate's
and answers'.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.engine.watchdog import DUMP_AT
from penstock.errors import FaultError, PenstockError
from penstock.request import Delta
from penstock.server.account import Account
from penstock.server.admission import QUEUED_A_ROW, QUEUED_TOKENS, Queue, Ticket
from penstock.server.answers import DONE, Answer, ChatAnswer, CompletionAnswer
from penstock.server.doors import key_of
from penstock.server.forms import ChatForm, CompletionForm, read_chat, read_completion
from penstock.server.keys import Key
from penstock.server.limits import Intake, Limits
from penstock.server.metrics import Metrics
from penstock.server.refusals import (
    CLOSED_BY_CLIENT,
    FAILED,
    HttpError,
    ModelNotFoundError,
    SampleError,
    ShuttingDownError,
    TooLateError,
    body_of,
    status_of,
)
from penstock.server.spelling import Spellings
from penstock.server.translate import Aside, Call, chat_call, completion_call, size_of
from penstock.server.whole import JSON, PIECE, Pace, Whole, Wholes

if TYPE_CHECKING:
    from penstock.engine.async_client import AsyncClient, Stream
    from penstock.engine.open import EngineFacts
    from penstock.server.batch_desk import Desk
    from penstock.text.tokenizer import Tokenizer

NO_TENANT = 0  # whose requests are where there are no keys; those count from 1
PORTION = 64  # events that are made before it is looked at how many bytes they are
Result = TypeVar("Result")
Form = TypeVar("Form", CompletionForm, ChatForm)


@dataclass(slots=True, kw_only=True)
class Service:
    """What every route is handed. `closing` is set when running requests have to end. `servers`: how many processes
    share the engine; `keys`: the API keys that share it, and the queue."""

    client: AsyncClient
    model: str
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    created: int = field(default_factory=lambda: int(time.time()))
    servers: int = 1
    keys: Sequence[Key] = ()
    queue: Queue = field(init=False)
    intake: Intake = field(init=False)
    spellings: Spellings = field(init=False)
    wholes: Wholes = field(init=False)
    _tenants: dict[str, int] = field(init=False)
    pace: Pace = field(default_factory=Pace, init=False)
    threads: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor, init=False)  # the loop's end waits for none
    desk: Desk | None = None  # of files and batches, where there is a state folder

    def __post_init__(self) -> None:
        self.spellings = Spellings(self.client.tokenizer, self.client.facts.vocab_size)
        self.intake = Intake(self.limits)
        self.wholes = Wholes(self.limits.max_answer_bytes // self.servers)
        reqs, tokens = self.limits.max_num_queued_reqs, self.limits.max_num_queued_tokens
        reqs = QUEUED_A_ROW * self.client.facts.max_num_seqs if reqs is None else reqs
        self.queue = Queue(reqs, QUEUED_TOKENS if tokens is None else tokens, len(self.keys), self.servers)
        self._tenants = {key.name: key.number for key in self.keys}

    @property
    def ready(self) -> bool:
        return self.client.alive and not self.closing.is_set()

    def engine_state(self) -> tuple[dict[str, Any], bool]:
        """What is known of the engine, and whether that is well: it lives, and completes steps while it has work."""
        age, allowed = self.client.step_age, self.limits.step_timeout
        well = self.client.alive and age < allowed * DUMP_AT
        return {"alive": self.client.alive, "seconds_since_step": round(age, 3), "step_timeout": allowed}, well

    def deadline(self, asked: float | None) -> float | None:
        """Of a request whose body is here, on the loop's clock: its own `timeout`, but no later than the server's."""
        allowed = [seconds for seconds in (asked, self.limits.request_seconds) if seconds is not None]
        return asyncio.get_running_loop().time() + min(allowed) if allowed else None

    def aside(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Long work, in a thread."""
        return asyncio.get_running_loop().run_in_executor(self.threads, work)

    def tenant_of(self, owner: str) -> int:
        """Whose a batch's requests are for the engine: its key's, as that key's others; nobody's if the key is gone."""
        return self._tenants.get(owner, NO_TENANT)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            message = f"the model asked for is not served here; this server has {self.model}: ask for it by that name"
            raise ModelNotFoundError(message, param="model")


class ClientGoneError(Exception):
    """The client closed its connection before its answer was whole."""


class Running:
    """The streams of one call, one a prompt, from submission to their end; its place in the queue goes with them.
    background: nobody waits for it (a batch's line), so its time is no latency."""

    def __init__(self, service: Service, call: Call, ticket: Ticket | None = None, *, background: bool = False) -> None:
        self.call, self.ticket = call, ticket
        self.account = Account(service.metrics, call, background=background)
        self._open = True
        self.streams: list[Stream] = []
        try:
            for prompt in call.prompts:
                stream = service.client.submit(
                    prompt.ids,
                    call.sampling,
                    stream=call.stream,
                    background=background,
                    tenant=call.tenant,
                    salt=call.salt,
                )
                self.streams.append(stream)
        except BaseException:
            self.cancel()
            raise

    async def steps(self) -> AsyncIterator[list[tuple[int, list[Delta]]]]:
        """What there is to send, as it comes: (prompt, its deltas), several prompts' together. Raises PenstockError."""
        if len(self.streams) == 1:
            async for deltas in self.streams[0]:
                self._note(0, deltas)
                yield [(0, deltas)]
        else:
            async for step in _merged(self.streams):
                for at, deltas in step:
                    self._note(at, deltas)
                yield step
        self._open = False
        self._leave()
        self.account.close(self.streams)

    def cancel(self) -> None:
        """Ends what still runs; nothing after the last delta."""
        if self._open:
            for stream in self.streams:
                stream.cancel()
            self._open = False
            self.account.cut()
            self._leave()

    @property
    def cached(self) -> int:
        return sum(stream.num_cached_tokens for stream in self.streams)

    def _leave(self) -> None:
        if self.ticket is not None:
            self.ticket.leave()

    def _note(self, at: int, deltas: Sequence[Delta]) -> None:
        self.account.note(at, deltas)
        for delta in deltas:
            if delta.error is not None:
                raise SampleError(delta.error)
            if delta.finish_reason is not None and self.ticket is not None:
                self.ticket.ended(1)


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[list[tuple[int, list[Delta]]]]:
    """The deltas of several streams; what came in one turn of the loop is handed on together."""
    queue: asyncio.Queue[tuple[int, list[Delta] | BaseException | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(at, stream, queue)) for at, stream in enumerate(streams)]
    running = len(streams)
    try:
        while running:
            came = [await queue.get()]
            while not queue.empty():
                came.append(queue.get_nowait())
            step: list[tuple[int, list[Delta]]] = []
            for at, what in came:
                if isinstance(what, BaseException):
                    raise what
                if what is None:
                    running -= 1
                else:
                    step.append((at, what))
            if step:
                yield step
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(at: int, stream: Stream, queue: asyncio.Queue[tuple[int, list[Delta] | BaseException | None]]) -> None:
    try:
        async for deltas in stream:
            queue.put_nowait((at, deltas))
    except Exception as error:  # noqa: BLE001 - handed on, and raised where the streams are read
        queue.put_nowait((at, error))
    else:
        queue.put_nowait((at, None))


async def until_gone(
    work: Awaitable[Result], receive: Receive, closing: asyncio.Event, deadline: float | None = None
) -> Result:
    """Runs `work`. Raises ClientGoneError if the client leaves first, ShuttingDownError if the server does,
    TooLateError at the deadline; the work is cancelled then, and has ended when this raises."""
    left = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0)
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    shut = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((task, gone, shut), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        if gone.done():
            raise ClientGoneError
        if deadline is not None and not shut.done():
            raise TooLateError
        raise ShuttingDownError("the server is shutting down: send the request again, to another one")
    finally:
        for each in (task, gone, shut):
            each.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a running call: one `send` a step, as bytes, or one for about PIECE of them."""

    def __init__(self, service: Service, running: Running, answer: Answer, deadline: float | None) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-request-id": answer.id}
        )
        del self.headers["content-length"]  # not known ahead
        self._service, self._running, self._answer = service, running, answer
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = b""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = await until_gone(self._write(send), receive, self._service.closing, self._deadline)
        except PenstockError as error:  # the status is sent; the error comes as an event, as clients expect it
            last = b"data: " + body_of(error) + b"\n\n"
        except ClientGoneError:
            return
        except Exception:  # a fault of ours: said to this client, raised again for the log; no other request's matter
            self._running.cancel()
            last = b"data: " + body_of(FaultError(FAILED)) + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})
            raise
        finally:
            self._running.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send) -> bytes:
        running, event = self._running, self._answer.event
        n = running.call.sampling.n
        async for step in running.steps():
            pieces: list[bytes] = []
            size = 0
            for at, deltas in step:
                positions = running.streams[at].prompt_logprobs
                for begin in range(0, len(deltas), PORTION):
                    made = [event(at * n + delta.index, delta, positions) for delta in deltas[begin : begin + PORTION]]
                    pieces += made
                    size += sum(map(len, made))
                    if size >= PIECE:  # first events may say a whole prompt again, each of them
                        await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
                        pieces, size = [], 0
            if size:
                await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
        if not running.call.include_usage:
            return DONE
        return self._answer.usage_event(self._answer.usage(running.account.made, running.cached)) + DONE


async def whole(service: Service, running: Running, answer: Answer) -> list[bytes]:
    """The body in pieces. A choice becomes bytes when its sample ends, so that little is left to do at the last end.
    Raises PenstockError; AnswerTooLargeError where there is no room for what is there of it."""
    n, pace = running.call.sampling.n, service.pace
    likely = 1 + (running.call.logprobs or 0)
    with service.wholes.hold([b""] * running.call.choices) as held:
        async for step in running.steps():
            for at, deltas in step:
                positions = running.streams[at].prompt_logprobs
                for delta in deltas:
                    choice = at * n + delta.index
                    held.put(choice, answer.choice(choice, delta, positions))
                    await pace.spend(len(delta.token_ids) * likely)
        held.check()
        return answer.body(held.pieces, answer.usage(running.account.made, running.cached))


async def post_completions(service: Service, request: Request) -> Response:
    """POST /v1/completions. Raises PenstockError."""
    return await _post(service, request, read_completion, completion_call, CompletionAnswer)


async def post_chat(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions. Raises PenstockError."""
    return await _post(service, request, read_chat, chat_call, ChatAnswer)


async def _post(
    service: Service,
    request: Request,
    read: Callable[[bytearray, Limits], Form],
    call_of: Callable[[Form, EngineFacts, Tokenizer | None, Aside], Awaitable[Call]],
    answer_of: Callable[[Call, str, Spellings], Answer],
) -> Response:
    """A request from its body on. The queue is asked before the body is read, and again before it is tokenised."""
    key = key_of(request.scope)
    service.queue.knock(key)
    form = read(await service.intake.read(request), service.limits)
    deadline = service.deadline(form.timeout)
    service.check_model(form.model)
    ticket = service.queue.enter(key, *size_of(form))

    def aside(work: Callable[[], Result]) -> Awaitable[Result]:
        thread = service.aside(work)
        ticket.stay(thread)
        return until_gone(asyncio.shield(thread), request.receive, service.closing, deadline)

    try:
        call = await call_of(form, service.client.facts, service.client.tokenizer, aside)
        call.tenant = NO_TENANT if key is None else key.number
        ticket.settle(call.prompt_tokens)
        answer = answer_of(call, service.model, service.spellings)
        return await _respond(service, request, await _start(service, call, answer, ticket), answer, deadline)
    except ClientGoneError:
        ticket.leave()
        return Response(status_code=CLOSED_BY_CLIENT)
    except BaseException:
        ticket.leave()
        raise


async def _start(service: Service, call: Call, answer: Answer, ticket: Ticket) -> Running:
    if call.logprobs is not None:
        await service.spellings.of(as_ids=call.tokens_as_ids).prepare(chat=isinstance(answer, ChatAnswer))
    return Running(service, call, ticket)


async def _respond(
    service: Service, request: Request, running: Running, answer: Answer, deadline: float | None
) -> Response:
    request.state.account = running.account  # for the access log
    if running.call.stream:
        return EventStream(service, running, answer, deadline)
    try:
        pieces = await until_gone(whole(service, running, answer), request.receive, service.closing, deadline)
    finally:
        running.cancel()
    return Whole(service.wholes, pieces, answer.id)


def refuse(error: PenstockError) -> Response:
    """The answer to a request that ended in an error of ours."""
    headers = error.headers if isinstance(error, HttpError) else None
    return Response(body_of(error), status_of(error), headers, media_type=JSON)
