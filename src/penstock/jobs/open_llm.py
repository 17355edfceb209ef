"""Opens the engine of a job. Also identifies a model before it is open, for a job's fingerprint.

A job takes `open_llm` as an argument, so that tests can pass another function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import Config
from penstock.demo import model_folder

if TYPE_CHECKING:
    from penstock.llm import LLM, Finished, Prompt


class JobEngine(Protocol):
    """The part of `LLM` that a job needs; the engine may be local or spread over a cluster."""

    @property
    def facts(self) -> Any:
        """Facts about the engine: an object with `max_num_seqs` and `sampling_defaults`."""

    @property
    def generation_tokens(self) -> int:
        """Returns the number of output tokens so far; may be called from any thread."""

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[Finished]: ...

    def stats(self) -> dict[str, float]: ...

    def __enter__(self) -> JobEngine: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class SteppedEngine(JobEngine, Protocol):
    """A local engine that lets its caller work after each of its steps."""

    def steps(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[list[Finished]]: ...
    def watch(self, goes_on: Callable[[], None]) -> None: ...


OpenLLM = Callable[[Config], JobEngine]
OpenStepped = Callable[[Config], SteppedEngine]
LOOK = 1 << 16  # bytes that are hashed at each of three places in a file: beginning, middle and end


def open_llm(config: Config) -> LLM:
    """Returns an LLM with these options. penstock.llm is imported here because it loads torch."""
    from penstock.llm import LLM

    return LLM(**config.told())


def identity(config: Config) -> dict[str, Any]:
    """Returns the settings of a model and its engine that samples depend on: a part of every job's
    fingerprint.

    Rows and memory are left out, because they affect only speed. A folder's weights are identified
    by three hashed pieces of each file, so that a retrained model of the same name counts as
    different.
    """
    model = config.model
    folder = model_folder() if model.model == "demo" else Path(model.model).expanduser()
    return {
        "model": model.model,
        "revision": model.revision,
        "model_files": _digest(folder) if folder.is_dir() else None,
        "dtype": model.dtype,
        "load_format": model.load_format,
        "max_model_len": config.memory.max_model_len,
        **({} if model.lora is None else _identity_of_lora(model.lora)),
        **(
            {}
            if model.tokenizer is None
            else {"tokenizer_files": _digest(model.tokenizer_folder(folder))}
        ),
        **(
            {}
            if model.chat_template is None
            else {"chat_template": _text_digest(model.chat_template)}
        ),
    }


def _identity_of_lora(lora: str) -> dict[str, Any]:
    folder = Path(lora).expanduser()
    return {"lora": lora, "lora_files": _digest(folder) if folder.is_dir() else None}


def _text_digest(path: str) -> str:
    return blake2b(Path(path).expanduser().read_bytes(), digest_size=8).hexdigest()


def _digest(folder: Path) -> str:
    state = blake2b(digest_size=8)
    for path in sorted(
        p
        for p in folder.iterdir()
        if p.suffix in (".safetensors", ".json", ".jinja") and p.is_file()
    ):
        size = path.stat().st_size
        state.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - LOOK)):
                file.seek(start)
                state.update(file.read(LOOK))
    return state.hexdigest()
