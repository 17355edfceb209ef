"""Start-up to first token, in a process of its own: `python -m penstock.jobs.shapes_start`, started by shapes.py.

It reads one line of JSON (knobs) from standard input, opens an `LLM`, draws one token and says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.errors import EngineError

PROMPT = list(range(100, 108))
PATIENCE = 300.0


def main() -> int:
    knobs = json.loads(sys.stdin.readline())
    from penstock.llm import LLM
    from penstock.request import SamplingParams

    with LLM(**knobs) as llm:
        opened = time.monotonic()
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        out = llm.generate([PROMPT], params, use_tqdm=False)[0]
        print(json.dumps({"tokens": len(out.outputs[0].token_ids), "opened": opened}), flush=True)
    return 0


def first_token_seconds(knobs: dict[str, Any], *, cold: bool) -> float:
    """From the start of a process to its first token. cold: weights out of the page cache, Triton's cache empty."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "TRITON_CACHE_DIR": empty} if cold else None
        if cold:
            forget_files(Path(knobs["model"]))
        begin = time.monotonic()
        command = [sys.executable, "-m", "penstock.jobs.shapes_start"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(knobs) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            seconds = time.monotonic() - begin
            child.communicate(timeout=PATIENCE)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if not line or json.loads(line)["tokens"] != 1:
        raise EngineError(f"the start-up's process gave no token and ended with code {child.returncode}")
    return seconds


def forget_files(folder: Path) -> None:
    """Asks the kernel to drop the folder's weights from its page cache (what is written to disk already can be)."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
