"""GpuCollectives: sums and gathers between GPUs. The GPUs are in one machine; they use shared
memory, or NCCL if any rank cannot share memory.

    meet      a store in a file, where each rank says if it could share memory: all share, or none
    ours      kernels/triton/all_reduce.py over torch's symmetric memory: only its pointers, without
              NVLink's multicast
    nccl      if sharing fails; its sums depend on their size, so the batch may change a last bit

Knows devices, stores and the kernels' launches; no plans, no layers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from penstock.errors import EngineError
from penstock.parallel.collectives import first_line, gloo_group

_dist: Any = torch.distributed  # Any: its types lack functions used here
# A failing program that uses multicast can put the GPUs of a whole machine out of service.
NO_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
MEETING = 60.0  # seconds for all ranks to set up the shared memory
# Timeouts as a number of polls of another rank's flag. A poll takes 155 ns on an H100, so these are
# 68 s while kernels are compiled and weights are read, and 1.7 s afterwards.
PATIENT, AT_WORK = 440_000_000, 11_000_000

Made = TypeVar("Made")


class GpuCollectives:
    """Implements parallel.collectives.Collectives. meeting: path of the file by which the ranks
    find each other; a new one for each model. seconds: NCCL's timeout. Calls are launches on the
    current stream and may be captured; none waits for the device.
    """

    def __init__(
        self, meeting: Path, rank: int, size: int, seconds: float, device: torch.device
    ) -> None:
        self._meeting, self._rank, self._size, self._longest = (
            meeting,
            rank,
            size,
            timedelta(seconds=seconds),
        )
        self._device, self._how = device, ""
        self._group: Any = None  # NCCL's process group; None: shared memory is used
        self._shared: SharedMemory | None = None

    def connect(self) -> None:
        if self._how:
            return
        os.environ.update(NO_MULTICAST)
        try:
            store = self._store("meeting")
            shared, why = _in_time(self._share, MEETING)
            store.set(f"word {self._rank}", why)
            words = [store.get(f"word {rank}").decode() for rank in range(self._size)]
            failed = [f"rank {rank}: {word}" for rank, word in enumerate(words) if word]
            if failed:
                self._open_nccl(store)
        except RuntimeError as error:
            raise EngineError(
                f"rank {self._rank} did not meet the others: {first_line(error)}"
            ) from error
        if failed:
            self._how = f"NCCL, since memory could not be shared ({failed[0]})"
        else:
            self._shared, self._how = shared, "memory that all GPUs read, without multicast"

    def ready(self) -> None:
        if self._shared is not None:
            self._shared.be_quick()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._shared is not None:
            return self._shared.kernels.all_reduce(x, self._shared.memory)  # type: ignore[no-any-return]
        out = x.clone()
        self._group.allreduce([out]).wait()
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        if self._shared is not None:
            return self._shared.kernels.all_gather(x, self._shared.memory)  # type: ignore[no-any-return]
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        self._group._allgather_base(out, x.contiguous()).wait()
        return out

    def check(self) -> None:
        if self._shared is not None and (absent := int(self._shared.hung[0])):
            raise EngineError(
                f"rank {self._rank} lost the others: rank {absent - 1} did not come to a sum of the"
                " step"
            )

    def describe(self) -> str:
        return self._how

    def abort(self) -> None:
        """Aborts NCCL's running calls. Our own kernels end by their timeout; they use the shared
        memory until then, so it stays."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort()
        self._shared = None

    def _store(self, name: str) -> Any:
        store = _dist.FileStore(f"{self._meeting}-{name}", self._size)
        store.set_timeout(timedelta(seconds=2 * MEETING))
        return store

    def _share(self) -> SharedMemory:
        """Sets up shared memory; raises the error that prevented it. Opens a separate store: a
        thread of an earlier setup that timed out may hold the lock of the store it used."""
        return SharedMemory(self._store("sharing"), self._rank, self._size, self._device)

    def _open_nccl(self, store: Any) -> None:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = self._longest
        with torch.cuda.device(self._device):
            self._group = _dist.ProcessGroupNCCL(
                _dist.PrefixStore("nccl", store), self._rank, self._size, options
            )
            self._group.allreduce([torch.zeros(1, device=self._device)]).wait()


class SharedMemory:
    """Memory on each rank's GPU that all ranks read. memory: the argument of the kernels. hung:
    int64 [1] in pinned host memory: 1 + the rank that timed out; 0: none."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.kernels: Any = import_module("penstock.kernels.triton.all_reduce")
        count = 2 * self.kernels.ROOM
        if rank == 0:
            store.set("name", f"penstock-{os.urandom(8).hex()}")
        # torch keeps groups by name: each model needs a new one
        name = store.get("name").decode()
        with torch.cuda.device(device):
            MEETINGS.keep_pace(
                store, rank, size, lambda nth: _map(f"{name}-{rank}-{nth}", store, 0, 1, 1, device)
            )
            self._group, self._held, self._handle = _map(name, store, rank, size, count, device)
            MEETINGS.made += 1
            places = [
                self._handle.get_buffer(each, (count,), torch.uint8).data_ptr()
                for each in range(size)
            ]
            self.hung = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            state = torch.tensor([0, 0, 0, PATIENT // size, self.hung.data_ptr()], device=device)
            addresses = torch.tensor(places, device=device)
            torch.cuda.synchronize(device)
        self.memory = self.kernels.RankMemory(addresses, state, rank, self.kernels.ROOM)

    def be_quick(self) -> None:
        """Shortens the timeout for other ranks to 1.7 s in later launches."""
        self.memory.wait_at_most(AT_WORK // self.memory.ranks)


@dataclass
class Meetings:
    """Keeps torch's count of rendezvous equal on all ranks. torch numbers messages between ranks by
    the number of rendezvous a process has made. A process that had a model before has a higher
    count, so it would wait for messages that a new process never sends."""

    made: int = 0

    def keep_pace(self, store: Any, rank: int, size: int, alone: Callable[[int], object]) -> None:
        """Raises this process's count to the maximum over ranks. alone: makes a rendezvous of this
        process with itself."""
        store.set(f"met {rank}", str(self.made))
        most = max(int(store.get(f"met {each}")) for each in range(size))
        for nth in range(self.made, most):
            alone(nth)
        self.made = most


MEETINGS = Meetings()


def _map(
    name: str, store: Any, rank: int, size: int, count: int, device: torch.device
) -> tuple[Any, Tensor, Any]:
    """Allocates `count` bytes on this rank's GPU, all bits set, in a new process group whose ranks
    all map them. Returns the group, the bytes as a tensor, and torch's handle."""
    symmetric: Any = import_module("torch.distributed._symmetric_memory")
    group = _named_group(name, _dist.PrefixStore(name, store), rank, size)
    held = symmetric.empty(count, dtype=torch.uint8, device=device).fill_(0xFF)
    torch.cuda.synchronize(device)  # the memory must be filled before another rank gets its address
    return group, held, symmetric._SymmetricMemory.rendezvous(held, name)


def _named_group(name: str, store: Any, rank: int, size: int) -> Any:
    """Returns a process group that torch's symmetric memory finds by name. It only uses the group's
    store, but a group needs a backend to have a name."""
    group, kind = _dist.ProcessGroup(store, rank, size), _dist.ProcessGroup.BackendType.GLOO
    backend = gloo_group(_dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=MEETING))
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name(name)
    internals: Any = torch._C
    internals._distributed_c10d._register_process_group(name, group)
    return group


def _in_time(work: Callable[[], Made], seconds: float) -> tuple[Made | None, str]:
    """Runs work that may hang; returns its result, and the reason of a failure or ""."""
    told: list[tuple[Made | None, str]] = []

    def run() -> None:
        try:
            told.append((work(), ""))
        except Exception as error:  # noqa: BLE001  after any error the ranks use NCCL and report it
            told.append((None, f"{type(error).__name__}: {first_line(error)}"))

    thread = threading.Thread(target=run, name="penstock-share", daemon=True)
    thread.start()
    thread.join(seconds)
    return told[0] if told else (None, f"not done in {seconds:.0f} s")
