"""KV in eight bits, in plain torch: attention against fp64 of the stored numbers, what is stored,
copies, forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import SMALL
from kernels_naive import (
    assert_close,
    attend,
    in_form,
    make_case,
    rotate,
    rounded,
    stored_in,
    worth,
)

from penstock.kernels.choose import choose, choose_rows
from penstock.kernels.layer_kv import KvForm, LayerKv, take_blocks

pytestmark = pytest.mark.torch

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("name", SMALL)
def test_attention_of_what_is_stored(name, dtype, eight):
    told, window = SMALL[name]
    case = make_case(**told, dtype=dtype)
    kv = stored_in(case.kv, eight)
    got = attend(choose(CPU, dtype), case.q, kv, case.inputs, case.scale, window)
    assert_close(got, replace(case, kv=worth(kv)).naive(window))


def test_rows_alone_grouped_chunked_read_the_same(dtype, eight):
    """A row's answer moves by rounding alone with who is attended beside it, and a chunk's with how
    it is cut."""
    ops = choose(CPU, dtype)
    case = make_case([40, 41, 70, 9], groups=[(2, 32)], chunks=[(0, 40)], dtype=dtype)
    kv = stored_in(case.kv, eight)
    whole = attend(ops, case.q, kv, case.inputs, case.scale)
    prefill = case.inputs.prefill
    for begin, end in pairwise([0, 7, 16, 33, 40]):
        piece = make_case([], chunks=[(begin, end - begin)], dtype=dtype).inputs
        piece.prefill.block_table = prefill.block_table
        got = attend(ops, case.q[4 + begin : 4 + end], kv, piece, case.scale)
        assert_close(got, whole[4 + begin : 4 + end].double())
    decode = case.inputs.decode
    alone = replace(
        case.inputs,
        prefill=None,
        decode=replace(decode, groups=None, skip=torch.zeros_like(decode.skip)),
    )
    alone.decode.table[:2, :2] = decode.groups.blocks[0, :2]
    assert_close(attend(ops, case.q[:4], kv, alone, case.scale), whole[:4].double())


@pytest.mark.parametrize("width", [32, 80, 24])
def test_what_is_stored_is_what_plain_kv_would_hold_rounded(dtype, eight, width):
    case = make_case(
        [1, 16, 17, 40], chunks=[(5, 13)], heads=4, kv_heads=2, width=width, dtype=dtype
    )
    rng = torch.Generator().manual_seed(1)
    qkv = (torch.randn(len(case.positions), 8 * width, generator=rng) * 3).to(dtype)
    qkv[0, 4 * width :: 7] = 100.0  # past what a scale's 448 holds
    table = torch.randn(64, 2, width // 2, generator=rng)
    plain, made = torch.zeros_like(case.kv), in_form(case.kv, eight, dtype)
    q = rotate(choose(CPU, dtype), qkv.clone(), table, case.inputs, plain, 4, 2, width)
    assert torch.equal(rotate(choose(CPU, dtype), qkv, table, case.inputs, made, 4, 2, width), q)
    values = rounded(plain[:, :, 1], made.scales[1, :, None, None])
    keys = rounded(plain[:, :, 0], made.scales[0, :, None, None]) if eight == 2 else plain[:, :, 0]
    held = take_blocks(made.values, torch.arange(len(case.kv)))
    assert torch.equal(held.float(), values.float()) and torch.equal(
        made.keys.float(), keys.float()
    )
    assert float(made.values.float().abs().max()) == 448.0


def test_numbers_that_are_none_stay_none(eight):
    case = make_case([5], width=32)
    qkv = torch.full((1, 8 * 32), torch.nan)
    made = in_form(case.kv, eight, torch.float32)
    rotate(choose(CPU, torch.float32), qkv, torch.zeros(9, 2, 16), case.inputs, made, 4, 2, 32)
    block, offset = divmod(int(case.inputs.slots[0]), 16)
    held = take_blocks(made.values, torch.tensor([block]))
    assert (
        held[0, :, offset].float().isnan().all()
        and made.keys[block, :, offset].float().isnan().all()
    )


def test_bfloat16_keys_and_values_under_a_wider_model():
    case = make_case(**SMALL["groups and chunks"][0])
    form = KvForm(2, 64, torch.bfloat16, torch.bfloat16)
    kv = form.over(torch.zeros(len(case.kv), 2, form.head_bytes, dtype=torch.uint8))
    kv.storage.copy_(case.kv.bfloat16().flatten(2).view(torch.uint8))
    got = attend(choose(CPU, torch.float32), case.q, kv, case.inputs, case.scale)
    assert_close(got, replace(case, kv=worth(kv)).naive())


def test_blocks_are_copied_whole(eight):
    kv = stored_in(make_case([90]).kv, eight)
    before = kv.storage.clone()
    copier = choose_rows(choose(CPU, torch.float32)).block_copier([kv.storage])
    copier.copy(torch.tensor([2, -1]), torch.tensor([4, 1]))
    before[4] = before[2]
    assert torch.equal(kv.storage, before) and torch.equal(kv.keys[4].float(), kv.keys[2].float())


def test_worth_is_what_numbers_and_scales_come_to(dtype, eight):
    kv = stored_in(make_case([90], dtype=dtype).kv, eight)
    index = torch.tensor([3, 1])
    assert_close(kv.worth(index), worth(kv)[index])


def test_forms():
    scales = torch.ones(2, 3)
    assert (
        KvForm(3, 8, E4M3, E4M3, scales).block_bytes * 2
        == KvForm(3, 8, torch.bfloat16, torch.bfloat16).block_bytes
    )
    assert [KvForm(3, 8, k, E4M3, scales).eight for k in (torch.float16, E4M3)] == [1, 2]
    for keys, values, given in [
        (E4M3, torch.bfloat16, scales),
        (E4M3, E4M3, None),
        (torch.bfloat16, torch.bfloat16, scales),
        (torch.float32, torch.bfloat16, None),
    ]:
        with pytest.raises(ValueError, match="scales"):
            KvForm(3, 8, keys, values, given)
    assert LayerKv.plain(torch.zeros(2, 3, 2, 16, 8)).eight == 0
