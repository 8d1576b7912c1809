"""The contract of a byte store: values of any length by key, with leases, in one process.

`kvtier.testing.bytestore_suite` holds it as tests that any implementation may subclass.

Words: a *value* is an immutable run of bytes. A *lease* keeps one value where it is: it is neither evicted nor deleted, and close
waits for it. A lease belongs to a *scope* (a request, a load) of an *owner* (an engine, a connector), and ends when it is
released, when its scope is released, or when its owner is closed or collected.

What every operation owes: it is thread-safe; it either does all of what it says or raises and changes nothing; after `close` was
called it raises StoreClosedError, except for releases.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from kvtier.errors import KVTierError
from kvtier.record.envelope import Buffer

Key = bytes


class ByteStoreError(KVTierError):
    """A byte store refused an operation, and nothing changed."""


class StoreClosedError(ByteStoreError):
    """The store is closed, or closing."""


class NoRoomError(ByteStoreError):
    """A value cannot be admitted: it is larger than the capacity, or too little of what is stored may be evicted."""


class KeyConflictError(ByteStoreError):
    """Other bytes are already stored under this key."""


class RecordLeasedError(ByteStoreError):
    """A leased value cannot be deleted. `holders` says who holds it."""

    def __init__(self, message: str, holders: "Sequence[LeaseInfo]") -> None:
        super().__init__(message)
        self.holders = tuple(holders)


class StillLeasedError(ByteStoreError):
    """Close met its deadline while leases were held. `holders` says by whom; the store stays closed to all else."""

    def __init__(self, message: str, holders: "Sequence[LeaseInfo]") -> None:
        super().__init__(message)
        self.holders = tuple(holders)


class PutResult(Enum):
    """What a put did."""

    STORED = "stored"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as others may see it; `held_s` is its age in seconds."""

    key: Key
    owner: str
    scope: str
    value_bytes: int
    held_s: float

    def __str__(self) -> str:
        return f"{self.owner!r} holds {self.key.hex()} ({self.value_bytes} bytes, {self.held_s:.3f} s) in scope {self.scope!r}"


class Lease(ABC):
    """A value that stays. A context manager: leaving it releases the lease."""

    @property
    @abstractmethod
    def key(self) -> Key:
        """Key of the value."""

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """The value, read-only."""

    @abstractmethod
    def release(self) -> None:
        """End the lease. A second release is a no-op."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()


class LeaseOwner(ABC):
    """Who takes leases. A context manager: leaving it ends all of them; so does its collection as garbage."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name, for reports."""

    @abstractmethod
    def lease(self, key: Key, scope: str = "") -> Lease | None:
        """A lease on `key`'s value, which counts as a read; None where the key is not stored."""

    @abstractmethod
    def release(self, scope: str) -> int:
        """End all leases of `scope`; how many there were."""

    @abstractmethod
    def close(self) -> int:
        """End all leases and take no more; how many there were."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class ByteStore(ABC):
    """Values of any length by key. See the module's text for what all operations owe."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """The most bytes of values that are stored at any time."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of all values stored."""

    @abstractmethod
    def put(self, key: Key, value: Buffer) -> PutResult:
        """Store `value`. The same bytes again change nothing; other bytes raise KeyConflictError; no room, NoRoomError."""

    @abstractmethod
    def get(self, key: Key) -> memoryview | None:
        """The value, read-only, or None. Counts as a use. The view stays good, but without a lease the value may leave the store."""

    @abstractmethod
    def exists(self, key: Key) -> bool:
        """Whether `key` is stored. Does not count as a use."""

    @abstractmethod
    def delete(self, key: Key) -> bool:
        """Drop `key`; whether it was there. Raises RecordLeasedError."""

    @abstractmethod
    def owner(self, name: str) -> LeaseOwner:
        """A new owner of leases."""

    @abstractmethod
    def leases(self) -> Sequence[LeaseInfo]:
        """All leases held now, oldest first."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of values stored."""

    @abstractmethod
    def close(self, deadline_s: float) -> None:
        """Refuse all but releases, wait at most `deadline_s` seconds for leases to end, then drop everything.

        Raises StillLeasedError where the deadline passes; then everything goes once the last lease ends, or `close` may be called
        again to wait for that.
        """
