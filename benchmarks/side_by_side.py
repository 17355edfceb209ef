"""Compares engines side by side: one machine, one model folder, the same prompts, each engine's
`LLM`.

    python benchmarks/side_by_side.py --out DIR --shape llama-3-8b --work big --work big-1000
        --vllm-site vllm_site --knob quantization=fp8 --knob kv_cache_dtype=fp8
    python benchmarks/side_by_side.py --out DIR --shape qwen3-30b-a3b --work big --spread-experts
        --engine penstock
    git archive COMMIT src | tar x -C .other    # an earlier Penstock, in a folder that git ignores
    python benchmarks/side_by_side.py --out DIR --shape llama-3.2-1b --work monkeys --work 128-1024
        --engine penstock --other .other --together --knob kv_cache_tokens=1300000
        --knob gpu_memory_utilization=0.97

Each engine opens the folder in its own process, draws its own weights, and runs every work small
once and then `--turns` times: one engine after the other, or with `--together` all open at once and
by turns (here, there; there, here), so that drift of the machine's pace favours none. They then
share the memory, so limit each engine's. Prints a row a work: output tokens a second, the best of
the turns, and the first engine's rate over that of each other engine. The works are those of shapes.py; works
without an end of their own run to their full length. `--knob` goes to all engines, `--vllm-knob` to
vLLM alone; vLLM's other knobs are those with which it was fastest here. `--other` is the Penstock
of another tree. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from knobs import read_knob
from router_weights import spread_experts

ENGINES = ("penstock", "vllm")
OTHER = "other"
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]}
VLLM = {
    "max_num_seqs": 1024,
    "gpu_memory_utilization": 0.85,
    "async_scheduling": True,
    "disable_log_stats": True,
    "compilation_config": GRAPHS,
}
FEW, SHORT = 4, 8  # prompts, and tokens of an answer, to warm up
TOLD = "FIGURES "  # what a line of an engine's process begins with


# --- in an engine's process


def run_engine(task: dict[str, Any]) -> None:
    """Opens the engine's `LLM`, then for each line on standard input runs that work and prints its
    rate."""
    engine = import_module("vllm" if task["engine"] == "vllm" else "penstock")
    begun = time.perf_counter()
    llm = engine.LLM(model=task["model"], **task["knobs"])
    if task["spread_experts"]:
        spread_experts(task["engine"], llm)
    tell({"version": getattr(engine, "__version__", "?"), "opened": time.perf_counter() - begun})
    works = {work["name"]: work for work in task["works"]}
    for line in sys.stdin:
        asked = json.loads(line)
        work, turn = works[asked["work"]], asked["turn"]
        prompts, sampling = work["prompts"], work["sampling"]
        if turn == 0:
            prompts = prompts[:FEW]
            sampling = sampling | {"max_tokens": SHORT, "n": min(sampling["n"], FEW)}
        prompts = [_anew(prompt, turn) for prompt in prompts]
        begun = time.perf_counter()
        outs = llm.generate(prompts, engine.SamplingParams(**sampling), use_tqdm=False)
        seconds = time.perf_counter() - begun
        tell({"rate": sum(len(each.token_ids) for out in outs for each in out.outputs) / seconds})


def _anew(prompt: Any, turn: int) -> Any:
    """Returns the prompt with another beginning for each turn, so that none of it is cached."""
    return (
        f"({turn}) {prompt}"
        if isinstance(prompt, str)
        else {"prompt_token_ids": [turn + 1, *prompt[1:]]}
    )


def tell(figures: dict[str, Any]) -> None:
    print(TOLD + json.dumps(figures), flush=True)


# --- who asks


class Engine:
    """An engine's process. told: its figures, with `failed` if it has ended too early. Its other
    output goes to a log."""

    def __init__(self, name: str, options: argparse.Namespace, task: dict[str, Any]) -> None:
        self.name, self.told = name, dict[str, Any]()
        path, self.log = options.out / f"{name}.json", options.out / f"{name}.log"
        path.write_text(json.dumps(task))
        # which apply_model asks for
        environment = {
            **os.environ,
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }
        first = {"vllm": options.vllm_site, OTHER: options.other and options.other / "src"}.get(
            name
        )
        if first is not None:
            paths = [str(first.resolve()), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._file = self.log.open("w", buffering=1)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--task", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
            env=environment,
        )

    def opened(self) -> None:
        """Waits until its model is open."""
        self.told |= self._answer()
        print(self.name, self.told, flush=True)

    def run(self, work: str, turn: int) -> None:
        """Runs a work in the process; turn 0 is small and not counted."""
        if "failed" in self.told:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"work": work, "turn": turn}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it ended with is told below
        answer = self._answer()
        if turn and "rate" in answer:
            self.told.setdefault(work, []).append(answer["rate"])
            print(self.name, work, f"{answer['rate']:,.0f}", flush=True)
        elif "failed" in answer:
            self.told |= answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._process.stdin.close()
        for line in self._process.stdout:
            self._file.write(line)
        self._process.wait()
        self._file.close()

    def _answer(self) -> dict[str, Any]:
        """Returns the next figures, or the reason why the process ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(TOLD):
                figures: dict[str, Any] = json.loads(line[len(TOLD) :])
                return figures
            self._file.write(line)
        return {"failed": f"{self.name} ended with {self._process.wait()}: {self.log}"}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the engines; returns and writes each one's figures."""
    task = task_of(options)
    names = [*(options.engine or ENGINES), *[OTHER] * (options.other is not None)]
    found = dict[str, Any]()
    for group in [names] if options.together else [[name] for name in names]:
        engines = [Engine(name, options, task | _own(name, options, task)) for name in group]
        try:
            for engine in engines:
                engine.opened()
            for work in options.work:
                for turn in range(options.turns + 1):
                    for engine in reversed(engines) if turn % 2 == 0 else engines:
                        engine.run(work, turn)
        finally:
            for engine in engines:
                engine.close()
                found[engine.name] = engine.told
            (options.out / "side_by_side.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _own(name: str, options: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    own = VLLM | dict(options.vllm_knob) if name == "vllm" else {}
    return {"engine": name, "knobs": task["knobs"] | own}


def task_of(options: argparse.Namespace) -> dict[str, Any]:
    """Writes the model and returns the task of all engines."""
    from random_model import SHAPES, load_format, write_model
    from random_tokenizer import rare_pair
    from shapes import STOP, STOP_SHARE, prompts_of, works_of

    from penstock.text.tokenizer import Tokenizer

    shape, folder = SHAPES[options.shape], options.out / "models" / options.shape
    able = {work.name: work for work in works_of(options.shape) if work.groups}
    if strange := sorted({*options.work} - able.keys()):
        raise SystemExit(f"{strange[0]} is no work for several engines: take of {', '.join(able)}")
    write_model(shape, folder, options.tokenizer)
    asked = []
    for work in (able[name] for name in options.work):
        sampling = {"n": work.n, **work.sampling}
        if sampling.get("stop") == [STOP]:
            sampling["stop"] = [
                rare_pair(Tokenizer.load(folder, vocab_size=shape.vocab).token_bytes, STOP_SHARE)
            ]
        asked.append(
            {
                "name": work.name,
                "sampling": sampling,
                "prompts": prompts_of(work, shape.vocab, options, ""),
            }
        )
    knobs = {
        "load_format": load_format(folder),
        "max_model_len": shape.max_model_len,
        **dict(options.knob),
    }
    return {
        "model": str(folder),
        "spread_experts": options.spread_experts,
        "works": asked,
        "knobs": knobs,
    }


def print_table(found: dict[str, Any], works: list[str]) -> None:
    for engine, told in found.items():
        print(told.get("failed") or f"{engine} {told['version']}, opened in {told['opened']:.1f} s")
    able = {engine: told for engine, told in found.items() if "failed" not in told}
    print(f"\n{'output tok/s':16}" + "".join(f"{engine:>24}" for engine in able) + f"{'times':>8}")
    for work in works:
        turns = {engine: told[work] for engine, told in able.items()}
        cells = "".join(f"{max(each):>12,.0f} ({min(each):>9,.0f})" for each in turns.values())
        best = [max(each) for each in turns.values()]
        print(f"{work:16}{cells}" + (f"{best[0] / best[1]:8.2f}" if len(best) > 1 else ""))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path("side-by-side-out"), help="folder for the model and logs"
    )
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--work", action="append", help="again for several; left out: big")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="again; left out: both")
    parser.add_argument("--turns", type=int, default=2, help="of each work")
    parser.add_argument(
        "--together", action="store_true", help="all engines open at once, by turns"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json (.gz too); left out: the demo's, filled up"
    )
    parser.add_argument("--problems", help="for monkeys; left out: the demo's")
    parser.add_argument("--shots", help="what their examples come from")
    parser.add_argument(
        "--other", type=Path, help="a tree of another commit: its Penstock too, last"
    )
    parser.add_argument("--vllm-site", type=Path, help="a folder of packages that holds vLLM")
    parser.add_argument("--knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE")
    parser.add_argument(
        "--vllm-knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE"
    )
    parser.add_argument(
        "--spread-experts", action="store_true", help="tokens differ in their experts; on a GPU"
    )
    options = parser.parse_args(words)
    if options.task is not None:
        return run_engine(json.loads(options.task.read_text()))
    options.work = options.work or ["big"]
    options.out.mkdir(parents=True, exist_ok=True)
    print_table(run(options), options.work)


if __name__ == "__main__":
    main()
