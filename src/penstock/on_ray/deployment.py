"""Settings of a service on Ray Serve. Checks the `args` of a Serve config file, and makes the
options that Serve takes.

Knows Serve's names and limits, and imports nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import UsageError
from penstock.text.parsers.parser_registry import AnswerParsers

PATH = "penstock.on_ray.app:build_app"  # import_path in a Serve config file
# seconds between a drain's end and Serve's kill, in which batches stop and the engine frees memory
SLACK = 15.0
# requests that Serve lets into a replica; Penstock's server has its own limits of tokens and
# samples
REQUESTS = 1_000_000
PUSH = 1.0  # seconds between two readings of how long a replica's queued work will take
LOOK_BACK = 5.0  # seconds over which those readings are averaged
_TEXTS = (
    "name",
    "served_model_name",
    "host",
    "api_key_file",
    "state_dir",
    "tool_call_parser",
    "reasoning_parser",
)
_SWITCHES = ("allow_no_key", "enable_auto_tool_choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayDeployment:
    """The user's settings; all times are seconds. Raises UsageError for settings that Serve or a
    replica doesn't support.

    knobs: engine options of each replica, by their Python names. cpus: cores that Ray reserves for
    a replica. target_seconds: seconds that a replica may need for its queued requests before
    another one is started. host: address that Serve listens on. None: it is configured elsewhere
    and may be public, so an API key or `allow_no_key` is required.
    """

    name: str = "penstock"
    served_model_name: str | None = None
    cpus: float = 1.0
    min_replicas: int = 1
    max_replicas: int | None = None  # None: equal to min_replicas
    target_seconds: float = 30.0
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    host: str | None = None
    api_key_file: str | None = None
    allow_no_key: bool = False
    allowed_hosts: tuple[str, ...] = ()
    state_dir: str | None = None
    # these three have the same meaning as `penstock serve`'s options
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    startup_timeout: float = 900.0
    shutdown_timeout: float = 60.0
    step_timeout: float = STEP_TIMEOUT
    knobs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> RayDeployment:
        """Builds a deployment from one mapping of deployment settings and engine options."""
        own = {each.name for each in fields(cls)} - {"knobs"}
        given = {name: value for name, value in args.items() if name in own}
        hosts = given.pop("allowed_hosts", ())
        knobs = {name: value for name, value in args.items() if name not in own}
        return cls(**given, allowed_hosts=tuple(hosts), knobs=knobs)

    def args(self) -> dict[str, Any]:
        """Returns the mapping that `of` reads, with all values that differ from their defaults."""
        default = {each.name: each.default for each in fields(type(self))}
        own = {name: getattr(self, name) for name in default if name != "knobs"}
        told = {name: value for name, value in own.items() if value != default[name]}
        if self.allowed_hosts:
            told["allowed_hosts"] = list(self.allowed_hosts)
        return {**self.knobs, **told}

    def __post_init__(self) -> None:
        config = self.config  # raises UsageError for invalid engine options
        if config.parallel.data_parallel_size > 1:
            raise UsageError(
                "replicas are Serve's: leave data_parallel_size out, and say max_replicas",
                param="data_parallel_size",
            )
        kinds: dict[str, type] = dict.fromkeys(_TEXTS, str) | dict.fromkeys(_SWITCHES, bool)
        for what, kind in {**kinds, "min_replicas": int, "max_replicas": int}.items():
            value = getattr(self, what)
            if value is not None and (
                not isinstance(value, kind) or (kind is int and isinstance(value, bool))
            ):
                raise UsageError(f"{what} must be {kind.__name__}, not {value!r}", param=what)
        self._check_numbers()
        self.parsers.check()
        for what in ("state_dir", "api_key_file"):
            folder = getattr(self, what)
            if folder is not None and not Path(folder).is_absolute():
                raise UsageError(
                    f"{what} is read on any machine of the cluster: give the whole path", param=what
                )
        if self.state_dir is not None and (self.min_replicas, self.most) != (1, 1):
            raise UsageError(
                "one replica keeps files and batches: with state_dir, min_replicas and max_replicas"
                " are 1. Put the replicas that come and go into a second application, with a name"
                " and a route_prefix of its own",
                param="state_dir",
            )

    def _check_numbers(self) -> None:
        least = {
            "cpus": 0.0,
            "min_replicas": 0,
            "target_seconds": 0.1,
            "upscale_delay": 0.0,
            "downscale_delay": 0.0,
        }
        for what, low in {
            **least,
            "startup_timeout": 1.0,
            "shutdown_timeout": 0.0,
            "step_timeout": 1.0,
        }.items():
            value = getattr(self, what)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value < inf
            ):
                raise UsageError(
                    f"{what} must be a number from {low:g} on, not {value!r}", param=what
                )
        if self.most < max(1, self.min_replicas):
            raise UsageError(
                f"max_replicas ({self.most}) is below min_replicas ({self.min_replicas}) or 1:"
                " raise it",
                param="max_replicas",
            )

    # --- values derived from the fields

    @property
    def config(self) -> Config:
        """Returns the config of one replica's engine."""
        return Config.of(**self.knobs)

    @property
    def parsers(self) -> AnswerParsers:
        """Parsers for tool calls and reasoning in chat answers."""
        return AnswerParsers(
            enable_auto_tool_choice=self.enable_auto_tool_choice,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
        )

    @property
    def most(self) -> int:
        """Returns the largest number of replicas."""
        return max(1, self.min_replicas) if self.max_replicas is None else self.max_replicas

    def gpus(self, there: int) -> int:
        """Returns the number of GPUs of a replica, which are all on one machine: one per rank; 0 on
        the CPU. there: number of GPUs of the cluster."""
        device = self.config.model.device
        some = device == "cuda" or (device == "auto" and there > 0)
        return self.config.parallel.tensor_parallel_size if some else 0

    def serve_options(self, gpus: int) -> dict[str, Any]:
        """Returns the options for Ray's `serve.deployment`. gpus: number of GPUs of a replica."""
        return {
            "name": "server",
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": gpus},
            "max_ongoing_requests": REQUESTS,
            "graceful_shutdown_timeout_s": self.shutdown_timeout + SLACK,
            "graceful_shutdown_wait_loop_s": 0.2,
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
            "health_check_period_s": 2.0,
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.most,
                "upscale_delay_s": self.upscale_delay,
                "downscale_delay_s": self.downscale_delay,
                "metrics_interval_s": PUSH,
                "look_back_period_s": LOOK_BACK,
                "policy": {"policy_function": "penstock.on_ray.ray_scaling:wanted_replicas"},
            },
        }
