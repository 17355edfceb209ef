"""A Jinja environment for chat templates: the conventions of Hugging Face, inside bounds of size and time.

Templates come with models and messages from anybody, so nothing here may reach Python's insides (Jinja's immutable
sandbox sees to that), make a text that doesn't fit in memory, or run for long. Every way in which a template makes
text, keeps values or repeats work passes a `Budget` first: joined output, loops, operators, comparisons, slices,
literals, filters, tests, calls. It knows no messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from functools import wraps
from sys import getsizeof
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.text.chat_budget import BoundedLoop, Budget, check_bits, check_power
from penstock.text.chat_guards import (
    CHECKED,
    check_filter,
    check_format,
    check_ints,
    check_method,
    check_replace,
    strftime_now,
)
from penstock.text.chat_rewrites import GenerationTag, Rewrites

# Filters that hand on what they are given; all others may write it out as text first.
_HANDS_ON = frozenset(
    """length count list first last select reject selectattr rejectattr map items tojson default d join attr reverse sum
    joined_text""".split()  # noqa: SIM905 - a list to be read
)
_HANDS_BACK = frozenset(["default", "d", "first", "last", "attr", "random", "min", "max"])  # a value that there was
_SORTS = frozenset(["sort", "unique", "groupby", "dictsort", "min", "max"])  # those make a key of each item
_COMPARING = frozenset(
    """lower upper divisibleby in == eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le""".split()  # noqa: SIM905
)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in (`template`) and run in (`render`)."""

    intercepted_binops = frozenset(["-", "*", "/", "//", "%", "**"])
    intercepted_unops = frozenset(["+", "-"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._finalize,
            optimized=False,  # a folded list is a literal again, built anew each time, past the budget
        )
        self._budget: ContextVar[Budget] = ContextVar("budget")
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = strftime_now
        self.filters.update(tojson=self._to_json, join=self._join, sum=self._sum, joined_text=self.concat)
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["bounded_loop"] = lambda inner: BoundedLoop(inner, self._budget.get())
        self.filters["measured"] = self._measured
        self.filters["added"] = self._added
        self.filters["held"] = self._held
        self.filters["sliced"] = self._sliced
        for name in _COMPARING:
            self.tests[name] = self._bounded_test(cast("Callable[..., Any]", self.tests[name]))

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
                budget.made(budget.written(part))
                part = str(part)
            total += len(part)
            if total > budget.characters:
                budget.size(total)
            if len(kept) & 63 == 0:  # JSON comes in thousands of pieces, each of which is nothing
                budget.step()
            kept.append(part)
        joined = "".join(kept)
        budget.made(getsizeof(joined))
        return joined

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, str):
            budget = self._budget.get()
            budget.made(budget.written(value))
        return value

    def _added(self, parts: list[Any]) -> Any:
        budget = self._budget.get()
        if all(type(part) is str for part in parts):
            budget.size(sum(map(len, parts)))
            total = "".join(parts)
        else:
            total = parts[0]
            for part in parts[1:]:
                total = self._plus(budget, total, part)
        budget.made(getsizeof(total))
        return total

    def _plus(self, budget: Budget, left: Any, right: Any) -> Any:
        if isinstance(left, Sized) and isinstance(right, Sized):
            budget.size(len(left) + len(right))
        check_bits(left, right)
        return left + right

    def _measured(self, value: Any) -> Any:
        return value if isinstance(value, (str, int)) else self._budget.get().measured(value)

    def _held(self, value: Any) -> Any:
        self._budget.get().made(getsizeof(value))
        return value

    def _sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = value[start:stop:step]
        if part is not value:
            self._budget.get().made(getsizeof(part))
        return part

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        if isinstance(indent, str):
            self._budget.get().size(len(indent) * 1000)  # repeated at each level
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat(encoder.iterencode(value))

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return self.concat(_between(d, items))

    def _sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """As Jinja's, each addition guarded: of lists it takes the square of their number."""
        if isinstance(start, (str, bytes)):
            raise TypeError("sum() adds no texts")
        items = iterable if attribute is None else map(make_attrgetter(self, attribute), iterable)
        for item in items:
            self._budget.get().step()
            start = self._added([start, item])
        return start

    # -- guards

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            check_bits(left, right)
            if operator == "**":
                check_power(left, right)
            return super().call_binop(context, operator, left, right)
        budget = self._budget.get()
        if operator == "%" and isinstance(left, (str, bytes)):
            check_format(budget, left if isinstance(left, str) else left.decode("latin-1"), right)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                    budget.size(len(one) * other)
        check_bits(left, right)
        result = super().call_binop(context, operator, left, right)
        budget.made(getsizeof(result))
        return result

    def call_unop(self, context: Any, operator: str, arg: Any) -> Any:
        check_bits(arg)
        return super().call_unop(context, operator, arg)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self._budget.get().written(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        found = inner

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(self._budget.get(), value.__self__, [*args, *kwargs.values()])
            return found(*args, **kwargs)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja has it
        budget = __self._budget.get()
        budget.step()
        budget.made(64 + 8 * len(args) + 100 * len(kwargs))
        if isinstance(__obj, LoopContext):
            args = tuple(BoundedLoop(items, budget) for items in args)
        if isinstance(__obj, (LoopContext, Macro)):
            return super().call(__context, __obj, *args, **kwargs)  # what it writes is counted where it is joined
        values = args
        if kwargs:  # Jinja hands on a loop's variables among them
            values = (*args, *(kwargs[name] for name in kwargs if name not in ("_loop_vars", "_block_vars")))
        for value in values:
            if type(value) is not str:
                budget.measured(value)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, (str, bytes, int, list, tuple)):
            check_ints(values)
        if isinstance(owner, (str, bytes)):
            check_method(budget, owner, name, values)
            if name == "join" and isinstance(owner, str) and args:
                return __self.concat(_between(owner, args[0]))
            if name == "replace" and len(args) >= 2:
                check_replace(budget, owner, args[0], args[1])
        result = super().call(__context, __obj, *args, **kwargs)
        if result is owner or (isinstance(owner, dict) and name not in ("copy", "fromkeys")):
            return result
        return budget.result(result)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter behind guards; `wraps` keeps Jinja's mark that says whether it takes the context first."""
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0
        sorts, writes, checked = name in _SORTS, name not in _HANDS_ON, name in CHECKED
        back, width = name in _HANDS_BACK, name != "truncate"

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget.get()
            budget.step()
            value, others = args[leading], [*args[leading + 1 :], *kwargs.values()]
            if sorts:
                value = self._keys(value, others)
                args = (*args[:leading], value, *args[leading + 1 :])
            elif writes:
                budget.measured(value)
                for other in others:
                    budget.measured(other)
            if width:
                check_ints(others)
            if checked:
                check_filter(budget, name, value, args[leading + 1 :], kwargs)
            result = function(*args, **kwargs)
            return result if result is value or back else budget.result(result)

        return bounded

    def _bounded_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(value: Any, *args: Any) -> Any:
            budget = self._budget.get()
            check_bits(value, *args)
            return function(budget.measured(value), *map(budget.measured, args))

        return bounded

    def _keys(self, value: Any, others: list[Any]) -> Any:
        """What is to be sorted, as a list. The keys are counted: they may be copies of all of it, once an attribute."""
        budget = self._budget.get()
        value = value if isinstance(value, Sized) else list(value)
        keys = 1 + max([other.count(",") for other in others if isinstance(other, str)], default=0)
        budget.made(keys * (budget.written(value) + 100 * len(value)))
        return value

    # -- compiling

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return Rewrites().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]


def _between(separator: str, items: Iterable[Any]) -> Iterator[Any]:
    for place, item in enumerate(items):
        if place and separator:
            yield separator
        yield item


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
