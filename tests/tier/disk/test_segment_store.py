"""The segment store on real files."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.policy.registry import make_policy
from kvtier.record.envelope import Identity, open_slot, seal_slot
from kvtier.testing.disk_faults import Fault, FaultyIO, of_kind
from kvtier.testing.part_store import WAIT_S, PartStoreSuite, Waiter, pattern, read_part, wait_until, write_parts
from kvtier.tier.disk import rebuild, segment_store
from kvtier.tier.disk.base import PartFailure, PartRead, PartStore, PartWrite
from kvtier.tier.disk.catalog import Catalog, CatalogRow
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import PAGE_BYTES, Finished, Job, Op, aligned_buffer
from kvtier.tier.disk.segment_store import SegmentStore

NAMESPACE = bytes(range(16))


def open_store(path: Path, capacity_bytes: int = 64 << 20, **changes: object) -> SegmentStore:
    return SegmentStore(path, namespace=NAMESPACE, capacity_bytes=capacity_bytes, **changes)  # type: ignore[arg-type]


def keys(count: int, first: int = 0) -> list[bytes]:
    return [b"%032d" % index for index in range(first, first + count)]


class TestOnThreads(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_store(path, capacity_bytes, io=make_io("threads"))


class TestOnRing(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_store(path, capacity_bytes, io=make_io("ring"))


class TestSynced(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_store(path, capacity_bytes, durability="sync")


class TestBuffered(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_store(path, capacity_bytes, direct=False, durability="none")


def test_the_capacity_holds_exactly_what_fits_and_not_one_more(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10 * PAGE_BYTES)
    parts = {key: pattern(1, PAGE_BYTES) for key in keys(11)}
    failures = write_parts(store, parts)
    assert list(failures.values()).count(None) == 10
    assert list(failures.values()).count(PartFailure.NO_SPACE) == 1
    stats = store.stats()
    assert stats.used_bytes == stats.disk_bytes == 10 * PAGE_BYTES
    store.close(WAIT_S)


def test_a_delete_makes_room_for_the_next_write_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, 4 * PAGE_BYTES)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(4)})
    for turn in range(20):
        old, new = keys(4, 4 * turn), keys(4, 4 * turn + 4)
        waiter = Waiter(4)
        store.delete(old)
        store.submit_write([PartWrite(key, pattern(turn, PAGE_BYTES)) for key in new], waiter)
        assert set(waiter.failures().values()) == {None}
        assert store.stats().disk_bytes <= 4 * PAGE_BYTES
    assert {entry.key for entry in store.entries()} == set(keys(4, 80))
    store.close(WAIT_S)


def test_one_size_does_not_starve_another(tmp_path: Path) -> None:
    store = open_store(tmp_path, 64 * PAGE_BYTES)
    small = {key: pattern(1, PAGE_BYTES) for key in keys(64)}
    assert set(write_parts(store, small).values()) == {None}
    store.delete(keys(64)[::2])
    large = {key: pattern(2, 4 * PAGE_BYTES) for key in keys(8, 1000)}
    assert set(write_parts(store, large).values()) == {None}
    stats = store.stats()
    assert stats.used_bytes == 64 * PAGE_BYTES
    assert stats.disk_bytes <= 64 * PAGE_BYTES
    on_disk = sum(path.stat().st_blocks * 512 for path in store.directory.glob("seg_*"))
    assert on_disk <= 64 * PAGE_BYTES + 16 * PAGE_BYTES  # extent tree blocks of the filesystem itself
    for key in keys(64)[1::2]:
        assert read_part(store, key, PAGE_BYTES) == (None, bytes(small[key]))
    for key, payload in large.items():
        assert read_part(store, key, 4 * PAGE_BYTES) == (None, bytes(payload))
    assert store.close(WAIT_S)
    store = open_store(tmp_path, 64 * PAGE_BYTES)
    assert len(store) == 40
    assert store.stats().disk_bytes <= 64 * PAGE_BYTES
    for key in keys(64)[1::2]:
        assert read_part(store, key, PAGE_BYTES) == (None, bytes(small[key]))
    store.close(WAIT_S)


def test_the_floor_of_free_disk_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path, 64 << 20, free_bytes_min=1 << 60)
    failures = write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(2)})
    assert set(failures.values()) == {PartFailure.NO_SPACE}
    assert store.stats().used_bytes == 0
    store.close(WAIT_S)


def test_the_floor_is_given_back_to_even_where_the_catalog_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_store, "_TOUCH_PERIOD_S", 0.01)
    store = open_store(tmp_path, 64 * PAGE_BYTES, free_bytes_min=1 << 20)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(8)})
    store.delete(keys(6))
    assert store.flush(WAIT_S)

    def full(*arguments: object, **named: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Catalog, "commit", full)
    monkeypatch.setattr(Catalog, "save_state", full)
    read_part(store, keys(1, 7)[0], PAGE_BYTES)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real[:4], 0, *real[5:])))
    wait_until(lambda: store.stats().disk_bytes == 2 * PAGE_BYTES)
    monkeypatch.undo()
    assert store.close(WAIT_S)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (errno.ENOSPC, PartFailure.NO_SPACE),
        (errno.EDQUOT, PartFailure.NO_SPACE),
        (errno.EROFS, PartFailure.IO),
        (errno.EIO, PartFailure.IO),
    ],
)
@pytest.mark.parametrize("call", ["open", "posix_fallocate", "statvfs"])
def test_only_what_lacks_room_is_called_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, failure: PartFailure
) -> None:
    store = open_store(tmp_path)
    real_open = os.open

    def fails(path: object, *arguments: int) -> int:
        if call == "open" and not str(path).endswith(".kv"):
            return real_open(path, *arguments)  # type: ignore[arg-type]
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        assert write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)}) == {keys(1)[0]: failure}
    assert write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)}) == {keys(1)[0]: None}
    assert store.close(WAIT_S)


def test_a_smaller_capacity_drops_the_longest_unused(tmp_path: Path) -> None:
    store = open_store(tmp_path, 8 * PAGE_BYTES)
    for key in keys(8):
        write_parts(store, {key: pattern(1, PAGE_BYTES)})
    read_part(store, keys(8)[0], PAGE_BYTES)
    store.close(WAIT_S)
    store = open_store(tmp_path, 4 * PAGE_BYTES)
    assert {entry.key for entry in store.entries()} == {keys(8)[0], *keys(8)[5:]}
    assert store.stats().disk_bytes <= 4 * PAGE_BYTES
    assert any("shrank" in note for note in store.notes)
    store.close(WAIT_S)


def test_entries_come_longest_unused_first_over_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for key in keys(5):
        write_parts(store, {key: pattern(1, PAGE_BYTES)})
    read_part(store, keys(5)[1], PAGE_BYTES)
    order = [keys(5)[index] for index in (0, 2, 3, 4, 1)]
    assert [entry.key for entry in store.entries()] == order
    store.close(WAIT_S)
    store = open_store(tmp_path)
    assert [entry.key for entry in store.entries()] == order
    store.close(WAIT_S)


def test_values_and_depths_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    waiter = Waiter(1)
    store.submit_write([PartWrite(keys(1)[0], pattern(1, PAGE_BYTES), value_s_per_byte=0.5, depth_tokens=512)], waiter)
    waiter.wait()
    store.close(WAIT_S)
    store = open_store(tmp_path)
    (entry,) = store.entries()
    assert (entry.value_s_per_byte, entry.depth_tokens) == (0.5, 512)
    store.close(WAIT_S)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_value_that_is_no_number_harms_nobody(tmp_path: Path, value: float) -> None:
    store = open_store(tmp_path, bytes_a_day=1 << 40)
    waiter = Waiter(1)
    store.submit_write([PartWrite(keys(1)[0], pattern(1, PAGE_BYTES), value_s_per_byte=value)], waiter)
    assert waiter.failures() == {keys(1)[0]: None}
    store.close(WAIT_S)


def test_another_length_under_a_key_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    key = keys(1)[0]
    write_parts(store, {key: pattern(1, PAGE_BYTES)})
    assert write_parts(store, {key: pattern(1, 2 * PAGE_BYTES)}) == {key: PartFailure.EXISTS_DIFFERENT}
    store.close(WAIT_S)


def test_a_replaced_slot_is_found_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = keys(2)
    write_parts(store, {first: pattern(1, PAGE_BYTES), second: pattern(2, PAGE_BYTES)})
    (path,) = store.directory.glob("seg_*")
    with path.open("r+b") as file:
        page = file.read(PAGE_BYTES)
        file.seek(PAGE_BYTES)
        file.write(page)
        file.flush()
        os.fsync(file.fileno())
    results = {read_part(store, first, PAGE_BYTES)[0], read_part(store, second, PAGE_BYTES)[0]}
    assert results == {None, PartFailure.CORRUPT}
    wait_until(lambda: len(store) == 1)
    store.close(WAIT_S)


def test_a_segment_cut_short_loses_only_what_it_held(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for key in keys(4):
        write_parts(store, {key: pattern(1, PAGE_BYTES)})
    (path,) = store.directory.glob("seg_*")
    os.truncate(path, 2 * PAGE_BYTES)
    assert [read_part(store, key, PAGE_BYTES)[0] for key in keys(4)] == [
        None,
        None,
        PartFailure.SHORT,
        PartFailure.SHORT,
    ]
    store.close(WAIT_S)
    store = open_store(tmp_path)
    assert {entry.key for entry in store.entries()} == set(keys(2))
    store.close(WAIT_S)


def test_a_removed_segment_file_is_forgotten_at_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(3)})
    write_parts(store, {key: pattern(1, 2 * PAGE_BYTES) for key in keys(3, 10)})
    store.close(WAIT_S)
    next(store.directory.glob(f"seg_*_{2 * PAGE_BYTES}.kv")).unlink()
    store = open_store(tmp_path)
    assert {entry.key for entry in store.entries()} == set(keys(3))
    assert any("missing" in note for note in store.notes)
    store.close(WAIT_S)


def test_a_second_owner_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreUnavailableError, match=rf"in use by process {os.getpid()}.*read_only"):
        open_store(tmp_path)
    store.close(WAIT_S)
    open_store(tmp_path).close(WAIT_S)


def test_ranks_and_namespaces_do_not_meet(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, rank=0), open_store(tmp_path, rank=1)]
    stores.append(SegmentStore(tmp_path, namespace=b"another", capacity_bytes=1 << 20))
    write_parts(stores[0], {keys(1)[0]: pattern(1, PAGE_BYTES)})
    assert [len(store) for store in stores] == [1, 0, 0]
    for store in stores:
        store.close(WAIT_S)


def test_bad_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        open_store(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailableError, match="not a directory"):
        open_store(tmp_path / "file")


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="durability is 'maybe'"):
        open_store(tmp_path, durability="maybe")
    with pytest.raises(ConfigError, match="capacity_bytes is 1"):
        open_store(tmp_path, 1)
    with pytest.raises(ConfigError, match="rank is -1"):
        open_store(tmp_path, rank=-1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"generation": 1e400}',
        "GENERATION -1",
        "GENERATION 1e400",
        "GENERATION 1" + "0" * 30,
    ],
)
def test_a_format_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    store = open_store(tmp_path)
    store.close(WAIT_S)
    path = store.directory / "format.json"
    if text.startswith("GENERATION"):
        text = path.read_text().replace('"generation": 0', f'"generation": {text.split()[1]}')
    path.write_text(text)
    with pytest.raises(StoreUnavailableError, match=r"format\.json cannot be understood"):
        open_store(tmp_path)


def test_what_only_has_the_name_of_a_segment_is_passed_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(3)})
    store.close(WAIT_S)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    (store.directory / "seg_00000005_4096.kv").mkdir()
    (store.directory / "seg_00000006_4096.kv").symlink_to(tmp_path / "nowhere")
    (store.directory / "seg_00000007_4096.kv").symlink_to(elsewhere)
    (store.directory / "seg_00000008_0.kv").touch()
    (store.directory / "seg_00000009_5000.kv").write_bytes(bytes(20_000))
    store = open_store(tmp_path)
    assert len(store) == 3
    assert set(write_parts(store, {key: pattern(1, 2 * PAGE_BYTES) for key in keys(3, 9)}).values()) == {None}
    assert elsewhere.read_bytes() == b"not ours"
    assert store.close(WAIT_S)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_what_the_system_refuses_at_the_start_is_told_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    store = open_store(tmp_path)
    write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    store.close(WAIT_S)
    real = os.open

    def refused(path: object, *arguments: int) -> int:
        if str(path).endswith(".kv"):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(StoreUnavailableError, match="cannot be used"):
            open_store(tmp_path)
    store = open_store(tmp_path)
    assert len(store) == 1
    assert store.close(WAIT_S)


def test_where_the_filesystem_cannot_allocate_direct_io_works_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ext3: the C library then writes a byte of each block, and direct I/O refuses single bytes."""
    real = os.posix_fallocate

    def emulated(fd: int, offset: int, length: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", emulated)
    store = open_store(tmp_path)
    parts = {key: pattern(int(key), PAGE_BYTES) for key in keys(9)}
    assert set(write_parts(store, parts).values()) == {None}
    for key, part in parts.items():
        assert read_part(store, key, PAGE_BYTES) == (None, bytes(part))
    assert store.close(WAIT_S)


def test_a_child_forked_while_the_store_is_at_work_waits_for_nobody(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with store._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(int(WAIT_S))
            store.stats()
            store.endurance()
            list(store.entries())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert store.close(WAIT_S)


def test_another_owner_of_the_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path).close(WAIT_S)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreUnavailableError, match="belongs to user"):
        open_store(tmp_path)


def test_another_version_is_refused_not_ignored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    store.close(WAIT_S)
    path = store.directory / "format.json"
    text = path.read_text()
    path.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(StoreUnavailableError, match="version 2"):
        open_store(tmp_path)
    path.write_text("{")
    with pytest.raises(StoreUnavailableError, match="cannot be understood"):
        open_store(tmp_path)
    path.unlink()
    with pytest.raises(StoreUnavailableError, match="generation is unknown"):
        open_store(tmp_path)
    path.write_text(text)
    store = open_store(tmp_path)
    assert len(store) == 1
    store.close(WAIT_S)


def test_generations_only_grow(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.reset(5)
    store.reset(5)
    with pytest.raises(ValueError, match="generation 4 is older than 5"):
        store.reset(4)
    store.close(WAIT_S)


def test_a_reset_that_only_reached_the_format_file_still_drops_the_rows(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    store.close(WAIT_S)
    path = store.directory / "format.json"
    path.write_text(path.read_text().replace('"generation": 0', '"generation": 9'))
    store = open_store(tmp_path)
    assert (store.generation, len(store)) == (9, 0)
    store.close(WAIT_S)


@pytest.mark.parametrize("step", ["format file", "catalog"])
def test_a_reset_that_cannot_be_made_durable_says_so_and_is_tried_until_it_is(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "live").mkdir()
    store = open_store(tmp_path / "live")
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(3)})

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    place, name = (segment_store, "_write_format") if step == "format file" else (Catalog, "reset")
    with monkeypatch.context() as broken:
        broken.setattr(place, name, fail)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="in force but not durable.*No space left"):
                store.reset(1)
        assert (store.generation, len(store)) == (1, 0)
        waiter = Waiter(1)
        store.submit_write([PartWrite(keys(1)[0], pattern(2, PAGE_BYTES))], waiter)
        assert not store.flush(0.2), "a part of the new generation was published in a catalog of the old one"
    assert set(waiter.failures().values()) == {None}
    store.reset(1)
    assert read_part(store, keys(1)[0], PAGE_BYTES) == (None, bytes(pattern(2, PAGE_BYTES)))
    # As a kill at this moment would leave it.
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    killed = open_store(tmp_path / "killed")
    assert (killed.generation, len(killed)) == (2, 0)
    killed.close(WAIT_S)
    assert store.close(WAIT_S)


def test_a_store_whose_reset_never_becomes_durable_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(3)})

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_store, "_write_format", fail)
    with pytest.raises(StoreUnavailableError):
        store.reset(1)
    waiter = Waiter(1)
    store.submit_write([PartWrite(keys(1)[0], pattern(2, PAGE_BYTES))], waiter)
    assert not store.close(0.2)
    assert set(waiter.failures().values()) <= {PartFailure.IO, PartFailure.CLOSED}
    monkeypatch.undo()
    open_store(tmp_path).close(WAIT_S)


def test_a_write_that_a_reset_overtakes_is_not_of_the_new_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    hash_of = segment_store._head_hash

    def after_a_reset(buffer: memoryview) -> int:
        store.reset(1)
        return hash_of(buffer)

    monkeypatch.setattr(segment_store, "_head_hash", after_a_reset)
    assert write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)}) == {keys(1)[0]: PartFailure.CANCELLED}
    assert list(store.entries()) == []
    assert store.close(WAIT_S)


@pytest.mark.parametrize("moment", ["_head_hash", "_write_job", "_writable_address", "_read_job"])
def test_what_a_close_overtakes_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    store = open_store(tmp_path)
    write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    place = store if hasattr(store, moment) else segment_store
    before = getattr(place, moment)

    def after_a_close(*arguments: object) -> object:
        store.close(0.0)
        return before(*arguments)

    monkeypatch.setattr(place, moment, after_a_close)
    waiter = Waiter(3)
    buffers = {key: pattern(2, PAGE_BYTES) for key in keys(3)}
    if moment in ("_head_hash", "_write_job"):
        store.submit_write([PartWrite(key, buffer) for key, buffer in buffers.items()], waiter)
    else:
        store.submit_read([PartRead(key, buffer) for key, buffer in buffers.items()], waiter)
    assert PartFailure.CLOSED in waiter.failures().values()


def test_of_several_that_close_at_once_one_gives_the_files_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(3)})
    let_go, times = store._let_go, []

    def slow() -> None:
        times.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.05)
        let_go()

    monkeypatch.setattr(store, "_let_go", slow)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(store.close(WAIT_S))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [True] * 6
    assert len(times) == 1
    open_store(tmp_path).close(WAIT_S)


def test_a_write_that_ends_after_close_is_answered(tmp_path: Path) -> None:
    io = FaultyIO(make_io("threads"), of_kind(Op.WRITE, Fault(stalls=True)))
    store = open_store(tmp_path, io=io)
    waiter = Waiter(1)
    store.submit_write([PartWrite(keys(1)[0], pattern(1, PAGE_BYTES))], waiter)
    wait_until(lambda: io.stalled == 1)
    assert not store.close(0.0)
    assert waiter.results == []
    io.release()
    assert waiter.failures() == {keys(1)[0]: PartFailure.CLOSED}


def test_a_store_whose_catalog_cannot_be_written_can_be_closed_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, 4 * PAGE_BYTES)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(4)})

    def full(*arguments: object, **named: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Catalog, "commit", full)
    store.delete(keys(2))
    waiter = Waiter(2)
    store.submit_write([PartWrite(key, pattern(2, PAGE_BYTES)) for key in keys(2, 10)], waiter)
    assert not store.close(0.2), "removals were not committed"
    assert set(waiter.failures().values()) <= {PartFailure.IO, PartFailure.CLOSED}
    monkeypatch.undo()
    store = open_store(tmp_path, 4 * PAGE_BYTES)
    assert {entry.key for entry in store.entries()} == set(keys(4))
    assert store.close(WAIT_S)


def test_a_submit_that_raises_has_taken_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, 16 * PAGE_BYTES)
    write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    before = store.stats()
    holes = memoryview(bytearray(2 * PAGE_BYTES))[::2]
    said: list[object] = []
    good = [PartWrite(key, pattern(2, PAGE_BYTES)) for key in keys(3, 1)]
    with pytest.raises((ValueError, TypeError, BufferError)):
        store.submit_write([*good, PartWrite(b"bad", holes)], said.append)
    room = aligned_buffer(PAGE_BYTES)
    for bad in (holes, pattern(1, PAGE_BYTES).toreadonly()):
        with pytest.raises((ValueError, TypeError, BufferError)):
            store.submit_read([PartRead(keys(1)[0], room), PartRead(keys(1)[0], bad)], said.append)
    assert store.flush(WAIT_S)
    assert store.stats() == before and said == []
    assert set(write_parts(store, {part.key: part.buffer for part in good}).values()) == {None}
    store.delete(keys(1))
    assert store.flush(WAIT_S), "a read that was never started still holds the part"
    assert store.stats().used_bytes == 3 * PAGE_BYTES
    assert store.close(WAIT_S)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_what_the_engine_refuses_ends_as_failed_once_for_each_part(tmp_path: Path, kind: str) -> None:
    class Refusing(FaultyIO):
        refuses = False

        def submit(self, jobs: Sequence[Job], finished: Finished) -> None:
            if self.refuses and any(job.steps for job in jobs):
                raise RuntimeError("no more")
            super().submit(jobs, finished)

    io = Refusing(make_io("threads"))
    store = open_store(tmp_path, 16 * PAGE_BYTES, io=io)
    parts = {key: pattern(1, PAGE_BYTES) for key in keys(4)}
    if kind == "read":
        write_parts(store, parts)
    io.refuses = True
    if kind == "read":
        waiter = Waiter(4)
        store.submit_read([PartRead(key, aligned_buffer(PAGE_BYTES)) for key in parts], waiter)
        assert waiter.failures() == dict.fromkeys(parts, PartFailure.IO)
    else:
        assert write_parts(store, parts) == dict.fromkeys(parts, PartFailure.IO)
        assert store.stats().used_bytes == 0
    io.refuses = False
    assert set(write_parts(store, parts).values()) == {None}
    store.delete(list(parts))
    assert store.flush(WAIT_S) and store.stats().used_bytes == 0
    assert store.close(WAIT_S)


def test_a_forked_child_cannot_use_or_harm_its_parents_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: pattern(1, PAGE_BYTES) for key in keys(3)})
    child = os.fork()
    if child == 0:
        seen: list[object] = []
        store.submit_read(
            [PartRead(keys(1)[0], aligned_buffer(PAGE_BYTES))], lambda results: seen.extend(d.failure for d in results)
        )
        store.delete(keys(3))
        closed = store.close(1.0)
        os._exit(0 if seen == [PartFailure.CLOSED] and closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    for key in keys(3):
        assert read_part(store, key, PAGE_BYTES)[0] is None
    with pytest.raises(StoreUnavailableError, match="in use"):
        open_store(tmp_path)
    assert store.close(WAIT_S)


def test_a_reader_joins_and_follows_its_owner(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="no store to join"):
        open_store(tmp_path, read_only=True)
    owner = open_store(tmp_path)
    first = {key: pattern(index, PAGE_BYTES) for index, key in enumerate(keys(4))}
    write_parts(owner, first)
    reader = open_store(tmp_path, read_only=True)
    for key, payload in first.items():
        assert read_part(reader, key, PAGE_BYTES) == (None, bytes(payload))
    # New parts, of a new size, are seen.
    large_key, large = keys(1, 50)[0], pattern(9, 8 * PAGE_BYTES)
    write_parts(owner, {large_key: large})
    assert {entry.key for entry in reader.entries()} == {*first, large_key}
    assert read_part(reader, large_key, 8 * PAGE_BYTES) == (None, bytes(large))
    # Removed ones are not served, even though the reader still knows them and their slots hold others by now.
    owner.delete(list(first))
    assert owner.flush(WAIT_S)
    write_parts(owner, {key: pattern(77, PAGE_BYTES) for key in keys(4, 100)})
    assert [read_part(reader, key, PAGE_BYTES)[0] for key in first] == [PartFailure.MISSING] * 4
    owner.reset(4)
    assert list(reader.entries()) == []
    assert reader.generation == 4
    # It changes nothing.
    assert set(write_parts(reader, first).values()) == {PartFailure.IO}
    with pytest.raises(StoreUnavailableError, match="read-only"):
        reader.reset(9)
    assert reader.close(WAIT_S)
    assert owner.close(WAIT_S)


def test_files_are_made_known_to_the_engine_without_the_lock_that_its_thread_may_wait_for(tmp_path: Path) -> None:
    class Watched(FaultyIO):
        known = 0

        def register_file(self, fd: int) -> None:
            assert not any(store._lock.locked() for store in stores)
            self.known += 1

    stores: list[SegmentStore] = []
    stores.append(open_store(tmp_path, io=Watched(make_io("threads"))))
    stores.append(open_store(tmp_path, io=Watched(make_io("threads")), read_only=True))
    for pages in range(1, 6):
        part = {keys(1, pages)[0]: pattern(pages, pages * PAGE_BYTES)}
        assert set(write_parts(stores[0], part).values()) == {None}
        assert len(list(stores[1].entries())) == pages
        assert read_part(stores[1], *part, pages * PAGE_BYTES) == (None, bytes(*part.values()))
    assert stores[1].close(WAIT_S) and stores[0].close(WAIT_S)


def test_a_reader_holds_no_disk_of_files_that_its_owner_removed(tmp_path: Path) -> None:
    def deleted_open() -> int:
        names = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
        return sum(
            " (deleted)" in os.readlink(name) and ".kv" in os.readlink(name) for name in names if name.is_symlink()
        )

    owner = open_store(tmp_path)
    large = {key: pattern(1, 8 * PAGE_BYTES) for key in keys(3)}
    write_parts(owner, large)
    io = FaultyIO(make_io("threads"))
    reader = open_store(tmp_path, read_only=True, io=io)
    assert read_part(reader, keys(1)[0], 8 * PAGE_BYTES)[0] is None
    io.rule = of_kind(Op.READ, Fault(stalls=True))
    waiter = Waiter(1)
    reader.submit_read([PartRead(keys(1)[0], aligned_buffer(8 * PAGE_BYTES))], waiter)
    owner.delete(list(large))
    assert owner.flush(WAIT_S)
    owner.compact()
    assert list(reader.entries()) == [] and deleted_open() == 1, "a read is under way"
    io.rule = lambda job: None
    io.release()
    assert waiter.failures() == {keys(1)[0]: PartFailure.MISSING}
    assert list(reader.entries()) == [] and deleted_open() == 0
    assert reader.close(WAIT_S) and owner.close(WAIT_S)


def test_a_reader_sees_what_comes_while_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = open_store(tmp_path)
    write_parts(owner, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    reader = open_store(tmp_path, read_only=True)
    monkeypatch.setattr(segment_store, "_REFRESH_PERIOD_S", 0.0)
    find = segment_store.find_segments
    late = {keys(1, 1)[0]: pattern(2, 2 * PAGE_BYTES)}

    def then_one_is_made(directory: Path) -> list[tuple[int, int, Path]]:
        found = find(directory)
        monkeypatch.setattr(segment_store, "find_segments", find)
        write_parts(owner, late)
        return found

    monkeypatch.setattr(segment_store, "find_segments", then_one_is_made)
    read_part(reader, b"unknown", PAGE_BYTES)
    assert read_part(reader, *late, 2 * PAGE_BYTES)[0] is None
    assert reader.close(WAIT_S) and owner.close(WAIT_S)


@pytest.mark.parametrize("between", ["reset", "rebuild"])
def test_a_reader_follows_its_owner_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    monkeypatch.setattr(segment_store, "_REFRESH_PERIOD_S", 0.0)
    owner = open_store(tmp_path)
    write_parts(owner, {key: sealed(key, 1, 1) for key in keys(6)})
    reader = open_store(tmp_path, read_only=True)
    assert len(list(reader.entries())) == 6
    if between == "reset":
        owner.reset(1)
        owner.close(WAIT_S)
    else:
        owner.close(WAIT_S)
        (owner.directory / "catalog.sqlite").write_bytes(b"damaged" * 1000)
    owner = open_store(tmp_path)
    owner.delete(keys(6))
    assert owner.flush(WAIT_S)
    new = {key: pattern(2, PAGE_BYTES) for key in keys(3, 50)}
    write_parts(owner, new)
    assert [read_part(reader, key, PAGE_BYTES)[0] for key in keys(6)] == [PartFailure.MISSING] * 6
    assert [read_part(reader, key, PAGE_BYTES) for key in new] == [(None, bytes(part)) for part in new.values()]
    assert reader.close(WAIT_S) and owner.close(WAIT_S)


def sealed(key: bytes, seed: int, pages: int, generation: int = 0) -> memoryview:
    slot = pattern(seed, pages * PAGE_BYTES)
    seal_slot(slot, Identity(NAMESPACE, key, generation), pages * PAGE_BYTES - 512)
    return slot


def test_a_corrupt_catalog_is_rebuilt_from_envelopes_and_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    parts = {key: sealed(key, index, 1 + index % 3) for index, key in enumerate(keys(30))}
    write_parts(store, parts)
    store.close(WAIT_S)
    path = store.directory / "catalog.sqlite"
    for damage in (b"", b"not a database at all" * 999, path.read_bytes()[:4096] + os.urandom(8192)):
        path.write_bytes(damage)
        store = open_store(tmp_path)
        assert any("damaged or lost" in note and "30 parts" in note for note in store.notes), store.notes
        assert {entry.key for entry in store.entries()} == set(parts)
        for key, payload in parts.items():
            failure, found = read_part(store, key, len(payload))
            assert failure is None
            open_slot(found, Identity(NAMESPACE, key), None)
        assert store.close(WAIT_S)
    path.unlink()
    store = open_store(tmp_path)
    assert len(store) == 30
    store.close(WAIT_S)


@pytest.mark.parametrize("damage", ["zeros", "noise", "a bit in each page's head"])
def test_whatever_part_of_a_catalog_is_damaged_a_start_or_two_later_all_is_well(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    parts = {key: sealed(key, index, 1) for index, key in enumerate(keys(60))}
    write_parts(store, parts)
    store.close(WAIT_S)
    path = store.directory / "catalog.sqlite"
    shutil.copytree(store.directory, tmp_path / "whole")
    whole = path.read_bytes()
    for page in range(len(whole) // PAGE_BYTES):
        for turn in (0, 3, 5, 8) if damage.startswith("a bit") else (0,):
            shutil.rmtree(store.directory)
            shutil.copytree(tmp_path / "whole", store.directory)
            at = page * PAGE_BYTES
            if damage.startswith("a bit"):
                at += turn + (100 if page == 0 else 0)
                changed = bytes([whole[at] ^ 1 << (turn + page) % 8])
            else:
                changed = bytes(PAGE_BYTES) if damage == "zeros" else os.urandom(PAGE_BYTES)
            path.write_bytes(whole[:at] + changed + whole[at + len(changed) :])
            for _ in range(2):
                # Damage that reading does not meet is met by the first write, and mended by the start after it.
                again = open_store(tmp_path)
                for key, payload in parts.items():
                    failure, found = read_part(again, key, PAGE_BYTES)
                    assert failure is PartFailure.MISSING or found == bytes(payload)
                last = write_parts(again, {b"new": pattern(1, PAGE_BYTES)})
                again.delete([b"new"])
                again.close(0.1)
            assert last == {b"new": None}, (page, turn)


def test_a_rebuild_that_is_killed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    parts = {key: sealed(key, index, 1) for index, key in enumerate(keys(20))}
    write_parts(store, parts)
    store.close(WAIT_S)
    (store.directory / "catalog.sqlite").write_bytes(b"damaged" * 1000)

    class Killed(BaseException):
        pass

    def killed(*arguments: object, **named: object) -> None:
        raise Killed

    steps = ((Catalog, "reset"), (Catalog, "commit"), (Path, "rename"), (Catalog, "close"), (rebuild, "sync_directory"))
    for place, name in steps:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, killed)
            with pytest.raises(Killed):
                open_store(tmp_path)
    store = open_store(tmp_path)
    assert {entry.key for entry in store.entries()} == set(parts)
    assert not list(store.directory.glob("*.new*"))
    assert store.close(WAIT_S)


def test_of_damaged_catalogs_the_last_one_is_kept(tmp_path: Path) -> None:
    for damage in (b"first" * 1000, b"second" * 1000):
        store = open_store(tmp_path)
        store.close(WAIT_S)
        (store.directory / "catalog.sqlite").write_bytes(damage)
    store = open_store(tmp_path)
    assert [path.read_bytes()[:6] for path in store.directory.glob("catalog.sqlite.damaged-*")] == [b"second"]
    assert store.close(WAIT_S)


def test_a_catalog_without_tables_beside_segments_is_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: sealed(key, index, 1) for index, key in enumerate(keys(5))})
    store.close(WAIT_S)
    path = store.directory / "catalog.sqlite"
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("VACUUM")
    store = open_store(tmp_path)
    assert len(store) == 5
    assert store.close(WAIT_S)


def test_a_rebuild_brings_back_nothing_of_an_older_generation(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: sealed(key, 1, 1) for key in keys(6)})
    store.reset(2)
    store.close(WAIT_S)
    store = open_store(tmp_path)
    late = {key: sealed(key, 2, 1, generation=3) for key in keys(2, 50)}
    write_parts(store, late)
    store.close(WAIT_S)
    (store.directory / "catalog.sqlite").write_bytes(b"junk" * 4096)
    store = open_store(tmp_path)
    assert {entry.key for entry in store.entries()} == set(late)
    assert store.generation == 3
    store.close(WAIT_S)


def test_two_rows_for_one_slot_are_corruption(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: sealed(key, index, 1) for index, key in enumerate(keys(3))})
    store.close(WAIT_S)
    with sqlite3.connect(store.directory / "catalog.sqlite") as database:
        database.execute("UPDATE parts SET place = (SELECT place FROM parts ORDER BY id LIMIT 1)")
    store = open_store(tmp_path)
    assert any("two rows claim" in note for note in store.notes)
    assert len(store) == 3
    store.close(WAIT_S)


def test_a_catalog_of_another_version_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close(WAIT_S)
    with sqlite3.connect(store.directory / "catalog.sqlite") as database:
        database.execute("PRAGMA user_version=7")
    with pytest.raises(StoreUnavailableError, match="version 7, this kvtier reads version 2"):
        open_store(tmp_path)


def test_compact_gives_back_disk_while_in_use(tmp_path: Path) -> None:
    store = open_store(tmp_path, 256 * PAGE_BYTES)
    parts = {key: pattern(index, PAGE_BYTES) for index, key in enumerate(keys(200))}
    write_parts(store, parts)
    before = store.stats().disk_bytes
    store.delete(keys(200)[::2] + keys(50, 150))
    assert store.flush(WAIT_S)
    given_back = store.compact()
    stats = store.stats()
    assert stats.disk_bytes == stats.used_bytes == 75 * PAGE_BYTES
    assert given_back == before - stats.disk_bytes
    for key in keys(150)[1::2]:
        assert read_part(store, key, PAGE_BYTES) == (None, bytes(parts[key]))
    store.delete(keys(200))
    assert store.flush(WAIT_S)
    store.compact()
    assert store.stats().disk_bytes == 0
    assert not list(store.directory.glob("seg_*"))
    assert set(write_parts(store, parts).values()) == {None}
    store.close(WAIT_S)


def test_a_child_does_not_keep_the_path_locked_after_its_parent(tmp_path: Path) -> None:
    """A process that forked and died must not leave its child holding the lock."""
    ready, started = os.pipe()
    middle = os.fork()
    if middle == 0:
        open_store(tmp_path, io=make_io("threads"))
        if os.fork() == 0:
            os.write(started, b"%10d" % os.getpid())
            signal.pause()
        os._exit(0)
    os.waitpid(middle, 0)
    orphan = int(os.read(ready, 10))
    try:
        open_store(tmp_path).close(WAIT_S)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_policy_makes_room_by_itself_and_spares_what_is_read(tmp_path: Path) -> None:
    io = FaultyIO(make_io("threads"))
    store = open_store(tmp_path, 4 * PAGE_BYTES, policy=make_policy("lru", 4 * PAGE_BYTES), io=io)
    parts = {key: pattern(index, PAGE_BYTES) for index, key in enumerate(keys(12))}
    for key in keys(4):
        assert write_parts(store, {key: parts[key]}) == {key: None}
    # The first is being read, the second was used: the third goes.
    read_part(store, keys(4)[1], PAGE_BYTES)
    io.rule = of_kind(Op.READ, Fault(stalls=True))
    waiter = Waiter(1)
    store.submit_read([PartRead(keys(1)[0], aligned_buffer(PAGE_BYTES))], waiter)
    wait_until(lambda: io.stalled == 1)
    assert write_parts(store, {keys(5)[4]: parts[keys(5)[4]]}) == {keys(5)[4]: None}
    assert {entry.key for entry in store.entries()} == {keys(5)[index] for index in (0, 1, 3, 4)}
    # What cannot be satisfied changes nothing.
    assert set(write_parts(store, {b"large" + bytes(27): pattern(1, 4 * PAGE_BYTES)}).values()) == {
        PartFailure.NO_SPACE
    }
    assert len(store) == 4
    io.rule = lambda job: None
    io.release()
    assert waiter.wait()[0].failure is None
    for key, payload in parts.items():
        assert write_parts(store, {key: payload}) == {key: None}
    assert store.stats().parts_evicted >= 8
    assert store.stats().used_bytes == 4 * PAGE_BYTES
    store.close(WAIT_S)
    store = open_store(tmp_path, 4 * PAGE_BYTES, policy=make_policy("lru", 4 * PAGE_BYTES))
    assert set(write_parts(store, {keys(1, 99)[0]: pattern(3, 2 * PAGE_BYTES)}).values()) == {None}
    store.close(WAIT_S)


def test_without_direct_io_everything_works_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_direct)
    store = open_store(tmp_path)
    assert not store.direct_io
    assert "Invalid argument" in store.direct_io_reason
    parts = {key: pattern(index, PAGE_BYTES) for index, key in enumerate(keys(5))}
    write_parts(store, parts)
    for key, payload in parts.items():
        assert read_part(store, key, PAGE_BYTES) == (None, bytes(payload))
    store.close(WAIT_S)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(StoreUnavailableError, match="is not writable for user"):
        open_store(tmp_path)


def test_an_arena_is_registered_or_it_is_said_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.tier.disk.ring import RingIO

    arena = aligned_buffer(16 * PAGE_BYTES)
    store = open_store(tmp_path, io=make_io("ring"), arena=arena)
    assert store.arena_registered_reason == ""
    arena[:] = pattern(1, arena.nbytes)
    write_parts(store, {keys(1)[0]: arena[: 4 * PAGE_BYTES]})
    assert read_part(store, keys(1)[0], 4 * PAGE_BYTES) == (None, bytes(arena[: 4 * PAGE_BYTES]))
    assert isinstance(store.io, RingIO)
    assert (store.io.registered_files, store.io.registered_memory_bytes) == (1, arena.nbytes)
    store.close(WAIT_S)
    monkeypatch.setattr(RingIO, "_own_job", lambda *arguments: 12)
    store = open_store(tmp_path, io=make_io("ring"), arena=arena)
    assert "RLIMIT_MEMLOCK" in store.arena_registered_reason
    assert read_part(store, keys(1)[0], 4 * PAGE_BYTES)[0] is None
    store.close(WAIT_S)


def test_an_idle_store_takes_no_processor_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, io=make_io("ring"))
    write_parts(store, {keys(1)[0]: pattern(1, PAGE_BYTES)})
    assert store.flush(WAIT_S)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.005
    store.close(WAIT_S)


def test_what_lies_nowhere_or_twice_is_found_whatever_the_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_parts(store, {key: sealed(key, index, 1) for index, key in enumerate(keys(5))})
    store.close(WAIT_S)
    with contextlib.closing(Catalog(store.directory, "none")) as catalog:
        rows = list(catalog.rows())
        wrong = [
            rows[1]._replace(segment=77),
            rows[2]._replace(slot=1 << 20),
            rows[3]._replace(stored_bytes=rows[3].stored_bytes + 1),
        ]
        catalog.commit(added=wrong, removed=[row.id for row in wrong])
    store = open_store(tmp_path)
    assert [entry.key for entry in store.entries()] == [rows[0].key, rows[4].key]
    assert store.stats().used_bytes == rows[0].stored_bytes + rows[4].stored_bytes
    assert any("3 parts of the catalog lie in segments that are missing" in note for note in store.notes)
    store.close(WAIT_S)
    store = open_store(tmp_path)
    assert store.notes == [], "what was forgotten is gone from the catalog too"
    store.close(WAIT_S)
    with sqlite3.connect(store.directory / "catalog.sqlite") as database:
        database.execute("UPDATE parts SET place = x'00' WHERE id = (SELECT min(id) FROM parts)")
    store = open_store(tmp_path)
    assert any("a row's place is not 40 bytes long" in note for note in store.notes)
    store.close(WAIT_S)


def test_the_longest_unused_go_where_the_capacity_shrank_and_no_more(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = keys(6)
    write_parts(store, {key: pattern(index, PAGE_BYTES) for index, key in enumerate(names)})
    for key in (names[0], names[3]):
        read_part(store, key, PAGE_BYTES)
    store.close(WAIT_S)
    for pages, left in ((6, 6), (4, 4), (2, 2)):
        store = open_store(tmp_path, pages * PAGE_BYTES)
        assert len(store) == left
        assert [entry.key for entry in store.entries()][-2:] == [names[0], names[3]]
        assert store.keys_and_depths() == ([e.key for e in store.entries()], [e.depth_tokens for e in store.entries()])
        assert store.stats().used_bytes == store.stats().disk_bytes == left * PAGE_BYTES
        store.close(WAIT_S)


@pytest.mark.slow
def test_a_large_catalog_opens_in_seconds(tmp_path: Path) -> None:
    count = 200_000
    store = open_store(tmp_path, count * PAGE_BYTES, io=make_io("threads"), durability="none")
    store.close(WAIT_S)
    with (store.directory / f"seg_00000001_{PAGE_BYTES}.kv").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, count * PAGE_BYTES)
    catalog = Catalog(store.directory, "none")
    for first in range(0, count, 5000):
        rows = [
            CatalogRow(n + 1, b"%032d" % n, 1, n, PAGE_BYTES, n, n, 1e-9, (n * 7919) % count)
            for n in range(first, first + 5000)
        ]
        catalog.commit(added=rows, removed=())
    catalog.close()
    before = time.process_time()
    store = open_store(tmp_path, count * PAGE_BYTES, io=make_io("threads"), durability="none")
    # A million in 5 s is 1 s here.
    assert time.process_time() - before < 1.0
    assert len(store) == count
    store.close(WAIT_S)
