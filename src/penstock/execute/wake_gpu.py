"""wake_gpu: creates the GPU context while torch is imported. Knows the driver alone."""

from __future__ import annotations

import ctypes
import sys
from threading import Thread


def wake_gpu(device: str) -> None:
    """Starts a thread that creates the first GPU's context, if device is `auto` or `cuda`. It takes
    0.3 to 0.5 s, during the 3 s of torch's import. Errors are ignored here; torch reports them
    later."""
    if device != "cpu" and sys.platform == "linux":
        Thread(target=_retain_context, name="penstock-wake", daemon=True).start()


def _retain_context() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no NVIDIA driver is installed
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        # the primary context, which torch uses too; it is never released
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
