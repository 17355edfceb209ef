"""A Jinja environment for chat templates: the conventions of Hugging Face, inside bounds of size and time.

Templates come with models and messages from anybody, so nothing here may reach Python's insides (Jinja's immutable
sandbox sees to that), make a text that doesn't fit in memory, or run for long. Every way in which a template makes
text or repeats work passes a `Budget` first: joined output, loops, + * % **, filters, methods of strings. It knows no
messages.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import UsageError

_MOST_WRAPPED = 100_000  # characters; one long word takes the square of its length (100,000: 0.4 s)
_MOST_INT = 10_000  # no template pads, indents or repeats by more than that
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")
# Filters that hand on what they are given; all others may write it out as text first.
_HANDS_ON = frozenset(
    """length count list first last select reject selectattr rejectattr map items dictsort tojson default d join attr
    unique sort reverse min max sum groupby joined_text bounded_loop""".split()  # noqa: SIM905 - a list to be read
)


class Budget:
    """What one rendering may use: characters of any text it makes, seconds. Raises UsageError past either."""

    __slots__ = ("_deadline", "_steps", "characters")

    def __init__(self, characters: int, seconds: float) -> None:
        self.characters = characters
        self._deadline = time.monotonic() + seconds
        self._steps = 0

    def size(self, characters: int) -> None:
        if characters > self.characters:
            raise UsageError(
                f"the chat template makes a text of more than {self.characters} characters of these messages; "
                "send less, or ids of a prompt rendered elsewhere",
                param="messages",
            )

    def step(self) -> None:
        self._steps += 1
        if self._steps & 63 == 0 and time.monotonic() > self._deadline:
            raise UsageError("the chat template runs too long on these messages; send fewer", param="messages")

    def written(self, value: Any) -> None:
        """Bounds what `value` would be as text; shared parts of nested lists count each time, as they do when
        written."""
        total, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, dict):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                waiting += item
            total += 1
            self.size(total + len(waiting))


class _BoundedLoop:
    """What a for loop runs over, counted."""

    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._inner:
            self._budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._inner)  # a TypeError where there is no length is what Jinja looks for


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in (`template`) and run in (`render`)."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=self._finalize
        )
        self._budget: ContextVar[Budget] = ContextVar("budget")
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters.update(tojson=self._to_json, join=self._join, joined_text=self.concat)
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["bounded_loop"] = lambda inner: _BoundedLoop(inner, self._budget.get())

    def template(self, source: str) -> jinja2.Template:
        """Compiles a template. Jinja folds constants meanwhile; that has a budget too, past which it doesn't fold."""
        token = self._budget.set(Budget(100_000, 5.0))
        try:
            return self.from_string(source)
        finally:
            self._budget.reset(token)

    def render(self, template: jinja2.Template, variables: dict[str, Any], budget: Budget) -> str:
        """The template's text for these variables."""
        token = self._budget.set(budget)
        try:
            return template.render(variables)
        finally:
            self._budget.reset(token)

    # -- where text is made

    def concat(self, parts: Iterable[Any]) -> str:
        """Joins the pieces of an output, a macro, a block or an `a ~ b`; stops at the first piece too many."""
        budget = self._budget.get()
        kept: list[str] = []
        total = 0
        for part in parts:
            if not isinstance(part, str):
                budget.written(part)
            text = str(part)
            total += len(text)
            budget.step()
            budget.size(total)
            kept.append(text)
        return "".join(kept)

    def _finalize(self, value: Any) -> Any:
        budget = self._budget.get()
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            budget.written(value)
        return value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat(encoder.iterencode(value))

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return self.concat(_between(d, items))

    # -- guards

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self._budget.get()
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.size(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                    budget.size(len(one) * other)
            if isinstance(left, int) and isinstance(right, int):
                budget.size(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.size(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._check_format(left if isinstance(left, str) else left.decode("latin-1"), right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        found = inner

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, [*args, *kwargs.values()])
            return found(*args, **kwargs)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja has it
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            _check_ints([*args, *kwargs.values()])
            name = getattr(__obj, "__name__", "")
            if isinstance(owner, (str, bytes)):
                __self._check_method(owner, name, [*args, *kwargs.values()])
            if name == "join" and isinstance(owner, str) and args:
                return __self.concat(_between(owner, args[0]))
            if name == "replace" and len(args) >= 2:
                __self._check_replace(owner, args[0], args[1])
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter behind guards; `wraps` keeps Jinja's mark that says whether it takes the context first."""
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget.get()
            budget.step()
            value, others = args[leading], [*args[leading + 1 :], *kwargs.values()]
            if name not in _HANDS_ON:
                budget.written(value)
            if name != "truncate":
                _check_ints(others)
            if name == "replace" and len(others) >= 2:
                self._check_replace(value, others[0], others[1])
            elif name == "wordwrap" and len(str(value)) > _MOST_WRAPPED:
                raise UsageError(f"the chat template wraps a text of more than {_MOST_WRAPPED} characters; send less")
            elif name == "format":
                self._check_format(str(value), others)
            elif name == "indent":
                widths = [len(by) if isinstance(by, str) else by for by in others if isinstance(by, (int, str))]
                budget.size(len(str(value)) + (str(value).count("\n") + 1) * max(widths, default=4))
            return function(*args, **kwargs)

        return bounded

    def _check_method(self, owner: str | bytes, name: str, values: list[Any]) -> None:
        """What a method makes of a text is bounded by the text: some encode it to a few times its size."""
        budget = self._budget.get()
        budget.step()
        budget.size(len(owner))
        if name == "expandtabs":
            tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
            budget.size(len(owner) + tabs * max([8, *(value for value in values if isinstance(value, int))]))
        elif name == "translate" and values and isinstance(values[0], dict):
            longest = max((len(new) for new in values[0].values() if isinstance(new, str)), default=1)
            budget.size(len(owner) * max(longest, 1))

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        text, old, new = str(text), str(old), str(new)
        self._budget.get().size(len(text) + text.count(old) * len(new))

    def _check_format(self, form: str, values: Any) -> None:
        budget = self._budget.get()
        if _WIDE_FORMAT.search(form):
            raise UsageError(
                "the chat template formats to a width of its own making, which is not served", param="messages"
            )
        fields = form.count("%") + form.count("{")
        budget.written([values] * min(fields, 1000))

    # -- compiling

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
        return _Concats().visit(tree)  # type: ignore[no-any-return]


class _Concats(jinja2.visitor.NodeTransformer):
    """`a ~ b` becomes a filter over the list of its parts, so that it is measured before it is made."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - the visitor's naming
        parts = [self.visit(part) for part in node.nodes]
        listed = nodes.List(parts, lineno=node.lineno)
        return nodes.Filter(listed, "joined_text", [], [], None, None, lineno=node.lineno)


def _between(separator: str, items: Iterable[Any]) -> Iterator[Any]:
    for place, item in enumerate(items):
        if place and separator:
            yield separator
        yield item


def _check_ints(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MOST_INT for value in values):
        raise UsageError(f"the chat template calls a function with a number over {_MOST_INT}, which is not served")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
