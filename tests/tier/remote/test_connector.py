"""The connector contract, its MEMORY back end, and a back end of fixed blocks that has no optional feature."""

import asyncio
import inspect
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.base import NoRoomError, RecordLeasedError, StillLeasedError
from kvtier.memory.bytestore import MemoryByteStore
from kvtier.record.errors import RecordLengthError
from kvtier.testing.connector_suite import ConnectorSuite, region_of
from kvtier.tier.remote.connector import (
    Connector,
    ConnectorConfig,
    ConnectorFeature,
    MemoryRegion,
    Regions,
    Status,
    StatusCode,
    StatusError,
    UnsupportedFeatureError,
)
from kvtier.tier.remote.memory import MemoryConnector
from kvtier.tier.remote.registry import connector_class, connector_names, make_connector


class TestMemoryConnector(ConnectorSuite):
    def make_connector(self) -> Connector[Any, Any]:
        return MemoryConnector("suite", capacity_bytes=1 << 20, close_deadline_s=0)


class FixedBlocks(Connector[bytes, memoryview]):
    """A back end as they were before `variable_payload`: blocks of one size, nothing optional."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, bytes] | None = None

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> "FixedBlocks":
        return cls()

    @property
    def name(self) -> str:
        return "FIXED"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature()

    def open(self) -> Status[None]:
        self._blocks = {}
        return Status.ok()

    def close(self) -> Status[None]:
        self._blocks = None
        return Status.ok()

    async def exists(self, key: bytes) -> Status[None]:
        if self._blocks is None:
            return Status.failed(StatusCode.ERROR, "closed")
        return Status.ok() if key in self._blocks else Status.failed(StatusCode.NOT_FOUND)

    async def get(self, key: bytes, mr: Regions) -> Status[int]:
        if self._blocks is None:
            return Status.failed(StatusCode.ERROR, "closed")
        if not isinstance(mr, MemoryRegion):
            return Status.failed(StatusCode.INVALID)
        block = self._blocks.get(key)
        if block is None:
            return Status.failed(StatusCode.NOT_FOUND)
        if len(block) != mr.nbytes:
            return Status.failed(StatusCode.INVALID)
        mr.view[:] = block
        return Status.ok(len(block))

    async def put(self, key: bytes, mr: Regions) -> Status[None]:
        if self._blocks is None:
            return Status.failed(StatusCode.ERROR, "closed")
        if not isinstance(mr, MemoryRegion):
            return Status.failed(StatusCode.INVALID)
        same = self._blocks.setdefault(key, bytes(mr.view)) == mr.view
        return Status.ok() if same else Status.failed(StatusCode.DENIED, "other bytes")

    async def delete(self, key: bytes) -> Status[None]:
        if self._blocks is None:
            return Status.failed(StatusCode.ERROR, "closed")
        return Status.ok() if self._blocks.pop(key, None) is not None else Status.failed(StatusCode.NOT_FOUND)


class TestFixedBlocks(ConnectorSuite):
    def make_connector(self) -> Connector[Any, Any]:
        return FixedBlocks()


class Careless(FixedBlocks):
    """Forgets to compare, and answers mget from the wrong end: the suite must see it."""

    async def put(self, key: bytes, mr: Regions) -> Status[None]:
        assert isinstance(mr, MemoryRegion)
        assert self._blocks is not None
        self._blocks[key] = mr.view  # type: ignore[assignment]
        return Status.ok()


class CarelessSuite(ConnectorSuite):
    def make_connector(self) -> Connector[Any, Any]:
        return Careless()


@pytest.mark.parametrize(
    "test",
    ["test_the_same_block_again_is_ok_and_another_is_denied", "test_a_region_is_its_callers_again_after_the_put"],
)
def test_the_suite_can_fail(test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(CarelessSuite(), test)()


def test_the_interface_is_the_declared_one() -> None:
    declared = {
        "from_envs": ["conn_id", "executor", "kwargs"],
        "open": ["self"],
        "close": ["self"],
        "prefetch": ["self", "keys"],
        "exists": ["self", "key"],
        "get": ["self", "key", "mr"],
        "put": ["self", "key", "mr"],
        "register_slabs": ["self", "slabs"],
        "get_batches": ["self", "keys", "mrs", "batch_size"],
        "mget": ["self", "keys", "mrs"],
        "mput": ["self", "keys", "mrs"],
        "delete": ["self", "key"],
        "get_bytes": ["self", "key"],
        "put_bytes": ["self", "key", "value"],
    }
    for name, parameters in declared.items():
        assert list(inspect.signature(getattr(Connector, name)).parameters) == parameters, name
    for name in ("prefetch", "exists", "get", "put", "mget", "mput", "delete", "get_bytes", "put_bytes"):
        assert inspect.iscoroutinefunction(getattr(Connector, name)), name
    assert ConnectorFeature() == ConnectorFeature(False, False, False, False, False, False)
    with ThreadPoolExecutor(1) as executor:
        config = ConnectorConfig("MEMORY", "kvtier", "0", executor)
    assert (config.block_spec_signature, config.key_builder_signature, config.layout_signature) == ("", "", "")


def test_calling_a_missing_feature_names_it_and_the_connector() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"'FIXED'.*get_bytes"):
        asyncio.run(FixedBlocks().get_bytes(b"key"))
    with pytest.raises(NotImplementedError):
        FixedBlocks().register_slabs([])
    with pytest.raises(NotImplementedError):
        FixedBlocks().get_batches([], [], 1)


def opened(**settings: Any) -> MemoryConnector:
    connector = MemoryConnector("test", **({"capacity_bytes": 100, "close_deadline_s": 0.0} | settings))
    assert connector.open().is_ok()
    return connector


def test_refusals_carry_their_reason() -> None:
    async def work() -> None:
        connector = opened()
        status = await connector.put_bytes(b"large", bytes(101))
        assert status.code is StatusCode.OUT_OF_MEMORY
        assert isinstance(status.error, NoRoomError)
        assert "101" in str(status)
        assert (await connector.put_bytes(b"key", bytes(60))).is_ok()
        owner = connector.owner("engine-1")
        lease = owner.lease(b"key", "load-1")
        assert lease is not None
        status = await connector.delete(b"key")
        assert status.code is StatusCode.DENIED
        assert isinstance(status.error, RecordLeasedError)
        assert (await connector.put_bytes(b"other", bytes(60))).code is StatusCode.OUT_OF_MEMORY
        status = connector.close()
        assert status.code is StatusCode.TIMEOUT
        assert isinstance(status.error, StillLeasedError)
        assert "engine-1" in status.detail
        assert (await connector.get_bytes(b"key")).code is StatusCode.ERROR
        lease.release()
        assert connector.close().is_ok()
        with pytest.raises(StatusError, match="error"):
            (await connector.get_bytes(b"key")).unwrap()

    asyncio.run(work())


def test_a_read_only_region_cannot_be_fetched_into() -> None:
    async def work() -> None:
        connector = opened()
        assert (await connector.put(b"key", region_of(b"value"))).is_ok()
        assert (await connector.get(b"key", MemoryRegion.of(b"value"))).code is StatusCode.INVALID

    asyncio.run(work())


def test_regions_count_bytes_and_must_be_contiguous() -> None:
    assert MemoryRegion(memoryview(bytearray(24)).cast("d")).nbytes == 24
    with pytest.raises(RecordLengthError, match="contiguous"):
        MemoryRegion.of(memoryview(bytearray(10))[::2])


def test_a_connector_opened_again_is_empty() -> None:
    connector = opened()
    asyncio.run(connector.put_bytes(b"key", b"value"))
    assert connector.open().is_ok()
    assert len(connector.store) == 1, "opening what is open changes nothing"
    assert connector.close().is_ok()
    assert connector.open().is_ok()
    assert len(connector.store) == 0


def test_the_registry_finds_connectors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MEMORY" in connector_names()
    assert connector_class("memory") is MemoryConnector
    with pytest.raises(ConfigError, match=r"'etcd'.*MEMORY"):
        connector_class("etcd")
    monkeypatch.setenv("KVTIER_MEMORY_CAPACITY_BYTES", "1234")
    monkeypatch.setenv("KVTIER_MEMORY_EVICTION_POLICY", "LRU")
    with ThreadPoolExecutor(1) as executor:
        connector = make_connector("MEMORY", "id", executor)
        assert isinstance(connector, MemoryConnector)
        connector.open()
        assert isinstance(connector.store, MemoryByteStore)
        assert (connector.store.capacity_bytes, connector.store.policy_name) == (1234, "lru")
        other = make_connector("MEMORY", "id", executor, capacity_bytes=77)
        assert isinstance(other, MemoryConnector)
        other.open()
        assert other.store.capacity_bytes == 77
        monkeypatch.setenv("KVTIER_MEMORY_CAPACITY_BYTES", "1 GB")
        with pytest.raises(ConfigError, match="'1 GB'"):
            make_connector("MEMORY", "id", executor)
        monkeypatch.setenv("KVTIER_MEMORY_CAPACITY_BYTES", "0")
        with pytest.raises(ConfigError, match="capacity_bytes is 0"):
            make_connector("MEMORY", "id", executor)
        monkeypatch.setenv("KVTIER_MEMORY_CAPACITY_BYTES", "1")
        monkeypatch.setenv("KVTIER_MEMORY_EVICTION_POLICY", "mru")
        with pytest.raises(ConfigError, match=r"'mru'.*lru"):
            make_connector("MEMORY", "id", executor)


def test_batches_of_no_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        opened().get_batches([], [], 0)
