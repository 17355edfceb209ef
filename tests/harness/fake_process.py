"""The engine's process with a fake runner in it: the command that launch() and serve() take as
their `engine`.

Its folder (the config's model) holds fake.json, orders.json and a tokenizer. It knows the engine's
floor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from fake_runner import SHAPE, FakeRunner, Shape

from penstock.config import Config
from penstock.engine.build_engine import EngineFacts
from penstock.engine.engine import Engine
from penstock.engine.process import main
from penstock.engine.roofline import RooflineGauge
from penstock.execute.gpu_specs import GpuSpecs
from penstock.models.sizes import Attending, ModelSizes
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig

COMMAND = (sys.executable, __file__)
# Made up, so that there is a gauge: reading these weights takes 0.2 ms, and steps 1 ms unless told
# otherwise.
LAYER = Attending(layers=1, window=None, numbers=2, read=2)
MODEL = ModelSizes(
    layers=1, hidden=64, vocab=256, layer_weights=100_000, attending=(LAYER,), stored=2
)
MACHINE = GpuSpecs(item=2, copy=1e9, flops=1e15)


def open_fake(config: Config) -> tuple[Engine, EngineFacts]:
    folder = Path(config.model.model)
    shape = msgspec.json.decode((folder / SHAPE).read_bytes(), type=Shape)
    scheduler = Scheduler(
        SchedulerConfig(
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
        cached_blocks=shape.num_blocks if config.memory.enable_prefix_caching else 0,
    )
    limit = RooflineGauge(MODEL, MACHINE)
    return Engine(scheduler, FakeRunner(folder, shape), config.schedule.steps_ahead, limit), facts


if __name__ == "__main__":
    sys.exit(main(open_fake))
