"""Works through `LLM`, in a process of its own: `python -m penstock.jobs.shapes_llm`, started by shapes.py.

It reads one line of JSON (a Session) from standard input and writes one line of JSON for each thing that it found. A
process of its own, because a kernel that faults takes the process with it. Each work is run small once, then timed,
then run again for the profile of a few steps.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.engine.roofline import limit_seconds
from penstock.errors import EngineError, PenstockError
from penstock.jobs.shapes_limit import Machine, probe
from penstock.jobs.shapes_model import Shape
from penstock.jobs.shapes_parts import Profile, start_profiler
from penstock.jobs.shapes_tokenizer import rare_pair
from penstock.jobs.shapes_watch import Watch
from penstock.jobs.shapes_works import STOP_SHARE, Work, family, params_of, prompts_of

if TYPE_CHECKING:
    import torch

    from penstock.llm import LLM, Prompt

Put = Callable[[dict[str, Any]], None]
MIB = 1 << 20


@dataclass(slots=True, kw_only=True)
class Session:
    """Works of one engine. knobs: Config's, the model's folder among them. seconds: a work's longest.

    machine: shapes_limit.Machine's row where it was measured already.
    """

    shape: str
    works: list[str]
    knobs: dict[str, Any]
    seconds: float
    problems: str | None = None
    shots: str | None = None
    machine: dict[str, Any] | None = None
    profile: bool = True


@dataclass(slots=True)
class Made:
    """What a run brought. `tokens`: of the samples that ended."""

    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    prompts: dict[int, int] = field(default_factory=dict)  # prompt -> its tokens


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started deaf to it
    spec = Session(**json.loads(sys.stdin.readline()))
    try:
        run_session(spec, lambda row: print(json.dumps(row), flush=True))
    except PenstockError as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        return error.exit_code
    return 0


def run_session(spec: Session, put: Put) -> None:
    """Puts {"machine"}, {"ready"}, and for each work {"begin"} and then its result. Raises PenstockError."""
    from penstock.execute.open_runner import find_device, find_dtype
    from penstock.llm import LLM

    known = family(spec.shape)
    works = [work for work in known.works if work.name in spec.works]
    shape = known.shape_of(works[0])
    device = find_device(spec.knobs.get("device", "auto"))
    dtype = find_dtype(spec.knobs.get("dtype", "auto"), device)
    machine = Machine.of(spec.machine) if spec.machine else probe(shape, device, dtype)
    put({"machine": machine.row()})
    begin = time.monotonic()
    with LLM(**spec.knobs) as llm:
        put({"ready": round(time.monotonic() - begin, 2), "about": llm.facts.about})
        watch = Watch(llm.engine.runner)
        llm.engine.runner = watch
        if spec.profile:
            start_profiler(device.type == "cuda").stop()  # the first start takes seconds
        bench = Bench(spec, shape, machine, llm, watch, device)
        for work in works:
            put({"begin": work.name})
            put({"result": bench.run(work)})


class Bench:
    """An open LLM and what its works are measured with."""

    def __init__(
        self, spec: Session, shape: Shape, machine: Machine, llm: LLM, watch: Watch, device: torch.device
    ) -> None:
        self.spec, self.shape, self.machine, self.llm, self.watch = spec, shape, machine, llm, watch
        self.cuda = device.type == "cuda"
        self.stop = rare_pair(llm.get_tokenizer().token_bytes, STOP_SHARE)

    def run(self, work: Work) -> dict[str, Any]:
        """A work's result: a row of figures."""
        warm = self._draw(work.smaller(), "warm").seconds
        self._forget_peak()
        before = self.llm.stats()
        made = self._draw(work, "run", deadline=time.monotonic() + self.spec.seconds)
        after = self.llm.stats()
        changed = {
            name: after[name] - before[name] for name in ("generation_tokens", "prefix_hit_tokens", "preemptions")
        }
        row = {"work": work.name, "way": "llm", "shape": self.shape.name, "cut": self.watch.cut}
        row |= {"warm_up_seconds": round(warm, 2)} | self._figures(work, made, changed) | self._steps(made)
        row["peak_memory_mib"] = self._peak()
        if self.spec.profile:
            row |= self._profile(work)
        return row

    def _draw(self, work: Work, salt: str, **limits: Any) -> Made:
        """Runs a work once, until its end or until the watch presses Ctrl-C."""
        params = params_of(work, self.stop)
        listed = prompts_of(work, self.shape, self.spec.problems, self.spec.shots, salt)
        self.watch.begin(**limits)
        made = Made()
        begin = time.monotonic()
        try:
            for finished in self.llm.stream(_prompts(listed, params)):
                if finished.output is None or finished.error is not None:
                    raise EngineError(f"{work.name}: prompt {finished.key} gave no sample: {finished.error}")
                made.samples += 1
                made.tokens += len(finished.output.token_ids)
                made.prompts[finished.key] = finished.prompt_tokens
        except KeyboardInterrupt:
            if not self.watch.cut:
                raise
        made.seconds = time.monotonic() - begin
        return made

    def _figures(self, work: Work, made: Made, changed: dict[str, float]) -> dict[str, Any]:
        cut = self.watch.cut
        computed = sum(self.watch.steps.rows)
        tokens = int(changed["generation_tokens"]) if cut else made.tokens
        prompts = sum(made.prompts.values())
        thrown = None if cut or not computed else 100.0 * (computed - tokens) / computed
        return rates(tokens, prompts, made.samples / work.n, made.seconds) | {
            "thrown_away_percent": thrown,
            "mean_length": tokens / (work.count * work.n) if not cut else None,
            "prefix_hit_tokens": changed["prefix_hit_tokens"],
            "preemptions": changed["preemptions"],
        }

    def _steps(self, made: Made) -> dict[str, Any]:
        watch, steps = self.watch, len(self.watch.steps)
        tokens = sum(watch.steps.rows)
        limit = limit_seconds(watch.steps.columns(), self.shape, self.machine)
        return {
            "steps": steps,
            "steps_per_second": steps / made.seconds,
            "rows_mean": tokens / steps if steps else 0.0,
            "host_ms": 1e3 * (made.seconds - watch.waited) / steps if steps else None,
            "launch_ms": 1e3 * watch.launching / steps if steps else None,
            "limit_percent": 100.0 * limit / made.seconds,
            "limit_tokens_per_second": tokens / limit if limit else None,
        }

    def _profile(self, work: Work) -> dict[str, Any]:
        rows = int(work.profile_rows * min(work.count * work.n, self.llm.facts.max_num_seqs))
        window = Profile(rows=rows, after=work.profile_after, steps=work.profile_steps, cuda=self.cuda)
        self._draw(work, "profile", window=window, deadline=time.monotonic() + self.spec.seconds)
        return window.parts()

    def _forget_peak(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        """MiB that this process held at most: of the GPU's memory during the work, of the machine's since its start."""
        if self.cuda:
            import torch

            return torch.cuda.max_memory_reserved() / MIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rates(tokens: int, prompt_tokens: int, requests: float, seconds: float) -> dict[str, Any]:
    """The figures that each way has. A prompt counts once, however many samples it has."""
    return {
        "seconds": seconds,
        "requests": requests,
        "output_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + prompt_tokens) / seconds,
        "requests_per_second": requests / seconds,
    }


def _prompts(listed: list[Any], params: Any) -> Iterator[Prompt]:
    from penstock.llm import Prompt

    for key, prompt in enumerate(listed):
        yield Prompt(key=key, prompt=prompt, params=params)


def spec_line(spec: Session) -> bytes:
    return json.dumps(asdict(spec)).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
