"""The demo: a small trained model, its drafter and its word problems, shipped in the package.

This file returns their paths and loads nothing. The repository's `scripts/demo` made them.
"""

from pathlib import Path

__all__ = ["drafter_folder", "model_folder", "problems_file", "shots_file"]

HERE = Path(__file__).parent


def model_folder() -> Path:
    """Returns the folder with the demo model: config, weights and tokenizer as `transformers` and
    Penstock read them."""
    return HERE / "model"


def drafter_folder() -> Path:
    """Returns the folder with the demo model's drafter, an EAGLE-3 layer as `speculators` writes
    it."""
    return HERE / "drafter"


def problems_file() -> Path:
    """Returns the file of held-out problems: JSON lines with `question` and `answer`. No problem of
    the same kind with the same numbers was in the training data."""
    return HERE / "problems" / "test.jsonl"


def shots_file() -> Path:
    """Returns the file of few-shot examples from the training data: JSON lines with `question` and
    `answer`."""
    return HERE / "problems" / "shots.jsonl"
