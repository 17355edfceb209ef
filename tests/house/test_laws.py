"""The laws of the house, held against the sources as they are. A law's own words say what to do
where it fails."""

from __future__ import annotations

import gc
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import floors
import laws
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "penstock"
TESTS = REPOSITORY / "tests"
TOOLS = ("dev", "reliability", "packaging")  # extras that only tests import

Law = Callable[[Path], list[str]]

SOURCE_LAWS: list[Law] = [
    laws.rooms_have_a_floor,
    laws.rooms_look_down,
    laws.sub_rooms_look_down,
    laws.imports_make_no_circle,
    laws.packages_stay_in_their_places,
    laws.nothing_runs_strangers_code,
    laws.state_is_handed_over,
    laws.files_draw_their_border,
    laws.files_can_be_read,
    laws.no_utils,
    laws.names_stand_once,
    laws.docstrings_begin_plainly,
]
TEST_LAWS: list[Law] = [
    laws.tests_can_fail,
    laws.tests_draw_the_same_each_time,
    laws.tests_that_need_torch_say_so,
    laws.tests_stand_without_the_long_run,
    laws.files_draw_their_border,
]


def declared() -> frozenset[str]:
    """Names of what pyproject.toml installs for running, without versions and markers; extras but
    TOOLS' included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [
        line
        for name, lines in project["optional-dependencies"].items()
        if name not in TOOLS
        for line in lines
    ]
    return frozenset(
        re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0]
        for line in [*project["dependencies"], *extras]
    )


@pytest.fixture(scope="module", autouse=True)
def trees_live_as_long_as_the_laws() -> Iterator[None]:
    """Nor does anything look for garbage among them, which is half of the time."""
    gc.disable()
    yield
    laws.forget()
    gc.enable()


@pytest.mark.parametrize("law", SOURCE_LAWS, ids=lambda law: law.__name__)
def test_the_sources_keep(law: Law) -> None:
    assert law(PACKAGE) == []


@pytest.mark.parametrize("law", TEST_LAWS, ids=lambda law: law.__name__)
def test_the_tests_keep(law: Law) -> None:
    assert law(TESTS) == []


def test_benchmarks_make_no_circle() -> None:
    assert laws.scripts_make_no_circle(REPOSITORY / "benchmarks") == []


def test_every_package_that_is_imported_is_declared() -> None:
    assert laws.packages_are_declared(PACKAGE, declared()) == []


def test_a_room_stands_on_one_floor() -> None:
    assert len(floors.FLOOR_OF) == sum(len(rooms) for rooms in floors.FLOORS)
