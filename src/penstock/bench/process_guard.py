"""Runs a server and kills it if the bench dies. The guard notices that the bench has died when the
pipe from it closes.

    python -m penstock.bench.process_guard CORES COMMAND...      CORES: `0,2,3` to pin it to, or
    `all`

Exits with the server's code. Knows a command; not what it serves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    if (cores := sys.argv[1]) != "all":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for each in (signal.SIGTERM, signal.SIGINT):
        # a signal to the process group is meant for the server; the guard ignores it by a
        # handler, which the server does not inherit
        signal.signal(each, lambda *_: None)
    try:
        server = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"the server could not be started: {error}", file=sys.stderr)
        return 127
    threading.Thread(target=_hold, daemon=True).start()
    code = server.wait()
    return code if code >= 0 else 128 - code


def _hold() -> None:
    """Waits until the pipe closes, which means that the bench was killed; then kills the process
    group, this process included."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
