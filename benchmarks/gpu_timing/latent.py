"""Times attention over latent vectors on a GPU, by tile.

    PYTHONPATH=src python benchmarks/gpu_timing/latent.py [--models moonlight glm] [--only rows
        groups prompts] [--eight] [--rows 1 128 1000] [--contexts 512 2048 8192]
        [--prompts 1x64 ... 8x1024 1x1024+7168] [--warm I/N]

    rows     each row has its own context: the vectors' bytes beside the copy speed
    groups   16 of 256 rows with 2,000 shared tokens and 128 of their own, attended alone, as groups,
             and as groups whose prefixes' keys and values are computed, products with `up` included
    prompts  COUNTxTOKENS[+TOKENS BEFORE]: absorbed, and with keys and values computed, products
             with `up` included; "fewer" names the form that `LatentSizes.expands` chooses

--eight: vectors in eight bits. A time is the median of replays of a graph that holds the call
several times. TFLOP/s count the form's own products; "off" is the largest difference from the
default tile's answer, relative to its largest value. --warm compiles the I-th of N parts of the
tiles and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import rows as timing

from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import (
    AttentionKind,
    ChunkSight,
    DecodeInputs,
    GroupInputs,
    PrefillInputs,
    PrefixSight,
    StepInputs,
)
from penstock.kernels.latent import LatentSizes
from penstock.kernels.state_forms import LatentForm, LatentKv
from penstock.kernels.triton.attention import latent, latent_chunks
from penstock.kernels.triton.attention.attention import plan

Calls = list[Callable[[], Tensor]]
B, GPU, NEVER = torch.bfloat16, torch.device("cuda"), 1 << 40
GROUPS, MEMBERS, SHARED, OWN = 16, 256, 2000, 128
PARTS = ["rows", "groups", "prompts"]
OF_ROWS: list[latent.Shape] = [
    (16, 32, 8, 2),
    (16, 32, 4, 2),
    (16, 32, 4, 3),
    (16, 64, 8, 2),
    (16, 16, 4, 3),
    (32, 32, 4, 2),
    (32, 32, 8, 2),
    (32, 64, 8, 2),
    (64, 32, 8, 2),
]
TALL: list[latent.Shape] = [
    (64, 32, 8, 2),
    (64, 32, 8, 3),
    (64, 64, 8, 1),
    (64, 64, 8, 2),
    (32, 32, 8, 2),
]
TALL_EIGHT: list[latent.Shape] = [(64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 8, 2), (32, 64, 8, 2)]
OF_CHUNKS: list[latent_chunks.Tile] = [
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 8, 2),
    (128, 64, 4, 2),
]


@dataclass(frozen=True)
class Model:
    heads: int
    sizes: LatentSizes
    eight: bool = False

    @property
    def form(self) -> LatentForm:
        scale = torch.full((1,), 2.0**-6, device=GPU) if self.eight else None
        return LatentForm(self.sizes.width, self.sizes.rank, B, scale)

    @property
    def tall(self) -> list[latent.Shape]:
        return TALL_EIGHT if self.eight else TALL

    @property
    def kind(self) -> AttentionKind:
        s = self.sizes
        return AttentionKind(
            self.heads, 1, s.width, 0, None, s.head**-0.5, value_width=s.rank, latent=s
        )


MODELS = {
    "moonlight": Model(16, LatentSizes(rank=512, turning=64, still=128, value=128)),
    "glm": Model(20, LatentSizes(rank=512, turning=64, still=192, value=256)),
}


class Case:
    """A step of a model: queries, `up`, and vectors of several layers, more than the L2 holds."""

    def __init__(self, model: Model, step: StepInputs, blocks: int) -> None:
        self.model, self.step, s = model, step, model.sizes
        form = model.form
        self.layers: list[LatentKv] = []
        for _ in range(timing.copies_of(blocks * form.block_bytes)):
            kv = form.over(
                torch.zeros(blocks + 1, *form.block_shape, dtype=torch.uint8, device=GPU)
            )
            for first in range(0, blocks + 1, 4096):
                for part in (kv.vectors, kv.turned):
                    some = part[first : first + 4096]
                    some.copy_(
                        torch.randn(some.shape, device=GPU) * (64.0 if part.dtype == E4M3 else 1.0)
                    )
            self.layers.append(kv)
        tokens = step.positions.shape[0]
        self.q = torch.randn(tokens, model.heads, s.head, device=GPU, dtype=B)
        self.up = (
            torch.randn(model.heads, s.still + s.value, s.rank, device=GPU).mul_(s.rank**-0.5).to(B)
        )

    def calls(self, expand_tokens: int = NEVER) -> Calls:
        """Returns calls of the operation with both its products (of up to 32 tokens the queries' is
        the store's in an engine); the plan is shared, as between a step's layers."""
        kind, step = self.model.kind, self.step
        more: dict[str, Any] = {"plan": plan(step, kind, self.q, B), "expand_tokens": expand_tokens}
        return [
            partial(latent.latent_attention, self.q, self.up, kv, step, kind, **more)
            for kv in self.layers
        ]

    def vectors_calls(self) -> Calls:
        """Returns calls of the part between the two products."""
        kind, step, sizes = self.model.kind, self.step, self.model.sizes
        torch.manual_seed(0)
        asked = torch.randn(self.q.shape[0], self.model.heads, sizes.rank, device=GPU, dtype=B)
        rotated, planned = self.q[..., sizes.still :], plan(step, kind, asked, B)
        return [
            partial(latent.attend_vectors, asked, rotated, kv, step, kind, planned)
            for kv in self.layers
        ]


def rows_step(count: int, context: int) -> tuple[StepInputs, int]:
    each = -(-context // 16)
    table = 1 + torch.randperm(count * each, device=GPU).to(torch.int32).view(count, each)
    at = torch.full((count,), context - 1, dtype=torch.int64, device=GPU)
    every = torch.arange(count, dtype=torch.int32, device=GPU)
    decode = DecodeInputs(every, at, table, at.int(), torch.zeros_like(every), context, None)
    return StepInputs(at, at, count, decode, None), count * each


def groups_step(grouped: bool) -> tuple[StepInputs, int]:
    count, shared, own = GROUPS * MEMBERS, SHARED // 16, OWN // 16
    blocks = 1 + torch.randperm(GROUPS * shared + count * own, device=GPU).to(torch.int32)
    prefixes, tails = (
        blocks[: GROUPS * shared].view(GROUPS, shared),
        blocks[GROUPS * shared :].view(count, own),
    )
    table = torch.cat((prefixes.repeat_interleave(MEMBERS, 0), tails), 1)
    at = torch.full((count,), 16 * (shared + own) - 1, dtype=torch.int64, device=GPU)
    every = torch.arange(count, dtype=torch.int32, device=GPU)
    skip = torch.full_like(every, 16 * shared * grouped)
    start = torch.arange(GROUPS + 1, dtype=torch.int32, device=GPU) * MEMBERS
    length = torch.full((GROUPS,), 16 * shared, dtype=torch.int32, device=GPU)
    groups = GroupInputs(start, prefixes.contiguous(), length) if grouped else None
    most = 16 * (own if grouped else shared + own)
    return StepInputs(
        at, at, count, DecodeInputs(every, at, table, at.int(), skip, most, groups), None
    ), len(blocks)


def prompts_step(count: int, tokens: int, before: int) -> tuple[StepInputs, int]:
    each = -(-(tokens + before) // 16)
    table = 1 + torch.randperm(count * each, device=GPU).to(torch.int32).view(count, each)
    start = torch.arange(count + 1, dtype=torch.int32, device=GPU) * tokens
    context = torch.full((count,), before, dtype=torch.int32, device=GPU)
    pairs = count * (tokens * before + tokens * (tokens + 1) // 2)
    chunks = PrefillInputs(
        start, context, table, ChunkSight(count * tokens, count * (tokens + before), pairs)
    )
    at = torch.arange(before, before + tokens, device=GPU).repeat(count)
    return StepInputs(at, at, 0, None, chunks), count * each


@contextmanager
def using(place: Any, name: str, shape: Sequence[int]) -> Iterator[None]:
    """Makes launches inside use this shape."""
    usual = getattr(place, name)
    setattr(place, name, lambda *_: shape)
    try:
        yield
    finally:
        setattr(place, name, usual)


class Table:
    """Prints lines of measurements. warm: (part, parts) of the tiles to compile only."""

    def __init__(self, warm: tuple[int, int] | None) -> None:
        self.warm, self.copy = warm, 0.0 if warm else timing.copy_speed()

    def sweep(
        self,
        what: str,
        calls: Callable[[], Calls],
        place: Any,
        name: str,
        shapes: Sequence[Sequence[int]],
        flops: float,
        size: float = 0.0,
        more: str = "",
    ) -> None:
        """Times calls, made anew for each shape. flops: of a call; size:
        bytes that it must move."""
        mine = shapes if self.warm is None else shapes[self.warm[0] :: self.warm[1]]
        usual = None
        for shape in mine:
            with using(place, name, shape):
                try:
                    runs = calls()
                    answer = runs[0]().float()
                    usual = answer if usual is None else usual
                    took = 0.0 if self.warm else timing.timed(runs, least=5)
                except Exception as error:  # noqa: BLE001 - a tile that doesn't fit is a row of the table
                    print(f"{what:40s} {shape!s:17s} {type(error).__name__}", flush=True)
                    continue
            if self.warm is None:
                off = float((answer - usual).abs().max() / usual.abs().max())
                share = (
                    f"{size / took / 1e6:6.0f} GB/s {size / took / 1e6 / (self.copy / 1e9):6.1%}"
                    if size
                    else ""
                )
                rate = flops / took / 1e9
                print(
                    f"{what:40s} {shape!s:17s} {1e3 * took:10.1f} us {rate:6.0f} TFLOP/s"
                    f" {share:20s} off {off:.1g} {more}",
                    flush=True,
                )


def time_rows(
    table: Table, name: str, model: Model, counts: Sequence[int], contexts: Sequence[int]
) -> None:
    for context in contexts:
        for count in counts:
            case = Case(model, *rows_step(count, context))
            pairs = count * context * model.heads
            size = count * model.heads * (model.sizes.width + model.sizes.rank) * 2.0
            size += count * context * model.form.block_bytes / 16
            told = f"{name} rows {count} x {context}"
            flops = 2.0 * pairs * model.sizes.absorbed_pair
            table.sweep(told, case.vectors_calls, latent, "_rows_shape", OF_ROWS, flops, size)
            flops += 2.0 * count * model.heads * model.sizes.expansion
            table.sweep(
                f"{told}, with products",
                case.calls,
                latent,
                "_rows_shape",
                OF_ROWS[:1],
                flops,
                size,
            )


def time_groups(table: Table, name: str, model: Model) -> None:
    rows = GROUPS * MEMBERS
    flops = 2.0 * rows * model.heads * (SHARED + OWN) * model.sizes.absorbed_pair
    told = f"{name} {GROUPS} x {MEMBERS} rows"
    alone = Case(model, *groups_step(False))
    table.sweep(f"{told}, alone", alone.vectors_calls, latent, "_rows_shape", OF_ROWS, flops)
    del alone
    grouped = Case(model, *groups_step(True))
    table.sweep(
        f"{told}, in groups, prefix",
        grouped.vectors_calls,
        latent,
        "_tall_shape",
        model.tall,
        flops,
    )
    table.sweep(
        f"{told}, in groups, own", grouped.vectors_calls, latent, "_rows_shape", OF_ROWS, flops
    )
    decode = grouped.step.decode
    assert decode is not None and decode.groups is not None
    table.sweep(
        f"{told}, in groups, absorbed", grouped.calls, latent, "_tall_shape", model.tall[3:4], flops
    )
    decode.groups.expanded = PrefixSight(GROUPS * SHARED, rows * SHARED)
    table.sweep(
        f"{told}, in groups, made", grouped.calls, latent_chunks, "_shape", OF_CHUNKS, flops
    )


def time_prompts(table: Table, name: str, model: Model, asked: Sequence[str]) -> None:
    s = model.sizes
    for each in asked:
        shape, _, before = each.partition("+")
        count, tokens = map(int, shape.split("x"))
        step, blocks = prompts_step(count, tokens, int(before or 0))
        case, chunks = Case(model, step, blocks), step.prefill
        assert chunks is not None and chunks.seen is not None
        seen, told = chunks.seen, f"{name} prompts {each}"
        fewer = chunks.expands(s, 1)
        flops = 2.0 * model.heads * (seen.tokens * s.expansion + seen.pairs * s.absorbed_pair)
        more = "" if fewer else "fewer"
        table.sweep(
            f"{told}, absorbed", case.calls, latent, "_tall_shape", model.tall, flops, more=more
        )
        # made whatever it costs
        wide = replace(chunks, seen=ChunkSight(seen.tokens, seen.stored, 1 << 60))
        case.step = replace(step, prefill=wide)
        flops = 2.0 * model.heads * (seen.stored * s.expansion + seen.pairs * s.expanded_pair)
        more = "fewer" if fewer else ""
        made = partial(case.calls, 1)
        table.sweep(f"{told}, made", made, latent_chunks, "_shape", OF_CHUNKS, flops, more=more)
        if table.warm is None:
            each = torch.full((count,), tokens + int(before or 0), device=GPU)
            of = partial(latent_chunks.Seen.of, each, chunks.block_table, seen.stored, s, B)
            print(f"{told}, once a step: {1e3 * timing.timed([of], least=5):.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--eight", action="store_true", help="vectors in eight bits")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 128, 1000])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 2048, 8192])
    lengths = [f"1x{tokens}" for tokens in (64, 128, 256, 512, 1024, 4096, 8192)]
    parser.add_argument(
        "--prompts", nargs="*", default=[*lengths, "8x1024", "32x256", "1x1024+7168", "1x256+7936"]
    )
    parser.add_argument("--warm", help="I/N: compile alone")
    asked = parser.parse_args()
    warm = tuple(map(int, asked.warm.split("/"))) if asked.warm else None
    table = Table(warm)  # type: ignore[arg-type]
    if warm is None:
        print(f"copy {table.copy / 1e9:,.0f} GB/s", flush=True)
    with torch.inference_mode():
        for name in asked.models:
            model = replace(MODELS[name], eight=asked.eight)
            if "rows" in asked.only:
                time_rows(table, name, model, asked.rows, asked.contexts)
            if "groups" in asked.only:
                time_groups(table, name, model)
            if "prompts" in asked.only:
                time_prompts(table, name, model, asked.prompts)


if __name__ == "__main__":
    main()
