"""Drives a TorchRunner by hand: a tiny model whose tokens depend on all that a row sees, and a host
of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from toy_tags import reads_tags

from penstock.config import BLOCK_SIZE, KvCacheDtype, Quantization
from penstock.execute.executor import open_executor
from penstock.execute.kv_dtype import fit_kv, fit_states
from penstock.execute.limits import BatchLimits, Limits
from penstock.execute.padding import graph_sizes
from penstock.execute.runner import TorchRunner
from penstock.kernels.choose import choose
from penstock.models.build_model import build_model
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.choose import choose_schemes
from penstock.row_table import (
    WANTS_BIAS,
    WANTS_FILTER,
    WANTS_LABELS,
    WANTS_LOGPROBS,
    WANTS_MASK,
    WANTS_MIN_TOKENS,
    WANTS_PENALTY,
)
from penstock.schedule.state_slots import first_snapshot
from penstock.schedule.step import (
    BAD_LOGITS,
    JOIN_RECORD,
    Chunks,
    Embeds,
    Flight,
    Int32,
    Joins,
    LateMasks,
    Masks,
    Moves,
    Runner,
    StepPlan,
)
from penstock.speculative import SpeculativeConfig

VOCABULARY = 160
END = 7
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NONE = np.zeros(0, np.int32)


def tiny_model(
    poison: int | None = None,
    device: str = "cpu",
    layout: Layout = ALONE,
    numbers: Quantization = "auto",
    build: Callable[..., Decoder] = build_model,
    **config: Any,
) -> Decoder:
    """Drawn wide enough that logits differ by several. `poison`: a token whose embedding is NaN.
    config: what differs from CONFIG. numbers: made of those that are drawn."""
    where = torch.device(device)
    model = build(
        model_config_of(CONFIG | config, "tiny"),
        torch.float32,
        where,
        layout=layout,
        scheme_of=choose_schemes(numbers, None),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.weights():
            rows = [part.shape[0] for part in weight.parts]  # of the whole, which ranks cut
            drawn = torch.randn((sum(rows), *weight.parts[0].shape[1:]), generator=generator)
            if poison is not None and weight is model.embedding.table:
                drawn[poison] = torch.nan
            if (
                weight.dtype == torch.uint8
            ):  # of four bits: any byte is two numbers; of scales one near 1
                low, high = (0, 256) if weight.numbers else (123, 126)
                drawn = (drawn.abs() * 1e6).long().remainder_(high - low).add_(low).to(torch.uint8)
                for (part, place), whole in zip(weight.places(), drawn.split(rows), strict=True):
                    weight.fill(part, place, whole)
                continue
            for (part, place), whole in zip(weight.places(), drawn.split(rows), strict=True):
                weight.fill(part, place, whole * (0.4 if whole.dim() > 1 else 1.0))
    model.prepare(choose(where, torch.float32))
    return model


TINY_LATENT: dict[str, Any] = {  # config of a model with latent attention
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}


def tiny_runner(
    max_rows: int = 8,
    blocks: int = 200,
    poison: int | None = None,
    device: str = "cpu",
    layout: Layout = ALONE,
    kv_dtype: KvCacheDtype = "auto",
    max_batched_tokens: int = 512,
    snapshots: int = 4,
    tagged: bool = False,
    moved: torch.Tensor | None = None,
    speculative: SpeculativeConfig | None = None,
    **config: Any,
) -> TorchRunner:
    """tagged: its first layer reads tags. moved [hidden]: added to every embedding."""
    model = tiny_model(poison, device, layout, **config)
    if moved is not None:
        model.embedding.table.value.add_(moved)
    if tagged:
        reads_tags(model)
    fit_kv(model, kv_dtype, model.ops, sample=torch.arange(9, 29)[None])
    batch = BatchLimits(max_rows, max_batched_tokens, 128, speculative=speculative)
    fit_states(model, "auto", batch.state_drafts)
    sizes = tuple(graph_sizes(max_rows)) if device == "cuda" else ()
    slots = first_snapshot(max_rows) + snapshots if model.slot_bytes else 0
    limits = Limits(
        max_rows,
        max_batched_tokens,
        128,
        kv_tokens=blocks * BLOCK_SIZE,
        num_blocks=blocks,
        graph_sizes=sizes,
        state_slots=slots,
        speculative=speculative,
    )
    return TorchRunner(model, model.ops, limits, (END,), {}, open_executor(model.device))


@dataclass(slots=True)
class Ask:
    """Sampling parameters of one row."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    stop_ids: list[int] = field(default_factory=list)
    logprobs: int = -1
    bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    labels: list[int] = field(default_factory=list)  # as many as logprobs says
    # its mask lies in the slot with the row's number
    allowed: list[int] = field(default_factory=list)
    tag: int = 0

    def wants(self) -> int:
        wants = WANTS_FILTER if self.top_p < 1 or self.top_k or self.min_p else 0
        wants |= WANTS_PENALTY if self.repetition != 1 or self.presence or self.frequency else 0
        wants |= WANTS_BIAS if self.bias else 0
        wants |= WANTS_MIN_TOKENS if self.min_tokens else 0
        wants |= WANTS_MASK if self.allowed else 0
        wants |= WANTS_LABELS if self.labels else 0
        return wants | (WANTS_LOGPROBS if self.logprobs >= 0 else 0)


@dataclass(slots=True)
class Row:
    """A sequence in a row, as the host sees it."""

    number: int
    tokens: list[int]  # what is stored, and the last token
    prompt: int
    limit: int
    blocks: list[int]
    ask: Ask
    sample: int = 0
    planned: int = 0  # stored tokens once all launched steps have run


class Host:
    """Blocks, rows and plans. Rows join with what they bring; each step may run any of them."""

    def __init__(self, runner: Runner, vocabulary: int = VOCABULARY) -> None:
        self.runner, self.vocabulary = runner, vocabulary
        self.number = 0
        self.next_block = 1
        self.clears = False  # once a row's logits were not finite

    def take(self, count: int) -> list[int]:
        """Fresh blocks, every second one, so that neighbours in a table are none in the pool."""
        blocks = [self.next_block + 2 * i for i in range(count)]
        self.next_block += 2 * count
        assert blocks[-1] < self.runner.num_blocks if blocks else True
        return blocks

    def launch(self, rows: list[Row], **more: Any) -> Flight:
        plan = self.plan(rows, **more)
        for row in rows:
            row.planned += 1
        return self.runner.launch(plan)

    def plan(
        self,
        rows: list[Row],
        joins: list[Row] | None = None,
        chunks: Chunks | None = None,
        copies: list[tuple[int, int]] | None = None,
        prefix: int = 0,
    ) -> StepPlan:
        """prefix: blocks that all `rows` share and attend to as one group."""
        new = []
        for row in rows:
            if row.planned // BLOCK_SIZE == len(row.blocks) and row.planned < 128:
                row.blocks += self.take(1)
                new.append((row.number, len(row.blocks) - 1, row.blocks[-1]))
        wants = int(np.bitwise_or.reduce([row.ask.wants() for row in rows] or [0]))
        plan = StepPlan(
            number=self.number,
            rows=np.array([row.number for row in rows], np.int32),
            lengths=np.array([row.planned for row in rows], np.int32),
            wants=wants,
            group_start=np.array([0, len(rows)] if prefix else [0], np.int32),
            group_blocks=np.array([rows[0].blocks[:prefix]] if prefix else [[]], np.int32)[
                : 1 if prefix else 0
            ],
            group_length=np.array([prefix * BLOCK_SIZE] if prefix else [], np.int32),
            moves=Moves(
                np.array(copies or [], np.int32).reshape(-1, 2), np.zeros((0, 2), np.int32)
            ),
            new_blocks=np.array(new, np.int32).reshape(-1, 3),
            joins=_joins(joins) if joins else None,
            chunks=chunks,
            masks=_masks(joins or [], self.vocabulary),
            clears=self.clears,
        )
        self.number += 1
        return plan

    def prefill(
        self,
        prompt: list[int],
        blocks: list[int],
        pieces: int = 1,
        prompt_logprobs: int = -1,
        tag: int = 0,
        handed: dict[int, np.ndarray] | None = None,
    ) -> list[Flight]:
        """Stores all of the prompt but its last token. handed: embeddings [hidden] by position."""
        borders = np.linspace(0, len(prompt) - 1, pieces + 1).astype(int).tolist()
        flights = []
        for first, last in pairwise(borders):
            if last > first:
                chunks = chunk_of(prompt, first, last, blocks, prompt_logprobs, tag, handed)
                flights.append(self.runner.launch(self.plan([], chunks=chunks)))
        return flights

    def row(
        self,
        number: int,
        prompt: list[int],
        max_tokens: int,
        ask: Ask,
        sample: int = 0,
        pieces: int = 1,
        handed: dict[int, np.ndarray] | None = None,
    ) -> Row:
        """A prompt in blocks of its own, prefilled; it still has to join."""
        blocks = self.take(-(-len(prompt) // BLOCK_SIZE))
        self.prefill(prompt, blocks, pieces, tag=ask.tag, handed=handed)
        return Row(
            number,
            prompt,
            len(prompt),
            len(prompt) + max_tokens,
            blocks,
            ask,
            sample,
            len(prompt) - 1,
        )

    def run(self, rows: list[Row], steps: int, ahead: int = 0, **first: Any) -> np.ndarray:
        """Joins the rows, runs them `steps` steps reading `ahead` steps late -> tokens [rows,
        steps]."""
        flights: list[Flight] = []
        read = []
        for step in range(steps):
            flights.append(self.launch(rows, **({"joins": rows, **first} if step == 0 else {})))
            if step >= ahead:
                read.append(flights[step - ahead].fetch().tokens)
        read += [flight.fetch().tokens for flight in flights[len(read) :]]
        told = np.stack(read, axis=1)
        self.clears |= bool((told == BAD_LOGITS).any())
        return told


def late_steps(runner: Runner) -> list[list[int]]:
    """Two steps that draw late, of a free row, one whose mask comes late, and one that sits the
    first draw out: tokens of each step."""
    host = Host(runner)
    asks = [
        Ask(temperature=1.0, seed=1),
        Ask(allowed=[*range(VOCABULARY)], temperature=1.0, seed=2),
        Ask(allowed=[158]),
    ]
    rows = [host.row(i, [8 + i, 9, 10], 40, ask) for i, ask in enumerate(asks)]
    flights = []
    for sit_out, mine in (([2], [40, 41, 42]), ([], [70])):
        plan = host.plan(rows, **({"joins": rows} if not flights else {}))
        plan.draws_late = True
        runner.launch(plan)
        mask = _masks([replace(rows[1], ask=Ask(allowed=mine))], VOCABULARY)
        assert mask is not None
        nothing = NONE.astype(np.int64), NONE
        places = np.arange(mask.slots.size, dtype=np.int32)
        late = LateMasks(mask.slots, places, mask.words, np.array(sit_out, np.int32), *nothing)
        flights.append(runner.draw(late))
        for row in rows:
            row.planned += row.number not in sit_out
    return [flight.fetch().tokens.tolist() for flight in flights]


def chunk_of(
    prompt: list[int],
    first: int,
    last: int,
    blocks: list[int],
    prompt_logprobs: int = -1,
    tag: int = 0,
    handed: dict[int, np.ndarray] | None = None,
) -> Chunks:
    """Tokens first : last of a prompt. handed: embeddings [hidden] by position."""
    at = [position for position in handed or {} if first <= position < last]
    rows = [handed[position] for position in at] if handed else []
    return Chunks(
        tokens=np.array(prompt[first:last], np.int32),
        start=np.array([0, last - first], np.int32),
        context=np.array([first], np.int32),
        blocks=np.array([blocks], np.int32),
        prompt_logprobs=np.array([prompt_logprobs], np.int32),
        next_token=np.array(prompt[first + 1 : last + 1], np.int32),
        tags=np.array([tag], np.int32),
        embeds=Embeds(np.array(at, np.int32) - np.int32(first), np.stack(rows)) if at else None,
    )


def _masks(rows: list[Row], vocabulary: int) -> Masks | None:
    rows = [row for row in rows if row.ask.allowed]
    if not rows:
        return None
    bits = np.zeros((len(rows), -(-vocabulary // 32) * 32), np.bool_)
    for at, row in enumerate(rows):
        bits[at, row.ask.allowed] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return Masks(np.array([row.number for row in rows], np.int32), words)


def _joins(rows: list[Row]) -> Joins:
    def ints(values: list[int]) -> Int32:
        return np.array(values, np.int32)

    width = max(len(row.blocks) for row in rows)
    asks = [row.ask for row in rows]
    records = np.zeros(len(rows), JOIN_RECORD)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition",
        "presence",
        "frequency",
        "seed",
        "logprobs",
    ):
        records[name] = [getattr(ask, name) for ask in asks]
    records["ignore_eos"], records["wants"] = (
        [ask.ignore_eos for ask in asks],
        [ask.wants() for ask in asks],
    )
    records["tag"] = [ask.tag for ask in asks]
    records["stop_ids"] = [(ask.stop_ids + [-1] * 8)[:8] for ask in asks]
    records["mask_slot"] = [row.number if row.ask.allowed else -1 for row in rows]
    records["bias_count"] = [len(ask.bias) for ask in asks]
    records["row"], records["sample"] = [r.number for r in rows], [r.sample for r in rows]
    records["length"], records["last_token"] = (
        [r.planned for r in rows],
        [r.tokens[-1] for r in rows],
    )
    records["prompt_length"], records["limit"] = [r.prompt for r in rows], [r.limit for r in rows]
    records["min_length"] = [r.prompt + r.ask.min_tokens for r in rows]
    return Joins(
        records=records,
        blocks=np.array([r.blocks + [0] * (width - len(r.blocks)) for r in rows], np.int32),
        bias_start=np.cumsum([0, *(len(ask.bias) + len(ask.labels) for ask in asks)]).astype(
            np.int32
        ),
        bias_ids=np.array([token for ask in asks for token in [*ask.bias, *ask.labels]], np.int32),
        bias_values=np.array(
            [value for ask in asks for value in [*ask.bias.values(), *[0.0] * len(ask.labels)]],
            np.float32,
        ),
    )
