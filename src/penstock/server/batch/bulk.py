"""POST /v1/bulk: many prompts in one body. The body has one prompt per line, and each answer is
sent as a line when it is finished.

    body --a line at a time, while there is room--> engine --> results --as the reader takes them-->
    client

The engine gets about as many samples as it has rows. While many results wait for a slow client, no
further lines are read. A bad line gets an error with its number, and the others go on. Knows the
server's state, lines and one HTTP exchange; no files, no database.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import EngineError, FaultError, PenstockError, ReplicaError
from penstock.server.batch.line_request import NO_FAULTS, LinePreparer
from penstock.server.batch.pipeline import AHEAD
from penstock.server.online.active_call import ActiveCall, ClientGoneError, until_gone
from penstock.server.online.api_keys import Key
from penstock.server.online.app_state import NO_TENANT, AppState
from penstock.server.online.auth import key_of
from penstock.server.online.fair_semaphore import FairSemaphore
from penstock.server.online.intake import BodyRoom, Intake
from penstock.server.online.request_limits import QueueFullError, Ticket
from penstock.server.openai.answers import BaseAnswer
from penstock.server.openai.bulk_line import BulkReader, PackedAnswer, named, told
from penstock.server.openai.forms import read_object
from penstock.server.openai.http_errors import (
    FAILED,
    HttpError,
    ShuttingDownError,
    body_of,
    new_request_id,
    too_late,
)
from penstock.server.openai.http_limits import LONG_BODY
from penstock.server.openai.pick_answer import answer_to
from penstock.server.openai.translate import Call

MOST_LINES = 128 * 1024  # most lines of one body
# bytes of results waiting for the client, above which no line is submitted
WAITING = 4 * 1024 * 1024
ASK_AGAIN = 0.05  # seconds between attempts to get a place in the server's queue
TURN = 16  # lines read in one turn of the event loop, about 1 ms
NDJSON = "application/x-ndjson"


class BulkService:
    """State shared by all bulk requests of a server. room: semaphore that limits the samples at the
    engine."""

    def __init__(self, service: AppState) -> None:
        rows = service.client.facts.max_num_seqs
        self.service, self.lines = service, LinePreparer(service)
        self.intake = Intake(service.limits, service.body_timeouts, service.servers)
        self.room = FairSemaphore(max((rows + max(8, rows // AHEAD)) // service.servers, 1))


async def post_bulk(bulk: BulkService, request: Request) -> Response:
    """POST /v1/bulk. Raises PenstockError."""
    key = key_of(request.scope)
    bulk.service.request_limits.check(key)
    with ExitStack() as held:
        place = held.enter_context(BodyRoom(bulk.intake.large))
        body = await bulk.intake.read(request, place)
        if body.count(b"\n") >= MOST_LINES:
            raise HttpError(f"the body has more than {MOST_LINES:,} lines: send it in parts")
        if not body.strip():
            raise HttpError(
                "the body has no lines: send a completion's or chat's body in each, with a custom_id"
            )
        return BulkStream(BulkRun(bulk, key, body, place), held.pop_all())


class BulkStream(Response):
    """Streams the result lines of one body. An error that ends the whole answer is its last line,
    without a line number."""

    def __init__(self, run: BulkRun, held: ExitStack) -> None:
        super().__init__(
            media_type=NDJSON, headers={"cache-control": "no-cache", "x-request-id": run.id}
        )
        del self.headers["content-length"]  # the length is unknown in advance
        self._run, self._held = run, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = b""
        with self._held:
            try:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await until_gone(self._run.write(send), receive, self._run.closing)
            except PenstockError as error:
                last = body_of(error) + b"\n"
            except ClientGoneError:
                return
            except Exception:
                # a bug is reported to this client, and raised again for the log
                last = body_of(FaultError(FAILED)) + b"\n"
                await send({"type": "http.response.body", "body": last, "more_body": False})
                raise
        await send({"type": "http.response.body", "body": last, "more_body": False})


class BulkLine:
    """A line of a bulk request, while the engine runs it."""

    __slots__ = ("active", "answer", "choices", "custom_id", "marked", "number", "places", "timer")

    def __init__(
        self, number: int, custom_id: str | None, active: ActiveCall, answer: BaseAnswer
    ) -> None:
        self.number, self.custom_id, self.active, self.answer = number, custom_id, active, answer
        self.places = active.call.sampling.n
        self.choices = [b""] * self.places
        self.marked = False  # True while in the list of lines with new deltas
        self.timer: asyncio.TimerHandle | None = None

    def take(self) -> tuple[int, bytes | None]:
        """Returns the number of new tokens, and the complete answer's JSON once the last token has
        come, else None. Raises PenstockError."""
        deltas, over = self.active.take()
        positions = self.active.streams[0].asked.prompt_logprobs
        made = 0
        for delta in deltas:
            self.choices[delta.index] = self.answer.choice(delta.index, delta, positions)
            made += len(delta.token_ids)
        if not over:
            return made, None
        return made, b"".join(
            self.answer.body(self.choices, self.answer.usage(*self.active.counts))
        )


class BulkRun:
    """Runs the lines of one body until all are answered. place: the body's share of the memory
    limit."""

    def __init__(
        self, bulk: BulkService, key: Key | None, body: bytearray, place: BodyRoom
    ) -> None:
        self.id, self._bulk, self._key, self._body, self._place = (
            new_request_id(),
            bulk,
            key,
            body,
            place,
        )
        self._service = bulk.service
        self.closing = self._service.closing
        tenant = NO_TENANT if key is None else key.number
        self._reader = BulkReader(
            bulk.lines.tools, self._service.model, self._service.limits, tenant
        )
        self._open: dict[BulkLine, None] = {}
        self._ready: list[BulkLine] = []  # lines with new deltas
        self._results: list[bytes] = []  # results (lines of JSON) that were not sent yet
        # counts these results, and those that are being sent
        self._held = bulk.lines.answers.hold([])
        self._news = asyncio.Event()

    async def write(self, send: Send) -> None:
        """Runs all lines and sends their results. Raises EngineError if the engine dies,
        ShuttingDownError if the server ends. Whatever happens, cancels the lines that still run."""
        with self._held:
            feeding = asyncio.create_task(self._feed())
            feeding.add_done_callback(lambda _: self._news.set())
            try:
                while not (feeding.done() and not self._open and not self._results):
                    await self._news.wait()
                    self._news.clear()
                    if feeding.done():
                        feeding.result()
                    await self._gather()
                    await self._send(send)
                feeding.result()
            finally:
                feeding.cancel()
                await asyncio.wait((feeding,))
                for line in list(self._open):
                    self._leave(line)

    async def _send(self, send: Send) -> None:
        """Sends results as fast as the client reads them."""
        while self._results:
            self._held.check()
            data, self._results = b"".join(self._results), []
            piece = self._service.limits.piece_bytes
            for at in range(0, len(data), piece):
                part = data[at : at + piece]
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self._held.check()  # bytes of a body that was given up no longer count
                self._held.add(-len(part))

    async def _gather(self) -> None:
        """Takes the new deltas of lines, and turns ended lines into results."""
        ready, self._ready = self._ready, []
        for line in ready:
            line.marked = False
            if line not in self._open:
                continue
            try:
                made, body = line.take()
            except (EngineError, ShuttingDownError, *NO_FAULTS) as error:
                if not isinstance(error, ReplicaError):
                    raise
                self._end(line, error)
                continue
            except BaseException as error:  # noqa: BLE001 - an error ends only this line
                self._end(line, error)
                continue
            if body is not None:
                self._tell(line.number, line.custom_id, body)
                self._leave(line)
            await self._service.yielder.spend(TURN + made)

    async def _feed(self) -> None:
        """Submits the lines to the engine, one after the other, while there is room."""
        number = 0
        while self._body:
            number += 1
            end = self._body.find(b"\n") + 1 or len(self._body)
            line = bytes(self._body[:end])
            del self._body[:end]
            if number % TURN == 0:
                self._place.count(len(self._body))
                await asyncio.sleep(0)
            await self._held.until(WAITING)
            if self._held.given_up:
                return  # `_send` raises the error once the client reads again
            if line.strip():
                await self._begin(number, line)

    async def _begin(self, number: int, line: bytes) -> None:
        custom_id = None
        try:
            if len(line) > LONG_BODY:
                raw = await self._bulk.lines.tools.aside(
                    lambda: read_object(line, self._service.limits)
                )
            else:
                raw = read_object(line, self._service.limits)
            custom_id, body = named(raw)
            call, packed = await self._reader.read(body)
            await self._submit(number, custom_id, call, packed)
        except (EngineError, ShuttingDownError, *NO_FAULTS):
            raise
        except BaseException as error:  # noqa: BLE001 - an error ends only this line
            self._tell(number, custom_id, self._bulk.lines.fault(error, self.id))

    async def _submit(self, number: int, custom_id: str | None, call: Call, packed: bool) -> None:
        service, n = self._service, call.sampling.n
        spellings = service.spellings
        answer = (
            PackedAnswer(call, service.model, spellings)
            if packed
            else await answer_to(call, service.model, spellings)
        )
        await self._bulk.room.acquire(n, owner=self.id)
        try:
            active = ActiveCall(service, call, await self._ticket(call))
        except BaseException:
            self._bulk.room.release(n, owner=self.id)
            raise
        made = BulkLine(number, custom_id, active, answer)
        self._open[made] = None
        deadline = service.deadline(call.timeout)
        if deadline is not None:
            made.timer = asyncio.get_running_loop().call_at(deadline, self._end, made, too_late())
        active.listen(lambda: self._hear(made))

    async def _ticket(self, call: Call) -> Ticket:
        """Waits until the server's request limits have room for a call, and takes it. Raises
        HttpError for a call that the API key's limits never allow."""
        while True:
            try:
                return self._service.request_limits.acquire(self._key, call.sampling.n, call.size)
            except QueueFullError:
                await asyncio.sleep(ASK_AGAIN)

    def _hear(self, line: BulkLine) -> None:
        if not line.marked:
            line.marked = True
            self._ready.append(line)
            self._news.set()

    def _end(self, line: BulkLine, error: BaseException) -> None:
        """Ends a line of a bulk request with an error."""
        if line in self._open:
            self._tell(line.number, line.custom_id, self._bulk.lines.fault(error, self.id))
            self._leave(line)

    def _leave(self, line: BulkLine) -> None:
        del self._open[line]
        if line.timer is not None:
            line.timer.cancel()
        line.active.cancel()
        self._bulk.room.release(line.places, owner=self.id)

    def _tell(self, number: int, custom_id: str | None, body: bytes) -> None:
        result = told(number, custom_id, body)
        self._results.append(result)
        self._held.add(len(result))
        self._news.set()
