"""Config: all options of an engine. Each option (knob) is grouped, typed, checked and documented
here once; docs/config.md is generated from it.

Imports no room; each room is given its options. A knob's help text is in its field's metadata. None
means that the engine chooses a value, and reports it in its stats.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from penstock.errors import UsageError
from penstock.speculative import SpeculativeConfig, as_text

# limits max_num_seqs: a row takes memory before it runs, an entry in every batch array and a
# line of the block table
MAX_ROWS = 262_144
# limits max_num_batched_tokens: a token of a step takes memory before the first step, in arrays and
# activations
MAX_BATCHED_TOKENS = 1 << 20
MAX_REPLICAS = 64
BLOCK_SIZE = 16  # tokens a block; the kernels and the prefix tree are made for this size

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Kernels = Literal["auto", "reference"]
Quantization = Literal[
    "auto",
    "fp8",
    "int8",
    "int4",
    "nvfp4",
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "awq",
    "gptq",
    "mxfp4",
]
KvCacheDtype = Literal["auto", "bfloat16", "fp8"]
StateDtype = Literal["auto", "float32", "bfloat16", "float16"]
PrefixGroups = Literal["auto", "always", "off"]
DraftFrom = Literal["row", "group"]
TablePlace = Literal["auto", "gpu", "host"]


def _knob(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(slots=True, kw_only=True)
class ModelOptions:
    """The model, and the numbers it is computed with."""

    model: str = _knob("demo", "A model folder, a hub id, or `demo` for the model in the package.")
    revision: str | None = _knob(
        None, "The hub's branch, tag or commit to take; refused for a folder."
    )
    dtype: Dtype = _knob(
        "auto",
        "Numbers of weights and KV. `auto`: bfloat16 where the processor has it, else float32.",
    )
    quantization: Quantization = _knob(
        "auto",
        "Numbers of the layers' products. `auto`: the checkpoint's; `fp8`, `int8`, `int4`, `nvfp4`:"
        " made of wider ones. The others name what a quantized checkpoint has.",
    )
    kv_cache_dtype: KvCacheDtype = _knob(
        "auto",
        "Numbers of keys and values. `auto`: the model's; `fp8`: eight bits, keys wide where that"
        " would move answers.",
    )
    mamba_ssm_cache_dtype: StateDtype = _knob(
        "auto",
        "Numbers of recurrent states that add up over a sequence. `auto`: as the model's config"
        " says, else float32.",
    )
    lora: str | None = _knob(
        None,
        "A LoRA adapter (a folder or hub id, as peft saves it) that is merged into the weights as"
        " they load.",
    )
    device: Device = _knob(
        "auto", "Where it runs. `auto`: a CUDA GPU if there is one, else the CPU."
    )
    sealed: bool = _knob(
        False,
        "With an artifact: refuse what would have to compile a kernel, at the start and at work.",
    )
    load_format: LoadFormat = _knob(
        "auto", "`dummy` draws weights from U(-1e-3, 1e-3) and needs a config alone."
    )
    tokenizer: str | None = _knob(
        None, "A folder whose tokenizer.json and chat template are taken in place of the model's."
    )
    chat_template: str | None = _knob(
        None, "A file: the Jinja template of chats, in place of the tokenizer's."
    )
    skip_tokenizer_init: bool = _knob(False, "Load no tokenizer: ids in, ids out.")
    disable_any_whitespace: bool = _knob(
        False,
        "JSON of structured outputs has no white space between its parts, where a request doesn't"
        " say what may be.",
    )
    seed: int = _knob(
        0,
        "Where seeds of requests that bring none, and dummy weights, come from.",
        low=0,
        high=2**63 - 1,
    )

    def tokenizer_folder(self, folder: Path) -> Path:
        """Returns the folder of the tokenizer's files, for a model in `folder`."""
        return folder if self.tokenizer is None else Path(self.tokenizer).expanduser()

    def check_files(self) -> None:
        """Raises UsageError when the given tokenizer or chat template cannot be read."""
        if self.skip_tokenizer_init and (self.tokenizer or self.chat_template):
            name = "tokenizer" if self.tokenizer else "chat_template"
            raise UsageError(
                f"{name} is read by nobody with skip_tokenizer_init: leave one of them out",
                param=name,
            )
        if self.tokenizer is not None and not self.tokenizer_folder(Path()).is_dir():
            rule = "give a folder with a tokenizer.json"
            raise UsageError(
                f"tokenizer {self.tokenizer!r} is no folder here: {rule}", param="tokenizer"
            )
        if self.chat_template is not None:
            why = "is not UTF-8 text"
            try:
                Path(self.chat_template).expanduser().read_text("utf-8")
            except (OSError, ValueError) as error:
                why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else why
                rule = "give a file with a Jinja template"
                message = f"chat_template {self.chat_template[:200]!r} {why}: {rule}"
                raise UsageError(message, param="chat_template") from error


@dataclass(slots=True, kw_only=True)
class MemoryOptions:
    """Memory that the engine takes."""

    max_model_len: int | None = _knob(
        None, "Longest prompt plus output, in tokens. None: the model's context.", low=2
    )
    kv_cache_tokens: int | None = _knob(
        None, "Tokens that the KV cache holds. None: measured from what is free.", low=32
    )
    gpu_memory_utilization: float = _knob(
        0.92,
        "Share of a GPU's memory to take: weights, a step's own tensors, then KV with what is"
        " left.",
        low=0.05,
        high=0.99,
    )
    enable_prefix_caching: bool = _knob(
        True, "Keep blocks of finished prompts, and use them again for equal beginnings."
    )
    per_layer_embeddings: TablePlace = _knob(
        "auto",
        "Where a table of per-layer embeddings lies (Gemma 4 E2B, E4B). `host`: in pinned host"
        " memory, of which steps read rows over the bus; `auto`: on the GPU where it fits beside"
        " weights and a sequence of full length.",
    )


@dataclass(slots=True, kw_only=True)
class BatchingOptions:
    """Sizes of a batch."""

    max_num_seqs: int | None = _knob(
        None,
        "Rows: sequences that run at once. None: 1,024 on a CPU, 8,192 on a GPU; of recurrent"
        " states as many as fit.",
        low=1,
        high=MAX_ROWS,
    )
    max_num_batched_tokens: int | None = _knob(
        None,
        "Tokens of a step, prompts and rows together. None: 2,048 on a CPU, 16,384 on a GPU.",
        low=16,
        high=MAX_BATCHED_TOKENS,
    )
    max_cudagraph_capture_size: int | None = _knob(
        None,
        "Rows up to which a GPU has a graph for every size of a step; above them, up to 2,048, for"
        " sizes a factor of two apart. Fewer make a shorter start. None: 2,048.",
        low=1,
    )


@dataclass(slots=True, kw_only=True)
class ScheduleOptions:
    """Order and kind of work in a step."""

    prefix_groups: PrefixGroups = _knob(
        "auto",
        "Attend a shared prefix once for its group: `auto` where that saves time as measured,"
        " `always`, `off`.",
    )
    steps_ahead: int = _knob(
        1, "Steps launched before an earlier one is read. 0 reads each at once.", low=0, high=3
    )
    speculative_config: str | None = _knob(
        None,
        'Drafts tokens ahead of the model, in JSON: `{"method": "ngram", "num_speculative_tokens":'
        " 4}` looks for a row's last tokens earlier in its own text, `mtp` runs the layer that a"
        " checkpoint has for it, `eagle3` and `dflash` the drafter in `model`, a folder or hub id"
        " of the form that speculators writes. Answers stay the same. None: no drafts.",
    )
    draft_from: DraftFrom = _knob(
        "row",
        "Text that `ngram` looks through: the row's own, or `group`: also that of its request's"
        " samples that have ended.",
    )
    preempt_every: int = _knob(
        0, "For tests: preempt a row every so many steps. 0: only when blocks run out.", low=0
    )
    kernels: Kernels = _knob(
        "auto", "Which column of kernels. `reference`: plain torch everywhere."
    )


@dataclass(slots=True, kw_only=True)
class ParallelOptions:
    """Number of GPUs, and the work of each."""

    tensor_parallel_size: int = _knob(
        1,
        "Ranks that hold one model together: GPUs, the first so many of those visible, or processes"
        " on the CPU.",
        low=1,
        high=64,
    )
    data_parallel_size: int = _knob(
        1,
        "Replicas: whole engines beside each other, each on GPUs of its own, behind one server or"
        " one `LLM`.",
        low=1,
        high=MAX_REPLICAS,
    )


@dataclass(slots=True, kw_only=True)
class Config:
    """All options of an engine, in groups. `Config.of(max_num_seqs=64)` takes flat names; an
    unknown name raises UsageError."""

    model: ModelOptions = field(default_factory=ModelOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    # kernel tunables of a built engine (kernels/tunables.py): name -> value
    tuned: dict[str, Any] = field(default_factory=dict)
    # attention layer -> scales of its keys and values, from a built engine's manifest
    kv_scales: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    # the id of the tokenizer's eos_token, set by the code that opens the model
    end_of_text: int | None = None
    # True: at startup capture only CUDA graphs without prefix groups, the others on first use.
    # Set by a built engine whose workload has no shared prefixes
    plain_graphs: bool = False
    # names of options that the user set, even to their defaults; a built engine may set the others
    named: frozenset[str] = frozenset()

    @classmethod
    def of(cls, **knobs: Any) -> Config:
        """Builds a Config from flat option names and checks each value by type and range. None
        leaves an option unset."""
        config = cls(named=frozenset(name for name, value in knobs.items() if value is not None))
        places = config.places()
        for name, value in knobs.items():
            if name not in places:
                raise UsageError(
                    f"unknown option {name!r}: known are {', '.join(sorted(places))}", param=name
                )
            if name == "speculative_config":
                value = as_text(value)
            setattr(places[name], name, value)
        # scripts for vLLM often give the same folder for both
        if config.model.tokenizer == config.model.model:
            config.model.tokenizer = None
        config.check()
        return config

    def told(self) -> dict[str, Any]:
        """Returns the options that were set or differ from their defaults. `Config.of` builds the
        same Config from them."""
        places = self.places()
        default = {knob.name: knob.default for group in self.groups() for knob in fields(group)}
        values = {name: getattr(place, name) for name, place in places.items()}
        return {
            name: value
            for name, value in values.items()
            if name in self.named or value != default[name]
        }

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The drafter that is asked for, read from its JSON; None: no drafts."""
        asked = self.schedule.speculative_config
        return None if asked is None else SpeculativeConfig.of(asked)

    def places(self) -> dict[str, Any]:
        """Returns option name -> the group object that holds it."""
        return {knob.name: group for group in self.groups() for knob in fields(group)}

    def groups(
        self,
    ) -> tuple[ModelOptions, MemoryOptions, BatchingOptions, ScheduleOptions, ParallelOptions]:
        return self.model, self.memory, self.batching, self.schedule, self.parallel

    def check(self) -> None:
        for group in self.groups():
            hints = get_type_hints(type(group))
            for knob in fields(group):
                _check_knob(
                    knob.name, getattr(group, knob.name), hints[knob.name], dict(knob.metadata)
                )
        self.model.check_files()
        asked = self.speculative
        if self.schedule.draft_from != "row" and (asked is None or asked.method != "ngram"):
            raise UsageError(
                "draft_from is read only with speculative_config of method ngram: take that, or leave"
                " draft_from out",
                param="draft_from",
            )


def _check_knob(name: str, value: Any, hint: Any, metadata: dict[str, Any]) -> None:
    choices = get_args(hint)
    if choices and all(isinstance(c, str) for c in choices):
        if value not in choices:
            raise UsageError(
                f"{name} must be one of {', '.join(choices)}, not {value!r}", param=name
            )
        return
    allowed = tuple(choices) or (hint,)
    if float in allowed:
        allowed += (int,)
    if value is None and type(None) in allowed:
        return
    if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, allowed):
        wanted = " or ".join(t.__name__ for t in choices or (hint,) if t is not type(None))
        raise UsageError(f"{name} must be {wanted}, not {value!r}", param=name)
    low, high = metadata["low"], metadata["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UsageError(f"{name} must be {bound}, not {value}", param=name)
