"""wake_gpu: has the driver set up a GPU in a thread of its own, while torch is imported. It knows
the driver alone."""

from __future__ import annotations

import ctypes
import sys
from threading import Thread


def wake_gpu(device: str) -> None:
    """Begins to set up the first GPU, for the device `auto` or `cuda`: 0.3 to 0.5 s of a start,
    hidden by some 3 s of torch's import. What goes wrong is left for torch to find and to tell."""
    if device != "cpu" and sys.platform == "linux":
        Thread(target=_retain_context, name="penstock-wake", daemon=True).start()


def _retain_context() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no driver
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        # the one that torch uses; kept to the end
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
