"""Runs a server and ends it when the run that started it has ended: it holds a pipe from the run.

    python -m penstock.bench.process_guard SIGNAL CORES COMMAND...      CORES: `0,2,3` to pin it to, or `all`

It exits with the server's code. It knows a command; not what it serves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

PATIENCE = 15.0  # seconds from the signal to the end for good


def main() -> int:
    number, cores = signal.Signals[sys.argv[1]], sys.argv[2]
    if cores != "all":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: None)  # the group's signals are the server's; a handler isn't passed on to it
    try:
        server = subprocess.Popen(sys.argv[3:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"the server could not be started: {error}", file=sys.stderr)
        return 127
    killed = threading.Event()
    threading.Thread(target=_hold, args=(server, number, killed), daemon=True).start()
    code = server.wait()
    if killed.is_set():  # this thread may be the first to know, and the other one dies with it
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _hold(server: subprocess.Popen[bytes], number: signal.Signals, killed: threading.Event) -> None:
    """Waits for the pipe's end, which says that the run was killed; then ends the group."""
    while os.read(0, 4096):
        pass
    killed.set()
    os.killpg(0, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(PATIENCE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
