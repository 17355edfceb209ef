"""News cut into parts is the same news: sample by sample, column by column, each part of the size
that was asked."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.schedule.deltas import SAMPLE_WEIGHT, Deltas, PromptNews, empty_deltas


def made(sizes: list[int], *, scores: bool) -> Deltas:
    """Sample i has request 10 + i, and its tokens count on from those before it."""
    count, total = len(sizes), sum(sizes)
    who, tokens = np.arange(count), np.arange(total, dtype=np.int32)
    news = Deltas(
        10 + who,
        who.astype(np.int32),
        (who % 3).astype(np.int8),
        (-who).astype(np.int32),
        np.cumsum([0, *sizes]).astype(np.int32),
        tokens,
        prompts=[PromptNews(10, 3)],
    )
    if scores:
        news.chosen, news.rank = -tokens.astype(np.float32), tokens + 1
        news.top_ids = np.stack((tokens, tokens + 5), axis=1)
        news.top = -news.top_ids.astype(np.float32)
    return news


def samples(news: Deltas) -> list[tuple[object, ...]]:
    columns = (news.tokens, news.chosen, news.rank, news.top_ids, news.top)
    return [
        (
            int(news.request[i]),
            int(news.sample[i]),
            int(news.finish[i]),
            int(news.stop_id[i]),
            *(
                None if column is None else column[news.start[i] : news.start[i + 1]].tolist()
                for column in columns
            ),
        )
        for i in range(news.count)
    ]


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("most", [1, 100, 700, 5_000])
def test_parts_are_the_whole(most: int, scores: bool) -> None:
    draw = np.random.default_rng(most)
    for _ in range(20):
        sizes = draw.integers(0, draw.choice([2, 90, 400]), draw.integers(1, 40)).tolist()
        whole = made(sizes, scores=scores)
        parts = list(whole.in_parts(most))
        assert [sample for part in parts for sample in samples(part)] == samples(whole)
        assert [part.prompts for part in parts] == [whole.prompts] + [[]] * (len(parts) - 1)
        for part in parts:
            assert part.start[0] == 0 and part.start[-1] == part.tokens.size and part.count
            assert part.tokens.size + SAMPLE_WEIGHT * (part.count - 1) <= most + max(sizes)


def test_small_news_stays_as_it_is() -> None:
    news = made([3, 4], scores=True)
    (part,) = news.in_parts(1_000)
    assert part is news
    empty = empty_deltas()
    assert list(empty.in_parts(1)) == [empty]
