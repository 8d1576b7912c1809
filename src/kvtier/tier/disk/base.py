"""The contract of a part store: the parts of one rank on one medium below memory.

A part is written and read as an opaque run of bytes that its caller has sealed (see `kvtier.record`): the
store neither builds nor checks envelopes on the way, except when it rebuilds a lost catalog. Buffers belong to the I/O from
`submit_*` until the part's `PartDone` was delivered, whatever the caller's deadline says. `done` is called from the store's own
threads, with one or more parts at a time as they finish, must not block, and is called exactly once for every part.

A write is published, that is, found by `read`, `entries` and a later process, only when its bytes and then its catalog entry are
safe to the degree that the store's `durability` asks. Orders given by one thread take effect in the order given: a `delete`
frees its room before a later write looks for room.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Key = bytes


class Lane(Enum):
    """Whose turn it is on the medium, first to last; background writes keep a guaranteed share."""

    DEMAND = "demand"
    PRELOAD = "preload"
    WRITE = "write"
    MAINTENANCE = "maintenance"


class PartFailure(Enum):
    """Why a part could not be written or read."""

    MISSING = "missing"
    SHORT = "short"
    NO_SPACE = "no_space"
    IO = "io"
    EXISTS_DIFFERENT = "exists_different"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    CORRUPT = "corrupt"
    OVER_BUDGET = "over_budget"


@dataclass(frozen=True, slots=True)
class PartWrite:
    """Bytes to store under `key`.

    Attributes:
        key: name of the part on this rank, unique within the store's namespace.
        buffer: a contiguous byte view. Its address and length are multiples of 4,096 when it lies in a registered arena; the
            store copies it to an aligned buffer otherwise.
        value_s_per_byte: seconds of recompute that the part saves, per byte stored.
        depth_tokens: tokens of the prefix that ends with this part.
    """

    key: Key
    buffer: memoryview
    value_s_per_byte: float = 0.0
    depth_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PartRead:
    """A part wanted in `buffer`, a writable contiguous byte view exactly as long as what was stored."""

    key: Key
    buffer: memoryview


class PartDone(NamedTuple):
    """One part's end: `failure` is None where it succeeded, `detail` then is empty."""

    key: Key
    failure: PartFailure | None = None
    detail: str = ""


class PartEntry(NamedTuple):
    """A published part, as the catalog knows it.

    Attributes:
        key: its name.
        stored_bytes: length of the run that was written.
        depth_tokens: as given at its write.
        value_s_per_byte: as given at its write.
    """

    key: Key
    stored_bytes: int
    depth_tokens: int = 0
    value_s_per_byte: float = 0.0


PartsDone = Callable[[Sequence[PartDone]], None]


class Transfer(ABC):
    """A batch under way."""

    @abstractmethod
    def cancel(self) -> None:
        """Give up what has not started; each such part ends as CANCELLED. What is in flight goes on."""

    def promote(self, lane: Lane, deadline_s: float | None = None) -> None:
        """Move what has not started to another lane and deadline: a preload that a request now waits for. A store may know no lanes."""
        return


class PartStore(ABC):
    """The parts of one rank, in one namespace, on one medium. Thread-safe."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """The epoch whose parts are served: grows by `reset`, and never shrinks, over restarts too."""

    @abstractmethod
    def entries(self) -> Iterable[PartEntry]:
        """Every published part of this generation, oldest use first where that is known."""

    def keys_and_depths(self) -> tuple[list[Key], list[int]]:
        """Of `entries`, in their order, keys and depths in tokens: what the control plane begins with."""
        entries = list(self.entries())
        return [entry.key for entry in entries], [entry.depth_tokens for entry in entries]

    @abstractmethod
    def submit_write(self, parts: Sequence[PartWrite], done: PartsDone, *, lane: Lane = Lane.WRITE) -> Transfer:
        """Store `parts`. A key that is already published is a success without a write (same key, same bytes).

        Where it raises (a buffer that is not contiguous), nothing was taken and `done` is not called.
        """

    @abstractmethod
    def submit_read(
        self, parts: Sequence[PartRead], done: PartsDone, *, lane: Lane = Lane.DEMAND, deadline_s: float | None = None
    ) -> Transfer:
        """Read `parts`, in order as far as the medium allows; `deadline_s` orders lanes and cancels nothing.

        Where it raises (a buffer that is not contiguous or not writable), nothing was taken and `done` is not called.
        """

    @abstractmethod
    def delete(self, keys: Sequence[Key]) -> None:
        """Unpublish and free `keys`; those not there are ignored. Parts being read end their read first."""

    @abstractmethod
    def reset(self, generation: int) -> None:
        """Make `generation` durable, then drop every part: none of an older one is served again.

        What is written afterwards is served until the store is closed: whoever resets may have changed the weights in place, so a later
        process, which has those of its namespace again, begins with a generation of its own.
        """

    @abstractmethod
    def flush(self, deadline_s: float) -> bool:
        """Wait until all that was submitted is published, at most `deadline_s` seconds. True if it is."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Flush, stop the threads and let go of the path. True if everything was published in time."""
