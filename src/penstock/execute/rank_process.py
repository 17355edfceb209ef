"""The process of a rank other than 0: `python -m penstock.execute.rank_process`, started by remote_rank.py alone.

It opens its share of the model and runs each plan that comes, in order, until rank 0 hangs up or is gone. It schedules
nothing, and knows no sequences.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import sys
import threading
import traceback
from pathlib import Path

import torch

from penstock.artifact.manifest import KERNELS
from penstock.errors import EngineError, PenstockError
from penstock.execute.executor import open_executor
from penstock.execute.limits import Limits
from penstock.execute.open_collectives import open_collectives
from penstock.execute.open_runner import find_device, find_ops, open_share
from penstock.execute.rank_channel import (
    LATE_MASKS,
    PLANS,
    RankChannel,
    RankDone,
    RankDrew,
    RankFailed,
    RankLimits,
    RankOrder,
    RankStart,
    checksum,
    decode_limits,
    decode_order,
    decode_start,
    encode,
)  # fmt: skip
from penstock.execute.rank_gpus import check_own_gpu
from penstock.execute.runner import TorchRunner
from penstock.parallel.collectives import Collectives
from penstock.parallel.layout import Layout
from penstock.parent_death import begin_child
from penstock.schedule.step import Flight

Flights = queue.SimpleQueue[tuple[int, Flight]]


def main() -> None:
    """Ends the process without another look at it: a step may be stuck in a sum that nobody completes."""
    begin_child()
    end = socket.socket(fileno=int(sys.argv[1]))
    channel = RankChannel(end, 1.0)
    data = channel.receive()
    if data is not None:  # else rank 0 was gone before it said anything
        try:
            _run(channel, decode_start(data))
        except Exception as error:  # noqa: BLE001  rank 0 raises it
            _fail(channel, error)
    os._exit(0)


def _run(channel: RankChannel, start: RankStart) -> None:
    """Runs steps until rank 0 hangs up."""
    runner, collectives = _open(channel, start)
    # As in the engine's process: what is loaded by now is looked through by no collection.
    gc.collect()
    gc.freeze()
    flights = Flights()
    threading.Thread(target=_tell, args=(channel, runner, collectives, flights), daemon=True).start()
    while (data := channel.receive()) is not None:
        if (order := decode_order(data)) is not None:
            channel.send(encode(_carry_out(runner, order)))
            continue
        plan = PLANS.decode(data)
        flight = runner.launch(plan)
        if plan.draws_late:
            if (data := channel.receive()) is None:
                return
            flight = runner.draw(LATE_MASKS.decode(data))
        flights.put((plan.number, flight))


def _carry_out(runner: TorchRunner, order: RankOrder) -> RankDone:
    try:
        if order.what == "load":
            runner.load_beside(order.source)
        elif order.what == "take":
            runner.take_beside()
        else:
            runner.forget_beside()
    except PenstockError as error:
        return RankDone(RankFailed.of(error))
    return RankDone()


def _open(channel: RankChannel, start: RankStart) -> tuple[TorchRunner, Collectives]:
    config = start.config()
    device = find_device(config.model.device, start.rank)
    kernels, binaries = Path(start.folder) / KERNELS, find_ops(config).binaries
    if binaries is not None and kernels.is_dir():  # an artifact's: rank 0 has verified them
        binaries.open(kernels, sealed=config.model.sealed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_own_gpu(device, config.memory.gpu_memory_utilization)
    executor = open_executor(device)
    collectives = open_collectives(Path(start.meeting), start.rank, start.size, start.seconds, device)

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
        runner = open_share(config, Path(start.folder), device, executor, layout, agree, met=collectives.check)
        collectives.ready()
        return runner

    return executor.call(opened), collectives


def _tell(channel: RankChannel, runner: TorchRunner, collectives: Collectives, flights: Flights) -> None:
    """Says what each step drew; one that fails ends the process."""
    while True:
        number, flight = flights.get()
        try:
            tokens = flight.fetch()
            collectives.check()
            channel.send(encode(RankDrew(number, checksum(tokens), runner.counts())))
        except Exception as error:  # noqa: BLE001  rank 0 raises it
            _fail(channel, error)


def _fail(channel: RankChannel, error: Exception) -> None:
    if not isinstance(error, PenstockError):
        traceback.print_exception(error)
    try:
        channel.send(encode(RankFailed.of(error)))
    except OSError:
        pass  # rank 0 is gone
    os._exit(1)


if __name__ == "__main__":
    main()
