"""find_model: folders, hub ids, and what is neither. The hub's own client is run; only the network
is taken away."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from penstock.errors import CapacityError, CheckpointError, PenstockError, UsageError
from penstock.weights.find import HUB_FILES, HUB_NOT, find_model

pytestmark = pytest.mark.torch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub client that may not use the network, with a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _cached(cache: Path, model: str) -> Path:
    """A snapshot as the hub's client lays it down, branch `main`."""
    root = cache / f"models--{model.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some").mkdir()
    assert find_model(str(tmp_path / "some")) == tmp_path / "some"
    monkeypatch.chdir(tmp_path)
    assert find_model("some").resolve() == tmp_path / "some"
    with pytest.raises(UsageError, match="is a folder: leave it out") as caught:
        find_model("some", "main")
    assert caught.value.param == "revision"


def test_a_hub_id_in_the_cache_needs_no_network(offline: Path) -> None:
    folder = _cached(offline, "owner/name")
    assert find_model("owner/name") == folder
    assert find_model("owner/name", "main") == folder
    assert find_model("owner/name", COMMIT) == folder
    for revision, more in (("other-branch", []), ("v2", ["b" * 40, "c" * 40])):
        for commit in more:
            (folder.parent / commit).mkdir()
        with pytest.raises(CheckpointError) as caught:
            find_model("owner/name", revision)
        said = str(caught.value)
        assert (
            f"HF_HUB_OFFLINE keeps owner/name at revision {revision} from being fetched: unset it"
            in said
        )
        assert said.endswith(f"cached of it: {', '.join([f'main ({COMMIT[:12]})', *more])}")


def test_an_endpoint_that_is_not_there_is_named(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cached(offline, "owner/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    def fail(raised: Exception) -> str:
        def download(*args: Any, **options: Any) -> str:
            raise raised

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(CheckpointError) as caught:
            find_model("owner/name", "v9")
        return str(caught.value)

    named, cached = "http://127.0.0.1:9 (by HF_ENDPOINT)", f"cached of it: main ({COMMIT[:12]})"
    said = fail(errors.LocalEntryNotFoundError("x"))
    assert (
        f"{named} cannot be reached to fetch owner/name at revision v9: check HF_ENDPOINT" in said
        and cached in said
    )
    said = fail(errors.RevisionNotFoundError("404", response=_response(404)))
    assert f"{named} has no revision 'v9' of owner/name" in said and said.endswith(cached)
    assert f"no such model on {named}" in fail(
        errors.RepositoryNotFoundError("404", response=_response(404))
    )
    assert f"cannot be downloaded from {named}" in fail(
        ConnectionResetError(errno.ECONNRESET, "reset")
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "owner/absent",
            "HF_HUB_OFFLINE keeps owner/absent from being fetched: unset it, give a folder",
        ),
        ("owner/absent", "; nothing of owner/absent is in the cache"),
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("", "there is no folder ''"),
        ("owner name", "neither a folder here nor a hub id"),
        ("a\0b", "neither a folder here nor a hub id"),
        ("--bad", "neither a folder here nor a hub id"),
    ],
)
def test_what_is_neither(offline: Path, model: str, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_model(model)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], None),
        (["config.json", "model-q4.gguf"], None),  # its weights are told by who reads them
        (["adapter_config.json", "config.json", "model-00001-of-00002.safetensors"], None),
        (
            ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"],
            "is an adapter .*: give its base model",
        ),
        (
            ["adapter_config.json", "adapter_model.bin", "config.json"],
            "is an adapter .*: give its base model",
        ),
        (
            ["README.md", "model-q4.gguf", "model-q8.gguf"],
            "holds GGUF files, and GGUF is not read: give the folder .* gguf_file=NAME",
        ),
    ],
)
def test_adapters_and_gguf_are_named_for_what_they_are(
    tmp_path: Path, offline: Path, files: list[str], said: str | None
) -> None:
    snapshot = _cached(offline, "owner/name")
    (snapshot / "config.json").unlink()
    for folder, model in ((tmp_path / "some", str(tmp_path / "some")), (snapshot, "owner/name")):
        folder.mkdir(exist_ok=True)
        for name in files:
            (folder / name).touch()
        if said is None:
            assert find_model(model) == folder
            continue
        with pytest.raises(CheckpointError, match=f"^{model} {said}") as caught:
            find_model(model)
        assert "\n" not in str(caught.value)


def _response(status: int) -> Any:
    """An answer of the hub, in the classes of whichever HTTP client the hub's library has."""
    client = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    return client.Response(status, request=client.Request("GET", "https://hub/owner/name"))


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (errors.GatedRepoError("403", response=_response(403)), CheckpointError, "is gated"),
        (
            errors.RepositoryNotFoundError("404", response=_response(404)),
            CheckpointError,
            "no such model on the hub",
        ),
        (
            errors.RevisionNotFoundError("404", response=_response(404)),
            CheckpointError,
            "no revision 'v9' of owner/name",
        ),
        (
            errors.HfHubHTTPError("503 busy", response=_response(503)),
            CheckpointError,
            "cannot be downloaded",
        ),
        (errors.HfHubHTTPError.__mro__[1]("slow"), CheckpointError, "cannot be downloaded"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), CheckpointError, "cannot be downloaded"),
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError, "the disk is full"),
    ],
)
def test_what_the_hub_says(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[PenstockError], said: str
) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind) as caught:
        find_model("owner/name", "v9")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_downloaded() -> None:
    files = {
        "config.json": True,
        "generation_config.json": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "tokenizer.json": True,
        "tokenizer.model": True,
        "chat_template.jinja": True,
        "merges.txt": True,
        "pytorch_model.bin": False,
        "consolidated.00.pth": False,
        "consolidated.safetensors": False,
        "original/params.json": False,
        "modeling_x.py": False,
        "model-q4.gguf": False,
    }
    kept = set(filter_repo_objects(files, allow_patterns=HUB_FILES, ignore_patterns=HUB_NOT))
    assert kept == {name for name, wanted in files.items() if wanted}
