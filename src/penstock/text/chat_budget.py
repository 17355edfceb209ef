"""What one rendering of a chat template may use: the length of any one text, memory made in all, time.

It measures values and knows neither Jinja's environment nor messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from sys import getsizeof
from types import GeneratorType
from typing import Any

from jinja2.utils import Namespace

from penstock.errors import UsageError

# Bytes that a rendering may make in all, a character of its longest text. Bytes made are counted, not bytes kept: what
# a template drops counts too. Measured: templates of the Llama, Qwen and Mistral kinds make 3 to 7 bytes a character
# of their text; one that adds all messages to one growing text makes 500 over 1,000 messages.
_MADE = 256
_DEEPEST = 1000  # levels of lists in lists; Python's repr and JSON stop there too, its hash at the end of the stack
_MOST_BITS = 4096  # of an int: Python divides by the square of the length
_ITEM = 72  # bytes of an item that a filter or a method makes, beside its place in the list: a short text, a tuple
_LISTS: tuple[type[Any], ...] = (
    *(list, tuple, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_SHORT = frozenset([bool, float, type(None)])


class Budget:
    """What one rendering may use: characters of any text it makes, memory in all, seconds. Raises UsageError past
    any."""

    __slots__ = ("_deadline", "_left", "characters")

    def __init__(self, characters: int, seconds: float) -> None:
        self.characters = characters
        self._left = characters * _MADE
        self._deadline = time.monotonic() + seconds

    def size(self, characters: int) -> None:
        if characters > self.characters:
            raise UsageError(
                f"the chat template makes a text of more than {self.characters} characters of these messages; "
                "send less, or ids of a prompt rendered elsewhere",
                param="messages",
            )

    def made(self, size: int) -> None:
        """Counts memory, in bytes. Nothing gives it back: what is kept isn't known, what was made bounds it."""
        self._left -= size
        if self._left < 0:
            raise UsageError(
                f"the chat template makes more than {self.characters * _MADE} bytes of values of these messages; "
                "send less, or ids of a prompt rendered elsewhere",
                param="messages",
            )

    def step(self) -> None:
        if time.monotonic() > self._deadline:
            raise UsageError("the chat template runs too long on these messages; send fewer", param="messages")

    def result(self, value: Any) -> Any:
        """Hands on what a filter or a function made, counted; what is made item by item later is counted then."""
        if isinstance(value, (str, bytes)):
            self.made(getsizeof(value))
        elif isinstance(value, (list, tuple, dict, set)):
            self.made(getsizeof(value) + _ITEM * len(value))
        elif isinstance(value, int):
            check_bits(value)
        elif isinstance(value, GeneratorType):
            return self._counted(value)
        return value

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            if isinstance(item, (list, tuple)):
                self.made(getsizeof(item))
            yield item

    def written(self, value: Any) -> int:
        """Bounds, and returns, what `value` would be as text; shared parts of nested lists count each time, as they do
        when written, compared or hashed."""
        total, level = 0, [value]
        for _ in range(_DEEPEST):
            below: list[Any] = []
            for item in level:
                if isinstance(item, (str, bytes)):
                    total += len(item)
                elif isinstance(item, int):
                    total += item.bit_length() >> 2
                elif isinstance(item, dict):
                    below += item.keys()
                    below += item.values()
                elif isinstance(item, _LISTS):
                    below.extend(item)
                elif isinstance(item, Namespace):
                    attributes: dict[str, Any] = object.__getattribute__(item, "_Namespace__attrs")
                    below.append(attributes)
                    self.step()
                total += 1
                self.size(total + len(below))
            if not below:
                return total
            level = below
        raise UsageError(f"the chat template nests lists more than {_DEEPEST} deep, which is not served")

    def measured(self, value: Any) -> Any:
        """Hands on a value that is about to be written, compared or hashed, where it has parts."""
        if not isinstance(value, (str, int)) and type(value) not in _SHORT:
            self.written(value)
        return value


class BoundedLoop:
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


def check_bits(*values: Any) -> None:
    for value in values:
        if isinstance(value, int):
            _check_bits(value.bit_length())


def check_power(base: int, exponent: int) -> None:
    _check_bits(base.bit_length() * abs(exponent))


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise UsageError(f"the chat template computes with a number of over {_MOST_BITS} bits, which is not served")
