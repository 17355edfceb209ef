"""find_model: the local folder of a model or hub id. Looks at file names and reads no file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from penstock.errors import CapacityError, CheckpointError, UsageError

# File patterns downloaded from the hub: weights, configs, tokenizers and chat templates; no code,
# no pickle, no subfolders.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
HUB_NOT = ["*/*", "consolidated*"]

# environment variables of the hub's client
ENDPOINT, OFFLINE = (
    "HF_ENDPOINT",
    ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
MOST_TOLD = 5  # most revisions listed in an error

NO_GGUF = (
    "GGUF is not read: give the folder or hub id that it was made from, or have transformers make"
    " one of it, by AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME,"
    " quantization_config=GgufConfig(dequantize=True)) and AutoTokenizer.from_pretrained(FOLDER,"
    " gguf_file=NAME), and save_pretrained(OUT) of both"
)


def find_model(model: str, revision: str | None = None) -> Path:
    """Returns the folder of `model`: the path itself if it is a folder, else a snapshot of the hub
    id, downloaded or cached.

    revision: the hub's branch, tag or commit. Raises UsageError for a revision of a folder,
    CheckpointError if nothing is found."""
    # os.path.isdir returns False for impossible names, where pathlib raises
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        if revision is not None:
            raise UsageError(
                f"revision {revision!r} is for hub ids, and {model} is a folder: leave it out",
                param="revision",
            )
        return _model_in(Path(path), model)
    if path.lower().endswith(".gguf"):
        raise CheckpointError(f"{model} is a GGUF file, and {NO_GGUF}")
    if os.path.exists(path):
        raise CheckpointError(
            f"{model} is a file: give the folder that holds config.json and the safetensors"
        )
    if (
        model.count("/") > 1
        or model.startswith(("/", ".", "~"))
        or "\\" in model
        or not model.strip()
    ):
        raise CheckpointError(
            f"there is no folder {model!r}: give a model folder, or a hub id such as owner/name"
        )
    return _model_in(_download(model, revision), model)


def adapter_folder(lora: str, whose: str = "an adapter's") -> Path:
    """Returns the folder of an adapter: `lora` itself if it is a folder, else a snapshot of the hub
    id. Raises CheckpointError if neither is found. whose: word for the error, where it is something
    else's folder."""
    path = os.path.expanduser(lora)
    if os.path.isdir(path):
        return Path(path)
    if lora.count("/") != 1 or lora.startswith(("/", ".", "~")):
        raise CheckpointError(
            f"there is no folder {lora!r}: give {whose} folder, or a hub id such as owner/name"
        )
    return _download(lora, None)


def _model_in(folder: Path, model: str) -> Path:
    """Returns `folder` if it holds a model. Raises CheckpointError if it holds an adapter, GGUF
    files or anything else. model: the name that the user gave, for the error."""
    if (folder / "adapter_config.json").exists() and not any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{model} is an adapter (it holds adapter_config.json), LoRA's or another, and no model"
            " by itself: give its base model, and this as lora (--lora), which merges it into the"
            " weights"
        )
    if any(folder.glob("*.gguf")) and not (folder / "config.json").exists():
        raise CheckpointError(f"{model} holds GGUF files, and {NO_GGUF}")
    return folder


def _download(model: str, revision: str | None) -> Path:
    """Downloads a snapshot from the hub and returns its folder. Imports the hub's client inside,
    since the import takes a quarter of a second."""
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{model} at revision {revision}" if revision else model
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_NOT
        )
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{model!r} is neither a folder here nor a hub id such as owner/name"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{at} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        message = (
            f"{_hub()} has no revision {revision!r} of {model}: check the name; {_cached(model)}"
        )
        raise CheckpointError(message) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {model!r} here and no such model on {_hub()}: check the name, or"
            " log in to the hub"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {model!r} here, and {_unreached(at)}; {_cached(model)}"
        ) from error
    except Exception as error:
        # the hub's HTTP client, and so its error classes, changed between major versions
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"the disk is full while {at} is downloaded: free some, or set HF_HOME"
            ) from error
        where = f" from {_hub()}" if os.environ.get(ENDPOINT) else ""
        raise CheckpointError(
            f"{at} cannot be downloaded{where} ({error}): try again, or give a folder"
        ) from error
    return Path(folder)


def _hub() -> str:
    """Returns the hub's address and the variable that set it, for an error message."""
    address = os.environ.get(ENDPOINT)
    return f"{address} (by {ENDPOINT})" if address else "the hub"


def _unreached(at: str) -> str:
    """Returns an error message's explanation of why a model that isn't cached can't be downloaded,
    and the remedy. at: the model and revision, as the error names them."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        name = next((name for name in OFFLINE if os.environ.get(name)), OFFLINE[0])
        return (
            f"{name} keeps {at} from being fetched: unset it, give a folder, or take what is cached"
        )
    way = (
        f"check {ENDPOINT}, give a folder"
        if os.environ.get(ENDPOINT)
        else "give a folder, or try with a network"
    )
    return f"{_hub()} cannot be reached to fetch {at}: {way}"


def _cached(model: str) -> str:
    """Returns a list of a model's cached revisions for an error message: branches, tags and
    commits."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")
    commits = {path.name for path in folder.glob("snapshots/*") if path.is_dir()}
    refs = folder / "refs"
    named = {
        path.relative_to(refs).as_posix(): path.read_text().strip()
        for path in refs.rglob("*")
        if path.is_file()
    }
    told = [
        f"{name} ({commit[:12]})" for name, commit in sorted(named.items()) if commit in commits
    ]
    told += sorted(commits - set(named.values()))
    if not told:
        return f"nothing of {model} is in the cache"
    more = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    return f"cached of it: {', '.join(told[:MOST_TOLD])}{more}"
