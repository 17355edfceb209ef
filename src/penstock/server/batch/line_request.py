"""Runs one line of a batch as a request. Goes from the line to its result, without HTTP. Lines run
with background priority (schedule/admission.py). Knows the server's state and its engine's client;
no files, no database."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import EngineError, FaultError, PenstockError
from penstock.sandbox.sandbox_process import Job, Reply
from penstock.server.batch.input_file import told
from penstock.server.batch.output_files import LineOutcome, answered, unrun
from penstock.server.batch.poison_lines import ALONE
from penstock.server.online.active_call import ActiveCall
from penstock.server.online.app_state import AppState
from penstock.server.online.buffered import AnswerTooLargeError, ResponseBudget
from penstock.server.online.handlers import buffer_answer
from penstock.server.openai.answers import BaseAnswer
from penstock.server.openai.batch_line import BatchLine, LineError
from penstock.server.openai.http_errors import (
    HttpError,
    ShuttingDownError,
    body_of,
    check_model,
    new_request_id,
    status_of,
    too_late,
)
from penstock.server.openai.http_limits import LONG_BODY
from penstock.server.openai.pick_answer import answer_to
from penstock.server.openai.prompt_ids import PromptTools
from penstock.server.openai.translate import Call, make_call

if TYPE_CHECKING:
    from penstock.engine.request_stream import Stream

# lines of all batches that are tokenized at the same time; the ids of a text of 32 MiB take some
# hundred megabytes
PREPARED_AT_ONCE = 2
BATCHES = "batches"  # name under which all batch lines together get turns at the sandboxes
ID_BYTES = 40  # bytes of a token id in a Python list
# Exceptions that end a task or the process. All other exceptions are errors of the work itself,
# also those that are no Exception, as a panic in a Rust library.
NO_FAULTS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

Result = TypeVar("Result")


class LineRequest:
    """A tokenized line that is ready for the engine."""

    def __init__(
        self, preparer: LinePreparer, line: BatchLine, call: Call, answer: BaseAnswer
    ) -> None:
        self._preparer, self._line, self._call, self._answer = preparer, line, call, answer
        self._streams: list[Stream] = []  # engine streams of the last call of `outcome`

    @property
    def sequences(self) -> int:
        return self._call.choices

    @property
    def size(self) -> int:
        """Approximate bytes of memory that the line takes until it has its outcome."""
        return len(self._line.body) + ID_BYTES * self._call.prompt_tokens

    def evidence(self) -> int:
        """Returns the points that this line gets for the engine's death (see poison_lines.py); 0 if
        it wasn't at the engine."""
        client = self._preparer.service.client
        if client.open_at_death.isdisjoint(self._streams):
            return 0
        return (
            ALONE
            if client.open_at_death.issubset(self._streams) and not client.cut_before_death
            else 1
        )

    async def outcome(self, *, alone: bool) -> LineOutcome | None:
        """Runs the line and returns its outcome. Returns None if there was no memory for its answer
        beside other answers; the line can then run again. alone: no other lines run, so an answer
        without room is too large. Raises EngineError if the engine dies and ShuttingDownError if
        the server ends. Any other error becomes the line's outcome."""
        preparer, service, call = self._preparer, self._preparer.service, self._call
        self._streams = []
        try:
            running = ActiveCall(service, call, background=True)
            self._streams = running.streams
            try:
                async with asyncio.timeout(call.timeout):
                    body = b"".join(
                        await buffer_answer(service, running, self._answer, preparer.answers)
                    )
            finally:
                running.cancel()
        except NO_FAULTS:
            raise
        except TimeoutError:
            # comes only from the line's own timeout, since the engine raises no TimeoutError
            return preparer.failed(self._line, too_late())
        except BaseException as error:  # noqa: BLE001 - a line that raises ends alone
            if isinstance(error, AnswerTooLargeError) and not alone:
                return None
            return preparer.failed(self._line, error)
        return answered(self._line.custom_id, 200, self._answer.id, body)


def result_of_killer(custom_id: str) -> LineOutcome:
    """Returns the outcome of a line that ran each time the engine died."""
    message = (
        "the engine died each time that this line ran: change it, and tell whoever runs the server"
    )
    error = HttpError(message, status=500, code="engine_died")
    return answered(custom_id, 500, new_request_id(), body_of(error))


def result_of_bad(error: LineError, number: int) -> LineOutcome:
    """Returns the outcome of a bad line. If it has a custom_id, the outcome is the error that the
    online route would answer."""
    if error.custom_id is None:
        return unrun(number, error.code, f"line {number}: {told(error)}")
    return answered(
        error.custom_id, status_of(error.answer), new_request_id(), body_of(error.answer)
    )


def result_of_cancelled(custom_id: str) -> LineOutcome:
    """Returns the outcome of a good line that didn't run, since its batch was cancelled."""
    return unrun(custom_id, "batch_cancelled", "This request was not run: the batch was cancelled.")


class LinePreparer:
    """Turns lines into requests. answers: budget for the bytes of their answers, from the first
    sample's end until they are on the disk. It is as large as the online requests' budget and
    separate from it."""

    def __init__(self, service: AppState) -> None:
        self.service = service
        self.answers = ResponseBudget(service.responses.most)
        # a shutdown doesn't wait for this thread
        self._threads = ThreadPoolExecutor(1, "penstock-batch")
        self._sandboxed = asyncio.Semaphore(PREPARED_AT_ONCE)
        client, check = service.client, service.patterns.check
        self._tools = PromptTools(
            client.facts,
            client.tokenizer,
            self._in_sandbox,
            self._aside,
            check,
            service.limits.turn_ids,
            service.parsers,
            service.forms,
        )
        # (file, line) of errors whose traceback was printed before
        self._told: set[tuple[str, int]] = set()

    async def prepare(self, line: BatchLine, owner: str) -> LineRequest | LineOutcome:
        """Parses and tokenizes a line. Returns its outcome at once if it cannot run. owner: the
        batch's owner. Raises the errors of LineRequest.outcome."""
        service = self.service
        try:
            form = await self._aside(line.form) if len(line.body) > LONG_BODY else line.form()
            check_model(form.model, service.model)
            call = await make_call(form, self._tools, service.tenant_of(owner))
            answer = await answer_to(call, service.model, service.spellings)
        except NO_FAULTS:
            raise
        except BaseException as error:  # noqa: BLE001 - a line that raises ends alone
            return self.failed(line, error)
        return LineRequest(self, line, call, answer)

    async def _in_sandbox(self, jobs: Sequence[Job]) -> list[Reply]:
        """Runs sandbox jobs of PREPARED_AT_ONCE lines at a time, which limits their memory. Online
        texts get turns in between."""
        async with self._sandboxed:
            return await self.service.turns.run_aside(self.service.sandboxes, jobs, BATCHES)

    def _aside(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Runs work in a thread that only batch lines use, so that the threads of online requests
        stay free."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def tools(self) -> PromptTools:
        """The functions and settings that turn lines into token ids."""
        return self._tools

    def failed(self, line: BatchLine, error: BaseException) -> LineOutcome:
        """Returns the outcome of a line that ended in an error. Raises EngineError and
        ShuttingDownError again."""
        if isinstance(error, EngineError | ShuttingDownError):
            raise error
        request_id = new_request_id()
        status = status_of(error) if isinstance(error, PenstockError) else 500
        return answered(line.custom_id, status, request_id, self.fault(error, request_id))

    def fault(self, error: BaseException, request_id: str) -> bytes:
        """Returns the JSON of the error that ended a line.
        Logs an error that is no PenstockError."""
        if isinstance(error, PenstockError):
            return body_of(error)
        self._tell(error, request_id)
        return body_of(FaultError("the server failed at this line; its log says how"))

    def _tell(self, error: BaseException, request_id: str) -> None:
        """Logs an unexpected error. Prints its traceback only once, since a batch may cause the
        same error 50,000 times."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = (last.filename, last.lineno or 0)
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        print(
            f"penstock: a line failed by a fault of the server ({where}): {request_id}",
            file=sys.stderr,
        )
        if place not in self._told:
            self._told.add(place)
            traceback.print_exception(error)
