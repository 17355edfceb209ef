"""Trains the demo model on word problems that worker processes make as it goes; no row is ever seen
twice.

AdamW in bf16 autocast, a short warm-up, then a cosine to a twentieth; the schedule runs over
`--minutes` of wall clock or over `--steps`. At the end it writes the checkpoint, measures it on
held-out problems and writes `training.json`.

`python scripts/demo/train.py --minutes 6 --out DIR` made the shipped model. It knows no engine.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from documents import END_OF_TEXT, END_OF_TURN, PAD, id_of, token_rows
from measure import measure
from small_llama import Shape, SmallLlama, save
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from penstock.demo import model_folder

Module = TypeVar("Module", bound=nn.Module)

# warm-up's share of the training; the last rate as a share of the highest
WARM_UP, LAST = (
    0.02,
    0.05,
)


class Batches(IterableDataset[Tensor]):
    """Endless batches of ids `[rows, length + 1]`, int16; each worker has a seed of its own."""

    def __init__(self, tokenizer_file: Path, rows: int, length: int, seed: int) -> None:
        self.tokenizer_file, self.rows, self.length, self.seed = tokenizer_file, rows, length, seed

    def __iter__(self) -> Iterator[Tensor]:
        os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
        worker = get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        rows = token_rows(Tokenizer.from_file(str(self.tokenizer_file)), seed, self.length + 1)
        while True:
            yield torch.from_numpy(
                np.stack([next(rows) for _ in range(self.rows)]).astype(np.int16)
            )


def rate_at(progress: float, highest: float) -> float:
    """The learning rate at `progress` 0 to 1."""
    if progress < WARM_UP:
        return highest * max(progress / WARM_UP, 0.001)
    wave = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))
    return highest * (LAST + (1 - LAST) * wave)


def optimizer_of(model: nn.Module, rate: float, device: str) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms don't."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")


def train(
    o: argparse.Namespace, make: Callable[[], Module], loss_of: Callable[[Module, Tensor], Tensor]
) -> tuple[Module, dict[str, Any]]:
    """Trains what `make` returns. Returns it and its log: steps, tokens, losses, seconds, machine.
    loss_of: function from the module and ids [rows, length + 1] to the loss."""
    batches = iter(
        DataLoader(
            Batches(o.tokenizer, o.rows, o.length, o.seed),
            batch_size=None,
            num_workers=o.workers,
            prefetch_factor=8 if o.workers else None,
        )
    )
    first = next(batches)  # the workers start before the device does
    torch.manual_seed(o.seed)
    torch.set_float32_matmul_precision("high")
    model = make()
    optimizer = optimizer_of(model, o.rate, o.device)
    step_loss = torch.compile(loss_of) if o.compile else loss_of
    log: list[dict[str, float]] = []
    step, begun, waited, ids = 0, time.time(), 0.0, first
    while True:
        progress = step / o.steps if o.steps else (time.time() - begun) / (60 * o.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, o.rate)
        loss = step_loss(model, ids.to(o.device, torch.long, non_blocking=True))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 5 and not o.steps:
            loss.item()
            begun = time.time()  # compiling is not training
        if step % o.print_every == 0 or step == 1:
            row = {
                "step": step,
                "loss": round(loss.item(), 4),
                "seconds": round(time.time() - begun, 1),
            }
            log.append(row)
            print(
                f"{row}, tokens {step * o.rows * o.length / 1e6:.1f}M, waited {waited:.1f} s for"
                " rows",
                flush=True,
            )
        before = time.time()
        ids = next(batches)
        waited += time.time() - before
    last = loss.item()
    name = torch.cuda.get_device_name() if o.device == "cuda" else "CPU"
    return model, {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "tokens": step * o.rows * o.length,
        "batch": [o.rows, o.length],
        "rate": o.rate,
        "seed": o.seed,
        "seconds": round(time.time() - begun, 1),
        "loss": round(sum([row["loss"] for row in log[-5:]] or [last]) / max(len(log[-5:]), 1), 4),
        "machine": name,
        "torch": torch.__version__,
        "log": log,
    }


def text_loss(model: SmallLlama, ids: Tensor) -> Tensor:
    """Returns the cross-entropy of a model's logits to the tokens that follow."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def options_of(what: str) -> argparse.ArgumentParser:
    """The command line that trains `what`."""
    parser = argparse.ArgumentParser(description=f"train {what}")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the checkpoint and training.json"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="wall-clock length of the schedule"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="length of the schedule in steps, instead of --minutes"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 2),
        help="processes making rows",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--print-every", type=int, default=100)
    parser.add_argument("--tokenizer", type=Path, default=model_folder() / "tokenizer.json")
    return parser


def options() -> argparse.Namespace:
    """The command line."""
    parser = options_of("the demo model")
    parser.add_argument("--layers", type=int, default=Shape().num_hidden_layers)
    parser.add_argument("--hidden", type=int, default=Shape().hidden_size)
    parser.add_argument(
        "--measure", type=int, default=200, help="held-out problems to measure at the end; 0: none"
    )
    parser.add_argument("--n", type=int, default=64, help="samples of each when measuring")
    return parser.parse_args()


def main() -> None:
    """Trains, writes, measures."""
    o = options()
    shape = Shape(num_hidden_layers=o.layers, hidden_size=o.hidden)
    model, log = train(o, lambda: SmallLlama(shape).to(o.device), text_loss)
    tokenizer = Tokenizer.from_file(str(o.tokenizer))
    ends = [id_of(tokenizer, token) for token in (END_OF_TEXT, END_OF_TURN)]
    save(model, o.out, ends, id_of(tokenizer, PAD))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if o.out.resolve() != o.tokenizer.parent.resolve():
            shutil.copy(o.tokenizer.with_name(name), o.out / name)
    if o.measure:
        log["measured"] = measure(o.out, o.device, o.measure, 4, o.n, 0.6, 160)
    (o.out / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in log.items() if key != "log"}, indent=1))


if __name__ == "__main__":
    main()
