"""SamplingMirror against a dict of dicts: biases of rows that come and go, however often the pool
is packed, and a copy of the pool that is told only what changes."""

from __future__ import annotations

import numpy as np
import pytest
from execute_drive import Ask, Row, _joins

from penstock.execute.sampling_mirror import SamplingMirror

pytestmark = pytest.mark.torch


def test_biases_are_those_of_the_last_join() -> None:
    rng = np.random.default_rng(0)
    mirror, twin = SamplingMirror(20), {row: {} for row in range(20)}
    ids_there, values_there, first_there = (
        np.zeros(4000, np.int32),
        np.zeros(4000, np.float32),
        np.zeros(21, np.int64),
    )
    for _ in range(300):
        numbers = rng.permutation(20)[: rng.integers(1, 8)].tolist()
        for number in numbers:
            ids = rng.permutation(100)[: rng.choice([0, 0, 1, 5, 40])].tolist()
            twin[number] = {token: float(token) / 2 - number for token in ids}
        new = mirror.join(
            _joins([Row(n, [1], 1, 9, [1], Ask(bias=twin[n], logprobs=n - 1)) for n in numbers])
        )
        ids_there[new], values_there[new] = mirror.bias_ids[new], mirror.bias_values[new]
        moved = slice(None) if mirror.moved else numbers
        first_there[moved] = mirror.bias_first[moved]
        for row, biases in twin.items():
            mine = slice(first_there[row], first_there[row] + len(biases))
            assert (
                dict(zip(ids_there[mine].tolist(), values_there[mine].tolist(), strict=True))
                == biases
            )
    assert mirror.bias_ids.size <= 4 * 20 * 40  # what nobody owns is given up


def test_columns_are_those_of_the_last_join() -> None:
    mirror = SamplingMirror(4)
    mirror.join(_joins([Row(2, [1], 1, 9, [1], Ask(temperature=0.5, top_p=0.5, logprobs=0))]))
    assert mirror.logprobs.tolist() == [-1, -1, 0, -1, -1] and mirror.wants[2] == 1 | 16
    mirror.join(_joins([Row(2, [1], 1, 9, [1], Ask())]))
    assert not mirror.wants.any() and (mirror.logprobs == -1).all()
