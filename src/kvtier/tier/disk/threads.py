"""An I/O engine of plain threads: `preadv` and `pwritev`, which release the GIL. Works wherever Python does.

At least 16 threads, however small the depth asked for: with another thread holding the GIL four collapse, sixteen do not. Threads
that finish jobs do not call back one by one: they append to a list, and whoever finds it unattended hands over all that has gathered.
So callbacks are serial, and batches grow by themselves when Python is busy.
"""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.io import END_OF_FILE, RETRIED, RETRIES_MAX, Finished, IOEngine, Job, Op, Step
from kvtier.tier.disk.lanes import LaneQueue

THREADS_MIN = 16


class SystemCalls:
    """The calls that move data, in one place so that a test can make them fail."""

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwritev(fd, [buffer], offset)

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)


class ThreadIO(IOEngine):
    """Runs up to `iodepth` jobs at a time on max(16, `iodepth`) threads.

    Args:
        iodepth: most jobs in flight.
        write_share: part of the depth that waiting writes always get.
        transfer_bytes_max: most bytes that one system call moves.
        calls: the system calls, replaceable.
    """

    name = "threads"

    def __init__(
        self,
        *,
        iodepth: int = 16,
        write_share: float = 0.125,
        transfer_bytes_max: int = 1 << 30,
        calls: SystemCalls | None = None,
        because: str = "asked for",
    ) -> None:
        self.chosen_because = because
        self._queue = LaneQueue(iodepth, write_share)
        self._transfer_bytes_max = transfer_bytes_max
        self._calls = calls or SystemCalls()
        self._ready = threading.Condition()
        self._stopping = False
        self._callbacks_failed = 0
        self._ended: deque[Job] = deque()
        self._handing_over = threading.Lock()
        self._unheralded = threading.Event()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-disk-{index}", daemon=True)
            for index in range(max(THREADS_MIN, iodepth))
        ]
        # Its own thread, so that answers that need no I/O come even while every other thread is stuck in a dead device.
        self._threads.append(threading.Thread(target=self._herald, name="kvtier-disk-herald", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Job], finished: Finished) -> None:
        refused = os.getpid() != self._pid
        for job in jobs:
            job.finished = finished
        if not refused:
            with self._ready:
                refused = self._stopping
                if not refused:
                    self._enqueue(jobs)
        if refused:
            for job in jobs:
                job.error = errno.ECANCELED
            if jobs:
                finished(list(jobs))

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        idle = 0
        for job in jobs:
            if job.steps:
                self._queue.push(job)
            else:
                self._ended.append(job)
                idle += 1
        if idle:
            self._unheralded.set()
        self._ready.notify(len(jobs) - idle)

    def cancel(self, jobs: Sequence[Job]) -> None:
        if os.getpid() != self._pid:
            return
        with self._ready:
            for job in jobs:
                job.cancelled = True
            self._drop_cancelled()

    def promote(self, jobs: Sequence[Job], lane: Lane, deadline_s: float | None) -> None:
        if os.getpid() != self._pid:
            return
        with self._ready:
            self._queue.promote(jobs, lane, deadline_s)
            self._ready.notify(len(jobs))

    def _drop_cancelled(self) -> None:
        given_up = self._queue.take_cancelled()
        for job in given_up:
            job.error = errno.ECANCELED
        self._ended.extend(given_up)
        if given_up:
            # The caller may hold its own locks: it does not hand over itself.
            self._unheralded.set()

    def in_flight(self) -> int:
        with self._ready:
            return sum(self._queue.in_flight)

    def close(self, deadline_s: float) -> bool:
        if os.getpid() != self._pid:
            return True
        until = time.monotonic() + deadline_s
        with self._ready:
            self._stopping = True
            self._queue.cancel_all()
            self._drop_cancelled()
            self._ready.notify_all()
        self._unheralded.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def _herald(self) -> None:
        while True:
            self._unheralded.wait()
            self._unheralded.clear()
            self._hand_over()
            # What is left is handed over by the thread that is at it now: it looks again before it lets go.
            if self._stopping:
                return

    def _work(self) -> None:
        while True:
            with self._ready:
                job = self._queue.pop(time.monotonic())
                while job is None:
                    if self._stopping:
                        return
                    self._ready.wait()
                    job = self._queue.pop(time.monotonic())
            self._run(job)
            with self._ready:
                self._queue.ended(job)
                # The end of one job may let jobs of another lane start, more than this thread takes itself.
                if len(self._queue) > 1:
                    self._ready.notify()
            self._ended.append(job)
            self._hand_over()

    def _hand_over(self) -> None:
        while self._ended and self._handing_over.acquire(blocking=False):
            try:
                batch: list[Job] = []
                while self._ended:
                    batch.append(self._ended.popleft())
                hand_over(batch, self._count_failed_callback)
            finally:
                self._handing_over.release()

    def _count_failed_callback(self) -> None:
        self._callbacks_failed += 1

    def _run(self, job: Job) -> None:
        opened = -1
        for index, step in enumerate(job.steps):
            if job.error and not step.always:
                continue
            fd = step.fd if step.fd >= 0 else opened
            if step.op is Op.CLOSE:
                if fd < 0:
                    continue
                opened = -1 if step.fd < 0 else opened
            try:
                if step.op is Op.OPEN:
                    opened = os.open(step.path, step.flags | os.O_CLOEXEC, 0o644)
                    error = 0
                elif step.op in (Op.READ, Op.WRITE):
                    error = self._transfer(job, step, fd)
                else:
                    error = self._simple(job, step, fd)
            except OSError as exception:
                error = exception.errno or errno.EIO
            if error and error not in step.tolerated and not job.error:
                job.error = error
                job.failed_step = index

    def _transfer(self, job: Job, step: Step, fd: int) -> int:
        assert step.buffer is not None
        call = self._calls.read if step.op is Op.READ else self._calls.write
        total = step.buffer.nbytes
        moved = 0
        retries = 0
        while moved < total:
            try:
                count = call(fd, step.buffer[moved : moved + self._transfer_bytes_max], step.offset + moved)
            except OSError as exception:
                if exception.errno in RETRIED and retries < RETRIES_MAX:
                    retries += 1
                    time.sleep(0.0005 * retries)
                    continue
                if exception.errno == errno.EINVAL and moved and step.op is Op.READ:
                    # A direct read that continues at an odd place past a cut end of file is refused instead of being empty.
                    return END_OF_FILE
                raise
            if count == 0:
                return END_OF_FILE if step.op is Op.READ else errno.ENOSPC
            moved += count
            job.moved_bytes += count
            retries = 0
        return 0

    def _simple(self, job: Job, step: Step, fd: int) -> int:
        if step.op is Op.SYNC_DATA:
            self._calls.sync_data(fd)
        elif step.op is Op.SYNC:
            os.fsync(fd)
        elif step.op is Op.CLOSE:
            os.close(fd)
        elif step.op is Op.LINK:
            os.link(step.path, step.path_to)
        elif step.op is Op.RENAME:
            os.rename(step.path, step.path_to)  # noqa: PTH104 - the names are bytes
        elif step.op is Op.UNLINK:
            os.unlink(step.path)  # noqa: PTH108
        elif step.op is Op.MKDIR:
            os.mkdir(step.path, 0o755)  # noqa: PTH102
        elif step.op is Op.FALLOCATE:
            if step.flags:
                raise OSError(errno.EOPNOTSUPP, "only plain preallocation is a step")
            os.posix_fallocate(fd, step.offset, step.length)
        elif step.op is Op.STAT:
            job.moved_bytes = os.stat(step.path).st_size  # noqa: PTH116
            return 0 if step.length in (-1, job.moved_bytes) else END_OF_FILE
        return 0


def hand_over(batch: Sequence[Job], failed: Callable[[], None]) -> None:
    """Call each job's `finished`, once for every run of jobs that share one; a callback that raises is counted, not fatal."""
    start = 0
    while start < len(batch):
        finished = batch[start].finished
        stop = start + 1
        while stop < len(batch) and batch[stop].finished is finished:
            stop += 1
        assert finished is not None
        try:
            finished(list(batch[start:stop]))
        except Exception:  # noqa: BLE001 - a broken callback must not end the thread that serves all others
            failed()
        start = stop
