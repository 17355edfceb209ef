"""Which steps become graphs at work: those that come again, while there is room. Without a GPU, by
a made-up graph."""

from __future__ import annotations

import pytest
import torch

from penstock.execute.graphs import Graphs

pytestmark = pytest.mark.torch

GIB = 2**30


class MadeUp:
    """Serves as torch.cuda.CUDAGraph."""

    def capture_begin(self, **more: object) -> None:
        pass

    def capture_end(self) -> None:
        pass


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the GPU has free, where the largest step takes one GiB."""
    left = [10 * GIB]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MadeUp)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left[0], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * GIB)
    return left


def _states(size: int, grouped: bool) -> torch.Tensor:
    return torch.full((size, 4), 1.0 + grouped)


def test_a_step_is_captured_when_it_comes_again(free: list[int]) -> None:
    graphs, drawn = Graphs(torch.zeros(32, 4)), list[tuple[int, bool, bool]]()
    assert graphs.forward(24, True, _states) is None and not graphs.hidden.any()
    graph = graphs.forward(24, True, _states)
    assert graph is not None and graphs.forward(24, True, _states) is graph
    # where a captured draw looks
    assert (graphs.hidden[:24] == 2).all() and not graphs.hidden[24:].any()
    assert graphs.forward(24, False, _states) is None, "of rows that stand alone"

    def draw(size: int, hidden: torch.Tensor, every: bool, forces: bool) -> None:
        assert hidden.data_ptr() == graphs.hidden.data_ptr() and hidden.shape[0] == size
        drawn.append((size, every, forces))

    asked = [
        graphs.draw(24, True, forces, draw) is not None for forces in (False, True, True, False)
    ]
    assert asked == [False, False, True, True] and drawn == [(24, True, True), (24, True, False)]
    assert graphs.size_for(20) is None, "no other size is padded to it"


def test_a_size_that_was_left_for_later_is_captured_as_soon_as_it_comes(free: list[int]) -> None:
    graphs = Graphs(torch.zeros(32, 4))
    graphs.capture_later([8, 24])
    assert [graphs.size_for(rows) for rows in (1, 8, 9, 24, 25)] == [8, 8, 24, 24, None]
    assert (
        graphs.forward(24, False, _states) is not None
        and graphs.forward(16, False, _states) is None
    )


def test_rows_and_chunks_are_captured_when_they_come_again(free: list[int]) -> None:
    graphs, launched = Graphs(torch.zeros(32, 4)), list[int]()

    def launch() -> torch.Tensor:
        launched.append(1)
        return torch.full((48, 4), 3.0)

    assert graphs.with_chunks(16, 48, False, launch) is None and not launched
    graph = graphs.with_chunks(16, 48, False, launch)
    assert (
        graph is not None
        and graphs.with_chunks(16, 48, False, launch) is graph
        and len(launched) == 1
    )
    assert (graphs.hidden[:16] == 3).all() and not graphs.hidden[16:].any(), (
        "the rows' states, for their draw"
    )
    assert graphs.with_chunks(16, 48, True, launch) is None, "with prefix groups"


def test_where_room_has_run_out_nothing_is_captured_any_more(free: list[int]) -> None:
    graphs = Graphs(torch.zeros(32, 4))
    graphs.forward(24, False, _states)
    graph = graphs.forward(24, False, _states)
    free[0] = 2 * GIB  # the largest step's, and one to spare
    for _ in range(2):
        assert graphs.forward(16, False, _states) is None
    free[0] = 10 * GIB
    assert graphs.forward(16, False, _states) is None
    assert graph is not None and graphs.forward(24, False, _states) is graph
