"""The shared-filesystem store, presence and the janitor, on real directories."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.cli import gc
from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.identity.namespace import Namespace
from kvtier.record.envelope import Identity, open_slot, seal_slot
from kvtier.testing.disk_faults import Fault, FaultyIO, of_kind
from kvtier.testing.part_store import WAIT_S, PartStoreSuite, Waiter, pattern, read_part, wait_until, write_parts
from kvtier.tier.disk import shared_store
from kvtier.tier.disk.base import Key, PartFailure, PartRead, PartStore, PartWrite
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import PAGE_BYTES, Op, aligned_buffer
from kvtier.tier.disk.janitor import JanitorRules, sweep
from kvtier.tier.disk.presence import SharedPresence
from kvtier.tier.disk.shared_layout import SharedLayout, claim
from kvtier.tier.disk.shared_store import SharedStore

NAMESPACE = b"shared"
PART_BYTES = 4 * PAGE_BYTES


def layout(root: Path, **changes: object) -> SharedLayout:
    values: dict[str, object] = {
        "model": "org/model-1B",
        "block_size": 16,
        "blocks_per_file": 8,
        "dtype": "bfloat16",
        "tp": 2,
    }
    return SharedLayout(root, **(values | changes))  # type: ignore[arg-type]


def key_of(number: int) -> bytes:
    return b"%032d" % number


def file_of(root: Path, key: Key, rank: int = 0, generation: int = 0) -> Path:
    """Where py-kvcache has a key, in words of its own."""
    digits = key.hex()
    return layout(root).rank_directory(rank, generation) / digits[:3] / digits[3:5] / f"{digits}.bin"


def identity(key: Key, generation: int = 0) -> Identity:
    return Identity(NAMESPACE, key, generation)


def sealed(key: Key, seed: int, payload_bytes: int = PART_BYTES - 512, generation: int = 0) -> memoryview:
    slot = pattern(seed, -(-(payload_bytes + 512) // PAGE_BYTES) * PAGE_BYTES)
    seal_slot(slot, identity(key, generation), payload_bytes)
    return slot


def open_shared(root: Path, **changes: object) -> SharedStore:
    values: dict[str, object] = {"io": make_io("threads")}
    return SharedStore(layout(root), **(values | changes))  # type: ignore[arg-type]


class TestSharedOnThreads(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_shared(path)


class TestSharedOnRing(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_shared(path, io=make_io("ring"), sync_on_store=True)


class TestPlainFiles(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        return open_shared(
            path, io=make_io("ring"), trailer="off", payload_bytes=lambda key: PART_BYTES - 512, identity=identity
        )

    def payload(self, key: Key, seed: int, length_bytes: int) -> memoryview:
        return sealed(key, seed)

    def test_a_buffer_of_another_length_is_refused(self, tmp_path: Path) -> None:
        """Here the length of a part is the caller's word, and a file of another length is refused: see below."""


class TestBufferedWithRename(PartStoreSuite):
    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        store = open_shared(path, direct=False)
        store.links_work = False
        return store


# -- the layout


def test_files_lie_exactly_where_py_kvcache_has_them(tmp_path: Path) -> None:
    store = open_shared(tmp_path, rank=1)
    key = bytes.fromhex("abcdef0123456789" * 4)
    write_parts(store, {key: sealed(key, 1)})
    expected = (
        "org/model-1B/block_size_16_blocks_per_file_8/tp_2_pp_size_1_pcp_size_1/rank_1/bfloat16/abc/de/"
        + key.hex()
        + ".bin"
    )
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [expected]
    store.close(WAIT_S)


@pytest.mark.parametrize("payload_bytes", [PART_BYTES, PART_BYTES - 512, 100, PAGE_BYTES + 1])
def test_plain_files_are_the_payload_and_nothing_else(tmp_path: Path, payload_bytes: int) -> None:
    store = open_shared(tmp_path, trailer="off", payload_bytes=lambda key: payload_bytes, identity=identity)
    key = key_of(1)
    slot = sealed(key, 3, payload_bytes)
    assert write_parts(store, {key: slot}) == {key: None}
    (path,) = tmp_path.rglob("*.bin")
    assert path.read_bytes() == bytes(slot[:payload_bytes])
    # A file that another program wrote, with no envelope, is read and comes out sealed.
    other = key_of(2)
    file = file_of(tmp_path, other)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(range(256)) * (payload_bytes // 256) + bytes(payload_bytes % 256))
    failure, found = read_part(store, other, slot.nbytes)
    assert failure is None
    assert open_slot(found, identity(other), payload_bytes).payload_bytes == payload_bytes
    assert found[:payload_bytes] == file.read_bytes()
    file.write_bytes(b"longer" * payload_bytes)
    assert read_part(store, other, slot.nbytes)[0] is PartFailure.SHORT
    store.close(WAIT_S)


def test_the_payload_of_a_file_with_a_trailer_starts_at_offset_0(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    slot = sealed(key_of(1), 3, PART_BYTES)
    write_parts(store, {key_of(1): slot})
    (path,) = tmp_path.rglob("*.bin")
    assert path.read_bytes()[:PART_BYTES] == bytes(slot[:PART_BYTES])
    assert path.stat().st_size == PART_BYTES + PAGE_BYTES
    store.close(WAIT_S)


@pytest.mark.parametrize("model", ["..", "../other", "/etc", "a//b", "", "a/../../b", ".", "a\0b", "a/"])
def test_model_names_cannot_leave_the_root(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="model name"):
        layout(tmp_path, model=model)


def test_bad_layouts_and_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        layout(tmp_path, dtype="a/b")
    with pytest.raises(ConfigError, match="block_size is 0"):
        layout(tmp_path, block_size=0)
    with pytest.raises(ConfigError, match="trailer is 'maybe'"):
        open_shared(tmp_path, trailer="maybe")
    with pytest.raises(ConfigError, match="payload_bytes and identity"):
        open_shared(tmp_path, trailer="off")
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        open_shared(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="not a directory"):
        open_shared(tmp_path / "file")


# -- many engines


def test_two_engines_store_one_key_and_both_succeed(tmp_path: Path) -> None:
    stores = [open_shared(tmp_path) for _ in range(4)]
    parts = {key_of(n): sealed(key_of(n), n) for n in range(24)}
    waiters = [Waiter(len(parts)) for _ in stores]
    threads = [
        threading.Thread(
            target=store.submit_write, args=([PartWrite(key, buffer) for key, buffer in parts.items()], waiter)
        )
        for store, waiter in zip(stores, waiters, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for waiter in waiters:
        assert set(waiter.failures().values()) == {None}
    for key, payload in parts.items():
        assert read_part(stores[0], key, payload.nbytes) == (None, bytes(payload))
    assert len(list(tmp_path.rglob("*.bin*"))) == len(parts)
    for store in stores:
        assert store.close(WAIT_S)


def test_a_write_that_meets_the_same_part_in_other_bits_is_a_success_and_changes_nothing(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    first, second = sealed(key_of(1), 1), sealed(key_of(1), 2)
    write_parts(store, {key_of(1): first})
    assert write_parts(store, {key_of(1): second}) == {key_of(1): None}
    assert read_part(store, key_of(1), PART_BYTES) == (None, bytes(first))
    assert store.stats.parts_found_written == 1
    store.close(WAIT_S)


def test_a_part_that_another_engine_stored_and_removed_again_is_stored(tmp_path: Path) -> None:
    key, other = key_of(1), open_shared(tmp_path)
    write_parts(other, {key: sealed(key, 1)})
    io = FaultyIO(make_io("threads"))
    store = open_shared(tmp_path, io=io)
    io.rule = lambda job: Fault(stalls=True) if [step.op for step in job.steps][1:2] == [Op.OPEN] else None
    waiter = Waiter(1)
    store.submit_write([PartWrite(key, sealed(key, 1))], waiter)
    wait_until(lambda: io.stalled == 1)
    other.delete([key])
    assert other.flush(WAIT_S)
    io.rule = lambda job: None
    io.release()
    assert waiter.failures() == {key: None}
    assert read_part(other, key, PART_BYTES) == (None, bytes(sealed(key, 1)))
    assert store.close(WAIT_S) and other.close(WAIT_S)


def test_a_name_taken_by_another_part_is_refused(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    write_parts(store, {key_of(1): sealed(key_of(2), 1)})
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): PartFailure.EXISTS_DIFFERENT}
    write_parts(store, {key_of(3): sealed(key_of(3), 1, 2 * PAGE_BYTES)})
    assert write_parts(store, {key_of(3): sealed(key_of(3), 1)}) == {key_of(3): PartFailure.EXISTS_DIFFERENT}
    store.close(WAIT_S)


def test_a_file_taken_away_is_a_miss_and_a_cut_one_is_short(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    parts = {key_of(n): sealed(key_of(n), n) for n in range(2)}
    write_parts(store, parts)
    first, second = sorted(tmp_path.rglob("*.bin"))
    first.unlink()
    os.truncate(second, PAGE_BYTES + 100)
    assert read_part(store, key_of(0), PART_BYTES)[0] is PartFailure.MISSING
    assert read_part(store, key_of(1), PART_BYTES)[0] is PartFailure.SHORT
    # Directories that vanished are made again.
    shutil.rmtree(layout(tmp_path).rank_directory(0))
    again = write_parts(store, {key_of(5): sealed(key_of(5), 1)})
    assert again[key_of(5)] in (None, PartFailure.IO)
    store.close(WAIT_S)
    store = open_shared(tmp_path)
    assert write_parts(store, {key_of(5): sealed(key_of(5), 1)}) == {key_of(5): None}
    store.close(WAIT_S)


@pytest.mark.parametrize("op", [Op.OPEN, Op.WRITE, Op.SYNC, Op.LINK, Op.MKDIR])
def test_a_step_that_fails_leaves_no_name_behind(tmp_path: Path, op: Op) -> None:
    class Broken(FaultyIO):
        """Carries out the job without its step `op`, which is said to have failed."""

        def submit(self, jobs, finished):  # type: ignore[no-untyped-def]
            for job in jobs:
                for step in job.steps:
                    if step.op is op and job.lane.value == "write" and len(job.steps) > 3:
                        step.op, step.path, step.flags = Op.OPEN, b"/nonexistent/x", os.O_RDONLY
                        break
            super().submit(jobs, finished)

    store = open_shared(tmp_path, io=Broken(make_io("threads")), sync_on_store=True)
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): PartFailure.IO}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(store.entries()) == []
    store.close(WAIT_S)


def test_enospc_is_no_space_and_the_floor_is_kept(tmp_path: Path) -> None:
    io = FaultyIO(make_io("threads"), of_kind(Op.WRITE, Fault(error=28)))
    store = open_shared(tmp_path, io=io)
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): PartFailure.NO_SPACE}
    store.close(WAIT_S)
    store = open_shared(tmp_path, free_bytes_min=1 << 60)
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): PartFailure.NO_SPACE}
    store.close(WAIT_S)


def test_a_delete_overtakes_a_write_under_way_and_a_later_write_stands(tmp_path: Path) -> None:
    io = FaultyIO(make_io("threads"), of_kind(Op.LINK, Fault(stalls=True)))
    store = open_shared(tmp_path, io=io)
    first, second = Waiter(1), Waiter(1)
    store.submit_write([PartWrite(key_of(1), sealed(key_of(1), 1))], first)
    wait_until(lambda: io.stalled == 1)
    io.rule = lambda job: None
    store.delete([key_of(1)])
    assert read_part(store, key_of(1), PART_BYTES)[0] is PartFailure.MISSING
    store.submit_write([PartWrite(key_of(1), sealed(key_of(1), 2))], second)
    io.release()
    assert first.failures() == {key_of(1): PartFailure.CANCELLED}
    assert second.failures() == {key_of(1): None}
    assert read_part(store, key_of(1), PART_BYTES) == (None, bytes(sealed(key_of(1), 2)))
    store.close(WAIT_S)


def test_a_new_generation_is_not_hindered_by_the_old_ones_files(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    other = open_shared(tmp_path)
    key = key_of(1)
    write_parts(store, {key: sealed(key, 1)})
    store.reset(3)
    assert read_part(store, key, PART_BYTES)[0] is PartFailure.MISSING
    fresh = sealed(key, 2, generation=3)
    assert write_parts(store, {key: fresh}) == {key: None}
    assert read_part(store, key, PART_BYTES) == (None, bytes(fresh))
    # An engine that was not reset still has its own.
    assert read_part(other, key, PART_BYTES) == (None, bytes(sealed(key, 1)))
    with pytest.raises(ValueError, match="older than 3"):
        store.reset(2)
    for one in (store, other):
        one.close(WAIT_S)


def open_plain(root: Path, **changes: object) -> SharedStore:
    """A store of plain files, whose parts are of the generation in force, as in an engine."""
    stores: list[SharedStore] = []
    stores.append(
        open_shared(
            root,
            trailer="off",
            payload_bytes=lambda key: PART_BYTES - 512,
            identity=lambda key: identity(key, stores[0].generation),
            **changes,
        )
    )
    return stores[0]


def test_a_reset_that_fails_serves_no_older_file_as_of_the_new_generation(tmp_path: Path) -> None:
    store = open_plain(tmp_path)
    write_parts(store, {key_of(1): sealed(key_of(1), 1)})
    in_the_way = store.layout.rank_directory(0, 7)
    in_the_way.write_text("no directory can be made here")
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="generation 7"):
            store.reset(7)
    assert store.generation == 0
    in_the_way.unlink()
    store.reset(7)
    assert read_part(store, key_of(1), PART_BYTES)[0] is PartFailure.MISSING
    assert store.close(WAIT_S)


@pytest.mark.parametrize("moment", ["waits for a delete", "submitted", "read"])
def test_plain_bytes_of_before_a_reset_are_never_of_after_it(tmp_path: Path, moment: str) -> None:
    io = FaultyIO(make_io("threads"))
    store = open_plain(tmp_path, io=io)
    key, part = key_of(1), sealed(key_of(1), 1)
    write_parts(store, {key: part})
    waiter = Waiter(1)
    if moment == "waits for a delete":
        io.rule = of_kind(Op.UNLINK, Fault(stalls=True))
        store.delete([key])
        store.submit_write([PartWrite(key, part)], waiter)
        store.reset(1)
        io.rule = lambda job: None
        io.release()
    else:
        # The reset comes just after the store looked at what is in force.
        name = "_start" if moment == "submitted" else "_identity"
        before = getattr(store, name)

        def after_a_reset(*arguments: object) -> object:
            store.reset(1)
            return before(*arguments)

        setattr(store, name, after_a_reset)
        if moment == "submitted":
            store.submit_write([PartWrite(key, part)], waiter)
        else:
            store.submit_read([PartRead(key, part)], waiter)
    assert set(waiter.failures().values()) <= {PartFailure.CANCELLED, PartFailure.MISSING}
    assert not file_of(tmp_path, key, generation=1).exists()
    assert store.close(WAIT_S)


def test_a_key_that_the_layout_has_no_name_for_harms_no_other(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    part = PartWrite(key_of(1), sealed(key_of(1), 1))
    with pytest.raises(ValueError, match="too short"):
        store.submit_write([part, PartWrite(b"x", part.buffer)], lambda results: None)
    assert store.flush(WAIT_S)
    assert write_parts(store, {part.key: part.buffer}) == {part.key: None}
    assert store.close(WAIT_S)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no more maps")])
def test_a_write_without_memory_for_its_copy_ends_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = open_shared(tmp_path)

    def no_more(length_bytes: int) -> memoryview:
        raise error

    part = aligned_buffer(PART_BYTES + 512)[512:]
    part[:] = sealed(key_of(1), 1)
    monkeypatch.setattr(shared_store, "aligned_buffer", no_more)
    failures = write_parts(store, {key_of(1): part})
    assert failures == {key_of(1): PartFailure.IO if store.direct_io else None}
    monkeypatch.undo()
    assert write_parts(store, {key_of(1): part}) == {key_of(1): None}
    assert store.close(WAIT_S)


def test_a_root_that_does_not_answer_for_its_space_fails_writes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: object) -> os.statvfs_result:
        raise OSError(errno.ESTALE, "stale file handle")

    store = open_shared(tmp_path, free_bytes_min=1)
    monkeypatch.setattr(os, "statvfs", stale)
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): None}
    store.delete([key_of(1)])
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): None}
    assert store.close(WAIT_S)


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    child = os.fork()
    if child == 0:
        code = 0 if set(write_parts(store, {key_of(1): sealed(key_of(1), 1)}).values()) == {PartFailure.CLOSED} else 1
        os._exit(code if store.close(1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): None}
    store.close(WAIT_S)


# -- presence


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def settled(presence: SharedPresence, keys: list[bytes]) -> list[bool | None]:
    wait_until(lambda: None not in presence.lookup(keys))
    return presence.lookup(keys)


def test_presence_needs_every_rank_and_is_remembered_for_a_while(tmp_path: Path, clock: Clock) -> None:
    stores = [open_shared(tmp_path, rank=rank) for rank in range(2)]
    keys = [key_of(n) for n in range(3)]
    write_parts(stores[0], {key: sealed(key, 1) for key in keys[:2]})
    write_parts(stores[1], {key: sealed(key, 1) for key in keys[:1]})
    presence = SharedPresence(layout(tmp_path), ranks=2, clock=clock, present_s=30.0, absent_s=1.0)
    assert presence.lookup(keys) == [None] * 3
    assert settled(presence, keys) == [True, False, False]
    asked = presence.questions
    assert asked == 3
    # Remembered: neither the store that came nor the delete are seen before their time.
    write_parts(stores[1], {keys[1]: sealed(keys[1], 1)})
    stores[0].delete([keys[0]])
    stores[0].flush(WAIT_S)
    assert presence.lookup(keys) == [True, False, False]
    assert presence.questions == asked
    clock.now_s = 1.5
    assert settled(presence, keys) == [True, True, False]
    clock.now_s = 40.0
    assert settled(presence, keys) == [False, True, False]
    presence.note(keys[2], present=True)
    assert presence.lookup(keys)[2] is True
    presence.forget(keys)
    assert presence.lookup(keys) == [None] * 3
    for store in stores:
        store.close(WAIT_S)


def test_presence_memory_is_bounded_and_a_lookup_never_waits_for_a_filesystem_that_hangs(
    tmp_path: Path, clock: Clock
) -> None:
    answer = threading.Event()

    def hangs(path: bytes) -> bool:
        answer.wait(WAIT_S)
        return False

    presence = SharedPresence(layout(tmp_path), ranks=1, clock=clock, keys_max=10, threads=2, exists=hangs)
    keys = [key_of(n) for n in range(150_000)]
    assert set(presence.lookup(keys)) == {None}
    assert presence.lookup(keys[:50]) == [None] * 50
    assert presence.questions == 100_000, "what is asked is bounded too"
    assert not presence.close(0.01)
    answer.set()
    wait_until(lambda: len(presence) == 10)
    assert presence.close(WAIT_S)


def test_what_cannot_be_said_is_absent_and_counted(tmp_path: Path, clock: Clock) -> None:
    def broken(path: bytes) -> bool:
        raise OSError(errno.EIO, "the server is ill")

    presence = SharedPresence(layout(tmp_path), ranks=1, clock=clock, exists=broken)
    assert settled(presence, [key_of(1), b"tiny"]) == [False, False]
    assert presence.failed_questions == 2
    presence.commit([key_of(1)], lambda results: {}[0])
    wait_until(lambda: presence.failed_questions == 3)
    assert presence.close(WAIT_S)


def test_an_answer_under_way_does_not_overrule_who_knows_better(tmp_path: Path, clock: Clock) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(path: bytes) -> bool:
        asked.set()
        answer.wait(WAIT_S)
        return False

    presence = SharedPresence(layout(tmp_path), ranks=1, clock=clock, exists=slow)
    assert presence.lookup([key_of(1), key_of(2)]) == [None, None]
    assert asked.wait(WAIT_S)
    presence.note(key_of(1), present=True)
    presence.reset(1)
    presence.note(key_of(2), present=True)
    answer.set()
    assert presence.close(WAIT_S)
    assert presence.lookup([key_of(2)]) == [True] and presence.lookup([key_of(1)]) == [None]


def test_each_answer_is_given_once_however_short_it_lives(tmp_path: Path, clock: Clock) -> None:
    presence = SharedPresence(layout(tmp_path), ranks=1, clock=clock, present_s=0.0, absent_s=0.0)
    presence.lookup([key_of(1)])
    wait_until(lambda: not presence._asked)
    clock.now_s += 100.0
    assert presence.lookup([key_of(1)]) == [False]
    assert presence.lookup([key_of(1)]) == [None]
    assert presence.close(WAIT_S)


def test_commit_markers_say_in_one_question_that_all_ranks_stored(tmp_path: Path, clock: Clock) -> None:
    store = open_shared(tmp_path)
    presence = SharedPresence(layout(tmp_path), ranks=8, clock=clock, markers=True)
    keys = [key_of(n) for n in range(20)]
    assert settled(presence, keys) == [False] * 20
    results: dict[bytes, bool] = {}
    presence.commit(keys[:10], results.update)
    wait_until(lambda: len(results) == 10)
    assert set(results.values()) == {True}
    other = SharedPresence(layout(tmp_path), ranks=8, clock=clock, markers=True)
    assert settled(other, keys) == [True] * 10 + [False] * 10
    assert other.questions == 20
    other.uncommit(keys[:5])
    assert other.lookup(keys[:5]) == [False] * 5
    wait_until(lambda: len(list((layout(tmp_path).marker_directory()).rglob("*.bin"))) == 5)
    other.reset(1)
    assert settled(other, keys) == [False] * 20
    store.close(WAIT_S)


def test_a_marker_made_after_a_reset_is_no_word_on_the_new_generation(tmp_path: Path, clock: Clock) -> None:
    hangs = threading.Event()

    def exists(path: bytes) -> bool:
        hangs.wait(WAIT_S)
        return False

    presence = SharedPresence(layout(tmp_path), ranks=2, clock=clock, markers=True, threads=1, exists=exists)
    presence.lookup([key_of(9)])
    made = threading.Event()
    presence.commit([key_of(1)], lambda results: made.set())
    presence.reset(1)
    hangs.set()
    assert made.wait(WAIT_S)
    assert presence.lookup([key_of(1)]) == [None]
    assert presence.close(WAIT_S)


def test_publish_is_seen_at_once_here_and_by_markers_elsewhere(tmp_path: Path, clock: Clock) -> None:
    keys = [key_of(1), key_of(2)]
    layout(tmp_path).model_directory.mkdir(parents=True)
    ours, theirs = (SharedPresence(layout(tmp_path), ranks=2, clock=clock, markers=True) for _ in range(2))
    assert settled(theirs, keys) == [False, False]
    ours.publish(keys)
    assert ours.lookup(keys) == [True, True]
    wait_until(lambda: all(file_of_marker(tmp_path, key).exists() for key in keys))
    clock.now_s += 2.0
    assert settled(theirs, keys) == [True, True]
    ours.uncommit(keys[:1])
    assert ours.lookup(keys) == [False, True]
    theirs.forget(keys)
    wait_until(lambda: not file_of_marker(tmp_path, keys[0]).exists())
    assert settled(theirs, keys) == [False, True]
    assert ours.close(WAIT_S) and theirs.close(WAIT_S)
    single = SharedPresence(layout(tmp_path), ranks=1, clock=clock)
    single.publish([key_of(3)])
    assert single.lookup([key_of(3)]) == [True] and not file_of_marker(tmp_path, key_of(3)).exists()
    single.uncommit([key_of(3)])
    assert single.lookup([key_of(3)]) == [False]
    assert single.close(WAIT_S)


def file_of_marker(root: Path, key: Key) -> Path:
    digits = key.hex()
    return layout(root).marker_directory() / digits[:3] / digits[3:5] / f"{digits}.bin"


# -- whose a directory is


def test_a_directory_is_one_namespace_s_and_others_get_their_own(tmp_path: Path) -> None:
    first, second = Namespace({"weights": "a"}), Namespace({"weights": "b"})
    assert claim(layout(tmp_path), first) == layout(tmp_path)
    assert claim(layout(tmp_path), first) == layout(tmp_path)
    own = claim(layout(tmp_path), second)
    assert own.model == f"org/model-1B--{second.id.hex()[:12]}" and own == claim(layout(tmp_path), second)
    assert json.loads(layout(tmp_path).manifest_path.read_text())["fields"] == {"weights": "a"}
    assert json.loads(own.manifest_path.read_text())["fields"] == {"weights": "b"}
    # py-kvcache's files, which nobody has claimed, are the first one's.
    assert claim(layout(tmp_path, dtype="float16"), second).dtype == "float16"
    assert [path for path in tmp_path.rglob("*") if ".new-" in path.name] == []


def test_whose_a_directory_is_is_on_the_medium_before_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        assert not list(tmp_path.rglob(f"kvtier-{layout(tmp_path).dtype}"))

    monkeypatch.setattr(os, "fsync", sync)
    claim(layout(tmp_path), Namespace({"weights": "a"}))
    assert synced == [layout(tmp_path).manifest_path.stat().st_size]


def test_engines_that_start_at_once_agree_on_whose_a_directory_is(tmp_path: Path) -> None:
    for turn in range(20):
        names = [Namespace({"weights": number % 2, "turn": turn}) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda name, turn=turn: claim(layout(tmp_path / str(turn)), name), names))
        by_name = {
            name.id: {one.model for one, other in zip(found, names, strict=True) if other.id == name.id}
            for name in names
        }
        assert all(len(models) == 1 for models in by_name.values()) and len({*map(str, by_name.values())}) == 2
        assert "org/model-1B" in {one.model for one in found}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"id": 5}'])
def test_a_manifest_that_is_none_is_refused_or_left_alone(tmp_path: Path, text: str) -> None:
    path = layout(tmp_path).manifest_path
    path.parent.mkdir(parents=True)
    path.write_text(text)
    name = Namespace({"weights": "a"})
    if text in ("", "{"):
        with pytest.raises(StoreUnavailableError, match="is not JSON.*delete it"):
            claim(layout(tmp_path), name)
    else:
        assert claim(layout(tmp_path), name).model.startswith("org/model-1B--")
    assert path.read_text() == text


def test_names_leave_out_what_all_keys_end_with(tmp_path: Path) -> None:
    mine = layout(tmp_path, key_suffix=b"\0\0\0\0")
    key = key_of(1) + bytes(4)
    store = SharedStore(mine, io=make_io("threads"))
    assert write_parts(store, {key: sealed(key, 1)}) == {key: None}
    assert file_of(tmp_path, key_of(1)).is_file()
    assert [entry.key for entry in store.entries()] == [key]
    assert read_part(store, key, PART_BYTES) == (None, bytes(sealed(key, 1)))
    with pytest.raises(ValueError, match="does not end with"):
        mine.path(b"/x", key_of(1) + b"\0\0\0\1")
    store.delete([key])
    wait_until(lambda: not file_of(tmp_path, key_of(1)).exists())
    store.close(WAIT_S)


# -- the janitor

NOW_S = 1_000_000.0


def put(root: Path, number: int, age_s: float, *, rank: int = 0, size: int = 1000, generation: int = 0) -> Path:
    path = file_of(root, key_of(number), rank, generation)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def test_age_removes_whole_records_of_all_ranks_markers_too(tmp_path: Path) -> None:
    old = [put(tmp_path, 1, 5000, rank=rank) for rank in range(3)]
    used = [put(tmp_path, 2, age, rank=rank) for rank, age in enumerate((5000, 100, 5000))]
    marker = layout(tmp_path).marker_directory() / old[0].parents[1].name / old[0].parent.name / old[0].name
    marker.parent.mkdir(parents=True)
    marker.touch()
    os.utime(marker, (NOW_S - 5000, NOW_S - 5000))
    rules = JanitorRules(age_max_s=1000)
    would = sweep(tmp_path, rules, now_s=NOW_S, dry_run=True)
    assert all(path.exists() for path in [*old, marker])
    report = sweep(tmp_path, rules, now_s=NOW_S)
    assert report == would
    assert (report.records, report.files, report.records_removed_by_age, report.bytes_removed, report.bytes_left) == (
        2,
        7,
        1,
        3000,
        3000,
    )
    assert not any(path.exists() for path in [*old, marker])
    assert all(path.exists() for path in used)
    assert sweep(tmp_path, rules, now_s=NOW_S).records_removed_by_age == 0


def test_size_removes_the_least_worth_first_and_leaves_the_young(tmp_path: Path) -> None:
    paths = {number: put(tmp_path, number, 100 * number + 100) for number in range(10)}
    young = put(tmp_path, 50, 10, size=5000)
    # Number 9 is the longest unused and worth a thousand times more.
    worth = {str(paths[9]): 1e-6}
    report = sweep(
        tmp_path, JanitorRules(bytes_max=10_000, low_water=0.9), now_s=NOW_S, value_of=lambda path: worth.get(path, 0.0)
    )
    assert report.records_removed_by_size == 6
    assert {number for number, path in paths.items() if path.exists()} == {0, 1, 2, 9}
    assert young.exists()
    assert report.bytes_left == 9000
    assert sweep(tmp_path, JanitorRules(bytes_max=10_000), now_s=NOW_S).records_removed_by_size == 0


def test_orphans_of_dead_writers_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    part = put(tmp_path, 1, 100_000)
    orphan = part.with_name(part.name + ".tmp-host-1-2")
    fresh = part.with_name(part.name + ".tmp-host-1-3")
    foreign = tmp_path / "notes.txt"
    outside = tmp_path / "elsewhere" / ("ab" * 16 + ".bin")
    outside.parent.mkdir()
    for path, age in ((orphan, 4000), (fresh, 100), (foreign, 1e5), (outside, 1e5)):
        path.write_text("x")
        os.utime(path, (NOW_S - age, NOW_S - age))
    report = sweep(tmp_path, JanitorRules(bytes_max=0), now_s=NOW_S)
    assert report.orphans_removed == 1
    assert not orphan.exists()
    assert not part.exists()
    assert fresh.exists()
    assert foreign.exists()
    assert outside.exists()


@pytest.mark.parametrize(
    "name",
    ["train/rank_0/000.bin", "rank_0/deadbeef.bin", "m/rank_0/auto/abc/de/fedcba98.bin", "m/rank_0/auto/abc/de/abcdef9.bin",
     "m/rank_zero/auto/abc/de/abcdef98.bin", "abc/de/abcdef98.bin", "m/abc.bin.tmp-mine", "m/rank_0/auto/abc/de/abcdef98.bin/abcdef98.bin"],
)  # fmt: skip
def test_the_janitor_touches_nothing_that_is_not_of_the_layout(tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    other.parent.mkdir(parents=True)
    other.write_bytes(b"somebody's weights")
    os.utime(other, (1.0, 1.0))
    report = sweep(tmp_path, JanitorRules(bytes_max=0, age_max_s=1.0, orphan_age_s=1.0), now_s=time.time())
    assert other.exists() and report.files == 0


def test_generations_leave_no_directories_behind(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    write_parts(store, {key_of(n): sealed(key_of(n), n) for n in range(4)})
    store.reset(5)
    write_parts(store, {key_of(n): sealed(key_of(n), n, generation=5) for n in range(4)})
    presence = SharedPresence(layout(tmp_path), ranks=2, clock=time.monotonic, markers=True, generation=5)
    presence.publish([key_of(1)])
    assert presence.close(WAIT_S)
    sweep(tmp_path, JanitorRules(bytes_max=0, grace_s=0.0), now_s=time.time() + 1.0)
    assert not list(tmp_path.rglob("*.bin"))
    assert not list(layout(tmp_path).rank_directory(0, 5).iterdir())
    assert not list(layout(tmp_path).marker_directory(5).iterdir())
    assert file_of(tmp_path, key_of(1)).parent.is_dir()
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1, generation=5)}) == {key_of(1): None}
    assert store.close(WAIT_S)


def test_entries_pass_over_what_others_put_there(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    parts = {key_of(n): sealed(key_of(n), n) for n in range(3)}
    write_parts(store, parts)
    folder = file_of(tmp_path, key_of(1)).parent
    (folder / "abcde.bin").write_text("an odd number of digits")
    (folder / f"{folder.parent.name}{folder.name}aaa.bin").symlink_to(tmp_path / "nowhere")
    (folder.parent / "00").write_text("no directory")
    (folder.parent.parent / "fff").write_text("no directory")
    assert {entry.key for entry in store.entries()} == set(parts)
    assert store.close(WAIT_S)


@pytest.mark.parametrize("levels", [1, 2])
def test_empty_directories_may_be_removed_at_any_time(tmp_path: Path, levels: int) -> None:
    store = open_shared(tmp_path)
    part = sealed(key_of(1), 1)
    for _ in range(3):
        assert write_parts(store, {key_of(1): part}) == {key_of(1): None}
        store.delete([key_of(1)])
        assert store.flush(WAIT_S)
        folder = file_of(tmp_path, key_of(1)).parent
        for _ in range(levels):
            folder.rmdir()
            folder = folder.parent
    assert store.close(WAIT_S)


def test_a_tree_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    write_parts(store, {key_of(1): sealed(key_of(1), 1)})
    shutil.rmtree(tmp_path / "org")
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): PartFailure.IO}
    wait_until(lambda: store.layout.rank_directory(0).is_dir())
    assert write_parts(store, {key_of(1): sealed(key_of(1), 1)}) == {key_of(1): None}
    assert read_part(store, key_of(1), PART_BYTES) == (None, bytes(sealed(key_of(1), 1)))
    assert store.close(WAIT_S)


def test_a_filesystem_that_hangs_does_not_hold_the_end_of_the_process(tmp_path: Path) -> None:
    program = f"""
import os, threading
from pathlib import Path
from tests.tier.disk.test_shared_store import key_of, open_shared, sealed
from kvtier.testing.part_store import read_part, wait_until, write_parts
store = open_shared(Path({str(tmp_path)!r}))
hangs = threading.Event()
os.utime = lambda *arguments: (hangs.set(), threading.Event().wait())
write_parts(store, {{key_of(1): sealed(key_of(1), 1)}})
read_part(store, key_of(1), {PART_BYTES})
assert hangs.wait(20.0)
assert store.close(20.0)
"""
    path = os.pathsep.join(place for place in (os.getcwd(), *sys.path) if place)
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, timeout=WAIT_S, check=True)


def test_janitors_and_engines_at_once_do_no_harm(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    stop = threading.Event()
    errors: list[str] = []
    rules = JanitorRules(bytes_max=20 * PART_BYTES, grace_s=-10.0)

    def clean() -> None:
        while not stop.is_set():
            errors.extend(sweep(tmp_path, rules, now_s=time.time()).errors)

    janitors = [threading.Thread(target=clean) for _ in range(3)]
    for thread in janitors:
        thread.start()
    parts = {key_of(n): sealed(key_of(n), n) for n in range(60)}
    served = missed = 0
    for key, payload in parts.items():
        assert write_parts(store, {key: payload})[key] in (None, PartFailure.IO)
        failure, found = read_part(store, key, payload.nbytes)
        if failure is None:
            assert found == bytes(payload)
            served += 1
        else:
            assert failure is PartFailure.MISSING
            missed += 1
    stop.set()
    for thread in janitors:
        thread.join()
    assert errors == []
    assert served > 0
    assert sweep(tmp_path, rules, now_s=time.time()).bytes_left <= 20 * PART_BYTES
    store.close(WAIT_S)


def test_writers_leave_values_and_readers_renew_the_time_of_use(tmp_path: Path) -> None:
    store = open_shared(tmp_path)
    waiter = Waiter(1)
    store.submit_write([PartWrite(key_of(1), sealed(key_of(1), 1), value_s_per_byte=2.5e-7)], waiter)
    waiter.wait()
    (path,) = tmp_path.rglob("*.bin")
    try:
        os.setxattr(path, b"user.kvtier.probe", b"1")
    except OSError:
        pytest.skip("this filesystem has no extended attributes")

    def value() -> bytes:
        try:
            return os.getxattr(path, b"user.kvtier.value")
        except OSError:
            return b""

    wait_until(lambda: value() == b"2.5e-07")
    os.utime(path, (1000, 1000))
    read_part(store, key_of(1), PART_BYTES)
    wait_until(lambda: path.stat().st_mtime > 1000)
    store.close(WAIT_S)


def test_the_command_reports_and_returns_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    gc.add_arguments(parser)
    path = put(tmp_path, 1, 0)
    os.utime(path, (1000, 1000))
    assert gc.run(parser.parse_args([str(tmp_path), "--age-max-hours", "1", "--dry-run"])) == 0
    assert "would be removed: 1 records, 1,000 bytes" in capsys.readouterr().out
    assert path.exists()
    assert gc.run(parser.parse_args([str(tmp_path), "--bytes-max", "1KB", "--age-max-hours", "1", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["records_removed_by_age"] == 1
    assert not path.exists()
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        gc.run(parser.parse_args([str(tmp_path / "nowhere")]))
    with pytest.raises(ConfigError, match="--bytes-max is 'lots'"):
        gc.run(parser.parse_args([str(tmp_path), "--bytes-max", "lots"]))


WRITER = """
import sys
from pathlib import Path
from tests.tier.disk.test_shared_store import key_of, open_shared, sealed
from kvtier.testing.part_store import Waiter
from kvtier.tier.disk.base import PartWrite
store = open_shared(Path(sys.argv[1]))
print("ready", flush=True)
first = int(sys.argv[2])
while True:
    keys = [key_of(n) for n in range(first, first + 40)]
    waiter = Waiter(40)
    store.submit_write([PartWrite(key, sealed(key, 1)) for key in keys], waiter)
    waiter.wait()
    print(first, flush=True)
    first += 40
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_no_file_that_is_not_whole(tmp_path: Path) -> None:
    acknowledged = 0
    for turn in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(10_000 * turn)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.03 * turn)
        process.kill()
        acknowledged += 40 * process.stdout.read().count(b"\n")
        process.wait()
    store = open_shared(tmp_path)
    entries = list(store.entries())
    assert len(entries) >= acknowledged > 0
    for entry in entries:
        failure, found = read_part(store, entry.key, entry.stored_bytes)
        assert failure is None
        open_slot(found, identity(entry.key), None)
    orphans = [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]
    report = sweep(tmp_path, JanitorRules(), now_s=time.time() + 7200)
    assert report.orphans_removed == len(orphans)
    assert len(list(store.entries())) == len(entries)
    store.close(WAIT_S)
