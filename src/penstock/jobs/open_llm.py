"""Opens the engine of a job. A job takes this as an argument, so that its tests can hand it another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config import Config

if TYPE_CHECKING:
    from penstock.llm import LLM

OpenLLM = Callable[[Config], "LLM"]


def open_llm(config: Config) -> LLM:
    """An LLM with these knobs; the import is late because it loads torch."""
    from penstock.llm import LLM

    return LLM(**{name: getattr(group, name) for name, group in config.places().items()})
