"""Penstock: an inference engine for open-weight language models. The public names are imported when
they are first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.errors import PenstockError
    from penstock.llm import LLM
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.engine_args import AsyncEngineArgs, EngineArgs
    from penstock.llm.inputs import Prompt
    from penstock.request import (
        CompletionOutput,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StopWhen,
        StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "Config",
    "EngineArgs",
    "PenstockError",
    "Prompt",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StopWhen",
    "StructuredOutputsParams",
    "__version__",
]

# Large tensors on a CPU get pages of 2 MiB, where Linux has them for memory that asks. A step's
# buffers are new memory; with AMX the demo makes 8 to 14 % more tokens. torch reads the variable
# when it makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOMES = {
    "LLM": "penstock.llm",
    "AsyncEngineArgs": "penstock.llm.engine_args",
    "AsyncLLM": "penstock.llm.async_llm",
    "CompletionOutput": "penstock.request",
    "Config": "penstock.config",
    "EngineArgs": "penstock.llm.engine_args",
    "PenstockError": "penstock.errors",
    "Prompt": "penstock.llm.inputs",
    "RequestOutput": "penstock.request",
    "RequestOutputKind": "penstock.request",
    "SamplingParams": "penstock.request",
    "StopWhen": "penstock.request",
    "StructuredOutputsParams": "penstock.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in (_HOMES[name], _HOMES[name].rpartition(".")[0]):
            raise
        message = (
            f"penstock.{name} needs the engine, and this is penstock-client: pip install penstock"
        )
        raise ImportError(message) from error


def __dir__() -> list[str]:
    return sorted(__all__)
