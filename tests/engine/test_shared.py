"""A shared disk beside a TieredStore: what is asked, what is believed of the answers, what others are told."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.engine.shared import SharedDisk
from kvtier.store.moves import CommitParts, DeleteParts, LoadFailed, ReadDone, ResetTier, WriteDone
from kvtier.store.tiered import SHARED_DISK_BYTES, Part, StoreLimits, TieredStore
from kvtier.testing.part_store import WAIT_S, wait_until
from kvtier.tier.disk.presence import SharedPresence
from kvtier.tier.disk.shared_layout import SharedLayout

SLOT = 4096
LIMITS = StoreLimits((SLOT,), 8 * SLOT, SHARED_DISK_BYTES, disk_shared=True)


def keys(*numbers: int) -> list[bytes]:
    return [b"key%05d" % number for number in numbers]


class Rig:
    def __init__(self, root: Path) -> None:
        self.layout = SharedLayout(root, model="m", block_size=16, blocks_per_file=1, dtype="auto")
        # An answer is believed for no longer than it takes to take it.
        self.presence = SharedPresence(self.layout, ranks=1, clock=time.monotonic, present_s=0.0, absent_s=0.0)
        self.store = TieredStore(LIMITS)
        self.disk = SharedDisk(self.store, self.presence)

    def path(self, key: bytes) -> Path:
        return Path(os.fsdecode(self.layout.path(os.fsencode(self.layout.rank_directory(0)), key)))

    def others_store(self, wanted: list[bytes]) -> None:
        for key in wanted:
            self.path(key).parent.mkdir(parents=True, exist_ok=True)
            self.path(key).touch()

    def settled(self, wanted: list[bytes]) -> int:
        self.disk.settle(wanted, 0, 0.0, WAIT_S)
        return self.store.leading_run(wanted).length


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.disk.close(WAIT_S)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 700])
def test_the_leading_run_is_found_however_long(rig: Rig, count: int) -> None:
    rig.others_store(keys(*range(count), *range(count + 1, count + 5)))
    assert rig.settled(keys(*range(count + 5))) == count
    assert rig.settled([]) == 0


def test_what_is_not_known_yet_is_pending_and_what_follows_a_hole_is_stored_again(rig: Rig) -> None:
    rig.others_store(keys(0, 2))
    assert rig.disk.leading_run(keys(0, 1, 2), 0, 0.0) == (0, True)
    assert rig.presence.wait(keys(0, 1, 2), WAIT_S)
    assert rig.disk.leading_run(keys(0, 1, 2), 0, 0.0) == (1, False)
    places = rig.store.begin_store([Part(key, 0) for key in keys(0, 1, 2)], 0.0)
    assert places is not None and [place.key for place in places] == keys(1, 2)


def test_what_lies_in_dram_is_asked_of_nobody(rig: Rig) -> None:
    rig.store.begin_store([Part(key, 0) for key in keys(0)], 0.0)
    rig.store.end_store(keys(0), 0.0)
    assert rig.disk.leading_run(keys(0), 0, 0.0) == (1, False)
    assert rig.presence.questions == 0


@pytest.mark.parametrize("outcome", [LoadFailed(1, {keys(0)[0]: "missing"}, ""), ReadDone(1, {keys(0)[0]: "missing"})])
def test_what_could_not_be_read_is_asked_again(tmp_path: Path, outcome: LoadFailed | ReadDone) -> None:
    rig = Rig(tmp_path)
    rig.presence.note(keys(0)[0], present=True)
    rig.disk.hear(WriteDone(1, {keys(0)[0]: "io"}))
    assert rig.presence.lookup(keys(0)) == [True], "a write that failed says nothing of what is there"
    rig.presence.note(keys(0)[0], present=True)
    rig.disk.hear(outcome)
    assert rig.presence.lookup(keys(0)) == [None]
    rig.disk.close(WAIT_S)


def test_ranks_are_told_what_is_for_them_and_others_the_rest(rig: Rig) -> None:
    actions = [CommitParts(keys(0)), DeleteParts(keys(1)), ResetTier(1, 1)]
    assert rig.disk.carry_out(actions) == actions[1:]
    assert rig.presence.lookup(keys(0, 1)) == [True, False]


def test_a_reset_takes_a_generation_later_than_any_that_was_taken(tmp_path: Path) -> None:
    first, second = Rig(tmp_path), Rig(tmp_path)
    first.others_store(keys(0))
    assert first.settled(keys(0)) == 1
    first.disk.reset(0.0)
    assert first.settled(keys(0)) == 0
    wait_until(lambda: time.time_ns() // 10**6 << 20 > first.store.generation)
    second.disk.reset(0.0)
    assert second.store.generation > first.store.generation
    second.store.reset(0.0, 1 << 70)
    second.disk.reset(0.0)
    assert second.store.generation == (1 << 70) + 1, "whatever the clock says"
    for rig in (first, second):
        rig.disk.close(WAIT_S)


def test_a_filesystem_that_does_not_answer_keeps_nobody_longer_than_the_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    answer = threading.Event()
    rig.presence._exists = lambda path: answer.wait(WAIT_S)
    rig.disk.settle(keys(0), 0, 0.0, 0.01)
    assert rig.store.leading_run(keys(0)).length == 0
    answer.set()
    assert rig.settled(keys(0)) == 1
    assert rig.disk.close(WAIT_S)
