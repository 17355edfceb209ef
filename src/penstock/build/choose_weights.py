"""Chooses the number format of the weights. The user names one, or `auto`: eight bits where this
machine runs faster with them.

On a GPU that multiplies e4m3, `auto` is fp8: weights take half the bytes of bf16, and products run
at twice the rate. On a CPU it is int8 if that is measured to be faster on the workload, else the
weights stay as they are. Knows trials; `make_weights.py` writes the weights.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.artifact.manifest import Decision, Value
from penstock.build.build_state import Result
from penstock.build.decide import REPEATS, decide, measure
from penstock.build.options import BuildOptions
from penstock.build.source import SourceModel
from penstock.build.stage_process import run_apart
from penstock.build.trial import OpenModel, in_time, kv_tokens_of, longest_of
from penstock.build.work_sample import WorkSample
from penstock.errors import CapacityError, UsageError
from penstock.execute.kv_dtype import check_eight_bits
from penstock.execute.open_runner import find_device, find_ops
from penstock.execute.runner import SLOW_FP4, SLOW_FP8
from penstock.kernels.choose import widens_fp4, widens_fp8
from penstock.kernels.ops import Ops
from penstock.models.build_model import build_model
from penstock.models.read_config import read_model_config
from penstock.quant.choose import choose_schemes

TRIAL_SECONDS = 60.0  # seconds of a trial at most, and at most a quarter of the time for tuning
# tokens of an answer in timed runs of number formats; short, because the formats differ only in
# matrix products
SHORT_OUTPUT = 16


def check_scheme(options: BuildOptions, source: SourceModel) -> None:
    """Raises UsageError for number formats that this checkpoint or GPU cannot take, and names one
    that works."""
    asked = options.quantization
    made = asked not in ("auto", "none") or options.keep_wide or options.quantize_lm_head
    if source.quantized is not None and made:
        raise UsageError(
            f"{options.model} is quantized already ({source.quantized}): build it with"
            " --quantization none, or take the model's unquantized checkpoint",
            param="quantization",
        )
    device, ops = find_device(options.config().model.device), find_ops(options.config())
    if options.kv_cache_dtype == "fp8":
        check_eight_bits(device, ops)
    if asked == "fp8" and device.type == "cuda" and widens_fp8(ops):
        raise UsageError(
            f"quantization fp8 is slower than bfloat16 on a {torch.cuda.get_device_name(device)},"
            " which would widen its weights for each product: take int8 or int4",
            param="quantization",
        )


def choose_weights(options: BuildOptions, source: SourceModel, works: list[WorkSample]) -> Decision:
    """Returns the decision on `quantization`: none, fp8, int8, int4 or nvfp4."""
    asked = options.quantization
    if source.quantized is not None:
        return _settled("none", f"the checkpoint is quantized already ({source.quantized})")
    ops = find_ops(options.config())
    if asked != "auto":
        widened = {"fp8": (widens_fp8, SLOW_FP8), "nvfp4": (widens_fp4, SLOW_FP4)}
        slow = f"; {widened[asked][1]}" if asked in widened and widened[asked][0](ops) else ""
        return _settled(asked, f"asked for{slow}")
    if find_device(options.config().model.device).type == "cuda":
        return _for_gpu(ops, source)
    if not options.tune_minutes:
        return _settled("none", "not timed (--tune-minutes 0): int8 may be asked for")
    job = {
        "options": msgspec.to_builtins(options),
        "folder": source.folder,
        "works": msgspec.to_builtins(works),
    }
    return msgspec.convert(run_apart("try_weights", job), Decision)


def try_weights(options: dict[str, Any], folder: str, works: list[dict[str, Any]]) -> Result:
    """Times the unquantized model against the model quantized to int8 at load. Runs in a stage
    process."""
    asked, some = msgspec.convert(options, BuildOptions), msgspec.convert(works, list[WorkSample])
    some = [work.cut(0.0, SHORT_OUTPUT) for work in some]
    seconds = min(TRIAL_SECONDS, 15.0 * asked.tune_minutes)
    candidates: list[Value] = ["none", "int8"]
    with ExitStack() as opened:
        models = {}
        try:
            for kind in candidates:
                config = asked.source_config(
                    folder, quantization="auto" if kind == "none" else kind
                )
                config.memory.kv_cache_tokens = kv_tokens_of(some, config)
                config.memory.max_model_len = longest_of(some)
                models[kind] = opened.enter_context(OpenModel(config, Path(folder)))
        except CapacityError as error:
            return _said(_settled("none", f"not timed, both don't fit beside each other: {error}"))
        models["int8"].run([some[0].cut(0.0, 2)])
        runs = in_time(
            models["none"], some, seconds / (2 * len(candidates) * REPEATS), lambda line: None
        )
        measured = measure(
            candidates, lambda kind: _speed(models[kind], runs), time.monotonic() + seconds
        )
    return _said(decide("quantization", candidates, measured, "output tok/s", more=True))


def _said(decision: Decision) -> Result:
    told: Result = msgspec.to_builtins(decision)
    return told


def _speed(model: OpenModel, works: list[WorkSample]) -> float:
    timing = model.run(works)
    return timing.output_tokens / timing.seconds


def _for_gpu(ops: Ops, source: SourceModel) -> Decision:
    if widens_fp8(ops):
        return _settled(
            "none",
            "this GPU would widen e4m3 for each product: ask for int8 or int4 to save memory",
        )
    config = read_model_config(Path(source.folder))
    model = build_model(
        config, torch.bfloat16, torch.device("meta"), scheme_of=choose_schemes("fp8")
    )
    if not any(weight.dtype == torch.float8_e4m3fn for weight in model.weights()):
        return _settled("none", "nothing of this model is multiplied in fp8")
    return _settled("fp8", "this GPU multiplies e4m3: half of the bytes of bfloat16")


def _settled(kind: str, note: str) -> Decision:
    return Decision(name="quantization", chosen=kind, default="none", note=note)
