"""A job on Ray with engines that compute nothing: for tests that kill its workers and its driver.

    python ray_job.py ADDRESS IN OUT      (`here` for an address: without Ray, what has to come out)

A worker writes its process's number into the folder FAKE_ENGINES, which its cluster's environment
has. While a file `slow` is in it, samples take a while: so a kill comes amid the work, however late
it comes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from fake_llm import FakeLLM
from ray_head import SLOW

from penstock.config import Config
from penstock.jobs.open_llm import OpenLLM
from penstock.jobs.run import run_file
from penstock.llm import Finished, Prompt
from penstock.on_ray.ray_workers import RayWorkers

SAMPLE_SECONDS = 0.02


def engines() -> Path:
    return Path(os.environ["FAKE_ENGINES"])


class Paced(FakeLLM):
    """One whose samples take SAMPLE_SECONDS, or no time, as the folder says."""

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[Finished]:
        def looked() -> None:
            self.delay = SAMPLE_SECONDS if (engines() / SLOW).exists() else 0.0
            after_step()

        looked()
        return super().stream(prompts, after_step=looked)


def open_paced(config: Config) -> Paced:
    (engines() / str(os.getpid())).touch()
    return Paced()


class Faulty(FakeLLM):
    """At a prompt that says `hang` or `raise`, the first engine of a cluster does; at `die`, each
    of them ends."""

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[Finished]:
        return super().stream(map(self._look, prompts), after_step=after_step)

    def _look(self, prompt: Prompt) -> Prompt:
        if prompt.prompt == "die":
            os._exit(3)
        done = engines() / f"did {prompt.prompt}"
        if prompt.prompt in ("hang", "raise") and not done.exists():
            done.touch()
            if prompt.prompt == "raise":
                raise RuntimeError("told to")
            time.sleep(3600)
        return prompt


def open_faulty(config: Config) -> Faulty:
    return Faulty()


if __name__ == "__main__":
    address, source, out = sys.argv[1:]
    on_ray: OpenLLM = partial(RayWorkers, address=address, workers=2, open_engine=open_paced)
    run_file(
        Path(source),
        Path(out),
        Config(),
        (lambda config: FakeLLM()) if address == "here" else on_ray,
    )
