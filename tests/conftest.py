"""What all tests share: one thread each, no network, the same draws each time, and GPU tests that
say why they rest.

Folders are the package's own; marks tell what a test needs: torch, gpu, or nothing. It knows no
room.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
import signal
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest

# Set before anything imports torch. Workers run beside each other, and the tests' models are too
# small for threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Triton decides as it is loaded whether its own functions are interpreted, and transformers loads
# it: where no GPU is to be found this comes before any test file, in whatever order they are named.
if not (shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job and much that runs in CI is started deaf to Ctrl-C, one of nohup to a
# hangup, and so would every child of a test be. A handler is not passed on to them: under nohup the
# tests themselves outlive a hangup still.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Clients of two libraries give up after five seconds where nobody says otherwise: a busy machine is
# no failure. The certificates that they trust are loaded once, which takes 30 to 60 ms.
for name in ("httpx", "httpx2"):
    if importlib.util.find_spec(name):
        timeouts = importlib.import_module(f"{name}._config").DEFAULT_TIMEOUT_CONFIG
        timeouts.read = timeouts.connect = 600
        transports = importlib.import_module(f"{name}._transports.default")
        transports.create_ssl_context = cache(transports.create_ssl_context)

# A GPU image without a registry may lack hypothesis: its tests fail there by themselves, the others
# run.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers

    # A busy machine is no failure: no deadline, no rule how fast inputs are drawn. A run draws what
    # every run draws; `make reliability` draws others by --hypothesis-profile=wandering
    # --hypothesis-seed=N.
    clockless = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("penstock", clockless, derandomize=True)
    settings.register_profile(
        "wandering", clockless, derandomize=False, max_examples=300, print_blob=True
    )
    settings.load_profile("penstock")

    # Numbers and strings that stand in imported sources are drawn too, but what is imported hangs
    # on the tests before.
    if in_sources := getattr(providers, "is_local_module_file", None):
        providers.is_local_module_file = lambda path: (
            not settings.default.derandomize and in_sources(path)
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without looking for garbage, which takes 2 of 13 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Freezes what is imported and collected, 750,000 objects: each look through them takes 0.2 s,
    and engines and tests ask for one. A test may have thawed them."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves test files that say that they need torch alone where there is none."""
    if collection_path.name.startswith("test_") and not importlib.util.find_spec("torch"):
        text = collection_path.read_text(encoding="utf-8")
        return "pytest.mark.torch" in text or "pytest.mark.gpu" in text or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is none;
    torch is imported only if there are such tests."""
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws from a generator that nobody handed over is the same each time too."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps a traceback of each call
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
