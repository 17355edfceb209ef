"""The words of floor 0, Config and SamplingParams: a wrong one is a UsageError of one line that
names it."""

from __future__ import annotations

from math import nextafter
from typing import Any

import pytest

from penstock.config import MAX_BATCHED_TOKENS, MAX_ROWS, Config
from penstock.errors import UsageError
from penstock.request import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingParams
from penstock.row_table import RANGES


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": 3}, "stop must be a list"),
        ({"stop": [1]}, "stop holds"),
        (
            {"stop": ["a"] * (MAX_STOPS + 1)},
            "stop holds at most 64 strings, of 2,048 characters together: send fewer",
        ),
        (
            {"stop": "a" * (MAX_STOP_CHARACTERS + 1)},
            "stop holds at most 64 strings, of 2,048 characters together",
        ),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
        (
            {"allowed_token_ids": []},
            "allowed_token_ids must be a list of at least one token id, not []",
        ),
        ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of at least one token id"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids must be between 0 and"),
        ({"allowed_token_ids": [3.0]}, "allowed_token_ids must be a whole number"),
        ({"bad_words": "a"}, "bad_words must be a list of strings"),
        ({"bad_words": [" "]}, "bad_words holds an empty string"),
        ({"bad_words": [1]}, "bad_words holds an empty string or something that is no string"),
        (
            {"bad_words": ["a"] * (MAX_STOPS + 1)},
            "bad_words holds at most 64 strings, of 2,048 characters together",
        ),
        ({"logit_bias": {"a": 1}}, "logit_bias must map"),
        ({"logit_bias": {1: "a"}}, "logit_bias must map"),
    ],
)
def test_sampling_params_of_a_wrong_type(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("tokens", [15, MAX_BATCHED_TOKENS + 1, 10**12, 10**30])
def test_tokens_of_a_step_have_a_bound(tokens: int) -> None:
    """Each takes memory before the first step."""
    with pytest.raises(
        UsageError, match=f"max_num_batched_tokens must be between 16 and 1048576, not {tokens}"
    ):
        Config.of(max_num_batched_tokens=tokens)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"n": 918273}, "n must be between 1 and 65536"),
        ({"n": True}, "n must be a whole number"),
        ({"max_tokens": -918273}, "max_tokens must be at least 1"),
        (
            {"min_tokens": 918273, "max_tokens": 7},
            "min_tokens is above max_tokens: lower min_tokens",
        ),
        ({"temperature": 918273.0}, "temperature must be between 0.0 and 100.0"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"top_p": -918273.0}, "top_p must be above 0.0 and at most 1.0"),
        ({"logit_bias": {-918273: 1.0}}, "logit_bias names a token below 0: ids are 0 and up"),
        ({"logit_bias": {918273: 101.0}}, "logit_bias must be between -100.0 and 100.0"),
        ({"stop": 918273}, "stop must be a list of strings"),
        ({"stop_token_ids": [-918273]}, "stop_token_ids must be between 0 and 2147483647"),
        ({"ignore_eos": 918273}, "ignore_eos must be true or false"),
    ],
)
def test_a_rule_says_no_value_and_the_message_does(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    assert caught.value.rule == rule
    value = next(iter(fields.values()))
    given = str(next(iter(value))) if isinstance(value, dict | list) else str(value)
    assert given in str(caught.value) and given not in rule


@pytest.mark.parametrize("name", RANGES)
def test_a_number_is_taken_up_to_its_ends_and_no_further(name: str) -> None:
    def params(value: float) -> SamplingParams:
        return SamplingParams(**{name: {7: value} if name == "logit_bias" else value})

    low, high, open_low = RANGES[name]
    for value in (nextafter(low, high) if open_low else low, nextafter(high, low), high):
        assert params(value) is not None
    for value in (
        low if open_low else nextafter(low, -1e300),
        nextafter(high, 1e300),
        -1e300,
        1e300,
    ):
        with pytest.raises(UsageError, match=f"{low} and .*{high}, not ") as caught:
            params(value)
        assert caught.value.param == name


def test_a_penalty_that_no_logit_can_be_divided_by_is_refused() -> None:
    for value in (5e-324, 1e-45, 1e-38, 1e-37, 9.9e-7):
        with pytest.raises(
            UsageError, match=r"repetition_penalty must be between 1e-06 and 100\.0, not "
        ):
            SamplingParams(repetition_penalty=value)


def test_forms_of_stops_and_biases_that_are_taken() -> None:
    params = SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2), logit_bias={"7": 1})  # type: ignore[arg-type, dict-item]
    assert (params.stop_strings, params.logit_bias) == (("a", "b"), {7: 1.0})
    assert SamplingParams(stop="a").stop_strings == ("a",)
    most = ["é" * (MAX_STOP_CHARACTERS // MAX_STOPS)] * MAX_STOPS
    assert SamplingParams(stop=most).stop_strings == tuple(most)


def test_a_whole_number_is_a_number() -> None:
    with pytest.raises(
        UsageError, match=r"gpu_memory_utilization must be between 0\.05 and 0\.99, not 1"
    ):
        Config.of(gpu_memory_utilization=1)
    with pytest.raises(UsageError, match="gpu_memory_utilization must be float, not True"):
        Config.of(gpu_memory_utilization=True)


def test_rows_beyond_any_machine_are_refused_before_they_take_its_memory() -> None:
    assert Config.of(max_num_seqs=MAX_ROWS).batching.max_num_seqs == MAX_ROWS
    with pytest.raises(UsageError, match="max_num_seqs must be between 1 and"):
        Config.of(max_num_seqs=10**9)
