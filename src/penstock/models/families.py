"""Families: finds a model type's file by name: models/qwen3.py is model_type "qwen3".

Such a file has ARCHITECTURE (the one name that config.json may give it), `read` (keys -> its
config; no torch) and `build` (its config -> a Decoder; imports torch inside). A new model is a new
file, without changes here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol

import penstock.models as room
from penstock.models.keys import Keys
from penstock.models.model_config import ModelConfig

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder


class Family(Protocol):
    """The contents of a model type's file."""

    ARCHITECTURE: str

    def read(self, keys: Keys, named: dict[str, Any]) -> ModelConfig:
        """Reads config.json. named: model_type and architecture, for the config."""

    def build(self, config: Any, make: Maker) -> Decoder:
        """Makes the model of a config from `read`, weights not loaded."""


# Files of this folder that are not model types.
OTHERS = frozenset(
    {
        "build_model",
        "catalog",
        "decoder",
        "delta_hybrid",
        "dense",
        "experts",
        "families",
        "generation_config",
        "keys",
        "mamba_keys",
        "mla",
        "model_config",
        "read_config",
        "rope_keys",
        "sizes",
        "text_part",
        "unserved",
    }
)


def families() -> list[str]:
    """Returns the model types that are served, in alphabetical order."""
    return sorted(
        module.name for module in iter_modules(room.__path__) if module.name not in OTHERS
    )


def find_family(model_type: str) -> Family | None:
    """Returns a model type's file; None: no such file."""
    if model_type not in families():
        return None
    family: Any = import_module(f"{room.__name__}.{model_type}")
    found: Family = family
    return found
