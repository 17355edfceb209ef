"""The row table: the numbers a device keeps per row. A row is one sequence in the running batch;
each of its numbers is declared here once.

From the table follow the data sent with a joining row (`schedule.step.JOIN_RECORD`), the device's
arrays (`kernels.row_state`), the offset of each field for kernels, and the ranges in which the API
and generation_config.json must be. A new sampling parameter needs a field of SamplingParams, a line
here, and a kernel that reads it. Knows numbers alone; stdlib only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_STOP_IDS = 8  # stop ids a row keeps on the device; the host checks further ones
# ids of a bad word, padded in front with -1; a row compares one token fewer with its latest tokens
BAD_WORD_IDS = 16

# most drafts of a row in a step, forced by a grammar or guessed, unless speculative_config asks for
# more; each one makes the kernels that update rows load more
MAX_DRAFTS = 4
MOST_SPECULATIVE_TOKENS = 8  # most drafts where speculative_config asks for more

# Bits of `wants`: the sampling options of a row beyond temperature. A step has the OR of its rows'
# bits.
WANTS_FILTER = 1  # top_k, top_p or min_p filter the tokens
WANTS_PENALTY = 2  # a repetition, presence or frequency penalty changes logits
WANTS_BIAS = 4  # logit_bias changes logits
WANTS_MIN_TOKENS = 8  # end and stop ids are barred while length + 1 < min_length
WANTS_LOGPROBS = 16  # logprobs of the chosen token (and of the top k where logprobs > 0)
WANTS_MASK = 32  # a row with a mask slot draws only tokens whose bit is set in it
# bad_words: a bad word's last id is barred when the row's latest tokens are the ids before it
WANTS_WORDS = 64
# logprobs of given token ids instead of the most likely; the ids lie after the bad words
WANTS_LABELS = 128
# bits of the options that change the model's logits
WANTS_ADJUST = WANTS_PENALTY | WANTS_BIAS | WANTS_MIN_TOKENS | WANTS_MASK | WANTS_WORDS
WANTS_ANY = WANTS_FILTER | WANTS_ADJUST | WANTS_LOGPROBS | WANTS_LABELS


class Range(NamedTuple):
    """The range of a number: `low` to `high`, both included unless open_low excludes `low`."""

    low: float
    high: float
    open_low: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the row table.

    kind: numpy's short name of its dtype. dead: its value in an unused row. param: the field of
    SamplingParams that it copies. range: the allowed range of that field. width: number of values
    per row. wants: bit of `wants` that a row has whose value differs from `dead`.
    """

    name: str
    kind: Literal["i4", "f4", "i8"]
    dead: int = 0
    param: str | None = None
    range: Range | None = None
    width: int = 1
    wants: int = 0

    @property
    def words(self) -> int:
        """Returns the column's width in 32-bit words per row."""
        return self.width * (2 if self.kind == "i8" else 1)


# Within these ranges a row's logits stay finite in float32, in which tokens are drawn. (A logit of
# 35 divided by a temperature of 1e-37 would be infinite; below 1e-38 float32 loses precision.)
FIELDS = (
    Field("last_token", "i4"),  # the token at position `length`; its K and V are not stored yet
    Field("length", "i4"),  # tokens whose K and V are stored
    Field("done", "i4", dead=1),
    # prompt_length + max_tokens: the row is done once the token at position limit - 1 is drawn
    Field("limit", "i4"),
    Field("prompt_length", "i4"),  # number of prompt tokens; output begins at this position
    Field("min_length", "i4"),  # prompt_length + min_tokens: end and stop ids are barred before
    Field("sample", "i4"),  # index within the request; enters the random number counter
    Field("seed", "i8"),
    # 0 is greedy; values below 1e-6 count as 1e-6
    Field("temperature", "f4", param="temperature", range=Range(0.0, 100.0)),
    # a value that is 0 in float32 keeps the most likely token
    Field("top_p", "f4", 1, "top_p", Range(0.0, 1.0, open_low=True), wants=WANTS_FILTER),
    Field("top_k", "i4"),  # 0: no top_k
    Field("min_p", "f4", 0, "min_p", Range(0.0, 1.0), wants=WANTS_FILTER),
    Field("repetition", "f4", 1, "repetition_penalty", Range(1e-6, 100.0), wants=WANTS_PENALTY),
    Field("presence", "f4", 0, "presence_penalty", Range(-2.0, 2.0), wants=WANTS_PENALTY),
    Field("frequency", "f4", 0, "frequency_penalty", Range(-2.0, 2.0), wants=WANTS_PENALTY),
    Field("ignore_eos", "i4", 0, "ignore_eos"),
    Field("wants", "i4"),  # OR of the row's WANTS_* bits
    # -1: none; 0: the chosen token's; k: also the k most likely tokens'
    Field("logprobs", "i4", dead=-1),
    Field("bias_start", "i4"),  # start of the row's logit_bias in the device's pool
    Field("bias_count", "i4"),
    # number of bad words. In the pool they lie after the row's biases, BAD_WORD_IDS ids each, and
    # before logprob_token_ids
    Field("word_count", "i4"),
    Field("stop_ids", "i4", dead=-1, width=MAX_STOP_IDS),  # token ids that end the sample; -1: none
    Field("tag", "i4"),  # the request's tag, for models that read tags
    # slot of the texts of its request's ended samples (RowState.texts); -1: none
    Field("text_slot", "i4", dead=-1),
    # index into the device's pool of token masks; -1: any token is allowed
    Field("mask_slot", "i4", dead=-1),
)
RANGES = {
    field.param: field.range
    for field in FIELDS
    if field.param is not None and field.range is not None
}
RANGES["logit_bias"] = Range(-100.0, 100.0)

# 32-bit words of a joining row: its number, then the fields in order; its block table follows.
JOIN_WORDS = 1 + sum(field.words for field in FIELDS)
FIRST_WORD = {field.name: 1 + sum(f.words for f in FIELDS[:at]) for at, field in enumerate(FIELDS)}
