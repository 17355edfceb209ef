"""open_runner: opens a model and returns a ready runner. With several ranks, each opens its share
here.

Knows Config, folders and devices; no sequences, no text.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import Config, Dtype, KvCacheDtype
from penstock.errors import CapacityError, EngineError, UsageError
from penstock.execute.cpu_threads import settle_threads
from penstock.execute.executor import Executor, open_executor
from penstock.execute.first_step import StartClock, take_first_step
from penstock.execute.kv_dtype import (
    check_eight_bits,
    fit_kv,
    fit_states,
    kept_form,
    reads_eight_bits,
    with_pages,
)
from penstock.execute.layer_pages import open_token_bytes, pages_of
from penstock.execute.limits import Limits, batch_limits, free_memory, with_kv
from penstock.execute.reload import load_beside
from penstock.execute.runner import TorchRunner, run_worst_steps
from penstock.execute.table_place import table_in_host, told_place
from penstock.kernels.choose import choose
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import LatentForm
from penstock.models.build_model import DrafterConfig
from penstock.models.decoder import Decoder
from penstock.models.generation_config import end_ids, read_generation_defaults
from penstock.models.model_config import ModelConfig
from penstock.models.read_config import read_model_config
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.stored_quantization import StoredQuantization
from penstock.weights.drafter import drafter_of
from penstock.weights.kv_scales import asks_for_eight_bits, read_kv_scales
from penstock.weights.load import load_model

log = logging.getLogger(__name__)

# options without effect on a CPU
GPU_ONLY = ("gpu_memory_utilization", "max_cudagraph_capture_size", "per_layer_embeddings")


def open_runner(config: Config, folder: Path) -> TorchRunner:
    """Loads the model in `folder`, sizes and allocates its KV cache, starts the device.

    Raises UsageError, CheckpointError or CapacityError, each with a one-line message, and cleans up
    first.
    """
    device, clock = find_device(config.model.device), StartClock()
    executor = open_executor(device)
    try:
        executor.call(lambda: settle_threads(device))
        runner = executor.call(lambda: open_share(config, folder, device, executor, clock=clock))
    except BaseException:
        executor.close()
        raise
    end_start(runner, clock)
    return runner


def end_start(runner: TorchRunner, clock: StartClock) -> None:
    """Runs a first real step; closes the runner if it fails."""
    try:
        take_first_step(runner)
    except BaseException:
        runner.close()
        raise
    clock.end("first step")
    runner.opened_in(clock.seconds)


def open_share(
    config: Config,
    folder: Path,
    device: torch.device,
    executor: Executor,
    layout: Layout = ALONE,
    agree: Callable[[Limits], Limits] = lambda own: own,
    make: Callable[..., TorchRunner] = TorchRunner,
    met: Callable[[], None] = lambda: None,
    clock: StartClock | None = None,
) -> TorchRunner:
    """Opens one rank's share of the model, in a call of the executor.

    agree: takes this rank's limits and returns limits common to all ranks. make: the runner's class
    or factory. met: raises EngineError if a rank failed to take part in the steps so far. clock:
    measures the phases of the start.
    """
    clock = clock or StartClock()
    unread = [name for name in GPU_ONLY if device.type == "cpu" and name in config.told()]
    if unread and layout.rank == 0:
        log.warning("nothing reads %s here: this runs on the CPU", ", ".join(unread))
    generation = read_generation_defaults(folder)
    model_config = read_model_config(folder)
    limits = batch_limits(config, model_config.context, device)
    drafter = drafter_of(config, model_config)
    model, ops = load_for(
        config, folder, model_config, device, limits.max_model_len, layout, drafter
    )
    clock.end("weights")
    with _named_failures(device):
        if (
            layout.size > 1
            # Wait here until all ranks have loaded their weights, because the next steps combine
            # their results. The agreed limits are not used
        ):
            agree(with_kv(limits, config, 1, device))
        fit_states(model, config.model.mamba_ssm_cache_dtype, limits.state_drafts)
        settle_kv(config, folder, model, ops, layout)
        grouping = config.schedule.prefix_groups != "off" and not model.all_windowed
        run_worst_steps(model, ops, limits, grouping)
        met()
        clock.end("kernels")
        sharers = layout.size if device.type == "cpu" else 1
        a_token = open_token_bytes(model.paged_forms, pages_of(model, limits.max_model_len))
        sized = agree(
            with_kv(limits, config, a_token, device, sharers=sharers, slot_bytes=model.slot_bytes)
        )
        ends, defaults = (
            end_ids(model_config, generation, config.end_of_text),
            generation.sampling,
        )
        runner = make(model, ops, sized, ends, defaults, executor, grouping)
        runner.capture(agreed=layout.size > 1)
        clock.end("KV and graphs")
        asked = config.model
        runner.beside = partial(
            load_beside,
            model,
            layout=layout,
            quantization=asked.quantization,
            seed=asked.seed,
            drafter=drafter,
        )
    if layout.size > 1:
        # all ranks are ready: none waits in a step while another compiles or captures
        agree(sized)
    return runner


def load_for(
    config: Config,
    folder: Path,
    model_config: ModelConfig,
    device: torch.device,
    positions: int,
    layout: Layout = ALONE,
    drafter: DrafterConfig | None = None,
) -> tuple[Decoder, Ops]:
    """Loads the model in `folder` with the config's dtype, and the kernels for it. positions:
    length of the longest sequence. drafter: layer that drafts tokens; None: no layer."""
    dtype = find_dtype(config.model.dtype, device)
    ops = choose(device, dtype, config.schedule.kernels, config.tuned)

    def in_host(shape: Decoder) -> bool:
        beside = table_in_host(shape, config, device)
        if beside and layout.rank == 0:
            print(
                f"penstock: {told_place(shape, config.memory.per_layer_embeddings)}",
                file=sys.stderr,
                flush=True,
            )
        return beside

    model = load_model(
        folder,
        load_format=config.model.load_format,
        dtype=dtype,
        device=device,
        ops=ops,
        seed=config.model.seed,
        positions=positions,
        config=model_config,
        layout=layout,
        quantization=config.model.quantization,
        lora=config.model.lora,
        room=(
            free_memory(device) // layout.size if device.type == "cpu" else None
        ),  # None on CUDA, whose allocator raises when memory runs out
        in_host=in_host,
        drafter=drafter,
    )
    return model, ops


def find_ops(config: Config) -> Ops:
    """Returns the kernels for this config on its device."""
    device = find_device(config.model.device)
    return choose(device, find_dtype(config.model.dtype, device), config.schedule.kernels)


def find_kv_dtype(
    asked: KvCacheDtype, stored: StoredQuantization | None, device: torch.device, ops: Ops
) -> KvCacheDtype:
    """Resolves `auto` from the checkpoint: eight bits by its kv_cache_scheme, if this device reads
    them. Raises UsageError if fp8 is requested and the device doesn't read it."""
    if asked == "auto" and asks_for_eight_bits(stored) and reads_eight_bits(device, ops):
        return "fp8"
    if asked == "fp8":
        check_eight_bits(device, ops)
    return asked


def settle_kv(
    config: Config,
    folder: Path,
    model: Decoder,
    ops: Ops,
    layout: Layout = ALONE,
    sample: Tensor | None = None,
) -> None:
    """Sets the storage format of a loaded model's keys and values: a built engine's, if it has one,
    else a measured one. sample: as in fit_kv. All ranks call it together."""
    asked, given = (
        find_kv_dtype(config.model.kv_cache_dtype, model.config.quantization, model.device, ops),
        None,
    )
    paged = with_pages(model)
    if asked == "fp8" and config.kv_scales.keys() >= {keeper.name for keeper in paged}:
        for keeper in paged:
            assert isinstance(keeper.form, KvForm | LatentForm)
            keeper.form = kept_form(
                keeper.form, config.kv_scales[keeper.name], model.device, layout
            )
        return
    if asked == "fp8" and config.model.load_format != "dummy":
        heads = {
            keeper.name: keeper.form.kv_heads for keeper in paged if isinstance(keeper.form, KvForm)
        }
        found = read_kv_scales(folder, [*heads], [*heads.values()], layout, model.config)
        by_name = dict(zip(heads, found, strict=True))
        # latent vectors have no scales in a checkpoint; they are measured
        given = [by_name.get(keeper.name) for keeper in paged]
    fit_kv(model, asked, ops, given=given, sample=sample)


@contextmanager
def _named_failures(device: torch.device) -> Iterator[None]:
    """Turns errors of compilation and allocation into one-line errors with a remedy."""
    try:
        yield
    except Exception as error:
        # A GPU's lack of memory has a class of its own in torch; the CPU's shows only in its
        # allocator's name.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(
            error
        ):
            elsewhere = ", or run on the CPU by --device cpu" if device.type == "cuda" else ""
            raise CapacityError(
                f"there is no memory for the KV cache, or for the largest step, on {device}: "
                f"set kv_cache_tokens, max_num_seqs or max_num_batched_tokens lower{elsewhere}",
                param="kv_cache_tokens",
            ) from error
        if not type(error).__module__.startswith("triton"):
            raise
        kernels = [
            f for f in traceback.extract_tb(error.__traceback__) if "/kernels/triton/" in f.filename
        ]
        name = f"{Path(kernels[-1].filename).stem}.{kernels[-1].name}" if kernels else "a kernel"
        told = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise EngineError(
            f"the kernel {name} does not compile on {device} ({told}): run without it by --kernels"
            " reference, or on the CPU by --device cpu"
        ) from error


def find_device(name: str, rank: int | None = None) -> torch.device:
    """Returns the device: `auto` is CUDA if available. rank: use the visible GPU of this number;
    None: the current one. Raises UsageError if CUDA is requested and not available."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise UsageError(
            f"device 'cuda' was asked for and {_why_no_cuda()}: ask for device 'cpu' or 'auto'",
            param="device",
        )
    if name == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if rank is None else rank)


def _why_no_cuda() -> str:
    """Returns torch's reason why CUDA is not available: an old driver, a torch without CUDA, or no
    GPU."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use one ({str(error).strip().splitlines()[0]})"
    return "torch finds none"


def find_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype; `auto`: bfloat16 if the device multiplies it natively, else float16 on
    CUDA, float32 on a CPU."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
            name
        ]
    if device.type == "cuda":
        return (
            torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        )
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns True if the processor has bf16 dot products; without them bf16 is slower
    than fp32."""
    if not cpuinfo.exists():
        return False
    words = set()
    for line in cpuinfo.read_text().splitlines():
        # names of the line with CPU features on x86 and Arm
        if line.startswith(("flags", "Features")):
            words = set(line.split(":", 1)[1].split())
            break
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
