"""`MEMORY`: a bounded byte store in this process's memory. Volatile, thread-safe, no I/O, one lock.

Invariants, true whenever the lock is free:

- `used_bytes` is the sum of the lengths of all values, and at most `capacity_bytes`; there are at most `records_max` of them.
- The policy holds exactly the keys that are stored.
- A value with a lease is stored.

**Admission.** A put first walks the policy's candidates until their bytes and what is free suffice; only then it removes them as
one batch and inserts. If the candidates run out, nothing was touched.

**Ownership of values.** `bytes`, and contiguous read-only views, are *borrowed*: the store keeps a reference and copies nothing.
Who gives a borrowed view promises that nobody changes the bytes behind it for as long as the store holds it: a read-only view
does not stop the owner of its buffer from writing there. A borrowed view also keeps the whole of its exporter alive (an mmap cannot
be closed, a bytearray not resized; a small slice of a large buffer pins the large one): copy first where that matters. Writable, strided and
Fortran-ordered inputs are copied, in C order. A view's length is its bytes, whatever its shape and format.

**What `capacity_bytes` leaves out**: Python's objects for each record (about 400 bytes, see `docs/formats.md`), the allocator's rounding, values that
were evicted while a reader still holds a view of them, the copies that a put makes before it is admitted, and the rest of a
buffer of which a slice was borrowed. Size a process by measuring it, not by this number.

**Finalizers.** The collector may run anywhere, also in the middle of an operation, and with it what others wrote: a handle that releases its lease, a
buffer that tells its pool. So the lock lets its own thread in again, `_alone` knows whether an operation is under way, and what is asked from inside one
is refused, except for releases: those are noted, and ended by the next operation. Values that leave the store are let go of after the lock. An owner
that is collected is noted in the same way.

**Interrupts.** An exception that is no refusal (a Ctrl-C, say) may end an operation half-way. The next one then makes all counts and the order anew
from the records and the leases; which record was used when is forgotten.

**Fork.** A fork waits for the operations under way, so that the child has a sound copy of the store, leases included, and not a lock held by a thread
that it doesn't have. From then on they are two stores.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, ParamSpec, TypeVar

import msgspec

from kvtier.errors import ConfigError
from kvtier.memory.base import (
    ByteStore,
    ByteStoreError,
    Key,
    KeyConflictError,
    Lease,
    LeaseInfo,
    LeaseOwner,
    NoRoomError,
    PutResult,
    RecordLeasedError,
    StillLeasedError,
    StoreClosedError,
)
from kvtier.policy.base import RecordInfo
from kvtier.policy.registry import make_policy
from kvtier.record.envelope import Buffer

RECORDS_MAX_DEFAULT: Final = 1 << 24
_COMPARE_STEP_BYTES: Final = 1 << 16
# An owner that is collected while `close` waits cannot wake it: it looks this often.
_CLOSE_STEP_S: Final = 0.05
_HOLDERS_SHOWN: Final = 8

P = ParamSpec("P")
T = TypeVar("T")
# What of an owner's leases ends: one by its number, those of a scope, or all with the owner (None).
_What = int | str | None


class _Record(msgspec.Struct, eq=False, gc=False):
    """One stored value. The collector need not walk millions of these: they are in no cycle."""

    value: Buffer
    value_bytes: int
    lease_count: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    """A lease as the store books it."""

    key: Key
    record: _Record
    scope: str
    since_s: float


@dataclass(slots=True, eq=False)
class _OwnerBook:
    name: str
    held: dict[int, _Held] = field(default_factory=dict)
    scopes: dict[str, set[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ByteStoreStats:
    """Counts since the store was made, and what it holds now."""

    records: int
    used_bytes: int
    leased_records: int
    leased_bytes: int
    hits: int
    misses: int
    stored: int
    unchanged: int
    evicted: int
    deleted: int
    conflicts: int
    no_room: int


def take_value(value: Buffer) -> Buffer:
    """What the store keeps of `value`: itself where it may be borrowed, else a copy in C order."""
    if type(value) is bytes:
        return value
    view = memoryview(value)
    if view.readonly and view.c_contiguous and view.nbytes:
        if view.ndim == 1 and view.format == "B":
            return view
        if view.format in _CASTABLE_FORMATS:
            return view.cast("B")
    return view.tobytes()


_CASTABLE_FORMATS = frozenset("bBhHiIlLqQnNfdecP?") | {"@" + code for code in "bBhHiIlLqQnNfdecP?"}


def same_bytes(one: Buffer, other: Buffer) -> bool:
    """Whether two byte runs are equal. Compared in steps that stay in the processor's cache; views compare item by item otherwise."""
    if type(one) is bytes and type(other) is bytes:
        return one == other
    if len(one) != len(other):
        return False
    step = _COMPARE_STEP_BYTES
    return all(bytes(one[at : at + step]) == bytes(other[at : at + step]) for at in range(0, len(one), step))


class _MemoryLease(Lease):
    __slots__ = ("_id", "_key", "_owner", "_view")

    def __init__(self, owner: "_MemoryOwner", lease_id: int, key: Key, view: memoryview) -> None:
        self._owner = owner
        self._id = lease_id
        self._key = key
        self._view = view

    @property
    def key(self) -> Key:
        return self._key

    @property
    def view(self) -> memoryview:
        return self._view

    def release(self) -> None:
        self._owner._store._end(self._owner._id, self._id)


class _MemoryOwner(LeaseOwner):
    """Leases keep their owner alive, so that an owner is collected only when nobody can release through it any more."""

    def __init__(self, store: "MemoryByteStore", owner_id: int, name: str) -> None:
        self._store = store
        self._id = owner_id
        self._name = name
        weakref.finalize(self, store._ended.append, (owner_id, None)).atexit = False

    @property
    def name(self) -> str:
        return self._name

    def lease(self, key: Key, scope: str = "") -> Lease | None:
        return self._store._lease(self, key, scope)

    def release(self, scope: str) -> int:
        return self._store._end(self._id, scope)

    def close(self) -> int:
        return self._store._end(self._id, None)


class MemoryByteStore(ByteStore):
    """A byte store bounded to `capacity_bytes` of values, in memory, with an eviction policy chosen by name.

    Args:
        capacity_bytes: bound of `used_bytes`; see the module's text for what it leaves out.
        policy: name of an eviction policy (`kvtier.policy.registry`).
        records_max: bound of the number of records; it matters for values of few bytes or none.
        clock_s: seconds that never run backwards, for the policy, for the age of leases and for close's deadline.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        policy: str = "lru",
        records_max: int = RECORDS_MAX_DEFAULT,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(capacity_bytes) is not int or capacity_bytes <= 0:
            raise ConfigError(f"capacity_bytes is {capacity_bytes!r}: MEMORY needs a whole number of bytes, at least 1")
        if type(records_max) is not int or records_max <= 0:
            raise ConfigError(
                f"records_max is {records_max!r}: MEMORY needs room for a whole number of records, at least 1"
            )
        try:
            self._policy = make_policy(policy, capacity_bytes)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._capacity_bytes = capacity_bytes
        self._records_max = records_max
        self._clock_s = clock_s
        self._lock = threading.RLock()
        _stores[id(self)] = self
        self._inside = False
        self._torn = False
        self._lease_ended = threading.Condition(self._lock)
        self._records: dict[Key, _Record] = {}
        self._used_bytes = 0
        self._owners: dict[int, _OwnerBook] = {}
        self._ended: deque[tuple[int, _What]] = deque()
        self._gone: list[_Record] = []
        self._next_id = 0
        self._lease_count = 0
        self._leased_records = 0
        self._leased_bytes = 0
        self._closing = False
        self._hits = self._misses = self._stored = self._unchanged = 0
        self._evicted = self._deleted = self._conflicts = self._no_room = 0

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def policy_name(self) -> str:
        """Name of the eviction policy."""
        return self._policy.name

    @property
    def closed(self) -> bool:
        """Whether `close` was called: all but releases is refused."""
        return self._closing

    def __len__(self) -> int:
        return len(self._records)

    def _alone(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` with the lock, after what ended meanwhile. Raises ByteStoreError where this thread is inside an operation already."""
        with self._lock:
            if self._inside:
                raise ByteStoreError(
                    "MEMORY was asked by a finalizer that runs in the middle of another operation: only releases may be done there"
                )
            self._inside = True
            try:
                if self._torn:
                    self._mend()
                self._torn = True
                while self._ended:
                    self._end_now(*self._ended[0])
                    self._ended.popleft()
                result = work(*args, **kwargs)
                self._torn = False
                return result
            except ByteStoreError:  # refused, before anything changed
                self._torn = False
                raise
            finally:
                self._inside = False
                # Kept until the lock is free: what lent these values may ask the store when they go.
                _until_free, self._gone = self._gone, []

    def _mend(self) -> None:
        """Make all that is derived again, from what is stored and who leases it: an interrupt or the like ended an operation half-way."""
        self._used_bytes = sum(record.value_bytes for record in self._records.values())
        for record in self._records.values():
            record.lease_count = 0
        self._lease_count = 0
        for book in self._owners.values():
            book.scopes = {}
            book.held = {
                lease_id: held for lease_id, held in book.held.items() if self._records.get(held.key) is held.record
            }
            self._lease_count += len(book.held)
            for lease_id, held in book.held.items():
                held.record.lease_count += 1
                book.scopes.setdefault(held.scope, set()).add(lease_id)
        leased = [record for record in self._records.values() if record.lease_count]
        self._leased_records, self._leased_bytes = len(leased), sum(record.value_bytes for record in leased)
        sizes = [RecordInfo(record.value_bytes) for record in self._records.values()]
        policy = make_policy(self._policy.name, self._capacity_bytes)
        policy.fill(tuple(self._records), sizes.__getitem__, self._clock_s())
        self._policy = policy
        if self._closing:
            self._finish_close()

    # -- values ----------------------------------------------------------------------------------------------------------

    def put(self, key: Key, value: Buffer) -> PutResult:
        _check_key(key)
        value_bytes = len(value) if type(value) is bytes else memoryview(value).nbytes
        # What is larger than the store is refused by its length: a copy of it might not fit into memory.
        taken = take_value(value) if value_bytes <= self._capacity_bytes else b""
        present = self._alone(self._put, key, taken, value_bytes)
        if present is None:
            return PutResult.STORED
        # Values never change, so they are compared without the lock.
        same = present.value_bytes == value_bytes and same_bytes(present.value, taken)
        self._alone(self._count_repeat, same)
        if same:
            return PutResult.UNCHANGED
        raise KeyConflictError(
            f"key {key.hex()} already holds {present.value_bytes} other bytes than the {value_bytes} given: delete it first, or put what differs under another key"
        )

    def _put(self, key: Key, taken: Buffer, value_bytes: int) -> _Record | None:
        """What stands under `key` already, else None, and `taken` stands there."""
        self._check_open()
        present = self._records.get(key)
        if present is None:
            self._admit(key, value_bytes)
            self._records[key] = _Record(taken, value_bytes)
            self._used_bytes += value_bytes
            self._stored += 1
        return present

    def _count_repeat(self, same: bool) -> None:
        if same:
            self._unchanged += 1
        else:
            self._conflicts += 1

    def _admit(self, key: Key, value_bytes: int) -> None:
        """Make room for `key` and enter it into the policy, or raise NoRoomError with nothing changed."""
        now_s = self._clock_s()
        short_bytes = self._used_bytes + value_bytes - self._capacity_bytes
        short_records = len(self._records) + 1 - self._records_max
        if short_bytes > 0 or short_records > 0:
            victims = self._find_victims(key, value_bytes, short_bytes, short_records, now_s)
            for victim in victims:
                self._drop(victim, now_s, evicted=True)
            self._evicted += len(victims)
        self._policy.insert(key, RecordInfo(value_bytes), now_s)

    def _find_victims(
        self, key: Key, value_bytes: int, short_bytes: int, short_records: int, now_s: float
    ) -> list[Key]:
        if value_bytes > self._capacity_bytes:
            self._no_room += 1
            raise NoRoomError(
                f"a value of {value_bytes} bytes is larger than the whole capacity of {self._capacity_bytes}: raise capacity_bytes"
            )
        # What is leased says at once whether a walk can end well: one that can't might visit every record.
        if self._leased_bytes + value_bytes <= self._capacity_bytes and self._leased_records < self._records_max:
            records = self._records
            victims: list[Key] = []
            found_bytes = 0
            for candidate in self._policy.candidates(now_s, self._is_leased, incoming=key):
                victims.append(candidate)
                found_bytes += records[candidate].value_bytes
                if found_bytes >= short_bytes and len(victims) >= short_records:
                    return victims
        self._no_room += 1
        raise NoRoomError(
            f"no room for {value_bytes} bytes: {self._used_bytes} of {self._capacity_bytes} are used, and {self._leased_bytes} of them, in "
            f"{self._leased_records} records, are under {self._lease_count} leases: release leases or raise capacity_bytes"
        )

    def _is_leased(self, key: Key) -> bool:
        return self._records[key].lease_count > 0

    def _drop(self, key: Key, now_s: float, *, evicted: bool) -> None:
        record = self._records.pop(key)
        self._gone.append(record)
        self._used_bytes -= record.value_bytes
        self._policy.remove(key, now_s, evicted=evicted)

    def get(self, key: Key) -> memoryview | None:
        _check_key(key)
        record = self._alone(self._used, key)
        return None if record is None else memoryview(record.value)

    def _used(self, key: Key) -> _Record | None:
        """The record of `key`, which is used now; None where it is missed."""
        self._check_open()
        record = self._records.get(key)
        if record is None:
            self._misses += 1
            return None
        self._hits += 1
        self._policy.access(key, self._clock_s())
        return record

    def exists(self, key: Key) -> bool:
        _check_key(key)
        return self._alone(self._exists, key)

    def _exists(self, key: Key) -> bool:
        self._check_open()
        return key in self._records

    def delete(self, key: Key) -> bool:
        _check_key(key)
        return self._alone(self._delete, key)

    def _delete(self, key: Key) -> bool:
        self._check_open()
        record = self._records.get(key)
        if record is None:
            return False
        if record.lease_count:
            holders = [info for info in self._lease_infos() if info.key == key]
            raise RecordLeasedError(f"key {key.hex()} cannot be deleted: {_shown(holders)}", holders)
        self._drop(key, self._clock_s(), evicted=False)
        self._deleted += 1
        return True

    # -- leases ----------------------------------------------------------------------------------------------------------

    def owner(self, name: str) -> LeaseOwner:
        return self._alone(self._new_owner, name)

    def _new_owner(self, name: str) -> LeaseOwner:
        self._check_open()
        self._next_id += 1
        self._owners[self._next_id] = _OwnerBook(name)
        return _MemoryOwner(self, self._next_id, name)

    def leases(self) -> Sequence[LeaseInfo]:
        return self._alone(self._lease_infos)

    def _lease_infos(self) -> list[LeaseInfo]:
        now_s = self._clock_s()
        held = [(lease_id, book.name, held) for book in self._owners.values() for lease_id, held in book.held.items()]
        held.sort(key=lambda item: item[0])
        return [
            LeaseInfo(lease.key, name, lease.scope, lease.record.value_bytes, now_s - lease.since_s)
            for _, name, lease in held
        ]

    def _lease(self, owner: _MemoryOwner, key: Key, scope: str) -> Lease | None:
        _check_key(key)
        if type(scope) is not str:
            raise ByteStoreError(f"a scope is a name, {scope!r} is {type(scope).__name__}")
        return self._alone(self._new_lease, owner, key, scope)

    def _new_lease(self, owner: _MemoryOwner, key: Key, scope: str) -> Lease | None:
        self._check_open()
        book = self._owners.get(owner._id)
        if book is None:
            raise ByteStoreError(f"owner {owner.name!r} is closed and takes no more leases: make a new one")
        record = self._used(key)
        if record is None:
            return None
        if record.lease_count == 0:
            self._leased_records += 1
            self._leased_bytes += record.value_bytes
        record.lease_count += 1
        self._lease_count += 1
        self._next_id += 1
        book.held[self._next_id] = _Held(key, record, scope, self._clock_s())
        book.scopes.setdefault(scope, set()).add(self._next_id)
        return _MemoryLease(owner, self._next_id, key, memoryview(record.value))

    def _end(self, owner_id: int, what: _What) -> int:
        """End leases now, or with the next operation where this thread is inside one; how many there are."""
        with self._lock:
            if self._inside:
                self._ended.append((owner_id, what))
                return len(self._leases_of(owner_id, what))
        return self._alone(self._end_now, owner_id, what)

    def _leases_of(self, owner_id: int, what: _What) -> tuple[int, ...]:
        book = self._owners.get(owner_id)
        if book is None:
            return ()
        if what is None:
            return tuple(book.held)
        if isinstance(what, str):
            return tuple(book.scopes.get(what, ()))
        return (what,) if what in book.held else ()

    def _end_now(self, owner_id: int, what: _What) -> int:
        lease_ids = self._leases_of(owner_id, what)
        book = self._owners.get(owner_id)
        if book is None:
            return 0
        for lease_id in lease_ids:
            held = book.held.pop(lease_id)
            in_scope = book.scopes[held.scope]
            in_scope.discard(lease_id)
            if not in_scope:
                del book.scopes[held.scope]
            held.record.lease_count -= 1
            if held.record.lease_count == 0:
                self._leased_records -= 1
                self._leased_bytes -= held.record.value_bytes
        self._lease_count -= len(lease_ids)
        if what is None:
            del self._owners[owner_id]
        if self._closing:
            self._finish_close()
        return len(lease_ids)

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing:
            raise StoreClosedError("the MEMORY store is closed: open a new one")

    def _finish_close(self) -> None:
        """Drop everything once no lease is left. Called with the lock, while closing, whenever leases end."""
        if self._lease_count:
            return
        now_s = self._clock_s()
        for key in tuple(self._records):
            self._drop(key, now_s, evicted=False)
        self._owners.clear()
        self._lease_ended.notify_all()

    def close(self, deadline_s: float) -> None:
        until_s = self._clock_s() + deadline_s
        while not self._alone(self._try_close):
            left_s = until_s - self._clock_s()
            if not left_s > 0:  # a deadline that is no number has passed too
                holders = self.leases()
                if not holders:
                    continue
                raise StillLeasedError(
                    f"MEMORY could not close within {deadline_s:g} s: {_shown(holders)}. Everything goes once the last is released",
                    holders,
                )
            with self._lease_ended:
                if self._lease_count:
                    self._lease_ended.wait(min(left_s, _CLOSE_STEP_S))

    def _try_close(self) -> bool:
        self._closing = True
        self._finish_close()
        return not self._lease_count

    def stats(self) -> ByteStoreStats:
        """What was counted."""
        return self._alone(self._stats)

    def _stats(self) -> ByteStoreStats:
        return ByteStoreStats(
            records=len(self._records),
            used_bytes=self._used_bytes,
            leased_records=self._leased_records,
            leased_bytes=self._leased_bytes,
            hits=self._hits,
            misses=self._misses,
            stored=self._stored,
            unchanged=self._unchanged,
            evicted=self._evicted,
            deleted=self._deleted,
            conflicts=self._conflicts,
            no_room=self._no_room,
        )


def _check_key(key: Key) -> None:
    if type(key) is not bytes:
        raise ByteStoreError(f"a key is bytes, {key!r} is {type(key).__name__}: encode it first")


def _shown(holders: Sequence[LeaseInfo]) -> str:
    more = len(holders) - _HOLDERS_SHOWN
    return "; ".join(str(info) for info in holders[:_HOLDERS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


# Every store of this process, and those whose locks the forking thread holds.
_stores: "weakref.WeakValueDictionary[int, MemoryByteStore]" = weakref.WeakValueDictionary()
_forking = threading.local()


def _before_fork() -> None:
    _forking.stores = [store for ref in _stores.valuerefs() if (store := ref()) is not None]
    for store in _forking.stores:
        store._lock.acquire()


def _after_fork() -> None:
    for store in _forking.stores:
        store._lock.release()
    del _forking.stores


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
