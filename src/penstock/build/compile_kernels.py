"""Compile: the engine is opened once as it will be served, and all that it launches goes to the
artifact's `kernels/`.

Whether a kernel was compiled now or lay in the compiler's own cache is the same: it is written. It
knows folders; how binaries are found again is `kernels/triton/disk_cache.py`'s.
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
    """Writes the binaries of the model folder that stands in options' `out`: a stage's call.
    engine, tunables: what was decided. Where nothing is compiled there is no such folder."""
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
        with OpenModel(each, folder) as model:  # which warms all that a request may need
            model.run([work.cut(0.0, 4) for work in msgspec.convert(works, list[WorkSample])])
    shutil.rmtree(folder / KERNELS, ignore_errors=True)
    fresh.replace(folder / KERNELS)
    return {
        "kernels": len({*binaries.compiled, *binaries.loaded}),
        "compiled": len(binaries.compiled),
    }


def _as_opened(asked: BuildOptions) -> list[dict[str, Value]]:
    """What bounds requests is never an artifact's to say: it is opened with the model's own
    context, and by somebody who names the bounds that the build was told."""
    told: dict[str, Value] = {name: asked.knobs[name] for name in BOUNDS if name in asked.knobs}
    free: dict[str, Value] = dict.fromkeys(told)
    return [free, told] if told else [{}]
