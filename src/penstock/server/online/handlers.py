"""One HTTP exchange: body in, a call run, answer out as one body or as events.

It knows requests and responses; what bodies and answers look like is forms', translate's and answers', and what ends a
call early is running's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import FaultError, PenstockError
from penstock.server.online.active_call import ActiveCall, ClientGoneError, until_gone
from penstock.server.online.app_state import NO_TENANT, AppState
from penstock.server.online.auth import key_of
from penstock.server.online.buffered import JSON, PIECE, BufferedResponse, ResponseBudget
from penstock.server.online.request_limits import Ticket
from penstock.server.openai.answers import DONE, BaseAnswer, ChatAnswer, CompletionAnswer
from penstock.server.openai.forms import ChatForm, CompletionForm, read_chat, read_completion
from penstock.server.openai.http_errors import CLOSED_BY_CLIENT, FAILED, HttpError, body_of, names_of, status_of
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.prompt_ids import Sandboxed
from penstock.server.openai.token_json import TokenSpellings
from penstock.server.openai.translate import Aside, Call, chat_call, completion_call, size_of

if TYPE_CHECKING:
    from penstock.engine.build_engine import EngineFacts
    from penstock.text.tokenizer import Tokenizer

UNWATCHED = 0.005  # seconds of work for a request in which nobody looks whether its client is still there
PORTION = 64  # events that are made before it is looked at how many bytes they are
Result = TypeVar("Result")
Form = TypeVar("Form", CompletionForm, ChatForm)


class EventStream(Response):
    """Server-sent events of a running call: one `send` a step, as bytes, or one for about PIECE of them."""

    def __init__(self, service: AppState, running: ActiveCall, answer: BaseAnswer, deadline: float | None) -> None:
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


async def whole(
    service: AppState, running: ActiveCall, answer: BaseAnswer, wholes: ResponseBudget | None = None
) -> list[bytes]:
    """The body in pieces, counted among `wholes`, or the service's. A choice becomes bytes when its sample ends, so
    that little is left to do at the last end. Raises PenstockError; AnswerTooLargeError where there is no room for what
    is there of it."""
    n, pace = running.call.sampling.n, service.pace
    likely = 1 + (running.call.logprobs or 0)
    with (wholes or service.wholes).hold([b""] * running.call.choices) as held:
        async for step in running.steps():
            for at, deltas in step:
                positions = running.streams[at].prompt_logprobs
                for delta in deltas:
                    choice = at * n + delta.index
                    held.put(choice, answer.choice(choice, delta, positions))
                    await pace.spend(len(delta.token_ids) * likely)
        held.check()
        return answer.body(held.pieces, answer.usage(running.account.made, running.cached))


async def post_completions(service: AppState, request: Request) -> Response:
    """POST /v1/completions. Raises PenstockError."""
    return await _post(service, request, read_completion, completion_call, CompletionAnswer)


async def post_chat(service: AppState, request: Request) -> Response:
    """POST /v1/chat/completions. Raises PenstockError."""
    return await _post(service, request, read_chat, chat_call, ChatAnswer)


async def _post(
    service: AppState,
    request: Request,
    read: Callable[[bytearray, HttpLimits], Form],
    call_of: Callable[[Form, EngineFacts, Tokenizer | None, Sandboxed, Aside], Awaitable[Call]],
    answer_of: Callable[[Call, str, TokenSpellings], BaseAnswer],
) -> Response:
    """A request from its body on. The queue is asked before the body is read, and again before it is tokenised."""
    key = key_of(request.scope)
    service.queue.knock(key)
    with service.intake.place() as place:  # until all that is left of the body is token ids
        form = read(await service.intake.read(request, place), service.limits)
        deadline = service.deadline(form.timeout)
        service.check_model(form.model)
        ticket = service.queue.enter(key, *size_of(form))

        async def waited(work: Awaitable[Result]) -> Result:
            """Most work is done before it would be worth it to watch the client: that takes 0.2 ms."""
            task = asyncio.ensure_future(work)
            try:
                await asyncio.wait((task,), timeout=UNWATCHED)
            except BaseException:
                task.cancel()
                raise
            if task.done():
                return task.result()
            return await until_gone(task, request.receive, service.closing, deadline)

        try:
            call = await call_of(
                form,
                service.client.facts,
                service.client.tokenizer,
                lambda jobs: waited(service.sandboxes.run(jobs)),
                lambda work: waited(_in_thread(service, ticket, work)),
            )
            del form  # it may be hundreds of MB of what the call doesn't need, and the answer may take hours
            call.tenant = NO_TENANT if key is None else key.number
            ticket.settle(call.size)
        except ClientGoneError:
            ticket.leave()
            return Response(status_code=CLOSED_BY_CLIENT)
        except BaseException:
            ticket.leave()
            raise
    return await _answered(service, request, call, answer_of, ticket, deadline)


async def _in_thread(service: AppState, ticket: Ticket, work: Callable[[], Result]) -> Result:
    """Work that has begun goes on if nobody waits for it any more, and keeps its place in the queue; what hasn't is
    dropped, and all that it holds: the threads' own line keeps what was cancelled until its turn comes."""
    kept = [work]
    job = service.threads.submit(lambda: kept.pop()())
    del work
    ticket.stay(thread := asyncio.wrap_future(job))
    try:
        return await asyncio.shield(thread)
    finally:
        if job.cancel():
            kept.clear()


async def _answered(
    service: AppState,
    request: Request,
    call: Call,
    answer_of: Callable[[Call, str, TokenSpellings], BaseAnswer],
    ticket: Ticket,
    deadline: float | None,
) -> Response:
    try:
        answer = answer_of(call, service.model, service.spellings)
        return await _respond(service, request, await _start(service, call, answer, ticket), answer, deadline)
    except ClientGoneError:
        ticket.leave()
        return Response(status_code=CLOSED_BY_CLIENT)
    except BaseException:
        ticket.leave()
        raise


async def _start(service: AppState, call: Call, answer: BaseAnswer, ticket: Ticket) -> ActiveCall:
    if call.logprobs is not None:
        await service.spellings.of(as_ids=call.tokens_as_ids).prepare(chat=isinstance(answer, ChatAnswer))
    return ActiveCall(service, call, ticket)


async def _respond(
    service: AppState, request: Request, running: ActiveCall, answer: BaseAnswer, deadline: float | None
) -> Response:
    request.state.account = running.account  # for the access log
    if running.call.stream:
        return EventStream(service, running, answer, deadline)
    try:
        pieces = await until_gone(whole(service, running, answer), request.receive, service.closing, deadline)
    finally:
        running.cancel()
    return BufferedResponse(service.wholes, pieces, answer.id)


def refuse(request: Request, error: PenstockError) -> Response:
    """The answer to a request that ended in an error of ours."""
    request.state.refused = names_of(error)  # for the access log
    headers = error.headers if isinstance(error, HttpError) else None
    return Response(body_of(error), status_of(error), headers, media_type=JSON)
