"""Measures the cost of the API beyond plain sampling on a GPU, each part against the same engine.

    python benchmarks/whole_api.py --out DIR --tokenizer tokenizer.json.gz
                                                          # Llama-3.2-1B's shape
    python benchmarks/whole_api.py --out DIR --part forms --part swap
    python benchmarks/whole_api.py --out DIR --shape tiny --knob device=cpu
                                                          # to try the script

    beside      rows without a form, beside rows held to one JSON schema; against the same rows
                beside rows without a form
    forms       rows with a schema each; against as many rows without, of as many tokens each
    labels      `LLM.score` of items behind one header; against prompts of an item's length that
                draw one token
    logprobs    monkeys whose tokens and logprobs are read; against monkeys without logprobs
    swap        the pause of `update_weights`, from a folder and from another process: no step runs
                meanwhile

One engine serves everything; both sides of a comparison run by turns in one process. Weights are
random, so answers walk through their grammar at random, which makes masks most expensive. Rates
count from the first submit to the end of the last row.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from random_model import SHAPES, Shape, write_model
from random_schemas import long_schema, made_schemas
from random_tokenizer import rare_pair
from shapes import SEED, STOP_SHARE, Work, params_of, prompts_of, with_model, works_of

from penstock import SamplingParams, StructuredOutputsParams
from penstock.errors import PenstockError
from penstock.llm import LLM, Prompt
from penstock.shared_weights import SharedWeights

LABELS = [11, 12, 13, 14]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows and tokens of each part. turns: number of measurements of each side."""

    free: int = 768
    held: int = 256
    prompt: int = 128
    output: int = 256
    rows: int = 1000
    schemas: int = 100
    longest: int = 384
    items: int = 10_000
    item: int = 200
    header: int = 600
    samples: int = 512
    turns: int = 3
    swaps: int = 3


TINY = Sizes(
    free=6,
    held=2,
    prompt=12,
    output=48,
    rows=8,
    schemas=4,
    longest=200,
    items=24,
    item=12,
    header=40,
    samples=8,
)


class Bench:
    """An open LLM, and the instruments to measure its parts."""

    def __init__(self, llm: LLM, shape: Shape, folder: Path, options: argparse.Namespace) -> None:
        self.llm, self.shape, self.folder, self.options = llm, shape, folder, options
        self.sizes = TINY if shape.name == "tiny" else Sizes()
        self.stop = rare_pair(llm.get_tokenizer().token_bytes, STOP_SHARE)
        self._salt = 0

    def ids(self, count: int, length: int) -> list[list[int]]:
        """Returns prompts of random ids with beginnings not used before,
        so that nothing is cached."""
        self._salt += 1
        draw = random.Random(f"{SEED}/{self._salt}")
        return [[draw.randrange(self.shape.vocab) for _ in range(length)] for _ in range(count)]

    # --- beside

    def beside(self) -> dict[str, Any]:
        """Measures the rows without a form; the other rows run until the free rows have
        ended, with or without a form."""
        schema = StructuredOutputsParams(json=long_schema(1000))
        for held in (None, schema):
            self.free_rate(held, 16)
        before = self.counts()
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(self.sizes.turns):
            for formed, into in rates.items():
                into.append(self.free_rate(schema if formed else None, self.sizes.output))
        return against(rates[True], rates[False], "out tok/s of the free rows") | self.since(before)

    def free_rate(self, form: StructuredOutputsParams | None, output: int) -> float:
        """Returns the output tokens a second of the free rows, until the last of them ends."""
        sizes = self.sizes
        free = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
        longer = {"max_tokens": 6 * output, "detokenize": False}
        other = SamplingParams(**longer, ignore_eos=form is None, structured_outputs=form)
        kinds = [True] * sizes.free + [False] * sizes.held
        random.Random(SEED).shuffle(kinds)
        prompts = self.ids(len(kinds), sizes.prompt)
        asked = [
            Prompt(key=k, prompt=p, params=free if k else other)
            for k, p in zip(kinds, prompts, strict=True)
        ]
        left, begin = sizes.free, time.monotonic()
        with closing(self.llm.stream(asked)) as samples:
            for finished in samples:
                if finished.error is not None or (not finished.key and left):
                    raise SystemExit(f"beside: a row ended before its time: {finished.error}")
                left -= 1
                if not left:
                    break
            seconds = time.monotonic() - begin
        return sizes.free * output / seconds

    # --- forms

    def forms(self) -> dict[str, Any]:
        """Measures rows with schemas. The first turn compiles the schemas, later turns find them
        compiled; each is reported."""
        sizes = self.sizes
        self.formed([StructuredOutputsParams(json=long_schema(1))])  # reads the vocabulary
        forms = [StructuredOutputsParams(json=each) for each in made_schemas(sizes.schemas, SEED)]
        rates: list[float] = []
        plain: list[float] = []
        counts: list[int] = []
        before = self.counts()
        for _ in range(sizes.turns):
            seconds, lengths = self.formed([forms[i % len(forms)] for i in range(sizes.rows)])
            counts.append(sum(lengths))
            rates.append(counts[-1] / seconds)
            each = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
            prompts, begin = self.ids(sizes.rows, sizes.prompt), time.monotonic()
            self.llm.generate(prompts, each, use_tqdm=False)
            plain.append(counts[-1] / (time.monotonic() - begin))
        found = against(rates[1:], plain[1:], "out tok/s")
        return (
            found
            | self.since(before)
            | {
                "tokens": counts,
                "compiling": rates[0],
                "compiling_share": rates[0] / plain[0],
            }
        )

    def formed(self, forms: list[StructuredOutputsParams]) -> tuple[float, list[int]]:
        """Runs a row for each form. Returns seconds, and each row's tokens. Exits if an answer is
        no JSON."""
        each = [
            SamplingParams(max_tokens=self.sizes.longest, structured_outputs=form) for form in forms
        ]
        prompts, begin = self.ids(len(forms), self.sizes.prompt), time.monotonic()
        outs = self.llm.generate(prompts, each, use_tqdm=False)
        seconds = time.monotonic() - begin
        samples = [out.outputs[0] for out in outs]
        for sample in samples:
            if sample.finish_reason == "stop":
                json.loads(sample.text)
        whole = sum(sample.finish_reason == "stop" for sample in samples)
        print(
            f"forms: {whole} of {len(samples)} answers came to their end in {self.sizes.longest}"
            " tokens",
            flush=True,
        )
        return seconds, [len(sample.token_ids) for sample in samples]

    # --- labels

    def labels(self) -> dict[str, Any]:
        """Measures scoring; the rate counts an item's own tokens, because the header is one
        prompt's. Half of the plain runs come before, half after."""
        sizes, plain = self.sizes, []
        self.score(min(200, sizes.items))
        for turn in range(2):
            prompts = self.ids(sizes.items // 2, sizes.item)
            begin = time.monotonic()
            params = SamplingParams(max_tokens=1, detokenize=False)
            outs = self.llm.generate(prompts, params, use_tqdm=False)
            plain.append(
                sum(len(out.prompt_token_ids) for out in outs) / (time.monotonic() - begin)
            )
            if not turn:
                seconds, computed = self.score(sizes.items)
        found = against([sizes.items * sizes.item / seconds], plain, "items' own prompt tok/s")
        return found | {
            "items_per_second": sizes.items / seconds,
            "computed_tokens": computed,
            "computed_tokens_per_second": computed / seconds,
        }

    def score(self, count: int) -> tuple[float, int]:
        """Scores items behind a new header. Returns seconds, and the prompt tokens not found in the
        cache."""
        (header,), items = self.ids(1, self.sizes.header), self.ids(count, self.sizes.item)
        begin = time.monotonic()
        outs = self.llm.score(header, items, label_token_ids=LABELS)
        seconds = time.monotonic() - begin
        if any(out.outputs is None for out in outs):
            raise SystemExit(
                f"labels: an item has no score: {next(out.error for out in outs if out.error)}"
            )
        return seconds, sum(len(out.prompt_token_ids) - out.num_cached_tokens for out in outs)

    # --- logprobs

    def logprobs(self) -> dict[str, Any]:
        """Measures logprobs; samples end by a stop string,
        at lengths as geometric as by end ids."""
        (plain,) = (work for work in works_of(self.shape.name) if work.name == "monkeys-stops")
        plain = replace(plain, n=self.sizes.samples)
        ways = {True: replace(plain, sampling=plain.sampling | {"logprobs": 0}), False: plain}
        for work in ways.values():
            self.monkeys(work.smaller())
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(self.sizes.turns):
            for way, into in rates.items():
                into.append(self.monkeys(ways[way]))
        return against(rates[True], rates[False], "out tok/s")

    def monkeys(self, work: Work) -> float:
        """Returns output tokens a second; ids and, if given, logprobs are read as they come."""
        params, tokens = params_of(work, self.stop), 0
        listed = prompts_of(work, self.shape.vocab, self.options, "")
        begin = time.monotonic()
        for finished in self.llm.stream(
            Prompt(key=k, prompt=p, params=params) for k, p in enumerate(listed)
        ):
            assert finished.output is not None, finished.error
            tokens += len(finished.output.token_ids)
            if params.logprobs is not None:
                told: Any = finished.output.logprobs
                if len(told.columns[1]) != len(finished.output.token_ids):
                    raise SystemExit("logprobs: a token came without its logprob")
        return tokens / (time.monotonic() - begin)

    # --- swap

    def swap(self) -> dict[str, Any]:
        """Measures swaps with the weights that already run:
        the cost does not depend on the values."""
        folder = [self.paused(model_path=self.folder) for _ in range(self.sizes.swaps)]
        with trainer(self.folder, self.llm.config.model.device) as shared:
            other = [
                self.paused(shared=shared, weights_version=f"step-{i}")
                for i in range(self.sizes.swaps)
            ]
        return {"unit": "s of pause", "folder": folder, "shared": other}

    def paused(self, **source: Any) -> float:
        """Returns the seconds between two steps with an update of the weights between them, less
        the seconds without one."""
        self.llm.generate(self.ids(1, 8), SamplingParams(max_tokens=2), use_tqdm=False)
        begin = time.monotonic()
        self.llm.update_weights(**source)
        pause = time.monotonic() - begin
        (out,) = self.llm.generate(
            self.ids(1, 8), SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False
        )
        if out.error is not None or len(out.outputs[0].token_ids) != 2:
            raise SystemExit(f"swap: nothing is drawn behind it: {out.error}")
        return pause

    # --- what the engine counted

    def counts(self) -> dict[str, float]:
        stats = self.llm.stats()
        return {name: stats[name] for name in ("steps", "late_masks")}

    def since(self, before: dict[str, float]) -> dict[str, float]:
        return {name: value - before[name] for name, value in self.counts().items()}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "beside": Bench.beside,
    "forms": Bench.forms,
    "labels": Bench.labels,
    "logprobs": Bench.logprobs,
    "swap": Bench.swap,
}


def against(measured: list[float], plain: list[float], unit: str) -> dict[str, Any]:
    """Returns both sides' rates of each turn,
    and the measured median as a share of the plain one."""
    share = statistics.median(measured) / statistics.median(plain)
    return {"unit": unit, "measured": measured, "plain": plain, "share": share}


# --- another process's weights


@contextmanager
def trainer(folder: Path, device: str) -> Iterator[SharedWeights]:
    """Yields the weights of a process that holds a folder's weights on this device,
    until its end."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=hold, args=(folder, device, its))
    process.start()
    its.close()
    try:
        yield msgspec.json.decode(ours.recv_bytes(), type=SharedWeights)
    finally:
        ours.close()
        process.join(60)


def hold(folder: Path, device: str, pipe: Connection) -> None:
    """Sends the places of a folder's tensors, and keeps the tensors until the other end closes."""
    import torch
    from safetensors.torch import load_file

    from penstock.weights.share import share_weights

    where = (
        "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    )
    with share_weights(load_file(folder / "model.safetensors", device=where)) as shared:
        pipe.send_bytes(msgspec.json.encode(shared))
        try:
            pipe.recv_bytes()
        except EOFError:
            return


# --- the run


def write_folder(shape: Shape, folder: Path, tokenizer: Path | None) -> None:
    """Writes a model with weights whose only end id is its tokenizer's; random end ids would end
    forms early."""
    write_model(shape, folder, tokenizer, weights=True)
    end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ends = [token["id"] for token in added if token["content"] == end]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def line_of(name: str, row: dict[str, Any]) -> str:
    """Returns a part's figures in a line."""
    if "failed" in row:
        return f"{name:10} {row['failed']}"
    if name == "swap":
        ways = (
            f"{way}: first {row[way][0]:.3f}, median {statistics.median(row[way]):.3f}"
            for way in ("folder", "shared")
        )
        return f"{name:10} {', '.join(ways)} {row['unit']}"
    both = (f"{statistics.median(row[key]):,.0f}" for key in ("measured", "plain"))
    more = (
        f"{key} {value:,.3f}".rstrip("0").rstrip(".")
        for key, value in row.items()
        if isinstance(value, (int, float))
    )
    return f"{name:10} {' against '.join(both)} {row['unit']}: {', '.join(more)}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen parts; returns and writes results.json,
    which accumulates runs of one folder."""
    path = options.out / "results.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    parts = options.part or list(PARTS)
    shape = SHAPES[options.shape]
    folder = options.out / "models" / shape.name
    begin = time.monotonic()
    if not (folder / "model.safetensors").is_file():
        write_folder(shape, folder, options.tokenizer)
    knobs = {"max_model_len": shape.max_model_len, "gpu_memory_utilization": 0.8, **options.knobs}
    written = time.monotonic()
    with LLM(str(folder), **knobs) as llm:
        print(
            f"{shape.name} written in {written - begin:.1f} s, opened in"
            f" {time.monotonic() - written:.1f} s",
            flush=True,
        )
        bench = Bench(llm, shape, folder, options)
        for name in parts:
            begin = time.monotonic()
            try:
                row = PARTS[name](bench)
            except PenstockError as error:
                row = {"failed": str(error)}
            found[name] = row | {"shape": shape.name, "seconds": time.monotonic() - begin}
            print(line_of(name, found[name]), flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("whole-api-out"), help="folder for models and results.json"
    )
    parser.add_argument("--shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="again for several; left out: all"
    )
    return with_model(parser, words)


def main(words: list[str] | None = None) -> int:
    found = run(arguments(words))
    print("\n" + "\n".join(line_of(name, row) for name, row in found.items()))
    return 1 if any("failed" in row for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
