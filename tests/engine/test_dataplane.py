"""The data plane on a real segment store and a cache of plain memory: good ends, and every bad one."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.engine import dataplane
from kvtier.engine.copying import MemoryCopyEngine
from kvtier.engine.dataplane import DataPlane, JobResult
from kvtier.engine.layout import GroupLayout, Piece, Ranges, Region
from kvtier.errors import StoreUnavailableError
from kvtier.memory.arena import Arena
from kvtier.record.envelope import Identity, open_slot, seal_slot, slot_bytes
from kvtier.store.moves import (
    NO_SLOT,
    DeleteParts,
    FenceDone,
    HurryReads,
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
from kvtier.testing.media import FaultyPartStore
from kvtier.tier.disk.base import Lane, PartFailure, PartStore
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.segment_store import SegmentStore
from kvtier.tier.disk.shared_layout import SharedLayout
from kvtier.tier.disk.shared_store import SharedStore

LAYERS, PAGE, BLOCKS = 3, 5000, 64
NAMESPACE = b"n" * 16
WAIT_S = 20.0


class BrokenCopier(MemoryCopyEngine):
    """Raises where told to."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.cannot_mark = False

    def mark(self) -> object:
        if self.cannot_mark:
            raise RuntimeError("no event can be made")
        return super().mark()

    def to_arena(self, ranges: Ranges, after: object) -> None:
        if self.broken:
            raise RuntimeError("the copy broke")
        super().to_arena(ranges, after)

    def to_engine(self, ranges: Ranges, after: object) -> None:
        if self.broken:
            raise RuntimeError("the copy broke")
        super().to_engine(ranges, after)


class Rig:
    """One rank: a cache of LAYERS tensors of BLOCKS pages, an arena, a disk, and the plane between them."""

    def __init__(
        self,
        path: Path,
        *,
        slots: int = 16,
        staging: int = 2,
        per_chunk: int = 1,
        deadline_s: float = 15.0,
        rank: int = 0,
        store: Callable[[GroupLayout], PartStore] | None = None,
    ) -> None:
        path.mkdir(exist_ok=True)
        self.cache = np.random.default_rng(1).integers(0, 255, (LAYERS, BLOCKS, PAGE), dtype=np.uint8)
        regions = [Region(self.cache[layer].ctypes.data, PAGE, PAGE) for layer in range(LAYERS)]
        self.layout = GroupLayout(regions, per_chunk)
        self.slot = slot_bytes(self.layout.payload_bytes)
        self.arena = Arena((slots + staging) * self.slot)
        self.disk = FaultyPartStore(
            store(self.layout) if store else SegmentStore(path, namespace=NAMESPACE, capacity_bytes=200 * self.slot)
        )
        self.copier = BrokenCopier()
        self.plane = DataPlane(
            self.arena,
            [self.layout],
            self.copier,
            self.disk,
            namespace=NAMESPACE,
            rank=rank,
            slots_bytes=slots * self.slot,
            load_deadline_s=deadline_s,
        )
        self.results: dict[int, JobResult] = {}
        self.outcomes: list[Outcome] = []
        self.next_job = 0

    def place(self, number: int, slot: int, source: Source = Source.DRAM) -> PartPlace:
        return PartPlace(b"key%d" % number, 0, slot * self.slot if slot >= 0 else NO_SLOT, source)

    def until(self, reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < end_s, "it did not happen"
            results, outcomes = self.plane.poll()
            self.results.update((result.job_id, result) for result in results)
            self.outcomes += outcomes
            time.sleep(0.001)

    def piece(self, count: int, blocks: list[int], first: int = 0) -> list[Piece]:
        return [Piece(0, tuple(range(count)), np.array(blocks, dtype=np.int64), first)]

    def store(self, parts: list[PartPlace], blocks: list[int]) -> JobResult:
        self.next_job += 1
        job = self.next_job
        self.plane.submit_store(job, parts, self.piece(len(parts), blocks))
        self.until(lambda: job in self.results)
        return self.results[job]

    def load(self, parts: list[PartPlace], blocks: list[int], first: int = 0, *, wait: bool = True) -> int:
        self.next_job += 1
        job = self.next_job
        self.plane.submit_load(job, 1000 + job, parts, self.piece(len(parts), blocks, first))
        if wait:
            self.until(lambda: job in self.results)
        return job

    def write(self, parts: list[PartPlace]) -> WriteDone:
        self.next_job += 1
        move = self.next_job
        self.plane.act([WriteParts(move, parts, [16] * len(parts), [0.25] * len(parts))])
        done: list[WriteDone] = []

        def ended() -> bool:
            done.extend(o for o in self.outcomes if isinstance(o, WriteDone) and o.move_id == move)
            return bool(done)

        self.until(ended)
        return done[0]

    def fill(self, count: int) -> None:
        """Parts 0 to count-1 out of blocks 0 to count-1, in slots of the same number and on disk."""
        parts = [self.place(n, n) for n in range(count)]
        assert self.store(parts, list(range(count))).ok
        assert self.write(parts).failed == {}

    def fill_chunks(self, parts: list[PartPlace], blocks: list[int]) -> None:
        assert self.store(parts, blocks).ok
        assert self.write(parts).failed == {}

    def failure(self, job: int) -> LoadFailed:
        assert not self.results[job].ok
        (found,) = [o for o in self.outcomes if isinstance(o, LoadFailed) and o.load_id == 1000 + job]
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "disk")
    yield made
    made.plane.close(WAIT_S)


def test_parts_come_back_from_dram_and_disk_in_one_load(rig: Rig) -> None:
    rig.fill(8)
    parts = [rig.place(n, n) for n in range(4)] + [rig.place(n, n + 4, Source.DISK) for n in range(4, 8)]
    blocks = list(range(40, 48))
    job = rig.load(parts, blocks)
    assert rig.results[job].ok
    assert rig.results[job].copied_bytes == 8 * LAYERS * PAGE
    assert (rig.cache[:, 40:48] == rig.cache[:, 0:8]).all()
    # What was read into slots stays there, sealed, and serves the next load from DRAM.
    again = rig.load([rig.place(n, n + 4) for n in range(4, 8)], [50, 51, 52, 53])
    assert rig.results[again].ok
    assert (rig.cache[:, 50:54] == rig.cache[:, 4:8]).all()


def test_what_a_part_is_worth_goes_to_disk_with_it(rig: Rig) -> None:
    rig.fill(2)
    assert {(entry.depth_tokens, entry.value_s_per_byte) for entry in rig.disk.entries()} == {(16, 0.25)}


def test_reads_without_a_slot_pass_through_little_staging(rig: Rig) -> None:
    rig.fill(9)
    job = rig.load([rig.place(n, -1, Source.DISK) for n in range(9)], list(range(20, 29)))
    assert rig.results[job].ok
    assert (rig.cache[:, 20:29] == rig.cache[:, 0:9]).all()


def test_the_first_chunk_may_be_in_the_engine_in_part(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", per_chunk=4)
    parts = [rig.place(0, 0), rig.place(1, 1)]
    assert rig.store(parts, list(range(8))).ok
    before = rig.cache.copy()
    job = rig.load(parts, [31, 32, 33, 34, 35], first=2)
    assert rig.results[job].ok
    before[:, 31:36] = before[:, 2:7]
    assert (rig.cache == before).all()
    rig.plane.close(WAIT_S)


def test_a_chunk_that_lost_blocks_is_not_stored(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", per_chunk=4)
    result = rig.store([rig.place(0, 0)], [1, 2, 3])
    assert not result.ok
    (failed,) = [o for o in rig.outcomes if isinstance(o, StoreFailed)]
    assert failed.keys == [b"key0"] and "not whole" in failed.reason
    rig.plane.close(WAIT_S)


@pytest.mark.parametrize("slot", [9, -1])
def test_a_flipped_bit_ends_the_load_and_names_its_key(rig: Rig, slot: int) -> None:
    rig.fill(3)
    rig.disk.flip.add(b"key1")
    before = rig.cache[:, 31].copy()
    parts = [rig.place(0, 8, Source.DISK), rig.place(1, slot, Source.DISK), rig.place(2, 10, Source.DISK)]
    job = rig.load(parts, [30, 31, 32])
    assert rig.failure(job).lost == {b"key1": "RecordChecksumError"}
    assert (rig.cache[:, 31] == before).all(), "nothing unverified reaches the engine"


def test_a_bit_flipped_in_dram_is_found_too(rig: Rig) -> None:
    rig.fill(1)
    rig.arena.view(0, rig.slot)[77] ^= 1
    job = rig.load([rig.place(0, 0)], [30])
    assert rig.failure(job).lost == {b"key0": "RecordChecksumError"}


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_dealt_to_several_verifiers_are_all_verified(
    rig: Rig, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane, "_SPLIT_BYTES_MIN", 1)
    monkeypatch.setattr(dataplane, "_VERIFIERS_MAX", threads)
    verified: list[tuple[bytes, str]] = []

    def opened(slot: memoryview, who: Identity, payload_bytes: int) -> object:
        verified.append((who.key, threading.current_thread().name))
        return open_slot(slot, who, payload_bytes)

    monkeypatch.setattr(dataplane, "open_slot", opened)
    rig.fill(8)
    parts, blocks = [rig.place(n, n) for n in range(8)], list(range(40, 48))
    assert rig.results[rig.load(parts, blocks)].ok
    assert sorted(key for key, _ in verified) == [part.key for part in parts], "each once"
    assert len({name.split("_")[0] for _, name in verified}) == min(threads, 2), (
        "by the loader and, where there are some, by helpers"
    )
    assert (rig.cache[:, 40:48] == rig.cache[:, 0:8]).all()

    before = rig.cache.copy()
    for number in (0, 4, 7):
        rig.arena.view(number * rig.slot, rig.slot)[number] ^= 1
    job = rig.load(parts, list(range(50, 58)))
    assert rig.failure(job).lost == dict.fromkeys((b"key0", b"key4", b"key7"), "RecordChecksumError")
    assert (rig.cache == before).all(), "nothing of a batch with a wrong part reaches the engine"


def test_another_keys_valid_record_is_refused(rig: Rig) -> None:
    rig.fill(2)
    job = rig.load([PartPlace(b"key0", 0, 1 * rig.slot)], [30])
    assert rig.failure(job).lost == {b"key0": "RecordKeyError"}


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(PartFailure.MISSING, "missing"), (PartFailure.SHORT, "short"), (PartFailure.IO, "io")],
)
def test_a_read_that_fails_names_its_key_and_reason(rig: Rig, failure: PartFailure, reason: str) -> None:
    rig.fill(3)
    rig.disk.fail[b"key2"] = failure
    job = rig.load([rig.place(n, 8 + n, Source.DISK) for n in range(3)], [30, 31, 32])
    (lost,) = rig.failure(job).lost.values()
    assert lost.startswith(reason)


def test_a_part_of_another_rank_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", rank=1)
    rig.fill(1)
    slot = rig.arena.view(0, rig.slot)
    open_slot(slot, Identity(NAMESPACE, b"key0", 0, 0, 1), rig.layout.payload_bytes)
    seal_slot(slot, Identity(NAMESPACE, b"key0", 0, 0, 0), rig.layout.payload_bytes)
    assert rig.failure(rig.load([rig.place(0, 0)], [30])).lost == {b"key0": "RecordPartError"}
    rig.plane.close(WAIT_S)


def test_a_key_that_is_gone_is_missing(rig: Rig) -> None:
    job = rig.load([rig.place(0, 0, Source.DISK), rig.place(1, 0, Source.MISSING)], [30, 31])
    assert rig.failure(job).lost == {b"key1": "missing"}
    job = rig.load([rig.place(0, 0, Source.DISK)], [30])
    assert rig.failure(job).lost[b"key0"].startswith("missing")


def test_a_copy_that_raises_fails_its_job_and_the_next_one_works(rig: Rig) -> None:
    rig.fill(2)
    rig.copier.broken = True
    job = rig.load([rig.place(0, 0)], [30])
    failure = rig.failure(job)
    assert failure.lost == {} and "the copy broke" in failure.reason
    assert not rig.store([rig.place(7, 7)], [7]).ok
    rig.copier.broken = False
    assert rig.results[rig.load([rig.place(0, 0)], [30])].ok
    assert rig.store([rig.place(7, 7)], [7]).ok


def test_a_disk_that_raises_fails_jobs_not_threads(rig: Rig) -> None:
    rig.fill(1)
    rig.disk.raises = OSError(5, "no disk")
    assert "no disk" in rig.failure(rig.load([rig.place(0, 9, Source.DISK)], [30])).reason
    assert "no disk" in rig.write([rig.place(0, 0)]).failed[b"key0"]
    rig.disk.raises = None
    assert rig.results[rig.load([rig.place(0, 9, Source.DISK)], [30])].ok


def test_a_copy_that_raises_gives_its_staging_back(rig: Rig) -> None:
    rig.fill(3)
    rig.copier.broken = True
    for _ in range(3):
        failure = rig.failure(rig.load([rig.place(n, -1, Source.DISK) for n in range(3)], [30, 31, 32]))
        assert "the copy broke" in failure.reason
    rig.copier.broken = False
    assert rig.results[rig.load([rig.place(n, -1, Source.DISK) for n in range(3)], [30, 31, 32])].ok
    assert (rig.cache[:, 30:33] == rig.cache[:, 0:3]).all()


def test_a_read_refused_in_another_loads_turn_fails_its_own_load(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", staging=1)
    rig.fill(3)
    read, calls = rig.disk.submit_read, []

    def late(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return SimpleNamespace(cancel=lambda: None)

    rig.disk.submit_read = late  # type: ignore[method-assign]
    first = rig.load([rig.place(0, -1, Source.DISK)], [30], wait=False)
    second = rig.load([rig.place(1, 9, Source.DISK), rig.place(2, -1, Source.DISK)], [31, 32], wait=False)
    rig.until(lambda: len(calls) == 2)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "no disk")

    # The end of the first load's read frees the staging that the second one waits for: its read is submitted then.
    rig.disk.submit_read = refuse  # type: ignore[method-assign]
    read(*calls[0][0], **calls[0][1])
    rig.until(lambda: first in rig.results)
    assert rig.results[first].ok
    read(*calls[1][0], **calls[1][1])
    rig.until(lambda: second in rig.results)
    assert "no disk" in rig.failure(second).reason
    rig.disk.submit_read = read  # type: ignore[method-assign]
    assert rig.results[rig.load([rig.place(2, -1, Source.DISK)], [33])].ok, "its staging was lost"
    rig.plane.close(WAIT_S)


def test_an_outcome_does_not_change_after_it_was_handed_out(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", deadline_s=0.05)
    rig.fill(1)
    rig.disk.stall()
    job = rig.load([rig.place(0, 8, Source.DISK)], [30])
    failure = rig.failure(job)
    rig.disk.fail[b"key0"] = PartFailure.IO
    rig.disk.resume()
    rig.until(lambda: LoadReleased(1000 + job) in rig.outcomes)
    assert failure.lost == {}
    rig.plane.close(WAIT_S)


def test_writes_that_fail_say_why(rig: Rig) -> None:
    assert rig.store([rig.place(0, 0)], [0]).ok
    rig.disk.write_failure = PartFailure.NO_SPACE
    assert rig.write([rig.place(0, 0)]).failed == {b"key0": "no_space: injected"}


def test_a_stalled_read_ends_at_the_deadline_and_owns_its_slot_until_it_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", deadline_s=0.05)
    rig.fill(2)
    rig.disk.stall()
    before = rig.cache.copy()
    job = rig.load([rig.place(0, 8, Source.DISK), rig.place(1, -1, Source.DISK)], [30, 31])
    failure = rig.failure(job)
    assert failure.held and "deadline" in failure.reason
    assert not [o for o in rig.outcomes if isinstance(o, LoadReleased)]
    rig.disk.resume()
    rig.until(lambda: LoadReleased(1000 + job) in rig.outcomes)
    assert (rig.cache == before).all(), "a read that came late was copied into blocks given away"
    rig.plane.close(WAIT_S)


def test_wait_gives_up_at_its_deadline_and_then_nothing_is_copied(rig: Rig) -> None:
    rig.fill(1)
    rig.disk.stall()
    job = rig.load([rig.place(0, 8, Source.DISK)], [30], wait=False)
    assert not rig.plane.wait({job}, 0.01)
    before = rig.cache.copy()
    rig.disk.resume()
    rig.until(lambda: job in rig.results)
    assert "given up" in rig.failure(job).reason
    assert (rig.cache == before).all()
    assert rig.plane.wait({job, 999}, 0.0)


@pytest.mark.parametrize("direction", ["to_arena", "to_engine"])
def test_wait_does_not_return_while_a_copy_of_a_job_given_up_is_running(rig: Rig, direction: str) -> None:
    rig.fill(1)
    inside, go = threading.Event(), threading.Event()
    copy = getattr(rig.copier, direction)

    def slow(ranges: Ranges, after: object) -> None:
        inside.set()
        assert go.wait(WAIT_S)
        copy(ranges, after)

    setattr(rig.copier, direction, slow)
    if direction == "to_arena":
        job = 500
        rig.plane.submit_store(job, [rig.place(5, 5)], rig.piece(1, [5]))
    else:
        job = rig.load([rig.place(0, 0)], [30], wait=False)
    assert inside.wait(WAIT_S)
    waiter = threading.Thread(target=rig.plane.wait, args=({job}, 0.0))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive(), "the engine would use blocks again that are being copied"
    go.set()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    rig.until(lambda: job in rig.results)


def test_a_reset_drops_what_is_on_disk_and_answers_behind_earlier_jobs(rig: Rig) -> None:
    rig.fill(2)
    rig.disk.stall()
    job = rig.load([rig.place(0, 8, Source.DISK)], [30], wait=False)
    rig.plane.act([ResetTier(5, 77)])
    rig.until(lambda: rig.disk.generation == 5)
    assert FenceDone(77) not in rig.outcomes
    rig.disk.resume()
    rig.until(lambda: FenceDone(77) in rig.outcomes)
    assert job in rig.results
    assert "missing" in rig.failure(rig.load([rig.place(1, 9, Source.DISK)], [31])).lost[b"key1"]
    # What is stored now carries the new generation, and loads ask for it.
    rig.fill(1)
    assert rig.results[rig.load([rig.place(0, 9, Source.DISK)], [32])].ok


def test_a_fence_is_answered_only_once_the_reset_is_durable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataplane, "_RESET_RETRY_S", 0.001)
    rig.fill(2)
    rig.disk.reset_raises = StoreUnavailableError("no space for the new generation")
    rig.plane.act([ResetTier(5, 77)])
    for _ in range(3):
        assert rig.store([rig.place(5, 5)], [5]).ok
        rig.load([rig.place(5, 5)], [31])
    assert FenceDone(77) not in rig.outcomes and rig.disk.generation == 0
    rig.disk.reset_raises = None
    rig.until(lambda: FenceDone(77) in rig.outcomes)
    assert rig.disk.generation == 5
    assert rig.write([rig.place(5, 5)]).failed == {}


def test_a_plane_whose_reset_never_becomes_durable_can_be_closed(rig: Rig) -> None:
    rig.disk.reset_raises = StoreUnavailableError("no space for the new generation")
    rig.plane.act([ResetTier(5, 77)])
    assert rig.plane.close(WAIT_S)
    assert FenceDone(77) not in rig.plane.poll()[1]


def test_a_job_that_could_not_be_submitted_is_none(rig: Rig) -> None:
    rig.fill(1)
    rig.copier.cannot_mark = True
    with pytest.raises(RuntimeError, match="no event"):
        rig.plane.submit_store(901, [rig.place(3, 3)], rig.piece(1, [3]))
    with pytest.raises(RuntimeError, match="no event"):
        rig.plane.submit_load(902, 1902, [rig.place(0, 0)], rig.piece(1, [3]))
    assert rig.plane.wait({901, 902}, 0.0), "a job that was not taken is waited for"
    rig.copier.cannot_mark = False
    assert rig.store([rig.place(3, 3)], [3]).ok
    rig.plane.close(WAIT_S)
    with pytest.raises(StoreUnavailableError, match="closed"):
        rig.plane.submit_store(903, [rig.place(3, 3)], rig.piece(1, [3]))


def test_of_a_window_that_moved_on_all_but_its_first_part_are_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", per_chunk=3)
    parts = [rig.place(n, n) for n in range(3)]
    rig.plane.submit_store(900, parts, rig.piece(3, list(range(2, 9)), 2))
    rig.until(lambda: 900 in rig.results)
    (failed,) = [o for o in rig.outcomes if isinstance(o, StoreFailed)]
    assert failed.keys == [b"key0"]
    expected = rig.cache[:, 3:9].copy()
    assert rig.results[rig.load(parts[1:], list(range(20, 26)))].ok
    assert (rig.cache[:, 20:26] == expected).all()
    rig.plane.close(WAIT_S)


def test_a_fence_waits_for_reads_of_loads_that_have_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", deadline_s=0.05)
    rig.fill(2)
    rig.disk.stall()
    assert rig.failure(rig.load([rig.place(0, 8, Source.DISK)], [30])).held
    rig.plane.act([ResetTier(1, 77)])
    rig.until(lambda: rig.disk.generation == 1)
    # What follows the fence in each queue has ended, so the fence was seen there.
    for _ in range(3):
        assert rig.store([rig.place(5, 5)], [5]).ok
        rig.load([rig.place(5, 5)], [31])
    assert FenceDone(77) not in rig.outcomes, "the read in flight still writes into its slot"
    rig.disk.resume()
    rig.until(lambda: FenceDone(77) in rig.outcomes)
    rig.plane.close(WAIT_S)


def test_a_part_copied_behind_a_reset_that_was_asked_for_before_it_is_of_the_old_generation(rig: Rig) -> None:
    rig.plane._store_copy.acquire()
    rig.plane.submit_store(500, [rig.place(0, 0)], rig.piece(1, [0]))
    rig.plane.act([ResetTier(1, 77)])
    rig.plane._store_copy.release()
    rig.until(lambda: 500 in rig.results)
    assert rig.failure(rig.load([rig.place(0, 0)], [30])).lost == {b"key0": "RecordGenerationError"}


def test_deleted_parts_are_missing(rig: Rig) -> None:
    rig.fill(2)
    rig.plane.act([DeleteParts([b"key0"])])
    assert rig.write([rig.place(1, 1)]).failed == {}
    assert rig.failure(rig.load([rig.place(0, 9, Source.DISK)], [30])).lost[b"key0"].startswith("missing")


def test_parts_survive_into_the_next_plane_on_one_path(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk")
    rig.fill(3)
    assert rig.plane.close(WAIT_S)
    expected = rig.cache[:, :3].copy()
    rig = Rig(tmp_path / "disk")
    rig.cache[:] = 0
    assert sorted(entry.key for entry in rig.disk.entries()) == [b"key0", b"key1", b"key2"]
    assert rig.results[rig.load([rig.place(n, n, Source.DISK) for n in range(3)], [10, 11, 12])].ok
    assert (rig.cache[:, 10:13] == expected).all()
    rig.plane.close(WAIT_S)


def test_without_a_disk_loads_and_writes_of_it_fail_cleanly(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk")
    rig.plane.close(WAIT_S)
    plane = DataPlane(rig.arena, [rig.layout], rig.copier, None, namespace=NAMESPACE)
    rig.plane = plane
    assert "no disk" in rig.failure(rig.load([rig.place(0, 1, Source.DISK)], [3])).lost[b"key0"]
    assert "no disk" in rig.write([rig.place(0, 0)]).failed[b"key0"]
    assert plane.close(WAIT_S)


# ---- reading ahead


def read_ahead(rig: Rig, parts: list[PartPlace], *, move_id: int = 77, wait: bool = True) -> ReadDone | None:
    rig.plane.act([ReadParts(move_id, parts)])
    if not wait:
        return None
    rig.until(lambda: any(isinstance(o, ReadDone) and o.move_id == move_id for o in rig.outcomes))
    return next(o for o in rig.outcomes if isinstance(o, ReadDone) and o.move_id == move_id)


def test_what_was_read_ahead_lies_in_its_slots_and_is_verified_when_a_load_takes_it(rig: Rig) -> None:
    rig.fill(3)
    assert read_ahead(rig, [rig.place(n, 8 + n, Source.DISK) for n in range(3)]) == ReadDone(77, {})
    assert rig.results[rig.load([rig.place(n, 8 + n) for n in range(3)], [30, 31, 32])].ok
    assert (rig.cache[:, 30:33] == rig.cache[:, :3]).all()
    rig.disk.flip = {b"key1"}
    read_ahead(rig, [rig.place(1, 12, Source.DISK)], move_id=78)
    job = rig.load([rig.place(1, 12)], [40])
    assert rig.failure(job).lost == {b"key1": "RecordChecksumError"}


def test_each_part_that_cannot_be_read_ahead_is_named(rig: Rig) -> None:
    rig.fill(2)
    rig.disk.fail[b"key1"] = PartFailure.IO
    done = read_ahead(rig, [rig.place(0, 8, Source.DISK), rig.place(1, 9, Source.DISK), rig.place(7, 10, Source.DISK)])
    assert done is not None and done.failed.keys() == {b"key1", b"key7"}
    assert done.failed[b"key1"].startswith("io") and done.failed[b"key7"].startswith("missing")
    rig.disk.raises = RuntimeError("refused")
    done = read_ahead(rig, [rig.place(0, 8, Source.DISK)], move_id=78)
    assert done is not None and "refused" in done.failed[b"key0"]
    assert rig.plane._reads_ahead == {}


def test_a_read_ahead_is_behind_demand_until_it_is_in_a_hurry(rig: Rig) -> None:
    rig.fill(1)
    lanes: list[Lane] = []
    submit = rig.disk.submit_read

    def note(parts: Any, done: Any, *, lane: Lane = Lane.DEMAND, deadline_s: float | None = None) -> Any:
        lanes.append(lane)
        transfer = submit(parts, done, lane=lane, deadline_s=deadline_s)
        transfer.promote = lambda lane, deadline_s=None: lanes.append(lane)
        return transfer

    rig.disk.submit_read = note  # type: ignore[method-assign]
    rig.disk.stall()
    read_ahead(rig, [rig.place(0, 8, Source.DISK)], wait=False)
    rig.until(lambda: 77 in rig.plane._reads_ahead)
    rig.plane.act([HurryReads(5), HurryReads(77)])
    rig.until(lambda: len(lanes) == 2)
    assert lanes == [Lane.PRELOAD, Lane.DEMAND]
    rig.disk.resume()
    rig.until(lambda: ReadDone(77, {}) in rig.outcomes)


# ---- py-kvcache's files


@pytest.mark.parametrize("trailer", ["on", "off"])
def test_a_shared_file_is_each_layers_blocks_one_layer_after_the_other(tmp_path: Path, trailer: str) -> None:
    """And plain files with that in them, by whomever written, are restored."""
    layout = SharedLayout(tmp_path / "disk", model="m", block_size=16, blocks_per_file=4, dtype="auto")

    def shared(group: GroupLayout) -> SharedStore:
        return SharedStore(
            layout,
            trailer=trailer,  # type: ignore[arg-type]
            io=make_io("threads"),
            payload_bytes=lambda key: group.payload_bytes,
            identity=lambda key: Identity(NAMESPACE, key),
        )

    rig = Rig(tmp_path / "disk", per_chunk=4, store=shared)
    rig.fill_chunks([rig.place(0, 0)], [3, 9, 4, 7])
    (file,) = (tmp_path / "disk").rglob("*.bin")
    payload = b"".join(bytes(rig.cache[layer, block]) for layer in range(LAYERS) for block in (3, 9, 4, 7))
    assert file.read_bytes()[: len(payload)] == payload
    assert (len(file.read_bytes()) == len(payload)) == (trailer == "off")
    if trailer == "off":
        other = np.random.default_rng(5).integers(0, 255, (LAYERS, 4, PAGE), dtype=np.uint8)
        file.write_bytes(other.tobytes())
        assert rig.results[rig.load([rig.place(0, -1, Source.DISK)], [20, 21, 22, 23])].ok
        assert (rig.cache[:, 20:24] == other).all()
    rig.plane.close(WAIT_S)
