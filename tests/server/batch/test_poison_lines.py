"""Points of lines that were there when the engine died: which come when, and which are named."""

from __future__ import annotations

from penstock.server.batch.poison_lines import ALONE, ALONE_FROM, FEW_FROM, KILLER, PoisonLines


def after(*deaths: dict[int, int]) -> PoisonLines:
    """Each death is another server's."""
    kept = None
    for evidence in deaths:
        kept = PoisonLines(kept).with_death(evidence)
    return PoisonLines(kept)


def stages(suspects: PoisonLines) -> list[int]:
    stage, found = suspects.stage_after(0), []
    while stage is not None:
        found.append(stage)
        stage = suspects.stage_after(stage)
    return found


def test_one_death_says_nothing_and_two_put_a_line_behind() -> None:
    assert stages(PoisonLines()) == stages(after({1: 1, 2: 1})) == []
    twice = after({1: 1, 2: 1}, {2: 1, 3: 1})
    assert [twice.stage(number) for number in (1, 2, 3, 4)] == [0, FEW_FROM, 0, 0] and stages(twice) == [FEW_FROM]


def test_a_killer_is_named_after_four_deaths_the_last_of_them_alone() -> None:
    deaths = [{1: 1, 2: 1}, {1: 1, 2: 1}, {2: 1}, {2: ALONE}]
    assert after(*deaths[:3]).stage(2) >= ALONE_FROM
    assert [after(*deaths[:count]).is_killer(2) for count in range(5)] == [False] * 4 + [True]
    named = after(*deaths)
    assert named.stage(2) == 0 and not named.is_killer(1) and stages(named) == [FEW_FROM]


def test_one_that_is_always_alone_is_named_after_two() -> None:
    assert not after({1: ALONE}).is_killer(1) and after({1: ALONE}).stage(1) >= ALONE_FROM
    assert after({1: ALONE}, {1: ALONE}).is_killer(1)


def test_one_beside_others_is_named_late_and_takes_turns_with_them() -> None:
    """Lines of a batch beside an online request that kills: the engine dies with whichever comes first."""
    kept: str | None = PoisonLines().with_death(dict.fromkeys(range(10), ALONE_FROM))
    for lives in range(10 * (KILLER - ALONE_FROM)):
        suspects = PoisonLines(kept)
        assert not any(suspects.is_killer(number) for number in range(10)) or lives > 10 * (KILLER - ALONE_FROM - 1)
        first = min((number for number in range(10) if suspects.stage(number)), key=suspects.stage)
        kept = suspects.with_death({first: 1})
    assert all(PoisonLines(kept).is_killer(number) for number in range(10))


def test_a_line_that_is_done_is_forgotten() -> None:
    suspects = after({1: 2, 2: 2})
    suspects.forget(1)
    suspects.forget(9)
    assert suspects.with_death({3: 1}) == '{"2":2,"3":1}'
    suspects.forget(2)
    assert stages(suspects) == []
