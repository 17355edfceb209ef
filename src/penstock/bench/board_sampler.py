"""Reads the GPUs' power and use each second through NVML, the library of NVIDIA's driver, in a
thread beside the load: the load's own processes are others. Where there is no NVIDIA GPU, nothing
is read, and the record has no power. Knows NVML's names and a clock; no figure.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.almanac.board_power import Reading
from penstock.bench.endpoint import target_of
from penstock.bench.machine_probe import HERE, identity
from penstock.bench.run_spec import RunSpec
from penstock.errors import EngineError

LIBRARY = "libnvidia-ml.so.1"
EVERY = 1.0  # seconds between two readings
MILLIWATTS = 1000.0
NO_POWER = "the record has no power"


class Boards:
    """The GPUs that a server sees. visible: CUDA_VISIBLE_DEVICES; None: all. nvml: the driver's
    library. Raises EngineError when it refuses a call."""

    def __init__(self, nvml: Any, visible: str | None = None) -> None:
        self._nvml = nvml
        self._call("nvmlInit_v2")
        if visible is None:
            count = ctypes.c_uint()
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            names = [str(at) for at in range(count.value)]
        else:
            names = [each.strip() for each in visible.split(",") if each.strip() not in ("", "-1")]
        self._handles = [self._handle(name) for name in names]

    def __len__(self) -> int:
        return len(self._handles)

    def _handle(self, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if name.isdigit():
            self._call("nvmlDeviceGetHandleByIndex_v2", int(name), ctypes.byref(handle))
        else:
            self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
        return handle

    def _call(self, name: str, *words: Any) -> None:
        if code := getattr(self._nvml, name)(*words):
            raise EngineError(f"NVML's {name} returned {code}")

    def read(self) -> tuple[float, float]:
        """Returns the watts of all boards together, and the mean share of the time in which kernels
        ran."""
        watts, busy = 0.0, 0.0
        for handle in self._handles:
            power, use = ctypes.c_uint(), (ctypes.c_uint * 2)()  # use: GPU, memory, per cent
            self._call("nvmlDeviceGetPowerUsage", handle, ctypes.byref(power))
            self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use))
            watts += power.value / MILLIWATTS
            busy += min(use[0], 100) / 100 / len(self._handles)
        return watts, busy


class BoardSampler:
    """A thread that calls `read` every second; leaving the context ends it. fault: what ended it
    early, else empty."""

    def __init__(self, read: Callable[[], tuple[float, float]], every: float = EVERY) -> None:
        self._read, self._every = read, every
        self._found: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.fault = ""

    def __enter__(self) -> BoardSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                watts, busy = self._read()
            except EngineError as error:
                self.fault = str(error)
                return
            self._found.append((time.monotonic(), watts, busy))

    def since(self, begin: float, point: str, start: int) -> list[Reading]:
        """Returns the readings from an instant of time.monotonic on, the load level's begin."""
        found = [each for each in self._found if each[0] >= begin]
        return [
            Reading(point, start, round(at - begin, 3), round(watts, 1), round(busy, 4))
            for at, watts, busy in found
        ]


@contextmanager
def sampler_of(
    run: RunSpec, visible: str | None, tell: Callable[[str], object]
) -> Iterator[BoardSampler | None]:
    """Yields the sampler of the GPUs that the run's server sees; None where there is none to read.
    `tell` is called with a line where a GPU is there and its power cannot be read, as that of
    another machine."""
    gpu, subject = run.machine.gpu, run.subject
    if gpu is None:
        yield None
        return
    elsewhere = subject.peer is None and target_of(subject.url or "").host not in HERE
    try:
        if elsewhere or run.machine.identity != identity():
            raise EngineError("the record's machine is not this one")
        boards = Boards(ctypes.CDLL(LIBRARY), visible if subject.peer else None)
        boards.read()
        fault = "" if len(boards) == gpu.count else f"NVML sees {len(boards)} of {gpu.count} GPUs"
    except (OSError, EngineError, AttributeError) as error:
        fault = str(error)
    if fault:
        tell(f"{NO_POWER}: {fault}")
        yield None
        return
    with BoardSampler(boards.read) as sampler:
        yield sampler
    if sampler.fault:
        tell(f"{NO_POWER} of its last points: {sampler.fault}")
