"""Sums over ranks in Triton's interpreter: what a rank reads, adds, writes and says, with the other ranks played.

The interpreter runs one program after the other, so nobody can be waited for: the others' memory holds what they would
have written by then, and flags that are far ahead. Waiting itself is benchmarks/gpu_timing/all_reduce.py's, on GPUs.
"""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from torch import Tensor

from penstock.kernels.triton import all_reduce as ours

pytestmark = pytest.mark.torch

ROOM = 4096


class Played:
    """The memory of all ranks as one of them sees it."""

    def __init__(self, parts: list[Tensor], rank: int, *, there: bool = True, calls: int = 0) -> None:
        self.parts, self.rank, self.there = parts, rank, there
        self.held = [torch.zeros(ours.FLAG_BYTES + 2 * ROOM, dtype=torch.uint8) for _ in parts]
        self.host = torch.zeros(1, dtype=torch.int64)
        addresses = torch.tensor([each.data_ptr() for each in self.held])
        state = torch.tensor([calls, 0, 0, 10, self.host.data_ptr()])
        self.memory = ours.RankMemory(addresses, state, rank, ROOM)
        if there:  # the others have come to this rank's flags, in every program, long ago
            flags = self.flags(rank).view(-1, len(parts))
            flags[:, torch.arange(len(parts)) != rank] = 1 << 40
        for other, part in enumerate(parts):
            if other != rank:
                self.room(other)[: part.shape[0]] = part

    def flags(self, rank: int) -> Tensor:
        return self.held[rank][: ours.MOST_PROGRAMS * len(self.parts) * 8].view(torch.int64)

    def room(self, rank: int) -> Tensor:
        first = ours.FLAG_BYTES + int(self.memory.state[0]) % 2 * ROOM
        return self.held[rank][first : first + ROOM].view(self.parts[0].dtype)

    def sums_of_others(self, want: Tensor, block: int) -> None:
        """What the others have put in place of their blocks by the time that their second flag says."""
        for start in range(0, want.shape[0], block):
            owner = start // block % len(self.parts)
            if owner != self.rank:
                self.room(owner)[start : start + block][: want[start : start + block].shape[0]] = want[
                    start : start + block
                ]


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def made(ranks: int, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Numbers of very different sizes: another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(count, generator=generator) * 10.0 ** (3 * rank)).to(dtype) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "count", "calls"), [(2, 5, 0), (2, 64, 1), (3, 100, 7), (4, 333, 6)])
def test_both_forms_give_the_sum_in_the_ranks_order(ranks: int, count: int, calls: int) -> None:
    parts = made(ranks, count)
    want = in_order(parts)
    assert count < 100 or not torch.equal(want, in_order(parts[::-1])), "the order doesn't show"
    for rank in range(ranks):
        for one_shot in (True, False):
            played = Played(parts, rank, calls=calls)
            if not one_shot:
                played.sums_of_others(want, 16)
            got = ours.all_reduce(parts[rank], played.memory, one_shot=one_shot, cut=(16, 4), most_programs=3)
            assert torch.equal(got, want)
            assert played.memory.state.tolist()[:3] == [calls + 1, 0, 0] and not played.host
            programs = min(3, -(-count // (16 if one_shot else 16 * ranks)))
            for other in range(ranks):
                said = played.flags(other).view(-1, ranks)[:, rank]
                assert (said[:programs] == calls * 2 + (1 if one_shot else 2)).all() and not said[programs:].any()


def test_what_there_is_no_room_for_goes_in_pieces() -> None:
    parts = made(2, ROOM // 4 + 37)
    played = Played([part[: ROOM // 4] for part in parts], 0)
    played.held[1][ours.FLAG_BYTES + ROOM :].view(torch.float32)[:37] = parts[1][ROOM // 4 :]  # the second call's room
    assert torch.equal(ours.all_reduce(parts[0], played.memory, one_shot=True), in_order(parts))
    assert int(played.memory.state[0]) == 2
    assert ours.all_reduce(parts[0][:0], played.memory).shape == (0,) and int(played.memory.state[0]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
def test_a_gathering_has_every_ranks_part(dtype: torch.dtype) -> None:
    parts = [(part * 100).to(dtype) for part in made(3, 70)]
    played = Played(parts, 1)
    assert torch.equal(ours.all_gather(parts[1].view(7, 10), played.memory), torch.stack(parts).view(3, 7, 10))


def test_a_rank_that_does_not_come_is_waited_for_once() -> None:
    """Then the host's word is set, and later calls look once."""
    parts = made(2, 40)
    played = Played(parts, 0, there=False)
    ours.all_reduce(parts[0], played.memory, one_shot=True, cut=(16, 4))
    assert played.host.item() == 2 and played.memory.state.tolist()[:3] == [1, 0, 2]  # 1 + the rank
    played.memory.state[3] = 1 << 60  # it would look forever
    ours.all_reduce(parts[0], played.memory, one_shot=False, cut=(16, 4))
    assert played.memory.state.tolist()[:3] == [2, 0, 2]


@pytest.mark.parametrize("absent", [0, 1, 3])
@pytest.mark.parametrize("one_shot", [True, False])
def test_of_four_ranks_the_one_that_does_not_come_is_named(absent: int, one_shot: bool) -> None:
    """Also where another is late to a later call: nobody was waited for there."""
    parts = made(4, 100)
    played = Played(parts, 2, calls=5)
    flags = played.flags(2).view(-1, 4)
    flags[:, absent] = 0
    ours.all_reduce(parts[2], played.memory, one_shot=one_shot, cut=(16, 4), most_programs=3)
    assert played.host.item() == absent + 1 and played.memory.state.tolist()[:3] == [6, 0, absent + 1]
    flags[:] = 1 << 40
    flags[:, 3 - absent] = 0
    ours.all_reduce(parts[2], played.memory, one_shot=one_shot, cut=(16, 4), most_programs=3)
    assert played.host.item() == absent + 1
