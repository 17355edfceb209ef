"""Penstock and vLLM side by side: one machine, one model folder, the same prompts, each through its own `LLM`.

    python benchmarks/side_by_side.py --out DIR --shape llama-3-8b --work big --work big-1000 --vllm-site vllm_site \
        --knob quantization=fp8 --knob kv_cache_dtype=fp8 --turns 2
    python benchmarks/side_by_side.py --out DIR --shape qwen3-30b-a3b --work big --spread-experts --engine penstock
    git archive COMMIT src | tar x -C .other    # an earlier Penstock, in a folder that git ignores
    python benchmarks/side_by_side.py --out DIR --work 128-1024 --shape llama-3.2-1b --engine penstock --other .other

Each engine opens the folder in a process of its own, draws its own weights, runs every work small once and then as
often as `--turns` says, and is ended before the next one opens. A row a work: output tokens a second, the best of the
turns, and how many times as much the first engine makes. The works are those of shapes.py whose prompts are token ids;
answers are as long as asked. What a knob is called is the same for all; `--vllm-knob` is vLLM's alone. vLLM's other
knobs are those that it ran best with here. `--other` is the Penstock of another tree. It asserts nothing.
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

ENGINES = ("penstock", "vllm")
OTHER = "other"
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]}
VLLM = {
    "max_num_seqs": 1024, "gpu_memory_utilization": 0.85, "async_scheduling": True, "disable_log_stats": True,
    "compilation_config": GRAPHS,
}  # fmt: skip
FEW = 4  # prompts, to warm up
TOLD = "FIGURES "  # what a line of an engine's process begins with


def run_engine(task: dict[str, Any]) -> None:
    """In a process of its own: opens the engine's `LLM`, runs the works, prints a line of figures for each."""
    engine = import_module("vllm" if task["engine"] == "vllm" else "penstock")
    begun = time.perf_counter()
    llm = engine.LLM(model=task["model"], **task["knobs"])
    if task["spread_experts"]:
        spread_experts(task["engine"], llm)
    tell({"version": getattr(engine, "__version__", "?"), "opened": time.perf_counter() - begun})
    for work in task["works"]:
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"][:FEW]]
        few = engine.SamplingParams(**work["sampling"] | {"max_tokens": 8})
        llm.generate(prompts, few, use_tqdm=False)
        rates = []
        for turn in range(task["turns"]):  # another token at the beginning: nothing is cached
            asked = [{"prompt_token_ids": [turn + 1, *ids[1:]]} for ids in work["prompts"]]
            begun = time.perf_counter()
            outs = llm.generate(asked, engine.SamplingParams(**work["sampling"]), use_tqdm=False)
            seconds = time.perf_counter() - begun
            rates.append(sum(len(each.token_ids) for out in outs for each in out.outputs) / seconds)
        tell({work["name"]: rates})


def tell(figures: dict[str, Any]) -> None:
    print(TOLD + json.dumps(figures), flush=True)


def spread_experts(engine: str, llm: Any) -> None:
    """Draws routers' weights from N(0, 1): as engines draw them, all but nothing tells one expert from another."""
    if engine == "vllm":
        llm.apply_model(_spread_modules)
        return
    matrices = [block.mlp.router.product.matrix for block in llm.engine.runner._model.blocks]
    _draw([getattr(matrix, "weight", matrix) for matrix in matrices])  # a GPU's has room for its products beside it


def _spread_modules(model: Any) -> None:
    routers = [module for name, module in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]
    _draw([module.weight.data for module in routers])
    for module in routers:
        if hasattr(module, "weight_scale"):  # of one in float8
            module.weight_scale.data.fill_(1.0)


def _draw(weights: list[Any]) -> None:
    import torch

    with torch.inference_mode():  # which they were made in
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, device=weight.device))


def measure(engine: str, options: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    """Returns an engine's figures, and what went wrong. What else it says goes to a log."""
    path, log = options.out / f"{engine}.json", options.out / f"{engine}.log"
    path.write_text(json.dumps(task))
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # which apply_model asks for
    first = {"vllm": options.vllm_site, OTHER: options.other and options.other / "src"}.get(engine)
    if first is not None:
        paths = [str(first.resolve()), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    words, found = [sys.executable, __file__, "--task", str(path)], dict[str, Any]()
    with log.open("w") as file:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(TOLD):
                found |= json.loads(line[len(TOLD) :])
                print(engine, line[len(TOLD) :].strip(), flush=True)
            else:
                file.write(line)
    child.wait()
    whole = all(work["name"] in found for work in task["works"])
    return found if whole else found | {"failed": f"{engine} ended with {child.returncode}: {log}"}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the engines one after the other; returns and writes what each made."""
    from random_model import SHAPES, load_format, write_model
    from shapes import prompts_of, works_of

    shape, folder = SHAPES[options.shape], options.out / "models" / options.shape
    write_model(shape, folder, options.tokenizer)
    able = {work.name: work for work in works_of(options.shape) if work.length}
    if strange := sorted({*options.work} - able.keys()):
        raise SystemExit(f"{strange[0]} is no work of token ids: take of {', '.join(able)}")
    works = [able[name] for name in options.work]
    knobs = {"load_format": load_format(folder), "max_model_len": shape.max_model_len, **dict(options.knob)}
    asked = [
        {"name": w.name, "sampling": w.sampling, "prompts": prompts_of(w, shape.vocab, options, "")} for w in works
    ]
    task = {
        "model": str(folder), "turns": options.turns, "spread_experts": options.spread_experts, "works": asked
    }  # fmt: skip
    found = {}
    for engine in [*(options.engine or ENGINES), *[OTHER] * (options.other is not None)]:
        own = VLLM | dict(options.vllm_knob) if engine == "vllm" else {}
        found[engine] = measure(engine, options, task | {"engine": engine, "knobs": knobs | own})
        (options.out / "side_by_side.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


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
    parser.add_argument("--out", type=Path, default=Path("side-by-side-out"), help="folder for the model and logs")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--work", action="append", help="again for several; left out: big")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="again; left out: both")
    parser.add_argument("--turns", type=int, default=2, help="of each work")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (.gz too); left out: the demo's, filled up")
    parser.add_argument("--other", type=Path, help="a tree of another commit: its Penstock too, last")
    parser.add_argument("--vllm-site", type=Path, help="a folder of packages that holds vLLM")
    parser.add_argument("--knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE")
    parser.add_argument("--vllm-knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE")
    parser.add_argument("--spread-experts", action="store_true", help="routers' weights from N(0, 1); on a GPU")
    options = parser.parse_args(words)
    if options.task is not None:
        return run_engine(json.loads(options.task.read_text()))
    options.work = options.work or ["big"]
    options.out.mkdir(parents=True, exist_ok=True)
    print_table(run(options), options.work)


if __name__ == "__main__":
    main()
