"""`penstock doctor`: describes this machine. It tells which kernels would run and why, and how many
tokens of KV cache would fit. Calls the same code that opens an engine (`execute`, `kernels`), and
loads no weights.
"""

from __future__ import annotations

import platform
import sys
import time
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.bench.cpu_pinning import count_here, processor
from penstock.config import Config, ModelOptions
from penstock.errors import TokenizerError
from penstock.status_line import size_of

if TYPE_CHECKING:
    import torch

    from penstock.engine.fitted import Fitted
    from penstock.models.decoder import Decoder
    from penstock.models.model_config import ModelConfig

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "msgspec", "pyzmq")
Facts = list[tuple[str, str]]

TRIED = (9, 0)  # compute capability of the GPUs on which the tests marked gpu ran


def print_doctor(config: Config) -> None:
    """Prints the description section by section, so that known facts are shown before an error
    about the rest.

    Raises UsageError, CheckpointError or CapacityError, as opening this model here would.
    """
    from penstock.engine.build_engine import model_folder
    from penstock.engine.fitted import fit
    from penstock.execute.open_runner import find_device, find_dtype

    _print("versions", versions())
    _print("machine", machine())
    device = find_device(config.model.device)
    dtype = find_dtype(config.model.dtype, device)
    _print("would run on", [("device", _device(device)), ("dtype", _dtype(config, device, dtype))])
    _print("kernels", kernels(config, device, dtype))
    folder = model_folder(config)
    fitted = fit(config, folder)
    if fitted is not None:
        _print("artifact", artifact(fitted))
        config, dtype = fitted.config, find_dtype(fitted.config.model.dtype, device)
    if device.type == "cuda":
        _print("GPUs to take", gpus_to_take(config, dtype))
    _print("model", model(config, device, dtype))
    _print("text", text(folder, config.model))


def gpus_to_take(config: Config, dtype: torch.dtype) -> Facts:
    """Returns the recommended number of ranks and replicas for this model on the visible GPUs."""
    import torch

    from penstock.engine.build_engine import model_folder
    from penstock.jobs.recommend import bytes_a_rank, recommend
    from penstock.models.read_config import read_model_config

    share = config.memory.gpu_memory_utilization
    rooms = [
        int(share * torch.cuda.get_device_properties(index).total_memory)
        for index in range(torch.cuda.device_count())
    ]
    model_config = read_model_config(model_folder(config))
    length = config.memory.max_model_len or model_config.context
    return [("best", recommend(bytes_a_rank(config, model_config, dtype, rooms), rooms, length))]


def versions() -> Facts:
    """Returns name and version of each library the engine uses; "not installed" if missing."""
    found = [("penstock", __version__), ("python", platform.python_version())]
    return found + [(name, installed(name) or "not installed") for name in PACKAGES]


def installed(name: str) -> str | None:
    """Returns a library's version; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> Facts:
    import torch

    from penstock.execute.limits import free_memory

    facts = [
        ("system", f"{platform.system()} {platform.release()} ({platform.machine()})"),
        (
            "processor",
            f"{processor()}, {count_here()} to use, {torch.get_num_threads()} threads of torch",
        ),
        ("memory", f"{size_of(free_memory(torch.device('cpu')))} free"),
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = free_memory(torch.device("cuda", index))
        major, minor = properties.major, properties.minor
        size = f"{size_of(free)} of {size_of(properties.total_memory)} free"
        tried = (
            ""
            if (major, minor) == TRIED
            else "; untested: our kernels were tried on 9.0 (H100, H200)"
        )
        facts.append(
            (
                f"GPU {index}",
                f"{properties.name}, compute capability {major}.{minor}, {size}{tried}",
            )
        )
    if not torch.cuda.device_count():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        facts.append(("GPU", f"none ({why})"))
    return facts


def kernels(config: Config, device: torch.device, dtype: torch.dtype) -> Facts:
    """Returns pairs: a kind of kernels (such as triton), and the operations that use it with the
    reason of the choice."""

    from penstock.kernels.choose import choose

    served: dict[tuple[str, str], list[str]] = defaultdict(list)
    for operation, (column, reason) in choose(device, dtype, config.schedule.kernels).why.items():
        served[column, reason].append(operation)
    return [
        (column, f"{', '.join(names)} ({reason})") for (column, reason), names in served.items()
    ]


def artifact(fitted: Fitted) -> Facts:
    """Returns a built engine's option values that apply on this machine, and the differences from
    the machine it was built on."""
    knobs = {
        name: getattr(place, name)
        for name, place in fitted.config.places().items()
        if name in fitted.taken
    }
    none = (
        "none: all are named, or don't hold here"
        if fitted.manifest.engine
        else "none: defaults hold"
    )
    chosen = ", ".join(f"{name} {value}" for name, value in knobs.items()) or none
    return [("its choices", chosen), *(("differs", note) for note in fitted.notes)]


def model(config: Config, device: torch.device, dtype: torch.dtype) -> Facts:
    """Returns the model's memory use here, and how many tokens of KV fit beside its weights. The
    model is built on torch's meta device, which has shapes alone."""
    import torch

    from penstock.engine.build_engine import model_folder
    from penstock.execute.kv_cache import TOKEN_BYTES, kv_words, token_bytes
    from penstock.execute.kv_dtype import fit_states, narrowest
    from penstock.execute.layer_pages import open_token_bytes, pages_of
    from penstock.execute.limits import batch_limits, free_memory, with_kv
    from penstock.execute.open_runner import find_kv_dtype
    from penstock.execute.table_place import table_in_host, told_place
    from penstock.kernels.choose import choose
    from penstock.models.build_model import build_model
    from penstock.models.read_config import read_model_config
    from penstock.models.speculators_format import SpeculatorConfig
    from penstock.parallel.layout import Layout
    from penstock.quant.choose import choose_schemes
    from penstock.weights.drafter import drafter_of, find_drafter
    from penstock.weights.load import check_room, left_out, wide_rows
    from penstock.weights.place import find_weights

    folder = model_folder(config)
    model_config = read_model_config(folder)
    limits = batch_limits(config, model_config.context, device)
    stored = model_config.quantization
    schemes = choose_schemes(config.model.quantization, stored)
    ranks, drafter = config.parallel.tensor_parallel_size, drafter_of(config, model_config)
    length = limits.max_model_len

    def shape(size: int, **how: bool) -> Decoder:
        layout, meta = Layout(0, size), torch.device("meta")
        return build_model(
            model_config, dtype, meta, length, layout, schemes, drafter=drafter, **how
        )

    whole, decoder, table = shape(1), shape(ranks), ""
    if config.model.load_format == "auto":
        # raises for weights that are missing, cut short or of another model
        find_weights(decoder, folder)
        if isinstance(drafter, SpeculatorConfig):
            find_drafter(decoder, drafter)
    if table_in_host(decoder, config, device):
        table, decoder = (
            told_place(decoder, config.memory.per_layer_embeddings),
            shape(ranks, table_in_host=True),
        )
    ops = choose(device, dtype, config.schedule.kernels)
    fit_states(decoder, config.model.mamba_ssm_cache_dtype, limits.state_drafts)
    kv_dtype = find_kv_dtype(config.model.kv_cache_dtype, stored, device, ops)
    forms = narrowest(decoder, kv_dtype)
    token, wider = (
        token_bytes(forms),
        "; more where the start finds that keys must stay wide" * (kv_dtype == "fp8"),
    )
    sharers = ranks if device.type == "cpu" else 1
    check_room(decoder, folder, device, free_memory(device) // sharers)
    weights = decoder.weights_bytes + decoder.copied_bytes(ops)
    to_come = (weights + decoder.rope_bytes) * sharers
    pages = pages_of(decoder, limits.max_model_len, forms)
    slot = decoder.slot_bytes
    sized = with_kv(limits, config, open_token_bytes(forms, pages), device, to_come, sharers, slot)
    far = ""
    if pages is not None:
        far = (
            f"; at most {sized.kv_tokens * (1 + pages.tables):,} where windows of {pages.window:,}"
            " tokens have passed"
        )
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return [
        ("folder", str(folder)),
        ("architecture", f"{decoder.config.architecture}, {_parameters(whole):,} parameters"),
        (
            "weights",
            f"{size_of(decoder.weights_bytes)} in {_numbers(config, model_config, dtype)}{each}",
        ),
        *([("per-layer embeddings", table)] if table else []),
        ("context", f"{sized.max_model_len:,} tokens of the model's {decoder.config.context:,}"),
        (
            "rows",
            f"{sized.max_rows:,} sequences at once, {sized.max_batched_tokens:,} tokens a step",
        ),
        *(
            [("drafts", f"{asked.num_speculative_tokens} a row, by {asked.method}")]
            if (asked := sized.speculative) is not None
            else []
        ),
        ("a token of KV", f"{token - TOKEN_BYTES:,} bytes in {kv_words(forms)}{wider}"),
        *(
            [("recurrent state", f"{size_of(slot)} a sequence, {sized.state_slots:,} of them")]
            if slot
            else []
        ),
        (
            "KV tokens that fit",
            _fit(sized.kv_tokens, token - TOKEN_BYTES, sized.max_model_len) + far,
        ),
        *(
            [("a full step", _full_step(whole, sized.max_batched_tokens, dtype))]
            if device.type == "cpu"
            else []
        ),
        *([("left out", left_out(part))] if (part := model_config.text_part) is not None else []),
        *([("activations", wide_rows(dtype))] if stored is not None and stored.narrow_rows else []),
    ]


def text(folder: Path, options: ModelOptions) -> Facts:
    """Returns facts about the tokenizer and the end-of-text ids. Raises CheckpointError for end ids
    outside the vocabulary."""
    from penstock.models.generation_config import end_ids, read_generation_defaults
    from penstock.models.read_config import read_model_config
    from penstock.text.tokenizer_files import read_end_of_text

    model_config, generation = read_model_config(folder), read_generation_defaults(folder)
    try:
        of_tokenizer = read_end_of_text(options.tokenizer_folder(folder))
    except TokenizerError:  # the error is reported below
        of_tokenizer = None
    ends, unserved = end_ids(model_config, generation, of_tokenizer), generation.unserved
    return [
        (
            "end ids",
            ", ".join(map(str, ends)) or "none: answers end at max_tokens or a stop string",
        ),
        ("tokenizer", _tokenizer(folder, options, model_config.vocab_size, model_config.context)),
        *(
            [("not served", f"{', '.join(unserved)} of its generation_config.json")]
            if unserved
            else []
        ),
    ]


def _tokenizer(folder: Path, options: ModelOptions, vocab_size: int, context: int) -> str:
    """Returns whether the tokenizer and its chat template can be read, or why not."""
    from penstock.sandbox.sandbox import Sandbox
    from penstock.text.tokenizer import Tokenizer

    try:
        folder, template = options.tokenizer_folder(folder), options.chat_template
        tokenizer = Tokenizer.load(folder, vocab_size=vocab_size, chat_template=template)
    except TokenizerError as error:
        return f"none: {error}"
    if not tokenizer.chat_templates:
        return "tokenizer.json, without a chat template"
    sandbox = Sandbox.open(tokenizer, context)
    sandbox.close()
    return (
        "tokenizer.json, with a chat"
        f" template{f': {fault}' if (fault := sandbox.chat_fault) else ''}"
    )


def _parameters(decoder: Decoder) -> int:
    return sum(weight.numbers for weight in decoder.weights())


def _full_step(decoder: Decoder, tokens: int, dtype: torch.dtype) -> str:
    """Returns an estimate of the time of a full step's matrix products, from one product timed
    here, and a warning if one layer of them comes near the step timeout."""
    import torch

    from penstock.engine.watchdog import STEP_TIMEOUT

    rows, size = 256, 1024
    x, weight = torch.zeros(rows, size, dtype=dtype), torch.zeros(size, size, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    begun = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    # measured seconds of one multiplication and addition
    each = (time.perf_counter() - begun) / (rows * size * size)
    seconds = (
        each
        * tokens
        * sum(weight.numbers for block in decoder.blocks for weight in block.weights())
    )
    layer = seconds / len(decoder.blocks)
    said = f"{tokens:,} tokens, about {seconds:,.1f} s of products, {layer:,.2f} s a layer"
    if layer < STEP_TIMEOUT / 4:
        return said
    return (
        f"{said}: near the step timeout of {STEP_TIMEOUT:g} s for a layer: lower"
        " --max-num-batched-tokens"
    )


def _numbers(config: Config, model_config: ModelConfig, dtype: torch.dtype) -> str:
    """Returns the dtype, and the number format that the matrices are stored in or quantized to."""
    stored = model_config.quantization
    if stored is not None:
        kinds = (
            f"{', '.join(sorted(stored.kinds))} ({stored.method})"
            if stored.kinds
            else stored.method
        )
        return f"{kinds} and {_name(dtype)}"
    asked = config.model.quantization
    return _name(dtype) if asked == "auto" else f"{asked} and {_name(dtype)}"


def _fit(tokens: int, token_bytes: int, longest: int) -> str:
    return (
        f"{tokens:,} ({size_of(tokens * token_bytes)}, {tokens // longest:,} sequences of full"
        " length)"
    )


def _device(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else f"GPU {device.index}"


def _dtype(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    from penstock.execute.open_runner import cpu_multiplies_bfloat16

    if config.model.dtype != "auto":
        return f"{_name(dtype)} (as --dtype says)"
    if device.type == "cpu":
        has = "has" if cpu_multiplies_bfloat16() else "lacks"
        return f"{_name(dtype)} (the processor {has} bf16 dot products)"
    return f"{_name(dtype)} (by the GPU's compute capability)"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print(title: str, facts: Facts) -> None:
    print(title)
    for name, value in facts:
        print(f"  {name:<20}{value}")
    sys.stdout.flush()
