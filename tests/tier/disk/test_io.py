"""The I/O engines, both of them, against one set of expectations; and the order in which lanes are served."""

import errno
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.part_store import WAIT_S, pattern, wait_until
from kvtier.tier.disk import engines
from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import END_OF_FILE, PAGE_BYTES, IOEngine, Job, Op, Step, address_of, aligned_buffer
from kvtier.tier.disk.lanes import LaneQueue
from kvtier.tier.disk.threads import SystemCalls, ThreadIO

KINDS = ("threads", "ring")


def run_jobs(io: IOEngine, jobs: list[Job]) -> list[Job]:
    ended: list[Job] = []
    everything = threading.Event()

    def finished(some: list[Job]) -> None:
        ended.extend(some)
        if len(ended) >= len(jobs):
            everything.set()

    io.submit(jobs, finished)
    assert everything.wait(WAIT_S), f"{len(ended)} of {len(jobs)} jobs ended"
    return ended


def move(
    op: Op,
    fd: int,
    offset: int,
    buffer: memoryview,
    lane: Lane = Lane.DEMAND,
    deadline_s: float | None = None,
    tag: object = None,
) -> Job:
    return Job((Step(op, fd, offset, buffer, address_of(buffer)),), lane, deadline_s, tag)


@pytest.fixture(params=KINDS)
def io(request: pytest.FixtureRequest) -> Iterator[IOEngine]:
    engine = make_io(request.param)
    yield engine
    assert engine.close(WAIT_S)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, 256 * PAGE_BYTES)
    yield fd
    os.close(fd)


def test_what_is_written_is_read(io: IOEngine, fd: int) -> None:
    io.register_file(fd)
    data = [pattern(index, 4 * PAGE_BYTES) for index in range(64)]
    ended = run_jobs(io, [move(Op.WRITE, fd, index * 4 * PAGE_BYTES, buffer) for index, buffer in enumerate(data)])
    assert {(job.error, job.moved_bytes) for job in ended} == {(0, 4 * PAGE_BYTES)}
    found = [aligned_buffer(4 * PAGE_BYTES) for _ in data]
    ended = run_jobs(io, [move(Op.READ, fd, index * 4 * PAGE_BYTES, buffer) for index, buffer in enumerate(found)])
    assert {job.error for job in ended} == {0}
    assert found == data
    io.forget_file(fd)
    assert run_jobs(io, [move(Op.READ, fd, 0, found[0])])[0].error == 0


def test_registered_memory_is_used_and_right(io: IOEngine, fd: int) -> None:
    arena = aligned_buffer(64 * PAGE_BYTES)
    why = io.register_memory(arena)
    assert bool(why) == (io.name == "threads")
    arena[:] = pattern(3, arena.nbytes)
    elsewhere = aligned_buffer(2 * PAGE_BYTES)
    run_jobs(
        io,
        [move(Op.WRITE, fd, at * PAGE_BYTES, arena[at * PAGE_BYTES : (at + 4) * PAGE_BYTES]) for at in range(0, 64, 4)],
    )
    run_jobs(
        io, [move(Op.READ, fd, 8 * PAGE_BYTES, arena[: 2 * PAGE_BYTES]), move(Op.READ, fd, 8 * PAGE_BYTES, elsewhere)]
    )
    assert arena[: 2 * PAGE_BYTES] == elsewhere == pattern(3, arena.nbytes)[8 * PAGE_BYTES : 10 * PAGE_BYTES]


@pytest.mark.parametrize("kind", KINDS)
def test_short_transfers_are_continued(kind: str, fd: int) -> None:
    io = make_io(kind, transfer_bytes_max=PAGE_BYTES)
    data = pattern(5, 37 * PAGE_BYTES)
    assert run_jobs(io, [move(Op.WRITE, fd, 0, data)])[0].moved_bytes == data.nbytes
    found = aligned_buffer(data.nbytes)
    assert run_jobs(io, [move(Op.READ, fd, 0, found)])[0].moved_bytes == data.nbytes
    assert found == data
    assert io.close(WAIT_S)


@pytest.mark.parametrize("left", [0, PAGE_BYTES, PAGE_BYTES + 100])
def test_a_file_that_ends_early_is_said_to(io: IOEngine, fd: int, left: int) -> None:
    os.ftruncate(fd, 3 * PAGE_BYTES + left)
    job = run_jobs(io, [move(Op.READ, fd, 3 * PAGE_BYTES, aligned_buffer(4 * PAGE_BYTES))])[0]
    assert job.error == END_OF_FILE
    assert job.failed_step == 0


def test_errors_stay_with_their_own_job(io: IOEngine, fd: int, tmp_path: Path) -> None:
    read_only = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    jobs = [
        move(Op.WRITE, fd if index % 2 else read_only, index * PAGE_BYTES, pattern(index, PAGE_BYTES), tag=index)
        for index in range(32)
    ]
    jobs.append(Job((Step(Op.OPEN, path=os.fsencode(tmp_path / "nothing"), flags=os.O_RDONLY),), tag="open"))
    jobs.append(Job((Step(Op.SYNC_DATA, 1 << 20),), tag="sync"))
    ended = {job.tag: job.error for job in run_jobs(io, jobs)}
    assert [ended[index] for index in range(32)] == [0 if index % 2 else errno.EBADF for index in range(32)]
    assert ended["open"] == errno.ENOENT
    assert ended["sync"] == errno.EBADF
    os.close(read_only)


def open_below(directory: Path) -> list[str]:
    """Files in `directory` that this process has open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [name for name in names if name.startswith(str(directory))]


def file_life(directory: bytes, name: bytes, data: memoryview) -> Job:
    temporary = directory + b"/tmp." + name
    return Job(
        (
            Step(Op.MKDIR, path=directory, tolerated=(errno.EEXIST,)),
            Step(Op.OPEN, path=temporary, flags=os.O_WRONLY | os.O_CREAT | os.O_DIRECT),
            Step(Op.FALLOCATE, length=data.nbytes),
            Step(Op.WRITE, buffer=data, address=address_of(data)),
            Step(Op.SYNC),
            Step(Op.LINK, path=temporary, path_to=directory + b"/" + name, tolerated=(errno.EEXIST,)),
            Step(Op.UNLINK, path=temporary, always=True),
            Step(Op.CLOSE, always=True),
        ),
        Lane.WRITE,
        tag=name,
    )


def test_the_whole_life_of_files_is_one_job_each(io: IOEngine, tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path / "files")
    data = {b"%d" % index: pattern(index, 2 * PAGE_BYTES) for index in range(40)}
    for _ in range(2):
        assert {
            job.error for job in run_jobs(io, [file_life(directory, name, buffer) for name, buffer in data.items()])
        } == {0}
    assert sorted(os.listdir(directory)) == sorted(data)
    reads = []
    for name in data:
        buffer = aligned_buffer(2 * PAGE_BYTES)
        steps = (
            Step(Op.OPEN, path=directory + b"/" + name, flags=os.O_RDONLY | os.O_DIRECT),
            Step(Op.READ, buffer=buffer, address=address_of(buffer)),
            Step(Op.CLOSE, always=True),
        )
        reads.append(Job(steps, tag=(name, buffer)))
    for job in run_jobs(io, reads):
        name, buffer = job.tag
        assert (job.error, buffer) == (0, data[name])
    sizes = run_jobs(
        io,
        [
            Job((Step(Op.STAT, path=directory + b"/" + name, length=length),), tag=length)
            for name, length in ((b"1", -1), (b"1", 8192), (b"1", 1))
        ],
    )
    assert {job.tag: (job.error, job.moved_bytes) for job in sizes} == {
        -1: (0, 8192),
        8192: (0, 8192),
        1: (END_OF_FILE, 8192),
    }
    assert run_jobs(io, [Job((Step(Op.RENAME, path=directory + b"/1", path_to=directory + b"/one"),))])[0].error == 0
    assert os.path.exists(directory + b"/one")
    assert open_below(tmp_path) == []


def test_after_a_failure_only_what_is_marked_runs(io: IOEngine, tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path / "files")
    job = file_life(directory, b"x", pattern(1, PAGE_BYTES))
    job.steps = tuple(
        Step(Op.READ, buffer=step.buffer, address=step.address) if step.op is Op.WRITE else step for step in job.steps
    )
    run_jobs(io, [job])
    assert (job.error, job.failed_step) == (errno.EBADF, 3)
    assert os.listdir(directory) == []
    assert open_below(tmp_path) == []


def test_more_jobs_than_any_table_holds(io: IOEngine, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path)
    ended = run_jobs(io, [Job((Step(Op.STAT, path=path, length=-1),), tag=index) for index in range(9000)])
    assert sorted(job.tag for job in ended) == list(range(9000))


def test_jobs_without_steps_end_even_if_the_disk_does_not_answer(io: IOEngine) -> None:
    assert [job.error for job in run_jobs(io, [Job(())])] == [0]


class Stuck:
    """An engine whose first job does not end before `release`: a stalled disk."""

    def __init__(self, kind: str, **settings: int) -> None:
        self.ended: list[Job] = []
        if kind == "ring":
            self._out, self._into = os.pipe()
            self.io = make_io("ring", **settings)  # type: ignore[arg-type]
            fd = self._out
        else:
            self._event = threading.Event()
            calls = SystemCalls()
            real = calls.read

            def read(fd: int, buffer: memoryview, offset: int) -> int:
                if fd == -2 & 0xFFFF:
                    self._event.wait()
                    return buffer.nbytes
                return real(fd, buffer, offset)

            calls.read = read  # type: ignore[method-assign]
            self.io = ThreadIO(iodepth=settings.get("iodepth", 16), calls=calls)
            fd = -2 & 0xFFFF
        self.job = move(Op.READ, fd, 0, aligned_buffer(1), tag="stuck")
        self.io.submit([self.job], self.ended.extend)
        wait_until(lambda: self.io.in_flight() == 1)

    def release(self) -> None:
        if self.io.name == "ring":
            os.write(self._into, b"x")
        else:
            self._event.set()


@pytest.fixture(params=KINDS)
def stuck(request: pytest.FixtureRequest) -> Iterator[Callable[..., Stuck]]:
    made: list[Stuck] = []

    def make(**settings: int) -> Stuck:
        made.append(Stuck(request.param, **settings))
        return made[-1]

    yield make
    for one in made:
        one.release()
        one.io.close(WAIT_S)


def test_cancel_gives_up_what_waits_and_leaves_what_flies(stuck: Callable[..., Stuck], fd: int) -> None:
    disk = stuck(iodepth=1)
    ended: list[Job] = []
    jobs = [move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES), tag=index) for index in range(5)]
    disk.io.submit(jobs, ended.extend)
    disk.io.cancel([disk.job, *jobs[1:4]])
    wait_until(lambda: len(ended) == 3)
    assert {(job.tag, job.error) for job in ended} == {(index, errno.ECANCELED) for index in (1, 2, 3)}
    assert disk.ended == []
    # An answer that needs no I/O comes meanwhile.
    assert run_jobs(disk.io, [Job(())])[0].error == 0
    disk.release()
    wait_until(lambda: len(ended) == 5 and len(disk.ended) == 1)
    assert {job.error for job in (ended[3], ended[4], disk.ended[0])} == {0}


def test_close_does_not_wait_for_ever_nor_forget_what_is_under_way(stuck: Callable[..., Stuck], fd: int) -> None:
    disk = stuck(iodepth=1)
    ended: list[Job] = []
    disk.io.submit([move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES))], ended.extend)
    assert not disk.io.close(0.05)
    wait_until(lambda: len(ended) == 1)
    assert ended[0].error == errno.ECANCELED
    assert disk.ended == []
    disk.release()
    wait_until(lambda: len(disk.ended) == 1)
    assert disk.ended[0].error == 0
    refused: list[Job] = []
    disk.io.submit([Job(())], refused.extend)
    assert [job.error for job in refused] == [errno.ECANCELED]


def test_close_ends_while_a_callback_is_at_work(io: IOEngine, fd: int) -> None:
    ended: list[Job] = []
    at_work = threading.Event()

    def slow(jobs: list[Job]) -> None:
        ended.extend(jobs)
        if not at_work.is_set():
            at_work.set()
            time.sleep(0.05)

    buffer = aligned_buffer(PAGE_BYTES)
    io.submit([move(Op.READ, fd, 0, buffer) for _ in range(400)], slow)
    assert at_work.wait(WAIT_S)
    assert io.close(WAIT_S / 3)
    assert len(ended) == 400


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turn", range(4))
def test_what_is_submitted_beside_a_close_ends_once(kind: str, turn: int, fd: int) -> None:
    io = make_io(kind)
    ended: list[Job] = []
    submitted: list[Job] = []
    buffer = aligned_buffer(PAGE_BYTES)

    def submit() -> None:
        while not (ended and ended[-1].error):
            submitted.append(move(Op.READ, fd, 0, buffer))
            io.submit(submitted[-1:], ended.extend)

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: len(submitted) > 10 * turn)
    assert io.close(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    wait_until(lambda: len(ended) == len(submitted))


def test_a_closed_ring_writes_to_no_descriptor_that_it_gave_back(fd: int) -> None:
    ring = make_io("ring")
    wake_fd = ring._wake_fd  # type: ignore[attr-defined]

    def close_meanwhile(jobs: list[Job], finished: object) -> list[Job]:
        assert ring.close(WAIT_S)
        os.dup2(fd, wake_fd)  # somebody else's file has the number now
        return jobs

    ring._unsupported_ops = {int(Op.MKDIR)}  # type: ignore[attr-defined]
    ring._give_to_helper = close_meanwhile  # type: ignore[attr-defined]
    try:
        job = run_jobs(ring, [move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES))])[0]
        assert job.error == errno.ECANCELED
    finally:
        os.close(wake_fd)


def test_lanes_are_served_in_their_order(stuck: Callable[..., Stuck], fd: int) -> None:
    disk = stuck(iodepth=1)
    ended: list[Job] = []
    far, near = time.monotonic() + 2000, time.monotonic() + 1000

    def read(lane: Lane, tag: str, deadline_s: float | None = None) -> Job:
        return move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES), lane, deadline_s, tag)

    jobs = [
        read(Lane.MAINTENANCE, "maintenance"),
        read(Lane.PRELOAD, "preload"),
        read(Lane.DEMAND, "demand without deadline"),
        read(Lane.DEMAND, "demand far", far),
        read(Lane.DEMAND, "demand near", near),
        read(Lane.PRELOAD, "preload overdue", 1.0),
        read(Lane.WRITE, "write"),
    ]
    disk.io.submit(jobs, ended.extend)
    disk.release()
    wait_until(lambda: len(ended) == len(jobs))
    order = [
        "write",
        "preload overdue",
        "demand near",
        "demand far",
        "demand without deadline",
        "preload",
        "maintenance",
    ]
    assert [job.tag for job in ended] == order


def test_a_queued_preload_can_be_promoted(stuck: Callable[..., Stuck], fd: int) -> None:
    disk = stuck(iodepth=1)
    ended: list[Job] = []
    deadline_s = time.monotonic() + 1000
    jobs = [move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES), Lane.PRELOAD, deadline_s, index) for index in range(4)]
    jobs += [move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES), Lane.DEMAND, None, index) for index in (4, 5)]
    disk.io.submit(jobs, ended.extend)
    disk.io.promote([jobs[2], jobs[3]], Lane.DEMAND, 4.0)
    disk.io.promote([jobs[5]], Lane.DEMAND, 5.0)
    disk.io.cancel([jobs[3]])
    disk.io.promote([jobs[3], disk.job], Lane.DEMAND, None)
    wait_until(lambda: len(ended) == 1)
    assert (ended[0].tag, ended[0].error) == (3, errno.ECANCELED)
    disk.release()
    wait_until(lambda: len(ended) == len(jobs))
    assert [job.tag for job in ended[1:]] == [2, 5, 4, 0, 1]


def test_a_callback_that_raises_harms_no_other(io: IOEngine) -> None:
    def broken(jobs: list[Job]) -> None:
        raise RuntimeError("a caller's own fault")

    io.submit([Job(())], broken)
    assert run_jobs(io, [Job(())])[0].error == 0


def test_a_forked_child_is_refused_and_its_parent_unharmed(io: IOEngine, fd: int) -> None:
    child = os.fork()
    if child == 0:
        seen: list[Job] = []
        io.submit([move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES))], seen.extend)
        io.cancel(seen)
        os._exit(0 if [job.error for job in seen] == [errno.ECANCELED] and io.close(1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run_jobs(io, [move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES))])[0].error == 0


def test_files_are_opened_ahead_of_their_turn_and_no_more_than_asked(tmp_path: Path) -> None:
    disk = Stuck("ring", iodepth=1, open_lookahead=3)
    path = tmp_path / "data"
    path.write_bytes(bytes(PAGE_BYTES))
    ended: list[Job] = []
    jobs = []
    for _ in range(10):
        buffer = aligned_buffer(PAGE_BYTES)
        steps = (
            Step(Op.OPEN, path=os.fsencode(path), flags=os.O_RDONLY),
            Step(Op.READ, buffer=buffer, address=address_of(buffer)),
            Step(Op.CLOSE, always=True),
        )
        jobs.append(Job(steps))
    disk.io.submit(jobs, ended.extend)
    wait_until(lambda: len(open_below(tmp_path)) == 3)
    assert disk.io.in_flight() == 1 + 3
    # Those given up are closed, and others are opened in their stead.
    disk.io.cancel(jobs[:2])
    wait_until(lambda: len(ended) == 2 and len(open_below(tmp_path)) == 3)
    disk.release()
    wait_until(lambda: len(ended) == 10)
    assert [job.error for job in ended] == [errno.ECANCELED] * 2 + [0] * 8
    assert open_below(tmp_path) == []
    assert disk.io.close(WAIT_S)


def test_an_idle_ring_sleeps(fd: int) -> None:
    from kvtier.tier.disk.ring import RingIO

    io = make_io("ring")
    assert isinstance(io, RingIO)
    run_jobs(io, [move(Op.READ, fd, 0, aligned_buffer(PAGE_BYTES))])
    wait_until(lambda: io.in_flight() == 0)
    # Whatever the loop still does after its last job, it does within this pause; after it, nothing.
    time.sleep(0.02)
    passes = io.passes
    time.sleep(0.05)
    assert io.passes == passes
    io.close(WAIT_S)


class Interrupted(SystemCalls):
    """Every transfer is refused twice and then does one page."""

    def __init__(self) -> None:
        self.refusals = 0
        self._turn = 0

    def _may(self) -> None:
        self._turn += 1
        if self._turn % 3:
            self.refusals += 1
            raise OSError((errno.EINTR, errno.EAGAIN, errno.EBUSY)[self._turn % 2], "try again")

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._may()
        return super().read(fd, buffer[:PAGE_BYTES], offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._may()
        return super().write(fd, buffer[:PAGE_BYTES], offset)


def test_passing_errors_are_retried(fd: int) -> None:
    calls = Interrupted()
    io = ThreadIO(calls=calls)
    data, found = pattern(1, 4 * PAGE_BYTES), aligned_buffer(4 * PAGE_BYTES)
    assert run_jobs(io, [move(Op.WRITE, fd, 0, data)])[0].error == 0
    assert run_jobs(io, [move(Op.READ, fd, 0, found)])[0].error == 0
    assert found == data
    assert calls.refusals >= 16
    io.close(WAIT_S)


def test_the_ring_judges_completions_as_the_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled judgement, fed with completions that a kernel gives too rarely to wait for."""
    import numpy as np

    from kvtier.tier.disk import ring

    jobs = np.zeros((2, ring.JOB_COLUMNS), np.int64)
    steps = np.zeros((2 * ring.STEPS_MAX, ring.STEP_COLUMNS), np.int64)
    stats = np.zeros((2, 32), np.int64)
    # Compiled without a way in from Python.
    monkeypatch.setattr(ring, "_fail", ring._fail.py_func)
    judge = ring._judge.py_func

    def fresh(op: Op, tolerated: int = 0) -> None:
        jobs[:] = 0
        steps[0, ring.S_OP], steps[0, ring.S_LENGTH], steps[0, ring.S_TOLERATED] = op, 100, tolerated

    for error, verdict in ((errno.EINTR, 1), (errno.EAGAIN, 2), (errno.EBUSY, 2)):
        fresh(Op.READ)
        for _ in range(ring.RETRIES):
            assert judge(jobs, steps, stats, 0, -error) == verdict
        assert judge(jobs, steps, stats, 0, -error) == 0
        assert jobs[0, ring.J_ERROR] == error
    fresh(Op.WRITE)
    assert judge(jobs, steps, stats, 0, 60) == 1
    assert judge(jobs, steps, stats, 0, 40) == 0
    assert (jobs[0, ring.J_ERROR], jobs[0, ring.J_MOVED], jobs[0, ring.J_STEP]) == (0, 100, 1)
    fresh(Op.WRITE)
    assert judge(jobs, steps, stats, 0, 0) == 0
    assert jobs[0, ring.J_ERROR] == errno.ENOSPC
    fresh(Op.LINK, errno.EXDEV << 16 | errno.EEXIST)
    assert judge(jobs, steps, stats, 0, -errno.EEXIST) == 0
    assert jobs[0, ring.J_ERROR] == 0
    fresh(Op.LINK, errno.EEXIST)
    assert judge(jobs, steps, stats, 0, -errno.EPERM) == 0
    assert jobs[0, ring.J_ERROR] == errno.EPERM


def test_the_fall_back_is_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tier.disk import ring

    monkeypatch.setattr(ring.platform, "machine", lambda: "aarch64")
    io = make_io()
    assert io.name == "threads"
    assert "aarch64" in io.chosen_because
    io.close(WAIT_S)
    with pytest.raises(ConfigError, match="ring engine cannot run here"):
        make_io("ring")
    monkeypatch.undo()

    def refused(*arguments: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(ring, "_call", refused)
    io = make_io()
    assert io.name == "threads"
    assert "policy refuses io_uring" in io.chosen_because
    io.close(WAIT_S)


def test_without_numba_threads_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kvtier.tier.disk.ring", None)
    io = engines.make_io()
    assert io.name == "threads"
    assert "pip install" in io.chosen_because
    io.close(WAIT_S)


def test_beside_a_small_arena_the_compiler_is_left_out_unless_asked_for() -> None:
    small, large = engines.COMPILER_ARENA_BYTES_MIN - 1, engines.COMPILER_ARENA_BYTES_MIN
    for kind, arena_bytes, name, words in (
        ("auto", small, "threads", "dram_bytes gives a rank 1,024 MiB"),
        ("auto", 48 << 20, "threads", "48 MiB, .*disk_io=ring"),
        ("auto", large, "ring", "io_uring works here"),
        ("auto", None, "ring", "io_uring works here"),
        ("ring", small, "ring", "asked for"),
        ("threads", large, "threads", "asked for"),
    ):
        io = make_io(kind, arena_bytes=arena_bytes)
        assert io.name == name, (kind, arena_bytes)
        assert re.search(words, io.chosen_because)
        assert io.close(WAIT_S)


def test_a_cold_cache_is_filled_by_a_child(tmp_path: Path) -> None:
    """What compiling leaves in memory does not stay with the engine; and the types that the child compiles for are those that run."""
    code = """
import sys
from kvtier.tier.disk import ring
io = ring.RingIO()
assert len(ring._run.signatures) == 1, ring._run.signatures
assert io.close(10)
print(sum(ring._run.stats.cache_hits.values()), sum(ring._run.stats.cache_misses.values()))
"""
    places = os.pathsep.join(place for place in sys.path if place)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": places}
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
        assert run.stdout.split() == ["1", "0"], run.stderr


def test_operations_on_names_go_to_threads_where_the_kernel_lacks_them(tmp_path: Path) -> None:
    from kvtier.tier.disk.ring import RingIO

    io = make_io("ring")
    assert isinstance(io, RingIO)
    io._unsupported_ops = {int(Op.LINK), int(Op.UNLINK), int(Op.MKDIR), int(Op.RENAME)}
    directory = os.fsencode(tmp_path / "files")
    assert run_jobs(io, [file_life(directory, b"a", pattern(1, PAGE_BYTES)), Job(())])[0].error == 0
    assert os.listdir(directory) == [b"a"]
    assert io.close(WAIT_S)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"iodepth": 0}, "iodepth is 0"),
        ({"write_share": 1.5}, "write_share 1.5"),
        ({"open_lookahead": 0}, "open_lookahead 0"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_io("ring", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="I/O engine is 'fast'"):
        make_io("fast")


# -- lanes


def lane_job(lane: Lane, tag: int = 0, deadline_s: float | None = None) -> Job:
    return Job((Step(Op.SYNC),), lane, deadline_s, tag)


def started(queue: LaneQueue, now_s: float = 0.0) -> list[Job]:
    jobs = []
    while (job := queue.pop(now_s)) is not None:
        jobs.append(job)
    return jobs


@pytest.mark.parametrize("iodepth", [1, 2, 16])
def test_demand_and_writes_share_what_is_started(iodepth: int) -> None:
    queue = LaneQueue(iodepth, 0.125)
    lanes = []
    for _ in range(40 * 8 // iodepth):
        for _ in range(iodepth):
            queue.push(lane_job(Lane.DEMAND))
            queue.push(lane_job(Lane.WRITE))
        flight = started(queue)
        assert len(flight) == iodepth
        lanes += [job.lane for job in flight]
        for job in flight:
            queue.ended(job)
    assert abs(lanes.count(Lane.WRITE) - 40) <= 2


def test_writes_start_beside_demand_that_leaves_room() -> None:
    queue = LaneQueue(16, 0.125)
    queue.write_credit = 0.0
    queue.push(lane_job(Lane.DEMAND))
    for index in range(8):
        queue.push(lane_job(Lane.WRITE, index))
    assert [job.lane for job in started(queue)] == [Lane.DEMAND, Lane.WRITE, Lane.WRITE]


def test_writes_are_never_starved_however_long_demand_lasts() -> None:
    queue = LaneQueue(8, 0.125)
    written = 0
    for index in range(100):
        queue.push(lane_job(Lane.WRITE, index))
    for _ in range(120):
        while len(queue) < 150:
            queue.push(lane_job(Lane.DEMAND))
        for job in started(queue):
            written += job.lane is Lane.WRITE
            queue.ended(job)
    assert written == 100


def test_alone_writes_leave_a_quarter_for_the_next_demand_read() -> None:
    queue = LaneQueue(16, 0.125)
    for index in range(40):
        queue.push(lane_job(Lane.WRITE, index))
    assert len(started(queue)) == 12
    queue.push(lane_job(Lane.DEMAND))
    assert [job.lane for job in started(queue)] == [Lane.DEMAND]


def test_preloads_take_only_what_demand_leaves() -> None:
    queue = LaneQueue(16, 0.125)
    for index in range(20):
        queue.push(lane_job(Lane.PRELOAD, index))
    queue.push(lane_job(Lane.DEMAND))
    assert [job.lane for job in started(queue)] == [Lane.DEMAND, *[Lane.PRELOAD] * 11]


def test_an_overdue_preload_goes_before_demand() -> None:
    queue = LaneQueue(1, 0.125)
    queue.push(lane_job(Lane.DEMAND))
    queue.push(lane_job(Lane.PRELOAD, 1, 5.0))
    queue.push(lane_job(Lane.PRELOAD, 2, 50.0))
    order = []
    for _ in range(3):
        job = queue.pop(10.0)
        assert job is not None
        order.append((job.lane, job.tag))
        queue.ended(job)
    assert order == [(Lane.PRELOAD, 1), (Lane.DEMAND, 0), (Lane.PRELOAD, 2)]


def test_maintenance_waits_for_everything_else() -> None:
    queue = LaneQueue(16, 0.125)
    for index in range(10):
        queue.push(lane_job(Lane.MAINTENANCE, index))
    assert len(started(queue)) == 4
    queue.push(lane_job(Lane.WRITE))
    assert [job.lane for job in started(queue)] == [Lane.WRITE]


def test_deadlines_order_a_lane_and_ties_keep_their_order() -> None:
    queue = LaneQueue(16, 0.125)
    for tag, deadline_s in enumerate((None, 7.0, 3.0, 7.0, None, 1.0)):
        queue.push(lane_job(Lane.DEMAND, tag, deadline_s))
    assert [job.tag for job in started(queue)] == [5, 2, 1, 3, 0, 4]


def test_the_compiled_choice_is_the_same_as_the_plain_one() -> None:
    """The rules are written twice, once for threads and once for the ring: they must agree on every state."""
    import random

    import numpy as np

    from kvtier.tier.disk import ring

    generator = random.Random(4)
    lanes = [Lane.DEMAND, Lane.PRELOAD, Lane.WRITE, Lane.MAINTENANCE]
    for _ in range(1500):
        iodepth = generator.choice((1, 2, 4, 8, 16))
        queue = LaneQueue(iodepth, 0.125)
        own = np.zeros(ring.VARIABLES, np.int64)
        own[ring.V_IODEPTH], own[ring.V_WRITE_MIN], own[ring.V_RESERVE] = iodepth, queue.write_jobs_min, queue.reserve
        jobs = np.zeros((16, ring.JOB_COLUMNS), np.int64)
        lists = np.zeros((3, ring.LISTS), np.int64)
        lists[:2] = -1
        flying = np.array([generator.randrange(3) for _ in range(4)])
        queue.in_flight = flying.tolist()
        queue.write_credit = generator.choice((0.0, 0.5, 1.0, 1.5))
        own[ring.V_WRITE_CREDIT] = int(queue.write_credit * ring.CREDIT_UNIT)
        for slot in range(generator.randrange(8)):
            lane = generator.randrange(4)
            deadline = generator.choice((None, 1, 5, 9))
            queue.push(lane_job(lanes[lane], slot, deadline))
            jobs[slot, ring.J_LANE] = lane
            jobs[slot, ring.J_DEADLINE] = ring.NO_DEADLINE if deadline is None else deadline
            ring._append.py_func(jobs, lists[0], lists[1], lists[2], lane * 2 + (deadline is not None), slot)
        now = generator.choice((0, 5, 10))
        expected = queue.pop(now)
        lane = ring._choose.py_func(jobs, lists[0], lists[2], flying, own, now)
        if expected is None:
            assert lane == -1
        else:
            assert lane == lanes.index(expected.lane)
            assert ring._take.py_func(jobs, lists[0], lists[1], lists[2], lane * 2) == expected.tag
