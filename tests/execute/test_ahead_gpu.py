"""The device runs ahead: nothing waits for it, nothing is compiled once it works, and its memory is
enough for the worst that may be admitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from execute_drive import Ask, Host, Row, late_steps, tiny_runner

from penstock import LLM, SamplingParams
from penstock.demo import problems_file
from penstock.execute.runner import TorchRunner
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, Chunks, StepPlan

pytestmark = pytest.mark.gpu

ASKS = [
    Ask(),
    Ask(temperature=0.8, seed=11, logprobs=3),
    Ask(temperature=1.5, seed=-3, top_p=0.7, logprobs=0),
    Ask(temperature=1.0, seed=2, top_k=9, repetition=1.3, frequency=0.3),
    Ask(temperature=0.7, seed=5, presence=1.0, bias={9: 4.0, 30: -5.0}, min_tokens=3),
]
PROMPTS = [
    f"Question: {json.loads(row)['question']}\nAnswer:"
    for row in problems_file().read_text().splitlines()
]


def _runner(device: str, **knobs: Any) -> TorchRunner:
    runner = tiny_runner(device=device, **knobs)
    runner._executor.call(lambda: runner.capture())
    return runner


@contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _compiled() -> Iterator[list[str]]:
    """Kernels that Triton makes (or loads) meanwhile."""
    import triton

    names: list[str] = []

    def look(**made: Any) -> None:
        names.append(str(made["fn"].name) + " " + str(made.get("repr"))[:300])

    triton.knobs.runtime.jit_post_compile_hook = look
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def test_a_late_draw_by_graphs_gives_the_cpus_tokens_and_waits_for_nothing() -> None:
    plain, runner = _runner("cpu"), _runner("cuda")
    want = late_steps(plain)
    with _no_waiting():
        found = late_steps(runner)
    assert found == want and want[0][2] == NO_TOKEN
    plain.close()
    runner.close()


@pytest.mark.parametrize(
    "asks", [[ASKS[0]] * 5, ASKS[:3], ASKS], ids=["plain", "logprobs", "every"]
)
def test_graphs_give_the_cpus_tokens_and_logprobs(asks: list[Ask]) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        runner = _runner(device)
        host = Host(runner)
        rows = [host.row(i, list(range(8, 20 + 3 * i)), 40, ask) for i, ask in enumerate(asks)]
        flights = [
            host.launch(rows, **({"joins": rows} if step == 0 else {})) for step in range(24)
        ]
        found[device] = [flight.fetch() for flight in flights]  # all of them late
        runner.close()
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        assert (here.tokens == there.tokens).all()
        assert (here.logprobs is None) == (there.logprobs is None)
        if here.logprobs is not None and there.logprobs is not None:
            for name in ("where", "rank", "top_ids"):
                assert (getattr(here.logprobs, name) == getattr(there.logprobs, name)).all(), name
            np.testing.assert_allclose(here.logprobs.chosen, there.logprobs.chosen, atol=1e-4)
            np.testing.assert_allclose(here.logprobs.top, there.logprobs.top, atol=1e-4)


def test_groups_in_a_graph_are_the_rows_alone() -> None:
    tokens = {}
    for device in ("cpu", "cuda"):
        for prefix in (0, 2):
            runner = _runner(device, max_rows=24, blocks=400)
            host = Host(runner)
            prompt = [9 + i % 20 for i in range(33)]
            shared = host.take(2)
            host.prefill(prompt, [*shared, *host.take(1)])
            rows = []
            for i in range(20):
                row = host.row(i, prompt, 30, Ask(temperature=1.0, seed=i))
                row.blocks[:2] = shared
                rows.append(row)
            tokens[device, prefix] = host.run(rows, 12, 2, prefix=prefix)
            runner.close()
    assert all((found == tokens["cpu", 0]).all() for found in tokens.values())


def _with_prompts(runner: TorchRunner, prefix: int) -> list[list[int]]:
    """Five rows, behind a prefix of so many blocks, that run while two prompts at a time are stored
    beside them; who has these draws one token. Tokens of each step."""
    host, shared, rows = Host(runner), list[int](), list[Row]()
    for number in range(5):
        row = host.row(
            number, [9 + i % 20 for i in range(33)], 60, Ask(temperature=1.0, seed=number)
        )
        shared = shared or row.blocks[:prefix]
        row.blocks[:prefix] = shared
        rows.append(row)
    flights = [host.launch(rows, joins=rows, prefix=prefix)]
    for turn in range(4):  # the same sizes again: launched, captured, replayed
        prompts = [[8 + (7 * i + 3 * turn + each) % 50 for i in range(40)] for each in range(2)]
        new = [
            Row(5 + n, p, 40, 60, host.take(3), Ask(temperature=1.0, seed=n), 0, 39)
            for n, p in enumerate(prompts)
        ]
        chunks = Chunks(
            tokens=np.array([token for prompt in prompts for token in prompt[:-1]], np.int32),
            start=np.array([0, 39, 78], np.int32),
            context=np.zeros(2, np.int32),
            blocks=np.array([row.blocks for row in new], np.int32),
            prompt_logprobs=np.full(2, -1, np.int32),
            next_token=np.array([token for prompt in prompts for token in prompt[1:]], np.int32),
        )
        flights.append(host.launch(rows, chunks=chunks, prefix=prefix))
        flights.append(
            host.launch(rows + new, joins=new) if not prefix else host.launch(new, joins=new)
        )
    return [flight.fetch().tokens.tolist() for flight in flights]


@pytest.mark.parametrize("prefix", [0, 2])
def test_prompts_beside_rows_in_a_graph_give_the_cpus_tokens(prefix: int) -> None:
    plain, runner = _runner("cpu", blocks=400), _runner("cuda", blocks=400)
    want, found = _with_prompts(plain, prefix), _with_prompts(runner, prefix)
    assert found == want
    assert runner._state is not None and runner._state.graphs is not None
    assert (8, 128, bool(prefix)) in runner._state.graphs.beside
    plain.close()
    runner.close()


def test_bad_logits_end_their_row_alone() -> None:
    told = {}
    for poison in (None, 100):
        runner = _runner("cuda", poison=poison) if poison else _runner("cuda")
        host = Host(runner)
        rows = [host.row(i, list(range(8 + i, 20 + i)), 40, Ask(ignore_eos=True)) for i in range(3)]
        bad = host.row(3, [*range(8, 20), 100], 40, Ask())
        told[poison] = host.run([*rows, bad], 8, 2)
        runner.close()
    for clean, beside in zip(told[None][:3].tolist(), told[100][:3].tolist(), strict=True):
        # a row that draws the bad token itself goes bad behind it, no sooner
        own = [*clean, 100].index(100) + 1
        assert beside[:own] == clean[:own] and BAD_LOGITS not in beside[:own]
    assert told[100][3, 0] == BAD_LOGITS and (told[100][3, 1:] == NO_TOKEN).all()


def _work(llm: LLM) -> None:
    """A mix of all that may be asked, in bursts of different sizes."""
    mixes = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.7, max_tokens=33, n=5, seed=1),
        SamplingParams(temperature=1, top_p=0.9, max_tokens=9, n=2),
        SamplingParams(temperature=1, top_k=20, min_p=0.05, max_tokens=9, logprobs=0),
        SamplingParams(temperature=0.5, max_tokens=12, logprobs=5, prompt_logprobs=2),
        SamplingParams(
            temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2, max_tokens=12, n=3
        ),
        SamplingParams(temperature=0.9, logit_bias={5: 2.0, 77: -3.0}, min_tokens=4, max_tokens=12),
        SamplingParams(
            temperature=0.9, allowed_token_ids=[*range(9, 400, 3)], top_p=0.9, max_tokens=12, n=2
        ),
    ]
    for count in (1, 2, 3, 7, 30):
        llm.generate(PROMPTS[:count], mixes[0], use_tqdm=False)
        prompts = PROMPTS[: count * len(mixes)]
        llm.generate(prompts, (mixes * count)[: len(prompts)], use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo",
        device="cuda",
        max_num_seqs=192,
        max_model_len=512,
        kv_cache_tokens=100_000,
        preempt_every=17,
    ) as made:
        yield made


def test_nobody_waits_for_the_device(llm: LLM) -> None:
    with _no_waiting():
        _work(llm)


def test_nothing_is_compiled_at_work(llm: LLM) -> None:
    with _compiled() as names:
        _work(llm)
    assert not names, names


def test_a_burst_of_short_prompts_compiles_nothing() -> None:
    """More chunks in one step than any other test has: 8,192 prompts of two tokens at once."""
    burst = [[5 + i % 100, 5 + i // 100] for i in range(9000)]
    most = 0
    with LLM(
        "demo", device="cuda", max_num_seqs=8192, max_model_len=64, kv_cache_tokens=600_000
    ) as llm:
        runner = llm.engine.runner
        launch = runner.launch

        def watched(plan: StepPlan) -> Any:
            nonlocal most
            most = max(most, plan.chunks.context.size if plan.chunks is not None else 0)
            return launch(plan)

        runner.launch = watched  # type: ignore[method-assign]
        with _compiled() as names, _no_waiting():
            outs = llm.generate(
                burst, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False
            )
    assert not names, names
    print(f"{most} chunks in one step")
    assert most > 4096 and all(len(out.outputs[0].token_ids) == 2 for out in outs)


def test_the_looks_bite(llm: LLM) -> None:
    with pytest.raises(RuntimeError), _no_waiting():
        torch.ones(3, device="cuda").sum().item()


def test_memory_is_enough_for_the_worst_mix() -> None:
    """Every row asks for everything, prompts with all their logprobs come in between, and KV took
    all that was left."""
    every = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logprobs=20,
        prompt_logprobs=20,
        min_tokens=2,
        logit_bias={7: 1.0},
        max_tokens=24,
        n=4,
        ignore_eos=True,
        allowed_token_ids=list(range(500)),
    )
    total = torch.cuda.mem_get_info()[1]
    with LLM(
        "demo", device="cuda", max_num_seqs=1024, max_model_len=2048, kv_cache_tokens=600_000
    ) as llm:
        outs = llm.generate([prompt * 4 for prompt in PROMPTS], every, use_tqdm=False)
        free = torch.cuda.mem_get_info()[0]
    assert all(len(out.outputs) == 4 and len(out.outputs[0].token_ids) == 24 for out in outs)
    assert total - free <= 0.93 * total
