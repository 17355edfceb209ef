"""Grammars: the constraints of requests with structured outputs, compiled once and kept; and the line of those that
wait for it, so that the loop never does.

It knows requests and text's grammars; no scheduler, no channel.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from penstock.errors import UsageError
from penstock.request import REST, Request, SamplingParams, StructuredOutputsParams
from penstock.schedule.constraint import Constraint
from penstock.text.grammar import CompiledGrammar, GrammarCompiler, grammar_text
from penstock.text.tokenizer import Tokenizer

KEPT = 512  # grammars
KEPT_CHARACTERS = 16 * 2**20  # of their texts together; compiled they take a few times as much


class Grammars:
    """The compiled grammars of one engine's vocabulary. The tokenizer is read when the first is asked for."""

    def __init__(self, folder: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._made_of = folder, vocab_size, ends
        self._compiler: GrammarCompiler | None = None
        self._known: OrderedDict[str, CompiledGrammar | UsageError] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    @staticmethod
    def factory(grammars: Grammars | None, sampling: SamplingParams) -> Callable[[int], Constraint]:
        """Returns what makes the constraint of each sample. Raises UsageError where the form cannot be served."""
        asked = sampling.structured_outputs
        assert asked is not None
        if grammars is None:
            rule = "structured_outputs need a tokenizer: leave skip_tokenizer_init off"
            raise UsageError(rule, param="structured_outputs", rule=rule)
        compiled = grammars.compile(asked)
        ends, barred = sampling.stop_token_ids or (), bool(sampling.allowed_token_ids or sampling.bad_words)
        return lambda sample: compiled.matcher(sampling.min_tokens, ends, forces=not barred)

    def compile(self, asked: StructuredOutputsParams) -> CompiledGrammar:
        """Returns the grammar: the one that is kept, else a new one. Raises UsageError, as it did the first time."""
        with self._lock:
            text = grammar_text(asked, self._opened().special if asked.structural_tag is not None else ())
            found = self._known.get(text)
            if found is None:
                found = self._known[text] = self._compile(text)
                self._characters += len(text)
            self._known.move_to_end(text)
            while len(self._known) > KEPT or (self._characters > KEPT_CHARACTERS and len(self._known) > 1):
                self._characters -= len(self._known.popitem(last=False)[0])
        if isinstance(found, UsageError):
            raise found
        return found

    def _compile(self, text: str) -> CompiledGrammar | UsageError:
        try:
            return self._opened().compile(text)
        except UsageError as error:
            return error

    def _opened(self) -> GrammarCompiler:
        if self._compiler is None:
            folder, vocab_size, ends = self._made_of
            self._compiler = GrammarCompiler(Tokenizer.load(folder, vocab_size=vocab_size), ends)
        return self._compiler


class CompileQueue:
    """Requests on their way into an engine: one with a grammar comes out when that was compiled, by a thread."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "penstock-grammars")
        self._requests: dict[int, tuple[Request, Future[CompiledGrammar]]] = {}
        self._cut: set[int] = set()  # of which no sample is wanted any more, but a word of each

    @property
    def waiting(self) -> bool:
        """Whether a request is here."""
        return bool(self._requests)

    def put(self, request: Request) -> bool:
        """Takes a request in that has a grammar to compile. Returns whether it has."""
        asked = request.sampling.structured_outputs
        if asked is None or self._grammars is None:
            return False
        self._requests[request.request_id] = request, self._thread.submit(self._grammars.compile, asked)
        return True

    def ready(self) -> list[Request]:
        """Takes those out whose grammar is there, or was refused, as Grammars.factory says again."""
        out = [request for request, work in self._requests.values() if work.done()]
        for request in out:
            del self._requests[request.request_id]
        return out

    def take_cut(self, request_id: int) -> bool:
        """Whether a request that came out was cancelled here with REST."""
        found = request_id in self._cut
        self._cut.discard(request_id)
        return found

    def cancel(self, request_id: int, sample: int | None) -> bool:
        """Drops a request, or one sample of it, that is still here. Returns whether it was. REST: it comes out
        all the same, for the engine to tell of its samples (take_cut)."""
        found = self._requests.get(request_id)
        if found is None:
            return False
        request, work = found
        if sample == REST:
            self._cut.add(request_id)
            return True
        kept = range(request.sampling.n) if request.samples is None else request.samples
        left = [] if sample is None else [index for index in kept if index != sample]
        if left:
            self._requests[request_id] = replace(request, samples=left), work
        else:
            del self._requests[request_id]
            self._cut.discard(request_id)
            work.cancel()
        return True

    def drop(self, of: Callable[[int], bool]) -> None:
        """Drops all requests whose ids are `of` somebody who has gone."""
        for request_id in [number for number in self._requests if of(number)]:
            self.cancel(request_id, None)
