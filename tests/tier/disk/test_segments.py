"""Room in segment files: who has which slot, and what disk that takes."""

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tier.disk import segments as segments_module
from kvtier.tier.disk.io import PAGE_BYTES
from kvtier.tier.disk.segments import Segment, Segments, _runs, find_segments, segment_name, slot_bytes_for

CAPACITY = 96 * PAGE_BYTES
SIZES = (PAGE_BYTES, 3 * PAGE_BYTES, 8 * PAGE_BYTES)


def make(directory: Path, **changes: int) -> Segments:
    values = {
        "capacity_bytes": CAPACITY,
        "free_bytes_min": 0,
        "segment_bytes": 24 * PAGE_BYTES,
        "grow_bytes": 6 * PAGE_BYTES,
        "open_flags": 0,
    }
    return Segments(directory, threading.Lock(), **(values | changes))  # type: ignore[arg-type]


def test_names_and_sizes() -> None:
    assert segment_name(0x1F, 8192) == "seg_0000001f_8192.kv"
    assert [slot_bytes_for(size) for size in (1, 4096, 4097, 12288)] == [4096, 4096, 8192, 12288]
    assert _runs([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 1), (7, 2)]


def test_only_segments_are_found(tmp_path: Path) -> None:
    for name in ("seg_00000002_4096.kv", "seg_00000001_8192.kv", "seg_1_4096.kv", "seg_00000003_4096.kv.new", "lock"):
        (tmp_path / name).touch()
    assert [(number, size) for number, size, _ in find_segments(tmp_path)] == [(1, 8192), (2, 4096)]


def test_the_lowest_slot_is_taken_first_and_files_do_not_outgrow_their_length(tmp_path: Path) -> None:
    segments = make(tmp_path)
    assert segments.take(PAGE_BYTES) is None
    assert segments.grow(PAGE_BYTES, 1) == ""
    taken = []
    while (place := segments.take(PAGE_BYTES)) is not None:
        taken.append(place[1])
    assert taken == list(range(6))
    for _ in range(9):
        assert segments.grow(PAGE_BYTES, 1) == ""
    assert sorted(len(one.ready) + one.taken for one in segments.by_number.values()) == [12, 24, 24]
    segments.close()


def test_free_slots_kept_at_the_start_leave_room_for_what_is_taken_elsewhere(tmp_path: Path) -> None:
    """A process may die with slots of one size still ready and those of another all taken: the capacity is hard then, too."""
    segments = make(tmp_path, capacity_bytes=12 * PAGE_BYTES)
    assert segments.grow(PAGE_BYTES, 6) == "" and segments.grow(2 * PAGE_BYTES, 3) == ""
    numbers = {one.slot_bytes: one.number for one in segments.by_number.values()}
    segments.close()
    segments = make(tmp_path, capacity_bytes=9 * PAGE_BYTES)
    for number, slot_bytes, path in find_segments(tmp_path):
        segments.adopt(number, slot_bytes, path)
    marks = {numbers[PAGE_BYTES]: bytearray([1, 0, 0, 0, 0, 0]), numbers[2 * PAGE_BYTES]: bytearray([1, 1, 1])}
    segments.settle(marks)
    assert segments.disk_bytes <= 9 * PAGE_BYTES
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("seg_*")) <= 9 * PAGE_BYTES
    segments.close()


def test_the_floor_of_free_disk_is_kept_and_given_back_to(tmp_path: Path) -> None:
    segments = make(tmp_path)
    assert segments.grow(PAGE_BYTES, 1) == ""
    segments.free_bytes_min = 1 << 62
    assert "are kept for others" in segments.grow(PAGE_BYTES, 1)
    assert not segments.wants_more(PAGE_BYTES)
    segments.keep_floor()
    assert segments.disk_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_filesystem_is_told_and_the_books_stay_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = make(tmp_path)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "filesystem is full" in segments.grow(PAGE_BYTES, 3)
    assert segments.disk_bytes == 0
    monkeypatch.undo()
    assert segments.grow(PAGE_BYTES, 3) == ""
    assert segments.disk_bytes == 6 * PAGE_BYTES
    segments.close()


@pytest.mark.parametrize("in_a_hole", [False, True])
def test_what_a_failed_growth_allocated_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_hole: bool
) -> None:
    segments = make(tmp_path)
    assert segments.grow(PAGE_BYTES, 6) == ""
    places = [segments.take(PAGE_BYTES) for _ in range(6)]
    if in_a_hole:
        for place in places[1:5]:
            assert place is not None
            segments.give_back(*place)
        segments.trim()
    taken_bytes = segments.disk_bytes
    real = os.posix_fallocate

    def full_on_the_way(fd: int, offset: int, length: int) -> None:
        real(fd, offset, max(PAGE_BYTES, length // 2 // PAGE_BYTES * PAGE_BYTES))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_on_the_way)
    assert "filesystem is full" in segments.grow(PAGE_BYTES, 3)
    monkeypatch.undo()
    assert segments.disk_bytes == taken_bytes
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("seg_*")) <= taken_bytes
    assert segments.grow(PAGE_BYTES, 3) == ""
    segments.close()


def test_a_segment_whose_name_cannot_be_made_safe_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = make(tmp_path)

    def fails(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(segments_module, "sync_directory", fails)
    open_before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            segments.grow(PAGE_BYTES, 1)
    assert os.listdir("/proc/self/fd") == open_before
    assert list(tmp_path.iterdir()) == [] and segments.disk_bytes == 0


def test_without_holes_only_ends_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tier.disk import segments as module

    def refused(fd: int, offset: int, length: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module, "punch_hole", refused)
    segments = make(tmp_path)
    segments.grow(PAGE_BYTES, 6)
    places = [segments.take(PAGE_BYTES) for _ in range(6)]
    for index in (0, 1, 3, 5):
        place = places[index]
        assert place is not None
        segments.give_back(*place)
    assert segments.trim() == PAGE_BYTES
    assert not segments.can_punch
    assert segments.disk_bytes == 5 * PAGE_BYTES
    (segment,) = segments.by_number.values()
    assert (sorted(segment.ready), segment.bare, segment.slots) == ([0, 1, 3], [], 5)
    segments.close()


def check(segments: Segments, held: dict[tuple[int, int], int]) -> None:
    """Every invariant that the module's text gives."""
    assert segments.disk_bytes <= segments.capacity_bytes
    assert segments.disk_bytes == sum(one.disk_bytes for one in segments.by_number.values())
    for one in segments.by_number.values():
        mine = {slot for number, slot in held if number == one.number}
        states = [set(one.ready), set(one.bare), mine]
        assert set().union(*states) == set(range(one.slots))
        assert sum(map(len, states)) == one.slots
        assert len(one.ready) == len(states[0])
        assert one.taken == len(mine)
        status = one.path.stat()
        assert status.st_size == one.slots * one.slot_bytes
        # Extents' own blocks aside, holes take no disk.
        assert status.st_blocks * 512 <= one.disk_bytes + 8 * PAGE_BYTES


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_history_keeps_the_books_right(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    directory = tmp_path_factory.mktemp("segments")
    generator = random.Random(seed)
    segments = make(directory)
    held: dict[tuple[int, int], int] = {}

    def segment_of(place: tuple[int, int]) -> Segment:
        return segments.by_number[place[0]]

    for _ in range(60):
        action = generator.random()
        size = generator.choice(SIZES)
        if action < 0.55:
            place = segments.take(size)
            if place is None:
                why = segments.grow(size, generator.randrange(1, 4))
                room = CAPACITY - sum(held.values())
                assert (why == "") == (room >= size), why
                place = segments.take(size)
            if place is not None:
                assert (place[0].number, place[1]) not in held
                held[place[0].number, place[1]] = size
        elif action < 0.85 and held:
            gone = generator.choice(sorted(held))
            segments.give_back(segment_of(gone), gone[1])
            del held[gone]
        elif action < 0.95:
            segments.trim(generator.choice((0, 4 * PAGE_BYTES)))
        else:
            segments.close()
            segments = make(directory)
            for number, slot_bytes, path in find_segments(directory):
                segments.adopt(number, slot_bytes, path)
            marks = {one.number: bytearray(one.slots) for one in segments.by_number.values()}
            for number, slot in held:
                marks[number][slot] = 1
            segments.settle(marks)
        check(segments, held)
    segments.close()
