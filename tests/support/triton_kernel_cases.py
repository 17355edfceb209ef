"""What the Triton column's kernels (attention aside) are held to, on any device: in Triton's
interpreter on a CPU, in small cases, and natively on a GPU, in wide ones. Import the kernels'
environment first; functions assert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kernels_naive import assert_close, naive_rms_norm, naive_rotate, rotate
from sampler_oracle import asked, some_rows
from torch import Tensor

from penstock.kernels.inputs import TILE, Queries, SamplerInputs, VocabularyPart
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.reference.elementwise import norm as plain_norm
from penstock.kernels.reference.sampling import logprobs as plain_logprobs
from penstock.kernels.reference.sampling import ngrams as reference_ngrams
from penstock.kernels.reference.sampling import noise as plain_noise
from penstock.kernels.reference.sampling import penalties as plain_penalties
from penstock.kernels.reference.sampling import row_state as reference_rows
from penstock.kernels.reference.sampling import sample as plain_sample
from penstock.kernels.row_state import RowState, pack_joins
from penstock.kernels.triton.attention import blocks, one_row_attention
from penstock.kernels.triton.attention import rotary_and_store as rotary
from penstock.kernels.triton.elementwise import activation, embedding, norm
from penstock.kernels.triton.linear import linear_gated, linear_one, linear_small, one_row
from penstock.kernels.triton.sampling import advance as fast_advance
from penstock.kernels.triton.sampling import logprobs, penalties
from penstock.kernels.triton.sampling import ngrams as step_ngrams
from penstock.kernels.triton.sampling import row_state as step_rows
from penstock.kernels.triton.sampling import sample as fast_sample
from penstock.parallel.layout import stretch
from penstock.row_table import BAD_WORD_IDS, FIELDS, JOIN_WORDS, RANGES, WANTS_ADJUST
from penstock.schedule.request_state import padded_words
from penstock.schedule.step import JOIN_RECORD, Joins

COLUMNS = ("temperature", "top_p", "top_k", "min_p", "seed", "sample", "position")


def drawn(
    *shape: int, seed: int = 0, by: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * by).to(dtype)


def check_norms(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (
        drawn(*s, seed=i, by=2.0, dtype=dtype)
        for i, s in enumerate([(rows, width)] * 2 + [(width,)])
    )
    wide = drawn(rows, width + 24, seed=5, dtype=dtype).to(device)[:, :width]  # rows that lie apart
    assert_close(
        norm.rms_norm(x.to(device), weight.to(device), 1e-5).cpu(), naive_rms_norm(x, weight, 1e-5)
    )
    assert_close(
        norm.rms_norm(wide, weight.to(device), 1e-6).cpu(), naive_rms_norm(wide.cpu(), weight, 1e-6)
    )
    total = residual + x
    normed, following = norm.add_rms_norm(
        x.to(device), residual.to(device), weight.to(device), 1e-6
    )
    assert torch.equal(following.cpu(), total)
    assert_close(normed.cpu(), naive_rms_norm(total, weight, 1e-6))
    for by in (weight, weight.float()):
        by = by.to(device)
        joined = norm.add_rms_norm(x.to(device), total.to(device).clone(), by, 1e-6, "wide", by)
        apart = norm.add_rms_norm(
            norm.rms_norm(x.to(device), by, 1e-6), total.to(device).clone(), by, 1e-6
        )
        for one, other in zip(joined, apart, strict=True):
            # Sums in another order: some numbers of float16 are rounded the other way, before a
            # residual is added.
            torch.testing.assert_close(
                one, other, **({"rtol": 2**-9, "atol": 2**-7} if dtype == torch.float16 else {})
            )


def check_joined_norms(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    """Norms and sums of one launch are the separate operations', in kernels and in plain torch."""
    shapes = [(rows, width)] * 4
    given = [drawn(*s, seed=i, by=2.0, dtype=dtype).to(device) for i, s in enumerate(shapes)]
    apart = drawn(rows, width + 24, seed=5, dtype=dtype).to(device)[:, :width]  # rows lie apart
    x, stream, made, other = apart, *given[1:]
    scale = torch.full((1,), 0.3, dtype=dtype, device=device)
    # a sum in another order may round another way, before a second norm and after it
    near = dict.fromkeys(("rtol", "atol"), max(1e-5, 4 * torch.finfo(dtype).eps))
    for kind in (dtype, torch.float32):
        first, *weights = (
            drawn(width, seed=6 + i, by=2.0, dtype=kind).to(device) for i in range(4)
        )
        for module in (norm, plain_norm):
            for count in (1, 2, 3):
                normed, total = module.add_rms_norms(
                    x, stream.clone(), first, tuple(weights[:count]), 1e-5
                )
                wanted = stream + norm.rms_norm(x, first, 1e-5)
                torch.testing.assert_close(total, wanted, **near)
                assert len(normed) == count
                for got, weight in zip(normed, weights, strict=False):
                    torch.testing.assert_close(got, norm.rms_norm(total, weight, 1e-5), **near)
            one, two = (
                norm.rms_norm(each, w, 1e-5) for each, w in ((x, first), (other, weights[0]))
            )
            got = module.add_normed(stream.clone(), ((x, first),), None, 1e-5, None)
            torch.testing.assert_close(got, stream + one, **near)
            into, parts = made.clone(), ((x, first), (other, weights[0]))
            got = module.add_normed(into, parts, weights[1], 1e-5, scale)
            wanted = (made + norm.rms_norm(one + two, weights[1], 1e-5)) * scale
            torch.testing.assert_close(got, wanted, **near)
            assert got.data_ptr() == into.data_ptr()


def check_linear_gated(device: str, dtype: torch.dtype, rows: int, width: int, k: int) -> None:
    """The gate inside its product against fp64."""
    x, weight = drawn(rows, k, dtype=dtype), drawn(2 * width, k, seed=1, by=k**-0.5, dtype=dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    for name, naive in (("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))):
        got = linear_gated.gated_product(x.to(device), weight.to(device), name)
        assert got.dtype == dtype and got.shape == (rows, width)
        assert_close(got.cpu(), naive(gate) * up)


def check_gate_and_table(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = drawn(rows, 2 * width, by=4.0, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(activation.silu_mul(gate_up.to(device)).cpu(), gate / (1 + torch.exp(-gate)) * up)
    assert_close(
        activation.gelu_mul(gate_up.to(device)).cpu(), F.gelu(gate, approximate="tanh") * up
    )
    table = drawn(37, width, dtype=dtype)
    for kind in (torch.int32, torch.int64):
        ids = torch.randint(37, (rows,), generator=torch.Generator().manual_seed(1)).to(kind)
        assert torch.equal(
            embedding.embed(ids.to(device), table.to(device)).cpu(), table[ids.long()]
        )


def check_rotary(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    norms: bool,
    turned_first: bool = False,
) -> None:
    parts, pool = heads + 2 * kv_heads, tokens // 16 + 3
    qkv = drawn(tokens, parts * width, dtype=dtype)
    positions = torch.randint(90, (tokens,), generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(pool * 16, generator=torch.Generator().manual_seed(2))[:tokens]
    angles = drawn(90, width // 2, seed=3)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    weights = [drawn(width, seed=4 + i, dtype=dtype) if norms else None for i in range(2)]
    kv = torch.zeros(pool, kv_heads, 2, 16, width, dtype=dtype, device=device)
    q = rotate(
        rotary,
        qkv.clone().to(device),
        cos_sin.to(device),
        SimpleNamespace(positions=positions.to(device), slots=slots.to(device)),
        kv,
        heads,
        kv_heads,
        width,
        *(None if w is None else w.to(device) for w in weights),
        1e-6,
        turned_first=turned_first,
    ).cpu()
    split, kv, table = qkv.view(tokens, parts, width), kv.cpu(), cos_sin.double()
    for t in (0, tokens - 1, tokens // 2):
        turned, (cos, sin) = split[t, : heads + kv_heads].double(), table[int(positions[t])]
        for turns in (turned_first, not turned_first):
            if turns:
                turned = torch.stack([naive_rotate(head, cos, sin) for head in turned])
            elif norms:
                of_q, of_k = turned[:heads], turned[heads:]
                turned = torch.cat(
                    [naive_rms_norm(x, w, 1e-6) for x, w in zip((of_q, of_k), weights, strict=True)]
                )
        block, offset = divmod(int(slots[t]), 16)
        assert_close(q[t], turned[:heads])
        assert_close(kv[block, :, 0, offset], turned[heads:])
        assert torch.equal(kv[block, :, 1, offset], split[t, heads + kv_heads :])
    assert int((kv[:, 0, 1] != 0).any(-1).sum()) == tokens  # nothing else was written


def plain_matrix(device: str, dtype: torch.dtype, n: int, k: int) -> tuple[Any, Tensor]:
    """A prepared matrix [n, k], and what it is worth in fp64."""
    weight = drawn(n, k, seed=n, by=k**-0.5, dtype=dtype).to(device)
    return linear_small.prepare_small(weight), weight.double()


def check_one_row_gate(
    device: str,
    dtype: torch.dtype,
    d: int,
    inner: int,
    matrix: Callable[[str, torch.dtype, int, int], tuple[Any, Tensor]] = plain_matrix,
    factor: float = 1.0,
) -> None:
    """The fused norm and gate against the operations one after the other, in fp64 from the rounded
    norm on. factor: of the bound, where a row loses more than its dtype."""
    x, residual, weight = (drawn(1, d, seed=i, dtype=dtype).to(device) for i in range(3))
    gates, worth = matrix(device, dtype, 2 * inner, d)
    for before in (None, residual):
        total = x if before is None else x + before
        normed = norm.rms_norm(total, weight[0], 1e-5).double()
        gated, kept = one_row.norm_gate(
            x.clone(), None if before is None else before.clone(), weight[0], 1e-5, gates
        )
        gate, up = (normed @ worth.T).to(dtype).double().chunk(2, dim=-1)
        assert torch.equal(kept, total)
        assert_close(gated, gate / (1 + torch.exp(-gate)) * up, factor)


def check_one_row_qkv(device: str, dtype: torch.dtype, shape: tuple[int, int, int], d: int) -> None:
    """The fused norm, qkv, rotary and store, as above."""
    heads, kv_heads, width = shape
    outputs = (heads + 2 * kv_heads) * width
    x, residual, weight = (drawn(1, d, seed=i, dtype=dtype).to(device) for i in range(3))
    small, worth = plain_matrix(device, dtype, outputs, d)
    bias, angles = drawn(outputs, seed=7, dtype=dtype).to(device), drawn(90, width // 2, seed=3)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)
    where = SimpleNamespace(
        positions=torch.tensor([77], device=device), slots=torch.tensor([37], device=device)
    )
    for before, more in product((None, residual), (None, bias)):
        total = x if before is None else x + before
        normed = norm.rms_norm(total, weight[0], 1e-5).double()
        kv = torch.zeros(4, kv_heads, 2, 16, width, dtype=dtype, device=device)
        wanted_kv = kv.clone()
        q, kept = one_row.norm_qkv(
            x.clone(),
            None if before is None else before.clone(),
            weight[0],
            1e-5,
            small,
            more,
            cos_sin,
            where,
            LayerKv.plain(kv),
            heads,
            kv_heads,
            width,
        )
        qkv = (normed @ worth.T + (0 if more is None else more.double())).to(dtype)
        wanted = rotate(rotary, qkv, cos_sin, where, wanted_kv, heads, kv_heads, width)
        assert torch.equal(kept, total)
        assert_close(q.cpu(), wanted.cpu().double())
        assert_close(kv.cpu(), wanted_kv.cpu().double())
        assert int((kv != 0).any(-1).sum()) == 2 * kv_heads  # nothing else was written


def check_one_row_attention(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    lengths: tuple[int, ...],
    window: int | None,
) -> None:
    """A row among others, and what lies past its length is NaN."""
    heads, kv_heads, width = shape
    count = max(lengths) // 16 + 2
    kv = drawn(3 * count + 1, kv_heads, 2, 16, width, dtype=dtype)
    table = (
        torch.randperm(3 * count, generator=torch.Generator().manual_seed(5))
        .to(torch.int32)
        .view(3, count)
        + 1
    )
    q = drawn(1, heads, width, seed=1, dtype=dtype)
    for length in lengths:
        end = length + 1
        here = kv[table[1].long()].transpose(1, 2).clone()  # [blocks, 2, kv_heads, 16, width]
        keys, values = (
            here[:, i]
            .transpose(0, 1)
            .reshape(kv_heads, -1, width)[:, max(0, end - (window or end)) : end]
            .double()
            for i in range(2)
        )
        scores = (
            torch.einsum("grd,gtd->grt", q[0].double().view(kv_heads, -1, width), keys)
            * width**-0.5
        )
        seen = torch.einsum("grt,gtd->grd", scores.softmax(-1), values).reshape(1, heads, width)
        spoiled = kv.clone()
        spoiled[table[1, length // 16].long(), :, :, length % 16 + 1 :] = float("nan")
        spoiled[table[1, length // 16 + 1 :].long()] = float("nan")
        decode = SimpleNamespace(
            rows=torch.tensor([1], dtype=torch.int32, device=device),
            table=table.to(device),
            groups=None,
            length=torch.tensor([9, length, 3], dtype=torch.int32, device=device),
        )
        got = one_row_attention.attend_one(
            q.to(device),
            LayerKv.plain(spoiled.to(device)),
            SimpleNamespace(decode=decode),
            width**-0.5,
            window,
        )
        assert_close(got.cpu(), seen)


def check_blocks(device: str, dtype: torch.dtype) -> None:
    layers = [drawn(9, 2, 2, 16, 64, seed=i, dtype=dtype).to(device) for i in range(3)]
    tokens = torch.arange(9 * 16, dtype=torch.int32).view(9, 16).to(device)
    before = [x.clone() for x in (*layers, tokens)]
    copier = blocks.BlockCopier([*layers, tokens])
    source, target = torch.tensor([1, 4, -1], device=device), torch.tensor([7, 2, 3], device=device)
    copier.copy(source.int(), target.int())
    for now, was in zip((*layers, tokens), before, strict=True):
        was[7], was[2] = was[1].clone(), was[4].clone()
        assert torch.equal(now, was)
    blocks.copy_blocks(layers, torch.tensor([2], device=device), torch.tensor([0], device=device))
    assert all(torch.equal(layer[0], layer[2]) for layer in layers)


def columns(rows: int, vocabulary: int, width: int, device: str, seed: int = 0) -> SimpleNamespace:
    """Columns of rows and a dead one, all fields filled at random but plausibly."""
    rng = torch.Generator().manual_seed(seed)

    def ints(high: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (rows + 1,), generator=rng, dtype=torch.int32)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows + 1,), generator=rng)]

    length = ints(width * 16 - 1)
    made = SimpleNamespace(
        last_token=ints(vocabulary),
        length=length,
        done=(ints(5) == 0).int(),
        limit=length + ints(9, 1),
        prompt_length=torch.minimum(ints(width * 16), length),
        min_length=length + ints(4),
        sample=ints(1000),
        seed=torch.randint(-(2**62), 2**62, (rows + 1,), generator=rng),
        temperature=pick(0.0, 0.5, 1.0, 1.7),
        top_p=pick(1.0, 1.0, 0.9, 0.4),
        top_k=pick(0, 0, 1, 7, 40).int(),
        min_p=pick(0.0, 0.0, 0.05),
        repetition=pick(1.0, 1.3),
        presence=pick(0.0, 0.7),
        frequency=pick(0.0, 0.21),
        ignore_eos=(ints(2) == 0).int(),
        stop_ids=torch.randint(-1, vocabulary, (rows + 1, 8), generator=rng, dtype=torch.int32),
        block_table=(torch.randperm((rows + 1) * width, generator=rng) + 1)
        .view(rows + 1, width)
        .int(),
        is_end=torch.randint(4, (vocabulary,), generator=rng) == 0,
        wants=ints(128),
        logprobs=ints(4, -1),
        bias_start=ints(1),
        bias_count=ints(1),
        word_count=ints(1),
        mask_slot=ints(4, -1),
        drafts=ints(50).repeat(4, 1).T,
    )
    made.done[-1] = 1
    return SimpleNamespace(**{name: value.to(device) for name, value in vars(made).items()})


def check_prepare_and_advance(device: str, rows: int) -> None:
    """Rows of one to five queries, against a loop over them; drafts are often what is drawn before
    them."""
    cols = columns(rows, 50, 3, device, seed=rows)
    rng = torch.Generator().manual_seed(1)
    order = torch.randperm(rows, generator=rng).tolist()
    room = [min(4, 46 - int(cols.length[row])) for row in order]
    counts = [
        1 + max(0, min(int(torch.randint(-3, 5, (), generator=rng)), most)) for most in room
    ] + [1] * 5
    ids = torch.tensor([*order, *[rows] * 5]).repeat_interleave(torch.tensor(counts)).int()
    offset = torch.cat([torch.arange(count) for count in counts]).int()
    drew = torch.randint(-2, 50, ids.shape, generator=rng, dtype=torch.int32)
    drew[drew == -1] = 3
    draft = torch.randint(50, ids.shape, generator=rng).int()
    right = (torch.rand(ids.shape, generator=rng) < 0.8) & (offset > 0) & (drew.roll(1) >= 0)
    draft[right] = drew.roll(1)[right]
    queries = Queries(offset.to(device), draft.to(device))
    slot_token = torch.full(((rows + 1) * 3 + 2, 16), -7, dtype=torch.int32, device=device)
    dump = slot_token.shape[0] - 1
    out = [torch.zeros(ids.shape[0], dtype=torch.int64, device=device) for _ in range(3)]
    step_rows.prepare(ids.to(device), queries, cols, slot_token, dump, *out)
    was = SimpleNamespace(**{name: value.cpu().clone() for name, value in vars(cols).items()})
    told = fast_advance.advance(ids.to(device), queries, drew.to(device), cols).tolist()
    seen, taken = (
        SimpleNamespace(
            length=was.length.clone(), last_token=was.last_token.clone(), done=was.done.clone()
        ),
        0,
    )
    for i, row in enumerate(ids.tolist()):
        at, ahead = int(was.length[row]) + int(offset[i]), int(offset[i])
        block = dump if was.done[row] else int(was.block_table[row, at // 16])
        token, slot = int(draft[i] if ahead else was.last_token[row]), block * 16 + at % 16
        assert [int(x[i]) for x in out] == [token, at, slot]
        assert bool(was.done[row]) or int(slot_token.view(-1)[slot]) == token
        x = int(drew[i])
        if seen.done[row] or (ahead and told[i - 1] != draft[i]):
            assert told[i] == -1
            continue
        assert told[i] == x
        taken += ahead > 0
        if x < 0:
            seen.done[row] = 1
            continue
        seen.length[row], seen.last_token[row] = at + 1, x
        ends = (bool(was.is_end[x]) and not was.ignore_eos[row]) or x in was.stop_ids[row].tolist()
        seen.done[row] = ends or at + 2 >= int(was.limit[row])
    assert taken or rows < 20
    for name, column in vars(seen).items():
        assert getattr(cols, name).cpu().tolist() == column.tolist(), name
    written = {int(x) for x in out[2]}
    assert int((slot_token != -7).sum()) == len(written)


def check_take_drafts(device: str, rows: int) -> None:
    """Queries of one to five a row, some of whose drafts the device made: in both columns what a
    loop gives."""
    state, rng = (
        RowState(rows, 96, (3,), 50, torch.device(device)),
        torch.Generator().manual_seed(rows),
    )
    state.drafts.copy_(torch.randint(50, state.drafts.shape, generator=rng, dtype=torch.int32))
    counts = torch.randint(1, 6, (rows,), generator=rng)
    ids = torch.randperm(rows, generator=rng).repeat_interleave(counts).int()
    offset = torch.cat([torch.arange(count) for count in counts.tolist()]).int()
    draft = torch.randint(-1, 2, ids.shape, generator=rng).int()  # a host's are 0 and 1
    takes = [
        ahead > 0 and told < 0 for ahead, told in zip(offset.tolist(), draft.tolist(), strict=True)
    ]
    made = state.drafts.cpu()
    want = [
        int(made[row, ahead - 1]) if take else told
        for row, ahead, told, take in zip(ids, offset, draft.tolist(), takes, strict=True)
    ]
    for column in (step_rows, reference_rows):
        queries = Queries(offset.to(device), draft.to(device).clone())
        column.take_drafts(ids.to(device), queries, state)
        assert queries.draft.tolist() == want and any(takes) and not all(takes)


def guess(
    tokens: list[int], text: list[int], longest: int, shortest: int, drafts: int
) -> list[int]:
    """Prompt lookup by its definition. tokens: a row's, the newest last. text: of ended samples."""

    def best(of: list[int], count: int) -> tuple[int, int]:
        found = (0, -1)
        for at in range(count):
            same = 0
            while same < min(longest, at + 1, len(tokens)) and of[at - same] == tokens[-1 - same]:
                same += 1
            found = max(found, (same, at)) if same >= shortest else found
        return found

    own, other = best(tokens, len(tokens) - 1), best(text, len(text))
    if other[0] > own[0]:
        return (text[other[1] + 1 :] + tokens[-1:] * drafts)[:drafts]
    after = tokens[own[1] + 1 :] if own[1] >= 0 else tokens[-1:]
    return [after[i % len(after)] for i in range(drafts)]


def check_draft_ngrams(device: str, rows: int, drafts: int = 4, texts: int = 0) -> None:
    """Rows of few different tokens, with one to three queries, some of them done, some with a text
    of ended samples: in both columns what the definition says."""
    rng, at = torch.Generator().manual_seed(rows), torch.device(device)
    state = RowState(rows, 96, (3,), 50, at, drafts=drafts, texts=(texts, 70))
    state.done[:rows] = (torch.rand(rows, generator=rng) < 0.2).int().to(device)
    lengths = torch.randint(0, 95, (rows,), generator=rng).int()
    lengths[:2] = torch.tensor([0, 1])
    state.length[:rows] = lengths.to(device)
    said = torch.randint(0, 4, (rows, 96), generator=rng, dtype=torch.int32)
    said[::5] = torch.arange(96, dtype=torch.int32)  # nothing stands twice
    state.last_token[:rows] = said.gather(1, lengths[:, None].long())[:, 0].to(device)
    blocks = torch.randperm(6 * rows, generator=rng).int().view(rows, 6) + 1
    state.block_table[:rows] = blocks.to(device)
    slot_token = torch.full((6 * rows + 1, 16), -7, dtype=torch.int32)
    slot_token[blocks.long()] = said.view(rows, 6, 16)
    text = [list[int]()] * rows
    if texts:
        kept = torch.randint(0, 4, (texts, 70), generator=rng, dtype=torch.int32)
        kept[0] = torch.arange(20, 90)
        filled = torch.randint(0, 71, (texts,), generator=rng).int()
        filled[:2] = torch.tensor([70, 0])
        slots = torch.randint(-1, texts, (rows,), generator=rng).int()
        state.texts.copy_(kept)
        state.text_filled.copy_(filled)
        state.text_slot[:rows] = slots.to(device)
        text = [kept[s, : int(filled[s])].tolist() if s >= 0 else [] for s in slots.tolist()]
    counts = torch.randint(1, 4, (rows,), generator=rng)
    ids = torch.randperm(rows, generator=rng).repeat_interleave(counts).int()
    ids = torch.cat((ids, torch.full((3,), rows, dtype=torch.int32))).to(device)
    for longest, shortest in ((4, 3), (2, 1)):
        want = []
        for row in range(rows):
            tokens = said[row, : int(lengths[row]) + 1].tolist()
            made = guess(tokens, text[row], longest, shortest, drafts)
            want.append([-9] * drafts if state.done[row] else made)
        for column in (step_ngrams, reference_ngrams):
            state.drafts.fill_(-9)
            column.draft_ngrams(ids, state, slot_token.to(device), longest, shortest)
            assert state.drafts[:rows].tolist() == want, column.__name__
            assert (state.drafts[rows] == -9).all()


def check_join_and_grow(device: str) -> None:
    """Every field of the row table, whatever they are: a joining row's numbers are found in its
    columns."""
    state, rng, k = RowState(12, 96, (3,), 50, torch.device(device)), np.random.default_rng(0), 3
    records = np.zeros(k, JOIN_RECORD)
    records["row"] = rows = [4, 0, 9]
    for field in FIELDS:
        shape, kind = records[field.name].shape, field.kind
        records[field.name] = (
            rng.random(shape)
            if kind == "f4"
            else rng.integers(-50, 2**31 if kind == "i4" else 2**62, shape)
        )
    biases = np.array([0, 0, 2, 5], np.int32)
    blocks = rng.integers(1, 99, (k, 3)).astype(np.int32)
    joins = Joins(records, blocks, biases, np.zeros(5, np.int32), np.zeros(5, np.float32))
    packed, starts = np.full((5, JOIN_WORDS + 4), 77, np.int32), np.array([40, 41, 42])
    pack_joins(joins, starts, packed)
    was = {field.name: getattr(state, field.name).cpu().numpy().copy() for field in FIELDS}
    state.block_table.fill_(7)
    step_rows.join(torch.from_numpy(packed).to(device), state)
    others = [row for row in range(13) if row not in rows]
    for field in FIELDS:
        now = getattr(state, field.name).cpu().numpy()
        assert (now[others] == was[field.name][others]).all(), field.name
        assert (
            now[rows] == (starts if field.name == "bias_start" else records[field.name])
        ).all(), field.name
    table = state.block_table.cpu().numpy()
    assert (
        (table[rows, :3] == blocks).all()
        and (table[rows, 3:] == 0).all()
        and (table[others] == 7).all()
    )
    step_rows.grow(
        torch.tensor([[2, 5, 88], [-1, 0, 0], [9, 3, 55]], dtype=torch.int32, device=device), state
    )
    table = state.block_table.cpu().numpy()
    assert table[2, 5] == 88 and table[9, 3] == 55 and table[9, 4] == 0


def check_noise(device: str, lanes: int) -> None:
    """Through a draw of one tile: the largest of noise alone is the reference's, for each of many
    counters."""
    n = lanes // 128
    inputs = asked(n, seed=-5, first_sample=3, position=70)
    inputs.position += torch.arange(n, dtype=torch.int32) * 1000
    flat = torch.zeros(n, 128)
    noise = plain_noise.gumbel(
        plain_noise.keys(
            plain_noise.row_keys(inputs.seed, inputs.sample), inputs.position, 0, plain_noise.LANES
        ),
        128,
    )
    assert torch.equal(
        fast_sample.sample(flat.to(device), on_device(inputs, device)).cpu(), noise.argmax(-1).int()
    )


def on_device(inputs: SamplerInputs, device: str) -> SamplerInputs:
    moved = some_rows(inputs, torch.arange(inputs.seed.shape[0]))
    for name in COLUMNS:
        setattr(moved, name, getattr(moved, name).to(device))
    return moved


def mixed(n: int, seed: int = 1) -> SamplerInputs:
    """Rows that ask for all kinds of things."""
    cols = columns(n - 1, 50, 4, "cpu", seed)
    return SamplerInputs(
        **{name: getattr(cols, name) for name in COLUMNS[:-1]},
        position=cols.length,
        any_filter=True,
        any_random=True,
    )


def extremes(step: int = 1) -> SamplerInputs:
    """Rows at the ends of what may be asked, as float32 has them, and a subnormal: each with each,
    or every so many."""
    tiny = 1e-45
    asks = [
        *product((0.0, tiny, 1e-6, 100.0), (tiny, 1e-30, 1.0), (0.0, tiny, 1.0), (0, 2**31 - 1))
    ][::step]
    temperature, top_p, min_p, top_k = (torch.tensor(column) for column in zip(*asks, strict=True))
    inputs = asked(len(asks), seed=3)
    inputs.temperature, inputs.top_p, inputs.min_p, inputs.top_k = (
        temperature,
        top_p,
        min_p,
        top_k.int(),
    )
    inputs.any_filter = inputs.any_random = True
    return inputs


def check_sample(device: str, logits: Tensor, inputs: SamplerInputs, near: float = 0.0) -> int:
    """The reference's tokens, but for a share `near` of near-ties -> how many rows differ.

    The reference of many logits runs on the device too: on one core of a CPU all of them take
    minutes.
    """
    there = on_device(inputs, device)
    at = (logits.to(device), there) if logits.numel() > 1 << 20 else (logits, inputs)
    wanted = plain_sample.sample(*at).cpu()
    got = fast_sample.sample(logits.to(device), there).cpu()
    rows = inputs.seed.shape[0]
    cols = columns(rows, logits.shape[1], 2, "cpu")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(9)).int()
    for name in COLUMNS[:-1]:
        getattr(cols, name)[order.long()] = getattr(inputs, name)
    position = inputs.position - 1
    cols.done[:], cols.wants[:] = False, 0
    cols.done[order[0]] = True
    cols = SimpleNamespace(**{name: value.to(device) for name, value in vars(cols).items()})
    scratch = fast_sample.SampleScratch.allocate(
        rows + 3, logits.shape[1], torch.device(device), adjusts=True
    )
    by_row = fast_sample.sample_rows(
        logits.to(device).contiguous(),
        order.to(device),
        position.to(device),
        cols,
        scratch,
        adjusts=True,
    ).cpu()
    assert by_row[0] == -1 and torch.equal(by_row[1:], got[1:])
    differ = int((got != wanted).sum())
    assert differ <= near * rows, torch.nonzero(got != wanted)[:9, 0].tolist()
    return differ


def check_logprobs(device: str, dtype: torch.dtype, n: int, vocabulary: int, k: int) -> None:
    logits = drawn(n, vocabulary, by=3.0, dtype=dtype)
    logits[0, :] = logits[0, 0]  # equals come in order of their ids
    tokens = torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(1)).int()
    wanted = plain_logprobs.token_logprobs(logits, tokens, k)
    got = [x.cpu() for x in logprobs.token_logprobs(logits.to(device), tokens.to(device), k)]
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    cols = columns(n, vocabulary, 2, device, seed=7)
    ids = torch.arange(n, dtype=torch.int32).flip(0).to(device)
    out = (
        torch.full((n,), 9.0),
        torch.full((n,), 9, dtype=torch.int32),
        torch.full((n, 2), 9, dtype=torch.int32),
        torch.full((n, 2), 9.0),
    )
    out = tuple(x.to(device) for x in out)
    scratch = SimpleNamespace(inners=torch.empty(n, -(-vocabulary // 128), device=device))
    logprobs.logprobs_rows(logits.to(device), ids, cols, tokens.to(device), 2, scratch, out)
    wanted = plain_logprobs.token_logprobs(logits, tokens, 2)
    for i in range(n):
        row = n - 1 - i
        k = -1 if bool(cols.done[row]) else min(2, int(cols.logprobs[row]))
        for place, (mine, theirs) in enumerate(zip(out, wanted, strict=True)):
            told = mine[i].cpu()
            if place < 2:
                want = theirs[i] if k >= 0 else torch.full_like(theirs[i], 9)
            else:
                want = torch.full_like(theirs[i], 9)
                want[: max(k, 0)] = theirs[i, : max(k, 0)]
            torch.testing.assert_close(told, want, rtol=1e-5, atol=1e-5)


def _tokens(cols: SimpleNamespace, row: int, slot_token: Tensor) -> list[int]:
    """All of a row's tokens, the newest included."""
    return slot_token[cols.block_table[row].long()].view(-1)[: int(cols.length[row]) + 1].tolist()


def _bad_words(
    cols: SimpleNamespace, row: int, slot_token: Tensor, vocabulary: int
) -> list[list[int]]:
    """Of 1 to 16 ids, 40 of some rows: most begin with the row's latest tokens, some with others
    before them, and some reach into the prompt."""
    tokens, words = _tokens(cols, row, slot_token), list[list[int]]()
    for size in range(1, 1 + (40, 0, 3)[row % 3]):
        before = tokens[max(0, len(tokens) - size % BAD_WORD_IDS) :] if size % BAD_WORD_IDS else []
        if size % 5 == 4 and before:
            before[0] = (before[0] + 1) % vocabulary
        words.append([*before, (7 * size + row) % vocabulary])
    return words


def check_adjust(
    device: str,
    dtype: torch.dtype,
    rows: int,
    vocabulary: int,
    width: int,
    ends: bool = False,
    ranks: int = 1,
    adjust: Any = penalties.adjust,
) -> None:
    """ends: penalties at the ends of what may be asked, over logits as large as no model's: none
    leaves float32. ranks: that share the vocabulary, each of which is tried."""
    cols = columns(rows, vocabulary, width, "cpu", seed=3)
    if ends:
        for place, name in enumerate(("repetition", "presence", "frequency")):
            low, high, _ = RANGES[f"{name}_penalty"]
            getattr(cols, name)[:] = torch.where(
                torch.arange(rows + 1) >> place & 1 == 1, high, low
            )
    pool = [
        torch.randperm(vocabulary, generator=torch.Generator().manual_seed(i))[: i % 4].int()
        for i in range(rows + 1)
    ]
    cols.bias_count = torch.tensor([len(ids) for ids in pool], dtype=torch.int32)
    slot_token = torch.randint(
        vocabulary, ((rows + 1) * width + 1, 16), generator=torch.Generator().manual_seed(4)
    ).int()
    words = [_bad_words(cols, row, slot_token, vocabulary) for row in range(rows + 1)]
    cols.word_count = torch.tensor([len(each) for each in words], dtype=torch.int32)
    size = cols.bias_count + BAD_WORD_IDS * cols.word_count
    cols.bias_start = (size.cumsum(0) - size).int()
    ids_of_words = [torch.from_numpy(padded_words(each)) for each in words]
    bias_ids = torch.cat([part for pair in zip(pool, ids_of_words, strict=True) for part in pair])
    bias_values = drawn(bias_ids.shape[0], seed=5, by=4.0)
    logits = drawn(rows, vocabulary, by=1e30 if ends else 3.0, dtype=dtype)
    ids = torch.arange(rows).flip(0)
    wanted = logits.float().clone()
    asks = torch.where(cols.done[ids] != 0, 0, cols.wants[ids])
    place = torch.nonzero(asks & 4)[:, 0].tolist()
    for i in place:
        mine = pool[int(ids[i])].long()
        first = int(cols.bias_start[ids[i]])
        plain_penalties.apply_bias(
            wanted, torch.full_like(mine, i), mine, bias_values[first : first + len(mine)]
        )
    place = torch.nonzero(asks & 2)[:, 0]
    row = ids[place]
    plain_penalties.apply_penalties(
        wanted,
        place,
        slot_token,
        cols.block_table[row],
        cols.length[row] + 1,
        cols.prompt_length[row],
        cols.repetition[row],
        cols.presence[row],
        cols.frequency[row],
    )
    place = torch.nonzero(asks & 8)[:, 0]
    row = ids[place]
    ends = torch.nonzero(cols.is_end)[:, 0].expand(place.shape[0], -1)
    early = cols.length[row] + 1 < cols.min_length[row]
    plain_penalties.bar_ids(
        wanted, place, torch.cat((ends, cols.stop_ids[row].long()), dim=1), early
    )
    for i in torch.nonzero(asks & 64)[:, 0].tolist():
        output = _tokens(cols, int(ids[i]), slot_token)[int(cols.prompt_length[ids[i]]) :]
        for word in words[int(ids[i])]:
            if len(word) <= len(output) + 1 and output[len(output) - len(word) + 1 :] == word[:-1]:
                wanted[i, word[-1]] = -torch.inf
    allowed = torch.rand((4, vocabulary), generator=torch.Generator().manual_seed(6)) < 0.5
    bits = np.packbits(
        np.pad(allowed.numpy(), ((0, 0), (0, -vocabulary % 32))), axis=1, bitorder="little"
    )
    masks = torch.from_numpy(bits.view(np.int32))
    for i in torch.nonzero((asks & 32 != 0) & (cols.mask_slot[ids] >= 0))[:, 0].tolist():
        wanted[i, ~allowed[int(cols.mask_slot[ids[i]])]] = -torch.inf
    # What a row doesn't ask for is off in its columns, as the scheduler's bits promise.
    off = (cols.wants & 2) == 0
    cols.repetition[off], cols.presence[off], cols.frequency[off] = 1.0, 0.0, 0.0
    there = SimpleNamespace(**{name: value.to(device) for name, value in vars(cols).items()})
    there.end_ids = torch.nonzero(there.is_end)[:, 0]
    for rank in range(ranks):
        first, length = stretch(vocabulary, TILE, ranks, rank)
        mine, part = (
            slice(first, first + length),
            VocabularyPart(first, vocabulary, rank, ranks, lambda x: x[None]),
        )
        scratch = SimpleNamespace(adjusted=torch.full((rows + 2, length), 5.0, device=device))
        adjust(
            logits[:, mine].to(device).contiguous(),
            ids.int().to(device),
            there.length[ids.to(device)],
            there,
            slot_token.to(device),
            bias_ids.to(device),
            bias_values.to(device),
            masks.to(device),
            scratch,
            part if ranks > 1 else None,
        )
        got = scratch.adjusted.cpu()
        assert (got[rows:] == 5).all() and not (got.isnan() | (got == torch.inf)).any()
        for i in range(rows):
            if int(asks[i]) & WANTS_ADJUST:
                torch.testing.assert_close(got[i], wanted[i, mine], rtol=1e-6, atol=1e-6)
            elif adjust is penalties.adjust:
                assert (got[i] == 5).all(), "a row was touched that asks for nothing"


def check_linear(
    device: str, dtype: torch.dtype, m: int, n: int, k: int, cut: Any, bias: bool = False
) -> None:
    x, weight = drawn(m, k, dtype=dtype), drawn(n, k, seed=1, dtype=dtype)
    more = drawn(n, seed=2, dtype=dtype) if bias else None
    small = linear_small.prepare_small(weight.to(device), cut)
    wanted = x.double() @ weight.double().T + (0 if more is None else more.double())
    for _ in range(2):  # the counters are left as they were found
        got = linear_small.linear_small(
            x.to(device), small, None if more is None else more.to(device)
        )
        assert_close(got.cpu(), wanted)
    if m == 1:
        got = linear_one.linear_one(
            x.to(device), weight.to(device), None if more is None else more.to(device)
        )
        assert_close(got.cpu(), wanted)
