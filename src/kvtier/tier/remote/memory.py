"""The MEMORY back end: a connector over a byte store in this process. Volatile, shared with nobody."""

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.memory.base import (
    ByteStoreError,
    Key,
    KeyConflictError,
    LeaseOwner,
    NoRoomError,
    RecordLeasedError,
    StillLeasedError,
)
from kvtier.memory.bytestore import MemoryByteStore
from kvtier.record.envelope import Buffer
from kvtier.tier.remote.connector import Connector, ConnectorFeature, MemoryRegion, Regions, Status, StatusCode

CAPACITY_ENV: Final = "KVTIER_MEMORY_CAPACITY_BYTES"
POLICY_ENV: Final = "KVTIER_MEMORY_EVICTION_POLICY"
CAPACITY_BYTES_DEFAULT: Final = 1 << 30
CLOSE_DEADLINE_S_DEFAULT: Final = 5.0


class MemoryConnector(Connector[Key, memoryview]):
    """Serves a `MemoryByteStore` of its own, made by `open`.

    Values given as `bytes` or as read-only contiguous views are borrowed, see `kvtier.memory.bytestore`. Copies run on the caller's
    thread: they hold the GIL wherever they run, so that the executor would gain nothing.

    Args:
        conn_id: its name in reports.
        capacity_bytes: bound of the stored bytes.
        policy: name of the eviction policy.
        close_deadline_s: how long `close` waits for leases to end, in seconds.

    Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        conn_id: str,
        *,
        capacity_bytes: int = CAPACITY_BYTES_DEFAULT,
        policy: str = "lru",
        close_deadline_s: float = CLOSE_DEADLINE_S_DEFAULT,
    ) -> None:
        self._conn_id = conn_id
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._close_deadline_s = close_deadline_s
        self._store: MemoryByteStore | None = None
        MemoryByteStore(capacity_bytes, policy=policy)  # refuses what `open` would fail on

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> "MemoryConnector":
        """Reads KVTIER_MEMORY_CAPACITY_BYTES and KVTIER_MEMORY_EVICTION_POLICY; `kwargs`, as the constructor's, win."""
        settings: dict[str, Any] = {}
        if (text := os.environ.get(CAPACITY_ENV)) is not None:
            try:
                settings["capacity_bytes"] = int(text)
            except ValueError as error:
                raise ConfigError(f"{CAPACITY_ENV} is {text!r}: give a whole number of bytes") from error
        if (text := os.environ.get(POLICY_ENV)) is not None:
            settings["policy"] = text
        return cls(conn_id, **(settings | kwargs))

    @property
    def name(self) -> str:
        return "MEMORY"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True, variable_payload=True)

    @property
    def store(self) -> MemoryByteStore:
        """The store behind an open connector, for its figures. Raises ByteStoreError before `open`."""
        if self._store is None:
            raise ByteStoreError(f"MEMORY connector {self._conn_id!r} is not open: call open() first")
        return self._store

    def open(self) -> Status[None]:
        if self._store is None or self._store.closed:
            self._store = MemoryByteStore(self._capacity_bytes, policy=self._policy)
        return Status.ok()

    def close(self) -> Status[None]:
        if self._store is None:
            return Status.ok()
        try:
            self._store.close(self._close_deadline_s)
        except StillLeasedError as error:
            return Status.failed(StatusCode.TIMEOUT, error=error)
        return Status.ok()

    def owner(self, name: str) -> LeaseOwner:
        """A new owner of leases on the stored values."""
        return self.store.owner(name)

    async def exists(self, key: Key) -> Status[None]:
        try:
            return Status.ok() if self.store.exists(key) else Status.failed(StatusCode.NOT_FOUND)
        except ByteStoreError as error:
            return _status_of(error)

    async def get(self, key: Key, mr: Regions) -> Status[int]:
        return self._get(key, mr)

    async def put(self, key: Key, mr: Regions) -> Status[None]:
        return self._put(key, mr)

    def get_batches(
        self, keys: Sequence[Any], mrs: Sequence[Regions], batch_size: int
    ) -> Sequence[Sequence[tuple[Key, Regions]]]:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: use at least 1")
        pairs = list(zip(keys, mrs, strict=True))
        return [pairs[at : at + batch_size] for at in range(0, len(pairs), batch_size)]

    async def mget(self, keys: Sequence[Key], mrs: Sequence[Regions]) -> Sequence[Status[int]]:
        return [self._get(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    async def mput(self, keys: Sequence[Key], mrs: Sequence[Regions]) -> Sequence[Status[None]]:
        return [self._put(key, mr) for key, mr in zip(keys, mrs, strict=True)]

    async def delete(self, key: Key) -> Status[None]:
        try:
            return Status.ok() if self.store.delete(key) else Status.failed(StatusCode.NOT_FOUND)
        except ByteStoreError as error:
            return _status_of(error)

    async def get_bytes(self, key: Key) -> Status[memoryview]:
        try:
            value = self.store.get(key)
        except ByteStoreError as error:
            return _status_of(error)
        return Status.failed(StatusCode.NOT_FOUND) if value is None else Status.ok(value)

    async def put_bytes(self, key: Key, value: Buffer) -> Status[None]:
        return self._store_value(key, value)

    def _get(self, key: Key, mr: Regions) -> Status[int]:
        if not isinstance(mr, MemoryRegion):
            return _no_gdr("gdr_get")
        try:
            value = self.store.get(key)
        except ByteStoreError as error:
            return _status_of(error)
        if value is None:
            return Status.failed(StatusCode.NOT_FOUND)
        if len(value) != mr.nbytes:
            return Status.failed(
                StatusCode.INVALID, f"the value of {key.hex()} has {len(value)} bytes, the memory region {mr.nbytes}"
            )
        if mr.view.readonly:
            return Status.failed(StatusCode.INVALID, "the memory region is read-only: nothing can be fetched into it")
        mr.view[:] = value
        return Status.ok(len(value))

    def _put(self, key: Key, mr: Regions) -> Status[None]:
        # A region is its caller's again as soon as this returns, so what it holds is copied even where its view is read-only.
        return self._store_value(key, bytes(mr.view)) if isinstance(mr, MemoryRegion) else _no_gdr("gdr_put")

    def _store_value(self, key: Key, value: Buffer) -> Status[None]:
        try:
            self.store.put(key, value)
        except ByteStoreError as error:
            return _status_of(error)
        return Status.ok()


def _no_gdr(feature: str) -> Status[Any]:
    return Status.failed(
        StatusCode.INVALID,
        f"a list of memory regions needs the feature {feature}, which MEMORY does not have: give one region",
    )


def _status_of(error: ByteStoreError) -> Status[Any]:
    match error:
        case KeyConflictError() | RecordLeasedError():
            code = StatusCode.DENIED
        case NoRoomError():
            code = StatusCode.OUT_OF_MEMORY
        case _:
            code = StatusCode.ERROR
    return Status.failed(code, error=error)
