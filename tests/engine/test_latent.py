"""Samples of a model with latent attention are what each is alone: forked, grouped, chunked,
preempted, by ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from execute_drive import TINY_LATENT, tiny_model, tiny_runner
from ranks_together import Together, met
from sample_drive import Samples, drive, drive_each_alone, over, requests

from penstock.engine.engine import Engine
from penstock.execute.kv_dtype import fit_kv
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.latent import LatentSizes
from penstock.kernels.reference.attention import latent as column
from penstock.kernels.state_forms import LatentForm
from penstock.models.sizes import ModelSizes
from penstock.parallel.layout import Layout

pytestmark = pytest.mark.torch

MODEL = TINY_LATENT | {
    "q_lora_rank": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


@pytest.fixture(scope="module")
def alone() -> Samples:
    """What each request gives by itself, nothing of it cached."""
    return drive_each_alone(tiny_runner(**MODEL))


@pytest.mark.parametrize(
    ("ahead", "tight", "groups"), [(0, False, "always"), (2, True, "off"), (1, True, "always")]
)
def test_samples_are_what_they_are_alone(
    alone: Samples, ahead: int, tight: bool, groups: str
) -> None:
    """Few blocks and tokens a step; rows are preempted all the time."""
    runner = tiny_runner(**MODEL, **({"blocks": 24, "max_batched_tokens": 24} if tight else {}))
    engine, threads = over(
        runner, steps_ahead=ahead, preempt_every=5 if tight else 0, prefix_groups=groups
    )
    assert drive(engine, requests(), threads, together=4) == alone
    stats = engine.scheduler.stats()
    assert stats["prefix_hit_tokens"] > 0 and (stats["preemptions"] > 5 or not tight)
    runner.close()


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has all chunks make keys and values -> the tokens of each that did."""
    monkeypatch.setattr(LatentSizes, "expands", lambda *_: True)
    monkeypatch.setitem(column.latent_attention.__kwdefaults__, "expand_tokens", 1)
    made, expand = list[int](), column._expanded
    monkeypatch.setattr(
        column, "_expanded", lambda q, *args: made.append(len(q)) or expand(q, *args)
    )
    return made


def test_prompts_that_make_keys_and_values_give_the_same_samples(
    alone: Samples, expanded: list[int]
) -> None:
    """Whole prompts, chunks behind others and behind a cached prefix."""
    runner = tiny_runner(**MODEL, blocks=60, max_batched_tokens=24)
    engine, threads = over(runner, steps_ahead=1, preempt_every=9)
    assert drive(engine, requests(), threads, together=4) == alone
    assert (
        engine.scheduler.stats()["prefix_hit_tokens"] > 0
        and max(expanded) > 16
        and len(expanded) > 10
    )
    runner.close()


def test_two_ranks_give_the_samples_of_one(
    alone: Samples, tmp_path: Path, expanded: list[int]
) -> None:
    """Ranks share heads; each has the vectors whole."""
    layouts = [
        Layout(rank, 2, end.all_reduce, end.all_gather) for rank, end in enumerate(met(tmp_path, 2))
    ]
    runners = [tiny_runner(**MODEL, layout=layout, blocks=60) for layout in layouts]
    assert [form.block_bytes for form in runners[0]._model.paged_forms] == [32 * 16 * 4] * 2
    one, threads = over(runners[0], preempt_every=7)
    engine = Engine(one.scheduler, Together(runners), steps_ahead=1)  # type: ignore[arg-type]
    found = drive(engine, requests()[:7], threads, together=5)  # one of them is constrained
    assert found == {key: alone[key] for key in alone if key[0] < 7}
    assert expanded
    for runner in runners:
        runner.close()


def test_in_eight_bits_samples_are_what_they_are_alone(expanded: list[int]) -> None:
    """Grouped, forked, in chunks of both forms, preempted."""
    alone = drive_each_alone(tiny_runner(**MODEL, kv_dtype="fp8"))
    runner = tiny_runner(**MODEL, kv_dtype="fp8", blocks=60, max_batched_tokens=24)
    assert all(form.values == E4M3 for form in runner._model.paged_forms)
    engine, threads = over(runner, steps_ahead=1, preempt_every=7, prefix_groups="always")
    assert drive(engine, requests(), threads, together=4) == alone
    runner.close()


def test_memory_counts_one_vector_a_token() -> None:
    model = tiny_model(**MODEL)
    assert all(isinstance(form, LatentForm) for form in model.paged_forms)
    assert [form.block_bytes for form in model.paged_forms] == [(24 + 8) * 4 * 16] * 2
    fit_kv(model, "fp8", model.ops)
    assert [form.block_bytes for form in model.paged_forms] == [(24 + 8 * 4) * 16] * 2
    assert model.kv_share == (24 + 32) / 128


def test_sizes_count_the_matrix_that_heads_have_of_their_own() -> None:
    """Of a model without experts, whose layers are alike."""
    model = tiny_model(**MODEL | {"first_k_dense_replace": 2})
    sizes = ModelSizes.of(model)
    (attending,) = sizes.attending
    assert attending.latent == model.blocks[0].mixer.sizes and sizes.stored == 2 * 32 * 4
    assert (attending.layers, attending.numbers, attending.read) == (2, 4 * (32 + 24), 32 * 4)
    matrices = {weight.numbers for block in model.blocks for weight in block.mixer.up.weights()}
    plain = sum(matrix.numbers for matrix in model.blocks[0].matrices())
    assert matrices == {4 * (12 + 16) * 24} and sizes.layer_weights == plain + 4 * (12 + 16) * 24
