"""The part store for a filesystem that many engines on many nodes share: one immutable file a part, nothing else shared.

A write is one job: make the directories, create a temporary file, write, sync if asked, hard-link it to its final name, remove the temporary name. So a final
name never shows a file that is not whole. Where the name is taken by then, another engine stored the part meanwhile: that is a success, if what lies there is
the same part. Filesystems without hard links get a rename instead.

`trailer="on"`: a file is the sealed slot as it is, payload at offset 0, the envelope at the end of its last page; readers of plain files read the payload and
never see the rest. `trailer="off"`: a file is the payload alone, py-kvcache's format to the byte. Then nothing but name and length speaks for the bytes: a
slot that was read is sealed here, from what the caller says that it should hold, so that the layers above see one kind of slot.

There is no index, and no capacity but a floor of free disk: others write and delete beside us. What is present is asked of the filesystem (see
`kvtier.tier.disk.presence`), what is too much is removed by the janitor (`kvtier gc`), and a file that is gone at the read is a miss.

A reset moves to a directory of its own for the generation, so that no name of an older one is in the way or can be served. The next number after it is kept
in a file beside the parts, and is where whoever starts later begins: whoever resets may have changed the weights in place, and what it stores afterwards is
nobody else's. The older files are left to the janitor.
"""

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.record.envelope import HEAD_BYTES_MAX, Identity, read_slot_head, seal_slot
from kvtier.record.errors import RecordError
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
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import (
    END_OF_FILE,
    PAGE_BYTES,
    IOEngine,
    Job,
    Op,
    Step,
    address_of,
    aligned_buffer,
    error_text,
)
from kvtier.tier.disk.shared_layout import SharedLayout, folder_of, is_part, temporary_path

GENERATION_NAME = "kvtier-generation"
_USE_PERIOD_S = 3600.0
_SPACE_PERIOD_S = 1.0
_CHORES_MAX = 10_000
_LINK_REFUSED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)

Trailer = Literal["on", "off"]


class _Batch(Transfer):
    """One call of submit_read or submit_write."""

    __slots__ = ("_store", "done", "generation", "jobs")

    def __init__(self, store: "SharedStore", done: PartsDone, generation: int) -> None:
        self._store = store
        self.done = done
        self.generation = generation
        self.jobs: list[Job] = []

    def cancel(self) -> None:
        if os.getpid() == self._store._pid:
            # A write that another batch joined is not ours alone to give up.
            mine = [job for job in list(self.jobs) if not isinstance(job.tag, _Write) or job.tag.owners == [self]]
            self._store._io.cancel(mine)

    def promote(self, lane: Lane, deadline_s: float | None = None) -> None:
        if os.getpid() == self._store._pid:
            self._store._io.promote(list(self.jobs), lane, deadline_s)


@dataclass(slots=True, eq=False)
class _Write:
    part: PartWrite
    lane: Lane
    path: bytes
    generation: int
    owners: list[_Batch]
    link_step: int = -1
    deleted: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    part: PartRead
    batch: _Batch
    path: bytes
    payload_bytes: int
    bounce: memoryview | None = None


@dataclass(slots=True)
class SharedStats:
    """Counts since the store was opened; bytes where the name says so."""

    written_bytes: int = 0
    read_bytes: int = 0
    parts_written: int = 0
    parts_found_written: int = 0
    writes_failed: int = 0
    reads_failed: int = 0
    reads_missing: int = 0
    callbacks_failed: int = 0
    notes: list[str] = field(default_factory=list)


class SharedStore(PartStore):
    """The parts of one rank, one file each, on a filesystem that others use too.

    Args:
        layout: the names.
        rank: this rank.
        trailer: whether files carry the envelope, see the module's text.
        sync_on_store: sync a file, and the directory that names it, before the write counts as done.
        free_bytes_min: writes fail as NO_SPACE where the filesystem has less free than this.
        io: the engine to use, closed with the store.
        iodepth, open_lookahead: for the default engine: most files being read or written, and opened ahead of that.
        payload_bytes: with `trailer="off"`, the length of a key's payload.
        identity: with `trailer="off"`, what a key's part is said to be once it was read.
        direct: ask for O_DIRECT. Where the filesystem refuses it, I/O is buffered: see `direct_io`.

    Raises:
        StoreUnavailableError: the root is missing, no directory or not writable.
        ConfigError: `trailer="off"` without `payload_bytes` and `identity`.
    """

    def __init__(
        self,
        layout: SharedLayout,
        *,
        rank: int = 0,
        trailer: Trailer = "on",
        sync_on_store: bool = False,
        free_bytes_min: int = 0,
        io: IOEngine | None = None,
        iodepth: int = 16,
        open_lookahead: int | None = None,
        payload_bytes: Callable[[Key], int] | None = None,
        identity: Callable[[Key], Identity] | None = None,
        direct: bool = True,
    ) -> None:
        if trailer not in ("on", "off"):
            raise ConfigError(f"trailer is {trailer!r}: use on or off")
        if trailer == "off" and (payload_bytes is None or identity is None):
            raise ConfigError(
                "trailer=off needs payload_bytes and identity: plain files say neither how long nor whose they are"
            )
        root = Path(layout.root)
        if not root.is_dir():
            raise StoreUnavailableError(
                f"{root} {'is not a directory' if root.exists() else 'does not exist'}: create it or choose another path"
            )
        self.layout = layout
        self.rank = rank
        self._pid = os.getpid()
        self._trailer = trailer
        self._sync = sync_on_store
        self._free_bytes_min = free_bytes_min
        self._payload_bytes = payload_bytes
        self._identity = identity
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._writing: dict[Key, _Write] = {}
        self._deleting: dict[Key, list[tuple[PartWrite, _Batch, Lane]]] = {}
        self._open_jobs = 0
        self._closing = False
        self._made: set[bytes] = set()
        self._used: dict[Key, float] = {}
        self._space_at_s = -1e9
        self._space_ok = True
        self.stats = SharedStats()
        base = layout.rank_directory(rank)
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._enter_generation(_read_generation(base))
            self.direct_io, self.direct_io_reason = _probe(self._directory_path, direct=direct)
            self.links_work = _probe_links(self._directory_path)
        except OSError as exception:
            raise StoreUnavailableError(
                f"{base} is not writable: {exception.strerror}; change its mode or choose another path"
            ) from exception
        if not self.links_work:
            self.stats.notes.append(f"{root} refuses hard links: files are renamed into place")
        self._io = io or make_io(iodepth=iodepth, open_lookahead=open_lookahead)
        self._on_read = self._reads_ended
        self._on_write = self._writes_ended
        self._on_asked = self._presence_known
        self._on_deleted = self._deletes_ended
        # Small system calls on names that no transfer waits for, nor the end of the process: times of use, values.
        self._chores: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._do_chores, name="kvtier-disk-chores", daemon=True).start()

    def _enter_generation(self, generation: int) -> None:
        """Its directory comes first: where that cannot be made, nothing has changed, and no file is taken for one of another generation."""
        directory = self.layout.rank_directory(self.rank, generation)
        directory.mkdir(parents=True, exist_ok=True)
        self._generation = generation
        self._directory_path = directory
        self._directory = os.fsencode(directory)
        self._made = set()

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def io(self) -> IOEngine:
        """The engine that moves the bytes."""
        return self._io

    def entries(self) -> Iterator[PartEntry]:
        """Every file of this rank and generation, longest unused first as far as times of use are kept. Walks the directories: slow."""
        found = []
        for folder in self._directory_path.glob("[0-9a-f]" * 3 + "/" + "[0-9a-f]" * 2):
            # What others take away meanwhile, or put there, is passed over.
            with contextlib.suppress(OSError), os.scandir(folder) as files:
                for file in files:
                    if not is_part(str(folder), file.name):
                        continue
                    with contextlib.suppress(OSError):
                        status = file.stat()
                        found.append((status.st_mtime, self.layout.key_of(file.name), status.st_size))
        for _, key, size in sorted(found):
            yield PartEntry(key, size if self._trailer == "on" else _slot_bytes(size))

    def submit_write(self, parts: Sequence[PartWrite], done: PartsDone, *, lane: Lane = Lane.WRITE) -> Transfer:
        batch = _Batch(self, done, self._generation)
        if self._refused(parts, done):
            return batch
        for part in parts:
            # What raises for a key or a buffer that cannot be stored raises here, before anything was taken.
            self.layout.path(self._directory, part.key)
            address_of(part.buffer.cast("B")[: self._file_bytes(part)])
        self._start([(part, batch, lane) for part in parts])
        return batch

    def _start(self, wanted: Sequence[tuple[PartWrite, _Batch, Lane]]) -> None:
        """Ask for each part whether another engine stored it already."""
        room = self._has_room()
        at_once: list[tuple[_Batch, PartDone]] = []
        jobs: list[Job] = []
        with self._lock:
            for part, batch, lane in wanted:
                ended = self._admit(part, batch, lane, jobs, room=room)
                if ended is not None:
                    at_once.append((batch, ended))
            self._open_jobs += len(jobs)
        if jobs:
            self._io.submit(jobs, self._on_asked)
        if at_once:
            self._io.submit([Job((), Lane.DEMAND, None, None)], lambda jobs: self._say_all(at_once))

    def _admit(self, part: PartWrite, batch: _Batch, lane: Lane, jobs: list[Job], *, room: bool) -> PartDone | None:
        """Under the lock: what becomes of one part. None where it is on its way."""
        size = part.buffer.nbytes
        if batch.generation != self._generation:
            # It waited over a reset: its bytes are of before.
            self.stats.writes_failed += 1
            return PartDone(part.key, PartFailure.CANCELLED, "the store was reset")
        if part.key in self._deleting:
            self._deleting[part.key].append((part, batch, lane))
            return None
        under_way = self._writing.get(part.key)
        if under_way is not None:
            if under_way.part.buffer.nbytes != size:
                return PartDone(
                    part.key,
                    PartFailure.EXISTS_DIFFERENT,
                    f"{under_way.part.buffer.nbytes} bytes are being stored under this key",
                )
            under_way.owners.append(batch)
            return None
        if not room:
            self.stats.writes_failed += 1
            return PartDone(
                part.key, PartFailure.NO_SPACE, f"less than {self._free_bytes_min} bytes are free on {self.layout.root}"
            )
        if size == 0:
            return PartDone(part.key, PartFailure.SHORT, "a part of no bytes cannot be stored")
        write = _Write(part, lane, self.layout.path(self._directory, part.key), self._generation, [batch])
        self._writing[part.key] = write
        job = self._asking_job(write)
        batch.jobs.append(job)
        jobs.append(job)
        return None

    @staticmethod
    def _asking_job(write: _Write) -> Job:
        return Job((Step(Op.STAT, path=write.path, length=-1),), write.lane, None, write)

    def _presence_known(self, jobs: list[Job]) -> None:
        """Write what is not there; look closer at what is."""
        writes = []
        ended: list[Job] = []
        for job in jobs:
            write: _Write = job.tag
            if job.error == errno.ENOENT and not write.deleted:
                try:
                    writes.append(self._write_job(write))
                except (OSError, MemoryError):
                    job.error = errno.ENOMEM
                    ended.append(job)
            elif job.error or write.deleted:
                ended.append(job)
            else:
                self._look_at_the_other(write)
        if writes:
            self._io.submit(writes, self._on_write)
        if ended:
            self._writes_ended(ended)

    def _write_job(self, write: _Write) -> Job:
        final, folder = write.path, folder_of(write.path)
        temporary = temporary_path(final)
        buffer = write.part.buffer.cast("B")[: self._file_bytes(write.part)]
        direct = self.direct_io and buffer.nbytes % PAGE_BYTES == 0
        address = address_of(buffer)
        if direct and address % PAGE_BYTES:
            bounce = aligned_buffer(buffer.nbytes)
            bounce[:] = buffer
            buffer, address = bounce, address_of(bounce)
        steps = []
        if folder not in self._made:
            steps += [
                Step(Op.MKDIR, path=folder_of(folder), tolerated=(errno.EEXIST,)),
                Step(Op.MKDIR, path=folder, tolerated=(errno.EEXIST,)),
            ]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        steps += [Step(Op.OPEN, path=temporary, flags=flags), Step(Op.WRITE, buffer=buffer, address=address)]
        if self._sync:
            steps.append(Step(Op.SYNC))
        write.link_step = len(steps)
        steps += [
            Step(Op.LINK if self.links_work else Op.RENAME, path=temporary, path_to=final),
            Step(Op.CLOSE, always=True),
            Step(Op.UNLINK, path=temporary, tolerated=(errno.ENOENT,), always=True),
        ]
        if self._sync:
            steps += [
                Step(Op.OPEN, path=folder, flags=os.O_RDONLY | os.O_DIRECTORY),
                Step(Op.SYNC),
                Step(Op.CLOSE, always=True),
            ]
        job = Job(tuple(steps), write.lane, None, write)
        for owner in write.owners:
            owner.jobs.append(job)
        return job

    def _file_bytes(self, part: PartWrite) -> int:
        """How long the part's file is."""
        if self._trailer == "on":
            return part.buffer.nbytes
        assert self._payload_bytes is not None
        return self._payload_bytes(part.key)

    def _has_room(self) -> bool:
        """Whether the floor of free disk is kept; asked of the filesystem at most once a second."""
        if not self._free_bytes_min:
            return True
        now_s = time.monotonic()
        if now_s >= self._space_at_s + _SPACE_PERIOD_S:
            self._space_at_s = now_s
            try:
                status = os.statvfs(self.layout.root)
            except OSError:
                # The write itself will say what is wrong.
                return True
            self._space_ok = status.f_bavail * status.f_frsize >= self._free_bytes_min
        return self._space_ok

    def submit_read(
        self, parts: Sequence[PartRead], done: PartsDone, *, lane: Lane = Lane.DEMAND, deadline_s: float | None = None
    ) -> Transfer:
        batch = _Batch(self, done, self._generation)
        if self._refused(parts, done):
            return batch
        with self._lock:
            gone = [PartDone(part.key, PartFailure.MISSING) for part in parts if part.key in self._deleting]
            jobs = [self._read_job(part, batch, lane, deadline_s) for part in parts if part.key not in self._deleting]
            self._open_jobs += len(jobs)
        batch.jobs = jobs
        if jobs:
            self._io.submit(jobs, self._on_read)
        if gone:
            self._io.submit([Job((), Lane.DEMAND, None, None)], lambda jobs: self._say(batch, gone))
        return batch

    def _read_job(self, part: PartRead, batch: _Batch, lane: Lane, deadline_s: float | None) -> Job:
        path = self.layout.path(self._directory, part.key)
        buffer = part.buffer.cast("B")
        steps = []
        if self._trailer == "off":
            assert self._payload_bytes is not None
            buffer = buffer[: self._payload_bytes(part.key)]
            # A plain file says nothing of itself but its length, so that much is asked.
            steps.append(Step(Op.STAT, path=path, length=buffer.nbytes))
        read = _Read(part, batch, path, buffer.nbytes)
        address = address_of(buffer)
        direct = self.direct_io and buffer.nbytes % PAGE_BYTES == 0
        if direct and address % PAGE_BYTES:
            buffer = read.bounce = aligned_buffer(buffer.nbytes)
            address = address_of(buffer)
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        steps += [
            Step(Op.OPEN, path=path, flags=flags),
            Step(Op.READ, buffer=buffer, address=address),
            Step(Op.CLOSE, always=True),
        ]
        return Job(tuple(steps), lane, deadline_s, read)

    def delete(self, keys: Sequence[Key]) -> None:
        if os.getpid() != self._pid or self._closing:
            return
        jobs = []
        with self._lock:
            for key in keys:
                write = self._writing.pop(key, None)
                self._used.pop(key, None)
                if write is not None:
                    # Its name may come into being yet: that is taken away when the write has ended.
                    write.deleted = True
                    self._deleting[key] = []
                elif key not in self._deleting:
                    self._deleting[key] = []
                    jobs.append(self._delete_job(key, self.layout.path(self._directory, key)))
            self._open_jobs += len(jobs)
        if jobs:
            self._io.submit(jobs, self._on_deleted)

    @staticmethod
    def _delete_job(key: Key, path: bytes) -> Job:
        return Job((Step(Op.UNLINK, path=path, tolerated=(errno.ENOENT, errno.ENOTDIR)),), Lane.DEMAND, None, key)

    def _deletes_ended(self, jobs: list[Job]) -> None:
        """The names are gone: writes of these keys that came meanwhile may start."""
        with self._lock:
            waiting = [one for job in jobs for one in self._deleting.pop(job.tag, ())]
        if waiting:
            self._start(waiting)
        self._ended(len(jobs))

    def reset(self, generation: int) -> None:
        if os.getpid() != self._pid or self._closing:
            raise StoreUnavailableError(f"{self.layout.root} is closed: nothing can be reset")
        with self._lock:
            if generation < self._generation:
                raise ValueError(
                    f"generation {generation} is older than {self._generation}, which is in force: generations only grow"
                )
            if generation == self._generation:
                return
            try:
                base = self.layout.rank_directory(self.rank)
                _write_generation(base, max(generation + 1, _read_generation(base)))
                self._enter_generation(generation)
            except OSError as exception:
                raise StoreUnavailableError(
                    f"generation {generation} could not be made durable in {self.layout.root}: {exception}"
                ) from exception
            for write in self._writing.values():
                write.deleted = True
            self._writing.clear()
            self._used.clear()

    def flush(self, deadline_s: float) -> bool:
        if os.getpid() != self._pid:
            return True
        until = time.monotonic() + deadline_s
        with self._lock:
            while self._open_jobs:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return False
                self._idle.wait(remaining)
        return True

    def close(self, deadline_s: float) -> bool:
        if os.getpid() != self._pid:
            return True
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            return True
        until = time.monotonic() + deadline_s
        flushed = self.flush(deadline_s)
        quiet = self._io.close(max(1.0, until - time.monotonic()))
        self._chores.put(None)
        return flushed and quiet

    def _refused(self, parts: Sequence[PartWrite] | Sequence[PartRead], done: PartsDone) -> bool:
        if os.getpid() != self._pid:
            detail = "this store belongs to the parent process: open one of your own after the fork"
        elif self._closing:
            detail = "the store is closed"
        else:
            return False
        if parts:
            done([PartDone(part.key, PartFailure.CLOSED, detail) for part in parts])
        return True

    # -- ends of I/O, on the engine's threads

    def _say(self, batch: _Batch, results: list[PartDone]) -> None:
        try:
            batch.done(results)
        except Exception:  # noqa: BLE001 - what a caller raises must not end our threads
            self.stats.callbacks_failed += 1

    def _say_all(self, outcome: Iterable[tuple[_Batch, PartDone]]) -> None:
        groups: dict[int, tuple[_Batch, list[PartDone]]] = {}
        for batch, done in outcome:
            groups.setdefault(id(batch), (batch, []))[1].append(done)
        for batch, results in groups.values():
            self._say(batch, results)

    def _ended(self, count: int) -> None:
        with self._lock:
            self._open_jobs -= count
            self._idle.notify_all()

    def _reads_ended(self, jobs: list[Job]) -> None:
        outcome = []
        for job in jobs:
            done = self._judge_read(job, job.tag)
            self.stats.read_bytes += job.tag.payload_bytes if done.failure is None else 0
            self.stats.reads_missing += done.failure is PartFailure.MISSING
            self.stats.reads_failed += done.failure not in (None, PartFailure.MISSING)
            outcome.append((job.tag.batch, done))
        self._say_all(outcome)
        self._ended(len(jobs))

    def _judge_read(self, job: Job, read: _Read) -> PartDone:
        key = read.part.key
        if read.batch.generation != self._generation:
            return PartDone(key, PartFailure.MISSING, "the store was reset")
        if job.error == errno.ECANCELED:
            return PartDone(
                key, PartFailure.CLOSED if self._closing else PartFailure.CANCELLED, "given up before it started"
            )
        if job.error in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return PartDone(key, PartFailure.MISSING)
        if job.error == END_OF_FILE:
            return PartDone(key, PartFailure.SHORT, f"{os.fsdecode(read.path)} has another length")
        if job.error:
            return PartDone(key, PartFailure.IO, f"{os.fsdecode(read.path)}: {error_text(job.error)}")
        if read.bounce is not None:
            read.part.buffer.cast("B")[: read.payload_bytes] = read.bounce
        if self._trailer == "off":
            assert self._identity is not None
            seal_slot(read.part.buffer, self._identity(key), read.payload_bytes)
            if read.batch.generation != self._generation:
                return PartDone(key, PartFailure.MISSING, "the store was reset")
        self._note_use(key, read.path)
        return PartDone(key)

    def _writes_ended(self, jobs: list[Job]) -> None:
        outcome: list[tuple[_Batch, PartDone]] = []
        ended = 0
        for job in jobs:
            write: _Write = job.tag
            if job.error == errno.EEXIST and job.failed_step == write.link_step and not write.deleted:
                self._look_at_the_other(write)
                continue
            if job.error == errno.ENOENT and folder_of(write.path) in self._made and not write.deleted:
                # Somebody removed a directory that seemed empty: make it again.
                self._made.discard(folder_of(write.path))
                self._io.submit([self._asking_job(write)], self._on_asked)
                continue
            if job.error in _LINK_REFUSED and job.failed_step == write.link_step and self.links_work:
                self.stats.notes.append(
                    f"{self.layout.root} refused a hard link ({error_text(job.error)}): files are renamed into place from now on"
                )
                self.links_work = False
            ended += 1
            outcome += self._conclude(write, *self._judge_write(job, write), moved_bytes=job.moved_bytes)
        self._say_all(outcome)
        self._ended(ended)

    def _judge_write(self, job: Job, write: _Write) -> tuple[PartFailure | None, str]:
        if write.deleted:
            return PartFailure.CANCELLED, "deleted while it was being written"
        if job.error == errno.ECANCELED:
            return (PartFailure.CLOSED if self._closing else PartFailure.CANCELLED), "given up before it started"
        if job.error:
            # A directory that we made may have been removed by hand: make it again next time.
            self._made.discard(folder_of(write.path))
            if job.error == errno.ENOENT and self._trailer == "on":
                # Or the whole tree was: plain files would then be anybody's, whoever claims the name next.
                directory = self._directory_path
                self._chore(lambda: directory.mkdir(parents=True, exist_ok=True))
            failure = PartFailure.NO_SPACE if job.error in (errno.ENOSPC, errno.EDQUOT) else PartFailure.IO
            return failure, f"{os.fsdecode(write.path)}: {error_text(job.error)}"
        self._made.add(folder_of(write.path))
        return None, ""

    def _conclude(
        self, write: _Write, failure: PartFailure | None, detail: str, *, moved_bytes: int = 0
    ) -> list[tuple[_Batch, PartDone]]:
        with self._lock:
            if self._writing.get(write.part.key) is write:
                del self._writing[write.part.key]
            owners = list(write.owners)
        self.stats.written_bytes += moved_bytes
        self.stats.parts_written += failure is None and moved_bytes > 0
        self.stats.writes_failed += failure is not None
        if write.deleted:
            with self._lock:
                self._open_jobs += 1
            self._io.submit([self._delete_job(write.part.key, write.path)], self._on_deleted)
        elif failure is None and write.part.value_s_per_byte > 0 and moved_bytes:
            self._chore(
                lambda: os.setxattr(write.path, b"user.kvtier.value", repr(write.part.value_s_per_byte).encode())
            )
        return [(owner, PartDone(write.part.key, failure, detail)) for owner in owners]

    def _look_at_the_other(self, write: _Write) -> None:
        """The name is taken: by the same part, which is a success, or by another, which is refused."""
        size = self._file_bytes(write.part)
        tail = memoryview(bytearray(min(PAGE_BYTES, size)))
        steps = [Step(Op.STAT, path=write.path, length=size)]
        if self._trailer == "on":
            steps += [
                Step(Op.OPEN, path=write.path, flags=os.O_RDONLY),
                Step(Op.READ, offset=size - tail.nbytes, buffer=tail, address=address_of(tail)),
                Step(Op.CLOSE, always=True),
            ]
        look = Job(tuple(steps), write.lane, None, (write, tail))
        self._io.submit([look], self._looked)

    def _looked(self, jobs: list[Job]) -> None:
        outcome: list[tuple[_Batch, PartDone]] = []
        ended = 0
        for job in jobs:
            write, tail = job.tag
            failure, detail = None, ""
            if write.deleted:
                failure, detail = PartFailure.CANCELLED, "deleted while it was being written"
            elif job.error == errno.ENOENT:
                # Stored by another engine, and removed again: now it is ours to store.
                self._io.submit([self._asking_job(write)], self._on_asked)
                continue
            elif job.error:
                failure, detail = (
                    PartFailure.EXISTS_DIFFERENT,
                    f"{os.fsdecode(write.path)} is there with another length, or cannot be read",
                )
            elif self._trailer == "on" and not _same_part(
                bytes(write.part.buffer.cast("B")[-HEAD_BYTES_MAX:]), bytes(tail[-HEAD_BYTES_MAX:])
            ):
                failure, detail = (
                    PartFailure.EXISTS_DIFFERENT,
                    f"{os.fsdecode(write.path)} is there and holds another part",
                )
            else:
                self.stats.parts_found_written += 1
            ended += 1
            outcome += self._conclude(write, failure, detail)
        self._say_all(outcome)
        self._ended(ended)

    def _note_use(self, key: Key, path: bytes) -> None:
        """Keep the file's time of use for the janitor, to the hour: a metadata write for each read would cost more than it is worth."""
        now_s = time.monotonic()
        if now_s < self._used.get(key, -1e9) + _USE_PERIOD_S:
            return
        if len(self._used) >= 1 << 18:
            self._used.clear()
        self._used[key] = now_s
        self._chore(lambda: os.utime(path))

    def _chore(self, call: Callable[[], object]) -> None:
        if self._chores.qsize() < _CHORES_MAX:
            self._chores.put(call)

    def _do_chores(self) -> None:
        while (call := self._chores.get()) is not None and not self._closing:
            with contextlib.suppress(OSError):
                call()


def _slot_bytes(payload_bytes: int) -> int:
    return -(-(payload_bytes + HEAD_BYTES_MAX) // PAGE_BYTES) * PAGE_BYTES


def _same_part(mine: bytes, theirs: bytes) -> bool:
    """Whether two heads are of one part. The same KV computed twice may differ in its last bits: what counts is whose it is."""
    if mine == theirs:
        return True
    try:
        return read_slot_head(mine).identity == read_slot_head(theirs).identity
    except RecordError:
        return False


def _read_generation(base: Path) -> int:
    try:
        return int((base / GENERATION_NAME).read_text())
    except FileNotFoundError:
        return 0
    except ValueError as exception:
        raise StoreUnavailableError(
            f"{base / GENERATION_NAME} cannot be understood ({exception}): write the generation into it, as a number"
        ) from exception


def _write_generation(base: Path, generation: int) -> None:
    new = base / f"{GENERATION_NAME}.{os.getpid()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, b"%d" % generation)
        os.fsync(fd)
    finally:
        os.close(fd)
    new.replace(base / GENERATION_NAME)
    folder = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _probe(directory: Path, *, direct: bool) -> tuple[bool, str]:
    """Whether files can be made in `directory` (OSError if not), and whether O_DIRECT works there."""
    path = Path(os.fsdecode(temporary_path(os.fsencode(directory / "00.bin"))))
    path.write_bytes(b"")
    try:
        if not direct:
            return False, "not asked for"
        page = aligned_buffer(PAGE_BYTES)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
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


def _probe_links(directory: Path) -> bool:
    path = Path(os.fsdecode(temporary_path(os.fsencode(directory / "00.bin"))))
    other = Path(os.fsdecode(temporary_path(os.fsencode(directory / "01.bin"))))
    path.write_bytes(b"")
    try:
        os.link(path, other)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    return True
