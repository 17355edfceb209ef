"""AppState: the state that all requests of one server process share.

Knows the engine's client, the limits and the shared bounded resources; no single request, no HTTP.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.watchdog import LATE
from penstock.sandbox.pattern_search import PatternSearches
from penstock.sandbox.sandbox import SandboxPool
from penstock.server.online.api_keys import Key
from penstock.server.online.buffered import ResponseBudget, Yielder
from penstock.server.online.intake import BodyTimeouts, Intake
from penstock.server.online.metrics import Metrics
from penstock.server.online.request_limits import QUEUED_A_ROW, QUEUED_TOKENS, RequestLimits
from penstock.server.online.sandbox_turns import SandboxTurns
from penstock.server.openai.checked_forms import CheckedForms
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.logprobs_json import TokenSpellings
from penstock.server.openai.unsupported_fields import CACHE_MARK
from penstock.text.parsers.parser_registry import AnswerParsers

if TYPE_CHECKING:
    from penstock.replicas.replica_set import EngineClient

# most sandbox processes; a third of a core tokenizes as fast as an H200 prefills with a 1B model
MOST_SANDBOXES = 8
NO_TENANT = 0  # tenant number of requests without a key; keys are numbered from 1


class Readiness(Struct):
    """The answer to readiness probes. replicas: their number, if there are several."""

    ready: bool
    replicas: int | UnsetType = UNSET
    replicas_ready: int | UnsetType = UNSET


class EngineState(Struct):
    """The answer of GET /health/engine."""

    alive: bool
    seconds_since_step: float
    step_timeout: float


@dataclass(slots=True, kw_only=True)
class AppState:
    """State passed to every route. closing: set by `close` when running requests must end. servers:
    number of server processes that share the engine. keys: API keys that share the engine and its
    limits. parsers: parsers for tool calls and reasoning in answers of chats."""

    client: EngineClient
    model: str
    metrics: Metrics
    limits: HttpLimits = field(default_factory=HttpLimits)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    created: int = field(default_factory=lambda: int(time.time()))
    servers: int = 1
    keys: Sequence[Key] = ()
    # True: without API keys the admin routes are open to everybody
    admin_without_key: bool = False
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    forms: CheckedForms = field(default_factory=CheckedForms, init=False)
    request_limits: RequestLimits = field(init=False)
    body_timeouts: BodyTimeouts = field(default_factory=BodyTimeouts, init=False)
    intake: Intake = field(init=False)
    spellings: TokenSpellings = field(init=False)
    responses: ResponseBudget = field(init=False)
    _tenants: dict[str, int] = field(init=False)
    yielder: Yielder = field(init=False)
    # threads for long work, for which a shutdown doesn't wait
    threads: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor, init=False)
    # the thread that parses long bodies
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), init=False)
    sandbox_pool: SandboxPool | None = None  # None until it is first used
    turns: SandboxTurns = field(init=False)  # order in which jobs use the sandboxes
    patterns: PatternSearches = field(default_factory=PatternSearches, init=False)
    # True once the note about requests' cache_control was printed
    marked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.spellings = TokenSpellings(self.client.tokenizer, self.client.facts.vocab_size)
        self.intake = Intake(self.limits, self.body_timeouts, self.servers)
        self.responses = ResponseBudget(
            self.limits.max_answer_bytes // self.servers, self.limits.piece_bytes
        )
        self.yielder = Yielder(self.limits.turn_tokens)
        most = max(2, min(MOST_SANDBOXES, len(os.sched_getaffinity(0)) // (2 * self.servers)))
        self.turns = SandboxTurns(most)
        reqs, tokens = self.limits.max_num_queued_reqs, self.limits.max_num_queued_tokens
        reqs = QUEUED_A_ROW * self.client.facts.max_num_seqs if reqs is None else reqs
        self.request_limits = RequestLimits(
            reqs, QUEUED_TOKENS if tokens is None else tokens, len(self.keys), self.servers
        )
        self._tenants = {key.name: key.number for key in self.keys}

    @property
    def ready(self) -> bool:
        return self.client.alive and not self.closing.is_set()

    @property
    def sandboxes(self) -> SandboxPool:
        """The sandbox processes, which turn chats and long texts into token ids."""
        if self.sandbox_pool is None:
            tokenizer = self.client.tokenizer
            assert tokenizer is not None, "whoever has text to tokenise has looked"
            most, _ = self.turns.every.capacity
            self.sandbox_pool = SandboxPool(tokenizer, self.client.facts.max_model_len, most)
        return self.sandbox_pool

    def tell_marks(self, body: bytearray) -> None:
        """Prints, at the first body with Anthropic's `cache_control` marks, that they change
        nothing."""
        if not self.marked and b'"cache_control"' in body:
            self.marked = True
            line = (
                "cache_control is taken, and changes nothing: it"
                f" {CACHE_MARK['cache_control'].note}"
            )
            print(f"penstock: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Makes all waiting requests end with ShuttingDownError."""
        self.closing.set()
        self.body_timeouts.close()

    def close_sandboxes(self) -> None:
        """Ends the sandbox processes. To be called when no request waits for one."""
        if self.sandbox_pool is not None:
            self.sandbox_pool.close()
        self.patterns.close()

    def readiness(self) -> Readiness:
        """Returns the answer to readiness probes."""
        each = self.client.each()
        several = (len(each), sum(one.ready for one in each)) if len(each) > 1 else ()
        return Readiness(self.ready, *several)

    def engine_state(self) -> tuple[EngineState, bool]:
        """Returns the engine's state, and True if it is healthy: it is alive, and completes steps
        while it has work."""
        age, allowed = self.client.step_age, self.limits.step_timeout
        well = self.client.alive and age < allowed * LATE
        return EngineState(self.client.alive, round(age, 3), allowed), well

    def deadline(self, asked: float | None) -> float | None:
        """Returns the deadline of a request whose body has just arrived, in the event loop's time;
        None: no deadline. asked: the request's own `timeout` in seconds; the server's may be
        shorter."""
        allowed = [
            seconds for seconds in (asked, self.limits.request_seconds) if seconds is not None
        ]
        return asyncio.get_running_loop().time() + min(allowed) if allowed else None

    def tenant_of(self, owner: str) -> int:
        """Returns the tenant number under which the engine schedules a batch owner's requests: the
        number of the owner's API key, or NO_TENANT if the key is gone."""
        return self._tenants.get(owner, NO_TENANT)
