"""The server that `penstock bench run` measures. It is given by its URL, or as an engine to start
with options, environment and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.bench.run_spec import ServerSpec


# Prefixes of the environment variables that engines and their libraries read. Names that contain
# KEY are left out, since they may be secret.
HEEDED = (
    "OMP_",
    "KMP_",
    "MKL_",
    "GGML_",
    "LLAMA_ARG_",
    "CUDA_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "VLLM_",
    "SGLANG_",
    "FLASHINFER_",
    "TRITON_",
)
MOST_WORDS = 200  # most command line words that a benchmark record holds
FEWEST_IDS = 1000  # token ids below this one exist in every model's vocabulary


def subject_of(given: dict[str, Any]) -> ServerSpec:
    """Returns the server to measure. If an engine is to be started, runs it once to learn its
    version. Raises UsageError for options that contradict each other."""
    from penstock.bench.peers import peer
    from penstock.bench.run_spec import ServerSpec
    from penstock.bench.write_record import model_config, option_files
    from penstock.errors import UsageError

    url, engine, named = given["url"], given["engine"], given["model"]
    python = given["python"] or sys.executable
    if (url is None) == (engine is None):
        raise UsageError("say what to measure: a URL, or --engine NAME; not both", param="engine")
    there = ("engine_name", "engine_version", "api_key", "machine")
    ours = ("options", "env", "starts", "server_cores", "python")
    only = there if engine else ours
    if said := [
        name for name in only if given[name] and not (name == "api_key" and _from_environment())
    ]:
        other = "a URL" if engine else "--engine"
        raise UsageError(
            f"--{said[0].replace('_', '-')} goes with {other} alone: leave it out", param=said[0]
        )
    known = peer(engine) if engine else None
    packaged = _packaged(named) if engine else None
    model = str(packaged) if packaged and engine != "penstock" else named
    folder = given["folder"] or packaged or (Path(model) if Path(model).is_dir() else None)
    ids, options = (
        not given["text"] and (known is None or known.ids),
        tuple(words_of(given["options"], "options")),
    )
    if given[unread := "tokenizer" if ids else "vocabulary"]:
        told = (
            f"--{unread} is of no use where prompts go as {'ids' if ids else 'texts'}: leave it out"
        )
        raise UsageError(told, param=unread)
    vocabulary = given["vocabulary"] or model_config(folder).get("vocab_size") or FEWEST_IDS
    return ServerSpec(
        name=given["model_name"] or Path(named).name,
        model=model,
        peer=known,
        url=url,
        python=python,
        version=known.version_of(python) if known else given["engine_version"] or "unknown",
        engine=given["engine_name"] or "unknown",
        folder=folder,
        options=options,
        environment=(_inherited() if known else {}) | _environment(given["env"] or []),
        files=option_files(options),
        api_key=given["api_key"],
        vocabulary=vocabulary,
        tokenizer=given["tokenizer"] or folder,
        ids=ids,
        dtype=given["dtype"],
        random_weights=given["random_weights"],
        lacks=tuple(given["lacks"] or ()),
    )


def words_of(text: str, option: str) -> list[str]:
    """Splits a text into words as a shell does. Raises UsageError for an unclosed quote, and for
    more than MOST_WORDS words."""
    import shlex

    from penstock.errors import UsageError

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--{option} {text!r} is none as a shell takes it: {error}", param=option
        ) from error
    if len(words) > MOST_WORDS:
        raise UsageError(
            f"--{option} has {len(words)} words: a record holds {MOST_WORDS}", param=option
        )
    return words


def option_value(words: Sequence[str], option: str) -> str | None:
    """Returns an option's last value among a server's words; None: it is left out."""
    found = None
    for at, each in enumerate(words):
        name, sign, value = each.partition("=")
        if name == option:
            found = value if sign else "".join(words[at + 1 : at + 2])
    return found


def _from_environment() -> bool:
    """Returns True if the API key comes from the environment. It may be there for other uses, so it
    doesn't count as an option that the user gave."""
    import os

    return "OPENAI_API_KEY" in os.environ and not any(
        word.startswith("--api-key") for word in sys.argv
    )


def _packaged(name: str) -> Path | None:
    """Returns the packaged model's folder if `name` is `demo`, else None. Raises UsageError in
    penstock-client, which has no model."""
    from importlib.util import find_spec

    from penstock.errors import UsageError

    if name != "demo":
        return None
    if find_spec("penstock.demo") is None:
        raise UsageError(
            "the demo model is in penstock, and this is penstock-client: name a folder, or pip"
            " install penstock",
            param="model",
        )
    from penstock.demo import model_folder

    return model_folder()


def _inherited() -> dict[str, str]:
    """Returns the environment variables that influence a server started here; the benchmark record
    lists them."""
    import os

    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(HEEDED) and "KEY" not in name
    }


def _environment(given: list[str]) -> dict[str, str]:
    from penstock.errors import UsageError

    pairs = [each.partition("=") for each in given]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise UsageError(f"--env {name!r} is no NAME=VALUE", param="env")
    return {name: value for name, _, value in pairs}
