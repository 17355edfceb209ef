"""Start-up to first token, in a process of its own: `python -m penstock.jobs.shapes_start`, started by shapes.py.

It reads one line of JSON (knobs) from standard input, opens an `LLM`, draws one token and says so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.errors import EngineError
from penstock.jobs.shapes_child import rows_of

PROMPT = list(range(100, 108))
PATIENCE = 300.0  # seconds


def main() -> int:
    knobs = json.loads(sys.stdin.readline())
    from penstock.llm import LLM
    from penstock.request import SamplingParams

    with LLM(**knobs) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        out = llm.generate([PROMPT], params, use_tqdm=False)[0]
        print(json.dumps({"tokens": len(out.outputs[0].token_ids)}), flush=True)
    return 0


def first_token_seconds(knobs: dict[str, Any], *, cold: bool) -> float:
    """From the start of a process to its first token. cold: weights out of the page cache, Triton's cache empty.

    Raises EngineError where none comes within PATIENCE seconds."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "TRITON_CACHE_DIR": empty} if cold else None
        if cold:
            forget_files(Path(knobs["model"]))
        line = json.dumps(knobs).encode() + b"\n"
        begin, tokens, seconds = time.monotonic(), 0, 0.0
        for row in rows_of("penstock.jobs.shapes_start", line, PATIENCE, environment):
            tokens, seconds = row["tokens"], time.monotonic() - begin
    if tokens != 1:
        raise EngineError("the start-up's process gave no token; its last words are above")
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
