"""Prints the weight of the sources and the plainness of their words, as `make check` shows them:

    python scripts/weight.py [NAME=MOST ...]

Exits with 1 where a figure is above the bound given for it. Counted are the Python files of `src`
and `packages`; a code line is a line with a token that is no comment and no docstring.

    nodes, nodes_line   AST nodes in all, and for each code line
    fn_median, fn_p90   lines of a function, its docstring included
    fragments           comments that begin in the middle of a sentence ("of", "what", ...)
    pronouns            docstrings of functions and classes that begin with a pronoun or the like
    fmt_skip, long      lines kept from the formatter; lines over 100 columns outside kernels
    twice               names of classes that stand more than once
    docs_words, tests   words of docs/, lines of tests/
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(
    r"#\s*(of|what|that|those|which|who|whose|it|they|its|as|by|in|with|for|to|from|where|when|how"
    r"|than|but|and|or|so)\b"
)
PRONOUN = re.compile(
    r"(Of|As|What|Those|Whether|Who|Which|That|It|They|This|These|Its|Their|By|In|With|To|From|For"
    r"|Where|When|How)\b"
)
LONG = 100  # columns
SPACING = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
)
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def weigh(root: Path) -> dict[str, float]:
    """Returns the figures of the repository at `root`, by name."""
    counts: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    lengths: list[int] = []
    for folder in ("src", "packages"):
        for path in sorted((root / folder).rglob("*.py")):
            if "tests" in path.parts:
                continue
            text = path.read_text()
            tree = ast.parse(text)
            lines = text.splitlines()
            counts.update(lines=len(lines), files=1, fmt_skip=text.count("fmt: skip"))
            if "kernels" not in path.parts:
                counts["long"] += sum(len(line) > LONG for line in lines)
            documented: set[int] = set()
            for node in ast.walk(tree):
                counts["nodes"] += 1
                if isinstance(node, ast.ClassDef):
                    classes[node.name] += 1
                elif isinstance(node, NAMED):
                    lengths.append((node.end_lineno or 0) - node.lineno + 1)
                if (docstring := _docstring(node)) is not None:
                    documented |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
                    begins = isinstance(node, NAMED) and PRONOUN.match(str(docstring.value).strip())
                    counts["pronouns"] += bool(begins)
            counts["code"] += len(set(_code_lines(text, counts)) - documented)
    lengths.sort()
    docs = sum(len(page.read_text().split()) for page in (root / "docs").rglob("*.md"))
    tests = sum(len(page.read_text().splitlines()) for page in (root / "tests").rglob("*.py"))
    return {
        **{name: counts[name] for name in ("lines", "code", "nodes")},
        "nodes_line": round(counts["nodes"] / counts["code"], 2),
        "files": counts["files"],
        "fn_median": lengths[len(lengths) // 2],
        "fn_p90": lengths[int(len(lengths) * 0.9)],
        **{name: counts[name] for name in ("fragments", "pronouns", "fmt_skip", "long")},
        "docs_words": docs,
        "tests": tests,
        "twice": sum(number > 1 for number in classes.values()),
    }


def _docstring(node: ast.AST) -> ast.Constant | None:
    if isinstance(node, (ast.Module, *NAMED)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return first.value if isinstance(first.value.value, str) else None
    return None


def _code_lines(text: str, counts: Counter[str]) -> Iterator[int]:
    """Yields the lines that code stands on; counts the comments that are fragments."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            counts["fragments"] += bool(FRAGMENT.match(token.string))
        elif token.type not in SPACING:
            yield from range(token.start[0], token.end[0] + 1)


def main(arguments: list[str]) -> int:
    found = weigh(Path(__file__).resolve().parents[1])
    most = {name: float(value) for name, _, value in (each.partition("=") for each in arguments)}
    print("weight: " + ", ".join(f"{name} {value:,}" for name, value in found.items()))
    above = [
        f"{name} {found[name]:,} is above {most[name]:g}"
        for name in most
        if found[name] > most[name]
    ]
    for line in above:
        print(f"weight: {line}", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
