"""BuildState: the folder `.build` of a running build. It holds the build's options and each
finished stage's result.

A stage's result is a JSON file, written whole at the stage's end; running the same command again
continues after the last finished stage. Knows files; not the stages' work.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.artifact.manifest import MANIFEST, STATE
from penstock.disk import why_not_written, write_whole
from penstock.errors import CapacityError, UsageError
from penstock.journal import changes_told

Result = dict[str, Any]


class BuildState:
    """The folder of a running build. Used as `with BuildState(out, asked) as state`, then
    `state.stage(name, make)` for each stage.

    asked: the options that must be equal for a build to continue. Raises UsageError when the folder
    holds something else, another build, or a build that another process runs; JournalError or
    CapacityError when it cannot be written.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any], *, retune: bool = False) -> None:
        self.out, self.folder = out, out / STATE
        self._check_empty(retune)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        except BlockingIOError as error:
            raise UsageError(
                f"{out} is being built by another process: wait for it, or name another --out"
            ) from error
        except OSError as error:
            raise why_not_written(error, out) from error
        try:
            self._take_up(json.loads(json.dumps(asked)))
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> BuildState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and self._is_nothing_lost(error):
            shutil.rmtree(self.folder)
            if not any(self.out.iterdir()):
                self.out.rmdir()
        os.close(self._lock)

    def _is_nothing_lost(self, error: BaseException) -> bool:
        """Returns True if the folder may be deleted after `error`: no long stage has finished, or
        an option was refused before anything was written."""
        refused = isinstance(error, UsageError) and [*self.out.iterdir()] == [self.folder]
        return refused or self.known("work") is None

    def known(self, name: str) -> Result | None:
        """Returns a stage's result, or None if the stage has not ended."""
        path = self.folder / f"{name}.json"
        try:
            return json.loads(path.read_bytes()) if path.exists() else None
        except ValueError as error:
            raise UsageError(
                f"{path} is broken ({error}): remove it, and this stage runs again"
            ) from error

    def stage(self, name: str, make: Callable[[], Result]) -> Result:
        """Returns a stage's result, from its file or else by calling `make`."""
        found = self.known(name)
        if found is None:
            found = json.loads(json.dumps(make()))
            self.keep(name, found)
        return found

    def keep(self, name: str, result: Result) -> None:
        """Stores the result of the stage `name` in a file."""
        write_whole(self.folder / f"{name}.json", json.dumps(result).encode())

    def finish(self) -> None:
        """Deletes the folder `.build`; its results are in the manifest by now."""
        shutil.rmtree(self.folder)

    def _check_empty(self, retune: bool) -> None:
        """Raises UsageError if the output folder has files that no build wrote."""
        if (self.out / MANIFEST).exists() and not retune:
            self._end_finishing()
            raise UsageError(
                f"{self.out} is built already: name another --out, or time its choices again by "
                f"penstock build --retune {self.out}"
            )
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(
                f"{self.out} is a file: name a folder that is empty or not there", param="out"
            )
        if (
            self.out.is_dir()
            and not retune
            and not self.folder.is_dir()
            and any(self.out.iterdir())
        ):
            raise UsageError(
                f"{self.out} holds files that no build wrote: name a folder that is empty or not"
                " there"
            )

    def _end_finishing(self) -> None:
        """Deletes the folder `.build` of a build that was killed after writing its manifest; keeps
        that of a retune or of a running build."""
        if not self.folder.is_dir() or self.is_retune(self.known("asked") or {}):
            return
        try:
            lock = self._locked()
        except BlockingIOError:
            return
        self.finish()
        os.close(lock)

    def _locked(self) -> int:
        """Takes the folder's lock and returns it. Raises BlockingIOError when another process holds
        it."""
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _take_up(self, asked: Result) -> None:
        before = self.known("asked")
        if before is None:
            self.keep("asked", asked)
            return
        if changes := changes_told(before, asked):
            raise UsageError(
                f"{self.out} holds an unfinished build that was asked otherwise ({changes}): give"
                " the same options, name another --out, or begin anew behind rm -r"
                f" {self.folder if self.is_retune(before) else self.out}"
            )

    @staticmethod
    def is_retune(asked: Mapping[str, Any]) -> bool:
        return bool(asked.get("retune"))


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Raises CapacityError when the disk of `folder`, which need not exist yet, has less than
    `needed` bytes free."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CapacityError(
            f"{what} takes {needed / 1e9:.1f} GB, and the disk of {folder} has {free / 1e9:.1f} GB"
            " free: make room, or name an --out elsewhere"
        )
