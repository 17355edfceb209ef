"""build_engine: makes an engine from a Config. Also returns the facts that the engine's clients
need.

Joins the rooms demo, weights, execute and schedule, and the tokenizer's end-of-text id; knows no
channel.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.engine.engine import Engine
from penstock.engine.fitted import fit, open_fitted
from penstock.engine.pace import StepPace
from penstock.engine.roofline import RooflineGauge
from penstock.errors import UsageError
from penstock.execute.unswept import unswept
from penstock.execute.wake_gpu import wake_gpu
from penstock.schedule.draft_gate import DraftGate
from penstock.schedule.group_texts import GroupTexts
from penstock.schedule.prefix_groups import SharingCosts
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.structured_output.mask_pool import MaskPool
from penstock.text.tokenizer_files import read_end_of_text

if TYPE_CHECKING:
    from penstock.execute.runner import TorchRunner


@dataclass(slots=True, kw_only=True)
class EngineFacts:
    """Facts about the engine for its clients. Sent over the channel once, when the
    engine is ready."""

    model: str
    folder: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cached_blocks: int = 0  # capacity of the prefix cache in blocks; 0: no prefix cache
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
    # result of Runner.describe
    about: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # the tokenizer's folder; None: the model's
    chat_template: str | None = None  # the chat template's file; None: the tokenizer's


def model_folder(config: Config) -> Path:
    """Returns the folder of the model's files: the package's own for `demo`, else a local folder or
    the hub's copy."""
    if config.model.model == "demo":
        from penstock import demo

        if config.model.revision is not None:
            raise UsageError(
                "the demo model has no revisions: leave --revision out", param="revision"
            )
        return demo.model_folder()
    from penstock.weights.find import find_model

    return find_model(config.model.model, config.model.revision)


def build_engine(config: Config, folder: Path | None = None) -> tuple[Engine, EngineFacts]:
    """Loads the model and starts the device in this process. folder: result of `model_folder`, if
    it is known already. For a built engine, differences from the machine it was built on are
    printed to standard error.
    """
    config.check()
    wake_gpu(config.model.device)
    with nullcontext() if "torch" in sys.modules else unswept():
        import penstock.ranks.rank_runner  # noqa: F401  imports torch and all modules that need it

    folder = folder or model_folder(config)
    if (fitted := fit(config, folder)) is None:
        runner = open_model(config, folder)
    else:
        config = fitted.config
        for note in fitted.notes:
            print(f"penstock: artifact {folder}: {note}", file=sys.stderr)
        runner = open_fitted(fitted, open_model)
    if slow := runner.describe().get("slow"):
        print(f"penstock: {slow}", file=sys.stderr)
    try:
        ends = tuple(runner.eos_token_ids)
        masks = None
        if not config.model.skip_tokenizer_init:
            compact = config.model.disable_any_whitespace
            of_tokenizer = config.model.tokenizer_folder(folder)
            masks = MaskPool(
                of_tokenizer, runner.vocab_size, ends, opened=runner.map_masks, compact=compact
            )
        engine = engine_over(runner, config, masks)
    except BaseException:
        runner.close()
        raise
    facts = EngineFacts(
        model=config.model.model,
        folder=str(folder),
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_rows,
        vocab_size=runner.vocab_size,
        eos_token_ids=tuple(runner.eos_token_ids),
        cached_blocks=runner.num_blocks if config.memory.enable_prefix_caching else 0,
        sampling_defaults=dict(runner.sampling_defaults),
        about=runner.describe() | ({"artifact": fitted.taken} if fitted is not None else {}),
        tokenizer=config.model.tokenizer,
        chat_template=config.model.chat_template,
    )
    return engine, facts


def open_model(config: Config, folder: Path) -> TorchRunner:
    """Opens the model in `folder` on its ranks. The tokenizer's eos_token, if it has one, also ends
    a sample. Raises open_runner's errors and TokenizerError."""
    from penstock.ranks.rank_runner import open_parallel

    known = (
        None
        if config.model.skip_tokenizer_init
        else read_end_of_text(config.model.tokenizer_folder(folder))
    )
    return open_parallel(replace(config, end_of_text=known), folder)


def engine_over(runner: TorchRunner, config: Config, masks: MaskPool | None = None) -> Engine:
    """Returns an engine with a new scheduler over an opened runner, whose earlier engine, if any,
    has no work left. config may lower the rows and tokens per step below the limits the runner was
    opened with, and its drafts.
    """
    batching, schedule = config.batching, config.schedule
    pages = runner.layer_pages
    tokens = min(
        runner.max_batched_tokens, batching.max_num_batched_tokens or runner.max_batched_tokens
    )
    asked, pace = config.speculative, StepPace()
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=runner.kv_pages,
            window=0 if pages is None else pages.window,
            window_tables=0 if pages is None else pages.tables,
            snapshots=runner.snapshots,
            max_rows=min(runner.max_rows, batching.max_num_seqs or runner.max_rows, tokens),
            max_model_len=runner.max_model_len,
            max_batched_tokens=tokens,
            max_queries=min(runner.max_queries, tokens),
            mask_slots=runner.mask_slots,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            prefix_caching=config.memory.enable_prefix_caching,
            prefix_groups=runner.grouping and schedule.prefix_groups != "off",
            sharing=SharingCosts() if schedule.prefix_groups == "always" else runner.sharing,
            ridge_rows=runner.ridge_rows,
            preempt_every=schedule.preempt_every,
            seed=config.model.seed,
        ),
        makers=masks,
    )
    if asked is not None:
        most = asked.num_speculative_tokens
        stores = 0 if asked.method == "ngram" else most  # a layer's K and V of its drafts
        gate = DraftGate(scheduler.rows, most, pace, stores)
        scheduler.drafting.drafter = gate
        if schedule.draft_from == "group":
            scheduler.drafting.texts = GroupTexts()
    return Engine(scheduler, runner, schedule.steps_ahead, limit_of(runner), masks, pace)


def limit_of(runner: TorchRunner) -> RooflineGauge | None:
    """Returns the roofline gauge, or None if the device's peak rates are unknown."""
    return None if runner.rated is None else RooflineGauge(runner.model_sizes, runner.rated)
