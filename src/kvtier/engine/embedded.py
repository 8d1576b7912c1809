"""kvtier without an engine: both planes in one process, the caller's buffers in the engine's place.

    with kvtier.open(part_bytes=1 << 20, dram_bytes="1GiB", disk_path="/var/cache/kv", namespace={"model": "m"}) as cache:
        cache.put(keys, buffers)
        count = cache.get(keys, buffers)

It is the same TieredStore, DataPlane and part store as in an engine, so what holds here holds there.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import TracebackType

import numpy as np

from kvtier.config import Config, load_config
from kvtier.engine.copying import MemoryCopyEngine
from kvtier.engine.dataplane import DataPlane, staging_bytes_of
from kvtier.engine.layout import GroupLayout, Piece, Region
from kvtier.engine.opening import (
    may_compile,
    open_disk,
    open_presence,
    open_shared,
    open_trace,
    shared_root,
    store_limits,
)
from kvtier.engine.shared import SharedDisk
from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.identity.namespace import Namespace
from kvtier.memory.arena import PAGE_BYTES, Arena, available_memory_bytes, require_memory
from kvtier.observe.requests import ID_BYTES
from kvtier.policy.base import RequestInfo
from kvtier.record.envelope import slot_bytes
from kvtier.store.moves import PartPlace
from kvtier.store.tiered import SHARED_DISK_BYTES, Part, TieredStore
from kvtier.tier.disk.base import PartStore
from kvtier.tier.disk.shared_layout import SharedLayout, claim

# In hexadecimal they make directories and a file's name.
_KEY_BYTES_MIN, _KEY_BYTES_MAX = 3, 64

ByteBuffer = bytes | bytearray | memoryview | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def _shared_layout(config: Config) -> SharedLayout:
    """Names of a library's parts below `shared_storage_path`: one key a file, whatever a key stands for. Raises ConfigError."""
    return SharedLayout(
        shared_root(config),
        model=config.shared_model_name or "library",
        block_size=1,
        blocks_per_file=1,
        dtype="bytes",
    )


class Cache:
    """Parts of one size under keys, in DRAM and on disk. One call at a time is served; others wait for it.

    Args:
        part_bytes: bytes of every part.
        namespace: all that must be equal for bytes to mean the same.
        disk: a part store to use in place of the one that the settings describe; the cache closes it.
        settings: see `kvtier config`. With `shared_storage_path` processes on many nodes use one directory, and keys have 3 to 64 bytes.

    Raises:
        ConfigError, StoreUnavailableError: a setting cannot work, or the disk path cannot be used.
    """

    def __init__(
        self, part_bytes: int, namespace: Mapping[str, object], *, disk: PartStore | None = None, **settings: object
    ) -> None:
        if part_bytes <= 0:
            raise ConfigError(f"part_bytes is {part_bytes}: a part has at least one byte")
        config = load_config(settings, environ=os.environ, extra_source="kvtier.open").config
        self.config = config
        self.part_bytes = part_bytes
        space = Namespace({**namespace, "part_bytes": part_bytes})
        slot = slot_bytes(part_bytes)
        arena_bytes = config.rank_dram_bytes(1) // PAGE_BYTES * PAGE_BYTES
        has_disk = disk is not None or config.has_disk
        staging_bytes = staging_bytes_of(arena_bytes, [slot]) if has_disk else 0
        if arena_bytes < staging_bytes + 2 * slot:
            raise ConfigError(
                f"dram_bytes is {config.dram_bytes:,}: parts take {slot:,} bytes, give at least {staging_bytes + 2 * slot:,}"
            )
        require_memory(arena_bytes, "dram_bytes", available_memory_bytes())
        arena = Arena(arena_bytes)
        layout_of_disk = None
        disk_bytes = config.disk_bytes if has_disk else 0
        if disk is None and config.disk_path is not None:
            disk = open_disk(config, config.disk_path, space, arena)
        elif disk is None and config.shared_storage_path is not None:
            layout_of_disk, disk_bytes = claim(_shared_layout(config), space), SHARED_DISK_BYTES
            disk = open_shared(
                config, layout_of_disk, space, arena, rank=0, group_of=lambda key: 0, payload_bytes=(part_bytes,)
            )
        # Address space as one region of "blocks" of one byte: a block's number is the address of a buffer.
        layout = GroupLayout([Region(base=0, stride_bytes=1, page_bytes=part_bytes)], 1)
        self._plane = DataPlane(
            arena,
            [layout],
            MemoryCopyEngine(compiled=may_compile(config, arena_bytes)),
            disk,
            namespace=space.id,
            slots_bytes=arena_bytes - staging_bytes,
            verify=config.verify_checksums,
            load_deadline_s=config.load_deadline_s,
        )
        limits = store_limits(
            config,
            slot_bytes=(slot,),
            arena_bytes=self._plane.slots_bytes,
            disk_bytes=disk_bytes,
        )
        self.store = TieredStore(limits, generation=self._plane.generation)
        self._shared: SharedDisk | None = None
        if layout_of_disk is not None:
            presence = open_presence(
                config, layout_of_disk, ranks=1, generation=self._plane.generation, clock=time.monotonic
            )
            self._shared = SharedDisk(self.store, presence)
        elif disk is not None:
            found, depths = disk.keys_and_depths()
            self.store.fill_many_from_disk(found, [0] * len(found), depths, time.monotonic())
        self._lock = threading.Lock()
        self._next_job = 0
        self._at_end: dict[int, Callable[[], None]] = {}
        self._closed = False
        try:
            self._trace = open_trace(config, 1, time.monotonic())
        except BaseException:
            if self._shared is not None:
                self._shared.close(0.0)
            self._plane.close(0.0)
            raise

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are there."""
        with self._lock:
            self._step()
            self._settle(keys)
            return self.store.leading_run(keys).length

    def put(self, keys: Sequence[bytes], buffers: Sequence[ByteBuffer], *, depths_tokens: Sequence[int] = ()) -> int:
        """Store `buffers` of `part_bytes` bytes each under `keys`; returns how many of them are there now.

        The bytes are copied before it returns, and written to disk behind the caller's back. Same key, same bytes: a key that
        is there already is left as it is.
        """
        addresses = [self._address(buffer, writable=False) for buffer in buffers]
        self._check(keys, buffers)
        depths = depths_tokens or range(1, len(keys) + 1)
        parents = [None, *keys[:-1]]
        wanted = [Part(*part) for part in zip(keys, [0] * len(keys), depths, parents, strict=True)]
        with self._lock:
            self._step()
            self._settle(keys)
            end_s = time.monotonic() + self.config.write_deadline_s
            # Where slots are all being written to disk, room comes with the next write that ends.
            while (places := self.store.begin_store(wanted, time.monotonic())) is None and time.monotonic() < end_s:
                self._plane.wait_for_news(max(0.0, end_s - time.monotonic()))
                self._step()
            if places:
                address_of = dict(zip(keys, addresses, strict=True))
                job = self._submit_store(places, [address_of[place.key] for place in places])
                self._wait(job, lambda: self.store.end_store([place.key for place in places], time.monotonic()))
                self._step()
            return sum(self.store.leading_run([key]).length for key in keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[ByteBuffer]) -> int:
        """Fill `buffers` with the parts under `keys`, from the first on; returns how many are whole.

        What lies in a buffer after those is undefined. A part that turns out to be lost or wrong is a miss, and ends the prefix.
        """
        addresses = [self._address(buffer, writable=True) for buffer in buffers]
        self._check(keys, buffers)
        with self._lock:
            self._step()
            first = True
            self._settle(keys)
            while True:
                run = self.store.leading_run(keys)
                if first:
                    self.store.request(RequestInfo(keys, run.length), time.monotonic())
                    self._record(keys)
                    first = False
                if not run.length:
                    return 0
                if self._load(keys[: run.length], addresses):
                    return run.length
                if self.store.leading_run(keys).length >= run.length:
                    # Nothing was lost: a deadline passed or a copy failed, and trying again would try the same.
                    return 0

    def reset(self) -> None:
        """Forget everything, for good: once this returns, a restart does not bring it back either.

        Raises StoreUnavailableError where the disk has not confirmed that within `write_deadline_s`; in this process it is gone all the same.
        """
        with self._lock:
            if self._shared is not None:
                self._shared.reset(time.monotonic())
            else:
                self.store.reset(time.monotonic())
            end_s = time.monotonic() + self.config.write_deadline_s
            self._step()
            while self.store.resetting():
                if time.monotonic() >= end_s:
                    raise StoreUnavailableError(
                        f"the reset is in force, but disk {self.config.disk_path or self.config.shared_storage_path} has not confirmed it within write_deadline_s: look at the disk"
                    )
                self._plane.wait_for_news(max(0.0, end_s - time.monotonic()))
                self._step()

    def flush(self, deadline_s: float) -> bool:
        """Wait until what was put is on disk, at most `deadline_s` seconds. True if it is, or was found not to fit."""
        with self._lock:
            return self._flush(deadline_s)

    def close(self) -> bool:
        """Flush, as long as `close_deadline_s` allows, and let go of everything. True if all was published."""
        with self._lock:
            if self._closed:
                return True
            flushed = self._flush(self.config.close_deadline_s)
            self._closed = True
            if self._trace is not None:
                self._trace.close(self.config.close_deadline_s)
            if self._shared is not None:
                self._shared.close(self.config.close_deadline_s)
            return self._plane.close(self.config.close_deadline_s) and flushed

    def __enter__(self) -> "Cache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    def _settle(self, keys: Sequence[bytes]) -> None:
        """Know what a shared disk has of `keys`, as far as it says so within `lookup_deadline_s`."""
        if self._shared is not None:
            for key in keys:
                if not _KEY_BYTES_MIN <= len(key) <= _KEY_BYTES_MAX:
                    raise ValueError(
                        f"a key has {len(key)} bytes, and names a file on a shared filesystem: use {_KEY_BYTES_MIN} to {_KEY_BYTES_MAX} bytes, or its hash"
                    )
            self._shared.settle(keys, 0, time.monotonic(), self.config.lookup_deadline_s)

    def _flush(self, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        self._step()
        while (self._at_end or not self.store.settled()) and time.monotonic() < end_s:
            self._plane.wait_for_news(max(0.0, end_s - time.monotonic()))
            self._step()
        return self.store.settled() and not self._at_end

    def _record(self, keys: Sequence[bytes]) -> None:
        """A call of `get` is a request of one token a key. Keys here may be anything, so that their hashes go into the trace."""
        if self._trace is not None and keys:
            self._next_job += 1
            hashes = [blake2b(key, digest_size=ID_BYTES).digest() for key in keys]
            self._trace.arrived(str(self._next_job), hashes, len(keys), time.monotonic())
            self._trace.answered(str(self._next_job), 0)

    @staticmethod
    def _check(keys: Sequence[bytes], buffers: Sequence[ByteBuffer]) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: pass one buffer for each key")
        for key in keys:
            if not isinstance(key, bytes):
                raise ValueError(f"key {key!r} is no bytes: pass bytes")

    def _address(self, buffer: ByteBuffer, *, writable: bool) -> int:
        array = np.frombuffer(buffer, dtype=np.uint8)
        if array.nbytes != self.part_bytes:
            raise ValueError(f"a buffer has {array.nbytes} bytes, and parts here have {self.part_bytes}")
        if writable and not array.flags.writeable:
            raise ValueError("a buffer to be filled is read-only: pass a bytearray, or a writable array")
        return array.ctypes.data

    def _piece(self, addresses: Sequence[int], places: Sequence[int]) -> list[Piece]:
        return [Piece(0, tuple(places), np.array(addresses, dtype=np.int64), 0)]

    def _load(self, keys: Sequence[bytes], addresses: Sequence[int]) -> bool:
        self._next_job += 1
        owner = str(self._next_job)
        # A key that is wanted twice is one part, copied to two places.
        place_of = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        wanted = [Part(key, 0, place + 1) for key, place in place_of.items()]
        plan = self.store.begin_load(wanted, owner, time.monotonic())
        piece = self._piece(addresses[: len(keys)], [place_of[key] for key in keys])
        self._plane.submit_load(self._next_job, plan.load_id, plan.parts, piece)
        went_well: list[bool] = []
        self._wait(self._next_job, lambda: went_well.append(self.store.end_load(owner, time.monotonic())))
        self._step()
        return went_well == [True]

    def _submit_store(self, places: Sequence[PartPlace], addresses: Sequence[int]) -> int:
        self._next_job += 1
        self._plane.submit_store(self._next_job, places, self._piece(addresses, range(len(places))))
        return self._next_job

    def _step(self) -> None:
        """One turn between the planes, as an engine makes one a step."""
        if self._closed:
            raise StoreUnavailableError("the cache is closed: open another one")
        now_s = time.monotonic()
        results, outcomes = self._plane.poll()
        for outcome in outcomes:
            self.store.apply(outcome, now_s)
            if self._shared is not None:
                self._shared.hear(outcome)
        for result in results:
            at_end = self._at_end.pop(result.job_id, None)
            if at_end is not None:
                at_end()
        self.store.tick(now_s)
        actions = self.store.take_actions()
        self._plane.act(actions if self._shared is None else self._shared.carry_out(actions))

    def _wait(self, job: int, at_end: Callable[[], None]) -> None:
        """Call `at_end` when the job has ended, now or, where the caller is interrupted, in a later step."""
        self._at_end[job] = at_end
        try:
            while job in self._at_end:
                self._plane.wait_for_news(1.0)
                self._step()
        except BaseException:
            # The buffers are the caller's again: nothing may be copied from or to them after this.
            self._plane.wait({job}, 0.0)
            raise
