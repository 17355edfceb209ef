"""KV in eight bits by the Triton column in its interpreter, float32 beside it; a GPU test sweeps
it."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases_kv as cases

pytestmark = pytest.mark.torch

CPU, F32 = "cpu", torch.float32
STEPS = ("rows alone", "one row, split", "groups and chunks", "ratio 7, width 80", "window 20")


@pytest.mark.parametrize("name", STEPS)
def test_attention(name, eight):
    cases.check_attention(CPU, F32, name, eight)


def test_a_prefix_in_parts():
    cases.check_attention(CPU, F32, "long prefixes, in parts", 2)


@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 80)], ids=str)
def test_store(shape, eight):
    cases.check_store(CPU, F32, 5, shape, eight)


def test_one_row(eight, monkeypatch):
    monkeypatch.setattr(cases.one_row_attention, "PARTS", 2)  # each is run, used or not
    cases.check_one_row(CPU, F32, (4, 2, 16), eight, (3, 150))
    cases.check_one_row(CPU, F32, (3, 1, 24), eight, (70,))


def test_one_row_of_plain_kv(monkeypatch):
    monkeypatch.setattr(cases.one_row_attention, "PARTS", 2)
    cases.check_one_row(CPU, F32, (4, 2, 16), 0, (3, 150))


def test_copies(eight):
    assert torch.equal(*cases.copied(CPU, eight))


@pytest.mark.parametrize("eight", [0, 1, 2])
@pytest.mark.parametrize("width", [64, 80])
def test_gemma4_store(eight, width):
    cases.check_gemma4_store(CPU, F32, eight, width)


@pytest.mark.parametrize("eight", [0, 1, 2])
@pytest.mark.parametrize("column", ["triton", "reference"])
def test_blocks_apart(eight, column):
    cases.check_apart(CPU, F32, cases.column_of(column), eight)


@pytest.mark.parametrize("eight", [0, 1, 2])
def test_one_row_of_blocks_apart(eight, monkeypatch):
    monkeypatch.setattr(cases.one_row_attention, "PARTS", 2)
    cases.check_one_row_apart(CPU, F32, (4, 2, 16), eight)
