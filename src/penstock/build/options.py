"""BuildOptions: the options of a build. They are sent to the processes that run its stages. Knows
words and ranges."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from penstock.artifact.manifest import Value
from penstock.config import Config
from penstock.errors import UsageError

Quantize = Literal["auto", "none", "fp8", "int8", "int4", "nvfp4"]
KvKind = Literal["auto", "bfloat16", "fp8"]
Objective = Literal["throughput", "latency"]

USUAL_SHAPE = "256x256:128"
# options that determine the weights' numbers, which --retune keeps
OF_NUMBERS = (
    "quantization",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "quantize_lm_head",
    "keep_wide",
    "max_kl",
    "revision",
    "lora",
)


class WorkShape(msgspec.Struct, frozen=True):
    """A number of concurrent requests with this many tokens in and out."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> WorkShape:
        """Parses a workload shape INxOUT:CONCURRENCY. Raises UsageError."""
        found = re.fullmatch(r"(\d{1,7})x(\d{1,7}):(\d{1,6})", text.strip())
        numbers = [int(each) for each in found.groups()] if found else [0]
        if not all(numbers):
            raise UsageError(
                f"shape {text!r} is not INxOUT:CONCURRENCY: give tokens of a prompt and of an"
                " answer, from 1 to 9,999,999, and how many run at once, from 1 to 999,999, as"
                f" {USUAL_SHAPE}",
                param="shape",
            )
        return cls(*numbers)

    @property
    def told(self) -> str:
        return f"{self.prompt_tokens}x{self.output_tokens}:{self.concurrency}"


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All options that determine a build's result. knobs: options of Config that the user set,
    which the build keeps. objective: the figure to optimise; None: throughput, or for a retune the
    built engine's objective. price: dollars an hour of this machine.

    max_kl: the largest mean KL that the quality check accepts, nats per token; None: the number
    format's default. keep_wide: name patterns of matrices that stay unquantized. quantize_lm_head:
    fp8 weights get an fp8 head too. lora: an adapter to merge. retune: `model` is a built engine,
    whose option values are tuned again.
    """

    model: str
    out: str
    shapes: list[str] = []
    workload: str | None = None
    quantization: Quantize = "auto"
    kv_cache_dtype: KvKind = "auto"
    objective: Objective | None = None
    tune_minutes: float = 5.0
    price: float | None = None
    revision: str | None = None
    lora: str | None = None
    max_kl: float | None = None
    keep_wide: list[str] = []
    quantize_lm_head: bool = False
    knobs: dict[str, Any] = {}
    retune: bool = False

    def __post_init__(self) -> None:
        """Checks the values of the build's options. Raises UsageError."""
        for name, kind in (
            ("quantization", Quantize),
            ("kv_cache_dtype", KvKind),
            ("objective", Objective),
        ):
            given = getattr(self, name)
            if given is not None and given not in get_args(kind):
                raise UsageError(
                    f"{name} must be one of {', '.join(get_args(kind))}, not {given!r}", param=name
                )
        for name in OF_NUMBERS if self.retune else ():
            if getattr(self, name, self.knobs.get(name)) not in ("auto", None, [], False):
                raise UsageError(
                    f"{name} is settled in an artifact: leave it out beside --retune, or build"
                    " anew",
                    param=name,
                )
        if self.quantization != "auto":
            self.check_made(self.quantization)
        if self.workload is not None and self.shapes:
            raise UsageError(
                "a build is for --workload or for --shape: leave one out", param="shape"
            )
        if not 0 <= self.tune_minutes <= 24 * 60:
            raise UsageError(
                f"tune_minutes must be between 0 and 1440, not {self.tune_minutes}",
                param="tune_minutes",
            )
        if self.retune and not self.tune_minutes:
            raise UsageError(
                "a retune times choices, and tune_minutes 0 times none: raise it",
                param="tune_minutes",
            )
        if self.max_kl is not None and not self.max_kl >= 0:
            raise UsageError(f"max_kl must be at least 0, not {self.max_kl}", param="max_kl")
        for shape in self.shapes:
            WorkShape.parse(shape)
        self.config()

    def check_made(self, kind: str) -> None:
        """Raises UsageError for options that do not fit the chosen number format. kind: the chosen
        value of `quantization`."""
        if self.quantize_lm_head and kind != "fp8":
            raise UsageError(
                f"quantize_lm_head is for fp8 weights, and these are {kind}: leave it out (int8 and"
                " int4 have an int8 head)",
                param="quantize_lm_head",
            )
        if self.keep_wide and kind == "none":
            raise UsageError(
                "keep_wide is of weights that are quantized, and these stay as they are: leave it"
                " out, or take fp8, int8, int4 or nvfp4",
                param="keep_wide",
            )

    @property
    def told_work(self) -> list[str]:
        """Returns the workload as the user wrote it."""
        return [self.workload] if self.workload is not None else self.shapes or [USUAL_SHAPE]

    @property
    def named(self) -> dict[str, Any]:
        """Returns the knobs of Config that the user set."""
        kv = self.kv_cache_dtype
        return {**({} if kv == "auto" else {"kv_cache_dtype": kv}), **self.knobs}

    def config(self, model: str | None = None, **more: Value) -> Config:
        """Returns a Config of the user's options, overridden by `more`. model: folder of the model;
        None: the user's model. Raises UsageError for a bad value."""
        return Config.of(**{"model": model or self.model, **self.named, **more})

    def source_config(self, folder: str, **more: Value) -> Config:
        """Returns a Config that opens the unbuilt model, with its adapter."""
        return self.config(folder, **({} if self.lora is None else {"lora": self.lora}), **more)

    def asked(self) -> dict[str, Any]:
        """Returns the options that must be equal for a build to continue. max_kl and price may
        differ: they matter only at the end."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        free = ("out", "max_kl", "price")
        return {
            name: value for name, value in {**told, **told.pop("knobs")}.items() if name not in free
        }
