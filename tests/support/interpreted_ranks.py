"""Ranks that add up in Triton's interpreter: each a process, forked from one that only this starts,
over memory that all map at one address. They meet as GPUs do, program by program.

    python interpreted_ranks.py     cases on standard input, a JSON list; what each rank got on
    standard output
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from torch import Tensor

from penstock.kernels.triton import all_reduce as ours
from penstock.kernels.triton.all_reduce_kernels import STATE

LOOKS = 20_000  # that a rank which comes may take: a minute, where another has failed
FEW = 5  # at one that doesn't
FOREVER = 1 << 60
CUT = (16, 4)
PROGRAMS = 2


def parts(case: dict[str, Any], call: int) -> list[Tensor]:
    """What each rank has at a call: numbers of very different sizes, another order of adding gives
    other bits; the first of the call before the last are NaNs of every bit, which are what empty
    memory holds."""
    generator, kind = (
        torch.Generator().manual_seed(case["count"] + call),
        getattr(torch, case["dtype"]),
    )
    made = [
        (torch.randn(case["count"], generator=generator) * 7.0**rank)
        for rank in range(case["ranks"])
    ]
    if not kind.is_floating_point:
        return [
            (part * 100).to(kind).fill_(-1) if call == 1 else (part * 100).to(kind) for part in made
        ]
    floats = [part.to(kind) for part in made]
    if call == case["calls"] - 2:
        for part in floats:
            part[:4].view(torch.uint8).fill_(0xFF)
    return floats


def one(case: dict[str, Any]) -> dict[str, Any]:
    """-> state: each rank's numbers behind its last call; host: the word that its host reads; left:
    bytes of the shared memory that are not empty; wrong: (rank, call) of sums that are not the one
    in the ranks' order."""
    ranks, calls = case["ranks"], case["calls"]
    gathers = case.get("gathers", False)
    held = [
        torch.full((2 * case["room"],), 0xFF, dtype=torch.uint8).share_memory_()
        for _ in range(ranks)
    ]
    hosts, states = (
        torch.zeros(ranks, dtype=torch.int64),
        torch.zeros(ranks, STATE, dtype=torch.int64),
    )
    shape = (ranks, calls, ranks if gathers else 1, case["count"])
    got = torch.zeros(shape, dtype=getattr(torch, case["dtype"])).share_memory_()
    for each in (hosts, states):
        each.share_memory_()
    addresses = torch.tensor([each.data_ptr() for each in held])

    def work(rank: int) -> None:
        states[rank] = torch.tensor([0, 0, 0, LOOKS, hosts[rank:].data_ptr()])
        memory = ours.RankMemory(addresses, states[rank], rank, case["room"])
        for call in range(calls):
            x = parts(case, call)[rank]
            if gathers:
                got[rank, call] = ours.all_gather(x, memory)
            else:
                one_shot = case["one_shot"] if case["one_shot"] is not None else bool(call % 2)
                got[rank, call] = ours.all_reduce(
                    x, memory, one_shot=one_shot, cut=CUT, most_programs=PROGRAMS
                )

    _forked([lambda rank=rank: work(rank) for rank in range(ranks)])
    wrong = []
    for call in range(calls):
        every = parts(case, call)
        total = every[0].float()
        for part in every[1:]:
            total = total + part.float()
        want = torch.stack(every) if gathers else total.to(every[0].dtype)[None]
        same = [
            torch.equal(got[rank, call].nan_to_num(7.0), want.nan_to_num(7.0))
            for rank in range(ranks)
        ]
        wrong += [(rank, call) for rank in range(ranks) if not same[rank]]
    left = sum(int((each != 0xFF).sum()) for each in held)
    return {"state": states[:, :3].tolist(), "host": hosts.tolist(), "left": left, "wrong": wrong}


def alone(case: dict[str, Any]) -> dict[str, Any]:
    """One rank's call where the others have come long ago but one, and a call that nobody comes to
    -> state, host."""
    ranks, absent, me = case["ranks"], case["absent"], case["me"]
    held = [torch.full((2 * case["room"],), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
    host = torch.zeros(1, dtype=torch.int64)
    state = torch.tensor([0, 0, 0, FEW, host.data_ptr()])
    memory = ours.RankMemory(
        torch.tensor([each.data_ptr() for each in held]), state, me, case["room"]
    )
    words = held[me][: case["room"]].view(torch.int32)
    # by each rank to this one, which lie one behind another
    sent = case["count"] // (1 if case["one_shot"] else ranks)
    words[:] = 0
    words[absent * sent : (absent + 1) * sent] = -1
    for looks in (FEW, FOREVER):
        state[3] = looks
        ours.all_reduce(
            parts(case, 0)[me], memory, one_shot=case["one_shot"], cut=CUT, most_programs=PROGRAMS
        )
    return {"state": state[:3].tolist(), "host": host.item()}


def _forked(works: list[Callable[[], None]]) -> None:
    children = []
    for work in works:
        if (child := os.fork()) == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise SystemExit("a rank failed: see above")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process has none of torch's threads
    print(
        json.dumps(
            [alone(case) if "absent" in case else one(case) for case in json.load(sys.stdin)]
        )
    )
