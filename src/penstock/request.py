"""The types of requests and results. Requests are Request and SamplingParams, results Delta and
RequestOutput; all rooms share them.

Names and defaults are vLLM's and OpenAI's, so that a user's code moves over unchanged. Knows no
engine and no tokenizer: ids are plain ints. Stdlib only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any, Literal

from penstock.errors import UsageError
from penstock.request_checks import check_real, check_whole, read_bias, wrong
from penstock.row_table import RANGES
from penstock.vllm_arguments.sift import takes_vllms

# numerical_error: the logits were not finite; error: the engine refused the request. Both come with
# a message.
FinishReason = Literal["stop", "length", "abort", "numerical_error", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "numerical_error", "error")

# most stop strings of a request, since the host searches each text for all of them
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2_048  # most characters of a request's stop strings together
MAX_LOGPROBS = 20  # the same as vLLM's default max_logprobs and OpenAI's top_logprobs
NO_VOCABULARY = (
    f"logprobs of -1, the whole vocabulary, are not served: 0 to {MAX_LOGPROBS}, or"
    " logprob_token_ids"
)
MAX_SAMPLES = 65_536
MAX_GRAMMAR = 262_144  # characters of a schema, a regex, a grammar, or all choices together
MAX_SEED = 2**63 - 1
MAX_SALT, MAX_TAG = 2**62 - 1, 2**31 - 1
FIRST_WEIGHTS = "default"  # the version name of the weights loaded at start
# sample index in a cancellation: ends all samples that have not ended, and sends their output so
# far
REST = -1
# integer fields of SamplingParams -> lowest and highest value; None: no limit
WHOLE: dict[str, tuple[int, int | None]] = {
    "n": (1, MAX_SAMPLES),
    "min_tokens": (0, None),
    "max_tokens": (1, None),
    "top_k": (-1, None),
    "seed": (-(2**63), MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
# fields that each set one kind of structured output
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """The schema or grammar that each answer must follow. Exactly one of the six kinds is set
    (json, regex, choice, grammar, json_object, structural_tag), or none if `around` is set. Values
    are checked here; a grammar that is not supported is found when it is compiled.

    json: a JSON Schema, kept as text. regex: a regex that the whole text matches.
    choice: a list of texts; the answer is one of them. grammar: a grammar in Lark or GBNF.
    json_object: any JSON object.
    structural_tag: free text with tags whose contents follow schemas (format: text.structural_tag).
    lenient: True: unknown parts of a schema are ignored, and oneOf counts as anyOf; False: such a
        schema is refused.
    disable_any_whitespace: JSON has no white space between its parts.
    whitespace_pattern: a regex of the white space allowed between JSON's parts.
    around: a Lark grammar of the whole answer; @form in it stands for the kind that is set.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    lenient: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    around: str | None = None

    def __post_init__(self) -> None:
        if self.kinds != 1 and not (self.around is not None and self.kinds == 0):
            raise _form(f"structured_outputs takes exactly one of {', '.join(_KINDS)}")
        for name in ("json", "structural_tag"):
            if isinstance(getattr(self, name), dict):
                setattr(self, name, _json_text(name, getattr(self, name)))
        for name in ("json", "regex", "grammar", "whitespace_pattern", "structural_tag", "around"):
            if not isinstance(getattr(self, name), (str, NoneType)):
                raise _form(f"structured_outputs.{name} must be text")
        for name in ("lenient", "disable_any_whitespace", "json_object"):
            if not isinstance(getattr(self, name), (bool, NoneType)):
                raise _form(f"structured_outputs.{name} must be true or false")
        choice = self.choice
        texts = isinstance(choice, (list, tuple)) and all(
            isinstance(text, str) and text for text in choice
        )
        if choice is not None and not (choice and texts):
            raise _form(
                "structured_outputs.choice must be a list of at least one text, none of them empty"
            )
        if self.size > MAX_GRAMMAR:
            raise _form(
                f"structured_outputs holds at most {MAX_GRAMMAR:,} characters: send a smaller form"
            )

    @property
    def kinds(self) -> int:
        """Returns how many of the six kinds are set."""
        return sum(getattr(self, name) not in (None, False) for name in _KINDS)

    @property
    def size(self) -> int:
        """Returns the number of characters of all texts together."""
        texts = [
            self.json,
            self.regex,
            self.grammar,
            self.whitespace_pattern,
            self.structural_tag,
            self.around,
        ]
        return sum(len(text) for text in (*texts, *(self.choice or ())) if text is not None)


def _json_text(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _form(
            f"structured_outputs.{name} holds what JSON has no word for, or is nested too deep"
        ) from error


def _form(rule: str) -> UsageError:
    return UsageError(rule, param="structured_outputs", rule=rule)


@dataclass(slots=True, kw_only=True)
class StopWhen:
    """Ends a request of n samples early: once `agree` samples have ended with the same answer. With
    agree = 1 the first sample that has an answer ends it. The remaining samples end with
    finish_reason `abort` and stop_reason `stop_when`.

    pattern: a regex that is searched for in each ended sample's text. The answer is the first group
        of the first match, or the whole match without a group; a sample without a match has none.
    """

    pattern: str
    agree: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not 0 < len(self.pattern) <= MAX_STOP_CHARACTERS:
            rule = f"stop_when.pattern must be a regex of 1 to {MAX_STOP_CHARACTERS:,} characters"
            raise UsageError(rule, param="stop_when", rule=rule)
        check_whole("stop_when.agree", self.agree, 1, MAX_SAMPLES, "stop_when")


class RequestOutputKind(Enum):
    """Kinds of outputs that AsyncLLM.generate yields; names and numbers are vLLM's."""

    CUMULATIVE = 0  # each output holds everything generated so far
    DELTA = 1  # each output holds what is new since the previous one
    FINAL_ONLY = 2  # one output, at the end, with everything


@takes_vllms
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Settings for drawing the n samples of one request. Checked when made; the engine reads every
    field.

    n: samples of the prompt. temperature: 0 is greedy.
    top_p, top_k (0 or -1: off), min_p: filters. They are applied after penalties and temperature,
        in the order min_p, top_k, top_p.
    repetition_penalty: above 1, tokens of prompt and output become less likely (CTRL,
        arXiv:1909.05858).
    presence_penalty, frequency_penalty: OpenAI's, over output tokens.
    logit_bias: token id -> value added to its logit.
    allowed_token_ids: only these tokens are drawn.
    min_tokens: no end id, stop id or stop string before this many output tokens.
    max_tokens: most output tokens; None: up to the context.
    stop: strings that end a sample, up to 64 with 2,048 characters together; the text is cut
        before them unless include_stop_str_in_output is set.
    bad_words: strings that are never generated: a word's last token is not drawn if the tokens
        before it were just drawn.
    stop_token_ids: ids that end a sample, beside the model's end ids (which ignore_eos turns off).
    seed: the same (seed, sample index, position) draws the same token whatever else runs; None: the
        engine chooses one.
    structured_outputs: the schema or grammar of each sample. A sample ends when its text is
        complete by the grammar, and never before.
    stop_when: ends the request once enough of its samples have the same answer; samples still being
        drawn are aborted.
    logprobs: 0 to 20 most likely tokens beside the chosen one, of the raw logits.
    prompt_logprobs: the same for the prompt.
    logprob_token_ids: these tokens beside the chosen one, instead of the most likely; logprobs is
        then their number.
    output_kind: the kind of outputs that AsyncLLM.generate yields. Everything else gives
        FINAL_ONLY, as vLLM's LLM does.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: list[str] | str | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    stop_when: StopWhen | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.logit_bias = read_bias(self.logit_bias) if self.logit_bias else None
        self.bad_words = self.bad_words or None
        self._take_labels()
        if -1 in (self.logprobs, self.prompt_logprobs):
            raise UsageError(
                NO_VOCABULARY, param="logprobs" if self.logprobs == -1 else "prompt_logprobs"
            )
        for name, bounds in WHOLE.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                check_whole(name, getattr(self, name), *bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): lower"
                " min_tokens",
                param="min_tokens",
                rule="min_tokens is above max_tokens: lower min_tokens",
            )
        for name in RANGES:
            if name != "logit_bias":
                check_real(name, getattr(self, name))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, "true or false", getattr(self, name))
        self._check_lists()
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            raise wrong("structured_outputs", "a StructuredOutputsParams", self.structured_outputs)
        if self.structured_outputs is not None and self.ignore_eos:
            raise _form("ignore_eos leaves a structured answer no end: leave one of them out")
        self._check_stop_when()
        if not isinstance(self.output_kind, RequestOutputKind):
            raise wrong("output_kind", "a RequestOutputKind", self.output_kind)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def _take_labels(self) -> None:
        ids = self.logprob_token_ids = self.logprob_token_ids or None
        if ids is None:
            return
        if (
            not isinstance(ids, (list, tuple))
            or len(ids) > MAX_LOGPROBS
            or len(ids) != len(set(map(str, ids)))
        ):
            rule = f"logprob_token_ids must be a list of 1 to {MAX_LOGPROBS} token ids, each once"
            raise UsageError(rule, param="logprob_token_ids", rule=rule)
        if self.logprobs not in (None, len(ids)):
            rule = "logprobs beside logprob_token_ids is their number: leave it out"
            raise UsageError(rule, param="logprobs", rule=rule)
        self.logprobs = len(ids)

    def _check_stop_when(self) -> None:
        if not isinstance(self.stop_when, (StopWhen, NoneType)):
            raise wrong("stop_when", "a StopWhen", self.stop_when)
        rule = None
        if self.stop_when is not None and self.stop_when.agree > self.n:
            rule = "stop_when.agree is above n: so many samples are never there to agree"
        elif self.stop_when is not None and not self.detokenize:
            rule = "stop_when needs text: leave detokenize on"
        if rule is not None:
            raise UsageError(rule, param="stop_when", rule=rule)

    def _check_lists(self) -> None:
        for token, value in (self.logit_bias or {}).items():
            if token < 0:
                rule = "logit_bias names a token below 0: ids are 0 and up"
                raise UsageError(
                    f"logit_bias names token {token}: ids are 0 and up",
                    param="logit_bias",
                    rule=rule,
                )
            check_real("logit_bias", value, f"logit_bias[{token}]")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, (list, tuple, NoneType)) or (
                name == "allowed_token_ids" and ids in ([], ())
            ):
                raise wrong(name, "a list of at least one token id", ids)
            for token in ids or ():
                check_whole(name, token, 0, 2**31 - 1)
        for name in ("stop", "bad_words"):
            if not isinstance(getattr(self, name), (list, tuple, NoneType)):
                raise wrong(name, "a list of strings", getattr(self, name))
            texts = getattr(self, name) or ()
            if any(
                not isinstance(text, str) or not (text.strip() if name == "bad_words" else text)
                for text in texts
            ):
                raise UsageError(
                    f"{name} holds an empty string or something that is no string", param=name
                )
            if len(texts) > MAX_STOPS or sum(map(len, texts)) > MAX_STOP_CHARACTERS:
                most = (
                    f"at most {MAX_STOPS} strings, of {MAX_STOP_CHARACTERS:,} characters together"
                )
                raise UsageError(f"{name} holds {most}: send fewer or shorter ones", param=name)
        if self.stop and not self.detokenize:
            raise UsageError(
                "stop strings need text: use stop_token_ids, or leave detokenize on", param="stop"
            )


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as the engine gets it, in token ids. It crosses the channel as typed msgpack.

    request_id: unique for the channel's lifetime. prompt: int32 ids as raw little-endian bytes.
    stream: if True, every token is sent as it is read; else a sample's tokens are sent once, at
        its end (or when `watch` fires).
    watch: packed bits over the vocabulary (numpy.packbits, big-endian bit order), or None. A drawn
        token whose bit is set may end a stop string, so the sample's tokens are sent at once.
    samples: the sample indices of the n to draw, when a job continues; None: all of them.
    background: runs only on capacity that other requests leave.
    tenant: a number for the sender; the waiting queue is fair between tenants.
    salt: cached blocks are shared only between requests of equal salt; 0 is a salt too.
    tag: a number given to models that read tags, with each token; cached blocks are shared only
        within one tag.
    bad_words: the token ids of sampling.bad_words, one list per word.
    """

    request_id: int
    prompt: bytes
    sampling: SamplingParams
    stream: bool = False
    watch: bytes | None = None
    samples: list[int] | None = None
    background: bool = False
    tenant: int = 0
    salt: int = 0
    tag: int = 0
    bad_words: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Logprob:
    """One token's natural log-probability under the raw logits, as in vLLM. rank counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class Delta:
    """The new output of one sample since its previous delta."""

    request_id: int
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    error: str | None = None
    error_param: str | None = None  # name of the parameter at fault, if any
    # version of the weights that generated it; None before the first update
    weights_version: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """The result of one sample, which is finished once it has a finish_reason. `token_ids` includes
    the end or stop token if there was one; `text` does not. `cumulative_logprob` is the sum over
    all tokens drawn so far.

    `logprobs` reads, compares and copies as a list; its dicts are made when they are read,
    `.columns` makes none. weights_version: the version of the weights that generated it; `default`
    for the weights loaded at start.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    weights_version: str = FIRST_WEIGHTS


@dataclass(slots=True)
class RequestOutput:
    """The result of one request, finished or so far. outputs: in the order of the sample index.
    error: why there are no outputs, else None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    error: str | None = None
