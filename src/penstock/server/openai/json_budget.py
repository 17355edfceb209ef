"""Counts the contents of a JSON body from its bytes, to bound the parser's result before it exists:
`{}` takes 50 ns and 64 bytes, `[1]` 0.6 us and 64. Knows JSON's grammar as far as strings; no
field."""

from __future__ import annotations

import numpy as np

from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import HttpLimits

PART = 256 * 1024  # bytes examined at once, which stay in the processor's cache


def check_values(body: bytes | bytearray, limits: HttpLimits, part: int = PART) -> None:
    """Raises HttpError for a body with more values, texts or lists than the limits. Counts valid
    JSON exactly; of invalid JSON at least what a parser makes before it finds the error."""
    if len(body) <= min(limits.max_values, limits.max_texts, limits.max_lists):
        return  # each one takes at least a byte
    if _excess(body, limits, part, in_texts=True) is None:
        return
    # Backslashes occur only in strings. Removing pairs first leaves those that escape a quote.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    excess = _excess(plain, limits, part, in_texts=False)
    if excess is not None:
        raise HttpError(f"the body holds more than {excess}: send it in parts")


def _excess(
    body: bytes | bytearray, limits: HttpLimits, size: int, *, in_texts: bool
) -> str | None:
    """Returns what the body has too much of, or None. in_texts: count commas and brackets inside
    strings too, which can only give more."""
    commas = quotes = openings = 0
    inside = False
    for at in range(0, len(body), size):
        part = np.frombuffer(body, np.uint8, min(size, len(body) - at), at)
        quote, comma = part == ord('"'), part == ord(",")
        # "[" and "{" differ in this bit only, and no other byte becomes "{"
        opening = (part | 0x20) == ord("{")
        if not in_texts:
            within = np.bitwise_xor.accumulate(quote) ^ inside  # True after an odd number of quotes
            comma &= ~within
            opening &= ~within
            inside = bool(within[-1])
        commas += int(np.count_nonzero(comma))
        quotes += int(np.count_nonzero(quote))
        openings += int(np.count_nonzero(opening))
        if commas >= limits.max_values:
            return f"{limits.max_values} values"
        if quotes // 2 > limits.max_texts:
            return f"{limits.max_texts} texts"
        if openings > limits.max_lists:
            return f"{limits.max_lists} lists and objects"
    return None
