"""Steps' seconds from a table: exact where the steps are straight, refused by name where the table
says nothing."""

import numpy as np
import pytest
from made_steps import CONTEXTS, LENGTH, MEMBER, PROMPT, ROWS, SHARED, made_table, step_seconds

from penstock.artifact.manifest import StepSeconds
from penstock.errors import UsageError
from penstock.schedule.step import Chunks, Moves, StepPlan
from penstock.simulate.step_costs import StepCosts


def plan_of(
    lengths: list[int],
    prompts: list[tuple[int, int]] | None = None,
    groups: list[tuple[int, int]] | None = None,
) -> StepPlan:
    """prompts: (context, tokens) each.   groups: (members, shared tokens) each; the first rows are
    theirs."""
    nothing = np.zeros(0, np.int32)
    sizes = np.array([tokens for _, tokens in prompts or []], np.int32)
    start = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    chunks = Chunks(
        np.zeros(sizes.sum(), np.int32),
        start,
        np.array([c for c, _ in prompts or []], np.int32),
        np.zeros((sizes.size, 0), np.int32),
        nothing,
        nothing,
    )
    members = [count for count, _ in groups or []]
    return StepPlan(
        number=0,
        rows=np.arange(len(lengths), dtype=np.int32),
        lengths=np.array(lengths, np.int32),
        wants=0,
        group_start=np.cumsum([0, *members]).astype(np.int32),
        group_blocks=np.zeros((len(members), 0), np.int32),
        group_length=np.array([shared for _, shared in groups or []], np.int32),
        moves=Moves.none(),
        new_blocks=np.zeros((0, 3), np.int32),
        joins=None,
        chunks=chunks if prompts else None,
    )


@pytest.fixture(scope="module")
def costs() -> StepCosts:
    return StepCosts(made_table(), "made", "measure more")


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 40, 64])
@pytest.mark.parametrize("context", [0, 64, 300, 1900, 2047])
def test_rows_between_and_at_what_was_timed(costs: StepCosts, rows: int, context: int) -> None:
    lengths = (
        np.linspace(0.5 * context, 1.5 * context, rows).round().astype(int)
        if rows > 1
        else np.array([context])
    )
    assert costs.seconds(plan_of(lengths.tolist())) == pytest.approx(
        step_seconds(rows, lengths.mean()), rel=1e-6
    )


@pytest.mark.parametrize("rows", [0, 1, 10, 64])
@pytest.mark.parametrize(
    "sizes", [[(0, 1)], [(0, 100)], [(0, 128)] * 3, [(0, 400)], [(1000, 200), (0, 60)]]
)
def test_prompts_beside_rows(costs: StepCosts, rows: int, sizes: list[tuple[int, int]]) -> None:
    tokens = sum(size for _, size in sizes)
    pairs = sum(size * context + size * (size + 1) / 2 for context, size in sizes)
    wanted = step_seconds(rows, 64, tokens, pairs)
    plan = plan_of([64] * rows, sizes)
    # between 1 and LENGTH tokens the usual length isn't the table's
    base = 0.0 if tokens >= LENGTH else 0.05 * wanted
    assert costs.seconds(plan) == pytest.approx(wanted, rel=1e-6, abs=base)


def test_a_prefix_is_read_together(costs: StepCosts) -> None:
    """16 rows of 300 tokens, 12 of them in two groups behind 256 tokens: these are read by group,
    the rest by row."""
    alone = step_seconds(16, (16 * 300 - 12 * 256) / 16)
    together = 12 * (MEMBER + SHARED * 256)
    plan = plan_of([300] * 16, groups=[(8, 256), (4, 256)])
    assert costs.seconds(plan) == pytest.approx(alone + together, rel=1e-6)


@pytest.mark.parametrize(("rows", "extra"), [(16, 8.0), (40, 14.0), (64, 20.0)])
def test_prefixes_in_steps_of_few_rows_and_of_many(rows: int, extra: float) -> None:
    """Groups of 8 behind 100 tokens add 8 s to 16 rows and 20 to 64: straight between."""
    timed = [(16, 0.0), (64, 0.0), (16, 8.0), (64, 20.0)]  # rows, what a prefix adds
    columns = [
        (count, context, shared)
        for shared in (0, 1)
        for count, _ in timed[:2]
        for context in (0, 1000)
    ]
    table = StepSeconds(
        rows=[count for count, _, _ in columns],
        context=[context for _, context, _ in columns],
        prompt_tokens=[0] * 8,
        prompt_length=[0] * 8,
        shared=[100 * shared for _, _, shared in columns],
        members=[8 * shared for _, _, shared in columns],
        seconds=[1.0 + dict(timed[2:])[count] * shared for count, _, shared in columns],
    )
    plan = plan_of([100] * rows, groups=[(8, 100)] * (rows // 8))
    assert StepCosts(table, "made", "measure more").seconds(plan) == pytest.approx(
        1.0 + extra, rel=1e-6
    )


@pytest.mark.parametrize(("rows", "extra"), [(16, 0.4), (40, 0.7), (64, 1.0)])
def test_rows_whose_contexts_lie_apart_take_longer(rows: int, extra: float) -> None:
    """Contexts from 100 to 900 add 0.4 s to 16 rows that took 1 s, 1 s to 64."""
    table = StepSeconds(
        rows=[16, 16, 64, 64, 16, 64],
        context=[0, 1000, 0, 1000, 500, 500],
        prompt_tokens=[0] * 6,
        spread=[0, 0, 0, 0, 400, 400],
        seconds=[1.0, 1.0, 1.0, 1.0, 1.4, 2.0],
    )
    costs = StepCosts(table, "made", "measure more")
    for apart in (400, 200, 0):
        lengths = (
            np.linspace(500 - apart, 500 + apart, 2 * rows + 1).round().astype(int)[1::2].tolist()
        )
        plan = plan_of(lengths)
        assert costs.seconds(plan) == pytest.approx(1.0 + extra * apart / 400, rel=2e-3)
        assert costs.next_seconds(plan, 2) == pytest.approx(costs.seconds(plan))
    half = rows // 2
    behind = plan_of([628] * half + [500] * (rows - half), groups=[(half, 128)])
    assert costs._apart(behind) == 0.0, "what they share is no difference of theirs"


def test_what_a_step_only_waits_for_its_launch() -> None:
    """Of 6 s that 100 prompt tokens add to 8 rows the device needs 1; it waits for no step without
    prompts."""
    table = StepSeconds(
        rows=[8] * 3,
        context=[0, 1000, 0],
        prompt_tokens=[0, 0, 100],
        prompt_length=[0, 0, 100],
        seconds=[2.0, 2.0, 8.0],
        device_seconds=[2.0, 2.0, 3.0],
    )
    costs, plan = StepCosts(table, "made", "measure more"), plan_of([0] * 8, [(0, 100)])
    assert costs.waits(plan) == pytest.approx(5.0) and costs.waits(plan_of([0] * 8)) == 0.0
    assert costs.seconds(plan) == pytest.approx(8.0) and costs.waits(
        plan_of([0] * 8, [(0, 50)])
    ) == pytest.approx(2.5)
    assert (
        StepCosts(made_table(), "without", "measure more").waits(plan_of([64] * 8, [(0, LENGTH)]))
        == 0.0
    )


def test_steps_that_follow_each_other_take_what_each_takes(costs: StepCosts) -> None:
    each = [costs.seconds(plan_of([300 + n] * 16, groups=[(8, 256)])) for n in range(1, 6)]
    assert costs.next_seconds(plan_of([300] * 16, groups=[(8, 256)]), 5) == pytest.approx(
        each, rel=1e-9
    )


def test_what_the_table_lacks_is_refused_by_name(costs: StepCosts) -> None:
    with pytest.raises(
        UsageError,
        match=r"made has steps of 1 to 64 rows, .* 65 rows at 10 tokens each: measure more, or",
    ):
        costs.seconds(plan_of([10] * 65))
    with pytest.raises(
        UsageError,
        match=r"at most 1,900 tokens each at so many rows, .* 4 rows at 4,000 tokens each",
    ):
        costs.seconds(plan_of([4000] * 4))
    with pytest.raises(UsageError, match="made has no steps of 2,000 prompt tokens beside 1 rows"):
        costs.seconds(plan_of([10], [(0, 2000)]))
    alone = StepCosts(made_table(groups=False), "alone", "measure more")
    with pytest.raises(UsageError, match="alone has no steps of rows that share a prefix"):
        alone.seconds(plan_of([300] * 4, groups=[(4, 256)]))


def test_a_table_with_one_context_says_nothing_of_rows() -> None:
    table = StepSeconds(rows=[1, 4], context=[64, 64], prompt_tokens=[0, 0], seconds=[1e-3, 2e-3])
    with pytest.raises(UsageError, match="made times no step of rows at two contexts"):
        StepCosts(table, "made", "measure more")


def test_the_made_table_is_one() -> None:
    assert len(ROWS) * len(CONTEXTS) < len(made_table().seconds) and PROMPT > 0
