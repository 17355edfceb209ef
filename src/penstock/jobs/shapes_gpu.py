"""What the machine's own instruments say while another process works: nvidia-smi for the GPU, /proc for memory.

It knows no engine; where there is no nvidia-smi it says None.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

EVERY_MS = 200
QUERY = "--query-gpu=utilization.gpu,memory.used"


class GpuLog:
    """Reads the first GPU's use and memory several times a second, between `with` and its end."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float, float]] = []  # when (monotonic), per cent busy, MiB
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuLog:
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", QUERY, "--format=csv,noheader,nounits", "-i", "0", "-lms", str(EVERY_MS)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def between(self, begin: float, end: float) -> tuple[float | None, float | None]:
        """Mean per cent busy and the most MiB in use, of all processes; None where nothing was read."""
        inside = [(busy, memory) for when, busy, memory in self._seen if begin <= when <= end]
        if not inside:
            return None, None
        return sum(busy for busy, _ in inside) / len(inside), max(memory for _, memory in inside)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            parts = [part.strip() for part in line.split(",")]
            if len(parts) == 2 and all(part.replace(".", "").isdigit() for part in parts):
                self._seen.append((time.monotonic(), float(parts[0]), float(parts[1])))


def tree_peak_mib(pid: int) -> float | None:
    """The most memory that a process and its children held, each at its own peak; None without /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    own = next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0.0)
    return own + sum(tree_peak_mib(int(child)) or 0.0 for child in children)
