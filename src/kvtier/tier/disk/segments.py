"""Segment files and the room in them: who has which slot, and how much disk is taken.

A segment is a file of equal slots; its name says which: `seg_<number, 8 hex digits>_<slot bytes>.kv`, slot i at offset i * slot bytes, no header, so that
a capacity of n slots holds n parts. A slot is in one of three states:

- *bare*: beyond the file's end, or a hole in it; takes no disk;
- *ready*: has its disk blocks and holds nothing that counts;
- *taken*: holds a part, published, being written, or deleted and not yet free again.

Disk taken is ready + taken, in bytes, and never above the capacity. Slots are made ready in runs of `grow_bytes`, because a file grown in small
steps is slow to write; where the capacity is reached, ready slots of other sizes are made bare again (holes are punched), so that one size never
starves another. The lowest slot is taken first, so that the ends of files become free and can be cut.

Not thread-safe: the store calls under its lock, except `grow` and `trim`, which do file operations and belong to its keeper thread; they take
the lock for their bookkeeping alone.
"""

import contextlib
import ctypes
import errno
import os
import re
import threading
from collections.abc import Container
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from kvtier.tier.disk.io import PAGE_BYTES, IOEngine

SEGMENT_NAME = re.compile(r"seg_([0-9a-f]{8})_([0-9]+)\.kv")
_PUNCH_HOLE_KEEP_SIZE = 3


@dataclass(slots=True, eq=False)
class Segment:
    """One file of equal slots.

    Attributes:
        number: in its name.
        slot_bytes: size of each slot, a multiple of 4,096.
        slots_max: slots that it may grow to.
        fd: open for the bulk of the I/O, with O_DIRECT where that works.
        path: its file.
        slots: how many the file is long enough for.
        ready: heap of the slots that are ready.
        bare: heap of the holes below the file's end.
        taken: number of slots taken; for a reader of another's files, of reads under way.
    """

    number: int
    slot_bytes: int
    slots_max: int
    fd: int
    path: Path
    slots: int = 0
    ready: list[int] = field(default_factory=list)
    bare: list[int] = field(default_factory=list)
    taken: int = 0

    @property
    def disk_bytes(self) -> int:
        return (len(self.ready) + self.taken) * self.slot_bytes


def slot_bytes_for(stored_bytes: int) -> int:
    """The slot that a run of `stored_bytes` takes: rounded up to pages."""
    return max(PAGE_BYTES, -(-stored_bytes // PAGE_BYTES) * PAGE_BYTES)


def segment_name(number: int, slot_bytes: int) -> str:
    """File name of a segment."""
    return f"seg_{number:08x}_{slot_bytes}.kv"


def find_segments(directory: Path) -> list[tuple[int, int, Path]]:
    """Number, slot bytes and path of every segment file in `directory`, by number. What only has the name of one is passed over."""
    found = []
    for path in directory.iterdir():
        match = SEGMENT_NAME.fullmatch(path.name)
        if match and int(match[2]) > 0 and int(match[2]) % PAGE_BYTES == 0 and path.is_file():
            found.append((int(match[1], 16), int(match[2]), path))
    return sorted(found)


_libc = ctypes.CDLL(None, use_errno=True)


def sync_directory(directory: Path) -> None:
    """Have the names in `directory` on the medium."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the disk blocks of a range back; it reads as zeros. Raises OSError where the filesystem cannot."""
    result = _libc.fallocate(
        ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE_KEEP_SIZE), ctypes.c_int64(offset), ctypes.c_int64(length)
    )
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Segments:
    """All segments of one directory.

    Args:
        directory: where the files are.
        lock: the store's; see the module's text.
        capacity_bytes: disk that slots may take, hard.
        free_bytes_min: room that the filesystem must keep for others.
        segment_bytes: longest file.
        grow_bytes: slots are made ready in runs of about this much.
        open_flags: added to O_RDWR for the bulk I/O (O_DIRECT or 0).
    """

    def __init__(
        self,
        directory: Path,
        lock: threading.Lock,
        *,
        capacity_bytes: int,
        free_bytes_min: int,
        segment_bytes: int,
        grow_bytes: int,
        open_flags: int,
        read_only: bool = False,
    ) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.free_bytes_min = free_bytes_min
        self.segment_bytes = segment_bytes
        self.grow_bytes = grow_bytes
        self.by_number: dict[int, Segment] = {}
        self.by_class: dict[int, list[Segment]] = {}
        self.disk_bytes = 0
        self.can_punch = True
        self.floor_met = False
        self._lock = lock
        self._flags = (os.O_RDONLY if read_only else os.O_RDWR) | open_flags | os.O_CLOEXEC
        self._read_only = read_only
        self._next_number = 0
        self._io: IOEngine | None = None
        self._left: list[Segment] = []

    def attach(self, io: IOEngine) -> None:
        """Have `io` know the files that are open, and those to come."""
        if self._read_only:
            # A reader meets new files under the lock that the engine's thread waits for at the end of each read.
            return
        self._io = io
        for segment in self.by_number.values():
            io.register_file(segment.fd)

    def _close_file(self, segment: Segment) -> None:
        if self._io is not None:
            self._io.forget_file(segment.fd)
        os.close(segment.fd)

    # -- at start

    def adopt(self, number: int, slot_bytes: int, path: Path) -> Segment:
        """Open a segment that is there; all its slots count as bare until `settle`."""
        fd = os.open(path, self._flags)
        slots = os.fstat(fd).st_size // slot_bytes
        segment = Segment(number, slot_bytes, max(slots, self.segment_bytes // slot_bytes, 1), fd, path, slots=slots)
        self.by_number[number] = segment
        self.by_class.setdefault(slot_bytes, []).append(segment)
        self._next_number = max(self._next_number, number + 1)
        if self._io is not None:
            self._io.register_file(fd)
        return segment

    def see(self, number: int, slot_bytes: int, path: Path) -> None:
        """For a reader of another's files: open a segment that is new, and note how far a known one has grown."""
        segment = self.by_number.get(number)
        if segment is not None:
            mine, theirs = os.fstat(segment.fd), path.stat()
            if (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino):
                segment.slots = mine.st_size // slot_bytes
                return
            # The number was given to another file.
            self._leave(number)
        self.adopt(number, slot_bytes, path)

    def keep_only(self, there: Container[int]) -> None:
        """For a reader: let go of files that are gone, which take disk while they are open; of those being read, when that has ended."""
        for number in [number for number in self.by_number if number not in there]:
            self._leave(number)
        for segment in [segment for segment in self._left if not segment.taken]:
            self._left.remove(segment)
            os.close(segment.fd)

    def _leave(self, number: int) -> None:
        segment = self.by_number.pop(number)
        self.by_class[segment.slot_bytes].remove(segment)
        self._left.append(segment)

    def settle(self, taken: dict[int, bytearray]) -> None:
        """Sort every slot into its state, given a byte for each, 1 where it is taken, else 0, by segment number. Files without a taken one are removed."""
        for segment in self.by_number.values():
            segment.taken = taken[segment.number].count(1)
        # What is taken stays whatever happens: the rest of the capacity is what free slots may keep.
        spare_bytes = self.capacity_bytes - sum(s.taken * s.slot_bytes for s in self.by_number.values())
        for segment in list(self.by_number.values()):
            if not segment.taken:
                self._remove(segment)
                continue
            free: list[int] = np.flatnonzero(np.frombuffer(taken[segment.number], np.uint8) == 0).tolist()
            whole = os.fstat(segment.fd).st_blocks * 512 >= segment.slots * segment.slot_bytes
            if free and not (whole and len(free) * segment.slot_bytes <= spare_bytes):
                # Some are holes and nothing says which: make all of them holes.
                segment.ready = self._make_bare(segment, free)
                refused = set(segment.ready)
                segment.bare = [slot for slot in free if slot < segment.slots and slot not in refused]
            else:
                segment.ready = free
            spare_bytes -= len(segment.ready) * segment.slot_bytes
            heapify(segment.ready)
            heapify(segment.bare)
            self.disk_bytes += segment.disk_bytes

    # -- under the store's lock

    def take(self, slot_bytes: int) -> tuple[Segment, int] | None:
        """A ready slot of that size, now taken; None where there is none."""
        for segment in self.by_class.get(slot_bytes, ()):
            if segment.ready:
                segment.taken += 1
                return segment, heappop(segment.ready)
        return None

    def give_back(self, segment: Segment, slot: int) -> None:
        """A taken slot is ready again."""
        segment.taken -= 1
        heappush(segment.ready, slot)

    def ready_bytes(self, slot_bytes: int) -> int:
        """Room for that size that needs no file operation."""
        return sum(len(segment.ready) for segment in self.by_class.get(slot_bytes, ())) * slot_bytes

    def wants_more(self, slot_bytes: int) -> bool:
        """Whether few slots of that size are ready and there is disk for another run that nobody has."""
        run_bytes = max(slot_bytes, self.grow_bytes)
        return (
            self.ready_bytes(slot_bytes) < run_bytes // 4
            and self.disk_bytes + run_bytes <= self.capacity_bytes
            and not self.floor_met
        )

    # -- on the keeper's thread, without the lock

    def grow(self, slot_bytes: int, wanted_slots: int) -> str:
        """Make up to a run of slots of that size ready, at least one. Empty if it did, else why there is no room. With no slots wanted, only ahead of need.

        Takes disk that is not used yet, then disk of ready slots of other sizes. Raises OSError where it is not room that lacks.
        """
        run = max(wanted_slots, self.grow_bytes // slot_bytes, 1)
        with self._lock:
            room = (self.capacity_bytes - self.disk_bytes) // slot_bytes
        if wanted_slots and room < min(run, wanted_slots):
            self._squeeze(min(run, wanted_slots) * slot_bytes, slot_bytes)
            with self._lock:
                room = (self.capacity_bytes - self.disk_bytes) // slot_bytes
        if room < 1:
            return f"the capacity of {self.capacity_bytes} bytes is taken"
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize - self.free_bytes_min
        run = min(run, room, free // slot_bytes)
        self.floor_met = run < 1
        if run < 1:
            return f"only {status.f_bavail * status.f_frsize} bytes are free on the filesystem, of which {self.free_bytes_min} are kept for others"
        return self._make_ready(slot_bytes, run)

    def _make_ready(self, slot_bytes: int, run: int) -> str:
        with self._lock:
            segment = next((s for s in self.by_class.get(slot_bytes, ()) if s.bare or s.slots < s.slots_max), None)
        if segment is None:
            segment = self._new_segment(slot_bytes)
        with self._lock:
            if segment.bare:
                first = heappop(segment.bare)
                count = 1
                while count < run and segment.bare and segment.bare[0] == first + count:
                    heappop(segment.bare)
                    count += 1
            else:
                first = segment.slots
                count = min(run, segment.slots_max - segment.slots)
            self.disk_bytes += count * slot_bytes
        try:
            _allocate(segment, first * slot_bytes, count * slot_bytes)
        except OSError as exception:
            # What was allocated on the way to the failure would be counted by nobody, and may be all that was left.
            with contextlib.suppress(OSError):
                if first < segment.slots:
                    punch_hole(segment.fd, first * slot_bytes, count * slot_bytes)
                else:
                    os.ftruncate(segment.fd, segment.slots * slot_bytes)
            with self._lock:
                self.disk_bytes -= count * slot_bytes
                if first < segment.slots:
                    for slot in range(first, first + count):
                        heappush(segment.bare, slot)
            if exception.errno in (errno.ENOSPC, errno.EDQUOT):
                return f"the filesystem is full: {exception.strerror}"
            raise
        with self._lock:
            segment.slots = max(segment.slots, first + count)
            for slot in range(first, first + count):
                heappush(segment.ready, slot)
        return ""

    def _new_segment(self, slot_bytes: int) -> Segment:
        number = self._next_number
        self._next_number += 1
        path = self.directory / segment_name(number, slot_bytes)
        fd = os.open(path, self._flags | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            sync_directory(self.directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        segment = Segment(number, slot_bytes, max(1, self.segment_bytes // slot_bytes), fd, path)
        if self._io is not None:
            self._io.register_file(fd)
        with self._lock:
            self.by_number[number] = segment
            self.by_class.setdefault(slot_bytes, []).append(segment)
        return segment

    def _squeeze(self, wanted_bytes: int, for_slot_bytes: int) -> None:
        """Make ready slots of other sizes bare until `wanted_bytes` are untaken, or none is left."""
        with self._lock:
            others = [s for s in self.by_number.values() if s.slot_bytes != for_slot_bytes and s.ready]
        for segment in sorted(others, key=lambda s: s.taken * s.slot_bytes):
            with self._lock:
                lacking = wanted_bytes - (self.capacity_bytes - self.disk_bytes)
            if lacking <= 0:
                return
            self._strip(segment, -(-lacking // segment.slot_bytes))

    def trim(self, keep_ready_bytes: int = 0) -> int:
        """Give back the disk of ready slots beyond `keep_ready_bytes` of each size, and remove empty files. Returns the bytes given back."""
        with self._lock:
            before = self.disk_bytes
            classes = [(size, list(segments)) for size, segments in self.by_class.items()]
        for slot_bytes, segments in classes:
            with self._lock:
                surplus = sum(len(s.ready) for s in segments) - keep_ready_bytes // slot_bytes
            for segment in sorted(segments, key=lambda s: s.taken):
                if surplus <= 0:
                    break
                surplus -= self._strip(segment, surplus)
        with self._lock:
            return before - self.disk_bytes

    def keep_floor(self) -> None:
        """Give back ready slots where the filesystem has less free than it must keep."""
        status = os.statvfs(self.directory)
        if status.f_bavail * status.f_frsize < self.free_bytes_min:
            self.trim()

    def _strip(self, segment: Segment, count: int) -> int:
        """Make up to `count` ready slots of one segment bare, the highest first. Returns how many."""
        with self._lock:
            segment.ready.sort()
            slots = segment.ready[-count:] if count else []
            # Out of reach of `take` while their blocks go.
            del segment.ready[len(segment.ready) - len(slots) :]
            empty = segment.taken == 0 and not segment.ready
            if empty:
                self.by_class[segment.slot_bytes].remove(segment)
                del self.by_number[segment.number]
        if empty:
            segment.path.unlink(missing_ok=True)
            self._close_file(segment)
        else:
            refused = self._make_bare(segment, slots)
            if refused:
                gone = set(slots) - set(refused)
                slots = [slot for slot in slots if slot in gone]
                with self._lock:
                    for slot in refused:
                        heappush(segment.ready, slot)
        with self._lock:
            self.disk_bytes -= len(slots) * segment.slot_bytes
            if not empty:
                for slot in slots:
                    if slot < segment.slots:
                        heappush(segment.bare, slot)
        return len(slots)

    def _make_bare(self, segment: Segment, slots: list[int]) -> list[int]:
        """Cut the file, or punch holes, over `slots` (ascending). Returns those where the filesystem refuses holes."""
        end = segment.slots
        rest = list(slots)
        bare = set(segment.bare)
        while rest and rest[-1] == end - 1:
            end = rest.pop()
            while end - 1 in bare:
                end -= 1
        if end < segment.slots:
            os.ftruncate(segment.fd, end * segment.slot_bytes)
            segment.slots = end
            segment.bare = [slot for slot in segment.bare if slot < end]
            heapify(segment.bare)
        for first, count in _runs(rest):
            try:
                punch_hole(segment.fd, first * segment.slot_bytes, count * segment.slot_bytes)
            except OSError:
                self.can_punch = False
                return [slot for slot in rest if slot >= first]
        return []

    def _remove(self, segment: Segment) -> None:
        self._close_file(segment)
        segment.path.unlink(missing_ok=True)
        del self.by_number[segment.number]
        self.by_class[segment.slot_bytes].remove(segment)

    def close(self) -> None:
        """Close the files."""
        for segment in (*self.by_number.values(), *self._left):
            os.close(segment.fd)
        self._left.clear()
        self.by_number.clear()
        self.by_class.clear()


def _allocate(segment: Segment, offset: int, length: int) -> None:
    """Have disk blocks for a range. Raises OSError."""
    try:
        os.posix_fallocate(segment.fd, offset, length)
    except OSError as exception:
        if exception.errno != errno.EINVAL:
            raise
        # A filesystem that cannot allocate: the C library writes a byte of each block instead, which direct I/O refuses.
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, offset, length)
            os.fsync(fd)
        finally:
            os.close(fd)


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Ascending slots as (first, count) of contiguous runs."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][0] + runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs
