"""The conformance suite of byte stores: what `kvtier.memory.base` promises, as tests.

Subclass it in a module that pytest collects, and say how a store is made:

    class TestMine(ByteStoreSuite):
        def make_store(self, capacity_bytes):
            return MyByteStore(capacity_bytes)

It needs pytest. `kvtier.testing.bytestore_machine` has the state machine for the same contract, which needs Hypothesis.
"""

import array
import gc
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvtier.memory.base import (
    ByteStore,
    ByteStoreError,
    KeyConflictError,
    NoRoomError,
    PutResult,
    RecordLeasedError,
    StillLeasedError,
    StoreClosedError,
)

KEY = b"\x00key"
OTHER = b"\xffother"


def content_of(store: ByteStore, keys: list[bytes]) -> list[bytes]:
    """Which of `keys` are stored, without using them."""
    return [key for key in keys if store.exists(key)]


def fetched(store: ByteStore, key: bytes) -> bytes | None:
    """The value of `key` as bytes, None where it is missed."""
    view = store.get(key)
    return None if view is None else bytes(view)


class ByteStoreSuite(ABC):
    """Every test makes its own store, of the capacity that it needs."""

    @abstractmethod
    def make_store(self, capacity_bytes: int) -> ByteStore:
        """A new, empty store that evicts the value used longest ago first."""

    @pytest.fixture
    def make(self) -> Iterator[Callable[[int], ByteStore]]:
        with ExitStack() as stores:

            def make(capacity_bytes: int) -> ByteStore:
                store = self.make_store(capacity_bytes)
                stores.callback(self._close, store)
                return store

            yield make

    @staticmethod
    def _close(store: ByteStore) -> None:
        try:
            store.close(0)
        except StillLeasedError:
            return

    # -- values ------------------------------------------------------------------------------------------------------------

    def test_what_was_put_is_got(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        assert store.put(KEY, b"value") is PutResult.STORED
        view = store.get(KEY)
        assert view is not None
        assert bytes(view) == b"value"
        assert view.readonly
        assert view.contiguous
        assert (len(store), store.used_bytes, store.capacity_bytes) == (1, 5, 100)
        assert store.exists(KEY)

    def test_what_was_not_put_is_missed(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        assert store.get(KEY) is None
        assert not store.exists(KEY)
        assert not store.delete(KEY)
        with store.owner("reader") as owner:
            assert owner.lease(KEY) is None

    @pytest.mark.parametrize("value_bytes", [0, 1, 99, 100])
    def test_sizes_up_to_the_capacity_are_stored(self, make: Callable[[int], ByteStore], value_bytes: int) -> None:
        store = make(100)
        store.put(KEY, bytes(value_bytes))
        view = store.get(KEY)
        assert view is not None
        assert view.nbytes == store.used_bytes == value_bytes

    def test_a_value_over_the_capacity_is_refused_and_nothing_changes(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, bytes(60))
        with pytest.raises(NoRoomError, match="101"):
            store.put(OTHER, bytes(101))
        assert (len(store), store.used_bytes) == (1, 60)

    def test_many_values_without_length_keep_the_others(self, make: Callable[[int], ByteStore]) -> None:
        store = make(10)
        store.put(KEY, bytes(10))
        for number in range(50):
            store.put(b"empty%d" % number, b"")
        assert store.exists(KEY)
        assert store.used_bytes == 10

    def test_a_key_that_is_not_bytes_is_refused(self, make: Callable[[int], ByteStore]) -> None:
        with pytest.raises(ByteStoreError, match="str"):
            make(10).put("key", b"")  # type: ignore[arg-type]

    def test_the_same_bytes_again_change_nothing(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, bytes(40))
        store.put(OTHER, bytes(40))
        assert store.put(KEY, bytes(40)) is PutResult.UNCHANGED
        assert store.put(KEY, bytearray(40)) is PutResult.UNCHANGED
        assert (len(store), store.used_bytes) == (2, 80)
        store.put(b"third", bytes(40))
        assert content_of(store, [KEY, OTHER, b"third"]) == [OTHER, b"third"], "a repeat is no use of the value"

    @pytest.mark.parametrize("other", [b"valuE", b"valu", b"values", b"", memoryview(b"vAlue")])
    def test_other_bytes_under_a_key_are_refused(self, make: Callable[[int], ByteStore], other: bytes) -> None:
        store = make(100)
        store.put(KEY, b"value")
        with pytest.raises(KeyConflictError):
            store.put(KEY, other)
        assert fetched(store, KEY) == b"value"
        assert store.used_bytes == 5

    def test_values_that_differ_only_at_their_end_conflict(self, make: Callable[[int], ByteStore]) -> None:
        store = make(1 << 20)
        value = bytearray(200_001)
        store.put(KEY, memoryview(bytes(value)))
        assert store.put(KEY, value) is PutResult.UNCHANGED
        value[-1] ^= 1
        with pytest.raises(KeyConflictError):
            store.put(KEY, value)

    def test_a_deleted_key_is_gone_and_may_come_again_with_other_bytes(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")
        view = store.get(KEY)
        assert view is not None
        assert store.delete(KEY)
        assert store.get(KEY) is None
        assert (len(store), store.used_bytes) == (0, 0)
        assert bytes(view) == b"value", "a view that was given stays good"
        assert store.put(KEY, b"other") is PutResult.STORED

    # -- inputs ------------------------------------------------------------------------------------------------------------

    def test_views_count_their_bytes_whatever_their_shape(self, make: Callable[[int], ByteStore]) -> None:
        store = make(1000)
        numbers = array.array("d", range(10))
        store.put(b"typed", memoryview(numbers))
        store.put(b"shaped", memoryview(bytes(range(24))).cast("B", (2, 3, 4)))
        store.put(b"signed", memoryview(bytes(8)).cast("i"))
        assert store.used_bytes == 80 + 24 + 8
        assert fetched(store, b"typed") == numbers.tobytes()
        assert fetched(store, b"shaped") == bytes(range(24))

    def test_writable_inputs_are_copied(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        value = bytearray(b"value")
        store.put(KEY, value)
        store.put(OTHER, memoryview(value))
        value[0] = 0
        assert fetched(store, KEY) == fetched(store, OTHER) == b"value"
        value.extend(b"the store holds no view of it")

    def test_strided_inputs_are_copied_in_their_order(self, make: Callable[[int], ByteStore]) -> None:
        store = make(1000)
        base = memoryview(bytes(range(20)))
        store.put(b"every other", base[::2])
        store.put(b"backwards", base[::-1])
        store.put(b"nothing", base[5:5])
        assert fetched(store, b"every other") == bytes(range(0, 20, 2))
        assert fetched(store, b"backwards") == bytes(range(19, -1, -1))
        assert fetched(store, b"nothing") == b""
        assert store.used_bytes == 30

    def test_fortran_order_and_foreign_byte_order(self, make: Callable[[int], ByteStore]) -> None:
        np = pytest.importorskip("numpy")
        store = make(10_000)
        square = np.arange(12, dtype=np.int32).reshape(3, 4)
        fortran = np.asfortranarray(square)
        fortran.flags.writeable = False
        store.put(b"fortran", memoryview(fortran))
        assert fetched(store, b"fortran") == square.tobytes()
        foreign = square.astype(">i4")
        foreign.flags.writeable = False
        store.put(b"foreign", memoryview(foreign))
        assert fetched(store, b"foreign") == foreign.tobytes()
        for name, empty in (("rows", square[:0]), ("columns", square[:, :0])):
            store.put(name.encode(), memoryview(empty))
            assert fetched(store, name.encode()) == b""
        store.put(b"scalar", memoryview(np.array(7, dtype=np.int64)))
        assert fetched(store, b"scalar") == (7).to_bytes(8, "little")
        store.put(b"reversed", memoryview(square[::-1, ::-1]))
        assert fetched(store, b"reversed") == square[::-1, ::-1].tobytes()

    # -- eviction and leases -----------------------------------------------------------------------------------------------

    def test_the_value_used_longest_ago_goes_first(self, make: Callable[[int], ByteStore]) -> None:
        store = make(30)
        keys = [b"a", b"b", b"c"]
        for key in keys:
            store.put(key, bytes(10))
        store.get(b"a")
        store.exists(b"b")
        store.put(b"d", bytes(10))
        assert content_of(store, [*keys, b"d"]) == [b"a", b"c", b"d"]

    def test_as_many_go_as_must_and_no_more(self, make: Callable[[int], ByteStore]) -> None:
        store = make(50)
        keys = [b"%d" % number for number in range(5)]
        for key in keys:
            store.put(key, bytes(10))
        store.put(b"large", bytes(25))
        assert content_of(store, keys) == keys[3:]
        assert store.used_bytes == 45

    def test_a_leased_value_is_not_evicted(self, make: Callable[[int], ByteStore]) -> None:
        store = make(30)
        for key in (b"a", b"b", b"c"):
            store.put(key, bytes(10))
        with store.owner("reader") as owner:
            owner.lease(b"a")
            for key in (b"b", b"c"):
                store.get(key)
            store.put(b"d", bytes(10))
            assert content_of(store, [b"a", b"b", b"c", b"d"]) == [b"a", b"c", b"d"]

    def test_admission_that_cannot_succeed_changes_nothing(self, make: Callable[[int], ByteStore]) -> None:
        store = make(40)
        keys = [b"a", b"b", b"c", b"d"]
        for key in keys:
            store.put(key, bytes(10))
        with store.owner("reader") as owner:
            owner.lease(b"b")
            owner.lease(b"c")
            with pytest.raises(NoRoomError, match="leases"):
                store.put(b"large", bytes(21))
            assert content_of(store, [*keys, b"large"]) == keys
            assert store.used_bytes == 40
            store.put(b"large", bytes(20))
            assert content_of(store, [*keys, b"large"]) == [b"b", b"c", b"large"]

    def test_a_lease_is_a_use(self, make: Callable[[int], ByteStore]) -> None:
        store = make(20)
        store.put(b"a", bytes(10))
        store.put(b"b", bytes(10))
        with store.owner("reader") as owner:
            owner.lease(b"a")
        store.put(b"c", bytes(10))
        assert content_of(store, [b"a", b"b", b"c"]) == [b"a", b"c"]

    def test_a_leased_value_is_not_deleted_and_the_error_says_who_holds_it(
        self, make: Callable[[int], ByteStore]
    ) -> None:
        store = make(100)
        store.put(KEY, b"value")
        one, two = store.owner("engine-0"), store.owner("engine-1")
        first, second = one.lease(KEY, "load-7"), two.lease(KEY, "load-8")
        assert first is not None
        assert second is not None
        with pytest.raises(RecordLeasedError, match=r"engine-0.*load-7.*engine-1.*load-8") as caught:
            store.delete(KEY)
        assert [(info.owner, info.scope, info.key, info.value_bytes) for info in caught.value.holders] == [
            ("engine-0", "load-7", KEY, 5),
            ("engine-1", "load-8", KEY, 5),
        ]
        first.release()
        with pytest.raises(RecordLeasedError):
            store.delete(KEY)
        second.release()
        assert store.delete(KEY)
        assert bytes(first.view) == b"value"

    def test_a_lease_ends_once(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")
        owner = store.owner("reader")
        first, second = owner.lease(KEY), owner.lease(KEY)
        assert first is not None
        assert second is not None
        first.release()
        first.release()
        assert len(store.leases()) == 1
        with second as lease:
            assert bytes(lease.view) == b"value"
            assert lease.key == KEY
        assert not store.leases()

    def test_a_scope_ends_its_leases_and_no_others(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        for key in (b"a", b"b", b"c"):
            store.put(key, b"value")
        owner, other = store.owner("engine"), store.owner("engine")
        leases = [
            owner.lease(b"a", "load-1"),
            owner.lease(b"b", "load-1"),
            owner.lease(b"c", "load-2"),
            other.lease(b"a", "load-1"),
        ]
        assert owner.release("load-1") == 2
        assert owner.release("load-1") == 0
        assert owner.release("never") == 0
        assert [(info.key, info.scope) for info in store.leases()] == [(b"c", "load-2"), (b"a", "load-1")]
        for lease in leases:
            assert lease is not None
            lease.release()
        assert not store.leases()

    def test_leases_end_with_their_owner(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")
        owner = store.owner("engine")
        owner.lease(KEY)
        owner.lease(KEY, "load-1")
        assert owner.close() == 2
        assert owner.close() == 0
        assert not store.leases()
        with pytest.raises(ByteStoreError, match="engine"):
            owner.lease(KEY)

    def test_leases_end_when_their_owner_is_lost(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")

        def forget() -> None:
            store.owner("crashed").lease(KEY)

        forget()
        gc.collect()
        assert not store.leases()
        assert store.delete(KEY)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def test_a_closed_store_refuses_everything(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")
        view = store.get(KEY)
        assert view is not None
        owner = store.owner("engine")
        store.close(0)
        store.close(0)
        for refused in (
            lambda: store.put(OTHER, b""),
            lambda: store.put(KEY, b"value"),
            lambda: store.get(KEY),
            lambda: store.exists(KEY),
            lambda: store.delete(KEY),
            lambda: store.owner("late"),
            lambda: owner.lease(KEY),
        ):
            with pytest.raises(StoreClosedError):
                refused()
        assert (len(store), store.used_bytes) == (0, 0)
        assert bytes(view) == b"value"
        assert owner.close() == 0

    def test_close_reports_who_holds_what_and_ends_when_they_let_go(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")
        store.put(OTHER, b"")
        owner = store.owner("engine-3")
        lease = owner.lease(KEY, "load-9")
        assert lease is not None
        with pytest.raises(StillLeasedError, match=r"engine-3.*load-9") as caught:
            store.close(0)
        assert [(info.owner, info.scope, info.key) for info in caught.value.holders] == [("engine-3", "load-9", KEY)]
        assert bytes(lease.view) == b"value"
        assert store.used_bytes == 5
        with pytest.raises(StoreClosedError):
            store.get(KEY)
        lease.release()
        assert (len(store), store.used_bytes) == (0, 0)
        store.close(0)

    def test_close_waits_for_a_lease_to_end(self, make: Callable[[int], ByteStore]) -> None:
        store = make(100)
        store.put(KEY, b"value")
        lease = store.owner("engine").lease(KEY)
        assert lease is not None
        ended: list[str] = []

        def close() -> None:
            store.close(60)
            ended.append("closed")

        thread = threading.Thread(target=close)
        thread.start()
        while True:  # until the closing has begun
            try:
                store.exists(KEY)
            except StoreClosedError:
                break
        assert not ended
        lease.release()
        thread.join(60)
        assert ended == ["closed"]

    # -- threads -----------------------------------------------------------------------------------------------------------

    def test_threads_see_only_whole_values_and_leave_a_sound_store(self, make: Callable[[int], ByteStore]) -> None:
        store = make(600)
        failures: list[BaseException] = []
        keys = [b"%d" % number for number in range(16)]
        values = {key: key * (10 + 7 * number) for number, key in enumerate(keys)}

        def work(seed: int) -> None:
            draw = random.Random(seed)
            try:
                with store.owner(f"thread-{seed}") as owner:
                    for step in range(400):
                        self._one_step(store, owner.lease, draw, keys, values, f"scope-{step % 3}")
                        if step % 5 == 4:
                            owner.release(f"scope-{draw.randrange(3)}")
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures
        assert not store.leases()
        present = content_of(store, keys)
        assert len(store) == len(present)
        assert store.used_bytes == sum(len(values[key]) for key in present) <= 600

    def test_close_while_threads_work_ends_them_and_leaves_nothing(self, make: Callable[[int], ByteStore]) -> None:
        keys = [b"%d" % number for number in range(8)]
        values = {key: key * 20 for key in keys}
        failures: list[BaseException] = []

        def work(store: ByteStore, seed: int) -> None:
            draw = random.Random(seed)
            try:
                with store.owner(f"thread-{seed}") as owner:
                    while True:
                        self._one_step(store, owner.lease, draw, keys, values, f"scope-{draw.randrange(3)}")
                        owner.release(f"scope-{draw.randrange(3)}")
            except StoreClosedError:
                return
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
                failures.append(error)

        def close(store: ByteStore) -> None:
            try:
                store.close(60)
            except BaseException as error:  # noqa: BLE001 - as above
                failures.append(error)

        for run in range(5):
            store = make(100)
            threads = [threading.Thread(target=work, args=(store, 10 * run + number)) for number in range(3)]
            threads += [threading.Thread(target=close, args=(store,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not any(thread.is_alive() for thread in threads)
            assert not failures
            assert (len(store), store.used_bytes, len(store.leases())) == (0, 0, 0)

    @staticmethod
    def _one_step(
        store: ByteStore,
        lease: Callable[..., object],
        draw: random.Random,
        keys: list[bytes],
        values: dict[bytes, bytes],
        scope: str,
    ) -> None:
        key = draw.choice(keys)
        try:
            match draw.randrange(4):
                case 0:
                    store.put(key, values[key] if draw.random() < 0.5 else bytearray(values[key]))
                case 1:
                    view = store.get(key)
                    assert view is None or view == values[key]
                case 2:
                    held = lease(key, scope)
                    assert held is None or (held.view == values[key] and store.exists(key))  # type: ignore[attr-defined]
                case _:
                    store.delete(key)
        except (NoRoomError, RecordLeasedError):
            pass
        assert store.used_bytes <= store.capacity_bytes
