"""RayWorkers: a job's engines as Ray workers. Has the interface of a single engine.

    job's prompts --pieces--> the worker with least to do --turn--> finished samples --> the job's
    journal

A piece is a prompt with at most PIECE of its samples. A turn is one call of a worker. The journal
of results stays in the driver, so the death of a worker or of the driver loses only unfinished
samples. A dead worker is started again elsewhere, and its open pieces go to workers with room.
Prompts carry their seeds, so repeated samples come out the same. Knows Ray's actors; no files.
"""

from __future__ import annotations

import heapq
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from penstock import __version__
from penstock.children.carried_error import CarriedError
from penstock.config import Config
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import EngineError, UsageError
from penstock.jobs.open_llm import OpenStepped, identity, open_llm
from penstock.llm import Finished, Prompt
from penstock.on_ray.cluster import RayCluster, ray_cluster
from penstock.on_ray.places import place_workers
from penstock.on_ray.ray_worker import TURN, RayWorker, TurnNews, WorkerHello

# most samples of one prompt sent to one worker at once; each piece repeats the prompt's prefill
PIECE = 256
# samples sent to a worker, as a multiple of its rows: even if all rows end at once, the next
# samples are there
AHEAD = 2
TURNS = 2  # calls of `turn` queued at a worker: one runs, one waits
PATIENCE = 30.0  # seconds from the first ready worker until the job starts without the others
MOST_DEATHS = 3  # deaths of a worker in a row, without a sample in between, that end the job
INVALID = "the prompt has half a surrogate pair; send valid Unicode"


@dataclass(slots=True)
class SentPrompt:
    """A piece of a prompt: the prompt, its missing samples, and the encoded message."""

    prompt: Prompt
    left: set[int]
    encoded: msgspec.Raw


@dataclass(slots=True, eq=False)
class WorkerSeat:
    """A worker's state. After the death of its Ray actor, a new actor takes its seat.

    actor: the present one. rows: rows of its engine, 0 until it is ready. calls: unfinished calls
    of `turn`, in order. work: pieces by their numbers. samples: unfinished samples of all pieces.
    tokens: output tokens made by earlier actors, and by this one."""

    actor: Any
    opening: Any
    rows: int = 0
    calls: deque[Any] = field(default_factory=deque)
    outbox: list[msgspec.Raw] = field(default_factory=list)
    work: dict[int, SentPrompt] = field(default_factory=dict)
    samples: int = 0
    deaths: int = 0
    tokens: tuple[int, int] = (0, 0)

    @property
    def room(self) -> int:
        return AHEAD * self.rows - self.samples


class RayWorkers:
    """A job's engine over a Ray cluster, used as a context manager. Raises CapacityError if the
    cluster is too small, UsageError, and the errors of an engine's start."""

    def __init__(
        self,
        config: Config,
        *,
        address: str | None = None,
        workers: int | None = None,
        open_engine: OpenStepped = open_llm,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        if config.parallel.data_parallel_size > 1:
            raise UsageError(
                "--on ray has a worker a replica: leave --data-parallel-size out, and say --workers"
            )
        named = {
            name: getattr(config.model, name) for name in ("model", "tokenizer", "chat_template")
        }
        here = {
            name: os.path.abspath(path)
            for name, path in named.items()
            if path and Path(path).exists()
        }
        if here:  # workers run in another folder, so paths must be absolute
            config = Config.of(**config.told() | here)
        self.restarts = 0
        self._made = (msgspec.msgpack.encode(config.told()), open_engine, step_timeout)
        self._identity = identity(config)
        self._hello: WorkerHello | None = None
        self._backlog: deque[SentPrompt] = deque()
        self._count = 0
        with ExitStack() as stack:
            self.cluster: RayCluster = stack.enter_context(ray_cluster(address))
            self._places = place_workers(self.cluster, workers, config)
            self._seats = [WorkerSeat(*self._start()) for _ in range(self._places.workers)]
            stack.callback(self._end)
            self._wait_for_workers()
            self._left = stack.pop_all()

    # --- methods that an engine has too

    @property
    def facts(self) -> WorkerHello:
        """The first ready worker's message with its engine's facts; all workers have the same."""
        assert self._hello is not None
        return self._hello

    @property
    def generation_tokens(self) -> int:
        return sum(before + now for before, now in [seat.tokens for seat in self._seats])

    def stats(self) -> dict[str, float]:
        """Returns the number of workers, of restarts, and of tokens made."""
        return {
            "generation_tokens": self.generation_tokens,
            "workers": len(self._seats),
            "worker_restarts": self.restarts,
        }

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.close()

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[Finished]:
        """Pulls prompts while workers have room, and yields each finished sample. after_step:
        function that is called about every TURN seconds. Raises EngineError if a worker keeps
        dying, and the errors of a worker's start."""
        source, refused = iter(prompts), list[Finished]()
        pieces = (piece for prompt in source for piece in self._pieces(prompt, refused))
        while True:
            more = self._hand_out(pieces)
            yield from refused
            refused.clear()
            if not more and not any(seat.work for seat in self._seats):
                return
            for seat in self._seats:
                self._call(seat)
            for seat, call in self._told():
                yield from self._hear(seat, call)
            after_step()

    # --- sending prompts to workers

    def _pieces(self, prompt: Prompt, refused: list[Finished]) -> Iterator[SentPrompt]:
        """Yields the prompt in pieces of PIECE samples. A prompt with stop_when stays whole, since
        one worker must see all its answers. Adds a prompt that can't be encoded to `refused`.
        """
        wanted = list(range(prompt.params.n) if prompt.samples is None else prompt.samples)
        size = PIECE if prompt.params.stop_when is None else len(wanted)
        for at in range(0, len(wanted), size):
            piece = wanted[at : at + size]
            try:
                encoded = _encode(prompt, piece)
            except UnicodeEncodeError:
                refused.append(
                    Finished(key=prompt.key, output=None, error=INVALID, prompt_tokens=0)
                )
                return
            yield SentPrompt(prompt, set(piece), encoded)

    def _hand_out(self, pieces: Iterator[SentPrompt]) -> bool:
        """Gives pieces to the workers with the fewest samples per row, first the pieces of dead
        workers. Returns False once no pieces are left."""
        seats = [
            (seat.samples / seat.rows, number)
            for number, seat in enumerate(self._seats)
            if seat.room > 0
        ]
        heapq.heapify(seats)
        while seats:
            piece = self._backlog.popleft() if self._backlog else next(pieces, None)
            if piece is None:
                return False
            _, number = seats[0]
            seat = self._seats[number]
            self._give(seat, piece)
            if seat.room > 0:
                heapq.heapreplace(seats, (seat.samples / seat.rows, number))
            else:
                heapq.heappop(seats)
        return True

    def _give(self, seat: WorkerSeat, piece: SentPrompt) -> None:
        self._count += 1
        seat.work[self._count] = piece
        seat.samples += len(piece.left)
        seat.outbox.append(msgspec.Raw(msgspec.msgpack.encode((self._count, piece.encoded))))

    def _call(self, seat: WorkerSeat) -> None:
        """Queues calls of `turn` up to TURNS, if the worker has pieces."""
        while seat.rows and seat.work and len(seat.calls) < TURNS:
            seat.calls.append(seat.actor.turn.remote(msgspec.msgpack.encode(seat.outbox)))
            seat.outbox.clear()

    # --- receiving results from workers

    def _told(self) -> list[tuple[WorkerSeat, Any]]:
        """Returns the workers' finished calls, oldest first for each worker. Waits up to TURN
        seconds."""
        import ray

        calls = {
            seat.opening if not seat.rows else seat.calls[0]: seat
            for seat in self._seats
            if _waits(seat)
        }
        first, _ = ray.wait(list(calls), timeout=TURN)
        over = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if first else []
        return [(calls[call], call) for call in over]

    def _hear(self, seat: WorkerSeat, call: Any) -> Iterator[Finished]:
        import ray

        try:
            said: bytes = ray.get(call)
        except ray.exceptions.RayTaskError as fault:
            raise EngineError(f"a worker can't run here: {_line(fault)}") from fault
        except ray.exceptions.RayError as death:
            self._lost(seat, death)
            return
        if not seat.rows:
            self._opened(seat, said)
            return
        seat.calls.popleft()
        news = msgspec.msgpack.decode(said, type=TurnNews)
        seat.tokens = seat.tokens[0], news.tokens
        for finished in news.finished:
            seat.deaths = 0
            yield self._ended(seat, finished)

    def _ended(self, seat: WorkerSeat, finished: Finished) -> Finished:
        """Returns a finished sample, or a refused prompt, with the job's key in place of the
        piece's number."""
        piece = seat.work[finished.key]
        over = piece.left if finished.output is None else {finished.output.index}
        seat.samples -= len(over)
        piece.left = piece.left - over
        if not piece.left:
            del seat.work[finished.key]
        return replace(finished, key=piece.prompt.key)

    # --- starting and replacing workers

    def _start(self) -> tuple[Any, Any]:
        import ray

        places = self._places
        worker = ray.remote(RayWorker).options(num_cpus=places.cpus, num_gpus=places.gpus)
        actor = worker.remote(*self._made)
        return actor, actor.open.remote()

    def _end(self) -> None:
        """Kills the workers, which frees their cores and GPUs even if the driver stays."""
        import ray

        for seat in self._seats:
            ray.kill(seat.actor)

    def _wait_for_workers(self) -> None:
        """Waits until all workers are ready, or PATIENCE seconds after the first; late workers join
        later."""
        print(f"penstock: {self._places}", file=sys.stderr, flush=True)
        begin: float | None = None
        while not all(seat.rows for seat in self._seats):
            for seat, call in self._told():
                list(self._hear(seat, call))
            if begin is None and any(seat.rows for seat in self._seats):
                begin = time.monotonic()
            if begin is not None and time.monotonic() - begin > PATIENCE:
                return

    def _opened(self, seat: WorkerSeat, said: bytes) -> None:
        hello = msgspec.msgpack.decode(said, type=WorkerHello | CarriedError)
        if isinstance(hello, CarriedError):
            raise hello.error()
        if hello.penstock != __version__:
            raise UsageError(
                f"penstock {hello.penstock} is installed at {hello.machine} and {__version__} here:"
                " install the same version on every machine of the cluster"
            )
        if hello.identity != self._identity:
            raise UsageError(
                f"{self._identity['model']} has other files at {hello.machine} than here: "
                "put the model into a folder that all machines share, or name one of the hub"
            )
        seat.rows = hello.rows
        self._hello = self._hello or hello

    def _lost(self, seat: WorkerSeat, death: Exception) -> None:
        """Starts another actor in the seat, and queues the dead actor's pieces for any worker."""
        import ray

        seat.deaths += 1
        if seat.deaths >= MOST_DEATHS:
            raise EngineError(
                f"a worker died {seat.deaths} times in a row before it ended one sample"
                f" ({_line(death)}); its last words are above"
            ) from death
        print(
            f"penstock: a worker died and is started again ({_line(death)})",
            file=sys.stderr,
            flush=True,
        )
        self.restarts += 1
        for piece in seat.work.values():
            self._backlog.append(
                SentPrompt(piece.prompt, piece.left, _encode(piece.prompt, sorted(piece.left)))
            )
        ray.kill(seat.actor)  # the actor may still be alive, if only its answer was lost
        actor, opening = self._start()
        tokens = (sum(seat.tokens), 0)
        self._seats[self._seats.index(seat)] = WorkerSeat(
            actor, opening, deaths=seat.deaths, tokens=tokens
        )


def _encode(prompt: Prompt, samples: list[int]) -> msgspec.Raw:
    """Encodes a prompt and the indices of its samples, without the job's key. Raises
    UnicodeEncodeError."""
    some = None if len(samples) == prompt.params.n else samples
    return msgspec.Raw(msgspec.msgpack.encode(replace(prompt, key=None, samples=some)))


def _waits(seat: WorkerSeat) -> bool:
    return not seat.rows or bool(seat.calls)


def _line(error: Exception) -> str:
    """Returns Ray's error in one line, from its first line and its last, which has the cause."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return (
        " ... ".join(dict.fromkeys([lines[0][:120], lines[-1][:200]]))
        if lines
        else type(error).__name__
    )
