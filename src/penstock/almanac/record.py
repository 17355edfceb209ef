"""A record: one measured run of one engine, model, machine and shape, as one JSON file. This is its
form, version 1.

Every text has a longest length, every number a range, unknown fields are refused. It knows the form
alone; whether the numbers are true is validate.py's. Times are seconds, rates are a second, lengths
are tokens.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SCHEMA = "penstock-almanac/1"
SAMPLE_ROWS = 500
LAG = 0.005  # seconds: a client whose loop ticks later than this at p99 was short
HEADROOM = 2.0  # of a calibrated client: with less it was short
BUSY = 0.5  # of one that was not calibrated: the share of a core that stands for a headroom of 2
# seconds that asks may be taken up late at p99, or LATE_SHARE of the median time to the first event
LATE = 0.005
LATE_SHARE = 0.05
# the whole method's: a run with less of one is a short one
FULL = {
    "warm_up": 10.0,
    "window": 60.0,
    "enough": 1000,
}

# Control characters but line ends and tabs; marks that turn or hide the text around them;
# separators that some readers take for a new line.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)


def _visible(text: str) -> str:
    """Raises ValueError for a text that a terminal or a page would obey."""
    if found := _HIDDEN.search(text):
        raise ValueError(f"holds the control character U+{ord(found[0]):04X}")
    return text


Word = Annotated[
    str, Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:+@,()/=-]*$")
]
Line = Annotated[
    str, Field(max_length=2000, pattern=r"^[^\x00-\x1f\x7f]*$"), AfterValidator(_visible)
]
Text = Annotated[str, Field(max_length=20_000), AfterValidator(_visible)]
Time = Annotated[float, Field(ge=0, le=1e6)]
Rate = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Date = Annotated[str, Field(pattern=r"^20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\dZ$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RecordForm(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Configuration(RecordForm):
    """name: "default", or a word for what was tuned. files: those that the flags name, by name."""

    name: Word
    flags: list[Line] = Field(max_length=200)
    files: dict[Word, Text] = {}
    environment: dict[Word, Line] = {}


class EngineInfo(RecordForm):
    """command: what started the server, as one would type it; for a server found running: how it
    was reached."""

    name: Word
    version: Word
    commit: Word | None = None
    command: Line
    configuration: Configuration


class ModelInfo(RecordForm):
    name: Word
    weights: Literal["real", "random"]
    parameters: Count | None = None
    dtype: Word
    source: Line = ""


class Gpu(RecordForm):
    name: Word
    count: Annotated[int, Field(ge=1, le=4096)]
    memory_mib: Count
    driver: Word
    clocks: Line = ""  # as the driver told them before the run


class MachineInfo(RecordForm):
    gpu: Gpu | None
    cpu: Line
    cores: Annotated[int, Field(ge=1, le=100_000)]
    server_cores: Annotated[int, Field(ge=1, le=100_000)] | None = (
        None  # the client had the others; None: all for both
    )
    memory_mib: Count
    system: Line
    python: Word

    @property
    def cores_told(self) -> str:
        return f"{f'{self.server_cores} of ' if self.server_cores else ''}{self.cores} cores"


class ShapeInfo(RecordForm):
    """exact: `input` tokens in, `output` out, end-of-sequence ignored. monkeys: n samples of a
    shared prompt that end by themselves or at `output`. dataset: lengths of a file's rows; input
    and output are their means."""

    name: Word
    kind: Literal["exact", "monkeys", "dataset"]
    input: Annotated[float, Field(ge=1, le=1e7)]
    output: Annotated[float, Field(ge=1, le=1e7)]
    n: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    source: Line = ""
    prompts: Literal["ids", "text"]


class ClientInfo(RecordForm):
    """Who measured, and what it could have: its ceiling against a server that does nothing, on this
    machine."""

    penstock: Word
    commit: Word | None = None
    command: Line
    processes: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    ceiling_events: Rate | None = None  # streamed events a second; None: not calibrated
    ceiling_requests: Rate | None = None


class Method(RecordForm):
    warm_up: Time
    window: Time  # the longest window of a point
    enough: Count  # requests that a point near a crossing aimed at
    # starts of the server that each point was measured on
    starts: Annotated[int, Field(ge=1, le=100)]
    quantile: Share
    goals: list[Time] = Field(max_length=20)  # first token within so many seconds
    short: bool  # windows or counts below the method's: to be read as a hint
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)] | None = (
        None  # of the whole machine, in dollars
    )


class Interval(RecordForm):
    """A value, and its 95 % interval. None: too few requests to say."""

    value: Annotated[float, Field(ge=0, le=1e9)]
    low: Annotated[float, Field(ge=0, le=1e9)] | None
    high: Annotated[float, Field(ge=0, le=1e9)] | None


class Spread(RecordForm):
    """A time's mean and quantiles over the window's complete requests."""

    mean: Interval
    p50: Interval
    p90: Interval
    p95: Interval
    p99: Interval


class Figures(RecordForm):
    """Definitions: docs/metrics.md. None: it cannot be had (nothing was streamed, no request was
    complete)."""

    request_rate: Interval | None
    output_rate: Interval | None
    total_rate: Interval | None
    first_token: Spread | None  # from the intended start
    first_token_actual: Spread | None  # from the actual start
    inter_token: Spread | None  # gaps between events, of all requests together
    per_token: Spread | None  # (end - first) / (output tokens - 1)
    end_to_end: Spread | None  # from the intended start
    end_to_end_actual: Spread | None


class Goal(RecordForm):
    """Which share of the window's requests (failed ones too) had their first token within
    `seconds`; 95 % interval."""

    seconds: Time
    share: Share
    low: Share
    high: Share
    goodput: Rate  # requests a second that met it


class ClientHealth(RecordForm):
    """What the client says of itself at this point. short: it may have been the bottleneck; never
    ranked."""

    lag_p99: Time  # of its event loops
    busy: Share  # CPU of its busiest process
    # ceiling over what was asked of it; None: not calibrated
    headroom: Annotated[float, Field(ge=0, le=1e9)] | None
    late_p99: Time  # a request was taken up so long after its intended start
    short: bool


class Sample(RecordForm):
    """Joint rows, drawn evenly from the window's requests. A failed request has end_to_end -1."""

    first: list[Annotated[float, Field(ge=-1, le=1e6)]] = Field(max_length=SAMPLE_ROWS)
    per_token: list[Annotated[float, Field(ge=-1, le=1e6)]] = Field(max_length=SAMPLE_ROWS)
    end_to_end: list[Annotated[float, Field(ge=-1, le=1e6)]] = Field(max_length=SAMPLE_ROWS)


class Point(RecordForm):
    """saturation: all at once. single: one at a time. open: Poisson, at `rate`. closed:
    `concurrency` in flight."""

    name: Word
    kind: Literal["saturation", "single", "open", "closed"]
    rate: Rate | None = None  # of the plan, requests a second; what was offered: figures.sustained
    concurrency: Count | None = None
    seconds: Time  # of the window, all starts together
    opens: Time | None = (
        None  # when it opened in each start; None: it ran from the first send to the last end
    )
    effective: Annotated[float, Field(ge=0, le=1e12)] | None = (
        None  # independent requests that these are worth
    )
    requests: Count  # issued in the window
    complete: Count
    outcomes: dict[Word, Count]  # those that were not complete, by outcome
    output_tokens: Count  # of the complete ones
    prompt_tokens: Count
    cached_tokens: Count
    figures: Figures
    goals: list[Goal] = Field(max_length=20)
    client: ClientHealth
    # why to read it with care: "cached prompts", "few requests", ...
    marks: list[Line] = Field(max_length=50)
    sample: Sample


class PointFailure(RecordForm):
    """point: None where none could be measured. context too short: refused for its length, or cut
    at the server's own."""

    point: Word | None
    kind: Literal[
        "out of memory",
        "crashed",
        "did not start",
        "stalled",
        "wrong output",
        "refused",
        "context too short",
    ]
    message: Line
    log: Text


class Raw(RecordForm):
    """The Parquet file of samples.py that every number came from."""

    sha256: Hash
    rows: Count


class Record(RecordForm):
    schema_: Literal["penstock-almanac/1"] = Field(alias="schema")
    run: Annotated[str, Field(pattern=r"^[a-z0-9]{8,32}$")]
    when: Date
    engine: EngineInfo
    model: ModelInfo
    machine: MachineInfo
    shape: ShapeInfo
    client: ClientInfo
    method: Method
    points: list[Point] = Field(max_length=200)
    failures: list[PointFailure] = Field(max_length=200)
    raw: Raw | None
