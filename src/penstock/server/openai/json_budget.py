"""How much a JSON body holds, counted in its bytes outside of texts, so that what a parser makes of
it has a bound before it is made: `{}` takes 50 ns and 64 bytes, `[1]` 0.6 us and 64. It knows
JSON's grammar as far as texts go; no field.
"""

from __future__ import annotations

import numpy as np

from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import HttpLimits

PART = 256 * 1024  # bytes that are looked at at once: they stay in the processor's cache


def check_values(body: bytes | bytearray, limits: HttpLimits, part: int = PART) -> None:
    """Raises HttpError for a body of more values, texts or lists than are taken. Valid JSON is
    counted exactly; of anything else no less than a parser makes before it finds the fault."""
    if len(body) <= min(limits.max_values, limits.max_texts, limits.max_lists):
        return  # each takes a byte at least
    if _excess(body, limits, part, in_texts=True) is None:
        return
    # A backslash stands in texts alone. Pairs go first: what is left of them before a quote makes
    # it part of its text.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    excess = _excess(plain, limits, part, in_texts=False)
    if excess is not None:
        raise HttpError(f"the body holds more than {excess}: send it in parts")


def _excess(
    body: bytes | bytearray, limits: HttpLimits, size: int, *, in_texts: bool
) -> str | None:
    """What there is too much of. in_texts: what stands in texts counts as if it didn't; that is
    never less."""
    commas = quotes = openings = 0
    inside = False
    for at in range(0, len(body), size):
        part = np.frombuffer(body, np.uint8, min(size, len(body) - at), at)
        quote, comma = part == ord('"'), part == ord(",")
        # [ and { differ in that bit, and nothing else becomes {
        opening = (part | 0x20) == ord("{")
        if not in_texts:
            within = np.bitwise_xor.accumulate(quote) ^ inside  # behind an odd number of quotes
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
