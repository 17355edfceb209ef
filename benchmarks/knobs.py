"""Parses an engine's knob from a command line. Knows no engine."""

from __future__ import annotations

import json
from typing import Any


def read_knob(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE. The value is parsed as JSON, or taken as a text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
