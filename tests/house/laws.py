"""Reads a source tree with `ast` and says where it breaks the laws of the house.

Each law is a function from the tree's root (the folder `penstock`) to a list of lines `path:line:
what is wrong`; an empty list is a tree that keeps the law. It imports nothing of the tree: what it
says holds for code that never runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import floors


@dataclass(frozen=True)
class Import:
    """One import of one module, wherever it stands."""

    path: str  # of the importing file, relative to the root
    line: int
    module: str  # absolute, with the names of a from-import: "penstock.text", "torch.nn"
    late: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    @property
    def importer(self) -> str:
        """The room of the importing file."""
        return room_of_path(self.path)

    @property
    def room(self) -> str | None:
        """The room of penstock that is imported, or None for somebody else's package."""
        parts = self.module.split(".")
        if parts[0] != "penstock":
            return None
        if len(parts) == 1 or parts[1] not in floors.FLOOR_OF:
            return "__init__"
        return parts[1]

    def says(self, what: str) -> str:
        return f"{self.path}:{self.line}: {what}"


def room_of_path(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Every Python file under root: its path relative to root, its text."""
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


@cache
def tree_of(text: str) -> ast.Module:
    """Every law reads the same files: each is parsed once."""
    return ast.parse(text)


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """All nodes of a source: most laws look at them."""
    return list(ast.walk(tree_of(text)))


def forget() -> None:
    """Lets go of all trees: of four million objects, at which each look for garbage would look."""
    for known in (tree_of, nodes_of, _imports_of):
        known.cache_clear()


def imports(root: Path) -> list[Import]:
    return [each for path, text in sources(root) for each in _imports_of(path, text)]


@cache
def _imports_of(path: str, text: str) -> list[Import]:
    found: list[Import] = []
    _Collector(path, found).visit(tree_of(text))
    return found


class _Collector(ast.NodeVisitor):
    """Walks one file and writes down its imports, those of `import_module("...")` too."""

    def __init__(self, path: str, found: list[Import]) -> None:
        self.path, self.found = path, found
        self.late = self.typing = False

    def visit(self, node: ast.AST) -> None:
        was = self.late
        self.late = was or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        super().visit(node)
        self.late = was

    def visit_If(self, node: ast.If) -> None:
        was = self.typing
        self.typing = was or "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in node.body:
            self.visit(inner)
        self.typing = was
        for inner in [node.test, *node.orelse]:
            self.visit(inner)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            folder = ["penstock", *self.path.split("/")[:-1]]
            above = folder[: len(folder) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            self._add(node.lineno, f"{base}.{alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        if (
            _last_name(node) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            self._add(node.lineno, str(node.args[0].value))
        self.generic_visit(node)

    def _add(self, line: int, module: str) -> None:
        self.found.append(Import(self.path, line, module, self.late, self.typing))


# --- the floors


def rooms_have_a_floor(root: Path) -> list[str]:
    rooms = {room_of_path(path) for path, _ in sources(root)}
    return [
        f"{room}: stands on no floor: draw it in tests/house/floors.py"
        for room in sorted(rooms - set(floors.FLOOR_OF))
    ]


def rooms_look_down(root: Path) -> list[str]:
    """A room imports from floors below it. TYPE_CHECKING and functions are no way around."""
    return [broken for each in imports(root) if (broken := _looks_wrong(each))]


def _looks_wrong(each: Import) -> str | None:
    here, there = each.importer, each.room
    if there is None or there == here or here not in floors.FLOOR_OF:
        return None
    if there == "__init__" and each.module.removeprefix("penstock.") in floors.PUBLIC_WORDS:
        return None
    if {here, there} <= floors.WORDS or {here, there} <= floors.ROOF:
        return None
    mine, theirs = floors.FLOOR_OF[here], floors.FLOOR_OF[there]
    if theirs >= mine:
        where = "on its own floor" if theirs == mine else f"above it, on floor {theirs}"
        return each.says(f"{here} (floor {mine}) imports {each.module}, {where}")
    if there in floors.BARRED_ROOMS.get(here, ()):
        return each.says(f"{here} imports {each.module}: it doesn't see {there}")
    only = floors.ONLY_ROOMS.get(here)
    if only is not None and there not in only:
        return each.says(f"{here} imports {each.module}: it sees {', '.join(sorted(only))} only")
    return None


def sub_rooms_look_down(root: Path) -> list[str]:
    """As rooms_look_down, of the sub-rooms that a room is made of.
    Each of its files stands in one."""
    broken: list[str] = []
    for room, inner in floors.INNER_FLOORS.items():
        floor_of = {name: number for number, names in enumerate(inner) for name in names}
        for path, _ in sources(root):
            if (
                path.startswith(f"{room}/")
                and path != f"{room}/__init__.py"
                and path.split("/")[1] not in floor_of
            ):
                broken.append(
                    f"{path}: stands in no sub-room of {room}: draw it in tests/house/floors.py"
                )
        for each in imports(root):
            here, there = each.path.split("/")[1:2], each.module.split(".")[2:3]
            if (
                not (each.room == each.importer == room and here and here[0] in floor_of)
                or here == there
            ):
                continue
            if not there or there[0] not in floor_of or floor_of[there[0]] >= floor_of[here[0]]:
                broken.append(
                    each.says(f"{room}/{here[0]} imports {each.module}, which is not below it")
                )
    return broken


def imports_make_no_circle(root: Path) -> list[str]:
    """No module of the package leads back to itself by its imports, late ones and those for types
    included."""
    files = {
        f"penstock.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): path
        for path, _ in sources(root)
        if path != "__init__.py"
    }
    return _circles(root, files)


def scripts_make_no_circle(root: Path) -> list[str]:
    """The same for a folder of scripts, which import each other by the file's name."""
    return _circles(root, {Path(path).stem: path for path, _ in sources(root)})


def _circles(root: Path, files: dict[str, str]) -> list[str]:
    """Returns the first circle found. files: name of a module -> its path below `root`."""
    leads: dict[str, dict[str, Import]] = {path: {} for path in files.values()}
    for each in imports(root):
        found = files.get(each.module) or files.get(each.module.rpartition(".")[0])
        if found is not None and each.path in leads:
            leads[each.path].setdefault(found, each)
    # A module that leads nowhere is in no circle.
    while ends := [path for path, targets in leads.items() if not targets]:
        for path in ends:
            del leads[path]
        for targets in leads.values():
            for path in ends:
                targets.pop(path, None)
    for path in leads:
        if circle := _way_back(path, leads):
            return [leads[path][circle[1]].says(f"a circle of imports: {' -> '.join(circle)}")]
    return []


def _way_back(start: str, leads: dict[str, dict[str, Import]]) -> list[str]:
    """The shortest way from a file to itself; empty where there is none."""
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:
        for path in leads[way[-1]]:
            if path == start:
                return [*way, path]
            if path not in seen:
                seen.add(path)
                ways.append([*way, path])
    return []


# --- outside packages


def packages_stay_in_their_places(root: Path) -> list[str]:
    broken: list[str] = []
    for each in imports(root):
        package, here = each.package, each.importer
        if package in floors.BARRED_PACKAGES.get(here, ()):
            broken.append(each.says(f"{here} imports no {package}"))
        places = floors.ONLY_IN.get(package)
        if places and not each.path.startswith(places):
            broken.append(each.says(f"only {' and '.join(places)} imports {package}"))
        if package in floors.LATE and not (each.late or each.typing):
            broken.append(each.says(f"{package} is imported inside functions only"))
        if here in floors.WORDS and not _is_word(package):
            broken.append(each.says(f"{here} is stdlib and numpy, not {package}"))
    return broken


def _is_word(package: str) -> bool:
    return (
        package in sys.stdlib_module_names
        or package in floors.GROUND_PACKAGES
        or package == "penstock"
    )


def packages_are_declared(root: Path, declared: frozenset[str]) -> list[str]:
    """Every outside package that is imported is in pyproject.toml's dependencies (`declared`: their
    names)."""
    broken: list[str] = []
    for each in imports(root):
        package = each.package
        if (
            package in sys.stdlib_module_names
            or package == "penstock"
            or package in floors.NOT_OURS_TO_INSTALL
        ):
            continue
        if floors.DISTRIBUTIONS.get(package, package) not in declared:
            broken.append(each.says(f"imports {package}, which pyproject.toml doesn't name"))
    return broken


# --- what no file does


def nothing_runs_strangers_code(root: Path) -> list[str]:
    """No pickle in any dress, no torch.load, no eval or exec, no trust_remote_code."""
    broken = [
        each.says(f"imports {each.module}: it runs what a file says")
        for each in imports(root)
        if each.package in floors.BARRED_MODULES
    ]
    for path, text in sources(root):
        for node in nodes_of(text):
            if (what := _runs_strangers_code(node)) and not _only_tells_of_it(node, path):
                broken.append(f"{path}:{getattr(node, 'lineno', 0)}: {what}")
    return broken


_BARRED_NAMES = {call.split(".")[-1] for call in floors.BARRED_CALLS}  # what is told apart quickly


def _last_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _runs_strangers_code(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and _last_name(node) in _BARRED_NAMES:
        name = ast.unparse(node.func)
        if name in floors.BARRED_CALLS or f".{name.split('.')[-1]}" in floors.BARRED_CALLS:
            return f"calls {name}"
    if isinstance(node, ast.keyword):
        if node.arg == "allow_pickle" and not (
            isinstance(node.value, ast.Constant) and node.value.value is False
        ):
            return "sets allow_pickle"
        if node.arg in floors.BARRED_WORDS:
            return f"says {node.arg}"
    if isinstance(node, ast.Name) and node.id in floors.BARRED_WORDS:
        return f"says {node.id}"
    if isinstance(node, ast.Constant) and node.value in floors.BARRED_WORDS:
        return f"says {node.value}"
    return None


def _only_tells_of_it(node: ast.AST, path: str) -> bool:
    return isinstance(node, ast.Constant) and floors.BARRED_WORDS.get(node.value) == path


def state_is_handed_over(root: Path) -> list[str]:
    """No `global`: state found in a module belongs to nobody."""
    return [
        f"{path}:{node.lineno}: global {', '.join(node.names)}: hand it over instead"
        for path, text in sources(root)
        for node in nodes_of(text)
        if isinstance(node, ast.Global)
    ]


# --- how a file looks


def files_draw_their_border(root: Path) -> list[str]:
    """Every file that holds anything opens with a docstring."""
    return [
        f"{path}:1: opens with no docstring: say what it does and what it doesn't know"
        for path, text in sources(root)
        if text.strip() and not ast.get_docstring(tree_of(text))
    ]


def files_can_be_read(root: Path) -> list[str]:
    return [
        f"{path}: {lines} lines, past {floors.LONGEST_FILE}: part it"
        for path, text in sources(root)
        if (lines := text.count("\n")) > floors.LONGEST_FILE
    ]


def no_utils(root: Path) -> list[str]:
    """A helper lives with its first user."""
    return [
        f"{path}: {part} is no name: call it by what it does"
        for path, _ in sources(root)
        for part in path.removesuffix(".py").split("/")
        if {"util", "utils", "helpers", "misc"} & set(part.split("_"))
    ]


def names_stand_once(root: Path) -> list[str]:
    """No class name twice in the package, and no file name;
    inside kernels/ columns share theirs."""
    places: dict[str, list[str]] = {}
    for path, text in sources(root):
        kernel, file = path.startswith("kernels/"), path.split("/")[-1]
        names = {} if file == "__init__.py" or kernel else {file: path}
        classes = [
            node
            for node in tree_of(text).body
            if isinstance(node, ast.ClassDef) and node.name[0] != "_"
        ]
        for name, place in (
            names | {node.name: f"{path}:{node.lineno}" for node in classes}
        ).items():
            found = places.setdefault(name, [])
            if not (kernel and found and found[0].startswith("kernels/")):
                found.append(place)
    return [
        f"{found[0]}: {name} is also in {', '.join(found[1:])}: give it a name of its own"
        for name, found in places.items()
        if len(found) > 1 and name not in floors.NAMED_TWICE
    ]


def docstrings_begin_plainly(root: Path) -> list[str]:
    """A public docstring's first sentence has a verb: it begins with neither "Of" nor "As"."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{path}:{getattr(node, 'lineno', 1)}: its docstring begins with {words[0]}: begin with"
        " what it does"
        for path, text in sources(root)
        for node in nodes_of(text)
        if isinstance(node, kinds) and not getattr(node, "name", "").startswith("_")
        if (words := (ast.get_docstring(node) or "").split())
        and words[0].strip(",") in ("Of", "As")
    ]


# --- tests (root: the folder `tests`)


def tests_can_fail(root: Path) -> list[str]:
    """Every test file asserts something, and nothing that holds whatever happens."""
    broken: list[str] = []
    for path, text in sources(root):
        if not path.split("/")[-1].startswith("test_"):
            continue
        asserts = [node for node in nodes_of(text) if isinstance(node, ast.Assert)]
        raises = [
            node
            for node in nodes_of(text)
            if isinstance(node, ast.Call)
            and _last_name(node) == "raises"
            and ast.unparse(node.func) == "pytest.raises"
        ]
        if not asserts and not raises:
            broken.append(f"{path}: asserts nothing")
        broken += [
            f"{path}:{node.lineno}: an assertion that can't fail"
            for node in asserts
            if _always_true(node.test)
        ]
    return broken


def _always_true(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(_always_true(value) for value in test.values)
    if isinstance(test, ast.Tuple):
        return bool(test.elts)
    return isinstance(test, ast.Constant) and bool(test.value)


def tests_draw_the_same_each_time(root: Path) -> list[str]:
    """`make reliability` alone draws what nobody drew before."""
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)} draws something else in each run: give it a"
        " seed"
        for path, text in sources(root)
        if not path.startswith("reliability/")
        for node in nodes_of(text)
        if isinstance(node, ast.Call) and _draws_by_chance(node)
    ]


def _draws_by_chance(call: ast.Call) -> bool:
    owner, name = getattr(getattr(call.func, "value", None), "id", ""), _last_name(call)
    if name in ("Random", "default_rng"):
        return not (call.args or call.keywords)
    return owner == "secrets" or name in ("urandom", "uuid4", "SystemRandom")


def tests_stand_without_the_long_run(root: Path) -> list[str]:
    """No test imports a module of tests/reliability, whose runs take half an hour."""
    long_run = {
        path.split("/")[-1].removesuffix(".py")
        for path, _ in sources(root)
        if path.startswith("reliability/")
    }
    return [
        f"{each.path}: imports {each.package} of tests/reliability: what both need lies in tests/harness"
        for each in imports(root)
        if each.package in long_run and not each.path.startswith("reliability/")
    ]


def tests_that_need_torch_say_so(root: Path) -> list[str]:
    """By a mark, so that the others run without it. What of tests/ they import counts as theirs."""
    leads: dict[str, set[str]] = {}
    for each in imports(root):
        leads.setdefault(each.path, set()).add(each.package)
    path_of = {path.split("/")[-1].removesuffix(".py"): path for path, _ in sources(root)}

    def needs_torch(path: str, seen: frozenset[str]) -> bool:
        packages = leads.get(path, set()) - seen
        theirs = [path_of[package] for package in packages if package in path_of]
        return bool(packages & {"torch", "transformers"}) or any(
            needs_torch(p, seen | packages) for p in theirs
        )

    return [
        f"{path}:1: imports torch: say pytestmark = pytest.mark.torch, or gpu"
        for path, text in sources(root)
        if path.split("/")[-1].startswith("test_")
        and "pytest.mark.torch" not in text
        and "pytest.mark.gpu" not in text
        if needs_torch(path, frozenset())
    ]
