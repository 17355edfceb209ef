"""Reads a streamed answer and finds faults in it. The answer is server-sent events, or the body of
an HTTP error. At its end the reported token counts (usage) are checked against the events and the
request.

An event is parsed after its arrival time was taken. Parsing 250 bytes takes 0.45 us: the decoder is
typed and skips unknown fields. Knows OpenAI's bodies; no connection, no clock, no load.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

# most bytes of a server-sent event; a client process may hold one for each of a thousand
# connections
LONGEST_LINE = 256 << 10
# exceptions that bytes which are no JSON raise
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# message about an answer that the server cut at its own limit, not at the requested length
OWN_LIMIT = "the server ran into a limit of its own"
_QUOTED = 200  # bytes of a faulty body that a message shows
_TOLD = 500  # characters of a server's error that a message shows

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens
    total_tokens: Tokens | None = None
    prompt_tokens_details: Details | None = None

    @property
    def cached(self) -> int:
        """Returns the number of cached tokens; -1: not given."""
        details = self.prompt_tokens_details
        return -1 if details is None or details.cached_tokens is None else details.cached_tokens


class ChatDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def brings(self) -> bool:
        """Returns True if the event has output: text of any kind, a tool call, or tokens."""
        if self.text or self.token_ids:
            return True
        delta = self.delta
        if delta is None:
            return False
        return bool(
            delta.content
            or delta.reasoning_content
            or delta.reasoning
            or delta.tool_calls
            or delta.refusal
        )


class Event(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(Event).decode


def _beginning(text: str) -> str:
    """Returns the start of the text for a message, cut at the end of a word."""
    return text if len(text) <= _TOLD else f"{text[:_TOLD].rsplit(maxsplit=1)[0]} ..."


class StreamReader:
    """Reads server-sent events as they come; an event counts once its line is complete.

    times: arrival of each event with output, seconds, float64. fault: (outcome, message) of the
    first fault. reason: the last finish_reason. ended: `[DONE]` came. finished: number of choices
    with a finish_reason; limited: those that ended at a limit.
    """

    __slots__ = ("_rest", "ended", "fault", "finished", "limited", "reason", "times", "usage")

    def __init__(self) -> None:
        self.times = array("d")
        self.usage: Usage | None = None
        self.reason: str | None = None
        self.fault: tuple[str, str] | None = None
        self.ended = False
        self.finished = self.limited = 0
        # the incomplete last line; new bytes are appended without copying
        self._rest = bytearray()

    def feed(self, data: bytes, now: float) -> None:
        if (
            data.startswith(b"data: {")
            and data.endswith(b"\n\n")
            and not self._rest
            and not self.ended
        ):
            try:
                event = _event(memoryview(data)[6:])
            except NOT_JSON:
                pass  # data has several events, or a broken one: the code below handles both
            else:
                self._take(event, now)
                return
        *whole, rest = data.split(b"\n")
        if whole and self._rest:
            whole[0] = bytes(self._rest) + whole[0]
            self._rest.clear()
        for line in whole:
            self._line(line, now)
        self._rest += rest
        if len(self._rest) > LONGEST_LINE:
            self.fail(
                "broken",
                f"a line of more than {LONGEST_LINE} bytes: {bytes(self._rest[:_QUOTED])!r}",
            )
            self.let_go()

    def let_go(self) -> None:
        """Frees the incomplete last line, because a result is kept until its load ends."""
        self._rest = bytearray()

    def finish(self) -> None:
        """Ends the reading when the HTTP message is complete; missing parts are faults."""
        if self._rest.strip():
            self.fail("cut", f"the stream ends within a line: {bytes(self._rest[:_QUOTED])!r}")
        if not self.ended and not self.finished:
            self.fail("cut", "the stream ends with neither [DONE] nor a finish_reason")

    def _line(self, line: bytes, now: float) -> None:
        line = line.rstrip(b"\r")
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            return
        if not line.startswith(b"data:"):
            self.fail("broken", f"a line that is no server-sent event: {line[:_QUOTED]!r}")
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return
        if self.ended:
            self.fail("broken", f"an event after [DONE]: {data[:_QUOTED]!r}")
            return
        try:
            event = _event(data)
        except NOT_JSON:
            self._misread(data)
            return
        self._take(event, now)

    def _take(self, event: Event, now: float) -> None:
        brings = False
        for choice in event.choices or ():
            if choice.text or choice.brings():
                brings = True
            if choice.finish_reason is not None:
                self.finished += 1
                self.limited += choice.finish_reason == "length"
                self.reason = choice.finish_reason[:_QUOTED]
        if brings:
            self.times.append(now)
        if event.usage is not None:
            self.usage = event.usage
        if event.error is not None:
            self.fail(
                "status", f"status 200, then an error in its place: {_beginning(str(event.error))}"
            )

    def fail(self, outcome: str, message: str) -> None:
        if self.fault is None:
            self.fault = (outcome, message)

    def _misread(self, data: bytes) -> None:
        """Records why the bytes of an event are not valid."""
        try:
            value = msgspec.json.decode(data)
        except NOT_JSON as error:
            self.fail("broken", f"an event is no JSON ({error}): {data[:_QUOTED]!r}")
            return
        usage = value.get("usage") if isinstance(value, dict) else None
        try:
            msgspec.convert(usage, Usage | None)
        except msgspec.ValidationError as error:
            self.fail("usage", f"a usage that is none ({error}): {str(usage)[:_QUOTED]}")
            return
        self.fail("broken", f"an event is of another form than OpenAI's: {data[:_QUOTED]!r}")


class ErrorReader(StreamReader):
    """Keeps the beginning of an error's body (status other than 200) for a message."""

    __slots__ = ("_kept", "_status")

    def __init__(self, status: int) -> None:
        super().__init__()
        self._kept = b""
        self._status = status

    def feed(self, data: bytes, now: float) -> None:
        if len(self._kept) <= _TOLD:
            self._kept += data[: _TOLD + 1]

    def finish(self) -> None:
        self.fail("status", f"status {self._status}: {_beginning(repr(self._kept))}")


# --- checks of a complete answer


def judge(
    answer: StreamReader, asked_prompt: int, asked_output: int, most_output: int = -1
) -> tuple[str, str] | None:
    """Returns (outcome, message) for a faulty answer, None for a good one. asked_prompt,
    asked_output: tokens that the workload planned; -1: no fixed length. most_output: most output
    tokens of all samples together."""
    if answer.fault is not None:
        return answer.fault
    usage = answer.usage
    if usage is None:
        return "usage", "it told no usage"
    prompt, output = usage.prompt_tokens, usage.completion_tokens
    if len(answer.times) > output:
        return "usage", f"{len(answer.times)} events with output, but a usage of {output} tokens"
    # an answer has no event with output if the end token is its only token
    ended_itself = answer.reason == "stop" and asked_output == -1
    if output and not answer.times and not ended_itself:
        return "usage", f"no event with output, but a usage of {output} tokens"
    if usage.total_tokens is not None and usage.total_tokens != prompt + output:
        return (
            "usage",
            f"a usage of {prompt} + {output} tokens in and out, {usage.total_tokens} in all",
        )
    if usage.cached > prompt:
        return "usage", f"a usage of {usage.cached} cached tokens of a prompt of {prompt}"
    if asked_output not in (-1, output):
        why = _why_short(answer.reason, prompt + output) if output < asked_output else ""
        return "length", f"{output} tokens out, {asked_output} were asked for{why}"
    if most_output >= 0 and output > most_output:
        return "usage", f"a usage of {output} tokens, {most_output} were asked for at most"
    if asked_output == -1 and (told := _clamped(answer, output, most_output)):
        return "length", told
    if asked_prompt not in (-1, prompt):
        return "length", f"{prompt} tokens in, {asked_prompt} were sent"
    return None


def _clamped(answer: StreamReader, output: int, most_output: int) -> str | None:
    """Returns a message if the server's context cut samples short. Samples end by themselves or at
    max_tokens, so samples with finish_reason "length" should have max_tokens tokens each; fewer
    tokens in total show that some do not.
    """
    if most_output < 0 or not answer.limited:
        return None
    least = answer.limited * (most_output // answer.finished)
    if output >= least:
        return None
    told = (
        f"{answer.limited} of {answer.finished} samples say finish_reason 'length', which is"
        f" {least} tokens or more"
    )
    return f"{output} tokens out, but {told}: {OWN_LIMIT}; is its context that long?"


def _why_short(reason: str | None, tokens: int) -> str:
    """Returns the reason for a short answer. A finish_reason "length" before max_tokens means the
    end of the context. Any other finish_reason means that the model ended, although its end was to
    be ignored.
    """
    if reason == "length":
        return (
            f": {OWN_LIMIT} at {tokens} tokens in and out (finish_reason 'length'); is its context"
            " that long?"
        )
    return (
        f": it ended by itself (finish_reason {reason!r}), so ignore_eos is not heeded"
        if reason
        else ""
    )
