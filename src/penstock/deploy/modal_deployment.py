"""Settings of a deployment on Modal. Holds the model, hardware, scaling, time limits, and the
command lines made from them. Knows the names of Penstock's commands and Modal's limits, and imports
neither. write_modal_app.py writes the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import UsageError

PORT = 8000
# mount point of the Modal volume with built engines, output of `monkeys`, and uploaded models
FOLDER = "/penstock"
LONGEST_GRACE = 3600  # seconds; Modal's upper bound of exit_grace_period
GRACE_OVER_DRAIN = 30  # seconds between the end of the server's drain and Modal's kill
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GPU = re.compile(r"[A-Za-z][A-Za-z0-9-]*!?(?::([1-8]))?")
# The first character is never "-", since commands would read the id as an option.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SHAPE = re.compile(r"[1-9]\d*x[1-9]\d*:[1-9]\d*")
# engine options that `penstock build` doesn't store with the built engine
_SERVED_ONLY = ("data_parallel_size", "speculative_config", "draft_from")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalDeployment:
    """The user's settings. Raises UsageError for settings that Modal or the container image doesn't
    support.

    model: a hub id, a folder of the volume (/penstock/...), or `demo`. gpu: Modal's GPU name, with
    ! and :N where wanted; None: CPUs only. package: where the image gets Penstock from, a
    checkout's folder or a requirement for pip. knobs: engine options by their Python names. shapes:
    workload shapes INxOUT:CONCURRENCY (tokens, tokens, samples at once) that `penstock build` tunes
    for. Times: seconds.
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
    hub_secret: str | None = None  # name of a Modal secret with HF_TOKEN
    key_secret: str | None = None  # name of a Modal secret with PENSTOCK_API_KEY
    unauthenticated: bool = False  # True: no key is needed, and Modal's proxy lets anybody in
    routing_region: str = "us-east"
    target_concurrency: int = 256  # HTTP requests per container; each may ask for n samples
    # Above this many requests Modal answers 429. None: only the server's own limits hold.
    max_concurrency: int | None = None
    min_containers: int = 0
    max_containers: int | None = None
    scaledown_window: int = 300
    startup_timeout: int = 900
    shutdown_timeout: int = 60  # seconds that running requests get when a container ends

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

    # --- values derived from the fields

    @property
    def gpus(self) -> int:
        """Number of GPUs of a container."""
        match = _GPU.fullmatch(self.gpu or "")
        return int(match[1] or 1) if match else 0

    @property
    def gpus_needed(self) -> int:
        """Number of GPUs that the engine uses: tensor parallel ranks times replicas; 0 on CPUs."""
        if self.gpu is None:
            return 0
        return int(
            self.knobs.get("tensor_parallel_size", 1) * self.knobs.get("data_parallel_size", 1)
        )

    @property
    def exit_grace_period(self) -> int:
        """Seconds that Modal waits before it kills a container:
        longer than the server's own drain."""
        return self.shutdown_timeout + GRACE_OVER_DRAIN

    @property
    def artifact(self) -> str:
        """Folder in the volume where `penstock build` writes the built engine and the server opens
        it."""
        return f"{FOLDER}/built/{self.name}"

    def from_hub(self) -> list[str]:
        """Returns the command line words for the model before it is built: id, revision, and the
        engine options that `penstock build` stores."""
        knobs = {name: value for name, value in self.knobs.items() if name not in _SERVED_ONLY}
        return [self.model, *_options({"revision": self.revision} | knobs)]

    def serve_options(self) -> list[str]:
        """Returns the options of `penstock serve` after the model. Without an API key the server
        answers everybody, since Modal's proxy has checked the caller."""
        words = ["--host", "0.0.0.0", "--port", str(PORT), "--served-model-name", self.model]
        words += ["--shutdown-timeout", str(self.shutdown_timeout)]
        words += [] if self.key_secret else ["--allow-no-key", "--allowed-host", "*"]
        return words + self._served_only()

    def build_command(self) -> list[str]:
        """Returns the command that builds the model into the volume. Run again after a kill, it
        resumes the build."""
        shapes = [word for shape in self.shapes for word in ("--shape", shape)]
        return ["penstock", "build", *self.from_hub(), "--out", self.artifact, *shapes]

    def monkeys_options(self) -> list[str]:
        """Returns the options of `penstock monkeys` after the model that are the same in
        every run."""
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
        """Returns the names of the Modal secrets that a container gets as environment variables."""
        return [name for name in (self.hub_secret, self.key_secret) if name is not None]


def _options(knobs: dict[str, Any]) -> list[str]:
    """Converts options (name -> value) to command line words, in the same order;
    leaves out None."""
    words: list[str] = []
    for name, value in knobs.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
