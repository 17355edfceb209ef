"""Docs that fail: every knob, option, room and link is looked for. What the pages say is for their
readers to judge."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.config import Config

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "penstock"
DOCS = REPOSITORY / "docs"

ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py")))
PAGES = sorted(path for path in [*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS = ("benchmarks", "deploy", "examples", "scripts", "src", "tests")
FILES = [
    f"/{path.relative_to(REPOSITORY).as_posix()}"
    for each in FOLDERS
    for path in (REPOSITORY / each).rglob("*.*")
]
SOURCES = [
    path
    for each in FOLDERS
    for path in (REPOSITORY / each).rglob("*.*")
    if path.suffix in (".py", ".js", ".sh", ".toml", ".yaml", ".yml", ".json", ".jinja", ".html")
]
WORDS_OF_SOURCES = {
    word for path in SOURCES for word in [path.stem, *re.findall(r"\w+", path.read_text())]
}
# Settings and functions of others, which a page tells a reader to use.
NAMES_OF_OTHERS = {
    "VLLM_BATCH_INVARIANT",  # vLLM
    "build_processor",  # Ray Data
    "iteration_tokens_total",  # vLLM
    "serveConfigV2",  # KubeRay
    "proxy_request_buffering",  # nginx
}
# History, and sources of others: they name files that are not here.
NAME_OTHERS = ("LOG.md", "CHANGELOG.md", "bench_against_another_client.md", "given_up.md")


def test_every_knob_is_documented() -> None:
    page = (DOCS / "config.md").read_text()
    assert [knob for knob in Config().places() if f"`{knob}`" not in page] == []


def test_a_knob_says_what_it_does() -> None:
    silent = [
        knob.name
        for group in Config().groups()
        for knob in fields(group)
        if not knob.metadata.get("help")
    ]
    assert silent == []


PAGE_OF = {"vllm_arguments": "coming_from_vllm"}  # where it isn't the room's name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_its_page_and_the_map_leads_there(room: str) -> None:
    page = DOCS / f"{PAGE_OF.get(room, room)}.md"
    assert page.is_file() and len(page.read_text().split()) > 50
    assert f"({page.name})" in (DOCS / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", page.read_text())
    local = [a or b for a, b in targets if not re.match(r"[a-z]+:|#", a or b)]
    assert [target for target in local if not (page.parent / target.split("#")[0]).exists()] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in NAME_OTHERS],
    ids=lambda page: page.relative_to(REPOSITORY).as_posix(),
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`name.py`, `folder/name.py` and `folder/{one,two}.py`, wherever in the repository they end
    so."""
    named = {
        name
        for each in re.findall(r"`([\w/{},]+\.(?:py|sh))`", page.read_text())
        for name in expanded(each)
    }
    assert (
        sorted(name for name in named if not any(path.endswith("/" + name) for path in FILES)) == []
    )


def test_counterparts_of_vllms_files_exist() -> None:
    """Paths of the map on docs/coming_from_vllm.md."""
    lines = (REPOSITORY / "scripts" / "vllm_files.txt").read_text().splitlines()
    ours = [line.partition(" | ")[2] for line in lines if not line.startswith("#")]
    named = [path for told in ours for path in re.findall(r"\w[\w/]*(?:/|\.py)(?![\w.])", told)]
    assert len(ours) > 30 and all(ours)
    assert [path for path in named if not (PACKAGE / path).exists()] == []


def expanded(name: str) -> list[str]:
    """`{a,b}/{c,d}.py` -> four names."""
    found = re.search(r"\{([\w,]+)\}", name)
    if found is None:
        return [name]
    return [
        each for part in found[1].split(",") for each in expanded(name.replace(found[0], part, 1))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_names_that_a_page_uses_are_in_the_sources(page: Path) -> None:
    if page.name in NAME_OTHERS:
        pytest.skip("tells of what is no more, or of others")
    named = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", page.read_text())
    parts = {part for name in named for part in name.split(".") if re.search(r"_|[a-z][A-Z]", part)}
    # The library of metrics adds the ending to a counter's name.
    known = WORDS_OF_SOURCES | {f"{word}_total" for word in WORDS_OF_SOURCES} | NAMES_OF_OTHERS
    assert sorted(parts - known) == []


def test_decisions_are_listed() -> None:
    index = (DOCS / "design" / "README.md").read_text()
    pages = [path.name for path in (DOCS / "design").glob("*.md") if path.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_every_command_and_option_is_documented() -> None:
    missing = []
    for name, command in commands().items():
        section = told(name)
        flags = [flag for option in command.params for flag in option.opts if flag.startswith("--")]
        missing += [f"{name} {flag}" for flag in flags if not re.search(f"[` ]{flag}`", section)]
        missing += [name] if not section else []
    assert missing == []


def test_an_option_has_its_words_on_the_page() -> None:
    """An engine option's are on config.md; one that only shares a knob's name has its own, as
    `bench run --model`."""
    missing, seen = [], 0
    for name, command in commands().items():
        for option in command.params:
            if option.name in ("help", "version") or option.help == helps().get(option.name):
                continue
            seen += 1
            said = " ".join((option.help or "").split()).replace("|", "\\|")
            given = getattr(option, "envvar", None) or []
            words = [
                said,
                *(f"`{each}`" for each in ([given] if isinstance(given, str) else given)),
            ]
            missing += [f"{name} {option.name}: {word}" for word in words if word not in told(name)]
    assert missing == [] and seen > 50


def test_a_command_lacks_the_engine_options_that_it_names() -> None:
    wrong = []
    for name, command in commands().items():
        (line,) = re.findall(r"^Engine options: all(.*)$", sections()[name], re.M) or [None]
        has = [each for each in command.params if each.help == helps().get(each.name)]
        if line is None:
            wrong += [name] * bool(has)
            continue
        lacks = set(re.findall(r"`(--[\w-]*\w)`", line))
        flags = set(re.findall(r"`(--[\w-]*\w)`", sections()["Engine options"]))
        own = {flag for each in has for flag in each.opts if flag.startswith("--")}
        wrong += [name] * (flags - lacks != own)
    assert wrong == []


def helps() -> dict[str, str]:
    """Every knob's own words."""
    return {
        knob.name: knob.metadata["help"] for group in Config().groups() for knob in fields(group)
    }


def told(name: str) -> str:
    """A command's section, with those that it refers to."""
    section = sections().get(name, "")
    others = [
        f"penstock {each}" for each in re.findall(r"^As in `penstock ([\w ]+)`:", section, re.M)
    ]
    engine = ["Engine options"] if re.search(r"^Engine options: all", section, re.M) else []
    return "\n".join([section, *(sections()[each] for each in [*others, *engine])])


def sections() -> dict[str, str]:
    """The command line's page, a part a command."""
    opening, *parts = re.split(r"^## ", (DOCS / "cli.md").read_text(), flags=re.M)
    return {part.split("\n", 1)[0].strip("`"): part for part in parts} | {"penstock": opening}


def commands() -> dict[str, Any]:
    """Every command by its words, `penstock` itself and `penstock demo`, as typer knows it."""
    from penstock.cli import app

    found: dict[str, Any] = {}

    def walk(name: str, command: Any) -> None:
        found[name] = command
        for word, inner in getattr(command, "commands", {}).items():
            walk(f"{name} {word}", inner)

    walk("penstock", typer.main.get_command(app))
    return found
