"""Families: finds a model type's file by name. models/qwen3.py is the file of model_type "qwen3".

A model type's file has ARCHITECTURE (the value of `architectures` in config.json), `read` (makes
the config from keys, without torch) and `build` (makes a Decoder from the config; imports torch
inside). A new model type is a new file, without changes here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol

import penstock.models as room
from penstock.json_keys import Keys
from penstock.models.model_config import ModelConfig

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder


class Family(Protocol):
    """The names that the Python file of a model type defines."""

    ARCHITECTURE: str

    def read(self, keys: Keys, named: dict[str, Any]) -> ModelConfig:
        """Reads config.json. named: the config's fields model_type and architecture."""

    def build(self, config: Any, make: Maker) -> Decoder:
        """Makes the model of a config that `read` returned; its weights are not loaded yet."""


# Files of this folder that are not model types.
OTHERS = frozenset(
    {
        "build_drafter",
        "build_model",
        "model_list",
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
        "speculators_format",
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
    """Returns the module of a model type; None: the model type is not served."""
    if model_type not in families():
        return None
    family: Any = import_module(f"{room.__name__}.{model_type}")
    found: Family = family
    return found
