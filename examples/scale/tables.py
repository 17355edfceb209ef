"""Tables of steps by arithmetic, for the plans of docs/scale.md where none were measured: `python
tables.py DIR`. A table that is there already is left as it is.

Each is of what was measured on H200s and stands in docs/performance.md (a step's products at some
rows, K and V at the rate at which memory is read, prompts by their products) and nothing finer:
`penstock simulate --measure` on a machine replaces them. It knows numbers; it runs nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from penstock import __version__
from penstock.artifact.manifest import USUAL_PROMPT, BuiltOn, StepSeconds, TimedEngine
from penstock.artifact.step_file import MeasuredSteps, write_steps

BYTES_A_SECOND = 4.26e12  # that an H200 reads
MEMORY = 141e9 * 0.92
TOKENS = 16_384  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """rows: rows -> milliseconds of a step but for reading K and V.   kv: bytes of a token's, on
    one GPU.   prompt: seconds of a token of a prompt.   pair: of a token and one before it, in a
    prompt or a prefix."""

    model: str
    gpus: int
    weights: float
    rows: dict[int, float]
    kv: float
    prompt: float
    pair: float

    @property
    def kv_tokens(self) -> int:
        return int((MEMORY - self.weights / self.gpus - 6e9) / self.kv)


SIZES = {
    "1b": Sizes(
        model="a 1B, bf16",
        gpus=1,
        weights=2.5e9,
        kv=32_768,
        prompt=3.5e-6,
        pair=1.0e-9,
        rows={1: 0.77, 16: 0.9, 128: 1.3, 512: 3.0, 1024: 4.6, 2048: 8.8, 4096: 16.6, 8192: 32.3},
    ),
    "8b": Sizes(
        model="an 8B, bf16",
        gpus=1,
        weights=16e9,
        kv=131_072,
        prompt=2.4e-5,
        pair=2.5e-9,
        rows={1: 4.3, 16: 4.4, 128: 5.1, 256: 6.7, 512: 12.4, 1024: 24.8, 2048: 48.2},
    ),
    "70b-tp4": Sizes(
        model="a 70B, bf16",
        gpus=4,
        weights=141e9,
        kv=81_920,
        prompt=6.4e-5,
        pair=3.0e-9,
        rows={1: 11.4, 16: 12.2, 128: 13.9, 512: 35.8, 1024: 68.0, 2048: 133.0},
    ),
}


def table_of(sizes: Sizes) -> StepSeconds:
    """Returns the table of a model whose steps are sums."""
    most, kept = max(sizes.rows), sizes.kv_tokens

    def seconds(rows: int, context: int) -> float:
        return sizes.rows[rows] / 1e3 + rows * context * sizes.kv / BYTES_A_SECOND

    entries = [
        (rows, n, 0, 0, 0, 0, seconds(rows, n))
        for rows in sizes.rows
        for n in sorted({64, min(8000, kept // rows)})
    ]
    few = [0, *(rows for rows in sizes.rows if rows in (1, 128, 1024, most))]
    for rows, tokens in product(few, (1, 512, 4096, TOKENS - most)):
        # In a step with prompts the rows' weights are read once for both.
        base = seconds(rows, 64) if rows else sizes.rows[1] / 1e3
        length = min(tokens, USUAL_PROMPT)
        entries.append(
            (rows, 64 if rows else 0, tokens, length, 0, 0, base + tokens * sizes.prompt)
        )
    whole = (
        sizes.rows[1] / 1e3 + 4096 * sizes.prompt + sizes.pair * 4096 * (4096 - USUAL_PROMPT) / 2
    )
    entries.append((0, 0, 4096, 4096, 0, 0, whole))
    for shared, members in product((256, 1024), (2, 32, 1024)):
        cost = 1024 * shared * max(sizes.pair * 0.7, sizes.kv / BYTES_A_SECOND / members)
        entries.append((1024, 64, 0, 0, shared, members, seconds(1024, 64) + cost))
    columns = [list(column) for column in zip(*entries, strict=True)]
    names = ("rows", "context", "prompt_tokens", "prompt_length", "shared", "members", "seconds")
    engine = TimedEngine(
        num_blocks=kept // 16,
        max_rows=most,
        max_model_len=8192,
        max_batched_tokens=TOKENS,
        grouping=True,
        sharing={
            "member_token": 1.0,
            "member": 8.0,
            "tile_token": 1.0,
            "tile_members": 64,
            "step": 0.0,
        },
    )
    return StepSeconds(**dict(zip(names, columns, strict=True)), engine=engine)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tables.py DIR")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, sizes in SIZES.items():
        if (folder / f"{name}.json").exists():  # measured, perhaps
            continue
        machine = BuiltOn(
            device="NVIDIA H200, by arithmetic", memory_bytes=int(141e9), processor="-", torch="-"
        )
        steps = MeasuredSteps(
            penstock=__version__,
            model=sizes.model,
            built_on=machine,
            tensor_parallel_size=sizes.gpus,
            step_seconds=table_of(sizes),
        )
        write_steps(folder / f"{name}.json", steps)
        print(folder / f"{name}.json")


if __name__ == "__main__":
    main()
