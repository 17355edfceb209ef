"""Splits a few steady steps into parts: which kernels ran, for how long, and how long none did.

torch.profiler records kernels (on a CPU, operators of the device's thread); a kernel's name
determines its part. The window runs from one step's reading to a later one's, so it holds whole
steps however far ahead the device runs. Knows names and times; no model.
"""

from __future__ import annotations

import ast
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock.kernels

COLUMN = Path(penstock.kernels.__file__).parent / "triton"
PARTS = ("products", "attention", "states", "sampling", "elementwise", "gap")
LEAD = 2  # steps between the profiler's start and the window's: the start itself holds the host up
TOP = 12
BESIDE = ("Memcpy HtoD", "Memcpy DtoH")  # run on copy engines beside the kernels
# Our own kernels count by their family, a folder of kernels/triton. Of two kernels with one name the
# first family's counts: attention's `_join` runs in each layer, sampling's where a row joins.
FAMILIES = {
    "attention": "attention",
    "linear": "products",
    "experts": "products",
    "recurrent": "states",
    "elementwise": "elementwise",
    "sampling": "sampling",
}
# Files of these families whose kernels read and write each row once.
ELEMENTWISE = {"rotary_and_store", "latent_store", "blocks", "fp8"}
# Others' kernels by their names; the first that is found counts.
NAMES = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa|mha_|BatchDecode|BatchPrefill", re.I)),
    (
        "products",
        re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|wgmma|_mm_|dot_kernel", re.I),
    ),
    ("sampling", re.compile(r"argmax|softmax|topk|sort|multinomial|ArgMaxOps|exponential", re.I)),
)
# On a CPU: sampling is made of the same operators as all else there, so it isn't told apart.
OPERATORS = (
    ("attention", re.compile(r"aten::(bmm|baddbmm|_scaled_dot_product|_softmax|_flash_attention)")),
    ("products", re.compile(r"aten::(mm|addmm|mkldnn|_scaled_mm)|mkldnn::")),
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel (or operator) that ran: nanoseconds since the epoch."""

    name: str
    start: int
    end: int


class Profile:
    """A window (step_watch.Window): opens at the `after`th step with at least `rows` rows, for
    `steps` steps."""

    def __init__(self, *, rows: int, after: int, steps: int, cuda: bool) -> None:
        self._wanted, self._after, self._steps, self._cuda = rows, after, steps, cuda
        self._steady = self._read = self._begin = self._end = 0
        self._profiler: Any = None

    def read(self, rows: int) -> bool:
        if self._profiler is None:
            self._steady += rows >= self._wanted
            if self._steady >= self._after:
                self._profiler = start_profiler(self._cuda)
            return False
        self._read += 1
        if self._read == LEAD:
            self._begin = time.time_ns()
        if self._read < LEAD + self._steps:
            return False
        self._end = time.time_ns()
        self._profiler.stop()
        return True

    def parts(self) -> dict[str, Any]:
        """Returns the milliseconds of a step by part, or the reason why there are none."""
        if not self._end:
            if self._profiler is not None:
                self._profiler.stop()
            why = (
                f"the work ended before {self._after + LEAD + self._steps} steps of {self._wanted}"
                " rows or more"
            )
            return {"parts_ms": None, "parts_missing": why}
        ran = recorded(self._profiler, self._cuda)
        if not any(self._begin <= r.start < self._end for r in ran):
            return {
                "parts_ms": None,
                "parts_missing": f"the profiler recorded nothing in the window ({len(ran)} in all)",
            }
        return split(
            ran,
            self._begin,
            self._end,
            self._steps,
            part_of_kernel() if self._cuda else part_of_operator,
        )


def start_profiler(cuda: bool) -> Any:
    """Returns a recording profiler: of kernels on CUDA, else of every thread's operators."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    config = None if cuda else _ExperimentalConfig(profile_all_threads=True)
    profiler = profile(
        activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU],
        experimental_config=config,
    )
    profiler.start()
    return profiler


def recorded(profiler: Any, cuda: bool) -> list[Ran]:
    """Returns what ran on the device; on a CPU the innermost operators of its busiest thread."""
    events = profiler.profiler.kineto_results.events()
    if cuda:
        return [
            _ran(e)
            for e in events
            if e.device_type().name == "CUDA" and not e.name().startswith(BESIDE)
        ]
    threads: dict[int, list[Ran]] = defaultdict(list)
    for event in events:
        if event.name().startswith(("aten::", "mkldnn::")):
            threads[event.start_thread_id()].append(_ran(event))
    busiest = max(threads.values(), key=len, default=[])
    return _innermost(busiest)


def _ran(event: Any) -> Ran:
    return Ran(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())


def _innermost(ran: list[Ran]) -> list[Ran]:
    """Returns operators that contain no other; for names in OPERATORS the outermost, with
    everything inside."""
    ordered = sorted(ran, key=lambda r: (r.start, -r.end))
    kept: list[Ran] = []
    swallowed = 0
    for r, after in zip(ordered, [*ordered[1:], None], strict=True):
        if r.start < swallowed:
            continue
        if part_of_operator(r.name) != "elementwise":
            kept.append(r)
            swallowed = r.end
        elif after is None or after.start >= r.end:
            kept.append(r)
    return kept


def split(
    ran: Iterable[Ran], begin: int, end: int, steps: int, part_of: Callable[[str], str]
) -> dict[str, Any]:
    """Returns the milliseconds of a step by part. The gap is the time in which nothing ran; a
    kernel that runs beside another counts in both parts."""
    inside = [
        Ran(r.name, max(r.start, begin), min(r.end, end))
        for r in ran
        if r.end > begin and r.start < end
    ]
    scale = 1e6 * steps
    parts = dict.fromkeys(PARTS, 0.0)
    by_name: dict[str, list[int]] = defaultdict(list)
    for r in inside:
        parts[part_of(r.name)] += (r.end - r.start) / scale
        by_name[r.name].append(r.end - r.start)
    busy = _union(inside)
    parts["gap"] = (end - begin - busy) / scale
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "step_ms": (end - begin) / scale,
        "parts_ms": parts,
        "busy_percent": 100.0 * busy / (end - begin),
        "busy_by": "profile",
        "profiled_steps": steps,
        "kernels": [
            {
                "name": name[:120],
                "part": part_of(name),
                "ms": sum(taken) / scale,
                "calls": len(taken) / steps,
            }
            for name, taken in longest
        ],
    }


def _union(ran: list[Ran]) -> int:
    """Returns the nanoseconds in which anything ran."""
    busy = reached = 0
    for r in sorted(ran, key=lambda r: r.start):
        busy += max(0, r.end - max(r.start, reached))
        reached = max(reached, r.end)
    return busy


def part_of_kernel() -> Callable[[str], str]:
    """Returns a function kernel name -> part. Our own kernels' names are read from their sources
    (`kernels/triton`)."""
    own: dict[str, str] = {}
    for family, part in FAMILIES.items():
        for path in sorted((COLUMN / family).glob("*.py")):
            for name in _jitted(path):
                own.setdefault(name, "elementwise" if path.stem in ELEMENTWISE else part)

    def part_of(name: str) -> str:
        found = own.get(re.sub(r"_\d+d.*$|_\d+$", "", name)) or own.get(name)
        return found or next(
            (part for part, pattern in NAMES if pattern.search(name)), "elementwise"
        )

    return part_of


def _jitted(path: Path) -> list[str]:
    """Returns the names of a file's functions with a decorator that contains `jit`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in node.decorator_list
        ):
            found.append(node.name)
    return found


def part_of_operator(name: str) -> str:
    return next((part for part, pattern in OPERATORS if pattern.search(name)), "elementwise")
