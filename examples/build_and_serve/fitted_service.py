"""A service for batches of prompts over a model that `penstock build` has fitted: 128 at once, 256
tokens in and out.

    python fitted_service.py MODEL     # runs the 128 prompts, prints some answers and how fast they
    came

More prompts, longer ones and longer answers than it was built for run too, only slower. It knows
`penstock.LLM`, which runs in this process; HTTP is `service_app.py`'s.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from service_prompts import all_prompts

from penstock import LLM, SamplingParams
from penstock.errors import PenstockError

SHOWN = 3  # answers that the command prints


class Settings(BaseModel):
    """How answers are drawn. The defaults are greedy, with a mild penalty on words that came
    before."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(0.1, ge=0.0, le=2.0, description="0 is greedy.")
    top_k: int = Field(1, ge=0, description="Keep this many of the likeliest tokens; 0 keeps all.")
    stop_words_list: list[str] = Field(
        default_factory=list, max_length=64, description="Texts that end an answer."
    )
    repetition_penalty: float = Field(
        1.1, gt=0.0, le=2.0, description="Above 1: what was said becomes less likely."
    )
    max_tokens: int = Field(
        256, ge=1, description="An answer's longest. The model was fitted to 256."
    )


class Answer(BaseModel):
    """What one prompt came to. error: why there is no text."""

    text: str
    tokens: int
    error: str | None = None


class Batch(BaseModel):
    """The answers in the order of the prompts, and how fast they came."""

    answers: list[Answer]
    seconds: float
    tokens_per_second: float


class FittedService:
    """One model; `answer` may be called by any thread, and batches run one after the other."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(model)
        self._chats = self._llm.get_tokenizer().chat_template is not None
        self._turn = threading.Lock()

    def answer(self, prompts: Sequence[str], settings: Settings) -> Batch:
        """Runs a batch. A prompt that cannot run (longer than the model's context) gets an error;
        the others go on."""
        params = SamplingParams(
            temperature=settings.temperature,
            top_k=settings.top_k,
            stop=settings.stop_words_list,
            repetition_penalty=settings.repetition_penalty,
            max_tokens=settings.max_tokens,
        )
        with self._turn:
            begun = time.perf_counter()
            if self._chats and prompts:
                chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
                outs = self._llm.chat(chats, params, use_tqdm=False)
            else:
                outs = self._llm.generate(list(prompts), params, use_tqdm=False)
            seconds = time.perf_counter() - begun
        answers = [
            Answer(text=out.outputs[0].text, tokens=len(out.outputs[0].token_ids))
            if out.error is None
            else Answer(text="", tokens=0, error=out.error)
            for out in outs
        ]
        tokens = sum(answer.tokens for answer in answers)
        return Batch(
            answers=answers, seconds=seconds, tokens_per_second=tokens / seconds if seconds else 0.0
        )

    def close(self) -> None:
        """Gives the model's memory back."""
        self._llm.close()


def main(model: str) -> None:
    """Runs all prompts of this example."""
    service, prompts = FittedService(model), all_prompts()
    # the first batch of a process is no measure of the others
    service.answer(prompts[:4], Settings(max_tokens=4))
    batch = service.answer(prompts, Settings())
    for prompt, answer in list(zip(prompts, batch.answers, strict=True))[:: len(prompts) // SHOWN]:
        print(f"{prompt}\n    {answer.text.strip()[:200] or answer.error}\n")
    tokens = sum(answer.tokens for answer in batch.answers)
    speed = f"{batch.tokens_per_second:,.0f} output tok/s"
    print(f"{len(prompts)} prompts, {tokens:,} tokens in {batch.seconds:.2f} s: {speed}")
    service.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "demo")
    except PenstockError as error:
        sys.exit(f"error: {error}")
