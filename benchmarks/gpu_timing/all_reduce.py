"""Checks and times all-reduces over 2 to 8 GPUs of one machine.

    PYTHONPATH=src python benchmarks/gpu_timing/all_reduce.py [--gpus 2] [--sweep] [--quick]

Our all-reduce must equal the sum in the ranks' order, bit for bit. It is timed beside torch's
one_shot_all_reduce, two_shot_all_reduce_ and NCCL's, each in a CUDA graph that holds the call 20
times; a time is the median over replays. This process starts one process a GPU. Then it measures
the time of a poll of a flag (the limit of a hang is counted in polls), and checks that a missing
rank is noted within two seconds. Exits with 1 where a bit is wrong. --sweep times other cuts of the
kernels too; --quick only checks bits. The last lines are a table, microseconds a call. NVLink's
multicast stays off.
"""

# ruff: noqa: B023  (closures are called before their loop goes on)

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from penstock.kernels.triton import all_reduce as ours
from penstock.kernels.triton.all_reduce_kernels import HUNG
from penstock.ranks.gpu_collectives import NO_MULTICAST, GpuCollectives

SIZES = {
    "8 KB": 1 << 13,
    "32 KB": 1 << 15,
    "128 KB": 1 << 17,
    "512 KB": 1 << 19,
    "1 MB": 1 << 20,
    "4 MB": 1 << 22,
    "16 MB": 1 << 24,
    "64 MB": 1 << 26,
}
CALLS, REPLAYS = 20, 30
CUTS = [
    (block, warps, programs)
    for block, warps in ((128, 4), (256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8))
    for programs in (32, 64, 128)
]
Told = list[list[str]]


def drawn(rank: int, count: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Returns a rank's data, which every rank can reproduce. Ranks have very different magnitudes,
    so that the order of adding shows."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator, device="cuda") * 7.0**rank).to(dtype)


def in_order(ranks: int, count: int, seed: int, dtype: torch.dtype) -> Tensor:
    total = drawn(0, count, seed, dtype).float()
    for rank in range(1, ranks):
        total += drawn(rank, count, seed, dtype).float()
    return total.to(dtype)


def check_bits(end: GpuCollectives, rank: int, ranks: int) -> int:
    """Returns the number of wrong sums or gathers."""
    assert end._shared is not None
    memory, wrong, seed = end._shared.memory, 0, 0
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for count in (
            1,
            16,
            1001,
            4096,
            65_552,
            1 << 19,
            (1 << 20) + 16,
            ours.ROOM // 2 + 4096,
            ours.ROOM + 48,
        ):
            for one_shot in (True, False, None):
                seed += 1
                got = ours.all_reduce(drawn(rank, count, seed, dtype), memory, one_shot=one_shot)
                wrong += not torch.equal(got, in_order(ranks, count, seed, dtype))
    for count in (1, 3, 1000, 8192):
        got = ours.all_gather(drawn(rank, count, 7, torch.float32), memory)
        wrong += not torch.equal(
            got, torch.stack([drawn(r, count, 7, torch.float32) for r in range(ranks)])
        )
    return wrong + check_replays(memory, rank, ranks)


def check_replays(memory: ours.RankMemory, rank: int, ranks: int) -> int:
    """Checks graphs with an odd number of calls, replayed by turns with plain launches. Returns the
    number of errors."""
    held = drawn(rank, 4096, 1, torch.bfloat16)
    graph, wrong = torch.cuda.CUDAGraph(), 0
    ours.all_reduce(held, memory)
    with torch.cuda.graph(graph):
        outs = [ours.all_reduce(held * (call + 1), memory, one_shot=call != 1) for call in range(3)]
    for turn in range(50):
        held.copy_(drawn(rank, 4096, turn, torch.bfloat16))
        graph.replay()
        got = ours.all_reduce(held, memory)
        want = [drawn(r, 4096, turn, torch.bfloat16) for r in range(ranks)]
        for call, out in enumerate([*outs, got]):
            by = call + 1 if call < 3 else 1
            total = (want[0] * by).float()
            for each in want[1:]:
                total += (each * by).float()
            wrong += not torch.equal(out, total.bfloat16())
    return wrong


def timed(call: Callable[[], Any]) -> float:
    """Returns the microseconds a call; raises if the call cannot be captured in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        took = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1000 / CALLS)
        graph.reset()
    return statistics.median(took[5:])


def tried(call: Callable[[], Any]) -> str:
    """Returns a time, or the reason why there is none. All ranks fail alike, or none."""
    try:
        return f"{timed(call):.1f}"
    except Exception as error:  # noqa: BLE001  a form that isn't there is a hole in the table
        print(
            f"  not timed: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True
        )
        return "-"


def time_all(end: GpuCollectives, rank: int, ranks: int) -> Told:
    """Returns the lines of the table."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    most = max(SIZES.values()) // 2
    held = symmetric.empty(most, dtype=torch.bfloat16, device="cuda").zero_()
    symmetric.rendezvous(held, group)
    table = []
    for name, size in SIZES.items():
        x, its, flat = (
            held[: size // 2].clone(),
            held[: size // 2],
            torch.zeros(size // 2, dtype=torch.bfloat16).cuda(),
        )
        memory, ops = end._shared.memory, torch.ops.symm_mem  # type: ignore[union-attr]
        line = [name]
        line.append(
            tried(lambda: ours.all_reduce(x, memory, one_shot=True)) if size <= 1 << 24 else "-"
        )
        line.append(tried(lambda: ours.all_reduce(x, memory, one_shot=False)))
        line.append(
            tried(lambda: ops.one_shot_all_reduce(its, "sum", group)) if size <= 1 << 24 else "-"
        )
        line.append(tried(lambda: ops.two_shot_all_reduce_(its, "sum", group)))
        line.append(tried(lambda: dist.all_reduce(flat)))
        table.append(line)
        if rank == 0:
            print("  ".join(line), flush=True)
    line = ["gather of 3 KB"]
    told = torch.zeros(768, dtype=torch.float32, device="cuda")
    table.append(
        [*line, tried(lambda: ours.all_gather(told, end._shared.memory)), "-", "-", "-", "-"]
    )  # type: ignore[union-attr]
    return table


def sweep(end: GpuCollectives, rank: int) -> None:
    """Prints the times of both forms at other cuts, for each size."""
    memory = end._shared.memory  # type: ignore[union-attr]
    for name, size in SIZES.items():
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        for one_shot in (True, False) if size <= 1 << 22 else (False,):
            found = []
            for block, warps, programs in CUTS:
                took = timed(
                    lambda: ours.all_reduce(
                        x,
                        memory,
                        one_shot=one_shot,
                        cut=(block, warps),
                        most_programs=programs,
                    )
                )
                found.append((took, block, warps, programs))
            if rank == 0:
                best = ", ".join(
                    f"{t:.1f} ({b} x {w} warps, {p})" for t, b, w, p in sorted(found)[:4]
                )
                print(
                    f"sweep {name}, {'one shot' if one_shot else 'two shots'}: {best}", flush=True
                )


def hang(end: GpuCollectives, rank: int) -> list[str]:
    """Lets rank 0 sum alone; returns the time of a poll, and the time until a hang is noted."""
    if rank:
        return []
    shared, told = end._shared, []
    assert shared is not None
    x = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    for looks in (100_000, None):
        if looks is None:
            end.ready()
        else:
            shared.memory.wait_at_most(looks)
        shared.memory.state[HUNG.value] = 0
        shared.hung[0] = 0
        torch.cuda.synchronize()
        begun = time.monotonic()
        ours.all_reduce(x, shared.memory)
        torch.cuda.synchronize()
        took = time.monotonic() - begun
        each = "" if looks is None else f", {took / looks * 1e9:.0f} ns a look"
        told.append(
            f"hang: {looks or 'as at work'}: noted {int(shared.hung[0])} after {took:.2f} s{each}"
        )
    begun = time.monotonic()
    for _ in range(100):
        ours.all_reduce(x, shared.memory)
    torch.cuda.synchronize()
    return [*told, f"hang: 100 sums after it take {(time.monotonic() - begun) * 1000:.1f} ms"]


def one_rank(rank: int, ranks: int, folder: Path, args: argparse.Namespace) -> int:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.FileStore(str(folder / "torch"), ranks)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    end = GpuCollectives(folder / "ours", rank, ranks, 60.0, device)
    begun = time.monotonic()
    end.connect()
    print(f"rank {rank}: {end.describe()} in {time.monotonic() - begun:.2f} s", flush=True)
    if end._shared is None:
        return 1
    wrong = check_bits(end, rank, ranks)
    print(f"rank {rank}: {wrong} sums are wrong", flush=True)
    table: Told = []
    if not args.quick and not wrong:
        if args.sweep:
            sweep(end, rank)
        table = time_all(end, rank, ranks)
    torch.cuda.synchronize()
    dist.barrier()
    lines = hang(end, rank)
    dist.barrier()
    if rank == 0:
        print("\n".join(lines))
        print(
            f"\n| {ranks} GPUs, us | ours, one shot | two shots | torch one shot | two shot |"
            " NCCL |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
        for line in table:
            print(f"| {' | '.join(line)} |")
        print(
            f"torch {torch.__version__}, {torch.cuda.get_device_name()}, wrong sums: {wrong}",
            flush=True,
        )
    return int(wrong > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, default=0, help="0: all that are visible")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update(NO_MULTICAST)
    if args.rank >= 0:
        code = one_rank(args.rank, args.gpus, args.folder, args)
        sys.stdout.flush()
        os._exit(code)  # what is left of NCCL's threads waits for nobody
    gpus = args.gpus or torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        more = [f"--{name}" for name in ("sweep", "quick") if getattr(args, name)]
        command = [sys.executable, __file__, "--gpus", str(gpus), "--folder", folder, *more]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(gpus)]
        sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    main()
