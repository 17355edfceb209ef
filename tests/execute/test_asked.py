"""Asked against a dict of dicts: biases of rows that come and go, however often the pool is packed."""

from __future__ import annotations

import numpy as np
import pytest
from execute_drive import Ask, Row, _joins

from penstock.execute.asked import Asked

pytestmark = pytest.mark.torch


def test_biases_are_those_of_the_last_join() -> None:
    rng = np.random.default_rng(0)
    asked, twin = Asked(20), {row: {} for row in range(20)}
    for _ in range(300):
        numbers = rng.permutation(20)[: rng.integers(1, 8)].tolist()
        for number in numbers:
            ids = rng.permutation(100)[: rng.choice([0, 0, 1, 5, 40])].tolist()
            twin[number] = {token: float(token) / 2 - number for token in ids}
        asked.join(
            _joins([Row(n, [1], 1, 9, [1], Ask(bias=twin[n], temperature=n % 2, logprobs=n - 1)) for n in numbers])
        )
        rows = rng.permutation(20)[: rng.integers(0, 20)].astype(np.int32)
        found = asked.bias(rows)
        expected = [(place, t, v) for place, row in enumerate(rows.tolist()) for t, v in twin[row].items()]
        assert list(zip(found.where.tolist(), found.ids.tolist(), found.values.tolist(), strict=True)) == expected
    assert asked.bias_ids.size <= 4 * 20 * 40  # what nobody owns is given up


def test_columns_are_those_of_the_last_join() -> None:
    asked = Asked(4)
    asked.join(_joins([Row(2, [1], 1, 9, [1], Ask(temperature=0.5, top_p=0.5, logprobs=0))]))
    assert asked.random.tolist() == [False, False, True, False, False]
    assert asked.logprobs.tolist() == [-1, -1, 0, -1, -1] and asked.wants[2] == 1 | 16
    asked.join(_joins([Row(2, [1], 1, 9, [1], Ask())]))
    assert not asked.random.any() and not asked.wants.any() and (asked.logprobs == -1).all()
