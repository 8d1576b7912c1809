"""What every part store must do, as a test class: subclass it, give it a store, run it with pytest.

    class TestMyStore(PartStoreSuite):
        def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
            return MyStore(path, capacity_bytes)

`open_store` is called again on the same path after a close: what was published must be there. Parts here are pages of pseudo-random
bytes; a store that looks at envelopes overrides `payload`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.tier.disk.base import Key, PartDone, PartFailure, PartRead, PartStore, PartWrite, Transfer
from kvtier.tier.disk.io import PAGE_BYTES, aligned_buffer

WAIT_S = 30.0


class Waiter:
    """A `done` that remembers results and can be waited for."""

    def __init__(self, expected: int) -> None:
        self.results: list[PartDone] = []
        self._expected = expected
        self._all = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, results: Sequence[PartDone]) -> None:
        with self._lock:
            self.results += results
            if len(self.results) >= self._expected:
                self._all.set()

    def wait(self, wait_s: float = WAIT_S) -> list[PartDone]:
        """All results, in the order they came. Fails if they do not come in time, or too many came."""
        arrived = self._all.wait(wait_s) if self._expected else True
        assert arrived, f"{len(self.results)} of {self._expected} parts ended within {wait_s} s"
        assert len(self.results) == self._expected
        return self.results

    def failures(self) -> dict[Key, PartFailure | None]:
        """Each part's failure by key, once all have ended."""
        return {done.key: done.failure for done in self.wait()}


def pattern(seed: int, length_bytes: int) -> memoryview:
    """Bytes that depend on `seed` alone, in memory aligned to pages."""
    buffer = aligned_buffer(length_bytes)
    state = (seed * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64)
    line = b"".join(((state * (2 * i + 1) + i) % (1 << 64)).to_bytes(8, "little") for i in range(64))
    whole = line * (length_bytes // len(line) + 1)
    buffer[:] = whole[:length_bytes]
    return buffer


def write_parts(store: PartStore, parts: dict[Key, memoryview]) -> dict[Key, PartFailure | None]:
    """Store `parts` and wait. Returns each one's failure."""
    waiter = Waiter(len(parts))
    store.submit_write([PartWrite(key, buffer) for key, buffer in parts.items()], waiter)
    return waiter.failures()


def read_part(store: PartStore, key: Key, length_bytes: int) -> tuple[PartFailure | None, bytes]:
    """Read one part and wait. Returns its failure and what its buffer holds then."""
    buffer = aligned_buffer(length_bytes)
    waiter = Waiter(1)
    store.submit_read([PartRead(key, buffer)], waiter)
    return waiter.wait()[0].failure, bytes(buffer)


class PartStoreSuite:
    """The conformance suite. Sizes are a few pages, so that it runs on anything."""

    part_bytes = 4 * PAGE_BYTES

    def open_store(self, path: Path, capacity_bytes: int) -> PartStore:
        """A store on `path`, new or with what an earlier one published there."""
        raise NotImplementedError

    def payload(self, key: Key, seed: int, length_bytes: int) -> memoryview:
        """The bytes to store under `key`."""
        return pattern(seed, length_bytes)

    def parts(self, count: int, *, first: int = 0, length_bytes: int = 0) -> dict[Key, memoryview]:
        """`count` parts with keys and bytes of their own."""
        keys = [b"%032d" % index for index in range(first, first + count)]
        return {
            key: self.payload(key, first + index + 1, length_bytes or self.part_bytes) for index, key in enumerate(keys)
        }

    def test_what_was_written_is_read_back(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        parts = self.parts(20)
        assert set(write_parts(store, parts).values()) == {None}
        waiter = Waiter(20)
        buffers = {key: aligned_buffer(self.part_bytes) for key in parts}
        store.submit_read([PartRead(key, buffer) for key, buffer in buffers.items()], waiter)
        assert set(waiter.failures().values()) == {None}
        assert all(bytes(buffers[key]) == bytes(parts[key]) for key in parts)
        assert {entry.key: entry.stored_bytes for entry in store.entries()} == dict.fromkeys(parts, self.part_bytes)
        assert store.close(WAIT_S)

    def test_an_unknown_key_is_missing(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 8 * self.part_bytes)
        assert read_part(store, b"n" * 32, self.part_bytes)[0] is PartFailure.MISSING
        store.close(WAIT_S)

    def test_published_parts_survive_a_restart(self, tmp_path: Path) -> None:
        parts = self.parts(12)
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        write_parts(store, parts)
        assert store.close(WAIT_S)
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        assert {entry.key for entry in store.entries()} == set(parts)
        for key, buffer in parts.items():
            assert read_part(store, key, self.part_bytes) == (None, bytes(buffer))
        store.close(WAIT_S)

    def test_the_same_key_again_is_a_success_without_a_second_copy(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 8 * self.part_bytes)
        parts = self.parts(1)
        for _ in range(20):
            assert set(write_parts(store, parts).values()) == {None}
        assert len(list(store.entries())) == 1
        store.close(WAIT_S)

    def test_two_writes_of_one_key_at_a_time_both_succeed(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 4 * self.part_bytes)
        parts = self.parts(1)
        waiters = [Waiter(1) for _ in range(8)]
        for waiter in waiters:
            store.submit_write([PartWrite(key, buffer) for key, buffer in parts.items()], waiter)
        assert [waiter.wait()[0].failure for waiter in waiters] == [None] * 8
        assert len(list(store.entries())) == 1
        store.close(WAIT_S)

    def test_deleted_parts_are_gone_here_and_after_a_restart(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        parts = self.parts(6)
        write_parts(store, parts)
        gone = list(parts)[:3]
        store.delete([*gone, b"never there" + bytes(21)])
        for key in gone:
            assert read_part(store, key, self.part_bytes)[0] is PartFailure.MISSING
        assert store.close(WAIT_S)
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        assert {entry.key for entry in store.entries()} == set(parts) - set(gone)
        store.close(WAIT_S)

    def test_reset_drops_everything_for_good(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        write_parts(store, self.parts(6))
        old = store.generation
        store.reset(old + 3)
        assert store.generation == old + 3
        assert list(store.entries()) == []
        assert read_part(store, b"%032d" % 0, self.part_bytes)[0] is PartFailure.MISSING
        after = self.parts(2, first=100)
        assert set(write_parts(store, after).values()) == {None}
        assert {entry.key for entry in store.entries()} == set(after)
        store.close(WAIT_S)

    def test_what_was_stored_after_a_reset_is_no_later_process_s(self, tmp_path: Path) -> None:
        """Whoever resets may have changed the weights in place: a later start has those of the namespace again."""
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        store.reset(store.generation + 3)
        generation, after = store.generation, self.parts(2, first=100)
        write_parts(store, after)
        store.close(WAIT_S)
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        assert store.generation > generation
        assert list(store.entries()) == []
        assert {read_part(store, key, self.part_bytes)[0] for key in after} == {PartFailure.MISSING}
        generation = store.generation
        write_parts(store, after)
        store.close(WAIT_S)
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        assert store.generation == generation
        assert {entry.key for entry in store.entries()} == set(after), "without a reset all stays"
        store.close(WAIT_S)

    def test_every_part_ends_exactly_once_under_many_threads(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 400 * self.part_bytes)
        waiters: list[Waiter] = []
        guard = threading.Lock()

        def client(index: int) -> None:
            parts = self.parts(30, first=20 * index)  # neighbours share ten keys
            waiter, reads = Waiter(30), Waiter(30)
            store.submit_write([PartWrite(key, buffer) for key, buffer in parts.items()], waiter)
            store.submit_read([PartRead(key, aligned_buffer(self.part_bytes)) for key in parts], reads)
            store.delete(list(parts)[:3])
            with guard:
                waiters.extend((waiter, reads))

        threads = [threading.Thread(target=client, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for waiter in waiters:
            waiter.wait()
        assert store.flush(WAIT_S)
        time.sleep(0)
        assert all(len(waiter.results) == 30 for waiter in waiters)
        store.close(WAIT_S)

    def test_a_callback_that_raises_harms_nobody(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)

        def broken(results: Sequence[PartDone]) -> None:
            raise RuntimeError("a caller's own fault")

        parts = self.parts(4)
        store.submit_write([PartWrite(key, buffer) for key, buffer in parts.items()], broken)
        assert store.flush(WAIT_S)
        assert read_part(store, next(iter(parts)), self.part_bytes)[0] is None
        store.close(WAIT_S)

    def test_a_submit_that_raises_has_taken_nothing(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        parts = self.parts(4)
        holes = memoryview(bytearray(2 * self.part_bytes))[::2]
        said: list[object] = []
        writes = [PartWrite(key, buffer) for key, buffer in parts.items()]
        reads = [PartRead(key, aligned_buffer(self.part_bytes)) for key in parts]

        def raises(submit: Callable[[], object]) -> bool:
            try:
                submit()
            except (ValueError, TypeError, BufferError):
                return True
            return False

        assert raises(lambda: store.submit_write([*writes, PartWrite(b"h" * 32, holes)], said.append))
        assert raises(lambda: store.submit_read([*reads, PartRead(b"h" * 32, holes)], said.append))
        assert store.flush(WAIT_S) and said == []
        assert set(write_parts(store, parts).values()) == {None}
        assert store.close(WAIT_S)

    def test_after_close_everything_ends_as_closed(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        assert store.close(WAIT_S)
        assert store.close(WAIT_S)
        assert set(write_parts(store, self.parts(2)).values()) == {PartFailure.CLOSED}
        assert read_part(store, b"k" * 32, self.part_bytes)[0] is PartFailure.CLOSED

    def test_buffers_of_any_address_work(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        key, payload = b"u" * 32, self.payload(b"u" * 32, 7, self.part_bytes)
        odd = memoryview(bytearray(self.part_bytes + 1))[1:]
        odd[:] = payload
        assert write_parts(store, {key: odd}) == {key: None}
        target = memoryview(bytearray(self.part_bytes + 3))[3:]
        waiter = Waiter(1)
        store.submit_read([PartRead(key, target)], waiter)
        assert waiter.failures() == {key: None}
        assert bytes(target) == bytes(payload)
        store.close(WAIT_S)

    def test_a_buffer_of_another_length_is_refused(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 64 * self.part_bytes)
        parts = self.parts(1)
        write_parts(store, parts)
        key = next(iter(parts))
        assert read_part(store, key, 2 * self.part_bytes)[0] is PartFailure.SHORT
        assert read_part(store, key, self.part_bytes)[0] is None
        store.close(WAIT_S)

    def test_cancel_ends_every_part_once(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path, 256 * self.part_bytes)
        parts = self.parts(128)
        waiter = Waiter(128)
        transfer: Transfer = store.submit_write([PartWrite(key, buffer) for key, buffer in parts.items()], waiter)
        transfer.cancel()
        failures = waiter.failures()
        assert set(failures.values()) <= {None, PartFailure.CANCELLED}
        published = {entry.key for entry in store.entries()}
        assert published == {key for key, failure in failures.items() if failure is None}
        store.close(WAIT_S)


def wait_until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Poll for something that another thread brings about. Fails after `wait_s`."""
    until = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < until, "the awaited condition did not come about"
        time.sleep(0.001)
