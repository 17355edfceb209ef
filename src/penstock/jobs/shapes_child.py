"""A module of ours in a process of its own: a line goes in, JSON lines come out, and silence has an end.

It knows processes and lines; not what is measured there.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import EngineError


def rows_of(
    module: str, line: bytes, patience: float, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Runs a module with a line on its standard input; the JSON lines that it writes, as they come. What else it says
    goes to stderr. environment: all of its variables; None: ours. Raises EngineError when nothing comes for `patience`
    seconds."""
    command = [sys.executable, "-m", module]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        assert child.stdout is not None
        for said in child.stdout:
            lines.put(said)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as way_in:  # it ended at once: stderr says why
            way_in.write(line)
        while (said := lines.get(timeout=patience)) is not None:
            if said.startswith(b"{"):
                yield json.loads(said)
            else:
                sys.stderr.write(said.decode(errors="replace"))
    except queue.Empty as error:
        raise EngineError(f"the process said nothing for {patience:g} s and was ended") from error
    finally:
        if child.poll() is None:
            try:
                child.wait(10 if sys.exc_info()[0] is None else 0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
