"""Forms that answers are to have (structured_outputs, response_format, tools): read from a body's
fields, looked at in the sandbox, and called by the field that they came from where they cannot be
served. It knows fields; how a tool is called is answer_reading's.
"""

from __future__ import annotations

import re

from penstock.errors import UsageError
from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.sandbox.sandbox_process import GrammarJob
from penstock.server.openai.forms import BaseForm
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.prompt_ids import PromptTools

STRUCTURED = "structured_outputs"  # what all forms are to whoever compiles them
TAG_FIELDS = ("structures", "triggers", "format")  # of a response_format
_OUR_LARK = re.compile(
    r"at \d+\(\d+\): (?=failed to compile JSON)| \d+ \| .*%json .*| \d+ \| \.\.\..*", re.DOTALL
)
# of structured_outputs, also beside another form
_WHITE = (
    "disable_any_whitespace",
    "whitespace_pattern",
)


def field_of(form: BaseForm, *, of_tools: bool = False) -> str:
    """Returns which field of a body the form of its answers came from. of_tools: tools are all that
    holds them."""
    if of_tools:
        return "tools"
    free = form.response_format is None or form.response_format.type == "text"
    return STRUCTURED if free else form.format_field


def renamed(error: UsageError, field: str) -> UsageError:
    """Returns a fault of a form as one of this field; any other as it is."""
    if error.param != STRUCTURED:
        return error
    return HttpError(error.rule.replace(STRUCTURED, field, 1), param=field)


def structured(form: BaseForm) -> StructuredOutputsParams | None:
    """The form that answers are to have. Raises HttpError."""
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
        # Beside tools alone: their arguments have no white space as it is.
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
    """Raises HttpError for a form that cannot be served, in the words of who compiles it; in the
    sandbox, whose limits it may pass. field: where it came from."""
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
        if error.param == "prompt":  # it passed the sandbox's limits
            message = (
                f"{field} cannot be served: to compile this takes too much time or memory: make it"
                " simpler"
            )
            raise HttpError(message, param=field) from error
        named = renamed(error, field)
        raise HttpError(_OUR_LARK.sub("", named.rule), param=field) from error
