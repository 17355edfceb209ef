"""The demo: a small trained model with its tokenizer and its word problems, shipped in the package.

This file tells where they lie and loads nothing. The repository's `scripts/demo` made them.
"""

from pathlib import Path

__all__ = ["model_folder", "problems_file", "shots_file"]

HERE = Path(__file__).parent


def model_folder() -> Path:
    """The folder with the demo model: config, weights and tokenizer as `transformers` and Penstock
    read them."""
    return HERE / "model"


def problems_file() -> Path:
    """Held-out problems as JSON lines, rows `question` and `answer`; no (kind, numbers) of theirs
    was trained on."""
    return HERE / "problems" / "test.jsonl"


def shots_file() -> Path:
    """Problems of the training side as JSON lines, rows `question` and `answer`: the few-shot
    examples."""
    return HERE / "problems" / "shots.jsonl"
