"""The Triton column (attention aside) in Triton's interpreter, in float32, in small cases; the GPU
tests sweep it."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases as cases
from sampler_oracle import asked

from penstock.kernels.reference.elementwise import activation as plain_activation
from penstock.kernels.triton.elementwise import activation as triton_activation
from penstock.kernels.triton.linear.linear_small import Cut

pytestmark = pytest.mark.torch

CPU, F32 = "cpu", torch.float32


def test_norms():
    for rows, width in ((1, 7), (3, 64), (5, 100)):
        cases.check_norms(CPU, F32, rows, width)
        cases.check_joined_norms(CPU, F32, rows, width)


def test_gate_and_table():
    for rows, width in ((1, 5), (3, 64)):
        cases.check_gate_and_table(CPU, F32, rows, width)


def test_the_gate_inside_its_product(monkeypatch):
    cases.check_linear_gated(CPU, F32, 130, 136, 72)
    for name, few in (
        ("_ROWS", 16),
        ("_OUTPUTS", 16),
        ("_BAND", 2),
    ):  # many tiles, in bands that are not full
        monkeypatch.setattr(cases.linear_gated, name, few)
    cases.check_linear_gated(CPU, F32, 90, 56, 136)


@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 80), (2, 2, 32)], ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("turned_first", [False, True])
def test_rotary(shape, norms, turned_first):
    cases.check_rotary(CPU, F32, 5, *shape, norms, turned_first)


@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 24)], ids=str)
def test_one_row(shape, monkeypatch):
    for name, programs in (("QKV_PROGRAMS", 9), ("GATE_PROGRAMS", 7)):
        monkeypatch.setattr(cases.one_row, name, programs)
    cases.check_one_row_gate(CPU, F32, 40, 24)
    cases.check_one_row_qkv(CPU, F32, shape, 40)


def test_attention_of_one_row(monkeypatch):
    cases.check_one_row_attention(CPU, F32, (4, 2, 16), (0, 70, 300), None)
    monkeypatch.setattr(cases.one_row_attention, "PARTS", 2)  # several tiles a part
    cases.check_one_row_attention(CPU, F32, (3, 1, 24), (5, 300), None)
    cases.check_one_row_attention(CPU, F32, (3, 1, 24), (30, 300), 100)


def test_copies():
    cases.check_blocks(CPU, F32)


def test_rows():
    cases.check_prepare_and_advance(CPU, 20)
    cases.check_join_and_grow(CPU)
    cases.check_take_drafts(CPU, 70)


@pytest.mark.parametrize("drafts, texts", [(4, 0), (7, 6)])
def test_ngrams(monkeypatch, drafts, texts):
    monkeypatch.setattr(cases.step_ngrams, "_BLOCK", 32)  # several tiles a row
    cases.check_draft_ngrams(CPU, 20, drafts, texts)


def test_noise():
    cases.check_noise(CPU, 128 * 8)


@pytest.mark.parametrize("vocabulary", [1, 700])
def test_tokens_of_all_kinds_of_rows(vocabulary):
    logits = cases.drawn(16, vocabulary, seed=2, by=2.0)
    logits[8:] = logits[8:].bfloat16().float()  # equal logits
    assert cases.check_sample(CPU, logits, cases.mixed(16)) == 0


def test_the_ends_of_what_may_be_asked():
    assert cases.check_sample(CPU, cases.drawn(7, 130, seed=2, by=3.0), cases.extremes(11)) == 0
    cases.check_adjust(CPU, F32, 12, 300, 3, ends=True)


def test_flat_rows_that_miss_all_attempts():
    inputs = asked(4, temperature=0.9, seed=5, top_k=1)
    inputs.top_p, inputs.min_p = torch.tensor([0.1, 1, 1, 0.5]), torch.tensor([0, 0, 0.9, 0])
    inputs.top_k = torch.tensor([0, 5, 0, 9]).int()
    assert cases.check_sample(CPU, cases.drawn(4, 300, seed=3, by=0.2), inputs) == 0


def test_bad_logits():
    logits = cases.drawn(8, 300, seed=5)
    logits[1, 299], logits[2, 0], logits[3], logits[4, 130:] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    cases.check_sample(CPU, logits, cases.mixed(8))
    logits = torch.tensor([3e38, -3e38, 3e38, 1.0]).expand(8, -1).contiguous()
    cases.check_sample(CPU, logits, asked(8, temperature=1e-7, top_p=0.9))


def test_logprobs():
    cases.check_logprobs(CPU, F32, 6, 300, 3)
    cases.check_logprobs(CPU, F32, 2, 5, 9)


def test_adjust():
    cases.check_adjust(CPU, F32, 12, 300, 3)


@pytest.mark.parametrize("cut", [Cut(16, 32, 1, 4, 2), Cut(16, 32, 3, 4, 2)], ids=str)
def test_small_products(cut):
    cases.check_linear(CPU, F32, 3, 40, 80, cut, bias=True)
    cases.check_linear(CPU, F32, 1, 33, 70, cut, bias=True)


def test_an_answer_is_opened_by_a_gate_whose_rows_stand_apart() -> None:
    draw = torch.Generator().manual_seed(4)
    x, beside = torch.randn(5, 40, generator=draw), torch.randn(5, 100, generator=draw)
    opened = triton_activation.sigmoid_mul(x, beside[:, 60:])
    assert isinstance(opened, torch.Tensor)
    torch.testing.assert_close(opened, x * beside[:, 60:].sigmoid(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        opened, plain_activation.sigmoid_mul(x, beside[:, 60:]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("width", [60, 256])
@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_experts_answer_is_added_as_the_reference_adds_it(width: int, gated: bool) -> None:
    out, made, x = (torch.randn(5, width) for _ in range(3))
    gate = torch.randn(1, width) if gated else None
    want = plain_activation.add_opened(out.clone(), made, x, gate, 2.5)
    got = triton_activation.add_opened(out, made, x, gate, 2.5)
    assert got is out
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_relu_squared():
    x = cases.drawn(5, 60)
    for column in (plain_activation, triton_activation):
        torch.testing.assert_close(
            column.relu2(x).double(), x.double().clamp(min=0).square(), rtol=1e-5, atol=1e-6
        )
        eight = column.relu2(x, "eight")
        worth = eight.numbers.double() * eight.scale
        assert (worth - x.double().clamp(min=0).square()).abs().max() < 0.07 * x.square().max()
