"""Makes docs/files.md, and the rooms' part of docs/README.md, from the sources and from
tests/house/floors.py. Docstrings are read by `ast`; of the package only the models' names are
imported."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "penstock"
DOCS = REPOSITORY / "docs"
sys.path.insert(0, str(REPOSITORY / "tests" / "house"))

from floors import FLOORS  # noqa: E402

from penstock.models.model_list import CATALOG  # noqa: E402

LONGEST = 6  # words that are told of a file
# words that no cut ends with
LOOSE = frozenset(
    ("a", "an", "the", "of", "to", "in", "on", "by", "for", "with", "from", "and", "or", "that")
)
SHORTEST = 3  # words before a comma at which a sentence may be cut
PAGES = {"vllm_arguments": "coming_from_vllm"}  # room -> its page, where the names differ
BEGIN, END = "<!-- rooms: made by scripts/make_docs.py -->", "<!-- end of rooms -->"
FILES = """\
Every file of `src/penstock`, by room, with the beginning of what it says of itself. The rooms and their floors are in
[README.md](README.md).
"""


def files_page(note: str) -> str:
    """A section a room: its folders, a line a file."""
    parts = [f"# Files\n\n{note}\n{FILES}"]
    tops = [path for path in sorted(PACKAGE.glob("*.py")) if path.name != "__init__.py"]
    parts.append("## The words that all rooms share\n\n" + _lines(tops))
    for room in _rooms():
        page = _page(room)
        title = f"## [`{room}`]({page})" if page else f"## `{room}`"
        inner = [PACKAGE / room, *sorted(p for p in (PACKAGE / room).rglob("*") if p.is_dir())]
        body = []
        for folder in inner:
            files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            if not files:
                continue
            name = folder.relative_to(PACKAGE).as_posix()
            types = [path.name for path in files if room == "models" and path.stem in CATALOG]
            if types:
                body.append(f"A model type each: {_quoted(types)}.\n")
            plain = PACKAGE / "kernels" / "reference" / folder.name
            fast = "triton" in folder.parts
            same = [path.name for path in files if fast and (plain / path.name).is_file()]
            if same:
                body.append(f"Of `{name}/`, as in `reference/`: {_quoted(same)}.\n")
            rest = [path for path in files if path.name not in [*types, *same]]
            body.append(f"`{name}/`\n\n" * (folder != PACKAGE / room) + _lines(rest))
        if body:
            parts.append(f"{title}\n\n" + "\n".join(body))
    return "\n".join(parts)


def rooms_part(text: str) -> str:
    """docs/README.md with its picture of the floors and its table of rooms made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    picture = []
    for number, rooms in reversed(list(enumerate(FLOORS))):
        names = sorted(rooms - {"__init__"})
        picture.append(f"{number:>2}  {'  '.join(names)}")
    head = ["room | what it does", "--- | ---"]
    rows = [f"{_linked(room)} | {_told(PACKAGE / room / '__init__.py')}" for room in _from_above()]
    made = ["", "```", *picture, "```", "", *head, *rows, ""]
    return before + BEGIN + "\n".join(made) + "\n" + END + after


def _rooms() -> list[str]:
    return sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py")))


def _from_above() -> list[str]:
    present = set(_rooms())
    return [room for rooms in reversed(FLOORS) for room in sorted(rooms & present)]


def _page(room: str) -> str | None:
    name = f"{PAGES.get(room, room)}.md"
    return name if (DOCS / name).is_file() else None


def _linked(room: str) -> str:
    page = _page(room)
    return f"[`{room}`]({page})" if page else f"`{room}`"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _lines(files: list[Path]) -> str:
    return "```\n" + "\n".join(f"{path.name:<24} {_begins(path)}" for path in files) + "\n```\n"


def _told(path: Path) -> str:
    """The first sentence of a module's docstring, without its own name before it."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    text = re.sub(r"^(The )?\w+: (?=\w)", "", text, count=1)
    first = re.split(r"(?<=[.;])\s|(?<=\w):\s(?=[A-Z])|: docs/", text, maxsplit=1)[0]
    first = first.rstrip(".;:")
    return first[:1].upper() + first[1:] if first.split(" ")[0].islower() else first


def _begins(path: Path) -> str:
    """At LONGEST LONGEST words of that, cut behind a comma where there is one."""
    words = _told(path).split()
    if len(words) <= LONGEST:
        return " ".join(words)
    kept = words[:LONGEST]
    for at in range(LONGEST, SHORTEST - 1, -1):
        if kept[at - 1][-1] in ",:":
            return " ".join(kept[:at]).rstrip(",:")
    while kept[-1] in LOOSE:
        kept.pop()
    return " ".join(kept) + "..."
