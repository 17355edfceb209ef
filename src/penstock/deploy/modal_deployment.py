"""A deployment on Modal: what runs there, on what, how many at once and for how long, and its
command lines.

It knows the names of Penstock's commands and Modal's limits, and imports neither: `write_modal_app`
makes the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import UsageError

PORT = 8000
# where our volume is mounted: artifacts, what monkeys wrote, models that the user has put there
FOLDER = "/penstock"
LONGEST_GRACE = 3600  # Modal's bound of exit_grace_period, seconds
GRACE_OVER_DRAIN = 30  # seconds from the end of the drain to Modal's kill
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GPU = re.compile(r"[A-Za-z][A-Za-z0-9-]*!?(?::([1-8]))?")
# with - before it, it would be an option of our own commands
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SHAPE = re.compile(r"[1-9]\d*x[1-9]\d*:[1-9]\d*")
_SERVED_ONLY = ("data_parallel_size",)  # knobs that no artifact keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalDeployment:
    """What is asked for. Raises UsageError for what Modal or the image could not do.

    model: a hub id, a folder of the volume (/penstock/...), or `demo`. gpu: Modal's word, with !
    and :N where wanted; None: CPUs alone. package: where the image takes Penstock from, a
    checkout's folder or what pip installs. knobs: engine options, by their names in Python. shapes:
    INxOUT:CONCURRENCY that `build` fits it to. Times: seconds.
    """

    model: str
    name: str
    package: str
    gpu: str | None = "H100!"
    cpu: float = 8.0
    revision: str | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[str, ...] = ("256x256:128",)
    volume: str = "penstock"
    hub_volume: str = "huggingface-cache"
    hub_secret: str | None = None  # with HF_TOKEN
    key_secret: str | None = None  # with PENSTOCK_API_KEY
    unauthenticated: bool = False  # without Modal's own check of who asks
    routing_region: str = "us-east"
    target_concurrency: int = 256  # HTTP requests a container, each of n samples
    max_concurrency: int | None = (
        None  # past it Modal answers 429; None: the server's own bounds alone
    )
    min_containers: int = 0
    max_containers: int | None = None
    scaledown_window: int = 300
    startup_timeout: int = 900
    shutdown_timeout: int = 60  # that running requests get once a container is to end

    def __post_init__(self) -> None:
        self._check_model()
        self._check_names()
        self._check_numbers()
        if self.unauthenticated and self.key_secret is None:
            raise UsageError(
                "unauthenticated means that anybody may ask: name the secret with PENSTOCK_API_KEY"
                " by key_secret",
                param="unauthenticated",
            )

    def _check_model(self) -> None:
        known = (
            self.model == "demo"
            or self.model.startswith(f"{FOLDER}/")
            or _HUB_ID.fullmatch(self.model)
        )
        if not known or Path(self.model).is_dir():
            raise UsageError(
                f"{self.model!r} will not be in the container: name a hub id, or put the folder"
                f" into the volume (modal volume put {self.volume} FOLDER /models/NAME) and name it"
                f" as {FOLDER}/models/NAME",
                param="model",
            )
        if self.revision is not None and (self.model == "demo" or self.model.startswith("/")):
            raise UsageError("a revision is of a model on the hub: leave it out", param="revision")

    def _check_names(self) -> None:
        for what in ("name", "volume", "hub_volume", "hub_secret", "key_secret", "routing_region"):
            name = getattr(self, what)
            if name is not None and not _NAME.fullmatch(name):
                raise UsageError(
                    f"{what} is letters, digits, -, _ and . (64 at most), as Modal's names are, not"
                    f" {name!r}",
                    param=what,
                )
        if self.gpu is not None and not _GPU.fullmatch(self.gpu):
            raise UsageError(
                f"gpu is a word of Modal's as H100!, L40S or H200:2, not {self.gpu!r}", param="gpu"
            )
        if self.gpus != self.gpus_needed:
            raise UsageError(
                f"gpu gives {self.gpus} and the engine options want {self.gpus_needed}: "
                f"say {(self.gpu or '').partition(':')[0]}:{self.gpus_needed}, or other options",
                param="gpu",
            )
        for shape in self.shapes:
            if not _SHAPE.fullmatch(shape):
                raise UsageError(
                    f"shape is INxOUT:CONCURRENCY as 256x256:128, not {shape!r}", param="shape"
                )

    def _check_numbers(self) -> None:
        least = {
            "target_concurrency": 1,
            "max_concurrency": 1,
            "min_containers": 0,
            "max_containers": 1,
        }
        least |= {"scaledown_window": 2, "startup_timeout": 1, "shutdown_timeout": 0}
        for what, lowest in least.items():
            number = getattr(self, what)
            if number is not None and number < lowest:
                raise UsageError(f"{what} is {lowest} or more, not {number}", param=what)
        if self.exit_grace_period > LONGEST_GRACE:
            raise UsageError(
                f"shutdown_timeout is {LONGEST_GRACE - GRACE_OVER_DRAIN} at most: Modal waits an"
                " hour and no longer",
                param="shutdown_timeout",
            )
        pairs = {
            "target_concurrency": (
                self.target_concurrency,
                self.max_concurrency,
                "max_concurrency",
            ),
            "min_containers": (self.min_containers, self.max_containers, "max_containers"),
        }
        for what, (low, high, bound) in pairs.items():
            if high is not None and low > high:
                raise UsageError(
                    f"{what} {low} is above {bound} {high}: lower it, or raise the other",
                    param=what,
                )
        if not 0.125 <= self.cpu <= 64:
            raise UsageError(f"cpu is 0.125 to 64 cores, not {self.cpu}", param="cpu")

    # --- what follows

    @property
    def gpus(self) -> int:
        """How many GPUs a container has."""
        match = _GPU.fullmatch(self.gpu or "")
        return int(match[1] or 1) if match else 0

    @property
    def gpus_needed(self) -> int:
        """How many GPUs the engine takes: ranks times replicas; without any, none."""
        if self.gpu is None:
            return 0
        return int(
            self.knobs.get("tensor_parallel_size", 1) * self.knobs.get("data_parallel_size", 1)
        )

    @property
    def exit_grace_period(self) -> int:
        """How long Modal waits before it kills: longer than the server's own drain."""
        return self.shutdown_timeout + GRACE_OVER_DRAIN

    @property
    def artifact(self) -> str:
        """The folder of the volume that `build` writes and the server opens."""
        return f"{FOLDER}/built/{self.name}"

    def from_hub(self) -> list[str]:
        """Words that name the model before it is built: itself, its revision, and what an artifact
        would keep."""
        knobs = {name: value for name, value in self.knobs.items() if name not in _SERVED_ONLY}
        return [self.model, *_options({"revision": self.revision} | knobs)]

    def serve_options(self) -> list[str]:
        """Words of `penstock serve` behind the model. Without a key Modal's proxy has seen to who
        asks."""
        words = ["--host", "0.0.0.0", "--port", str(PORT), "--served-model-name", self.model]
        words += ["--shutdown-timeout", str(self.shutdown_timeout)]
        words += [] if self.key_secret else ["--allow-no-key", "--allowed-host", "*"]
        return words + self._served_only()

    def build_command(self) -> list[str]:
        """The line that fits the model to the GPU, into the volume; the same one goes on after a
        kill."""
        shapes = [word for shape in self.shapes for word in ("--shape", shape)]
        return ["penstock", "build", *self.from_hub(), "--out", self.artifact, *shapes]

    def monkeys_options(self) -> list[str]:
        """Words of `penstock monkeys` behind the model that don't change from run to run."""
        return [
            "--few-shot",
            "4",
            "--temperature",
            "0.6",
            "--max-tokens",
            "1024",
            *self._served_only(),
        ]

    def _served_only(self) -> list[str]:
        return _options({name: self.knobs[name] for name in _SERVED_ONLY if name in self.knobs})

    def secrets(self) -> list[str]:
        """Names of Modal secrets that a container has in its environment."""
        return [name for name in (self.hub_secret, self.key_secret) if name is not None]


def _options(knobs: dict[str, Any]) -> list[str]:
    """Knobs as words of a command line, in the order they came; None is left out."""
    words: list[str] = []
    for name, value in knobs.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
