"""What must come of logits that are not finite, on any device: the sample ends, its blocks are
cleared before anybody has them again, and nobody finds them in the prefix tree. Canaries tell right
answers from wrong ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from canary_model import Canary, canary, header

from penstock import LLM, SamplingParams

BAD = "numerical_error"


def open_llm(folder: Path, **knobs: Any) -> LLM:
    plain = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 16,
        "max_model_len": 512,
    }
    return LLM(str(folder), **(plain | {"kv_cache_tokens": 1024} | knobs))


def check_prompt(folder: Path, **knobs: Any) -> None:
    """A token's embedding is NaN for a while: prompts with it fail, others don't, and later all are
    right."""
    rng = random.Random(5)
    shared = header(rng, 100)
    bad, beside, alone = canary(rng, shared, 30), canary(rng, shared, 30), canary(rng, [], 30)
    poison = next(token for token in bad.cycle if token not in beside.cycle + alone.cycle)
    with open_llm(folder, **knobs) as llm:
        state = _state(llm)
        table = state.model.embedding.table.value
        # The header is computed by a sound prompt: a bad one's later tokens may spoil what it
        # computes before them.
        assert _right([beside], _answers(llm, [beside]))
        with torch.inference_mode():
            held = table[poison].clone()
            table[poison] = torch.nan
            found = _answers(llm, [bad, alone, beside, bad, alone])
            assert [reason for _, reason, _ in found] == [BAD, "length", "length", BAD, "length"]
            assert found[0][0] == [] and _right(
                [alone, beside, alone], [found[1], found[2], found[4]]
            )
            assert llm.engine.scheduler._clears  # type: ignore[attr-defined]
            table[poison] = held
        first, then = _answers(llm, [bad]), _answers(llm, [bad])
        assert _right([bad], first) and first[0][2] == 0, "the bad prompt's blocks were found again"
        assert _right([bad], then) and then[0][2] >= 96, "nothing is cached any more"
        _all_blocks_are_clear(llm)


def check_own_blocks(folder: Path, **knobs: Any) -> None:
    """Blocks that a row has filled itself turn bad under it: what it said before stands, and they
    are not kept."""
    rng = random.Random(6)
    bad, beside = canary(rng, [], 40), canary(rng, [], 40)
    with open_llm(folder, **knobs) as llm:
        client, engine = llm._client, llm.engine
        params = SamplingParams(temperature=0, max_tokens=200, detokenize=False)
        asked = [client.submit(one.prompt, params, stream=True) for one in (bad, beside)]
        said: dict[int, list[int]] = {one.request_id: [] for one in asked}
        ends: dict[int, str] = {}
        harmed = False
        while engine.has_work:
            deltas = engine.step()
            for delta in client.process(deltas) if deltas is not None else []:
                said[delta.request_id] += delta.token_ids
                ends |= {delta.request_id: delta.finish_reason} if delta.finish_reason else {}
            if not harmed and len(said[asked[0].request_id]) > 100:
                _spoil(llm, asked[0].request_id, len(bad.prompt) // 16 + 1)
                harmed = True
        first, second = (said[one.request_id] for one in asked)
        assert second == beside.answer(200) and ends[asked[1].request_id] == "length"
        assert (
            ends[asked[0].request_id] == BAD
            and 100 < len(first) < 150
            and first == bad.answer(len(first))
        )
        found = llm.generate(
            [bad.prompt + first], SamplingParams(temperature=0, max_tokens=50), use_tqdm=False
        )[0]
        assert found.outputs[0].token_ids == bad.answer(50, len(first))
        assert found.num_cached_tokens == 0
        _all_blocks_are_clear(llm)


def _spoil(llm: LLM, request: int, block: int) -> None:
    """NaN into one block of the KV of a request's row."""
    rows = llm.engine.scheduler.rows
    (row,) = [row for row in range(rows.count) if rows.state[row] and rows.request[row] == request]
    with torch.inference_mode():
        for (layer,) in _state(llm).kv.layers:
            layer.values[int(rows.table[row, block])] = torch.nan
            layer.keys[int(rows.table[row, block])] = torch.nan


def _all_blocks_are_clear(llm: LLM) -> None:
    """Once all blocks have been handed out again there is no number in the cache that is not
    finite, dump aside."""
    rng = random.Random(7)
    flood = [canary(rng, header(rng, 60)) for _ in range(60)]
    assert _right(flood, _answers(llm, flood))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for (layer,) in _state(llm).kv.layers:
        blocks = torch.arange(1, layer.storage.shape[0] - 1, device=layer.storage.device)
        assert bool(torch.isfinite(layer.worth(blocks)).all())


def _answers(llm: LLM, ones: list[Canary]) -> list[tuple[list[int], str | None, int | None]]:
    """Tokens, finish reason and cached tokens of each."""
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    outs = llm.generate([one.prompt for one in ones], params, use_tqdm=False)
    return [
        (list(out.outputs[0].token_ids), out.outputs[0].finish_reason, out.num_cached_tokens)
        for out in outs
    ]


def _right(ones: list[Canary], found: list[tuple[list[int], str | None, int | None]]) -> bool:
    return all(
        tokens == one.answer(40) and reason == "length"
        for one, (tokens, reason, _) in zip(ones, found, strict=True)
    )


def _state(llm: LLM) -> Any:
    return llm.engine.runner._state  # type: ignore[attr-defined]
