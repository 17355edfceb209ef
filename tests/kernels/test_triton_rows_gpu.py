"""The Triton column's elementwise work, rows, small products and logprobs on a GPU: awkward shapes,
against fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels_naive import rotate, stored_in

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GPU = "cuda"


@pytest.fixture
def cases():
    import triton_kernel_cases

    return triton_kernel_cases


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("width", [7, 64, 896, 2048, 4096, 8192])
def test_norms(cases, dtype, width):
    for rows in (1, 3, 64, 257, 1030):
        cases.check_norms(GPU, dtype, rows, width)
        cases.check_joined_norms(GPU, dtype, rows, width)


@pytest.mark.parametrize("width", [5, 64, 897, 4864, 14336])
def test_gate_and_table(cases, dtype, width):
    for rows in (1, 3, 517):
        cases.check_gate_and_table(GPU, dtype, rows, width)


@pytest.mark.parametrize("width, k", [(8, 8), (128, 64), (1000, 200), (4864, 896), (14336, 4096)])
@pytest.mark.parametrize("kind", DTYPES[:2], ids=str)
def test_the_gate_inside_its_product(cases, kind, width, k):
    for rows in (1, 128, 1030):
        cases.check_linear_gated(GPU, kind, rows, width, k)


@pytest.mark.parametrize(
    "shape", [(32, 8, 64), (14, 2, 64), (4, 1, 256), (28, 4, 128), (3, 3, 80), (2, 2, 96)], ids=str
)
@pytest.mark.parametrize("norms", [False, True])
def test_rotary(cases, dtype, shape, norms):
    for tokens in (1, 17, 400):
        cases.check_rotary(GPU, dtype, tokens, *shape, norms)
        cases.check_rotary(GPU, dtype, tokens, *shape, norms, turned_first=True)


@pytest.mark.parametrize(
    "shape, d, inner, kind",
    [
        ((32, 8, 64), 2048, 8192, torch.bfloat16),
        ((14, 2, 64), 896, 4864, torch.float16),
        ((4, 1, 256), 640, 2048, torch.bfloat16),
        ((32, 8, 128), 4096, 14336, torch.bfloat16),
        ((3, 3, 80), 240, 500, torch.bfloat16),
    ],
    ids=str,
)
def test_one_row(cases, shape, d, inner, kind):
    cases.check_one_row_gate(GPU, kind, d, inner)
    cases.check_one_row_qkv(GPU, kind, shape, d)
    for window in (
        (None, 100) if shape[2] in (64, 80) else (None,)
    ):  # each is a second or two of compiling
        cases.check_one_row_attention(GPU, kind, shape, (0, 15, 63, 64, 257, 1023, 4000), window)


def test_no_rows_are_no_launch():
    from types import SimpleNamespace

    from penstock.kernels.triton.attention import rotary_and_store as rotary
    from penstock.kernels.triton.elementwise import activation, embedding, norm
    from penstock.kernels.triton.sampling import sample

    none = torch.zeros(0, 64, device=GPU, dtype=torch.bfloat16)
    weight = torch.ones(64, device=GPU, dtype=torch.bfloat16)
    assert norm.add_rms_norm(none, none, weight, 1e-5)[0].shape == (0, 64)
    assert activation.silu_mul(none).shape == (0, 32)
    assert embedding.embed(torch.zeros(0, dtype=torch.int64, device=GPU), weight[None]).shape == (
        0,
        64,
    )
    where = SimpleNamespace(positions=weight[:0].long(), slots=weight[:0].long())
    kv = torch.zeros(2, 1, 2, 16, 16, device=GPU, dtype=torch.bfloat16)
    assert rotate(rotary, none, torch.zeros(4, 2, 8, device=GPU), where, kv, 2, 1, 16).shape == (
        0,
        2,
        16,
    )
    assert sample.sample(none, SimpleNamespace()).shape == (0,)


def test_copies(cases, dtype):
    cases.check_blocks(GPU, dtype)


@pytest.mark.parametrize("rows", [1, 40, 700])
def test_prepare_and_advance(cases, rows):
    cases.check_prepare_and_advance(GPU, rows)


def test_join_and_grow(cases):
    cases.check_join_and_grow(GPU)
    cases.check_take_drafts(GPU, 700)
    cases.check_draft_ngrams(GPU, 300, 8)
    cases.check_draft_ngrams(GPU, 300, 4, 40)


@pytest.mark.parametrize(
    "n, k", [(96, 64), (3072, 2048), (4100, 2056), (2048, 8192), (130, 1000), (32000, 896)]
)
def test_small_products(cases, n, k):
    from penstock.kernels.triton.linear.linear_small import Cut

    for m in (1, 2, 5, 16):
        for cut in (None, Cut(16, 128, 3, 4, 3), Cut(64, 64, 1, 4, 3)):
            cases.check_linear(GPU, torch.bfloat16, m, n, k, cut, bias=m in (1, 5))


def test_a_split_product_is_the_same_each_time():
    from penstock.kernels.triton.linear.linear_small import Cut, linear_small, prepare_small

    x = torch.randn(7, 4096, device=GPU).bfloat16()
    weight = torch.randn(2048, 4096, device=GPU).bfloat16()
    small = prepare_small(weight, Cut(32, 128, 8, 4, 3))
    first = linear_small(x, small)
    for _ in range(200):
        assert torch.equal(linear_small(x, small), first)


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_of_early_starts_is_the_same_each_time(count):
    """Kernels that start before the one ahead has ended must still see all of it: hundreds of
    layers, in a graph."""
    from penstock.kernels.triton.elementwise import activation, norm
    from penstock.kernels.triton.linear import linear

    d, inner = 2048, 8192
    weights = [
        torch.randn(n, k, device=GPU).mul_(k**-0.5).bfloat16()
        for n, k in ((2 * inner, d), (d, inner), (d, d))
    ]
    up, down, out = (linear.prepare_linear(w) for w in weights)
    scale = torch.ones(d, device=GPU, dtype=torch.bfloat16)
    start = torch.randn(count, d, device=GPU).bfloat16()

    def layers(up_, down_, out_, linear_, gap) -> torch.Tensor:
        x, residual = start.clone(), start.clone()
        for _ in range(40):
            x, residual = norm.add_rms_norm(x, residual, scale, 1e-5)
            gap()
            x = linear_(out_, x)
            gap()
            x = linear_(up_, x)
            gap()
            x = activation.silu_mul(x)
            gap()
            x = linear_(down_, x)
            gap()
        return residual

    wanted = layers(up, down, out, lambda w, x: linear.linear(x, w), torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(up, down, out, lambda w, x: linear.linear(x, w), lambda: None)
    for _ in range(30):
        got.zero_()
        graph.replay()
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("eight, four", [(0, False), (1, False), (2, False), (0, True)])
def test_layers_of_one_row_are_the_same_each_time(eight, four):
    """Launches that read ahead of their wait, or let the next in early, see all of the step: layers
    in a graph."""
    from types import SimpleNamespace

    from penstock.kernels.inputs import AttentionKind
    from penstock.kernels.int_matrix import pack_four
    from penstock.kernels.triton.attention import one_row_attention
    from penstock.kernels.triton.attention import rotary_and_store as rotary
    from penstock.kernels.triton.elementwise import norm
    from penstock.kernels.triton.linear import linear, linear_groups, one_row

    def prepared(n: int, k: int) -> object:
        if not four:
            return linear.prepare_linear(torch.randn(n, k, device=GPU).mul_(k**-0.5).bfloat16())
        numbers = pack_four(torch.randint(0, 16, (n, k), dtype=torch.uint8, device=GPU))
        scale = torch.full((n, k // 128), k**-0.5 / 5, device=GPU).bfloat16()
        return linear_groups.prepare_linear_int(numbers, scale, None, torch.bfloat16)

    product = linear_groups.linear_int if four else linear.linear
    d, inner, (heads, kv_heads, width) = 2048, 8192, (32, 8, 64)
    outputs = (heads + 2 * kv_heads) * width
    qkv, out, up, down = (
        prepared(n, k) for n, k in ((outputs, d), (d, heads * width), (2 * inner, d), (d, inner))
    )
    scale, start = torch.ones(d, device=GPU).bfloat16(), torch.randn(1, d, device=GPU).bfloat16()
    angles = torch.randn(512, width // 2, device=GPU)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    pools = [
        stored_in(torch.randn(64, kv_heads, 2, 16, width, device=GPU).bfloat16(), eight)
        for _ in range(40)
    ]
    length = torch.zeros(3, dtype=torch.int32, device=GPU)
    table = torch.randperm(63, device=GPU).to(torch.int32).view(3, 21) + 1
    decode = SimpleNamespace(
        rows=torch.ones(1, dtype=torch.int32, device=GPU), table=table, length=length, groups=None
    )
    inputs = SimpleNamespace(
        positions=torch.zeros(1, dtype=torch.int64, device=GPU), slots=None, decode=decode
    )
    inputs.slots = torch.zeros(1, dtype=torch.int64, device=GPU)

    form, kind = (
        "fixed" if four else "wide",
        AttentionKind(heads, kv_heads, width, 0, None, width**-0.5),
    )

    def layers(gap) -> torch.Tensor:
        x, residual = start.clone(), None
        for kv in pools:
            if not (eight or four):
                q, residual = one_row.norm_qkv(
                    x, residual, scale, 1e-5, qkv, None, cos_sin, inputs, kv, heads, kv_heads, width
                )
            else:
                x, residual = (
                    (norm.rms_norm(x, scale, 1e-5, form), x)
                    if residual is None
                    else norm.add_rms_norm(x, residual, scale, 1e-5, form)
                )
                gap()
                q = product(x, qkv)
            if eight:
                gap()
                q = rotate(rotary, q, cos_sin, inputs, kv, heads, kv_heads, width)
            gap()
            if four:
                seen = one_row_attention.rotate_and_attend_one(
                    q, cos_sin, kv, inputs, kind, None, form
                )
            else:
                seen = one_row_attention.attend_one(q, kv, inputs, width**-0.5, None).view(1, -1)
            gap()
            x = product(seen, out)
            gap()
            x, residual = one_row.norm_gate(x, residual, scale, 1e-5, up, form)
            gap()
            x = product(x, down)
            gap()
        return x + residual

    def at(position: int) -> None:
        length[1] = position
        inputs.positions.fill_(position)
        inputs.slots.copy_(table[1, position // 16].long() * 16 + position % 16)

    layers(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(lambda: None)
    for position in (0, 63, 64, 200, 299, 300):
        at(position)
        kept = [kv.storage.clone() for kv in pools]
        wanted = layers(torch.cuda.synchronize)
        assert wanted.isfinite().all()
        stored = [kv.storage.clone() for kv in pools]
        for _ in range(20):
            for kv, before in zip(pools, kept, strict=True):
                kv.storage.copy_(before)
            got.zero_()
            graph.replay()
            assert torch.equal(got, wanted)
            assert all(
                torch.equal(kv.storage, after) for kv, after in zip(pools, stored, strict=True)
            )


@pytest.mark.parametrize("vocabulary", [5, 300, 32000, 128256, 151936])
def test_logprobs(cases, vocabulary):
    for kind in (torch.bfloat16, torch.float32):
        cases.check_logprobs(GPU, kind, 12, vocabulary, 20)


@pytest.mark.parametrize("vocabulary, width", [(300, 3), (128256, 200)])
def test_adjust(cases, vocabulary, width):
    for kind in (torch.bfloat16, torch.float32):
        cases.check_adjust(GPU, kind, 48, vocabulary, width)
