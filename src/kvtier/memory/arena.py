"""The arena: one run of memory that holds every slot of a rank, and what this machine has to give for it.

Which slots are taken is the control plane's affair (`kvtier.store.slots`); the arena only turns offsets into views and
addresses. Pages are touched on first use, so that an arena costs what it holds, unless somebody pins it.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

PAGE_BYTES = 4096


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that can be had without swapping, or None where the system does not say: the kernel's estimate, cut by cgroup v2's limit."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(available, 0)


def require_memory(wanted_bytes: int, setting: str, available_bytes: int | None, *, ranks: int = 1) -> None:
    """Raise ConfigError, naming `setting`, where `wanted_bytes`, of so many ranks together, is more than is available."""
    if available_bytes is not None and wanted_bytes > available_bytes:
        what = f"{setting} is" if ranks == 1 else f"{setting}, of the {ranks} ranks on this machine together, is"
        raise ConfigError(
            f"{what} {wanted_bytes:,} bytes, and {available_bytes:,} bytes of memory are available: lower {setting}, "
            "or give the machine or its container more memory"
        )


class RankMemory(NamedTuple):
    """What a rank is about to allocate, and what it sees available on its machine."""

    machine: str
    wanted_bytes: int
    available_bytes: int | None


def require_memory_of_ranks(own: RankMemory, ranks: Sequence[RankMemory], setting: str) -> None:
    """Raise ConfigError where the ranks on `own`'s machine, which see the same memory available, want more than that together."""
    here = [rank for rank in ranks if rank.machine == own.machine]
    seen = [rank.available_bytes for rank in here if rank.available_bytes is not None]
    wanted_bytes = sum(rank.wanted_bytes for rank in here)
    require_memory(wanted_bytes, setting, min(seen, default=None), ranks=len(here))


class Arena:
    """`capacity_bytes` bytes of page-aligned, private memory, freed with the last view of it.

    Not mapped from /dev/shm: its size limit does not matter, and nothing is left behind by a process that dies.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes <= 0 or capacity_bytes % PAGE_BYTES:
            raise ValueError(f"an arena of {capacity_bytes} bytes: its size is a positive multiple of {PAGE_BYTES}")
        self.capacity_bytes = capacity_bytes
        self._memory = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A child of the engine never needs it, and copy-on-write would double what is in flight.
            self._memory.madvise(mmap.MADV_DONTFORK)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        self.address: int = self.array.ctypes.data

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """A writable view of a slot."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.capacity_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} do not lie in an arena of {self.capacity_bytes}")
        return memoryview(self._memory)[offset : offset + size_bytes]
