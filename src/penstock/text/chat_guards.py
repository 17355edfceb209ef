"""What a filter or a method would make of a text, or how long it would look, is bounded before it does.

Each function names the filter or method by Jinja's or Python's name. It knows no environment and no messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from sys import getsizeof
from typing import Any

from penstock.errors import UsageError
from penstock.text.chat_budget import Budget

_MOST_WRAPPED = 100_000  # characters; one long word takes the square of its length (100,000: 0.4 s)
_MOST_INT = 10_000  # no template pads, indents or repeats by more than that
_MOST_SEARCHED = 1_000_000_000  # length of a text times length of what is sought from its end: 1 s of Python
_MOST_TIME = 1_000  # characters of a date's format; C tries memory up to 256 times that
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")
_ENCODINGS = re.compile(r"(utf|utf[-_]?(8|16|32)([-_]?[bl]e)?|ascii|us-ascii|latin[-_]?1|iso-8859-1)", re.IGNORECASE)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SLOW = frozenset(["wordwrap", "urlize", "pprint", "striptags"])  # the square of a text's length
_FROM_THE_END = frozenset(["strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"])


CHECKED = frozenset(["replace", "trim", "format", "indent", *_SLOW])


def check_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    others = [*args, *kwargs.values()]
    if name == "replace":
        named = {**dict(zip(("old", "new"), args, strict=False)), **kwargs}
        check_replace(budget, value, named.get("old", ""), named.get("new", ""))
    elif name == "trim":
        check_search(budget, value, others)
    elif name == "format":
        check_format(budget, str(value), others)
    elif name in _SLOW:
        length = len(str(value))
        if length > _MOST_WRAPPED:
            raise UsageError(
                f"the chat template's {name} meets a text of more than {_MOST_WRAPPED} characters; send less"
            )
        budget.size(length * (1 + budget.written(others)))
    elif name == "indent":
        widths = [len(by) if isinstance(by, str) else by for by in others if isinstance(by, (int, str))]
        lines = 1 + sum(map(str(value).count, _LINE_ENDS))
        budget.size(len(str(value)) + lines * max(widths, default=4))


def check_method(budget: Budget, owner: str | bytes, name: str, values: Sequence[Any]) -> None:
    """What a method makes of a text is bounded by the text: some encode it to a few times its size."""
    budget.size(len(owner))
    if name == "expandtabs":
        tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
        budget.size(len(owner) + tabs * max([8, *(value for value in values if isinstance(value, int))]))
    elif name == "translate" and values and isinstance(values[0], (dict, list, tuple)):
        table = values[0].values() if isinstance(values[0], dict) else values[0]
        longest = max((len(new) for new in table if isinstance(new, str)), default=1)
        budget.size(len(owner) * max(longest, 1))
    elif name in _FROM_THE_END:
        check_search(budget, owner, values)
    elif name in ("encode", "decode"):
        if values and not _ENCODINGS.fullmatch(str(values[0])):
            raise UsageError("the chat template encodes to other than UTF, ASCII or Latin-1, which is not served")
    elif name == "striptags":
        check_filter(budget, name, owner, (), {})
    if name in ("split", "rsplit", "splitlines", "partition", "rpartition"):
        budget.made(getsizeof(owner))


def check_search(budget: Budget, text: Any, values: Iterable[Any]) -> None:
    longest = max((len(value) for value in values if isinstance(value, (str, bytes))), default=0)
    if len(str(text)) * longest > _MOST_SEARCHED:
        raise UsageError(
            "the chat template looks for a long text in a long one, from its end, which is not served",
            param="messages",
        )


def check_replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    budget.size(len(text) + text.count(old) * len(new))


def check_format(budget: Budget, form: str, values: Any) -> None:
    if _WIDE_FORMAT.search(form):
        raise UsageError(
            "the chat template formats to a width of its own making, which is not served", param="messages"
        )
    fields = form.count("%") + form.count("{")
    if fields:
        widest = max((int(number[0]) for number in re.finditer(r"\d+", form)), default=0)
        budget.size(len(form) + fields * (budget.written(values) + widest))


def check_ints(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_INT:
            raise UsageError(f"the chat template calls a function with a number over {_MOST_INT}, which is not served")


def strftime_now(form: str) -> str:
    if len(form) > _MOST_TIME:
        raise UsageError(f"the chat template asks for a date in over {_MOST_TIME} characters, which is not served")
    return datetime.now().strftime(form)
