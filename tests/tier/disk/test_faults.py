"""The segment store on real files with a disk that fails: what is promised holds, and nothing else breaks."""

import errno
import os
import random
import sqlite3
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.tier.disk.storm import storm

from kvtier.record.envelope import Identity, open_slot, seal_slot
from kvtier.record.errors import RecordChecksumError
from kvtier.testing.disk_faults import Fault, FaultyIO, at_random, of_kind
from kvtier.testing.part_store import WAIT_S, Waiter, pattern, read_part, wait_until, write_parts
from kvtier.tier.disk.base import PartDone, PartFailure, PartRead, PartWrite
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import PAGE_BYTES, Op, aligned_buffer
from kvtier.tier.disk.segment_store import SegmentStore

NAMESPACE = b"faults"


def key_of(number: int) -> bytes:
    return b"%032d" % number


def sealed(number: int, pages: int = 2) -> memoryview:
    slot = pattern(number, pages * PAGE_BYTES)
    seal_slot(slot, Identity(NAMESPACE, key_of(number)), slot.nbytes - 512)
    return slot


class Faulty:
    """A store over a disk that can be told to fail."""

    def __init__(
        self, path: Path, kind: str = "threads", capacity_bytes: int = 64 << 20, durability: str = "flush"
    ) -> None:
        self.io = FaultyIO(make_io(kind))
        self.store = SegmentStore(
            path, namespace=NAMESPACE, capacity_bytes=capacity_bytes, io=self.io, durability=durability
        )  # type: ignore[arg-type]

    def fail(self, op: Op, fault: Fault) -> None:
        self.io.rule = of_kind(op, fault)

    def heal(self) -> None:
        self.io.rule = lambda job: None


@pytest.fixture(params=["threads", "ring"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Faulty:
    return Faulty(tmp_path, request.param)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (errno.ENOSPC, PartFailure.NO_SPACE),
        (errno.EDQUOT, PartFailure.NO_SPACE),
        (errno.EIO, PartFailure.IO),
        (errno.EROFS, PartFailure.IO),
    ],
)
def test_a_write_that_fails_gives_its_room_back(disk: Faulty, error: int, failure: PartFailure) -> None:
    disk.fail(Op.WRITE, Fault(error=error, does_it=True))
    assert set(write_parts(disk.store, {key_of(n): sealed(n) for n in range(5)}).values()) == {failure}
    assert list(disk.store.entries()) == []
    assert disk.store.stats().used_bytes == 0
    disk.heal()
    assert set(write_parts(disk.store, {key_of(n): sealed(n) for n in range(5)}).values()) == {None}
    assert disk.store.close(WAIT_S)


def test_a_read_that_fails_is_told_and_may_be_tried_again(disk: Faulty) -> None:
    write_parts(disk.store, {key_of(1): sealed(1)})
    disk.fail(Op.READ, Fault(error=errno.EIO))
    failure, _ = read_part(disk.store, key_of(1), 2 * PAGE_BYTES)
    assert failure is PartFailure.IO
    disk.heal()
    assert read_part(disk.store, key_of(1), 2 * PAGE_BYTES) == (None, bytes(sealed(1)))
    assert disk.store.close(WAIT_S)


def test_what_could_not_be_synced_is_never_published(disk: Faulty, tmp_path: Path) -> None:
    disk.fail(Op.SYNC_DATA, Fault(error=errno.EIO, does_it=True))
    assert write_parts(disk.store, {key_of(1): sealed(1)}) == {key_of(1): PartFailure.IO}
    assert list(disk.store.entries()) == []
    disk.heal()
    disk.store.close(WAIT_S)
    again = Faulty(tmp_path)
    assert list(again.store.entries()) == []
    again.store.close(WAIT_S)


def test_a_bit_that_turned_is_found_by_the_envelope(disk: Faulty) -> None:
    disk.fail(Op.WRITE, Fault(flips=True))
    assert write_parts(disk.store, {key_of(1): sealed(1)}) == {key_of(1): None}
    disk.heal()
    failure, found = read_part(disk.store, key_of(1), 2 * PAGE_BYTES)
    assert failure is None
    with pytest.raises(RecordChecksumError):
        open_slot(found, Identity(NAMESPACE, key_of(1)), None)
    write_parts(disk.store, {key_of(2): sealed(2)})
    disk.fail(Op.READ, Fault(flips=True))
    _, found = read_part(disk.store, key_of(2), 2 * PAGE_BYTES)
    with pytest.raises(RecordChecksumError):
        open_slot(found, Identity(NAMESPACE, key_of(2)), None)
    disk.store.close(WAIT_S)


def test_a_stalled_read_holds_its_buffer_and_nothing_else(disk: Faulty) -> None:
    write_parts(disk.store, {key_of(n): sealed(n) for n in range(3)})
    disk.fail(Op.READ, Fault(stalls=True))
    buffer = aligned_buffer(2 * PAGE_BYTES)
    waiter = Waiter(1)
    disk.store.submit_read([PartRead(key_of(0), buffer)], waiter)
    wait_until(lambda: disk.io.stalled == 1)
    disk.heal()
    assert read_part(disk.store, key_of(1), 2 * PAGE_BYTES)[0] is None
    # Its slot is not given to another while the read lasts, though it was deleted.
    disk.store.delete([key_of(0)])
    assert write_parts(disk.store, {key_of(9): sealed(9)}) == {key_of(9): None}
    assert waiter.results == []
    assert not disk.store.close(0.05)
    assert waiter.results == []
    disk.io.release()
    assert waiter.wait()[0].failure in (None, PartFailure.CLOSED)


def test_a_stalled_write_counts_against_the_capacity_and_flush_has_an_end(tmp_path: Path) -> None:
    disk = Faulty(tmp_path, capacity_bytes=4 * PAGE_BYTES)
    disk.fail(Op.WRITE, Fault(stalls=True))
    waiter = Waiter(1)
    disk.store.submit_write([PartWrite(key_of(1), sealed(1))], waiter)
    wait_until(lambda: disk.io.stalled == 1)
    disk.heal()
    assert not disk.store.flush(0.05)
    assert write_parts(disk.store, {key_of(2): sealed(2)}) == {key_of(2): None}
    assert write_parts(disk.store, {key_of(3): sealed(3)}) == {key_of(3): PartFailure.NO_SPACE}
    # Deleting it frees its room in the books at once, and the next write waits for the disk to let go.
    disk.store.delete([key_of(1)])
    late = Waiter(1)
    disk.store.submit_write([PartWrite(key_of(3), sealed(3))], late)
    assert not disk.store.flush(0.05)
    assert late.results == []
    disk.io.release()
    assert waiter.failures() == {key_of(1): PartFailure.CANCELLED}
    assert late.failures() == {key_of(3): None}
    assert {entry.key for entry in disk.store.entries()} == {key_of(2), key_of(3)}
    assert disk.store.stats().disk_bytes <= 4 * PAGE_BYTES
    assert disk.store.close(WAIT_S)


def test_a_reset_overtakes_what_is_under_way(disk: Faulty) -> None:
    write_parts(disk.store, {key_of(1): sealed(1)})
    disk.io.rule = lambda job: Fault(stalls=True) if job.steps and job.steps[0].op in (Op.READ, Op.WRITE) else None
    read, write = Waiter(1), Waiter(1)
    disk.store.submit_read([PartRead(key_of(1), aligned_buffer(2 * PAGE_BYTES))], read)
    disk.store.submit_write([PartWrite(key_of(2), sealed(2))], write)
    wait_until(lambda: disk.io.stalled == 2)
    disk.heal()
    disk.store.reset(1)
    disk.io.release()
    assert read.failures() == {key_of(1): PartFailure.MISSING}
    assert write.failures() == {key_of(2): PartFailure.CANCELLED}
    assert list(disk.store.entries()) == []
    assert disk.store.flush(WAIT_S)
    assert disk.store.stats().used_bytes == 0
    assert disk.store.close(WAIT_S)


def test_a_catalog_that_cannot_be_written_fails_writes_and_delays_deletes(
    disk: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(disk.store, {key_of(n): sealed(n) for n in range(4)})
    catalog = disk.store._catalog
    real = catalog.commit
    refusals = 0

    def full(**changes: object) -> None:
        nonlocal refusals
        refusals += 1
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(catalog, "commit", full)
    assert write_parts(disk.store, {key_of(7): sealed(7)}) == {key_of(7): PartFailure.IO}
    disk.store.delete([key_of(0)])
    before = refusals
    wait_until(lambda: refusals > before)
    assert not disk.store.flush(0.01)
    assert any("disk is full" in note for note in disk.store.notes)
    monkeypatch.setattr(catalog, "commit", real)
    assert disk.store.flush(WAIT_S)
    assert write_parts(disk.store, {key_of(7): sealed(7)}) == {key_of(7): None}
    assert disk.store.close(WAIT_S)
    again = Faulty(tmp_path)
    assert {entry.key for entry in again.store.entries()} == {key_of(n) for n in (1, 2, 3, 7)}
    again.store.close(WAIT_S)


@pytest.mark.parametrize("kind", ["threads", "ring"])
def test_under_random_faults_the_books_stay_right(tmp_path: Path, kind: str) -> None:
    capacity = 120 * PAGE_BYTES
    disk = Faulty(tmp_path, kind, capacity)
    faults = [
        Fault(error=errno.EIO),
        Fault(error=errno.ENOSPC, does_it=True),
        Fault(error=errno.EIO, does_it=True),
        Fault(flips=True),
    ]
    disk.io.rule = at_random(7, 0.25, faults)
    generator = random.Random(11)
    ended = 0
    expected = 0
    lock = threading.Lock()

    def done(results: Sequence[PartDone]) -> None:
        nonlocal ended
        with lock:
            ended += len(results)

    for _ in range(150):
        numbers = generator.sample(range(100), 6)
        action = generator.random()
        if action < 0.5:
            disk.store.submit_write([PartWrite(key_of(n), sealed(n, 1 + n % 4)) for n in numbers], done)
            expected += 6
        elif action < 0.8:
            disk.store.submit_read(
                [PartRead(key_of(n), aligned_buffer((1 + n % 4) * PAGE_BYTES)) for n in numbers], done
            )
            expected += 6
        else:
            disk.store.delete([key_of(n) for n in numbers])
        stats = disk.store.stats()
        assert stats.used_bytes <= capacity
        assert stats.disk_bytes <= capacity
        # However busy the machine, so that most reads meet what was written.
        wait_until(lambda: expected - ended < 30)  # noqa: B023 - it ends before the next turn
    wait_until(lambda: ended == expected)
    assert disk.io.injected > 5
    disk.heal()
    assert disk.store.flush(WAIT_S)
    entries = {entry.key: entry.stored_bytes for entry in disk.store.entries()}
    assert disk.store.stats().used_bytes == sum(entries.values())
    assert disk.store.close(WAIT_S)
    assert ended == expected
    again = Faulty(tmp_path, kind, capacity)
    assert {entry.key: entry.stored_bytes for entry in again.store.entries()} == entries
    assert again.store.stats().used_bytes == sum(entries.values())
    again.store.close(WAIT_S)


@pytest.mark.parametrize("victim", ["deleted", "truncated", "replaced"])
def test_files_that_others_touch_cost_only_what_they_held(tmp_path: Path, victim: str) -> None:
    store = SegmentStore(tmp_path, namespace=NAMESPACE, capacity_bytes=1 << 22)
    parts = {key_of(n): sealed(n, 1 + n % 2) for n in range(20)}
    write_parts(store, parts)
    store.close(WAIT_S)
    small = next(store.directory.glob(f"seg_*_{PAGE_BYTES}.kv"))
    if victim == "deleted":
        small.unlink()
    elif victim == "truncated":
        os.truncate(small, 3 * PAGE_BYTES + 17)
    else:
        content = small.read_bytes()
        small.write_bytes(content[PAGE_BYTES : 2 * PAGE_BYTES] + content[PAGE_BYTES:])
    store = SegmentStore(tmp_path, namespace=NAMESPACE, capacity_bytes=1 << 22)
    good = 0
    for key, payload in parts.items():
        failure, found = read_part(store, key, payload.nbytes)
        if failure is None:
            assert found == bytes(payload)
            good += 1
    assert good == {"deleted": 10, "truncated": 13, "replaced": 19}[victim]
    assert set(write_parts(store, parts).values()) == {None}
    store.close(WAIT_S)


class AgainstAModel(RuleBasedStateMachine):
    """Any order of calls, a dictionary beside it."""

    directory: Path
    capacity_bytes = 24 * PAGE_BYTES

    @initialize()
    def start(self) -> None:
        AgainstAModel.directory = AgainstAModel.directory.parent / f"{random.Random().getrandbits(64):x}"
        self.directory.mkdir()
        self.model: dict[int, int] = {}
        self.generation = 0
        self.is_reset = False
        self.open()

    def open(self) -> None:
        self.store = SegmentStore(
            self.directory,
            namespace=NAMESPACE,
            capacity_bytes=self.capacity_bytes,
            io=make_io("threads"),
            durability="none",
        )

    @rule(numbers=st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True))
    def write(self, numbers: list[int]) -> None:
        failures = write_parts(self.store, {key_of(n): sealed(n, 1 + n % 3) for n in numbers})
        used = sum(self.model.values())
        for number in numbers:
            pages = 1 + number % 3
            if number in self.model:
                assert failures[key_of(number)] is None
            elif used + pages > 24:
                assert failures[key_of(number)] is PartFailure.NO_SPACE
            else:
                assert failures[key_of(number)] is None
                self.model[number] = pages
                used += pages

    @rule(numbers=st.lists(st.integers(0, 15), max_size=6))
    def delete(self, numbers: list[int]) -> None:
        self.store.delete([key_of(n) for n in numbers])
        for number in numbers:
            self.model.pop(number, None)

    @rule(number=st.integers(0, 15))
    def read(self, number: int) -> None:
        failure, found = read_part(self.store, key_of(number), (1 + number % 3) * PAGE_BYTES)
        if number in self.model:
            assert failure is None
            assert found == bytes(sealed(number, 1 + number % 3))
        else:
            assert failure is PartFailure.MISSING

    @rule()
    def reset(self) -> None:
        self.generation += 1
        self.store.reset(self.generation)
        self.is_reset = True
        self.model.clear()

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule()
    def reopen(self) -> None:
        assert self.store.close(WAIT_S)
        if self.is_reset:
            # Parts written after a reset may be of weights that no later process has.
            self.is_reset = False
            self.generation += 1
            self.model.clear()
        self.open()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "store"):
            assert {entry.key for entry in self.store.entries()} == {key_of(n) for n in self.model}
            stats = self.store.stats()
            assert stats.used_bytes == sum(self.model.values()) * PAGE_BYTES
            assert stats.disk_bytes <= self.capacity_bytes
            assert self.store.generation == self.generation

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close(WAIT_S)


def run_model(tmp_path: Path, examples: int, steps: int) -> None:
    AgainstAModel.directory = tmp_path / "first"
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AgainstAModel,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_any_order_of_calls_agrees_with_a_model(tmp_path: Path) -> None:
    run_model(tmp_path, 8, 12)


@pytest.mark.slow
def test_any_long_order_of_calls_agrees_with_a_model(tmp_path: Path) -> None:
    run_model(tmp_path, 60, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "durability"), [("threads", "none"), ("ring", "flush"), ("threads", "sync")])
def test_killed_at_any_moment_nothing_acknowledged_is_lost_or_torn(
    tmp_path: Path, engine: str, durability: str
) -> None:
    findings = storm(tmp_path, 5, engine, durability)
    assert findings.kills == 5
    assert findings.acknowledged > 50
    assert findings.lost == []
    assert findings.torn == []


def test_the_storm_can_fail(tmp_path: Path) -> None:
    """What looks for lost and torn parts finds them."""
    from tests.tier.disk import storm as module

    store = module.open_store(tmp_path, "threads", "none")
    write_parts(store, {module.key_of(n): module.sealed(n) for n in (0, 5, 10)})
    store.close(WAIT_S)
    segment = next(store.directory.glob("seg_*"))
    with segment.open("r+b") as file:
        file.seek(100)
        file.write(b"?")
    findings = module.Findings()
    module.look(tmp_path, "threads", "none", findings, {0, 5, 10, 99})
    assert [text.split(": ")[1] for text in findings.lost] == ["part 99"]
    assert len(findings.torn) == 1
    assert sys.executable
