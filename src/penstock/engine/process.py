"""The engine's process, started only by launch.py. Its command is `python -m
penstock.engine.process`.

Reads one line of JSON from standard input (the knobs and one address per client), loads the model,
sends Ready, and runs the loop until all clients have closed; when a client goes away, its requests
end. The parent keeps standard input open; when it closes, the process exits. Knows the loop and the
channel.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.children.lifetime import begin_child
from penstock.config import Config
from penstock.engine.build_engine import EngineFacts, build_engine
from penstock.engine.channel import (
    Ask,
    Cancel,
    ControlOf,
    EngineEnd,
    GoesOn,
    Heard,
    Left,
    Ready,
    StepOutputs,
)
from penstock.engine.control import ControlQueue, Weights
from penstock.engine.engine import Engine, Refused
from penstock.engine.watchdog import STEP_TIMEOUT, Watchdog
from penstock.errors import PenstockError
from penstock.request import REST
from penstock.structured_output.compile_queue import CompileQueue

COMPILE_LOOK = 1  # milliseconds between checks of compiling grammars while there is no other work
STATS_EVERY = 0.1  # seconds between stats messages


class Start(msgspec.Struct):
    """Settings of the engine process: a line of JSON on its standard input."""

    addresses: list[str]
    knobs: dict[str, Any]
    step_timeout: float = STEP_TIMEOUT
    cores: list[int] = []  # CPU cores to pin this process to; empty: not pinned


def main(open: Callable[[Config], tuple[Engine, EngineFacts]] = build_engine) -> int:
    """Runs the engine's process and returns its exit code. open: makes the engine of a config;
    benchmarks pass one that computes nothing."""
    begin_child()
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the parent was gone before it sent the line
    start = msgspec.json.decode(line, type=Start)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    end = EngineEnd(start.addresses)
    _say_what_loads()
    try:
        engine, facts = open(Config.of(**start.knobs))
        # All objects loaded by now (torch's modules, the model) live to the end. Scanning them in
        # each full garbage collection made steps of 5 to 23 ms instead of the usual 0.5 ms, so
        # freeze excludes them.
        gc.collect()
        gc.freeze()
        end.send_up(Ready(facts))
        _turn(engine, end, Watchdog(start.step_timeout))
        engine.close()
    except PenstockError as error:
        end.send_up(CarriedError.of(error))
        return error.exit_code
    except Exception as error:
        end.send_up(CarriedError.of(error, "the engine died: "))
        raise
    finally:
        end.close()
    return 0


def _say_what_loads() -> None:
    """Prints Penstock's log, from level `info` on, to standard error, so that the user sees how
    loading goes."""
    ours, lines = logging.getLogger("penstock"), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("penstock: %(message)s"))
    ours.addHandler(lines)
    ours.setLevel(logging.INFO)


def _turn(engine: Engine, end: EngineEnd, watchdog: Watchdog) -> None:
    """Runs the loop: receive messages, run a step, send its deltas. Sleeps on the channel while
    there is no work."""
    told = 0.0
    idle = False

    def goes_on() -> None:
        watchdog.stepped()
        end.send_up(GoesOn())

    engine.runner.watch(goes_on)
    compiling, controls = CompileQueue(engine.masks), ControlQueue(engine)
    # messages about requests that wait behind a control command, or until the engine wakes up
    later: list[Heard] = []
    while True:
        refused: list[Refused] = []
        words = later if later and not controls.defers else []
        later = [] if words else later
        pause = (COMPILE_LOOK if compiling.waiting else -1) if idle and not words else 0
        for word in [*words, *end.receive(pause)]:
            if controls.defers and _is_of_waiting(word, later):
                later.append(word)
            elif isinstance(word, ControlOf):
                controls.put(word.client, word.control)
                if word.control.mode == "abort":
                    _end_all(engine, compiling)
            elif isinstance(word, Ask):
                if not compiling.put(word.request):
                    refusal = engine.submit(word.request)
                    refused += [refusal] if refusal is not None else []
            elif isinstance(word, Left):
                controls.drop(word.client)
                later = [
                    held
                    for held in later
                    if not _is_asked_by(held, partial(end.owners.owns, word.client))
                ]
                compiling.drop(partial(end.owners.owns, word.client))
                for request_id in [
                    n for n in engine.scheduler.live if end.owners.owns(word.client, n)
                ]:
                    engine.cancel(request_id)
            elif not compiling.cancel(word.request_id, word.sample):
                engine.cancel(word.request_id, word.sample)
        if not end.clients:
            return
        for request, form in compiling.ready():
            refusal = engine.submit(request, form)
            refused += [refusal] if refusal is not None else []
            if compiling.take_cut(request.request_id):
                engine.cancel(request.request_id, REST)
        deltas = None
        if engine.has_work and not engine.asleep:
            watchdog.began()
            deltas = engine.step(launch=not controls.holds)
            if deltas is not None:
                watchdog.stepped()
        if not compiling.waiting and controls.due:
            # a control command has no time limit: stop the watchdog, and tell the clients by
            # `changing`
            watchdog.idle()
            end.send_up(Weights(engine.weights_version, engine.asleep, changing=True))
            done = controls.next()
            end.send_up(Weights(engine.weights_version, engine.asleep))
            end.send_to(*done)
        idle = not (controls.waiting or (not engine.asleep and (engine.has_work or later)))
        if idle:
            watchdog.idle()
        now = time.monotonic()
        stats = (
            engine.stats() if (idle and not compiling.waiting) or now - told > STATS_EVERY else None
        )
        told = now if stats is not None else told
        if (
            stats is not None
            or refused
            or (deltas is not None and (deltas.count or deltas.prompts))
        ):
            end.send_up(StepOutputs(deltas, refused, stats))


def _end_all(engine: Engine, compiling: CompileQueue) -> None:
    """Ends all running and waiting requests; each still sends its tokens so far."""
    for request_id in [*compiling.request_ids, *engine.scheduler.live]:
        if not compiling.cancel(request_id, REST):
            engine.cancel(request_id, REST)


def _is_of_waiting(word: Heard, later: list[Heard]) -> bool:
    """Returns True if a message must wait behind a control command: it is a request, or the cancel
    of a waiting request."""
    if isinstance(word, Cancel):
        return any(
            isinstance(held, Ask) and held.request.request_id == word.request_id for held in later
        )
    return isinstance(word, Ask)


def _is_asked_by(word: Heard, owns: Callable[[int], bool]) -> bool:
    return isinstance(word, Ask) and owns(word.request.request_id)


def _end_with_parent() -> None:
    """Blocks until standard input closes, which it does however the parent ends, then exits.

    Reads from the descriptor, not from the buffered object: a reader inside its lock aborts the
    interpreter's exit.
    """
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
