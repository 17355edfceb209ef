"""RowColumns: the device columns that the kernels index by row id. execute's DeviceRows is one; it knows no kernel."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

NO_TOKEN = -1  # as schedule.step's: the row was done before the step, or is padding

# Bits of `wants`, as schedule.step's.
WANTS_PENALTY, WANTS_BIAS, WANTS_MIN_TOKENS = 2, 4, 8
ADJUSTS = WANTS_PENALTY | WANTS_BIAS | WANTS_MIN_TOKENS


class RowColumns(Protocol):
    """One entry a row, and one dead row (done) behind the last that padding points at."""

    last_token: Tensor  # [rows] int32
    length: Tensor  # [rows] int32, tokens stored
    done: Tensor  # [rows] bool
    limit: Tensor  # [rows] int32
    prompt_length: Tensor  # [rows] int32
    min_length: Tensor  # [rows] int32
    sample: Tensor  # [rows] int32
    seed: Tensor  # [rows] int64
    temperature: Tensor  # [rows] float32
    top_p: Tensor  # [rows] float32
    top_k: Tensor  # [rows] int32
    min_p: Tensor  # [rows] float32
    repetition: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32
    frequency: Tensor  # [rows] float32
    ignore_eos: Tensor  # [rows] bool
    stop_ids: Tensor  # [rows, 8] int32, -1 is none
    block_table: Tensor  # [rows, width] int32
    is_end: Tensor  # [vocabulary] bool
    wants: Tensor  # [rows] int32: schedule.step's WANTS_* bits
    logprobs: Tensor  # [rows] int32: -1 none, 0 the chosen token's, k the k most likely too
    bias_start: Tensor  # [rows] int32: where the row's logit_bias lies in a pool of ids and values
    bias_count: Tensor  # [rows] int32
