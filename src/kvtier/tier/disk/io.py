"""The contract of an I/O engine: jobs go in, and come out finished, in batches, on the engine's own threads.

A `Job` is a short list of steps done one after the other: a single read of a slot, or the whole life of a new file (open,
write, sync, link, unlink, close). An engine runs jobs, not steps, so that nothing has to come back to Python between
two steps. After a step fails, the job's remaining steps are skipped, except those marked `always` (a close, the removal of a temporary
file); the first failure is the job's failure. A step's own `tolerated` errors are no failures.

Every engine: continues short reads and writes; retries EINTR, EAGAIN and EBUSY, within bounds; returns every other error for its own
job alone; starts jobs by lane (see `kvtier.tier.disk.lanes`); never touches a buffer after its job was handed to `finished`,
and hands each job over exactly once.
"""

import ctypes
import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np

from kvtier.tier.disk.base import Lane

PAGE_BYTES = 4096
# A read met the end of the file before its buffer was full.
END_OF_FILE = errno.ENODATA
RETRIED = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY})
RETRIES_MAX = 32


class Op(IntEnum):
    """What a step does. The values are used inside the ring's compiled loop."""

    READ = 0
    WRITE = 1
    SYNC_DATA = 2
    SYNC = 3
    OPEN = 4
    CLOSE = 5
    LINK = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    FALLOCATE = 10
    STAT = 11


@dataclass(slots=True)
class Step:
    """One operation of a job. Which fields count depends on `op`.

    Attributes:
        op: what to do.
        fd: open file, or -1 for what this job's OPEN gave.
        offset: bytes from the start of the file.
        buffer: bytes to write, or room to fill; its whole length is meant. On a file opened with O_DIRECT its address, its length
            and `offset` are multiples of 4,096.
        address: of the buffer's first byte.
        path: file or directory named, for OPEN, LINK (existing), RENAME (old), UNLINK, MKDIR, STAT.
        path_to: the new name, for LINK and RENAME.
        flags: for OPEN as in `os.open`; for FALLOCATE its mode.
        length: bytes, for FALLOCATE; for STAT the size that the file must have, or -1 for any.
        tolerated: errno values that count as success.
        always: do it even if an earlier step failed (a CLOSE is skipped where nothing was opened).
    """

    op: Op
    fd: int = -1
    offset: int = 0
    buffer: memoryview | None = None
    address: int = 0
    path: bytes = b""
    path_to: bytes = b""
    flags: int = 0
    length: int = 0
    tolerated: tuple[int, ...] = ()
    always: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """Steps that belong together, and after `finished` how they ended.

    Attributes:
        steps: done in order.
        lane: whose turn.
        deadline_s: on the clock of `time.monotonic`; orders jobs inside a lane, cancels nothing.
        tag: the submitter's own.
        error: 0, or errno of the first step that failed; ECANCELED for a job given up before it started.
        failed_step: index of that step.
        moved_bytes: of all READ and WRITE steps together; after a STAT, the file's size.
    """

    steps: tuple[Step, ...]
    lane: Lane = Lane.DEMAND
    deadline_s: float | None = None
    tag: Any = None
    error: int = 0
    failed_step: int = -1
    moved_bytes: int = 0
    finished: "Finished | None" = field(default=None, repr=False)
    cancelled: bool = False


Finished = Callable[[list[Job]], None]


class IOEngine(ABC):
    """Runs jobs. Thread-safe. A forked child must not use its parent's engine: it gets ECANCELED for every job.

    Attributes:
        name: `threads` or `ring`.
        chosen_because: why this engine runs here, in words.
    """

    name: ClassVar[str]
    chosen_because: str = ""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], finished: Finished) -> None:
        """Run `jobs`; `finished` gets them in batches, as they end. It runs on the engine's thread, must not block nor raise."""

    @abstractmethod
    def cancel(self, jobs: Sequence[Job]) -> None:
        """Give up those of `jobs` that have not started; they end with ECANCELED. Others go on."""

    def promote(self, jobs: Sequence[Job], lane: Lane, deadline_s: float | None) -> None:
        """Move those of `jobs` that have not started to another lane and deadline."""
        return

    def register_memory(self, view: memoryview) -> str:
        """Tell the engine of memory that most buffers lie in. Empty where that made I/O cheaper, else why it did not."""
        return f"the {self.name} engine has no use for it"

    def register_file(self, fd: int) -> None:
        """Tell the engine of an open file that many steps will name."""
        return

    def forget_file(self, fd: int) -> None:
        """That file will be closed; nothing is queued or under way on it."""
        return

    @abstractmethod
    def in_flight(self) -> int:
        """Jobs started and not finished."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Cancel what has not started and wait for the rest, at most `deadline_s` seconds. True if all ended.

        Where False, the operations under way keep their buffers, and their jobs are handed over when they end.
        """


def address_of(buffer: memoryview) -> int:
    """Address of the first byte of a contiguous view, 0 for an empty one."""
    if buffer.nbytes == 0:
        return 0
    if buffer.readonly:
        return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def aligned_buffer(length_bytes: int) -> memoryview:
    """New zeroed memory whose address is a multiple of 4,096."""
    return memoryview(mmap.mmap(-1, max(length_bytes, 1)))[:length_bytes]


def error_text(error: int) -> str:
    """An errno in words: `ENOSPC: No space left on device`."""
    if error == END_OF_FILE:
        return "the file ends before the part does"
    return f"{errno.errorcode.get(error, str(error))}: {os.strerror(error)}"
