"""The engine's process with a fake runner in it: the command that launch() and serve() take as their `engine`.

Its folder (the config's model) holds fake.json, orders.json and a tokenizer. It knows the engine's floor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from fake_runner import SHAPE, FakeRunner, Shape

from penstock.config import Config
from penstock.engine.engine import Engine
from penstock.engine.open import EngineFacts
from penstock.engine.process import main
from penstock.schedule.limits import Limits
from penstock.schedule.scheduler import Scheduler

COMMAND = (sys.executable, __file__)


def open_fake(config: Config) -> tuple[Engine, EngineFacts]:
    folder = Path(config.model.model)
    shape = msgspec.json.decode((folder / SHAPE).read_bytes(), type=Shape)
    scheduler = Scheduler(
        Limits(
            num_blocks=shape.num_blocks,
            max_rows=shape.rows,
            max_model_len=shape.longest,
            max_batched_tokens=shape.batched_tokens,
            vocab_size=shape.vocab_size,
            prefix_caching=config.memory.enable_prefix_caching,
            preempt_every=config.schedule.preempt_every,
        )
    )
    facts = EngineFacts(
        model=config.model.model,
        folder=str(folder),
        max_model_len=shape.longest,
        max_num_seqs=shape.rows,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
    )
    return Engine(scheduler, FakeRunner(folder, shape), config.schedule.steps_ahead), facts


if __name__ == "__main__":
    sys.exit(main(open_fake))
