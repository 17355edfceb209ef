"""Embeddings that chunks bring in place of ids: what they say is what a prompt says whose ids have
those embeddings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from execute_drive import VOCABULARY, Ask, Host, Row, chunk_of, tiny_model, tiny_runner

from penstock.execute.runner import TorchRunner
from penstock.parallel.collectives import Gloo
from penstock.parallel.layout import Layout
from penstock.ranks.rank_channel import PLANS
from penstock.schedule.step import Chunks, Drafts, Embeds

pytestmark = pytest.mark.torch

PROMPT = [9 + i * 7 % 100 for i in range(41)]
# where embeddings are handed; never the last token, which is a row's
AT = [
    0,
    3,
    4,
    5,
    15,
    16,
    17,
    30,
    39,
]
STEPS = 6


def table(vocabulary: int = VOCABULARY) -> np.ndarray:
    """Returns the tiny model's embeddings."""
    return tiny_model(vocab_size=vocabulary).embedding.table.value.float().numpy()  # type: ignore[no-any-return]


def other(ids: list[int]) -> list[int]:
    """Other tokens where embeddings are handed."""
    return [(token * 3 + 11) % VOCABULARY if at in AT else token for at, token in enumerate(ids)]


def say(
    runner: TorchRunner,
    ids: list[int],
    embedded: list[int] | None = None,
    pieces: int = 1,
    tag: int = 0,
) -> list[int]:
    """Greedy tokens of a prompt of these ids, whose embeddings at AT are those of `embedded`."""
    rows, handed = table(), None
    if embedded is not None:
        handed = {at: rows[embedded[at]] for at in AT}
    host = Host(runner)
    row = host.row(0, ids, 40, Ask(tag=tag), pieces=pieces, handed=handed)
    return [int(token) for token in host.run([row], STEPS)[0]]


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
def test_what_is_handed_is_what_is_seen(pieces: int) -> None:
    runner = tiny_runner()
    plain, others = say(runner, PROMPT), say(runner, other(PROMPT))
    assert plain != others
    assert say(runner, PROMPT, PROMPT, pieces) == plain, "the ids' own"
    assert say(runner, PROMPT, other(PROMPT), pieces) == others, "others"
    assert say(runner, other(PROMPT), PROMPT, pieces) == plain, "whatever ids stand there"
    assert say(runner, PROMPT, None, pieces) == plain, "in this step alone"
    runner.close()


def beside_rows(runner: TorchRunner, tags: tuple[int, int]) -> list[list[int]]:
    """Two prompts with handed embeddings in one step, beside a row that decodes; then all
    three decode -> the tokens of each step."""
    host, rows = Host(runner), table(runner.vocab_size)
    handed = {at: rows[token] for at, token in enumerate(other(PROMPT)) if at in AT}
    first = host.row(0, PROMPT[:7], 40, Ask())
    others = [
        Row(at + 1, PROMPT, 41, 90, host.take(3), Ask(tag=tag), 0, 40)
        for at, tag in enumerate(tags)
    ]
    parts = [chunk_of(PROMPT, 0, 40, row.blocks, tag=row.ask.tag, handed=handed) for row in others]
    one, two = (part.embeds for part in parts)
    assert one is not None and two is not None
    both = Chunks(
        start=np.array([0, 40, 80], np.int32),
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens", "context", "blocks", "prompt_logprobs", "next_token", "tags")
        },
        embeds=Embeds(
            np.concatenate((one.where, two.where + 40)), np.concatenate((one.rows, two.rows))
        ),
    )
    told = [host.launch([first], joins=[first], chunks=both).fetch().tokens.tolist()]
    for step in range(STEPS):
        flight = host.launch([first, *others], **({} if step else {"joins": others}))
        told.append(flight.fetch().tokens.tolist())
    runner.close()
    return told


@pytest.mark.parametrize("tags", [(0, 0), (2, 3)])
def test_beside_rows_it_is_the_same(tags: tuple[int, int]) -> None:
    runner = tiny_runner(tagged=any(tags))
    want = [say(runner, PROMPT, other(PROMPT), tag=tag) for tag in tags]
    runner.close()
    told = beside_rows(tiny_runner(tagged=any(tags)), tags)
    assert [[line[at] for line in told[1:]] for at in (1, 2)] == want
    assert (want[0] != want[1]) == any(tags)


@pytest.mark.parametrize("tags", [(0, 0), (2, 3)])
def test_two_ranks_say_the_same(tags: tuple[int, int], tmp_path: Path) -> None:
    """Each has a stretch of the vocabulary, and takes what is handed whole."""

    def run(rank: int) -> list[list[int]]:
        end = Gloo(tmp_path / "meeting", rank, 2, 60.0)
        end.connect()
        layout = Layout(rank, 2, end.all_reduce, end.all_gather)
        return beside_rows(tiny_runner(layout=layout, vocab_size=300, tagged=any(tags)), tags)

    want = beside_rows(tiny_runner(vocab_size=300, tagged=any(tags)), tags)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [want, want]


def test_they_cross_to_other_ranks() -> None:
    host = Host(tiny_runner())
    plan = host.plan(
        [], chunks=chunk_of(PROMPT, 3, 20, host.take(3), tag=2, handed={4: np.ones(32, np.float32)})
    )
    plan.drafts = Drafts(np.zeros(1, np.int32), None)
    host.runner.close()
    again = PLANS.decode(PLANS.encode(plan))
    assert again.chunks is not None and again.chunks.tags is not None and again.drafts is not None
    assert (
        again.chunks.tags.tolist() == [2]
        and isinstance(again.chunks.embeds, Embeds)
        and again.drafts.tokens is None
    )
    assert (
        again.chunks.embeds.where.tolist() == [1]
        and (again.chunks.embeds.rows == np.ones((1, 32))).all()
    )
