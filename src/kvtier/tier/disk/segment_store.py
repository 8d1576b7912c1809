"""The part store for one node's own disk: slots in segment files, and a catalog that says which slot holds what.

Who does what. Callers' threads look things up and reserve room, under one lock, and never wait for the disk. The I/O engine moves the
bytes. One keeper thread owns the catalog and the shape of the files: it commits in batches, frees slots, grows and trims segments, and
starts the writes that had to wait for a slot.

A part's life:

    submit_write ──▶ waiting (no slot is ready) ──▶ in flight ──▶ written ──▶ [data synced] ──▶ committed ──▶ published
    delete ──▶ unpublished at once ──▶ removal committed ──▶ last read ended ──▶ slot ready again

Invariants:

- A slot is written again only after the removal of what it held was committed. So a row of the catalog never points at the bytes of another part,
  whenever the process dies; and a reader in another process that finds its row unchanged after its read has read what the row means.
- Room is counted in whole slots. What is published, in flight or waiting never exceeds the capacity, and neither does the disk that segments take. A
  removed part stops counting at once, so that a delete makes room for the next write; that write then waits, if it must, until the slot is free.
- A store joined read-only asks the owner's catalog again after each read, and answers MISSING where the row is gone.
- What was reset is gone: the new generation is durable before `reset` returns, and a read or write that was under way does not end as a success. The number
  kept for the next start is one more: what is written after a reset may be of weights that only this process has.

What `durability` promises of a part whose `PartDone` was a success:

- `none`: it survives the death of the process. After a power cut the catalog may be damaged; then it is rebuilt.
- `flush`: data reaches the medium before the row is written. After a power cut the last batches may be missing, and what was removed last may be listed again,
  to be found out by its hash at the read; what is served is whole.
- `sync`: data, then the row, are on the medium. It survives a power cut.

A forked child shares nothing: every call on its parent's store fails as CLOSED there.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import sqlite3
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.memory.collector import collector_paused
from kvtier.policy.base import EvictionPolicy, RecordInfo
from kvtier.record.envelope import HEAD_BYTES_MAX, Identity
from kvtier.tier.disk.base import (
    Key,
    Lane,
    PartDone,
    PartEntry,
    PartFailure,
    PartRead,
    PartsDone,
    PartStore,
    PartWrite,
    Transfer,
)
from kvtier.tier.disk.catalog import (
    CATALOG_NAME,
    DAMAGED_NAME,
    Catalog,
    CatalogCorruptError,
    CatalogRow,
    damage_told,
    is_damage,
)
from kvtier.tier.disk.endurance import EnduranceMeter, WriteBudget
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.index import PartIndex, slots_taken_twice
from kvtier.tier.disk.io import END_OF_FILE, PAGE_BYTES, IOEngine, Job, Op, Step, address_of, aligned_buffer, error_text
from kvtier.tier.disk.rebuild import replace_damaged, scan_segments, signed_hash
from kvtier.tier.disk.segments import Segment, Segments, find_segments, slot_bytes_for, sync_directory

FORMAT = "kvtier-segments"
FORMAT_VERSION = 1
FORMAT_NAME = "format.json"
LOCK_NAME = "lock"
_GENERATION_END = 1 << 62
_TOUCH_PERIOD_S = 30.0
_RESET_WAIT_S = 60.0
_RETRY_PAUSE_S = 0.05
_NOTES_MAX = 64
_GROUP = 64
_REFRESH_PERIOD_S = 0.2

Durability = Literal["none", "flush", "sync"]


class _Entry:
    """A published part, or one that is on its way out."""

    __slots__ = (
        "depth_tokens", "head_hash", "id", "key", "readers", "removal_committed", "removed", "segment", "slot", "stored_bytes", "used",
        "value_s_per_byte",
    )  # fmt: skip

    def __init__(
        self,
        id_: int,
        key: Key,
        segment: Segment,
        slot: int,
        stored_bytes: int,
        head_hash: int,
        depth_tokens: int,
        value_s_per_byte: float,
        used: int,
    ) -> None:
        self.id = id_
        self.key = key
        self.segment = segment
        self.slot = slot
        self.stored_bytes = stored_bytes
        self.head_hash = head_hash
        self.depth_tokens = depth_tokens
        self.value_s_per_byte = value_s_per_byte
        self.used = used
        self.readers = 0
        self.removed = False
        self.removal_committed = False


class _Batch(Transfer):
    """One call of submit_read or submit_write."""

    __slots__ = ("_store", "done", "generation", "jobs", "writes")

    def __init__(self, store: "SegmentStore", done: PartsDone, generation: int) -> None:
        self._store = store
        self.done = done
        self.generation = generation
        self.jobs: list[Job] = []
        self.writes: list[_Write] = []

    def cancel(self) -> None:
        self._store._cancel(self)

    def promote(self, lane: Lane, deadline_s: float | None = None) -> None:
        if os.getpid() == self._store._pid:
            self._store._io.promote(list(self.jobs), lane, deadline_s)


@dataclass(slots=True, eq=False)
class _Write:
    """A part on its way in. `owners` are the batches that wait for it: more than one where a key was stored twice at a time."""

    part: PartWrite
    slot_bytes: int
    lane: Lane
    owners: list[_Batch]
    generation: int
    segment: Segment | None = None
    slot: int = -1
    head_hash: int = 0
    dropped: bool = False
    failure: PartFailure | None = None
    detail: str = ""
    job: Job | None = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class _Read:
    part: PartRead
    address: int
    batch: _Batch
    entry: _Entry
    bounce: memoryview | None = None


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Figures of one store at one moment. Bytes unless the name says otherwise.

    `used_bytes` counts whole slots of all that is published, in flight or waiting; `disk_bytes` the room that segment files take.
    """

    parts: int
    used_bytes: int
    stored_bytes: int
    disk_bytes: int
    catalog_bytes: int
    capacity_bytes: int
    written_bytes: int
    read_bytes: int
    writes_failed: int
    reads_failed: int
    parts_corrupt: int
    keys_differed: int
    parts_evicted: int
    commits: int
    callbacks_failed: int


class SegmentStore(PartStore):
    """Parts of one rank and namespace in segment files below `<path>/<namespace hex>/rank_<rank>/`.

    Args:
        path: an existing directory of ours on a local filesystem.
        namespace: fingerprint of all that must be equal for bytes to mean the same.
        rank: this rank; each has a directory of its own.
        capacity_bytes: most disk that parts may take, hard.
        durability: what a success promises, see the module's text.
        free_bytes_min: the filesystem keeps at least this much free; writes that need new room then fail as NO_SPACE.
        io: the engine to use, closed with the store; by default the best that works here.
        iodepth: most operations in flight, for the default engine.
        arena: memory that most buffers lie in, registered with the engine where it can be.
        read_only: join a store that another process owns: reads alone, and its changes are seen.
        segment_bytes: longest segment file; by default a 32nd of the capacity, at least 1 GiB.
        direct: ask for O_DIRECT. Where the filesystem refuses it, I/O is buffered: see `direct_io`.
        commit_pause_s: gather commits for this long when writes come in a row; 0 commits as soon as the keeper is free.
        part_key: the name under which a sealed part was written, to rebuild a lost catalog; its envelope's key by default.
        policy: who goes when a write finds the store full; None where the control plane decides, as it does in an engine: then such a
            write fails as NO_SPACE. The policy learns each part's size, depth and cost (value times size).
        bytes_a_day: what the drive may be written (see `kvtier.tier.disk.endurance`); 0 for no limit.
        wall_clock: seconds since the epoch, for that budget.

    Attributes:
        directory: where its files are.
        direct_io: whether the page cache is bypassed.
        arena_registered_reason: why the arena is not registered with the kernel, empty where it is.
        notes: what was found and done at opening that an operator should know.

    Raises:
        StoreUnavailableError: the path is missing, no directory, not ours, not writable, of another version, or held by another process.
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        path: Path,
        *,
        namespace: bytes,
        capacity_bytes: int,
        durability: Durability = "flush",
        free_bytes_min: int = 0,
        rank: int = 0,
        io: IOEngine | None = None,
        iodepth: int = 16,
        arena: memoryview | None = None,
        read_only: bool = False,
        segment_bytes: int | None = None,
        grow_bytes: int = 64 << 20,
        direct: bool = True,
        commit_pause_s: float = 0.0,
        part_key: Callable[[Identity], Key] = lambda identity: identity.key,
        policy: EvictionPolicy | None = None,
        bytes_a_day: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if durability not in ("none", "flush", "sync"):
            raise ConfigError(f"durability is {durability!r}: use none, flush or sync")
        if capacity_bytes < PAGE_BYTES and not read_only:
            raise ConfigError(f"capacity_bytes is {capacity_bytes}: give at least {PAGE_BYTES}")
        if rank < 0 or not namespace:
            raise ConfigError(
                f"rank is {rank} and namespace {namespace!r}: a store needs a rank of 0 or more and a namespace"
            )
        self.notes: list[str] = []
        self._pid = os.getpid()
        self._read_only = read_only
        self._durability: Durability = durability
        self._commit_pause_s = commit_pause_s
        self._part_key = part_key
        self._policy = policy
        self._wall_clock = wall_clock
        self._bytes_a_day = bytes_a_day
        self._capacity_bytes = capacity_bytes
        self.directory = Path(path) / namespace.hex() / f"rank_{rank}"
        _check_root(Path(path), read_only=read_only)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._index: PartIndex[_Entry] = PartIndex()
        self._newest_id = 0
        self._writing: dict[Key, _Write] = {}
        self._waiting: deque[_Write] = deque()
        self._unsynced: list[_Write] = []
        self._syncing: list[_Write] = []
        self._syncs_left = 0
        self._sync_errors: dict[int, int] = {}
        self._written: list[_Write] = []
        self._removed: list[_Entry] = []
        self._touched: dict[int, _Entry] = {}
        self._reserved_bytes = 0
        self._stored_bytes = 0
        self._zombie_slots = 0
        self._writes_open = 0
        self._busy = False
        self._closing = False
        self._closed = False
        self._closed_well = False
        self._stop = False
        self._kept = not read_only
        self._reset_to: int | None = None
        self._reset_error = ""
        self._commit_failed = False
        self._orders: deque[Callable[[], None]] = deque()
        self._to_grow: set[int] = set()
        self._stuck = False
        self._refreshed_s = 0.0
        self._next_id = 1
        self._used = 1
        self._counts = dict.fromkeys(
            (
                "written_bytes",
                "read_bytes",
                "writes_failed",
                "reads_failed",
                "parts_corrupt",
                "keys_differed",
                "parts_evicted",
                "commits",
            ),
            0,
        )
        self._callbacks_failed = 0
        self._lock_fd = -1
        try:
            self._open(namespace, rank, free_bytes_min, segment_bytes, grow_bytes, direct=direct)
        except OSError as exception:
            self._let_go()
            raise StoreUnavailableError(
                f"{self.directory} cannot be used: {exception}; check it and what is in it, or choose another path"
            ) from exception
        except BaseException:
            self._let_go()
            raise
        try:
            self._io = io or make_io(iodepth=iodepth)
        except BaseException:
            self._let_go()
            raise
        self._segments.attach(self._io)
        self.arena_registered_reason = self._io.register_memory(arena) if arena is not None else "no arena was given"
        self._on_read = self._reads_ended
        self._on_write = self._writes_ended
        self._on_sync = self._syncs_ended
        self._keeper: threading.Thread | None = None
        if not read_only:
            self._keeper = threading.Thread(target=self._keep, name="kvtier-disk-keeper", daemon=True)
            self._keeper.start()
        _alive.add(self)

    # -- opening

    def _open(
        self,
        namespace: bytes,
        rank: int,
        free_bytes_min: int,
        segment_bytes: int | None,
        grow_bytes: int,
        *,
        direct: bool,
    ) -> None:
        if self._read_only:
            if not (self.directory / FORMAT_NAME).exists():
                raise StoreUnavailableError(f"{self.directory} holds no store to join read-only: start its owner first")
        else:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as exception:
                raise StoreUnavailableError(
                    f"{self.directory} cannot be made: {exception.strerror}; make {self.directory.parents[1]} writable"
                ) from exception
            self._lock_fd = _take_lock(self.directory)
        self._format = _read_format(self.directory, namespace, rank, create=not self._read_only)
        self._generation = self._durable_generation = int(self._format["generation"])
        self.direct_io, self.direct_io_reason = (
            _probe_direct(self.directory, read_only=self._read_only) if direct else (False, "not asked for")
        )
        self._segments = Segments(
            self.directory,
            self._lock,
            capacity_bytes=self._capacity_bytes,
            free_bytes_min=free_bytes_min,
            segment_bytes=segment_bytes or max(1 << 30, self._capacity_bytes // 32),
            grow_bytes=max(PAGE_BYTES, min(grow_bytes, self._capacity_bytes // 8)),
            open_flags=os.O_DIRECT if self.direct_io else 0,
            read_only=self._read_only,
        )
        found = find_segments(self.directory)
        catalog_path = self.directory / CATALOG_NAME
        known = catalog_path.exists() and catalog_path.stat().st_size > 0
        for number, slot_bytes, segment_path in found:
            self._segments.adopt(number, slot_bytes, segment_path)
        try:
            if found and not known:
                raise CatalogCorruptError(f"{catalog_path} is missing or empty beside segments")
            if not self._read_only and (self.directory / DAMAGED_NAME).exists():
                raise CatalogCorruptError(f"{catalog_path} was found damaged while it was in use")
            self._open_catalog(create=not found)
        except CatalogCorruptError as exception:
            if self._read_only:
                raise StoreUnavailableError(
                    f"{exception}: its owner rebuilds it when it opens the store"
                ) from exception
            self._rebuild(str(exception), namespace, rank)

    def _open_catalog(self, *, create: bool) -> None:
        self._catalog = Catalog(self.directory, self._durability, read_only=self._read_only, create=create)
        with damage_told(self._catalog.path):
            if not self._read_only and self._catalog.generation() < self._generation:
                self._catalog.reset(self._generation, self._durability)
            self._load()
            saved = self._catalog.saved_state()
        self._budget = WriteBudget(self._bytes_a_day, now_s=self._wall_clock(), saved=saved)

    def _rebuild(self, why: str, namespace: bytes, rank: int) -> None:
        """Make a new catalog from the heads of what lies in the segments.

        Parts that were deleted and not yet overwritten come back: they are sound, and their bytes are verified on read like all others. What
        was never sealed (see `kvtier.record`) cannot come back.
        """
        if getattr(self, "_catalog", None) is not None:
            self._catalog.close()
        self._index.clear()
        rows = scan_segments(self._segments, namespace, rank, self._generation, self._part_key)
        kept = replace_damaged(self.directory, self._generation, rows, self._durability)
        self.notes.append(
            f"the catalog was damaged or lost ({why}): {len(rows)} parts were found again in the segments' own envelopes"
            + (f"; the damaged one is kept as {kept}" if kept else "")
        )
        try:
            self._open_catalog(create=False)
        except CatalogCorruptError as exception:
            raise StoreUnavailableError(
                f"{exception}, right after it was rebuilt: check the disk, or choose another path"
            ) from exception

    def _load(self) -> None:
        """Fill the index from the catalog, column by column: a million rows one by one take seconds."""
        with collector_paused():
            gone = self._load_columns()
        if gone and not self._read_only:
            self._catalog.commit(added=(), removed=gone)
        for entry in self._index.values() if self._policy is not None else ():
            self._tell_policy(entry)

    def _load_columns(self) -> list[int]:
        """Rows into the index, slots into their states. Returns the ids of rows that are to go."""
        by_number = dict(self._segments.by_number)
        columns = self._catalog.columns()
        self._newest_id = int(columns.ids.max(initial=0))
        # Above all ids of earlier lives too, whose rows may be gone: a reader in another process may remember them.
        self._next_id = max(self._newest_id + 1, int(self._wall_clock() * 1e6))
        self._used = int(columns.used.max(initial=0)) + 1
        places = columns.places
        # Slots and slot bytes of each row's segment, 0 where it is missing.
        numbers, which = np.unique(places["segment"], return_inverse=True)
        known = [by_number.get(number) for number in numbers.tolist()]
        slots = np.array([segment.slots if segment else 0 for segment in known], np.int64)[which]
        sizes = np.array([segment.slot_bytes if segment else 0 for segment in known], np.int64)[which]
        there = (places["slot"] < slots) & (places["stored_bytes"] <= sizes.astype(np.uint64))
        gone: list[int] = []
        if not there.all():
            gone = columns.ids[~there].tolist()
            self.notes.append(
                f"{len(gone)} parts of the catalog lie in segments that are missing or cut short: forgotten"
            )
            columns, sizes = columns.take(there), sizes[there]
        twice = slots_taken_twice(columns)
        if twice is not None:
            raise CatalogCorruptError(f"{self._catalog.path}: two rows claim slot {twice[1]} of segment {twice[0]}")
        over = 0
        if not self._read_only:
            # Longest unused first, until the rest fits.
            rest = int(sizes.sum()) - self._capacity_bytes
            over = int(np.searchsorted(np.cumsum(sizes), rest)) + 1 if rest > 0 else 0
        if over:
            gone += columns.ids[:over].tolist()
            self.notes.append(
                f"the capacity shrank to {self._capacity_bytes} bytes: {over} parts, longest unused first, were dropped"
            )
            columns, sizes = columns.take(np.arange(over, len(columns.ids))), sizes[over:]
        self._reserved_bytes = int(sizes.sum())
        self._stored_bytes = int(columns.places["stored_bytes"].sum())
        count = len(columns.keys)

        def make(row_id: int, key: Key, place: tuple[int, int, int, int, int, float], used: int) -> _Entry:
            number, slot, stored_bytes, head_hash, depth_tokens, value = place
            return _Entry(row_id, key, by_number[number], slot, stored_bytes, head_hash, depth_tokens, value, used)

        places = columns.places
        self._index.fill(columns, make)
        if len(self._index) != count:
            raise CatalogCorruptError(f"{self._catalog.path}: two rows have one key")
        if not self._read_only:
            taken = {}
            for number, segment in by_number.items():
                marks = taken[number] = bytearray(segment.slots)
                np.frombuffer(marks, np.uint8)[places["slot"][places["segment"] == number]] = 1
            self._segments.settle(taken)
        return gone

    def _let_go(self) -> None:
        for name in ("_segments", "_catalog"):
            thing = getattr(self, name, None)
            if thing is not None:
                thing.close()
        if self._lock_fd >= 0:
            # Said aloud, because a child that was forked and did not exec may hold the same open file.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- joined read-only

    def _refresh(self, *, whole: bool) -> None:
        """Under the lock: see what the owner did since. `whole` forgets what it removed, too."""
        now_s = time.monotonic()
        if not whole and now_s < self._refreshed_s + _REFRESH_PERIOD_S:
            return
        self._refreshed_s = now_s
        try:
            if self._catalog.replaced():
                new = Catalog(self.directory, self._durability, read_only=True)
                self._catalog.close()
                self._catalog = new
                whole = True
            # Rows first: the file of each was there before it, and as long as it says.
            rows = list(self._catalog.rows(0 if whole else self._newest_id))
            found = find_segments(self.directory)
            for number, slot_bytes, path in found:
                self._segments.see(number, slot_bytes, path)
            self._segments.keep_only({number for number, _, _ in found})
            if whole:
                self._index.clear()
            self._generation = self._catalog.generation()
            for row in rows:
                self._newest_id = max(self._newest_id, row.id)
                segment = self._segments.by_number.get(row.segment)
                if segment is not None and row.slot < segment.slots:
                    self._index[row.key] = _entry(row, segment)
        except (CatalogCorruptError, StoreUnavailableError, sqlite3.Error, OSError) as exception:
            self._note(f"the owner's changes could not be read: {exception}")

    def _still_there(self, entry: _Entry) -> bool:
        """Whether the owner's catalog still has the row: then the slot was not written again before this moment."""
        with self._lock:
            try:
                place = self._catalog.place(entry.id)
                return place == (entry.segment.number, entry.slot, entry.key) and not self._catalog.replaced()
            except (sqlite3.Error, struct.error, OSError):
                return False

    # -- what callers see

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def io(self) -> IOEngine:
        """The engine that moves the bytes."""
        return self._io

    def entries(self) -> Iterable[PartEntry]:
        if os.getpid() != self._pid:
            return []
        with self._lock:
            if self._read_only and not self._closing:
                self._refresh(whole=True)
            entries = list(self._index.values())
        return [PartEntry(e.key, e.stored_bytes, e.depth_tokens, e.value_s_per_byte) for e in entries]

    def keys_and_depths(self) -> tuple[list[Key], list[int]]:
        if os.getpid() != self._pid:
            return [], []
        with self._lock:
            if self._read_only and not self._closing:
                self._refresh(whole=True)
            return self._index.keys_and_depths(lambda entry: entry.depth_tokens)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: Key) -> bool:
        return key in self._index

    def endurance(self) -> EnduranceMeter:
        """What was written to the drive, and what the budget leaves."""
        with self._lock:
            return self._budget.meter(self._wall_clock())

    def stats(self) -> SegmentStats:
        """Figures of this moment."""
        with self._lock:
            return SegmentStats(
                parts=len(self._index),
                used_bytes=self._reserved_bytes,
                stored_bytes=self._stored_bytes,
                disk_bytes=self._segments.disk_bytes,
                catalog_bytes=self._catalog.stored_on_disk_bytes() if not self._closed else 0,
                capacity_bytes=self._capacity_bytes,
                callbacks_failed=self._callbacks_failed,
                **self._counts,
            )

    def submit_write(self, parts: Sequence[PartWrite], done: PartsDone, *, lane: Lane = Lane.WRITE) -> Transfer:
        batch = _Batch(self, done, self._generation)
        if self._refused(parts, done):
            return batch
        # What raises for a buffer that cannot be written raises here, before anything was taken.
        hashes = [_head_hash(part.buffer) for part in parts]
        at_once: list[PartDone] = []
        # In groups, so that the disk works on the first while the others are looked up.
        for first in range(0, len(parts), _GROUP):
            start: list[_Write] = []
            with self._lock:
                for part, head_hash in zip(parts[first : first + _GROUP], hashes[first : first + _GROUP], strict=True):
                    ended = self._admit(part, head_hash, batch, lane, start)
                    if ended is not None:
                        at_once.append(ended)
                if self._waiting:
                    self._wake.notify()
            self._start_writes(start)
        self._say_soon(batch, at_once)
        return batch

    def _refused(self, parts: Sequence[PartWrite] | Sequence[PartRead], done: PartsDone) -> bool:
        """Whether the store is out of use for this process; the parts were then answered."""
        if os.getpid() != self._pid:
            detail = "this store belongs to the parent process: open one of your own after the fork"
        elif self._closing:
            detail = "the store is closed"
        else:
            return False
        if parts:
            done([PartDone(part.key, PartFailure.CLOSED, detail) for part in parts])
        return True

    def _admit(
        self, part: PartWrite, head_hash: int, batch: _Batch, lane: Lane, start: list[_Write]
    ) -> PartDone | None:
        """Under the lock: what becomes of one part. None where it is on its way."""
        size = part.buffer.nbytes
        if self._read_only:
            return PartDone(part.key, PartFailure.IO, "the store was joined read-only")
        if self._closing:
            return PartDone(part.key, PartFailure.CLOSED, "the store is closed")
        if batch.generation != self._generation:
            self._counts["writes_failed"] += 1
            return PartDone(part.key, PartFailure.CANCELLED, "the store was reset")
        published = self._index.get(part.key)
        if published is not None:
            if published.stored_bytes == size and published.head_hash == head_hash:
                return PartDone(part.key)
            self._counts["keys_differed"] += 1
            return PartDone(
                part.key,
                PartFailure.EXISTS_DIFFERENT,
                f"{published.stored_bytes} bytes are stored under this key, {size} others were given",
            )
        under_way = self._writing.get(part.key)
        if under_way is not None:
            if under_way.part.buffer.nbytes == size and under_way.head_hash == head_hash:
                under_way.owners.append(batch)
                return None
            return PartDone(
                part.key,
                PartFailure.EXISTS_DIFFERENT,
                f"{under_way.part.buffer.nbytes} bytes are being stored under this key",
            )
        if size == 0:
            return PartDone(part.key, PartFailure.SHORT, "a part of no bytes cannot be stored")
        slot_bytes = slot_bytes_for(size)
        if self._reserved_bytes + slot_bytes > self._capacity_bytes and not self._evict(part.key, slot_bytes):
            self._counts["writes_failed"] += 1
            return PartDone(
                part.key,
                PartFailure.NO_SPACE,
                f"{self._reserved_bytes} of {self._capacity_bytes} bytes are taken, {slot_bytes} are needed",
            )
        if not self._budget.admit(part.key, slot_bytes, part.value_s_per_byte, part.depth_tokens, self._wall_clock()):
            self._counts["writes_failed"] += 1
            return PartDone(
                part.key,
                PartFailure.OVER_BUDGET,
                f"the drive's budget of {self._bytes_a_day} bytes a day is spent on what is worth more",
            )
        self._reserved_bytes += slot_bytes
        write = _Write(part, slot_bytes, lane, [batch], self._generation)
        write.head_hash = head_hash
        self._writing[part.key] = write
        self._writes_open += 1
        batch.writes.append(write)
        place = None if self._waiting else self._segments.take(slot_bytes)
        if self._segments.wants_more(slot_bytes):
            self._to_grow.add(slot_bytes)
            self._wake.notify()
        if place is None:
            self._waiting.append(write)
        else:
            write.segment, write.slot = place
            start.append(write)
        return None

    def _evict(self, incoming: Key, wanted_bytes: int) -> bool:
        """Under the lock: make room for `wanted_bytes`, by the policy's choice among parts that nobody reads. Nothing goes where all of it is not enough."""
        if self._policy is None or wanted_bytes > self._capacity_bytes:
            return False
        now_s = time.monotonic()
        lacking = self._reserved_bytes + wanted_bytes - self._capacity_bytes
        victims = []
        for key in self._policy.candidates(now_s, lambda key: self._index[key].readers > 0, incoming):
            victims.append(key)
            lacking -= self._index[key].segment.slot_bytes
            if lacking <= 0:
                break
        if lacking > 0:
            return False
        for key in victims:
            entry = self._index.pop(key)
            assert entry is not None, "a candidate is in the index"
            self._unpublish(entry, evicted=True)
        self._counts["parts_evicted"] += len(victims)
        self._wake.notify()
        return True

    def _tell_policy(self, entry: _Entry) -> None:
        if self._policy is not None:
            size = entry.segment.slot_bytes
            info = RecordInfo(size, None, entry.depth_tokens, entry.value_s_per_byte * size)
            self._policy.insert(entry.key, info, time.monotonic())

    def submit_read(
        self, parts: Sequence[PartRead], done: PartsDone, *, lane: Lane = Lane.DEMAND, deadline_s: float | None = None
    ) -> Transfer:
        batch = _Batch(self, done, self._generation)
        if self._refused(parts, done):
            return batch
        # What raises for a buffer that cannot be filled raises here, before anything was taken.
        addresses = [_writable_address(part) for part in parts]
        at_once: list[PartDone] = []
        for first in range(0, len(parts), _GROUP):
            reads = self._find(parts[first : first + _GROUP], addresses[first : first + _GROUP], batch, at_once)
            self._start_reads(reads, lane, deadline_s, at_once)
        self._say_soon(batch, at_once)
        return batch

    def _start_reads(self, reads: list[_Read], lane: Lane, deadline_s: float | None, at_once: list[PartDone]) -> None:
        """Have the engine read them; where that cannot be started they end like reads that failed, since others may be under way."""
        jobs: list[Job] = []
        try:
            for read in reads:
                jobs.append(self._read_job(read, lane, deadline_s))  # noqa: PERF401 - one may raise
            if jobs:
                self._io.submit(jobs, self._on_read)
        except Exception as exception:  # noqa: BLE001 - told in each part's own end
            with self._lock:
                for read in reads:
                    self._end_read(read.entry)
                self._counts["reads_failed"] += len(reads)
            at_once += [PartDone(read.part.key, PartFailure.IO, f"not started: {exception!r}") for read in reads]
            return
        if reads:
            reads[0].batch.jobs += jobs

    def _find(
        self, parts: Sequence[PartRead], addresses: Sequence[int], batch: _Batch, at_once: list[PartDone]
    ) -> list[_Read]:
        """Where the parts lie, each held against reuse of its slot; what needs no read is added to `at_once`."""
        reads: list[_Read] = []
        with self._lock:
            index = self._index
            if self._read_only and any(part.key not in index for part in parts):
                self._refresh(whole=False)
            for part, address in zip(parts, addresses, strict=True):
                entry = index.pop(part.key)
                if (
                    entry is not None
                    and self._read_only
                    and self._segments.by_number.get(entry.segment.number) is not entry.segment
                ):
                    entry = None
                if entry is None:
                    at_once.append(PartDone(part.key, PartFailure.MISSING))
                    continue
                index[part.key] = entry
                if entry.stored_bytes != part.buffer.nbytes:
                    detail = (
                        f"{entry.stored_bytes} bytes are stored under this key, the buffer has {part.buffer.nbytes}"
                    )
                    at_once.append(PartDone(part.key, PartFailure.SHORT, detail))
                    continue
                entry.readers += 1
                if self._read_only:
                    entry.segment.taken += 1
                else:
                    self._used += 1
                    entry.used = self._used
                    self._touched[entry.id] = entry
                    if self._policy is not None:
                        self._policy.access(entry.key, time.monotonic())
                reads.append(_Read(part, address, batch, entry))
        return reads

    def _read_job(self, read: _Read, lane: Lane, deadline_s: float | None) -> Job:
        buffer = read.part.buffer
        entry = read.entry
        address = read.address
        if self.direct_io and (address % PAGE_BYTES or buffer.nbytes % PAGE_BYTES):
            buffer = read.bounce = aligned_buffer(slot_bytes_for(buffer.nbytes))
            address = address_of(buffer)
        step = Step(Op.READ, entry.segment.fd, entry.slot * entry.segment.slot_bytes, buffer, address)
        return Job((step,), lane, deadline_s, read)

    def delete(self, keys: Sequence[Key]) -> None:
        if os.getpid() != self._pid or self._closing or self._read_only:
            return
        with self._lock:
            for key in keys:
                entry = self._index.pop(key)
                if entry is not None:
                    self._unpublish(entry)
                write = self._writing.pop(key, None)
                if write is not None:
                    self._drop(write, PartFailure.CANCELLED, "deleted while it was being written")
            self._wake.notify()

    def _unpublish(self, entry: _Entry, *, evicted: bool = False) -> None:
        """Under the lock: an entry that left the index stops counting, and its row and slot will go."""
        entry.removed = True
        if self._policy is not None:
            self._policy.remove(entry.key, time.monotonic(), evicted=evicted)
        self._touched.pop(entry.id, None)
        self._reserved_bytes -= entry.segment.slot_bytes
        self._stored_bytes -= entry.stored_bytes
        self._zombie_slots += 1
        self._removed.append(entry)

    def _drop(self, write: _Write, failure: PartFailure, detail: str) -> None:
        """Under the lock: a write that left `_writing` will not be published."""
        write.dropped = True
        write.failure = write.failure or failure
        write.detail = write.detail or detail
        self._reserved_bytes -= write.slot_bytes
        if write.segment is not None:
            self._zombie_slots += 1

    def _cancel(self, batch: _Batch) -> None:
        """Give up what of a batch has not started."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            jobs = list(batch.jobs)
            for write in batch.writes:
                if write.owners == [batch] and write.dropped is False:
                    if write.job is not None:
                        jobs.append(write.job)
                    elif write.segment is None and self._writing.get(write.part.key) is write:
                        del self._writing[write.part.key]
                        self._drop(write, PartFailure.CANCELLED, "given up before it started")
            self._wake.notify()
        if jobs:
            self._io.cancel(jobs)

    def reset(self, generation: int) -> None:
        if os.getpid() != self._pid or self._closing:
            raise StoreUnavailableError(f"{self.directory} is closed: nothing can be reset")
        if self._read_only:
            raise StoreUnavailableError(f"{self.directory} was joined read-only: its owner resets it")
        until = time.monotonic() + _RESET_WAIT_S
        with self._lock:
            if generation < self._generation:
                raise ValueError(
                    f"generation {generation} is older than {self._generation}, which is in force: generations only grow"
                )
            if generation > self._generation:
                self._generation = generation
                for entry in self._index.values():
                    self._unpublish(entry)
                self._index.clear()
                for write in list(self._writing.values()):
                    self._drop(write, PartFailure.CANCELLED, "the store was reset")
                self._writing.clear()
                self._reset_to = generation
            self._reset_error = ""
            self._wake.notify()
            while not (self._durable(generation) or self._reset_error or self._stop) and time.monotonic() < until:
                self._idle.wait(max(0.0, until - time.monotonic()))
            if not self._durable(generation):
                why = self._reset_error or f"the disk did not answer within {_RESET_WAIT_S} s"
                raise StoreUnavailableError(
                    f"generation {generation} of {self.directory} is in force but not durable, which is being tried again: {why}"
                )

    def _durable(self, generation: int) -> bool:
        return self._durable_generation >= generation

    def flush(self, deadline_s: float) -> bool:
        if os.getpid() != self._pid or self._read_only:
            return True
        until = time.monotonic() + deadline_s
        with self._lock:
            self._wake.notify()
            while self._writes_open or self._removed or self._busy:
                remaining = until - time.monotonic()
                if remaining <= 0 or self._stop:
                    return False
                self._idle.wait(remaining)
        return True

    def compact(self, deadline_s: float = 60.0) -> int:
        """Give back the disk of all slots that hold nothing, and of deleted rows, while reads and writes go on.

        Returns the bytes that were given back. Raises StoreUnavailableError where that takes longer than `deadline_s` seconds.
        """
        if os.getpid() != self._pid or self._closing or self._read_only:
            raise StoreUnavailableError(
                f"{self.directory} is closed, joined read-only or a parent's: only its owner compacts it"
            )
        given_back = 0
        ended = threading.Event()

        def order() -> None:
            nonlocal given_back
            try:
                given_back = self._segments.trim()
                self._catalog.compact()
            finally:
                ended.set()

        with self._lock:
            self._orders.append(order)
            self._wake.notify()
        if not ended.wait(deadline_s):
            raise StoreUnavailableError(
                f"{self.directory} was not compacted within {deadline_s} s: its disk is slow or stuck"
            )
        return given_back

    def close(self, deadline_s: float) -> bool:
        if os.getpid() != self._pid:
            return True
        until = time.monotonic() + deadline_s
        with self._lock:
            first, self._closing = not self._closing, True
            if not first:
                # Descriptors are given back once: their numbers may be other files' by then.
                self._idle.wait_for(lambda: self._closed, max(0.0, until - time.monotonic()))
                return self._closed_well
        flushed = self.flush(deadline_s)
        with self._lock:
            for write in list(self._writing.values()):
                if write.segment is None:
                    del self._writing[write.part.key]
                    self._drop(write, PartFailure.CLOSED, "the store was closed")
            self._wake.notify()
        # Some time is always left for what is only a matter of handing over.
        quiet = self._io.close(max(1.0, until - time.monotonic()))
        with self._lock:
            self._stop = True
            self._wake.notify()
            self._idle.notify_all()
        if self._keeper is not None and threading.current_thread() is not self._keeper:
            self._keeper.join(max(1.0, until - time.monotonic()))
            quiet = quiet and not self._keeper.is_alive()
        if quiet:
            self._let_go()
        # Else operations still own slots of these files: the lock stays with this process until it ends.
        with self._lock:
            self._closed = True
            self._closed_well = flushed and quiet
            self._idle.notify_all()
        return flushed and quiet

    # -- ends of I/O, on the engine's threads

    def _say_soon(self, batch: _Batch, results: list[PartDone]) -> None:
        """Hand over results that needed no I/O, from the engine's thread as all others."""
        if results:
            self._io.submit([Job((), Lane.DEMAND, None, (batch, results))], self._say_now)

    def _say_now(self, jobs: list[Job]) -> None:
        for job in jobs:
            batch, results = job.tag
            self._say(batch, results)

    def _say(self, batch: _Batch, results: list[PartDone]) -> None:
        try:
            batch.done(results)
        except Exception:  # noqa: BLE001 - what a caller raises must not end our threads
            self._callbacks_failed += 1

    def _reads_ended(self, jobs: list[Job]) -> None:
        outcome: list[tuple[_Batch, PartDone]] = []
        bad: list[_Entry] = []
        for job in jobs:
            read: _Read = job.tag
            done, broken = self._judge_read(job, read)
            outcome.append((read.batch, done))
            if broken:
                bad.append(read.entry)
        with self._lock:
            for (_, done), job in zip(outcome, jobs, strict=True):
                self._end_read(job.tag.entry)
                self._counts["read_bytes"] += job.moved_bytes
                self._counts["reads_failed"] += done.failure is not None
            for entry in bad:
                if self._read_only:
                    if self._index.get(entry.key) is entry:
                        self._index.pop(entry.key)
                    continue
                self._counts["parts_corrupt"] += 1
                if not entry.removed and self._index.get(entry.key) is entry:
                    self._index.pop(entry.key)
                    self._unpublish(entry)
                    self._wake.notify()
        self._say_all(outcome)

    def _end_read(self, entry: _Entry) -> None:
        """Under the lock: a read of this part is over."""
        entry.readers -= 1
        entry.segment.taken -= self._read_only
        if entry.readers == 0 and entry.removal_committed:
            self._free(entry)

    def _judge_read(self, job: Job, read: _Read) -> tuple[PartDone, bool]:
        """A read's result, and whether its entry can never serve again."""
        key = read.part.key
        entry = read.entry
        if not self._read_only and read.batch.generation != self._generation:
            return PartDone(key, PartFailure.MISSING, "the store was reset"), False
        if job.error == errno.ECANCELED:
            return PartDone(
                key, PartFailure.CLOSED if self._closing else PartFailure.CANCELLED, "given up before it started"
            ), False
        if job.error == END_OF_FILE:
            return PartDone(key, PartFailure.SHORT, f"{entry.segment.path} was cut short"), True
        if job.error:
            return PartDone(key, PartFailure.IO, f"{entry.segment.path}: {error_text(job.error)}"), False
        if self._read_only and not self._still_there(entry):
            return PartDone(key, PartFailure.MISSING, "the store's owner removed it meanwhile"), True
        if read.bounce is not None:
            read.part.buffer.cast("B")[:] = read.bounce[: read.part.buffer.nbytes]
        if _head_hash(read.part.buffer) != entry.head_hash:
            return PartDone(
                key, PartFailure.CORRUPT, f"slot {entry.slot} of {entry.segment.path} does not end as what was written"
            ), True
        return PartDone(key), False

    def _say_all(self, outcome: list[tuple[_Batch, PartDone]]) -> None:
        groups: dict[int, tuple[_Batch, list[PartDone]]] = {}
        for batch, done in outcome:
            groups.setdefault(id(batch), (batch, []))[1].append(done)
        for batch, results in groups.values():
            self._say(batch, results)

    def _start_writes(self, writes: list[_Write]) -> None:
        """Have the engine write them; where that cannot be started they end as failed, by the keeper."""
        jobs: list[Job] = []
        try:
            for write in writes:
                write.job = self._write_job(write)
                jobs.append(write.job)
            if jobs:
                self._io.submit(jobs, self._on_write)
        except Exception as exception:  # noqa: BLE001 - told in each part's own end
            with self._lock:
                for write in writes:
                    if write.failure is None:
                        write.failure, write.detail = PartFailure.IO, f"not started: {exception!r}"
                self._written += writes
                self._wake.notify()
            self._end_late_writes()

    def _write_job(self, write: _Write) -> Job:
        assert write.segment is not None
        buffer = write.part.buffer
        address = address_of(buffer)
        if self.direct_io and (address % PAGE_BYTES or buffer.nbytes % PAGE_BYTES):
            bounce = aligned_buffer(write.slot_bytes)
            bounce[: buffer.nbytes] = buffer.cast("B")
            buffer, address = bounce, address_of(bounce)
        step = Step(Op.WRITE, write.segment.fd, write.slot * write.slot_bytes, buffer, address)
        return Job((step,), write.lane, None, write)

    def _writes_ended(self, jobs: list[Job]) -> None:
        moved = sum(job.moved_bytes for job in jobs)
        with self._lock:
            self._counts["written_bytes"] += moved
            self._budget.wrote(moved, self._wall_clock())
            for job in jobs:
                write: _Write = job.tag
                if job.error and write.failure is None:
                    write.failure, write.detail = self._write_failure(job, write)
                if write.failure is None and self._durability != "none":
                    self._unsynced.append(write)
                else:
                    self._written.append(write)
            if self._written:
                self._wake.notify()
            syncs = self._next_syncs()
        if syncs:
            self._io.submit(syncs, self._on_sync)
        self._end_late_writes()

    def _end_late_writes(self) -> None:
        """Where the keeper has gone, whoever ends a write answers for it."""
        with self._lock:
            if self._kept:
                return
            late, self._written = self._written, []
            for write in late:
                write.failure = write.failure or PartFailure.CLOSED
                write.detail = write.detail or "the store was closed before it ended"
        if late:
            self._settle_turn(late, [], [], [], "")

    def _next_syncs(self) -> list[Job]:
        """Under the lock: jobs that bring all that was written so far to the medium, one for each segment; one such group at a time."""
        if self._syncing or not self._unsynced:
            return []
        self._syncing, self._unsynced = self._unsynced, []
        segments = {write.segment.number: write.segment for write in self._syncing if write.segment is not None}
        self._syncs_left = len(segments)
        return [
            Job((Step(Op.SYNC_DATA, segment.fd),), Lane.WRITE, None, number) for number, segment in segments.items()
        ]

    def _syncs_ended(self, jobs: list[Job]) -> None:
        with self._lock:
            self._sync_errors.update({job.tag: job.error for job in jobs if job.error})
            self._syncs_left -= len(jobs)
            if self._syncs_left:
                return
            for write in self._syncing:
                assert write.segment is not None
                error = self._sync_errors.get(write.segment.number)
                if error and write.failure is None:
                    write.failure = PartFailure.CLOSED if error == errno.ECANCELED else PartFailure.IO
                    write.detail = f"{write.segment.path} could not be synced: {error_text(error)}"
            self._sync_errors.clear()
            self._written += self._syncing
            self._syncing = []
            self._wake.notify()
            syncs = self._next_syncs()
        if syncs:
            self._io.submit(syncs, self._on_sync)
        self._end_late_writes()

    def _write_failure(self, job: Job, write: _Write) -> tuple[PartFailure, str]:
        if job.error == errno.ECANCELED:
            return (PartFailure.CLOSED if self._closing else PartFailure.CANCELLED), "given up before it started"
        assert write.segment is not None
        failure = PartFailure.NO_SPACE if job.error in (errno.ENOSPC, errno.EDQUOT) else PartFailure.IO
        return failure, f"{write.segment.path}: {error_text(job.error)}"

    def _free(self, entry: _Entry) -> None:
        """Under the lock: the slot of a part whose removal was committed and that nobody reads."""
        self._segments.give_back(entry.segment, entry.slot)
        self._zombie_slots -= 1
        self._stuck = False
        if self._waiting:
            self._wake.notify()

    # -- the keeper

    def _keep(self) -> None:
        touch_at_s = time.monotonic() + _TOUCH_PERIOD_S
        while True:
            with self._lock:
                while not (self._has_work() or self._stop):
                    self._busy = False
                    self._idle.notify_all()
                    if not self._wake.wait(max(0.0, touch_at_s - time.monotonic())):
                        break
                if self._stop and (self._reset_error or self._commit_failed or not (self._has_work() or self._waiting)):
                    break
                self._busy = True
            if self._commit_pause_s:
                time.sleep(self._commit_pause_s)
            try:
                touch = time.monotonic() >= touch_at_s
                if touch:
                    touch_at_s = time.monotonic() + _TOUCH_PERIOD_S
                self._turn(touch=touch)
            except Exception as exception:  # noqa: BLE001 - the keeper outlives every fault of the disk
                self._note(f"the keeper met {type(exception).__name__}: {exception}")
                time.sleep(0.05)
        outcome: list[tuple[_Batch, PartDone]] = []
        with self._lock:
            rest, self._written = self._written, []
            self._kept = False
            while self._waiting:
                self._refuse_first_waiting(PartFailure.CLOSED, "the store was closed", outcome)
        self._say_all(outcome)
        if rest:
            self._settle_turn(rest, [], [], [], "the store was closed before its catalog could be written")
        with contextlib.suppress(Exception):
            self._write_down_uses()
            self._write_down_budget()

    def _has_work(self) -> bool:
        """Under the lock: whether the keeper has something to do."""
        return bool(
            self._written
            or self._removed
            or self._reset_to is not None
            or self._orders
            or self._to_grow
            or self._has_startable()
        )

    def _has_startable(self) -> bool:
        """Under the lock: whether the first waiting write may get on. One that waits for others' reads to end does not count."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        return first.dropped or not self._stuck

    def _turn(self, *, touch: bool) -> None:
        with self._lock:
            reset_to = self._reset_to
        if reset_to is not None and not self._make_reset_durable(reset_to):
            # Nothing is published before: the catalog on disk is still that of the old generation.
            self._pause()
            return
        with self._lock:
            written, self._written = self._written, []
            removed, self._removed = self._removed, []
        if written or removed:
            self._commit(written, removed)
        if touch:
            # First, since on a full disk what follows fails.
            self._segments.keep_floor()
            self._write_down_uses()
            self._write_down_budget()
        self._serve_waiting()
        self._grow_ahead()
        while self._orders:
            self._orders.popleft()()

    def _make_reset_durable(self, generation: int) -> bool:
        """Whether `generation` is on stable storage now, and no row of an older one: then removals made before are committed too."""
        with self._lock:
            before = list(self._removed)
        error = ""
        try:
            _write_format(self.directory, self._format | {"generation": generation + 1})
            self._catalog.reset(generation, self._durability)
        except Exception as exception:  # noqa: BLE001 - told to the one who asked for the reset
            error = f"{type(exception).__name__}: {exception}{self._note_damage(exception)}"
        with self._lock:
            self._reset_error = error
            if not error:
                self._format["generation"] = generation + 1
                self._durable_generation = generation
                del self._removed[: len(before)]
                for entry in before:
                    self._removal_committed(entry)
                if self._reset_to == generation:
                    self._reset_to = None
            self._idle.notify_all()
        if error:
            self._note(f"generation {generation} could not be made durable: {error}")
        return not error

    def _commit(self, written: list[_Write], removed: list[_Entry]) -> None:
        with self._lock:
            good = [write for write in written if write.failure is None and not write.dropped]
            rows = []
            for write in good:
                assert write.segment is not None
                self._used += 1
                rows.append(
                    CatalogRow(
                        self._next_id,
                        write.part.key,
                        write.segment.number,
                        write.slot,
                        write.part.buffer.nbytes,
                        write.head_hash,
                        write.part.depth_tokens,
                        # What is no number would fail the whole batch.
                        write.part.value_s_per_byte if math.isfinite(write.part.value_s_per_byte) else 0.0,
                        self._used,
                    )
                )
                self._next_id += 1
        error = ""
        if rows or removed:
            try:
                self._catalog.commit(added=rows, removed=[entry.id for entry in removed])
            except Exception as exception:  # noqa: BLE001 - every fault of the catalog is a fault of these parts alone
                error = f"the catalog could not be written: {exception}{self._note_damage(exception)}"
        self._settle_turn(written, good, rows, removed, error)

    def _settle_turn(
        self, written: list[_Write], good: list[_Write], rows: list[CatalogRow], removed: list[_Entry], error: str
    ) -> None:
        """Publish, free and tell, after a commit that succeeded or did not."""
        outcome: list[tuple[_Batch, PartDone]] = []
        with self._lock:
            self._counts["commits"] += not error
            self._commit_failed = bool(error)
            placed = dict(zip(map(id, good), rows, strict=False)) if not error else {}
            for write in written:
                row = placed.get(id(write))
                assert write.segment is not None
                if row is not None:
                    entry = _entry(row, write.segment)
                    self._publish(write, entry)
                else:
                    if write.failure is None:
                        write.failure, write.detail = PartFailure.IO, error or "the store was reset"
                    self._abandon(write)
                self._counts["writes_failed"] += write.failure is not None
                outcome += [(owner, PartDone(write.part.key, write.failure, write.detail)) for owner in write.owners]
            if error:
                # Their slots must not be used again before their removal is committed: try again.
                self._removed = removed + self._removed
            else:
                for entry in removed:
                    self._removal_committed(entry)
        self._say_all(outcome)
        with self._lock:
            self._writes_open -= len(written)
        if error:
            self._note(error)
            self._pause()

    def _publish(self, write: _Write, entry: _Entry) -> None:
        """Under the lock: the write's row is committed."""
        if write.dropped:
            # Dropped between commit and here: its slot is a zombie already, its row must go.
            entry.removed = True
            self._removed.append(entry)
            return
        self._writing.pop(write.part.key, None)
        self._index[write.part.key] = entry
        self._tell_policy(entry)
        self._stored_bytes += entry.stored_bytes

    def _abandon(self, write: _Write) -> None:
        """Under the lock: the write was not committed, its slot is free."""
        assert write.segment is not None
        if write.dropped:
            self._zombie_slots -= 1
        else:
            if self._writing.get(write.part.key) is write:
                del self._writing[write.part.key]
            self._reserved_bytes -= write.slot_bytes
        self._segments.give_back(write.segment, write.slot)
        self._stuck = False

    def _removal_committed(self, entry: _Entry) -> None:
        entry.removal_committed = True
        if entry.readers == 0:
            self._free(entry)

    def _serve_waiting(self) -> None:
        """Give waiting writes their slots, making room where that helps, and fail those for whom there is none."""
        start: list[_Write] = []
        outcome: list[tuple[_Batch, PartDone]] = []
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].dropped:
                    self._end_waiting(self._waiting.popleft(), outcome)
                if not self._waiting:
                    self._stuck = False
                    break
                write = self._waiting[0]
                place = self._segments.take(write.slot_bytes)
                if place is not None:
                    self._waiting.popleft()
                    write.segment, write.slot = place
                    start.append(write)
                    continue
                alike = sum(1 for other in self._waiting if other.slot_bytes == write.slot_bytes)
            failure, why = self._grow(write.slot_bytes, alike)
            if not why:
                continue
            with self._lock:
                if self._zombie_slots:
                    self._stuck = True
                    break
                if self._waiting and self._waiting[0] is write:
                    self._refuse_first_waiting(failure, why, outcome)
        self._start_writes(start)
        self._say_all(outcome)

    def _grow(self, slot_bytes: int, wanted_slots: int) -> tuple[PartFailure, str]:
        """Why no slot could be made ready, and what that is to a write; no words where one was."""
        try:
            return PartFailure.NO_SPACE, self._segments.grow(slot_bytes, wanted_slots)
        except OSError as exception:
            # Only what lacks room may be answered by eviction.
            full = exception.errno in (errno.ENOSPC, errno.EDQUOT)
            return PartFailure.NO_SPACE if full else PartFailure.IO, f"no new room could be made: {exception}"

    def _grow_ahead(self) -> None:
        """Make slots ready before somebody has to wait for them."""
        with self._lock:
            sizes, self._to_grow = self._to_grow, set()
        for slot_bytes in sizes:
            with self._lock:
                wanted = self._segments.wants_more(slot_bytes)
            if wanted:
                self._grow(slot_bytes, 0)

    def _refuse_first_waiting(self, failure: PartFailure, detail: str, outcome: list[tuple[_Batch, PartDone]]) -> None:
        """Under the lock: the write that waits longest gets no slot."""
        write = self._waiting.popleft()
        if not write.dropped:
            self._writing.pop(write.part.key, None)
            self._drop(write, failure, detail)
        self._end_waiting(write, outcome)

    def _end_waiting(self, write: _Write, outcome: list[tuple[_Batch, PartDone]]) -> None:
        """Under the lock: a waiting write that was dropped leaves the line."""
        self._writes_open -= 1
        self._counts["writes_failed"] += 1
        outcome += [(owner, PartDone(write.part.key, write.failure, write.detail)) for owner in write.owners]

    def _note_damage(self, error: Exception) -> str:
        """Leave word for the next start where the catalog itself is damaged: it can be read as before, and would not be found out."""
        if not is_damage(error):
            return ""
        with contextlib.suppress(OSError):
            (self.directory / DAMAGED_NAME).touch()
        return "; the next start makes it again"

    def _pause(self) -> None:
        """Before something that failed is tried again."""
        time.sleep(_RETRY_PAUSE_S)

    def _note(self, text: str) -> None:
        """Say it once, and bounded: a fault that stays would else fill the memory."""
        if text not in self.notes[-_NOTES_MAX:]:
            self.notes.append(text)
            del self.notes[:-_NOTES_MAX]

    def _write_down_budget(self) -> None:
        with self._lock:
            state = self._budget.state()
        self._catalog.save_state(state)

    def _write_down_uses(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
            uses = [(entry.used, entry.id) for entry in touched.values()]
        if uses:
            self._catalog.commit(added=(), removed=(), used=uses)


_alive: "weakref.WeakSet[SegmentStore]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Let go of inherited locks: else a child that outlives its parent would keep the next owner out, or wait for a thread that it does not have."""
    for store in list(_alive):
        store._lock = threading.Lock()
        if store._lock_fd >= 0:
            os.close(store._lock_fd)
            store._lock_fd = -1


os.register_at_fork(after_in_child=_after_fork_in_child)


def _entry(row: CatalogRow, segment: Segment) -> _Entry:
    return _Entry(
        row.id,
        row.key,
        segment,
        row.slot,
        row.stored_bytes,
        row.head_hash,
        row.depth_tokens,
        row.value_s_per_byte,
        row.used,
    )


def _head_hash(buffer: memoryview) -> int:
    """xxh3-64 of the last 512 bytes, as a signed number: enough to tell one sealed part from any other."""
    view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    return signed_hash(view[-HEAD_BYTES_MAX:])


def _writable_address(part: PartRead) -> int:
    if part.buffer.readonly:
        raise ValueError(f"the buffer for part {part.key.hex()} is read-only: give memory that can be written")
    return address_of(part.buffer)


def _check_root(path: Path, *, read_only: bool) -> None:
    if not path.exists():
        raise StoreUnavailableError(f"{path} does not exist: create it or choose another path")
    if not path.is_dir():
        raise StoreUnavailableError(f"{path} is not a directory: choose one")
    mode = os.R_OK | os.X_OK | (0 if read_only else os.W_OK)
    if not os.access(path, mode):
        raise StoreUnavailableError(
            f"{path} is not {'readable' if read_only else 'writable'} for user {os.geteuid()}: change its mode or choose another"
        )


def _take_lock(directory: Path) -> int:
    """Be the one owner of `directory`. Returns the open lock file."""
    path = directory / LOCK_NAME
    owner = directory.stat().st_uid
    if owner != os.geteuid():
        raise StoreUnavailableError(
            f"{directory} belongs to user {owner}, not to {os.geteuid()}: change its owner or choose another path"
        )
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exception:
        raise StoreUnavailableError(
            f"{directory} is not writable: {exception.strerror}; change its mode or choose another path"
        ) from exception
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exception:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreUnavailableError(
            f"{directory} is in use by process {holder}: stop it, choose another path, or join with read_only=True"
        ) from exception
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _read_format(directory: Path, namespace: bytes, rank: int, *, create: bool) -> dict[str, Any]:
    """What `format.json` says, after checking that it is ours."""
    path = directory / FORMAT_NAME
    if not path.exists():
        if find_segments(directory) or not create:
            raise StoreUnavailableError(
                f"{path} is missing beside segments: their generation is unknown; remove {directory} to start empty"
            )
        format_: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "namespace": namespace.hex(),
            "rank": rank,
            "generation": 0,
        }
        _write_format(directory, format_)
        # The directories were made just now, too.
        sync_directory(directory.parent)
        sync_directory(directory.parent.parent)
        return format_
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        version, name, generation = found["version"], found["namespace"], found["generation"]
        if not isinstance(generation, int) or not 0 <= generation < _GENERATION_END:
            raise ValueError(f"generation {generation!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exception:
        raise StoreUnavailableError(
            f"{path} cannot be understood ({exception}): remove {directory} to start empty"
        ) from exception
    if found.get("format") != FORMAT or version != FORMAT_VERSION:
        raise StoreUnavailableError(
            f"{path} says {found.get('format')} version {version}, this kvtier reads {FORMAT} version {FORMAT_VERSION}: "
            f"use the kvtier that wrote it, another path, or remove {directory} to start empty"
        )
    if name != namespace.hex() or found.get("rank") != rank:
        raise StoreUnavailableError(
            f"{path} belongs to namespace {name}, rank {found.get('rank')}: it was moved here; remove {directory} to start empty"
        )
    return found


def _write_format(directory: Path, format_: dict[str, Any]) -> None:
    """Replace `format.json` whole, on stable storage."""
    path = directory / FORMAT_NAME
    new = directory / f"{FORMAT_NAME}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps(format_).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    new.replace(path)
    sync_directory(directory)


def _probe_direct(directory: Path, *, read_only: bool) -> tuple[bool, str]:
    """Whether O_DIRECT works in `directory`, and why not."""
    page = aligned_buffer(PAGE_BYTES)
    if read_only:
        segments = [path for _, _, path in find_segments(directory) if path.stat().st_size]
        try:
            for path in segments[:1]:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    os.preadv(fd, [page], 0)
                finally:
                    os.close(fd)
        except OSError as exception:
            return False, f"the filesystem refused it: {exception.strerror}"
        return True, ""
    path = directory / "direct.probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as exception:
        return False, f"the filesystem refused it: {exception.strerror}"
    finally:
        path.unlink(missing_ok=True)
    return True, ""
