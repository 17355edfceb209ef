"""One line of a batch as a request: line in, outcome out. The routes' own forms, calls and answers, without HTTP.

It knows the service and its engine's client; no files, no database. Lines run in the background: the engine's
scheduler lets online requests go first (schedule/admission.py).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import traceback
from pathlib import Path

from penstock.errors import EngineError, PenstockError
from penstock.server.answers import Answer, ChatAnswer, CompletionAnswer
from penstock.server.batch_lines import Line, LineError, told
from penstock.server.batch_results import Outcome, Unrun
from penstock.server.exchange import whole
from penstock.server.forms import CompletionForm
from penstock.server.refusals import ShuttingDownError, TooLateError, body_of, error_body, status_of
from penstock.server.running import Running
from penstock.server.service import Service
from penstock.server.translate import Call, chat_call, completion_call


class LineCall:
    """A line that is ready for the engine."""

    def __init__(self, caller: Caller, line: Line, call: Call, answer: Answer) -> None:
        self._caller, self._line, self._call, self._answer = caller, line, call, answer

    @property
    def custom_id(self) -> str:
        return self._line.custom_id

    @property
    def sequences(self) -> int:
        return self._call.choices

    @property
    def size(self) -> int:
        """Bytes of the line's body."""
        return len(self._line.body)

    async def outcome(self) -> Outcome:
        """Runs it. Raises EngineError where the engine died, ShuttingDownError where the server ends: then the line
        has had no outcome. Every other fault is the line's own."""
        service = self._caller.service
        try:
            running = Running(service, self._call, background=True)
            try:
                async with asyncio.timeout(self._call.timeout):
                    body = b"".join(await whole(service, running, self._answer))
            finally:
                running.cancel()
        except TimeoutError:  # the engine gives none: it is the line's own timeout
            return self._caller.failed(self._line, TooLateError())
        except Exception as error:  # noqa: BLE001 - a line that raises ends alone
            return self._caller.failed(self._line, error)
        return Outcome(self._line.custom_id, 200, self._answer.id, body)


def outcome_of_killer(custom_id: str) -> Outcome:
    """The outcome of a line with which the engine died, again and again."""
    message = "the engine died twice while this line ran alone: change it, and tell whoever runs the server"
    return Outcome(custom_id, 500, _request_id(), error_body(message, kind="server_error", code="engine_died"))


def outcome_of_bad(error: LineError, number: int) -> Outcome | Unrun:
    """The outcome of a line that the check found bad: the route's answer, where there is a custom_id to give it to."""
    if error.custom_id is None:
        return Unrun(number, error.code, f"line {number}: {told(error)}")
    return Outcome(error.custom_id, status_of(error.answer), _request_id(), body_of(error.answer))


def outcome_of_cancelled(custom_id: str) -> Unrun:
    """The outcome of a good line that a cancel came before."""
    return Unrun(custom_id, "batch_cancelled", "This request was not run: the batch was cancelled.")


class Caller:
    """Makes calls of lines."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._told: set[tuple[str, int]] = set()  # where faults of ours came from, each told once in full

    async def prepare(self, line: Line, owner: str) -> LineCall | Outcome:
        """Reads and tokenises a line of this owner's; an outcome at once where that shows that it cannot run. Raises as
        LineCall.outcome."""
        service, client = self.service, self.service.client
        answer: Answer
        try:
            form = line.form()
            service.check_model(form.model)
            if isinstance(form, CompletionForm):
                call = await completion_call(form, client.facts, client.tokenizer, service.aside)
                answer = CompletionAnswer(call, service.model, service.spellings)
            else:
                call = await chat_call(form, client.facts, client.tokenizer, service.aside)
                answer = ChatAnswer(call, service.model, service.spellings)
            call.tenant = service.tenant_of(owner)
            if call.logprobs is not None:
                await service.spellings.of(as_ids=call.tokens_as_ids).prepare(chat=isinstance(answer, ChatAnswer))
        except Exception as error:  # noqa: BLE001 - as above
            return self.failed(line, error)
        return LineCall(self, line, call, answer)

    def failed(self, line: Line, error: Exception) -> Outcome:
        """The outcome of a line that ended in an error; those of the engine and the server are raised again."""
        if isinstance(error, EngineError | ShuttingDownError):
            raise error
        request_id = _request_id()
        if isinstance(error, PenstockError):
            return Outcome(line.custom_id, status_of(error), request_id, body_of(error))
        self._tell(error, request_id)
        body = error_body("the server failed at this line; its log says how", kind="server_error", code="internal")
        return Outcome(line.custom_id, 500, request_id, body)

    def _tell(self, error: Exception, request_id: str) -> None:
        """A batch may meet the same fault 50,000 times."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = (last.filename, last.lineno or 0)
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        print(f"penstock: a line of a batch failed by a fault of the server ({where}): {request_id}", file=sys.stderr)
        if place not in self._told:
            self._told.add(place)
            traceback.print_exception(error)


def _request_id() -> str:
    return f"req_{secrets.token_hex(16)}"
