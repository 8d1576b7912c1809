"""The conformance suite of connectors: what `kvtier.tier.remote.connector` promises of any back end, as tests.

    class TestMine(ConnectorSuite):
        def make_connector(self):
            return MyConnector(...)

Each test opens and closes a connector of its own and uses keys that no other test uses, so that one server may serve them all. What a
feature flag promises is tested where the flag is up, and where it is down, that it is refused. It needs pytest.
"""

import asyncio
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvtier.tier.remote.connector import Connector, MemoryRegion, StatusCode, UnsupportedFeatureError

_numbers = itertools.count()


def fresh_key() -> bytes:
    """A key that was never used."""
    return b"suite-%s-%06d" % (os.urandom(8).hex().encode(), next(_numbers))


def region_of(value: bytes) -> MemoryRegion:
    """A writable region that holds `value`."""
    return MemoryRegion.of(bytearray(value))


class ConnectorSuite(ABC):
    """Every test runs on one event loop with one open connector."""

    block_bytes = 4096

    @abstractmethod
    def make_connector(self) -> Connector[Any, Any]:
        """A new connector, not yet open, whose blocks have `block_bytes` bytes and whose keys are bytes."""

    def run(self, work: Callable[[Connector[Any, Any]], Awaitable[None]]) -> None:
        """Run `work` with an open connector, and close it."""

        async def with_connector() -> None:
            connector = self.make_connector()
            assert connector.open().is_ok()
            try:
                await work(connector)
            finally:
                connector.close()

        asyncio.run(with_connector())

    def block(self, fill: int) -> bytes:
        """A block of `block_bytes` bytes."""
        return bytes((fill + number) % 256 for number in range(self.block_bytes))

    # -- required ----------------------------------------------------------------------------------------------------------

    def test_it_has_a_name_and_features(self) -> None:
        connector = self.make_connector()
        assert connector.name
        assert isinstance(connector.feature.variable_payload, bool)

    def test_what_was_put_is_got(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            key, value, target = fresh_key(), self.block(1), MemoryRegion.of(bytearray(self.block_bytes))
            assert (await connector.exists(key)).code is StatusCode.NOT_FOUND
            assert (await connector.put(key, region_of(value))).is_ok()
            assert (await connector.exists(key)).is_ok()
            assert (await connector.get(key, target)).unwrap() == self.block_bytes
            assert bytes(target.view) == value

        self.run(work)

    def test_a_missing_key_is_not_found_and_the_region_is_not_touched(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            target = region_of(self.block(9))
            assert (await connector.get(fresh_key(), target)).is_not_found()
            assert bytes(target.view) == self.block(9)
            assert (await connector.delete(fresh_key())).is_not_found()

        self.run(work)

    def test_a_region_is_its_callers_again_after_the_put(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            key, source, target = fresh_key(), region_of(self.block(3)), MemoryRegion.of(bytearray(self.block_bytes))
            assert (await connector.put(key, MemoryRegion.of(source.view.toreadonly()))).is_ok()
            source.view[:] = bytes(self.block_bytes)
            assert (await connector.get(key, target)).is_ok()
            assert bytes(target.view) == self.block(3)

        self.run(work)

    def test_the_same_block_again_is_ok_and_another_is_denied(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            key, target = fresh_key(), MemoryRegion.of(bytearray(self.block_bytes))
            assert (await connector.put(key, region_of(self.block(1)))).is_ok()
            assert (await connector.put(key, region_of(self.block(1)))).is_ok()
            status = await connector.put(key, region_of(self.block(2)))
            assert status.code is StatusCode.DENIED
            assert status.detail
            assert (await connector.get(key, target)).is_ok()
            assert bytes(target.view) == self.block(1)

        self.run(work)

    def test_a_deleted_block_is_gone(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            key = fresh_key()
            assert (await connector.put(key, region_of(self.block(1)))).is_ok()
            assert (await connector.delete(key)).is_ok()
            assert (await connector.exists(key)).is_not_found()
            assert (await connector.put(key, region_of(self.block(2)))).is_ok()

        self.run(work)

    @pytest.mark.parametrize("difference", [-1, 1])
    def test_a_region_of_another_length_is_invalid(self, difference: int) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            key = fresh_key()
            assert (await connector.put(key, region_of(self.block(1)))).is_ok()
            status = await connector.get(key, MemoryRegion.of(bytearray(self.block_bytes + difference)))
            assert status.code is StatusCode.INVALID

        self.run(work)

    def test_many_at_once_keep_apart(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            keys = [fresh_key() for _ in range(20)]
            targets = [MemoryRegion.of(bytearray(self.block_bytes)) for _ in keys]
            puts = await asyncio.gather(
                *(connector.put(key, region_of(self.block(number))) for number, key in enumerate(keys))
            )
            assert all(status.is_ok() for status in puts)
            gets = await asyncio.gather(
                *(connector.get(key, target) for key, target in zip(keys, targets, strict=True))
            )
            assert all(status.is_ok() for status in gets)
            assert [bytes(target.view) for target in targets] == [self.block(number) for number in range(20)]

        self.run(work)

    def test_prefetch_is_a_hint(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            await connector.prefetch([fresh_key(), fresh_key()])

        self.run(work)

    def test_before_open_and_after_close_everything_fails(self) -> None:
        async def work() -> None:
            connector = self.make_connector()
            for _ in range(2):
                for status in (
                    await connector.exists(b"key"),
                    await connector.get(b"key", MemoryRegion.of(bytearray(self.block_bytes))),
                    await connector.put(b"key", region_of(self.block(1))),
                    await connector.delete(b"key"),
                ):
                    assert status.code is StatusCode.ERROR
                    assert status.detail
                assert connector.open().is_ok()
                assert connector.close().is_ok()
                assert connector.close().is_ok()

        asyncio.run(work())

    # -- mput_mget ---------------------------------------------------------------------------------------------------------

    def test_statuses_of_many_are_in_the_order_of_their_keys(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            if not connector.feature.mput_mget:
                with pytest.raises(NotImplementedError):
                    await connector.mget([], [])
                with pytest.raises(NotImplementedError):
                    await connector.mput([], [])
                return
            keys = [fresh_key() for _ in range(5)]
            stored = [0, 2, 4]
            puts = await connector.mput(
                [keys[number] for number in stored], [region_of(self.block(number)) for number in stored]
            )
            assert [status.is_ok() for status in puts] == [True] * 3
            targets = [MemoryRegion.of(bytearray(self.block_bytes)) for _ in keys]
            gets = await connector.mget(keys, targets)
            assert [status.code for status in gets] == [
                StatusCode.OK if number in stored else StatusCode.NOT_FOUND for number in range(5)
            ]
            assert all(bytes(targets[number].view) == self.block(number) for number in stored)

        self.run(work)

    def test_batches_hold_every_pair_once_in_order(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            if not connector.feature.mput_mget:
                return
            keys, regions = [fresh_key() for _ in range(7)], [region_of(self.block(number)) for number in range(7)]
            batches = connector.get_batches(keys, regions, 3)
            assert all(1 <= len(batch) <= 3 for batch in batches)
            assert [pair for batch in batches for pair in batch] == list(zip(keys, regions, strict=True))

        self.run(work)

    # -- gdr ---------------------------------------------------------------------------------------------------------------

    def test_lists_of_regions_need_gdr(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            key, regions = fresh_key(), [region_of(self.block(1)), region_of(self.block(2))]
            if not connector.feature.gdr_put:
                assert (await connector.put(key, regions)).code is StatusCode.INVALID
            if not connector.feature.gdr_get:
                assert (await connector.get(key, regions)).code is StatusCode.INVALID

        self.run(work)

    # -- variable_payload --------------------------------------------------------------------------------------------------

    def test_values_of_any_length(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            if not connector.feature.variable_payload:
                with pytest.raises(UnsupportedFeatureError, match="variable_payload"):
                    await connector.get_bytes(b"key")
                with pytest.raises(UnsupportedFeatureError, match="variable_payload"):
                    await connector.put_bytes(b"key", b"value")
                return
            for length in (0, 1, 4095, 4096, 4097, 100_000):
                key, value = fresh_key(), os.urandom(length)
                assert (await connector.get_bytes(key)).is_not_found()
                assert (await connector.put_bytes(key, value)).is_ok()
                view = (await connector.get_bytes(key)).unwrap()
                assert view.readonly
                assert bytes(view) == value

        self.run(work)

    def test_values_of_any_length_keep_their_bytes(self) -> None:
        async def work(connector: Connector[Any, Any]) -> None:
            if not connector.feature.variable_payload:
                return
            key, value = fresh_key(), bytearray(b"value")
            assert (await connector.put_bytes(key, value)).is_ok()
            value[0] = 0
            assert (await connector.put_bytes(key, b"value")).is_ok()
            assert (await connector.put_bytes(key, b"other")).code is StatusCode.DENIED
            assert bytes((await connector.get_bytes(key)).unwrap()) == b"value"
            assert (await connector.put_bytes(fresh_key(), memoryview(bytes(range(200)))[::-2])).is_ok()

        self.run(work)
