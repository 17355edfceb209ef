"""Checks vLLM's arguments against the tables. They are the arguments of LLM(...) and every command,
of serve, of SamplingParams and of calls.

An argument is accepted if Penstock does anyway what it asks for, or if it can change no answer. All
others are refused with a sentence that says what to do instead. None means not given.
docs/coming_from_vllm.md is generated from the tables. Knows names and values, no engine. Source:
vLLM's EngineArgs, cli_args.py, LLM and SamplingParams, with older names that scripts still pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from penstock.errors import UsageError
from penstock.vllm_arguments.argument import KINDS, LONGEST, Argument, As
from penstock.vllm_arguments.engine_table import ENGINE, SPELLINGS, STRUCTURED
from penstock.vllm_arguments.request_table import CALL, SAMPLING

ModelT = TypeVar("ModelT")


def spelt(argument: Argument) -> str:
    """Returns the values that are accepted for an argument, in words."""
    if isinstance(argument.taken, type):
        return KINDS[argument.taken]
    return " or ".join(
        f"the same as {v.name}" if isinstance(v, As) else repr(v) for v in argument.taken
    )


def sift(
    given: Mapping[str, Any],
    table: Mapping[str, Argument],
    usual: Mapping[str, Any] | None = None,
    shown: Callable[[str, Any], str] = "{}={!r}".format,
) -> tuple[dict[str, Any], list[str]]:
    """Checks arguments against a table of vLLM's arguments. Returns the arguments that the table
    does not have, which are Penstock's too, and messages for the user. Raises UsageError for a
    value that is not accepted.

    usual: default values, for arguments that were not given. shown: formats an argument and its
    value as the user would type them.
    """
    others, told = {**(usual or {}), **given}, []
    for name, value in given.items():
        argument = table.get(name)
        if argument is None or value is None or argument.takes(value, others):
            continue
        said, flag = shown(name, value), isinstance(value, bool)
        if len(said) > LONGEST:
            said = said[: LONGEST - 3] + "..."
        if not (argument.told and flag):
            which = (
                ""
                if not argument.taken or (argument.is_flag and flag)
                else f" (only {spelt(argument)})"
            )
            raise UsageError(f"{said} is not served{which}: {argument.note}", param=name)
        told.append(f"{said} changes nothing: {argument.note}")
    return {name: value for name, value in given.items() if name not in table}, told


def engine_knobs(model: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns Penstock's options for the arguments of LLM(...), in Penstock's spelling, and
    messages for the user. Arguments that are None are left out."""
    left, told = sift({**given, "model": model}, ENGINE)
    return {
        name: ours(name, value)
        for name, value in {**left, **meant(given)}.items()
        if value is not None
    }, told


def meant(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Penstock's options that vLLM's arguments set under other names. Raises UsageError for
    a key of structured_outputs_config that is not supported."""
    config = given.get("structured_outputs_config") or {}
    sift(
        config, STRUCTURED, shown=lambda name, value: f"structured_outputs_config.{name} {value!r}"
    )
    unknown = sorted(config.keys() - STRUCTURED.keys())
    if unknown:
        rule = f"structured_outputs_config has no {unknown[0]!r}: leave it out"
        raise UsageError(rule, param="structured_outputs_config")
    says = given.get("guided_decoding_disable_any_whitespace") or config.get(
        "disable_any_whitespace"
    )
    return {"disable_any_whitespace": True} if says else {}


def ours(name: str, value: Any) -> Any:
    """Returns an option's value in Penstock's spelling: `half` becomes `float16`, a torch dtype its
    name."""
    plain = str(value).removeprefix("torch.") if name == "dtype" else value
    return SPELLINGS.get(name, {}).get(plain, plain) if isinstance(plain, str) else value


def takes_vllms(params: type[ModelT]) -> type[ModelT]:
    """Decorates SamplingParams: arguments that only vLLM's class has are checked and then
    dropped."""
    plain, usual = params.__init__, {field.name: field.default for field in fields(params)}  # type: ignore[arg-type]

    @wraps(plain)
    def init(self: ModelT, **given: Any) -> None:
        if not given.keys() <= usual.keys():
            given, _ = sift(given, SAMPLING, usual)
        plain(self, **given)

    params.__init__ = init  # type: ignore[method-assign, assignment]
    return params


def check_call(method: str, given: Mapping[str, Any]) -> None:
    """Raises UsageError for an argument that generate or chat does not accept."""
    left, _ = sift(given, CALL)
    if left:
        raise UsageError(
            f"{method} takes no argument {next(iter(left))!r}: docs/llm.md has those that it takes"
        )
