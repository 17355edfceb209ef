"""The format of a benchmark record, version 1. A record is one JSON file: one measured run of one
engine, model, machine and workload shape.

Every text has a longest length, every number a range; unknown fields are refused. validate.py
checks whether the numbers are true. Times are in seconds, rates a second, lengths in tokens.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SCHEMA = "penstock-almanac/1"
SAMPLE_ROWS = 500
# Marks of a load client that was short of capacity, so that it may have been the bottleneck; such a
# measurement is flagged. Seconds: p99 lateness of the client's event loop above which it was short.
LAG = 0.005
HEADROOM = 2.0  # a client with less headroom (its calibrated limit over the load) was short
BUSY = 0.5  # CPU share of an uncalibrated client's busiest process above which it was short
# p99 delay of sending a request above which the client was short: LATE seconds, or LATE_SHARE of
# the median time to the first event if that is more
LATE = 0.005
LATE_SHARE = 0.05
# settings of the full method; a run with a smaller value of any is marked short
FULL = {
    "warm_up": 10.0,
    "window": 60.0,
    "enough": 1000,
}
WRONG_KL = 0.5  # nats, mean over prompts, above which an engine answers wrongly
EDITION_WINDOW, EDITION_STARTS = 20.0, 2  # least values of the edition's method

# Control characters other than line ends and tabs; marks that turn or hide the text around them;
# separators that some readers take for a new line.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)


def _visible(text: str) -> str:
    """Returns the text. Raises ValueError for characters that control a terminal or a page."""
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
    """The engine's configuration. name: "default", or a word for the tuning. files: name -> content
    of the files that the command line names."""

    name: Word
    flags: list[Line] = Field(max_length=200)
    files: dict[Word, Text] = {}
    environment: dict[Word, Line] = {}


class EngineInfo(RecordForm):
    """The measured engine. command: the command line that started the server, or how a running
    server was reached."""

    name: Word
    version: Word
    commit: Word | None = None
    command: Line
    configuration: Configuration
    # optional parts that this installation of the engine did not have, such as FlashInfer
    lacks: list[Word] = Field(default=[], max_length=20)


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
    clocks: Line = ""  # GPU clocks, read from the driver before the run


class MachineInfo(RecordForm):
    gpu: Gpu | None
    cpu: Line
    cores: Annotated[int, Field(ge=1, le=100_000)]
    # number of CPU cores of the server; the client had the others. None: both shared all cores
    server_cores: Annotated[int, Field(ge=1, le=100_000)] | None = None
    memory_mib: Count
    system: Line
    python: Word
    # a name that no other machine has: a checksum of its GPUs' or its system's ids. None: unknown
    identity: Word | None = None

    @property
    def cores_told(self) -> str:
        return f"{f'{self.server_cores} of ' if self.server_cores else ''}{self.cores} cores"


class ShapeInfo(RecordForm):
    """The workload shape. exact: `input` tokens in, `output` tokens out, end-of-sequence ignored.
    monkeys: n samples of a shared prompt that end by themselves or at `output`. dataset: lengths of
    a file's rows; input and output are their means.
    """

    name: Word
    kind: Literal["exact", "monkeys", "dataset"]
    input: Annotated[float, Field(ge=1, le=1e7)]
    output: Annotated[float, Field(ge=1, le=1e7)]
    n: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    source: Line = ""
    prompts: Literal["ids", "text"]


class ClientInfo(RecordForm):
    """The measuring client, and its limits: its highest rates against a server that does nothing,
    on this machine."""

    penstock: Word
    commit: Word | None = None
    command: Line
    processes: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    ceiling_events: Rate | None = None  # streamed events a second; None: not calibrated
    ceiling_requests: Rate | None = None


class Edition(RecordForm):
    """The term of the edition's method for another machine of the kind: half of the 95 % interval
    of one machine's figure, in logarithms. gpu: where the GPU decided. host: where the host did, or
    nobody knows. measured: what the term was measured from."""

    gpu: Annotated[float, Field(gt=0, le=10)]
    host: Annotated[float, Field(gt=0, le=10)]
    measured: Line

    @property
    def ends(self) -> tuple[float, float]:
        return self.gpu, self.host


class Method(RecordForm):
    warm_up: Time
    window: Time  # length of the longest measurement window of any load level
    # number of requests planned for load levels next to the highest rate that meets a latency goal
    enough: Count
    # starts of the server on which each load level was measured
    starts: Annotated[int, Field(ge=1, le=100)]
    quantile: Share
    # latency goals: seconds within which the first token should come
    goals: list[Time] = Field(max_length=20)
    # windows or request counts are below the full method's, so the results are less reliable
    short: bool
    # dollars per hour of the whole machine
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)] | None = None
    # the edition's method: two starts, windows of 20 s, intervals that count another machine; None:
    # another method
    edition: Edition | None = None
    # identities of the machines of all server starts, where they differ
    machines: list[Word] = Field(default=[], max_length=100)


class Interval(RecordForm):
    """A value and its 95 % interval. None: too few requests to say."""

    value: Annotated[float, Field(ge=0, le=1e9)]
    low: Annotated[float, Field(ge=0, le=1e9)] | None
    high: Annotated[float, Field(ge=0, le=1e9)] | None


class Spread(RecordForm):
    """Mean and quantiles of a time, over the window's complete requests."""

    mean: Interval
    p50: Interval
    p90: Interval
    p95: Interval
    p99: Interval


class Figures(RecordForm):
    """A load level's figures, defined in docs/metrics.md. None: unknown (nothing was streamed, or
    no request was complete)."""

    request_rate: Interval | None
    output_rate: Interval | None
    total_rate: Interval | None
    first_token: Spread | None  # time to the first token, from the intended send time
    first_token_actual: Spread | None  # time to the first token, from the actual send time
    # time between successive events of an answer, over all requests together
    inter_token: Spread | None
    # time per output token after the first: (end - first) / (output tokens - 1) of each request
    per_token: Spread | None
    end_to_end: Spread | None  # time to the end, from the intended send time
    end_to_end_actual: Spread | None


class Goal(RecordForm):
    """The share of the window's requests (failed ones included) that had their first token within
    `seconds`, with its 95 % interval."""

    seconds: Time
    share: Share
    low: Share
    high: Share
    goodput: Rate  # requests a second that met the latency goal


class ClientHealth(RecordForm):
    """The client's measurements of itself at one load level. short: the client may have been the
    bottleneck; such a load level is never ranked."""

    lag_p99: Time  # 99th percentile of the delay of the event loops' ticks
    busy: Share  # CPU share of the busiest client process
    # the client's calibrated limit over the measured load; None: not calibrated
    headroom: Annotated[float, Field(ge=0, le=1e9)] | None
    late_p99: Time  # seconds from a request's intended start until the client took it up
    short: bool


class BoardPower(RecordForm):
    """Power of the server's GPUs during the measurement window, all boards together. busy: the
    share of the time in which kernels ran, mean of the GPUs. joules_per_token: of output tokens;
    its interval is the output rate's."""

    watts: Annotated[float, Field(ge=0, le=1e7)]
    busy: Share
    joules_per_token: Interval | None
    readings: Count


class Sample(RecordForm):
    """Times of requests drawn evenly from the window; entry i of all columns is the same request. A
    failed request has end_to_end -1."""

    first: list[Annotated[float, Field(ge=-1, le=1e6)]] = Field(max_length=SAMPLE_ROWS)
    per_token: list[Annotated[float, Field(ge=-1, le=1e6)]] = Field(max_length=SAMPLE_ROWS)
    end_to_end: list[Annotated[float, Field(ge=-1, le=1e6)]] = Field(max_length=SAMPLE_ROWS)


class Point(RecordForm):
    """One measured load level. Kinds: saturation: all requests at once. single: one at a time.
    open: Poisson arrivals at `rate`. closed: `concurrency` requests in flight."""

    name: Word
    kind: Literal["saturation", "single", "open", "closed"]
    rate: Rate | None = None  # planned requests a second; figures.sustained gives the offered rate
    concurrency: Count | None = None
    seconds: Time  # length of the measurement window, summed over server starts
    # seconds after which the window opened in each server start; None: it runs from the first
    # send to the last end
    opens: Time | None = None
    # number of independent requests that carry as much information as the measured ones
    effective: Annotated[float, Field(ge=0, le=1e12)] | None = None
    requests: Count  # requests sent in the window
    complete: Count
    outcomes: dict[Word, Count]  # outcome -> number of incomplete requests
    output_tokens: Count  # output tokens of the complete requests
    prompt_tokens: Count
    cached_tokens: Count
    figures: Figures
    goals: list[Goal] = Field(max_length=20)
    client: ClientHealth
    board: BoardPower | None = None  # None: power was not measured
    # accepted tokens of a draft, mean of all steps that had one; None: nothing was drafted
    accepted_drafts: Annotated[float, Field(ge=0, le=1e6)] | None = None
    # reasons to read the load level with care: "cached prompts", "few requests", ...
    marks: list[Line] = Field(max_length=50)
    sample: Sample


class PointFailure(RecordForm):
    """A load level that could not be measured. point: its name; None: no load level could be
    measured. The kind "context too short": requests were refused for their length, or cut at the
    server's limit.
    """

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


class Answers(RecordForm):
    """How rightly the engine answers: its top-20 logprobs against those of transformers in
    float32, of a small checkpoint, up to the first other token of each answer. reference: checksum
    of the reference's file. flags: of the server that was asked. agree: share of all tokens that
    were the reference's. kl: mean of the prompts' mean divergences, in nats; kl_most: the greatest
    of a position. wrong: kl is above WRONG_KL, so that the record is ranked last."""

    model: Word
    reference: Hash
    engine: Word  # name and version
    flags: list[Line] = Field(max_length=200)
    prompts: Annotated[int, Field(ge=1, le=10**6)]
    positions: Annotated[int, Field(ge=1, le=10**9)]
    agree: Share
    kl: Annotated[float, Field(ge=0, le=1e6)]
    kl_most: Annotated[float, Field(ge=0, le=1e6)]
    wrong: bool


class Raw(RecordForm):
    """The Parquet file (see samples.py) from which every number was derived."""

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
    answers: Answers | None = None  # None: nobody compared its answers
