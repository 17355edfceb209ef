"""Answer formats: structured_outputs, response_format and tools. Reads them from a body's fields,
and has the sandbox check them. Errors name the field that a format came from. Knows fields;
answer_reading.py defines how tools are called."""

from __future__ import annotations

import re

from penstock.errors import UsageError
from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.sandbox.sandbox_process import GrammarJob
from penstock.server.openai.forms import BaseForm
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.prompt_ids import PromptTools

# parameter name that the grammar compiler's errors have for any answer format
STRUCTURED = "structured_outputs"
# fields of a response_format of type structural_tag
TAG_FIELDS = ("structures", "triggers", "format")
_OUR_LARK = re.compile(
    r"at \d+\(\d+\): (?=failed to compile JSON)| \d+ \| .*%json .*| \d+ \| \.\.\..*", re.DOTALL
)
# fields of structured_outputs that are also allowed together with another answer format
_WHITE = (
    "disable_any_whitespace",
    "whitespace_pattern",
)


def field_of(form: BaseForm, *, of_tools: bool = False) -> str:
    """Returns the name of the body's field that the answer format came from. of_tools: True if only
    tools constrain the answers."""
    if of_tools:
        return "tools"
    free = form.response_format is None or form.response_format.type == "text"
    return STRUCTURED if free else form.format_field


def renamed(error: UsageError, field: str) -> UsageError:
    """Returns an error about the answer format with `field` as its param; any other error
    unchanged."""
    if error.param != STRUCTURED:
        return error
    return HttpError(error.rule.replace(STRUCTURED, field, 1), param=field)


def structured(form: BaseForm) -> StructuredOutputsParams | None:
    """Returns the answer format of a body, or None. Raises HttpError for an invalid one."""
    asked, given = (
        form.response_format,
        None if form.structured_outputs is None else form.structured_outputs.given,
    )
    tag = (
        {}
        if asked is None
        else {name: value for name in TAG_FIELDS if (value := getattr(asked, name)) is not None}
    )
    if asked is not None and tag and asked.type != "structural_tag":
        raise HttpError(
            f"{next(iter(tag))} is of response_format structural_tag", param="response_format"
        )
    given = given or {}
    white = {name: given[name] for name in _WHITE if name in given}
    if asked is None or asked.type == "text":
        # The setting has no effect if only tools constrain the answer, since their arguments have
        # no white space anyway.
        idle = white.keys() == given.keys() == {"disable_any_whitespace"} and getattr(
            form, "tools", None
        )
        return StructuredOutputsParams(**given) if given and not idle else None
    if given.keys() != white.keys():
        raise HttpError(
            "response_format and structured_outputs are two forms: give one",
            param="structured_outputs",
        )
    if asked.type == "structural_tag":
        return StructuredOutputsParams(structural_tag={"type": asked.type, **tag}, **white)
    if asked.type == "json_object":
        return StructuredOutputsParams(json_object=True, **white)
    if asked.json_schema is None:
        raise HttpError(
            "response_format.json_schema is missing: {name, schema}",
            param="response_format.json_schema",
        )
    schema = asked.json_schema.schema
    return StructuredOutputsParams(
        json={"type": "object"} if schema is None else schema,
        lenient=asked.json_schema.strict is not True,
        **white,
    )


async def check_form(sampling: SamplingParams, tools: PromptTools, field: str) -> None:
    """Checks the answer format by compiling it in the sandbox. field: its name in the body. Raises
    HttpError for a format that cannot be served, or that exceeds the sandbox's limits."""
    if sampling.structured_outputs is None:
        return
    if tools.tokenizer is None:
        raise HttpError(
            f"{field} need text, and this server has no tokenizer: leave them out", param=field
        )
    if tools.forms.has(sampling.structured_outputs):
        return
    try:
        await tools.sandboxed([GrammarJob(sampling.structured_outputs)])
        tools.forms.add(sampling.structured_outputs)
    except HttpError:
        raise
    except UsageError as error:
        if error.param == "prompt":  # compiling the format exceeded the sandbox's limits
            message = (
                f"{field} cannot be served: to compile this takes too much time or memory: make it"
                " simpler"
            )
            raise HttpError(message, param=field) from error
        named = renamed(error, field)
        raise HttpError(_OUR_LARK.sub("", named.rule), param=field) from error
