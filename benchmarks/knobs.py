"""An engine's knob as a word of a command line. It knows no engine."""

from __future__ import annotations

import json
from typing import Any


def read_knob(text: str) -> tuple[str, Any]:
    """Returns name and value of NAME=VALUE: what the value is in JSON, or the word as it is."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
