"""EngineArgs and AsyncEngineArgs, as in vLLM. They hold a model and its engine options before an
engine is made."""

from __future__ import annotations

from typing import Any

from penstock.config import Config
from penstock.errors import UsageError
from penstock.vllm_arguments.sift import engine_knobs


class EngineArgs:
    """The arguments of `LLM`; `vars()` returns them. Raises UsageError for the same arguments as
    `LLM`."""

    def __init__(self, model: str = "demo", **knobs: Any) -> None:
        own, _ = engine_knobs(str(model), knobs)
        Config.of(**own)
        vars(self).update(model=model, **knobs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def arguments_of(engine_args: object) -> dict[str, Any]:
    """Returns the keyword arguments in an EngineArgs, for LLM or AsyncLLM. Raises UsageError for
    any other object."""
    if not isinstance(engine_args, EngineArgs):
        kind = type(engine_args).__name__
        message = (
            f"from_engine_args takes penstock's EngineArgs or AsyncEngineArgs, and this is {kind}"
        )
        raise UsageError(message, param="engine_args")
    return dict(vars(engine_args))


class AsyncEngineArgs(EngineArgs):
    """EngineArgs under the name that vLLM uses for `AsyncLLM.from_engine_args`."""
