"""The process of a rank other than 0. Its command is `python -m penstock.ranks.rank_process`; only
remote_rank.py starts it.

Opens its share of the model and runs each plan in order, until rank 0 hangs up or is gone.
Schedules nothing, and knows no sequences.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.artifact.manifest import KERNELS
from penstock.children.carried_error import CarriedError
from penstock.children.lifetime import begin_child
from penstock.errors import EngineError, PenstockError
from penstock.execute.executor import open_executor
from penstock.execute.limits import Limits
from penstock.execute.open_runner import find_device, find_ops, open_share
from penstock.execute.runner import TorchRunner
from penstock.parallel.collectives import Collectives
from penstock.parallel.layout import Layout
from penstock.ranks.open_collectives import open_collectives
from penstock.ranks.rank_channel import (
    LATE_MASKS,
    PLANS,
    RankChannel,
    RankDone,
    RankDrew,
    RankLimits,
    RankOrder,
    RankStart,
    checksum,
    decode_limits,
    decode_order,
    decode_start,
    encode,
)
from penstock.ranks.rank_gpus import check_own_gpu
from penstock.schedule.step import Flight

_LOOK = 1e-3  # seconds between two checks whether a step is done


def main() -> None:
    """Runs the rank, then ends the process at once without clean-up: a GPU may be stuck in an
    all-reduce that never completes."""
    begin_child()
    end = socket.socket(fileno=int(sys.argv[1]))
    channel = RankChannel(end, 1.0)
    data = channel.receive()
    if data is not None:  # else rank 0 was gone before it sent the start
        try:
            _run(channel, decode_start(data))
        except Exception as error:  # noqa: BLE001  rank 0 raises it
            _fail(channel, error)
    os._exit(0)


def _run(channel: RankChannel, start: RankStart) -> None:
    """Runs steps until rank 0 hangs up.

    Uses a single thread. When a second one read the steps' tokens, a pinned allocation of this one
    sometimes failed: "CUDA error: invalid argument" (torch 2.11, only on ranks above 0).
    """
    runner, collectives = _open(channel, start)
    # Exclude all loaded objects from garbage collection, as the engine's process does.
    gc.collect()
    gc.freeze()
    steps = _Steps(channel, runner, collectives)
    while (data := steps.receive()) is not None:
        if (order := decode_order(data)) is not None:
            channel.send(encode(_carry_out(runner, order)))
            continue
        plan = PLANS.decode(data)
        flight = runner.launch(plan)
        if plan.draws_late:
            if (data := steps.receive()) is None:
                return
            flight = runner.draw(LATE_MASKS.decode(data))
        steps.out.append((plan.number, flight))


@dataclass(slots=True)
class _Steps:
    """Steps in flight and their reports to rank 0. out: (step number, flight) of each, oldest
    first."""

    channel: RankChannel
    runner: TorchRunner
    collectives: Collectives
    out: deque[tuple[int, Flight]] = field(default_factory=deque)

    def receive(self) -> bytearray | None:
        """Waits for rank 0's next message; meanwhile reports each finished step's tokens."""
        while self.out and not self.channel.comes(0.0):
            if self.out[0][1].ready():
                self._tell(*self.out.popleft())
            else:
                self.channel.comes(_LOOK)
        return self.channel.receive()

    def _tell(self, number: int, flight: Flight) -> None:
        tokens = flight.fetch()
        self.collectives.check()
        self.channel.send(encode(RankDrew(number, checksum(tokens), self.runner.counts())))


def _carry_out(runner: TorchRunner, order: RankOrder) -> RankDone:
    try:
        if order.what == "load":
            runner.load_beside(order.source)
        elif order.what == "take":
            runner.take_beside()
        else:
            runner.forget_beside()
    except PenstockError as error:
        return RankDone(CarriedError.of(error))
    return RankDone()


def _open(channel: RankChannel, start: RankStart) -> tuple[TorchRunner, Collectives]:
    config = start.config()
    device = find_device(config.model.device, start.rank)
    kernels, binaries = Path(start.folder) / KERNELS, find_ops(config).binaries
    if binaries is not None and kernels.is_dir():  # a built engine's kernels, verified by rank 0
        binaries.open(kernels, sealed=config.model.sealed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_own_gpu(device, config.memory.gpu_memory_utilization)
    executor = open_executor(device)
    collectives = open_collectives(
        Path(start.meeting), start.rank, start.size, start.seconds, device
    )

    def agree(own: Limits) -> Limits:
        channel.send(encode(RankLimits(own)))
        data = channel.receive()
        if data is None:
            raise EngineError("rank 0 is gone")
        collectives.connect()
        return decode_limits(data)

    def opened() -> TorchRunner:
        torch.set_num_threads(start.threads)
        layout = Layout(start.rank, start.size, collectives.all_reduce, collectives.all_gather)
        runner = open_share(
            config, Path(start.folder), device, executor, layout, agree, met=collectives.check
        )
        collectives.ready()
        return runner

    return executor.call(opened), collectives


def _fail(channel: RankChannel, error: Exception) -> None:
    if (
        not isinstance(error, PenstockError) or error.__cause__ is not None
    ):  # print the device's error behind the one-line message
        traceback.print_exception(error)
    try:
        channel.send(encode(CarriedError.of(error)))
    except OSError:
        pass  # rank 0 is gone
    os._exit(1)


if __name__ == "__main__":
    main()
