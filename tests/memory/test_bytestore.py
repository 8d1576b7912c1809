"""The MEMORY byte store: the shipped suite and state machine, and what only it promises."""

import gc
import os
import signal
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.errors import ConfigError
from kvtier.memory.base import (
    ByteStore,
    ByteStoreError,
    KeyConflictError,
    LeaseOwner,
    NoRoomError,
    PutResult,
    StillLeasedError,
    StoreClosedError,
)
from kvtier.memory.bytestore import MemoryByteStore, same_bytes, take_value
from kvtier.policy.registry import policy_names
from kvtier.testing.bytestore_machine import bytestore_machine
from kvtier.testing.bytestore_suite import ByteStoreSuite


class TestMemory(ByteStoreSuite):
    def make_store(self, capacity_bytes: int) -> ByteStore:
        return MemoryByteStore(capacity_bytes)


TestMemoryMachine = bytestore_machine(MemoryByteStore).TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_the_machine_for_longer() -> None:
    run_state_machine_as_test(
        bytestore_machine(MemoryByteStore), settings=settings(max_examples=400, stateful_step_count=50, deadline=None)
    )


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_contiguous_read_only_views_are_borrowed_and_the_rest_is_copied() -> None:
    array = np.arange(1000, dtype=np.float64)
    array.flags.writeable = False
    taken = take_value(memoryview(array))
    assert isinstance(taken, memoryview)
    assert np.shares_memory(np.frombuffer(taken, np.uint8), array)
    value = b"value"
    assert take_value(value) is value
    for copied in (
        bytearray(b"x"),
        memoryview(bytearray(b"x")),
        memoryview(value)[::2],
        memoryview(np.asfortranarray(np.ones((3, 4)))),
    ):
        assert type(take_value(copied)) is bytes


def test_a_borrowed_view_is_the_owners_to_keep_unchanged() -> None:
    """Read-only says only that the store cannot write there: this is the documented hazard, not a promise."""
    behind = bytearray(b"value")
    store = MemoryByteStore(100)
    store.put(b"key", memoryview(behind).toreadonly())
    behind[0] = ord("V")
    assert store.get(b"key") == b"Value"
    with pytest.raises(BufferError):
        behind.extend(b"x")


@pytest.mark.parametrize("policy", policy_names())
def test_every_registered_policy_serves(policy: str) -> None:
    store = MemoryByteStore(1000, policy=policy.upper())
    assert store.policy_name == policy
    for number in range(500):
        store.put(b"%d" % number, bytes(number % 50))
        store.get(b"%d" % (number // 2))
        if number % 7 == 0:
            store.delete(b"%d" % (number - 1))
        assert store.used_bytes <= 1000
        assert len(store._policy) == len(store)
    with store.owner("reader") as owner:
        for number in range(500):
            owner.lease(b"%d" % number)
        if store.used_bytes > 500:
            with pytest.raises(NoRoomError):
                store.put(b"large", bytes(501))
    assert store.put(b"large", bytes(1000)) is PutResult.STORED
    assert store.stats().evicted > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"capacity_bytes": -5}, "-5"),
        ({"capacity_bytes": 1, "records_max": 0}, "records_max"),
        ({"capacity_bytes": 1, "policy": "mru"}, "'mru'.*lru"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MemoryByteStore(**settings)


def test_records_max_bounds_values_without_length() -> None:
    store = MemoryByteStore(10, records_max=3)
    for number in range(5):
        store.put(b"%d" % number, b"")
    assert [number for number in range(5) if store.exists(b"%d" % number)] == [2, 3, 4]
    with store.owner("reader") as owner:
        for number in (2, 3, 4):
            owner.lease(b"%d" % number)
        with pytest.raises(NoRoomError):
            store.put(b"5", b"")
        assert len(store) == 3


def test_ages_of_leases_and_the_deadline_of_close_are_the_clocks() -> None:
    clock = Clock()
    store = MemoryByteStore(10, clock_s=clock)
    store.put(b"key", b"value")
    owner = store.owner("engine")
    owner.lease(b"key", "load")
    clock.now_s += 2.5
    assert [info.held_s for info in store.leases()] == [2.5]
    assert str(store.leases()[0]) == "'engine' holds 6b6579 (5 bytes, 2.500 s) in scope 'load'"

    def ticking() -> Iterator[float]:
        while True:
            clock.now_s += 10
            yield clock.now_s

    ticks = ticking()
    store._clock_s = lambda: next(ticks)
    with pytest.raises(StillLeasedError, match="within 5 s"):
        store.close(5)


def test_close_names_a_few_of_many_holders() -> None:
    store = MemoryByteStore(100)
    store.put(b"key", b"value")
    owner = store.owner("engine")
    for number in range(20):
        owner.lease(b"key", f"load-{number}")
    with pytest.raises(StillLeasedError, match=r"load-7.*and 12 more") as caught:
        store.close(0)
    assert len(caught.value.holders) == 20


def test_a_lost_owner_lets_close_end() -> None:
    store = MemoryByteStore(100)
    store.put(b"key", b"value")
    owners = [store.owner("crashed")]
    owners[0].lease(b"key")
    thread = threading.Thread(target=store.close, args=(60,))
    thread.start()
    while not store.closed:
        pass
    owners.clear()
    thread.join(60)
    assert not thread.is_alive()
    assert len(store) == 0


def test_stats_count_what_happened() -> None:
    store = MemoryByteStore(20)
    store.put(b"a", bytes(10))
    store.put(b"a", bytes(10))
    store.put(b"b", bytes(10))
    store.get(b"a")
    store.get(b"z")
    store.put(b"c", bytes(5))
    with pytest.raises(NoRoomError):
        store.put(b"d", bytes(21))
    store.delete(b"c")
    with store.owner("reader") as owner:
        owner.lease(b"a")
        owner.lease(b"a")
        stats = store.stats()
    assert (stats.records, stats.used_bytes, stats.leased_records, stats.leased_bytes) == (1, 10, 1, 10)
    assert (stats.hits, stats.misses, stats.stored, stats.unchanged) == (3, 1, 3, 1)
    assert (stats.evicted, stats.deleted, stats.conflicts, stats.no_room) == (1, 1, 0, 1)


def test_same_bytes() -> None:
    long = bytes(range(256)) * 1000
    assert same_bytes(long, memoryview(long))
    assert same_bytes(memoryview(long), memoryview(bytearray(long)))
    assert not same_bytes(memoryview(long), long[:-1])
    assert not same_bytes(memoryview(long), long[:-1] + b"\0")


def test_what_the_capacity_leaves_out_is_what_is_documented() -> None:
    """About 400 bytes a record, beside the value: see docs/formats.md."""
    store = MemoryByteStore(1 << 30)
    records = 10_000
    keys = [number.to_bytes(32, "little") for number in range(records)]
    value = bytes(100)
    tracemalloc.start()
    for key in keys:
        store.put(key, value)
    overhead = tracemalloc.get_traced_memory()[0] / records
    tracemalloc.stop()
    assert 100 < overhead < 500, f"{overhead} bytes a record, Python {sys.version}"


def test_a_put_that_cannot_be_admitted_is_refused_without_a_walk() -> None:
    store = MemoryByteStore(1000)
    owner = store.owner("reader")
    for number in range(100):
        store.put(b"%d" % number, bytes(10))
        owner.lease(b"%d" % number)
    walks = []
    store._policy.candidates = lambda *_, **__: walks.append(1) or iter(())  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(NoRoomError, match="1000 of them, in 100 records, are under 100 leases"):
        store.put(b"more", bytes(1))
    assert not walks


@pytest.mark.slow
def test_a_million_records_behave_like_ten_thousand() -> None:
    def filled(records: int) -> MemoryByteStore:
        store = MemoryByteStore(records)
        for number in range(records):
            store.put(number.to_bytes(8, "little"), b"x")
        return store

    stores = {records: filled(records) for records in (10_000, 1_000_000)}
    best = dict.fromkeys(stores, float("inf"))
    count = 1
    for _ in range(10):
        for records, store in stores.items():
            start = time.thread_time()
            for number in range(count, count + 5000):
                store.put(number.to_bytes(8, "big"), b"x")
            best[records] = min(best[records], time.thread_time() - start)
            count += 5000
            assert len(store) == records
    assert best[1_000_000] < 3 * best[10_000], best


# -- finalizers, which the collector runs anywhere -----------------------------------------------------------------------


def ends(work: Callable[[], object]) -> bool:
    """Whether `work` ends, on a thread of its own: one that waits for itself does not."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    if failures:
        raise failures[0]
    return not thread.is_alive()


def let_go_by_eviction(store: MemoryByteStore) -> None:
    store.put(b"other", bytes(100))


def let_go_by_delete(store: MemoryByteStore) -> None:
    store.delete(b"borrowed")


def let_go_by_close(store: MemoryByteStore) -> None:
    store.close(0)


def let_go_by_the_last_release(store: MemoryByteStore) -> None:
    with store.owner("reader") as owner:
        owner.lease(b"borrowed")
        with pytest.raises(StillLeasedError):
            store.close(0)


@pytest.mark.parametrize("let_go", [let_go_by_eviction, let_go_by_delete, let_go_by_close, let_go_by_the_last_release])
def test_who_lent_a_value_may_ask_the_store_when_it_is_let_go(let_go: Callable[[MemoryByteStore], None]) -> None:
    store = MemoryByteStore(100)
    seen: list[tuple[int, bool]] = []

    def asks() -> None:
        array = np.ones(60, np.uint8)
        array.flags.writeable = False
        weakref.finalize(array, lambda: seen.append((store.used_bytes, bool(store.stats().records))))
        store.put(b"borrowed", array)
        del array
        let_go(store)

    assert ends(asks)
    assert seen == [(100, True) if let_go is let_go_by_eviction else (0, False)]


@pytest.mark.parametrize("how", ["lease", "scope", "owner"])
def test_what_the_collector_finds_may_release_its_leases(how: str) -> None:
    store = MemoryByteStore(1 << 20)
    store.put(b"key", b"value")
    owner = store.owner("engine")

    class Handle:
        def __init__(self, number: int) -> None:
            self.owner = owner if how != "owner" else store.owner("handle")
            self.scope = f"load-{number}"
            self.lease = self.owner.lease(b"key", self.scope)
            self.me = self

        def __del__(self) -> None:
            if how == "lease":
                assert self.lease is not None
                self.lease.release()
            elif how == "scope":
                self.owner.release(self.scope)
            else:
                self.owner.close()

    def load() -> None:
        for number in range(1000):
            Handle(number)
            store.put(b"%d" % number, b"x")
            store.leases()

    threshold = gc.get_threshold()
    gc.set_threshold(3)
    try:
        assert ends(load)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert not store.leases()
    stats = store.stats()
    assert (stats.leased_records, stats.leased_bytes) == (0, 0)
    assert store.delete(b"key")


def test_a_finalizer_within_an_operation_is_refused_what_it_cannot_have() -> None:
    """Half-way through a put nothing else can be asked; before, that waited for itself."""
    store = MemoryByteStore(100)
    refused: list[str] = []

    def in_the_middle(*_: object, **__: object) -> None:
        for ask in (
            lambda: store.get(b"a"),
            lambda: store.put(b"b", b""),
            lambda: store.delete(b"a"),
            lambda: store.exists(b"a"),
            lambda: store.owner("late"),
            store.leases,
            store.stats,
            lambda: store.close(0),
        ):
            with pytest.raises(ByteStoreError, match="finalizer") as caught:
                ask()
            refused.append(str(caught.value))

    store._policy.insert = in_the_middle  # type: ignore[method-assign]
    assert ends(lambda: store.put(b"a", b"value"))
    assert len(refused) == 8
    assert not store.closed


# -- inputs that cannot be meant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["key", bytearray(b"key"), memoryview(bytearray(b"key")), None, [1]], ids=lambda key: type(key).__name__
)
def test_a_key_that_is_not_bytes_is_refused_by_every_operation(key: Any) -> None:
    store = MemoryByteStore(10)
    owner = store.owner("reader")
    for ask in (
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
        lambda: owner.lease(key),
    ):
        with pytest.raises(ByteStoreError, match="a key is bytes"):
            ask()


def test_a_scope_that_is_no_name_is_refused_and_nothing_is_leased() -> None:
    store = MemoryByteStore(10)
    store.put(b"key", b"value")
    with pytest.raises(ByteStoreError, match="scope"):
        store.owner("reader").lease(b"key", ["load"])  # type: ignore[arg-type]
    assert not store.leases()
    assert store.delete(b"key")


@pytest.mark.parametrize("deadline_s", [float("nan"), -1.0])
def test_close_with_a_deadline_that_is_none_does_not_wait(deadline_s: float) -> None:
    store = MemoryByteStore(10)
    store.put(b"key", b"value")
    owner = store.owner("reader")
    owner.lease(b"key")

    def close() -> None:
        with pytest.raises(StillLeasedError):
            store.close(deadline_s)

    assert ends(close)


def test_a_value_over_the_capacity_is_refused_before_it_is_copied() -> None:
    store = MemoryByteStore(100)
    store.put(b"key", b"value")
    huge = memoryview(np.broadcast_to(np.uint8(1), (1 << 50,)))
    with pytest.raises(NoRoomError, match="larger than the whole capacity"):
        store.put(b"huge", huge)
    with pytest.raises(KeyConflictError):
        store.put(b"key", huge)
    stats = store.stats()
    assert (stats.records, stats.used_bytes, stats.no_room, stats.conflicts) == (1, 5, 1, 1)
    store.close(0)
    with pytest.raises(StoreClosedError):
        store.put(b"huge", huge)


# -- interrupts ----------------------------------------------------------------------------------------------------------


def a_store_in_use(policy: str) -> tuple[MemoryByteStore, LeaseOwner]:
    store = MemoryByteStore(50, policy=policy)
    for number in range(5):
        store.put(b"%d" % number, bytes(10))
    owner = store.owner("engine")
    owner.lease(b"0", "load-0")
    owner.lease(b"1", "load-1")
    return store, owner


OPERATIONS: dict[str, Callable[[MemoryByteStore, LeaseOwner], object]] = {
    "put": lambda store, _: store.put(b"large", bytes(25)),
    "get": lambda store, _: store.get(b"2"),
    "delete": lambda store, _: store.delete(b"2"),
    "lease": lambda _, owner: owner.lease(b"2", "load-0"),
    "release": lambda _, owner: owner.release("load-0"),
    "close owner": lambda _, owner: owner.close(),
}


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_interrupted_anywhere_leaves_a_sound_store(operation: str, policy: str) -> None:
    """At each line of the store and its policy in turn."""
    interrupted = 0
    while True:
        store, owner = a_store_in_use(policy)
        left = interrupted

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_name in ("_alone", "_end") or "kvtier" not in frame.f_code.co_filename:
                return interrupt
            if event == "line":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            OPERATIONS[operation](store, owner)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        finally:
            sys.settrace(before)
        stats = store.stats()
        held = {info.key for info in store.leases()}
        assert stats.used_bytes == sum(record.value_bytes for record in store._records.values()) <= 50
        assert {key for key in store._records if store._policy.__contains__(key)} == set(store._records)
        assert len(store._policy) == stats.records
        assert (stats.leased_records, stats.leased_bytes) == (len(held), 10 * len(held))
        assert store.put(b"new", bytes(20)) is PutResult.STORED, "a store that cannot evict is of no use"
        assert held <= set(store._records)
        owner.close()
        assert not store.leases()
        store.close(0)
        assert (len(store), store.used_bytes) == (0, 0)
    assert interrupted > 5


# -- fork ----------------------------------------------------------------------------------------------------------------


def test_a_process_forked_while_threads_work_has_a_sound_copy() -> None:
    """Without care the copy of the lock stays held by a thread that the child does not have."""
    store = MemoryByteStore(10_000)
    stop = threading.Event()

    def churn(number: int) -> None:
        step = 0
        while not stop.is_set():
            store.put(b"%d-%d" % (number, step), bytes(1000))
            step += 1

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    signal.alarm(10)  # a child that waits for itself is ended
                    store.put(b"child", b"value")
                    records = store.stats().records
                    stored_bytes = sum(record.value_bytes for record in store._records.values())
                    code = 0 if (len(store._policy), stored_bytes) == (records, store.used_bytes) else 2
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert not store.exists(b"child")
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
