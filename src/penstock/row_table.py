"""The row table: what a device knows of a live row, each fact declared once.

From it come what a joining row carries (`schedule.step.JOIN_RECORD`), the device's columns
(`kernels.row_state`), where a kernel finds each, and the ranges that the API and a
generation_config are held to. A new sampling number is a field of SamplingParams, a line here, and
a kernel that reads it. It knows numbers alone; stdlib only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_STOP_IDS = 8  # stop ids a row keeps on the device; further ones are looked at by the host
BAD_WORD_IDS = 16  # ids of a bad word, padded in front with -1: a row looks back for one less

# tokens that a row may be offered ahead of a step; each costs the rows' bookkeeping masked loads
MAX_DRAFTS = 4

# Bits of `wants`: what a row asks of the sampler beyond temperature. A step carries the OR of its
# rows' bits.
WANTS_FILTER = 1  # top_k, top_p or min_p
WANTS_PENALTY = 2  # repetition, presence or frequency penalty
WANTS_BIAS = 4  # logit_bias
WANTS_MIN_TOKENS = 8  # end and stop ids are barred while length + 1 < min_length
WANTS_LOGPROBS = 16  # logprobs of the chosen token (and of the top k where logprobs > 0)
WANTS_MASK = 32  # only tokens whose bit is set in the row's mask slot may come, where it has one
WANTS_WORDS = (
    64  # bad_words: the last id of each is barred where the row's latest ones are those before it
)
WANTS_LABELS = (
    128  # logprobs of ids that it names, in place of the most likely; they lie behind its bad words
)
# Other logits than the model's.
WANTS_ADJUST = WANTS_PENALTY | WANTS_BIAS | WANTS_MIN_TOKENS | WANTS_MASK | WANTS_WORDS
WANTS_ANY = WANTS_FILTER | WANTS_ADJUST | WANTS_LOGPROBS | WANTS_LABELS


class Range(NamedTuple):
    """What a number may be: `low` to `high`, both among them but for an open low end."""

    low: float
    high: float
    open_low: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """A column of rows. kind: numpy's short name of its dtype.   dead: what a row that nobody uses
    holds.

    param: the field of SamplingParams that it holds, as it is.   range: what that may be.   width:
    numbers a row.
    """

    name: str
    kind: Literal["i4", "f4", "i8"]
    dead: int = 0
    param: str | None = None
    range: Range | None = None
    width: int = 1

    @property
    def words(self) -> int:
        """32-bit words a row."""
        return self.width * (2 if self.kind == "i8" else 1)


# Ranges leave a row's logits finite in float32, in which rows are drawn. There 1e-38 is no normal
# number any more, and a logit of 35 divided by 1e-37 is infinite.
FIELDS = (
    Field("last_token", "i4"),  # the token at position `length`, not stored yet
    Field("length", "i4"),  # tokens whose K and V are stored
    Field("done", "i4", dead=1),
    Field(
        "limit", "i4"
    ),  # prompt_length + max_tokens: done once the token of position limit - 1 is drawn
    Field("prompt_length", "i4"),  # a token at a position from here on is output
    Field("min_length", "i4"),  # prompt_length + min_tokens
    Field("sample", "i4"),  # index within the request: part of the noise's counter
    Field("seed", "i8"),
    Field(
        "temperature", "f4", param="temperature", range=Range(0.0, 100.0)
    ),  # 0 is greedy; below 1e-6 drawn at 1e-6
    Field(
        "top_p", "f4", 1, "top_p", Range(0.0, 1.0, open_low=True)
    ),  # float32's 0 keeps the most likely token
    Field("top_k", "i4"),  # 0 is off
    Field("min_p", "f4", 0, "min_p", Range(0.0, 1.0)),
    Field("repetition", "f4", 1, "repetition_penalty", Range(1e-6, 100.0)),
    Field("presence", "f4", 0, "presence_penalty", Range(-2.0, 2.0)),
    Field("frequency", "f4", 0, "frequency_penalty", Range(-2.0, 2.0)),
    Field("ignore_eos", "i4", 0, "ignore_eos"),
    Field("wants", "i4"),  # WANTS_* bits
    Field("logprobs", "i4", dead=-1),  # -1: none; 0: the chosen token's; k: the k most likely too
    Field("bias_start", "i4"),  # where the row's logit_bias lies in the device's pool
    Field("bias_count", "i4"),
    Field(
        "word_count", "i4"
    ),  # its bad words lie behind its biases, BAD_WORD_IDS ids each; then ids it asks of
    Field("stop_ids", "i4", dead=-1, width=MAX_STOP_IDS),  # -1 is none
    Field("tag", "i4"),  # of its request, for models that read tags
    Field(
        "mask_slot", "i4", dead=-1
    ),  # of the device's pool of token masks; -1: any token may come
)
RANGES = {
    field.param: field.range
    for field in FIELDS
    if field.param is not None and field.range is not None
}
RANGES["logit_bias"] = Range(-100.0, 100.0)

# A joining row in 32-bit words: its number, then the fields in their order; its block table
# follows.
JOIN_WORDS = 1 + sum(field.words for field in FIELDS)
FIRST_WORD = {field.name: 1 + sum(f.words for f in FIELDS[:at]) for at, field in enumerate(FIELDS)}
