"""The build stage that rounds to four bits. It rounds the layers' matrices so that the products
with the matrices' usual inputs change least; the inputs come from texts of the workload.

The unbuilt model reads texts that the quality check does not use (its own answers at temperature
1). One pass records input statistics for as many matrices as fit in memory; each matrix is then
rounded by its statistics (`quant/rounding.py`). Knows models and positions; `make_weights.py` puts
the results into the built engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.artifact.manifest import STATE
from penstock.build.build_state import Result
from penstock.build.check_quality import TEXTS, UNBUILT, batches, draw_texts, open_model
from penstock.build.make_weights import find_merged
from penstock.build.model_linears import linears
from penstock.build.options import BuildOptions
from penstock.build.work_sample import WorkSample
from penstock.execute.limits import free_memory
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.models.decoder import Decoder
from penstock.quant.scheme import Product
from penstock.quant.write_compressed import store
from penstock.status_line import Bar
from penstock.weights.checkpoint import read_entries, read_tensors
from penstock.weights.write_quantized import kinds_written, save_whole

ROUNDED = "rounded"  # the folder of the rounded matrices, a file a matrix
# number of texts; with 8, 32 and 64 texts the KL of SmolLM2-135M was 0.149, 0.107 and 0.104
# (LOG.md, 2026-11-27)
READ = TEXTS
# a quarter of the free memory may hold the matrices' statistics (moments); rounding takes three
# times as much
SHARE = 4


def round_weights(options: dict[str, Any], folder: str, works: list[dict[str, Any]]) -> Result:
    """Writes the rounded matrices in the checkpoint's format and returns their number and the
    number of tokens read. Runs in a stage process."""
    asked, source = msgspec.convert(options, BuildOptions), Path(folder)
    kinds, group = kinds_written(source, "int4", asked.keep_wide)
    entries, adapter = read_entries(source), find_merged(asked, source)
    texts = draw_texts(asked, source, msgspec.convert(works, list[WorkSample]), more=READ)
    out = Path(asked.out) / STATE / ROUNDED
    out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        model, ops = open_model(
            asked.source_config(folder, **UNBUILT), source, max(map(len, texts))
        )
        chosen = [
            each
            for each in linears(model)
            if all(kinds.get(name) == "int4" for name in _names(each))
        ]
        count = sum(len(_names(each)) for each in chosen)
        bar = Bar(count, "matrices rounded", everywhere=True)
        for some in _at_once(chosen, free_memory(model.device) // SHARE):
            for linear, moments in zip(some, _moments(model, ops, texts, some), strict=True):
                for name in _names(linear):
                    ((entry, tensor),) = read_tensors([entries[f"{name}.weight"]])
                    wide = tensor if adapter is None else adapter.merged(entry.name, tensor)
                    stored = store(wide.to(model.device), "int4", group, tensor.dtype, moments)
                    save_whole(
                        {key: each.cpu() for key, each in stored.items()},
                        out / f"{name}.safetensors",
                    )
                    bar.advance()
        bar.close()
    return {"matrices": count, "tokens": sum(map(len, texts))}


def _names(linear: Linear) -> list[str]:
    """Returns the checkpoint's names of the matrices fused in a Linear."""
    return [part.name.removesuffix(".weight") for part in linear.loaded["weight"].parts]


def _inputs(linear: Linear) -> int:
    return linear.loaded["weight"].parts[0].shape[1]


def _at_once(chosen: Sequence[Linear], room: int) -> Iterator[list[Linear]]:
    """Yields groups of matrices whose moments (float32 [in, in] each) fit in `room` bytes together;
    a group has at least one matrix."""
    some: list[Linear] = []
    for linear in chosen:
        if some and 4 * sum(_inputs(each) ** 2 for each in (*some, linear)) > room:
            yield some
            some = []
        some.append(linear)
    if some:
        yield some


def _moments(
    model: Decoder, ops: Ops, texts: list[list[int]], some: Sequence[Linear]
) -> list[Tensor]:
    """Returns each matrix's moments, float32 [in, in]: the mean of x xT over its inputs x [in] at
    all tokens of the texts."""
    sums = [torch.zeros(_inputs(each), _inputs(each), device=model.device) for each in some]
    bar = Bar(sum(map(len, texts)), "tokens read", everywhere=True)
    for run in batches(model, texts):

        def see(at: int, x: Tensor, places: Tensor = run.places) -> None:
            rows = x.index_select(0, places).float()
            sums[at].addmm_(rows.T, rows)

        with _watched(some, see):
            model.forward(run.ids, run.step, run.kv, ops)
        bar.advance(len(run.places))
    bar.close()
    return [each.div_(sum(map(len, texts))) for each in sums]


@contextmanager
def _watched(some: Sequence[Linear], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Calls `see(index, input)` for every multiplication by one of these matrices."""
    usual = [each.product for each in some]

    def watched(at: int, product: Product) -> Product:
        def multiply(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
            see(at, x)
            return product.multiply(x, matrix, bias)

        return replace(product, multiply=multiply, gated=None)

    for at, (each, product) in enumerate(zip(some, usual, strict=True)):
        assert product is not None, "the model is prepared"
        each.product = watched(at, product)
    try:
        yield
    finally:
        for each, product in zip(some, usual, strict=True):
            each.product = product
