"""Compiles the kernels of a built engine. It opens the engine once as it will be served, and writes
every launched kernel to the built engine's folder `kernels/`.

A kernel is written whether it was compiled now or came from the compiler's cache. Knows folders;
`kernels/triton/disk_cache.py` finds the binaries when the built engine is opened.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from penstock.artifact.manifest import KERNELS, STATE, Value
from penstock.build.build_state import Result
from penstock.build.options import BuildOptions
from penstock.build.trial import OpenModel
from penstock.build.work_sample import WorkSample
from penstock.execute.open_runner import find_ops

BOUNDS = ("max_model_len", "kv_cache_tokens")


def compile_kernels(
    options: dict[str, Any],
    engine: dict[str, Any],
    tunables: dict[str, Any],
    works: list[dict[str, Any]],
) -> Result:
    """Writes the kernel binaries of the model folder `out`. engine, tunables: the chosen option
    values and kernel parameters. On a device without compiled kernels the folder is not made. Runs
    in a stage process."""
    asked = msgspec.convert(options, BuildOptions)
    folder = Path(asked.out)
    config = asked.config(str(folder), **engine)
    binaries = find_ops(config).binaries
    if binaries is None:
        return {"kernels": 0}
    fresh = folder / STATE / KERNELS
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    binaries.into = fresh
    for bounds in _as_opened(asked):
        each = asked.config(str(folder), **{**engine, **bounds})
        each.tuned = tunables
        # opening the model warms every kernel that a request may need
        with OpenModel(each, folder) as model:
            model.run([work.cut(0.0, 4) for work in msgspec.convert(works, list[WorkSample])])
    shutil.rmtree(folder / KERNELS, ignore_errors=True)
    fresh.replace(folder / KERNELS)
    return {
        "kernels": len({*binaries.compiled, *binaries.loaded}),
        "compiled": len(binaries.compiled),
    }


def _as_opened(asked: BuildOptions) -> list[dict[str, Value]]:
    """Returns the sets of length limits with which the engine is opened to compile kernels: the
    model's own context length, and the limits given to the build. A built engine fixes no limit of
    request length, so it may be opened with either."""
    told: dict[str, Value] = {name: asked.knobs[name] for name in BOUNDS if name in asked.knobs}
    free: dict[str, Value] = dict.fromkeys(told)
    return [free, told] if told else [{}]
