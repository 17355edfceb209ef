"""What an engine of a GPU would launch, found without one: Triton's launches are taken down in
place of being run, by the key that Triton would compile them for (types, alignment by 16, ones,
constants, options).

So "after ready nothing compiles" is a statement about two sets of keys, and kernels can be compiled
for any chip from the same keys. Products in torch run on the CPU; what kernels would have written
stays as it was, zeros for the most part, and the host's side of an engine doesn't mind. A process
that imports this interprets no kernels.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_requests import with_drafter
from equal_steps import count_as_equal
from odd_requests import odd_requests
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime import jit

from penstock.config import Config
from penstock.engine.build_engine import engine_over
from penstock.execute import executor as executor_file
from penstock.execute import step_kinds, warm
from penstock.execute.device_sampler import EVERY, PLAIN
from penstock.execute.limits import BatchLimits
from penstock.execute.open_runner import open_runner
from penstock.execute.padding import CHUNK_GRAPHS, GRAPH_ROWS, graph_sizes, sizes_up_to
from penstock.execute.runner import TorchRunner
from penstock.kernels import choose
from penstock.kernels.latent import LatentSizes
from penstock.kernels.triton.attention import latent, latent_chunks
from penstock.kernels.triton.grid import LEAST_SHARED, SHARED
from penstock.request import Request


@dataclass(frozen=True)
class Launch:
    """A kernel as it would be compiled."""

    kernel: jit.JITFunction
    bound: Any
    specialization: Any
    options: Any

    def source(self, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
        backend = make_backend(target)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, dict(self.options), self.bound, self.specialization, dict(self.options)
        )
        return ASTSource(self.kernel, signature, constants, attributes), options.__dict__

    def compile(self, capability: int) -> Any:
        """The kernel as Triton's compiler makes it for a chip, which need not be here."""
        target = GPUTarget("cuda", capability, 32)
        source, options = self.source(target)
        return compile(source, target=target, options=options)


class Launches(dict[tuple[str, str, str], Launch]):
    """Key -> what was launched for it first."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self._backend = make_backend(GPUTarget("cuda", capability, 32))
        self._binders: dict[Any, Any] = {}

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        options |= {"debug": False, "instrumentation_mode": ""}
        if kernel not in self._binders:
            self._binders[kernel] = jit.create_function_from_signature(
                kernel.signature, kernel.params, self._backend
            )
        bound, specialization, rest = self._binders[kernel](*args, **options)
        name = f"{Path(kernel.fn.__code__.co_filename).stem}.{kernel.__name__}"
        self.setdefault(
            (name, str(specialization), str(rest)), Launch(kernel, bound, specialization, rest)
        )


@contextmanager
def recorded(capability: int = 90) -> Iterator[Launches]:
    """Inside, the CPU's engine has the GPU's kernels, and a launch is a line in what is given."""
    launches, run, to_host = Launches(capability), jit.JITFunction.run, executor_file._to_host
    candidates = dict(choose.CANDIDATES)
    plain: list[tuple[Any, str, Any]] = []
    try:
        jit.JITFunction.run = lambda self, *args, **more: launches.note(self, *args, **more)
        executor_file._to_host = lambda x, pinned: x.clone()
        for op, forms in candidates.items():
            choose.CANDIDATES[op] = tuple(replace(form, devices=("cpu", "cuda")) for form in forms)
        choose.choose(torch.device("cpu"), torch.bfloat16)  # imports what asks for a chip
        told_of_chip = {
            "has_pdl": lambda device: int(capability >= 90),
            "shared_of": lambda device: SHARED.get(capability, LEAST_SHARED),
        }
        for name, module in list(sys.modules.items()):
            for of_chip, told in (
                told_of_chip.items() if name.startswith("penstock.kernels.triton") else ()
            ):
                if hasattr(module, of_chip):
                    plain.append((module, of_chip, getattr(module, of_chip)))
                    setattr(module, of_chip, told)
        yield launches
    finally:
        jit.JITFunction.run, executor_file._to_host = run, to_host
        choose.CANDIDATES.update(candidates)
        for module, of_chip, own in plain:
            setattr(module, of_chip, own)


def open_recorded(config: Config, folder: Path) -> TorchRunner:
    """A runner that is ready: its worst steps have run, and what is captured whatever time and
    memory there are."""
    runner = open_runner(config, folder)
    assert runner._state is not None and runner._state.ops.compiled
    launch_sizes(runner, graph_sizes(min(runner.max_queries, GRAPH_ROWS))[:1])
    step = runner._state
    with torch.inference_mode():
        for tokens in CHUNK_GRAPHS:
            step.launches.forward_few(1, tokens, False)()
    return runner


@torch.inference_mode()
def launch_sizes(runner: TorchRunner, sizes: list[int]) -> None:
    """Decode steps of these sizes, with prefix groups and without, drawn plainly and by all that
    rows may ask."""
    step = runner._state
    assert step is not None
    hidden = torch.zeros(max(sizes), step.model.config.hidden_size, dtype=step.model.dtype)
    for size in sizes:
        for grouped in (False, True) if runner.grouping and size > 1 else (False,):
            step.launches.forward_rows(size, grouped)
        for wants in (PLAIN, EVERY):
            step.launches.draw(size, hidden[:size], wants)


@torch.inference_mode()
def launch_chunks(runner: TorchRunner, numbers: list[int]) -> None:
    """Steps of so many chunks of a token."""
    assert runner._state is not None
    for number in numbers:
        plan = warm._plan(0, PLAIN, 0, BatchLimits(0, 0, 0), -1)
        plan.chunks = warm._chunks(np.ones(number, np.int32), -1)
        runner._state.step(plan)


def wander(runner: TorchRunner, config: Config, seed: int, steps: int, many: int) -> None:
    """So many steps of odd requests, one to `many` of which come at once."""
    rng, number, engine = random.Random(seed), 0, engine_over(runner, config)
    while engine.completed < steps:
        for prompt, params in odd_requests(
            rng, rng.choice([1, 1, 3, many]), runner.vocab_size, runner.max_model_len
        ):
            number += 1
            request = Request(
                request_id=number, prompt=np.array(prompt, np.int32).tobytes(), sampling=params
            )
            assert (refused := engine.submit(request)) is None, refused
        while engine.has_work and engine.completed < steps:
            engine.step()


@dataclass
class Prefixes:
    """Calls in which latent attention expanded prefix groups. few: from now on three heads at a
    time."""

    calls: int = 0
    few: bool = False


@contextmanager
def prefixes_expanded(wanted: bool) -> Iterator[Prefixes]:
    """wanted: latent attention expands all prefix groups of steps whose rows are many enough for
    the tiles of large steps, the only ones in which it does."""
    found, real, fitting = Prefixes(), latent.attend_expanded, latent_chunks.heads_at_once
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(LatentSizes, "expands_prefixes", lambda *_: True)
            patch.setattr(
                latent_chunks, "heads_at_once", lambda *told: 3 if found.few else fitting(*told)
            )
            for place in (step_kinds, warm):
                patch.setattr(place, "PREFIX_ROWS", latent.MANY)

        def noted(q: Any, up: Any, kv: Any, seen: Any, ends: Any, *rest: Any) -> None:
            found.calls += ends.lse is not None
            real(q, up, kv, seen, ends, *rest)

        patch.setattr(latent, "attend_expanded", noted)
        yield found


# --- a process of its own: cases as JSON in, what was launched past ready as JSON out


def compiled_late(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Opens a model of random numbers as a case says, sweeps every size, or one in `every`, and
    wanders."""
    (folder / "config.json").write_text(json.dumps(case["shape"]))
    knobs = {"max_num_batched_tokens": 4096, "kv_cache_tokens": 60_000} | with_drafter(
        folder / "drafter", case["knobs"]
    )
    config = Config.of(
        model=str(folder),
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        **knobs,
    )
    expands = bool(case.get("prefixes"))
    with recorded() as launches, prefixes_expanded(expands) as prefixes:
        runner = open_recorded(config, folder)
        ready, warmed, prefixes.few = set(launches), prefixes.calls, True
        launch_sizes(runner, sizes_up_to(runner.max_queries)[:: case.get("every", 1)])
        launch_chunks(runner, [1, 15, 17, 300, runner.max_batched_tokens])
        wander(runner, config, seed=0, steps=80, many=case.get("many", 12))
        late = sorted(map(str, launches.keys() - ready))
        table = torch.zeros(8, 64, dtype=torch.float64)
        runner._state.model.ops.embed(torch.zeros(1, dtype=torch.int64), table)  # type: ignore[union-attr]
        seen = len(launches.keys() - ready) - len(late)
        runner.close()
    later = prefixes.calls - warmed
    return {"ready": sorted(map(str, ready)), "late": late, "noticed": seen, "prefixes": later}


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        count_as_equal(patch)  # no machine's pace decides which rows draft
        print(json.dumps([compiled_late(case, Path(sys.argv[1])) for case in json.load(sys.stdin)]))
