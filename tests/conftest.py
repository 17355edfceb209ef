"""What all tests share: one thread each, no network, hypothesis without a clock, and GPU tests that say why they rest.

Folders tell what a test may need: numpy (no torch), cpu, gpu, many_gpu, house. It knows no room.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Set before anything imports torch. Workers run beside each other, and the tests' models are too small for threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A GPU image without a registry may lack hypothesis: its tests fail there by themselves, the others run.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # No deadline: a busy machine is no failure. CI draws the same examples in each run.
    settings.register_profile("penstock", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
    settings.load_profile("penstock")

HERE = Path(__file__).parent
GPUS_NEEDED = {"gpu": 1, "many_gpu": 2}  # folder -> CUDA devices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of the GPU folders where there are too few GPUs; torch is imported only if there are such tests."""
    for item in items:
        needed = GPUS_NEEDED.get(item.path.relative_to(HERE).parts[0], 0)
        if needed and (found := _cuda_devices()) < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU, found {found}"))


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
