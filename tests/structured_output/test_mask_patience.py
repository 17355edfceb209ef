"""How long a late draw waits: to the device's next pause, and beyond it while that pays."""

from __future__ import annotations

from penstock.structured_output.mask_patience import MaskPatience


def waited(
    patience: MaskPatience, held: int, free: int, masks_a_second: float, *, at: float
) -> float:
    """Returns seconds that a draw waits where masks come at one rate; looks are 0.2 ms apart."""
    patience.begin(at, held, free, held)
    now, left = at, float(held)
    while left > 0:
        now += 2e-4
        left = max(0.0, left - 2e-4 * masks_a_second)
        if not patience.goes_on(now, round(left)):
            break
    patience.ended(round(left), paused=True)
    return now - at


def steady(held: int, free: int, masks_a_second: float) -> float:
    """Returns what the last of many draws waits, of which all masks are missing, one each 5 ms."""
    patience = MaskPatience()
    return [waited(patience, held, free, masks_a_second, at=step * 5e-3) for step in range(60)][-1]


def test_a_draw_of_few_rows_waits_for_its_masks_and_one_of_many_does_not() -> None:
    assert steady(100, 0, 50_000) > 1.8e-3  # 100 masks take 2 ms: 250 come in a step's time
    # 250 rows of a thousand would gain a step, and a thousand wait
    assert steady(1000, 0, 50_000) < 5e-4
    assert steady(100, 50, 50_000) < 5e-4  # a free row's wait counts as eight


def test_masks_that_no_longer_come_are_not_waited_for() -> None:
    patience = MaskPatience()
    for step in range(40):
        waited(patience, 100, 0, 50_000, at=step * 5e-3)
    patience.begin(1.0, 100, 0, 10)
    looks = [patience.goes_on(1.0 + 2e-4 * look, 10) for look in range(1, 10)]
    assert looks == [True] * 4 + [False] * 5  # the least wait is 1 ms


def test_the_least_wait_grows_while_the_device_is_busy_when_the_draw_goes_out() -> None:
    patience = MaskPatience()
    for step in range(10):
        # seconds apart: nothing is known of a step's length
        patience.begin(float(step), 1000, 0, 500)
        patience.ended(500, paused=False)
    patience.begin(100.0, 1000, 0, 500)
    # 1 ms, 15 % more ten times
    assert patience.goes_on(100.0035, 500) and not patience.goes_on(100.0045, 500)
