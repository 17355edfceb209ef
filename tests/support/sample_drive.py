"""Requests of every kind through an engine over a tiny runner: what each sample says, alone and
among others."""

from __future__ import annotations

import numpy as np
from schedule_drive import ByTurns
from toy_constraint import Alternating

from penstock.config import Config
from penstock.engine.build_engine import engine_over
from penstock.engine.engine import Engine
from penstock.execute.runner import TorchRunner
from penstock.request import Request, SamplingParams
from penstock.schedule.mask_makers import MasksHere

Samples = dict[tuple[int, int], list[int]]
HEAD = [8 + i * 37 % 140 for i in range(53)]  # three blocks and a bit, that prompts share


def requests() -> list[Request]:
    """Groups and lone samples; prompts of one token, of whole blocks, that begin alike, that are
    the same."""
    prompts = [
        HEAD,
        [9],
        HEAD[:49],
        [11, 12, 13] * 9,
        HEAD[:48],
        HEAD,
        [*HEAD, 30, 31],
        [*range(20, 37)],
        HEAD[:33],
    ]
    return [
        Request(
            request_id=number,
            prompt=np.array(prompt, np.int32).tobytes(),
            sampling=SamplingParams(
                n=1 + number % 3, max_tokens=8 + number, seed=number, ignore_eos=True
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def drive(
    engine: Engine,
    asked: list[Request],
    threads: ByTurns,
    together: int = 100,
    forces: bool = False,
) -> Samples:
    """Runs requests, so many at once; the last ones' samples are constrained. forces: by a
    constraint that forces tokens."""
    found: Samples = {}
    waiting = list(asked)
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler.live) < together:
            request = waiting.pop(0)
            held = request.request_id > 5
            engine.scheduler.submit(
                request, (lambda sample: Alternating(160, forces=forces)) if held else None
            )
        threads.run()
        deltas = engine.step()
        engine.scheduler.check()
        for i in range(0 if deltas is None else deltas.count):
            tokens = deltas.tokens[deltas.start[i] : deltas.start[i + 1]].tolist()
            found.setdefault((int(deltas.request[i]), int(deltas.sample[i])), []).extend(tokens)
    return found


def drive_each_alone(runner: TorchRunner) -> Samples:
    """Runs each request by itself, with nothing of it cached, and closes the runner."""
    found: Samples = {}
    for request in requests():
        engine, threads = over(runner, enable_prefix_caching=False)
        found |= drive(engine, [request], threads)
    runner.close()
    return found


def over(runner: TorchRunner, **knobs: object) -> tuple[Engine, ByTurns]:
    threads = ByTurns()
    masks = MasksHere(runner.vocab_size, threads)
    return engine_over(runner, Config.of(**knobs), masks), threads  # type: ignore[arg-type]
