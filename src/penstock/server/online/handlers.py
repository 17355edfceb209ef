"""Handlers of the routes that generate text. Each reads a body, runs a call, and answers with one
body or with events. Knows requests and responses; forms.py, translate.py and answers.py define
their content."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import FaultError, PenstockError, UsageError
from penstock.sandbox.sandbox_process import Job, Reply
from penstock.server.online.active_call import ActiveCall, ClientGoneError, until_gone
from penstock.server.online.app_state import NO_TENANT, AppState
from penstock.server.online.auth import key_of
from penstock.server.online.budget import HeldBytes
from penstock.server.online.buffered import JSON, BufferedResponse, ResponseBudget
from penstock.server.online.intake import BodyRoom
from penstock.server.online.request_limits import Ticket
from penstock.server.openai.answers import BaseAnswer
from penstock.server.openai.forms import ChatForm, CompletionForm, read_chat, read_completion
from penstock.server.openai.generate_form import read_generate
from penstock.server.openai.http_errors import (
    FAILED,
    body_of,
    check_model,
    error_headers,
    names_of,
    status_of,
)
from penstock.server.openai.http_limits import LONG_BODY, HttpLimits
from penstock.server.openai.pick_answer import answer_to
from penstock.server.openai.prompt_ids import PromptTools
from penstock.server.openai.responses_forms import PARAMS, read_responses
from penstock.server.openai.scoring_forms import read_scoring
from penstock.server.openai.translate import Call, make_call, size_of

# seconds after which the server, while it prepares a request, begins to watch whether the client is
# still connected
UNWATCHED = 0.005
Result = TypeVar("Result")


class EventStream(Response):
    """Response with the server-sent events of a running call. Calls `send` once per engine step, or
    several times if a step's events exceed limits.piece_bytes."""

    def __init__(
        self, state: AppState, active: ActiveCall, answer: BaseAnswer, deadline: float | None
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-request-id": answer.id},
        )
        del self.headers["content-length"]  # the length is unknown in advance
        self._state, self._active, self._answer = state, active, answer
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = b""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = await until_gone(self._write(send), receive, self._state.closing, self._deadline)
        except PenstockError as error:
            last = self._answer.error_event(error)
        except ClientGoneError:
            return
        except Exception:
            # A bug is reported to this client, and raised again for the log. Other requests go on.
            self._active.cancel()
            last = self._answer.error_event(FaultError(FAILED))
            await send({"type": "http.response.body", "body": last, "more_body": False})
            raise
        finally:
            self._active.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send) -> bytes:
        active, event, limits = self._active, self._answer.event, self._state.limits
        n, portion = active.call.sampling.n, limits.turn_events
        async for step in active.steps():
            pieces: list[bytes] = []
            size = 0
            for at, deltas in step:
                positions = active.streams[at].asked.prompt_logprobs
                for begin in range(0, len(deltas), portion):
                    made = [
                        event(at * n + delta.index, delta, positions)
                        for delta in deltas[begin : begin + portion]
                    ]
                    pieces += made
                    size += sum(map(len, made))
                    # a choice's first event may repeat the whole prompt, so events can be large
                    if size >= limits.piece_bytes:
                        await send(
                            {
                                "type": "http.response.body",
                                "body": b"".join(pieces),
                                "more_body": True,
                            }
                        )
                        pieces, size = [], 0
            if size:
                await send(
                    {"type": "http.response.body", "body": b"".join(pieces), "more_body": True}
                )
        return self._answer.last(self._answer.usage(*active.counts))


async def buffer_answer(
    state: AppState, active: ActiveCall, answer: BaseAnswer, responses: ResponseBudget | None = None
) -> list[bytes]:
    """Runs a call and returns the answer's body in pieces. Their bytes count against the budget
    `responses`, or the server's if it is None. Each choice is encoded when its sample ends, so that
    little work is left after the last one. Raises PenstockError, such as AnswerTooLargeError."""
    n, yielder = active.call.sampling.n, state.yielder
    likely = 1 + (active.call.logprobs or 0)
    with (responses or state.responses).hold([b""] * active.call.choices) as held:
        async for step in active.steps():
            for at, deltas in step:
                positions = active.streams[at].asked.prompt_logprobs
                for delta in deltas:
                    choice = at * n + delta.index
                    held.put(choice, answer.choice(choice, delta, positions))
                    await yielder.spend(len(delta.token_ids) * likely)
        held.check()
        return answer.body(held.pieces, answer.usage(*active.counts))


async def post_completions(state: AppState, request: Request) -> Response:
    """POST /v1/completions. Raises PenstockError."""
    return await _post(state, request, read_completion)


async def post_chat(state: AppState, request: Request) -> Response:
    """POST /v1/chat/completions. Raises PenstockError."""
    return await _post(state, request, read_chat)


async def post_generate(state: AppState, request: Request) -> Response:
    """POST /inference/v1/generate: token ids in and out. Raises PenstockError."""
    try:
        return await _post(state, request, read_generate)
    except UsageError as error:
        error.param = "token_ids" if error.param == "prompt" else error.param
        raise


async def post_responses(state: AppState, request: Request) -> Response:
    """POST /v1/responses: a chat with other field names. Raises PenstockError with these names as
    `param`."""
    try:
        return await _post(state, request, read_responses)
    except UsageError as error:
        error.param = None if error.param is None else PARAMS.get(error.param, error.param)
        raise


async def post_scoring(state: AppState, request: Request) -> Response:
    """POST /generative_scoring: label probabilities, by a completion of one token. Raises
    PenstockError."""
    return await _post(state, request, read_scoring)


async def _post(
    state: AppState,
    request: Request,
    read: Callable[[bytearray, HttpLimits], CompletionForm | ChatForm],
) -> Response:
    """Serves a request. Checks the request limits before reading the body and before tokenizing it.
    read: parses the body. Raises PenstockError, ClientGoneError."""
    key = key_of(request.scope)
    state.request_limits.check(key)
    work = None
    try:
        # counts the body's bytes until it has become token ids
        with BodyRoom(state.intake.large) as place:
            form = await read_body(state, request, place, read)
            check_model(form.model, state.model)
            ticket = state.request_limits.acquire(key, *size_of(form))
            work = RequestWork(state, request, ticket, state.deadline(form.timeout))
            tenant = NO_TENANT if key is None else key.number
            call = await make_call(form, work.prompt_tools, tenant)
            # frees the parsed body: it may take hundreds of MB, and the answer may take hours
            del form
            ticket.adjust(call.size)
        return await _answer(work, call)
    except BaseException:
        if work is not None:
            work.ticket.release()
        raise


async def read_body(
    state: AppState,
    request: Request,
    place: BodyRoom,
    read: Callable[[bytearray, HttpLimits], Result],
) -> Result:
    """Receives a body and parses it by `read`. Long bodies are parsed in a thread, one at a time,
    so that the event loop goes on. If the client leaves meanwhile, the result is dropped. Raises
    PenstockError, ClientGoneError."""
    body = await state.intake.read(request, place)
    state.tell_marks(body)
    if len(body) <= LONG_BODY:
        return read(body, state.limits)
    with HeldBytes(state.intake.parsing) as waiting:
        waiting.add(len(body))
        work = asyncio.get_running_loop().run_in_executor(state.reader, read, body, state.limits)
        del body  # only the worker thread may keep the body in memory
        return await until_gone(work, request.receive, state.closing)


async def _answer(work: RequestWork, call: Call) -> Response:
    """Submits the call to the engine and returns its response. Raises PenstockError,
    ClientGoneError."""
    state, request = work.state, work.request
    answer = await answer_to(call, state.model, state.spellings)
    active = ActiveCall(state, call, work.ticket)
    request.state.call_metrics = active.call_metrics  # the access log reads the metrics there
    if call.stream:
        return EventStream(state, active, answer, work.deadline)
    try:
        pieces = await work.while_client_stays(buffer_answer(state, active, answer))
    finally:
        active.cancel()
    return BufferedResponse(state.responses, pieces, answer.id)


class RequestWork:
    """Runs work for one request before its answer begins. If the client leaves, the deadline passes
    or the server shuts down, the work is cancelled."""

    def __init__(
        self, state: AppState, request: Request, ticket: Ticket, deadline: float | None
    ) -> None:
        self.state, self.request, self.ticket, self.deadline = state, request, ticket, deadline

    @property
    def prompt_tools(self) -> PromptTools:
        """The functions and settings that turn the request's body into token ids."""
        state, client = self.state, self.state.client
        return PromptTools(
            client.facts,
            client.tokenizer,
            self.in_sandbox,
            self.in_thread,
            self.check_pattern,
            state.limits.turn_ids,
            state.parsers,
            state.forms,
        )

    def while_client_stays(self, work: Awaitable[Result]) -> Awaitable[Result]:
        """Runs `work` until it is done or must end early. Raises the errors of until_gone."""
        return until_gone(work, self.request.receive, self.state.closing, self.deadline)

    async def in_sandbox(self, jobs: Sequence[Job]) -> list[Reply]:
        """Runs jobs (rendering, tokenizing) in sandboxes. If all are busy, API keys take turns."""
        return await self.state.turns.run(self.state.sandboxes, jobs, self.ticket.owner, self._soon)

    async def check_pattern(self, pattern: str) -> None:
        """Checks a pattern of stop_when in the sandbox process for patterns. Raises UsageError."""
        await self._soon(self.state.patterns.check(pattern))

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in the thread pool. If the request ends before, work that has not begun is
        dropped."""
        return await self._soon(
            asyncio.get_running_loop().run_in_executor(self.state.threads, work)
        )

    async def _soon(self, work: Awaitable[Result]) -> Result:
        """Runs `work` like while_client_stays, but watches the client only after UNWATCHED seconds:
        watching takes 0.2 ms, and most work ends before."""
        task = asyncio.ensure_future(work)
        if task.done():
            return task.result()
        try:
            await asyncio.wait((task,), timeout=UNWATCHED)
        except BaseException:
            task.cancel()
            raise
        return task.result() if task.done() else await self.while_client_stays(task)


def refuse(request: Request, error: PenstockError) -> Response:
    """Returns the answer to a request that ended in a PenstockError."""
    request.state.refused = names_of(error)  # the access log reads the error's names there
    return Response(body_of(error), status_of(error), error_headers(error), media_type=JSON)
