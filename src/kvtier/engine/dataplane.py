"""The data plane of one rank: it moves bytes as it is told, and decides nothing.

Three threads, each with a queue of its own, none ever waiting for another:

- the *storer* copies parts out of the engine into their slots and seals them there (head and checksum);
- the *loader* brings parts into the engine: what lies in DRAM at once, what lies on disk batch by batch as its reads complete,
  verifying each before its copy, while the next are being read;
- the *writer* carries out the control plane's actions (write, read ahead, delete, reset) in their order.

The engine's thread submits jobs, and collects what has ended with `poll`. A job ends exactly once, well or not; a job that
ends badly says so in an outcome that `poll` hands out no later than the job. Nothing raised in a thread ends the thread:
it ends the job.

Who owns bytes: a job owns its slots, and its blocks of the engine, until it ends. A load that passes its deadline ends at once:
only the loader copies into the engine, so none of its blocks is written afterwards; its reads in flight go on owning their
slots (`LoadFailed.held`) until `LoadReleased`. Fences of resets pass through storer and loader, and are answered when
everything before them, reads in flight included, has ended.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvtier.engine.copying import CopyEngine
from kvtier.engine.layout import Addresses, GroupLayout, Piece, join
from kvtier.errors import StoreUnavailableError
from kvtier.memory.arena import Arena
from kvtier.record.envelope import Identity, open_slot, seal_slot, slot_bytes
from kvtier.record.errors import RecordError
from kvtier.store.moves import (
    NO_SLOT,
    Action,
    DeleteParts,
    FenceDone,
    HurryReads,
    Key,
    LoadFailed,
    LoadReleased,
    Outcome,
    PartPlace,
    ReadDone,
    ReadParts,
    ResetTier,
    Source,
    StoreFailed,
    WriteDone,
    WriteParts,
)
from kvtier.tier.disk.base import Lane, PartDone, PartFailure, PartRead, PartStore, PartWrite, Transfer

logger = logging.getLogger(__name__)

_STAGING_SLOTS_MIN = 2
_STAGING_SLOTS_MAX = 8
_COPY_PARTS_MAX = 8
_SPLIT_BYTES_MIN = 4 << 20
_VERIFIERS_MAX = min(4, os.cpu_count() or 1)
_RESET_RETRY_S = 0.5


def staging_bytes_of(arena_bytes: int, sizes: Sequence[int]) -> int:
    """How much of an arena above a disk is kept for reads that get no slot: a few of the largest slots."""
    largest = max(sizes)
    return max(_STAGING_SLOTS_MIN, min(_STAGING_SLOTS_MAX, arena_bytes // 16 // largest)) * largest


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job that ended: bytes copied and seconds since it was submitted."""

    job_id: int
    is_load: bool
    copied_bytes: int
    seconds: float
    ok: bool


@dataclass(slots=True)
class _Job:
    job_id: int
    parts: Sequence[PartPlace]
    pieces: Sequence[Piece]
    after: object
    started_s: float
    generation: int
    copied_bytes: int = 0


@dataclass(slots=True)
class _LoadJob(_Job):
    load_id: int = 0
    deadline_s: float = 0.0
    addresses: Addresses = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    buffers: dict[int, memoryview] = field(default_factory=dict)
    staged: dict[int, int] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    part_of_key: dict[Key, int] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    reads_left: int = 0
    lost: dict[Key, str] = field(default_factory=dict)
    reason: str = ""
    ended: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.reason)


class DataPlane:
    """See the module's text.

    Args:
        arena: memory of all slots; `layouts` says how large those of each group are.
        layouts: one for each group.
        copier: moves bytes between the engine's cache and the arena.
        disk: the rank's part store, None for none.
        namespace: 16 bytes that all records of this engine carry.
        rank: this rank's number.
        slots_bytes: how much of the arena, from its start, the control plane hands out; the rest is staging for reads that
            got no slot.
        verify: check identity and checksum of every part before the engine gets it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        arena: Arena,
        layouts: Sequence[GroupLayout],
        copier: CopyEngine,
        disk: PartStore | None,
        *,
        namespace: bytes,
        rank: int = 0,
        slots_bytes: int | None = None,
        verify: bool = True,
        load_deadline_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._layouts = tuple(layouts)
        self._slot_bytes = tuple(slot_bytes(layout.payload_bytes) for layout in layouts)
        self._copier = copier
        self._disk = disk
        self._namespace = namespace
        self._rank = rank
        self._verify = verify
        self._load_deadline_s = load_deadline_s
        self._clock = clock
        self.generation = disk.generation if disk is not None else 0
        self.slots_bytes = arena.capacity_bytes if slots_bytes is None else slots_bytes
        staging_bytes = max(self._slot_bytes)
        self._staging = list(range(self.slots_bytes, arena.capacity_bytes - staging_bytes + 1, staging_bytes))
        self._staging_count = len(self._staging)

        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._results: list[JobResult] = []
        self._outcomes: list[Outcome] = []
        self._open_jobs: set[int] = set()
        self._given_up: set[int] = set()
        self._closing = threading.Event()
        # Held while a copy looks whether its job was given up, and runs: `wait` takes them to know that none runs any more.
        self._store_copy = threading.Lock()
        self._load_copy = threading.Lock()

        self._store_queue: queue.SimpleQueue[_Job | int | None] = queue.SimpleQueue()
        self._load_queue: queue.SimpleQueue[_LoadJob | tuple[_LoadJob, Sequence[PartDone]] | int | None]
        self._load_queue = queue.SimpleQueue()
        self._write_queue: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._loads: dict[int, _LoadJob] = {}
        self._load_fences: list[tuple[int, set[int]]] = []
        self._fences_passed: dict[int, int] = {}
        self._reads_ahead: dict[int, Transfer] = {}
        self._helpers = ThreadPoolExecutor(max(1, _VERIFIERS_MAX - 1), thread_name_prefix=f"kvtier-verify-{rank}")
        self._threads = [
            threading.Thread(target=target, name=f"kvtier-{name}-{rank}", daemon=True)
            for name, target in (("store", self._run_storer), ("load", self._run_loader), ("write", self._run_writer))
        ]
        for thread in self._threads:
            thread.start()

    # ---- the engine's thread

    def submit_store(self, job_id: int, parts: Sequence[PartPlace], pieces: Sequence[Piece]) -> None:
        """Copy `parts` out of the engine. Ends once their bytes are in their slots. Where it raises, there is no job."""
        job = _Job(job_id, parts, pieces, self._copier.mark(), self._clock(), self.generation)
        self._open(job_id)
        self._store_queue.put(job)

    def submit_load(self, job_id: int, load_id: int, parts: Sequence[PartPlace], pieces: Sequence[Piece]) -> None:
        """Bring `parts` into the engine. Ends once all are there, or at the first failure, or at the deadline.

        Where it raises, there is no job.
        """
        now_s = self._clock()
        deadline_s = now_s + self._load_deadline_s
        mark = self._copier.mark()
        job = _LoadJob(job_id, parts, pieces, mark, now_s, self.generation, 0, load_id, deadline_s)
        self._open(job_id)
        self._load_queue.put(job)

    def act(self, actions: Sequence[Action]) -> None:
        """Take the control plane's actions, in order."""
        for action in actions:
            if isinstance(action, ResetTier):
                # Jobs submitted from here on belong to the new generation, however far the writer has come.
                self.generation = action.generation
            self._write_queue.put(action)

    def poll(self) -> tuple[list[JobResult], list[Outcome]]:
        """What has ended since the last call."""
        with self._lock:
            results, self._results = self._results, []
            outcomes, self._outcomes = self._outcomes, []
        return results, outcomes

    def wait_for_news(self, deadline_s: float) -> bool:
        """Wait until `poll` has something, at most `deadline_s` seconds."""
        with self._ended:
            return self._ended.wait_for(lambda: bool(self._results or self._outcomes), deadline_s)

    def wait(self, job_ids: set[int], deadline_s: float) -> bool:
        """Wait until these jobs have ended, at most `deadline_s` seconds. Those that have not then will copy nothing more."""
        with self._ended:
            if self._ended.wait_for(lambda: not (job_ids & self._open_jobs), deadline_s):
                return True
            self._given_up |= job_ids & self._open_jobs
        for running in (self._store_copy, self._load_copy):
            with running:
                pass
        return False

    def close(self, deadline_s: float) -> bool:
        """End the threads and the disk store. True if everything submitted was published in time."""
        end_s = self._clock() + deadline_s
        self._closing.set()
        self._store_queue.put(None)
        self._load_queue.put(None)
        self._write_queue.put(None)
        for thread in self._threads:
            thread.join(max(0.1, end_s - self._clock()))
        self._helpers.shutdown(wait=False)
        published = not any(thread.is_alive() for thread in self._threads)
        if self._disk is not None:
            published &= self._disk.close(max(0.1, end_s - self._clock()))
        if published:
            # With a thread still at work its memory stays registered and mapped until the process ends.
            self._copier.close()
        return published

    # ---- ends of jobs

    def _open(self, job_id: int) -> None:
        if self._closing.is_set():
            raise StoreUnavailableError("the data plane is closed: nothing is copied any more")
        with self._lock:
            self._open_jobs.add(job_id)

    def _end(self, job: _Job, *, is_load: bool, outcome: Outcome | None = None) -> None:
        with self._ended:
            if outcome is not None:
                self._outcomes.append(outcome)
            seconds = self._clock() - job.started_s
            self._results.append(JobResult(job.job_id, is_load, job.copied_bytes, seconds, outcome is None))
            self._open_jobs.discard(job.job_id)
            self._given_up.discard(job.job_id)
            self._ended.notify_all()

    def _report(self, outcome: Outcome) -> None:
        with self._ended:
            self._outcomes.append(outcome)
            self._ended.notify_all()

    def _identity(self, part: PartPlace, generation: int) -> Identity:
        return Identity(self._namespace, part.key, generation, part.group, self._rank)

    def _slot(self, part: PartPlace) -> memoryview:
        return self._arena.view(part.offset, self._slot_bytes[part.group])

    # ---- storer

    def _run_storer(self) -> None:
        while (job := self._store_queue.get()) is not None:
            if isinstance(job, int):
                self._pass_fence(job)
                continue
            try:
                failed = self._store(job)
            except Exception as error:
                logger.warning("kvtier: a store failed, its parts are not kept", exc_info=True)
                failed = {part.key: f"copy out of the engine: {error!r}" for part in job.parts}
            reason = next(iter(failed.values()), "")
            self._end(job, is_load=False, outcome=StoreFailed(list(failed), reason) if failed else None)

    def _store(self, job: _Job) -> dict[Key, str]:
        addresses = np.array([self._arena.address + part.offset for part in job.parts], dtype=np.int64)
        failed: dict[Key, str] = {}
        whole: list[Piece] = []
        for piece in job.pieces:
            kept, broken = piece.whole_parts(self._layouts[piece.group])
            if kept.parts:
                whole.append(kept)
            # The engine has let go of some blocks of a window: a part with holes must never be found.
            failed.update({job.parts[place].key: "a chunk is not whole any more" for place in broken})
        if whole:
            ranges = join([piece.select(self._layouts[piece.group], addresses) for piece in whole])
            with self._store_copy:
                if job.job_id in self._given_up:
                    return {part.key: "given up at a deadline" for part in job.parts}
                self._copier.to_arena(ranges, job.after)
            job.copied_bytes = ranges.total_bytes
        for part in job.parts:
            if part.key not in failed:
                payload_bytes = self._layouts[part.group].payload_bytes
                seal_slot(self._slot(part), self._identity(part, job.generation), payload_bytes)
        return failed

    # ---- loader

    def _run_loader(self) -> None:
        closing = False
        while not (closing and not self._loads):
            deadlines = [job.deadline_s for job in self._loads.values() if not job.ended]
            timeout_s = max(0.0, min(deadlines) - self._clock()) if deadlines else None
            if closing:
                timeout_s = min(timeout_s or 1.0, 1.0)
            event = None
            with contextlib.suppress(queue.Empty):
                event = self._load_queue.get(timeout=timeout_s)
                closing |= event is None
            if isinstance(event, int):
                self._load_fences.append((event, set(self._loads)))
            elif isinstance(event, _LoadJob):
                self._guarded(event, self._start_load, event)
            elif event is not None:
                self._guarded(event[0], self._take_reads, *event)
            now_s = self._clock()
            for job in list(self._loads.values()):
                if job.reads_left == 0:
                    # Its last read was refused in the turn of another load.
                    self._end_load(job)
                elif not job.ended and now_s >= job.deadline_s:
                    job.reason = job.reason or f"deadline: not loaded within {self._load_deadline_s:g} s"
                    self._cancel(job)
                    self._end_load(job)
            for fence_id, before in self._load_fences[:]:
                if not (before & self._loads.keys()):
                    self._load_fences.remove((fence_id, before))
                    self._pass_fence(fence_id)

    def _guarded(self, job: _LoadJob, step: Callable[..., None], *args: object) -> None:
        try:
            step(*args)
        except Exception as error:
            logger.warning("kvtier: a load failed, its request is recomputed", exc_info=True)
            job.reason = job.reason or f"copy into the engine: {error!r}"
            self._cancel(job)
        if job.reads_left == 0:
            self._end_load(job)

    def _start_load(self, job: _LoadJob) -> None:
        self._loads[job.job_id] = job
        job.lost = {part.key: "missing" for part in job.parts if part.source is Source.MISSING}
        if job.failed:
            return
        offsets = np.array([part.offset for part in job.parts], dtype=np.int64)
        job.addresses = self._arena.address + offsets
        job.part_of_key = {part.key: place for place, part in enumerate(job.parts)}
        disk = [place for place, part in enumerate(job.parts) if part.source is Source.DISK]
        if disk and self._disk is None:
            job.lost = {job.parts[place].key: "this rank has no disk tier" for place in disk}
            return
        job.waiting.extend(place for place in disk if job.parts[place].offset == NO_SLOT)
        direct = [place for place in disk if job.parts[place].offset != NO_SLOT]
        for place in direct:
            job.buffers[place] = self._slot(job.parts[place])
        job.reads_left = len(disk)
        if job.waiting and not self._staging_count:
            job.reads_left = 0
            job.reason = "no staging memory: dram_bytes is too small for reads past the arena"
            return
        self._read(job, direct)
        self._read_staged()
        memory = [place for place, part in enumerate(job.parts) if part.source is Source.DRAM]
        for start in range(0, len(memory), _COPY_PARTS_MAX):
            self._deliver(job, memory[start : start + _COPY_PARTS_MAX])

    def _read(self, job: _LoadJob, places: Sequence[int]) -> None:
        if not places:
            return
        assert self._disk is not None
        reads = [PartRead(job.parts[place].key, job.buffers[place]) for place in places]

        def done(parts: Sequence[PartDone]) -> None:
            self._load_queue.put((job, parts))

        try:
            job.transfers.append(self._disk.submit_read(reads, done, lane=Lane.DEMAND, deadline_s=job.deadline_s))
        except Exception:
            job.reads_left -= len(reads)
            raise

    def _read_staged(self) -> None:
        """Give free staging to the loads that wait for it, oldest first. A read that is refused fails its own load alone."""
        for job in self._loads.values():
            places: list[int] = []
            while job.waiting and self._staging and not job.failed:
                place = job.waiting.popleft()
                offset = self._staging.pop()
                job.staged[place] = offset
                job.addresses[place] = self._arena.address + offset
                job.buffers[place] = self._arena.view(offset, self._slot_bytes[job.parts[place].group])
                places.append(place)
            try:
                self._read(job, places)
            except Exception as error:
                logger.warning("kvtier: a read was refused, its request is recomputed", exc_info=True)
                self._staging += [job.staged.pop(place) for place in places]
                job.reason = job.reason or f"read: {error!r}"
                self._cancel(job)

    def _take_reads(self, job: _LoadJob, done: Sequence[PartDone]) -> None:
        arrived: list[int] = []
        for part in done:
            place = job.part_of_key[part.key]
            job.reads_left -= 1
            if part.failure is None:
                arrived.append(place)
            elif part.failure in (PartFailure.CANCELLED, PartFailure.CLOSED):
                job.reason = job.reason or part.failure.value
            else:
                job.lost[part.key] = f"{part.failure.value}: {part.detail}" if part.detail else part.failure.value
        try:
            if job.failed:
                self._cancel(job)
            else:
                for start in range(0, len(arrived), _COPY_PARTS_MAX):
                    self._deliver(job, arrived[start : start + _COPY_PARTS_MAX])
        finally:
            for part in done:
                staged = job.staged.pop(job.part_of_key[part.key], None)
                if staged is not None:
                    self._staging.append(staged)
            self._read_staged()

    def _deliver(self, job: _LoadJob, places: Sequence[int]) -> None:
        """Verify these parts, then copy them into the engine; a load that has failed gets nothing more."""
        if self._verify and not job.failed:
            self._verify_all(job, places)
        if job.failed:
            self._cancel(job)
            return
        wanted = np.zeros(len(job.parts), dtype=np.bool_)
        wanted[list(places)] = True
        groups = {job.parts[place].group for place in places}
        ranges = join(
            [
                piece.select(self._layouts[piece.group], job.addresses, wanted)
                for piece in job.pieces
                if piece.group in groups
            ]
        )
        with self._load_copy:
            if job.job_id in self._given_up:
                job.reason = "given up at a deadline"
                self._cancel(job)
                return
            self._copier.to_engine(ranges, job.after)
        job.copied_bytes += ranges.total_bytes

    def _verify_all(self, job: _LoadJob, places: Sequence[int]) -> None:
        """One thread sums no faster than it reads cold memory, and a copy by several is faster: the parts are dealt to a few."""
        total_bytes = sum(self._slot_bytes[job.parts[place].group] for place in places)
        shares = min(_VERIFIERS_MAX, len(places)) if total_bytes >= _SPLIT_BYTES_MIN else 1
        others = [self._helpers.submit(self._wrong, job, places[share::shares]) for share in range(1, shares)]
        job.lost.update(self._wrong(job, places[::shares]))
        for other in others:
            job.lost.update(other.result())

    def _wrong(self, job: _LoadJob, places: Sequence[int]) -> dict[Key, str]:
        """Which of these parts are not what they should be, and why."""
        wrong = {}
        for place in places:
            part = job.parts[place]
            view = job.buffers.get(place) or self._slot(part)
            try:
                open_slot(view, self._identity(part, job.generation), self._layouts[part.group].payload_bytes)
            except RecordError as error:
                wrong[part.key] = type(error).__name__
                logger.warning("kvtier: a stored part is not what it should be: %s", error)
        return wrong

    def _cancel(self, job: _LoadJob) -> None:
        job.reads_left -= len(job.waiting)
        job.waiting.clear()
        for transfer in job.transfers:
            transfer.cancel()
        job.transfers.clear()

    def _end_load(self, job: _LoadJob) -> None:
        held = job.reads_left > 0
        if not job.ended:
            job.ended = True
            outcome = LoadFailed(job.load_id, dict(job.lost), job.reason, held) if job.failed else None
            self._end(job, is_load=True, outcome=outcome)
        elif not held:
            self._report(LoadReleased(job.load_id))
        if not held:
            self._loads.pop(job.job_id, None)

    # ---- writer

    def _run_writer(self) -> None:
        while (action := self._write_queue.get()) is not None:
            try:
                self._carry_out(action)
            except Exception as error:
                logger.warning("kvtier: the disk tier refused an action", exc_info=True)
                if isinstance(action, WriteParts):
                    self._report(WriteDone(action.move_id, {part.key: f"io: {error!r}" for part in action.parts}))
                elif isinstance(action, ReadParts):
                    self._report(ReadDone(action.move_id, {part.key: f"io: {error!r}" for part in action.parts}))

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, WriteParts):
            self._write(action)
        elif isinstance(action, ReadParts):
            self._read_ahead(action)
        elif isinstance(action, HurryReads):
            with self._lock:
                transfer = self._reads_ahead.get(action.move_id)
            if transfer is not None:
                transfer.promote(Lane.DEMAND)
        elif isinstance(action, DeleteParts):
            if self._disk is not None:
                self._disk.delete(action.keys)
        elif isinstance(action, ResetTier):
            self._reset(action)

    def _reset(self, action: ResetTier) -> None:
        """Answer the fence only once a restart cannot bring back what is older: until the disk has it, try again."""
        said = False
        while self._disk is not None:
            try:
                self._disk.reset(action.generation)
                break
            except Exception:
                if not said:
                    logger.warning(
                        "kvtier: the reset to generation %d is in force, but not on disk yet: trying again, and writing nothing until then",
                        action.generation,
                        exc_info=True,
                    )
                said = True
            if self._closing.wait(_RESET_RETRY_S):
                return
        self._start_fence(action.fence_id)

    def _when_all_end(self, count: int, then: Callable[[dict[Key, str]], None]) -> Callable[[Sequence[PartDone]], None]:
        """A `done` for `count` parts, that calls `then` with the reasons of those that failed when the last has ended."""
        failed: dict[Key, str] = {}
        left = count
        lock = threading.Lock()

        def done(parts: Sequence[PartDone]) -> None:
            nonlocal left
            with lock:
                left -= len(parts)
                for part in parts:
                    if part.failure is not None:
                        failed[part.key] = f"{part.failure.value}: {part.detail}"
                last = left == 0
            if last:
                then(failed)

        return done

    def _read_ahead(self, action: ReadParts) -> None:
        """Read into slots; what was read is verified when a load takes it, as all that lies in DRAM is."""
        if self._disk is None:
            self._report(ReadDone(action.move_id, {part.key: "this rank has no disk tier" for part in action.parts}))
            return
        ended = False

        def end(failed: dict[Key, str]) -> None:
            nonlocal ended
            with self._lock:
                ended = True
                self._reads_ahead.pop(action.move_id, None)
            self._report(ReadDone(action.move_id, failed))

        reads = [PartRead(part.key, self._slot(part)) for part in action.parts]
        transfer = self._disk.submit_read(reads, self._when_all_end(len(reads), end), lane=Lane.PRELOAD)
        with self._lock:
            if not ended:
                self._reads_ahead[action.move_id] = transfer

    def _write(self, action: WriteParts) -> None:
        if self._disk is None:
            self._report(WriteDone(action.move_id, {part.key: "this rank has no disk tier" for part in action.parts}))
            return
        done = self._when_all_end(len(action.parts), lambda failed: self._report(WriteDone(action.move_id, failed)))
        writes = [
            PartWrite(part.key, self._slot(part), value, depth)
            for part, depth, value in zip(action.parts, action.depths_tokens, action.values_s_per_byte, strict=True)
        ]
        self._disk.submit_write(writes, done)

    def _start_fence(self, fence_id: int) -> None:
        with self._lock:
            self._fences_passed[fence_id] = 0
        self._store_queue.put(fence_id)
        self._load_queue.put(fence_id)

    def _pass_fence(self, fence_id: int) -> None:
        with self._lock:
            self._fences_passed[fence_id] += 1
            passed = self._fences_passed[fence_id] == 2
        if passed:
            del self._fences_passed[fence_id]
            self._report(FenceDone(fence_id))
