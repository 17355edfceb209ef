"""The engine of a job: opening it, and telling one model from another before it is open.

A job takes `open_llm` as an argument, so that its tests can hand it another.
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
    """What a job needs of an engine, as `LLM` has it: here, or spread over a cluster."""

    @property
    def facts(self) -> Any:
        """Has `max_num_seqs` and `sampling_defaults`."""

    @property
    def generation_tokens(self) -> int:
        """Output tokens made so far; read from any thread."""

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
    """One that is here, and can be looked up from after each of its steps."""

    def steps(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[list[Finished]]: ...
    def watch(self, goes_on: Callable[[], None]) -> None: ...


OpenLLM = Callable[[Config], JobEngine]
OpenStepped = Callable[[Config], SteppedEngine]
LOOK = 1 << 16  # bytes looked at in the beginning, the middle and the end of a file


def open_llm(config: Config) -> LLM:
    """An LLM with these knobs; the import is late because it loads torch."""
    from penstock.llm import LLM

    return LLM(**config.told())


def identity(config: Config) -> dict[str, Any]:
    """What samples depend on of a model and how it is run: a part of every job's fingerprint.

    Rows and memory are left out: they decide how fast samples come, not which. Weights in a folder
    are told apart by three looks into each file, so that a model trained on under the same name
    isn't taken for the one before.
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
