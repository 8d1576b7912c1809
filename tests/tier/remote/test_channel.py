"""Records over a connector: what is recorded, and what is refused."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.memory.base import NoRoomError
from kvtier.observe.recorder import Recorder, problems_of
from kvtier.record.codecs import RecordCodec, make_codec
from kvtier.record.envelope import Buffer, Identity, xxh3
from kvtier.record.errors import (
    RecordChecksumError,
    RecordError,
    RecordGenerationError,
    RecordKeyError,
    RecordMagicError,
    RecordNamespaceError,
)
from kvtier.tier.remote.channel import FetchedRecord, RecordChannel, record_name
from kvtier.tier.remote.connector import ConnectorFeature, Status, StatusCode, UnsupportedFeatureError
from kvtier.tier.remote.memory import MemoryConnector

RAW = bytes(range(256)) * 16


def channel(recorder: Recorder | None = None, capacity_bytes: int = 1 << 20) -> RecordChannel:
    connector = MemoryConnector("test", capacity_bytes=capacity_bytes, close_deadline_s=0)
    connector.open()
    codec = RecordCodec(b"namespace", make_codec("zstd"))
    return RecordChannel(connector, codec, recorder, "lane") if recorder else RecordChannel(connector, codec)


def test_what_was_stored_is_retrieved() -> None:
    async def work() -> None:
        records = channel()
        identity = records.codec.identity(b"key", generation=3, group=1, rank=2)
        assert (await records.retrieve(identity)).is_not_found()
        sizes = (await records.store(identity, RAW)).unwrap()
        assert sizes.raw_bytes == len(RAW)
        assert bytes((await records.retrieve(identity)).unwrap()) == RAW
        target = memoryview(bytearray(len(RAW)))
        assert (await records.retrieve(identity, target)).unwrap() is target
        assert target == RAW
        assert (await records.store(identity, RAW)).is_ok()
        assert (await records.store(identity, RAW[::-1])).code is StatusCode.DENIED
        for other in (replace(identity, generation=4), replace(identity, group=0), replace(identity, rank=0)):
            assert (await records.retrieve(other)).is_not_found(), "each part and generation has a place of its own"

    asyncio.run(work())


def test_what_lies_under_a_name_must_be_that_record() -> None:
    async def work() -> None:
        records = channel()
        identity = records.codec.identity(b"key", generation=3)
        sound = records.encode(identity, RAW).record
        damaged = bytearray(sound)
        damaged[-1] ^= 1
        for number, (stored, error) in enumerate(
            [
                (bytes(damaged), RecordChecksumError),
                (records.encode(replace(identity, key=b"other"), RAW).record, RecordKeyError),
                (records.encode(replace(identity, generation=2), RAW).record, RecordGenerationError),
                (b"something else that is long enough to look at", RecordMagicError),
            ]
        ):
            asked = replace(identity, rank=number)
            await records.connector.put_bytes(record_name(asked), stored)
            status = await records.retrieve(replace(asked, rank=number))
            assert status.code is StatusCode.ERROR
            if error is not RecordMagicError:
                fetched = (await records.fetch(asked)).unwrap()
                with pytest.raises(error):
                    records.decode(replace(fetched, identity=identity))
            else:
                assert isinstance(status.error, error)

    asyncio.run(work())


def test_a_connector_of_fixed_blocks_is_refused() -> None:
    class Fixed(MemoryConnector):
        @property
        def feature(self) -> ConnectorFeature:
            return ConnectorFeature()

    with pytest.raises(UnsupportedFeatureError, match="variable_payload"):
        RecordChannel(Fixed("fixed"), RecordCodec(b"namespace", make_codec("identity")))


def test_refusals_pass_through() -> None:
    async def work() -> None:
        records = channel(capacity_bytes=100)
        status = await records.store(records.codec.identity(b"key"), RAW)
        assert status.code is StatusCode.OUT_OF_MEMORY
        assert isinstance(status.error, NoRoomError)
        status = await records.store(Identity(b"another namespace", b"key"), RAW)
        assert status.code is StatusCode.INVALID
        assert isinstance(status.error, RecordNamespaceError)
        records.connector.close()
        assert (await records.retrieve(records.codec.identity(b"key"))).code is StatusCode.ERROR

    asyncio.run(work())


def test_every_stage_is_recorded_after_the_one_before() -> None:
    async def work() -> None:
        recorder = Recorder()
        records = channel(recorder)
        identity = records.codec.identity(b"key")
        encoded = records.encode(identity, RAW)
        stored = await records.put(encoded)
        fetched = (await records.fetch(identity, stored.value)).unwrap()
        records.decode(fetched)
        missing = await records.fetch(replace(identity, key=b"none"))
        assert missing.is_not_found()
        with pytest.raises(RecordKeyError):
            records.decode(replace(fetched, identity=replace(identity, key=b"other")))
        run = recorder.finish()
        assert problems_of(run) == []
        assert [event.name for event in run.events] == ["encode", "store", "retrieve", "decode", "retrieve", "decode"]
        encode, store, retrieve, decode, miss, refused = run.events
        stored_bytes = encoded.sizes.stored_bytes
        assert [event.raw_bytes for event in run.events] == [4096, 4096, 0, 4096, 0, 0]
        assert [event.stored_bytes for event in run.events] == [stored_bytes] * 4 + [0, 0]
        assert [event.moved_bytes for event in run.events] == [0, stored_bytes, stored_bytes, 0, 0, 0]
        assert (store.after, retrieve.after, decode.after) == ((encode.id,), (store.id,), (retrieve.id,))
        assert miss.attrs["status"] == "not_found"
        assert refused.attrs["error"] == "key"
        assert {event.track for event in run.events} == {"lane"}

    asyncio.run(work())


def test_nothing_is_recorded_while_the_recorder_is_off() -> None:
    recorder = Recorder(on=False)
    records = channel(recorder)
    assert records.encode(records.codec.identity(b"key"), RAW).stage is None
    assert recorder.snapshot().events == ()


identities = st.builds(
    Identity,
    st.binary(max_size=20),
    st.binary(max_size=20),
    st.integers(0, 2**63),
    st.integers(0, 99),
    st.integers(0, 99),
)


@settings(deadline=None)
@given(identities, identities)
def test_names_are_equal_only_for_equal_identities(one: Identity, other: Identity) -> None:
    assert (record_name(one) == record_name(other)) is (one == other)
    shifted = replace(one, namespace=one.namespace + b"x", key=one.key)
    assert record_name(shifted) != record_name(replace(one, key=b"x" + one.key))
    assert xxh3(record_name(one)) == xxh3(record_name(replace(one)))


class FailsAs(MemoryConnector):
    """Raises where a back end should answer, as a bug or a cancelled task does."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("fails")
        self.error = error

    async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
        raise self.error

    async def get_bytes(self, key: bytes) -> Status[memoryview]:
        raise self.error


@pytest.mark.parametrize("error", [OSError("gone"), asyncio.CancelledError()], ids=lambda error: type(error).__name__)
def test_a_stage_that_is_ended_by_an_exception_is_recorded_and_the_run_is_valid(error: BaseException) -> None:
    async def work() -> None:
        recorder = Recorder()
        connector = FailsAs(error)
        connector.open()
        records = RecordChannel(connector, RecordCodec(b"namespace", make_codec("zstd")), recorder)
        identity = records.codec.identity(b"key")
        encoded = records.encode(identity, RAW)
        with pytest.raises(type(error)):
            await records.put(encoded)
        with pytest.raises(type(error)):
            await records.fetch(identity)
        assert (await records.store(replace(identity, namespace=b"other"), RAW)).code is StatusCode.INVALID
        with pytest.raises(TypeError):
            records.encode(identity, "text")  # type: ignore[arg-type]
        fetched = FetchedRecord(identity, memoryview(encoded.record))
        with pytest.raises(TypeError):
            records.decode(fetched, "text")  # type: ignore[arg-type]
        run = recorder.finish()
        assert problems_of(run) == []
        kind = type(error).__name__
        assert [(event.name, event.attrs.get("error")) for event in run.events] == [
            ("encode", None),
            ("store", kind),
            ("retrieve", kind),
            ("encode", "namespace"),
            ("encode", "TypeError"),
            ("decode", "TypeError"),
        ]

    asyncio.run(work())


def test_a_run_that_is_finished_meanwhile_does_not_end_the_work() -> None:
    class Finishes(MemoryConnector):
        async def put_bytes(self, key: bytes, value: Buffer) -> Status[None]:
            recorder.finish()
            return await super().put_bytes(key, value)

    async def work() -> None:
        connector = Finishes("test")
        connector.open()
        records = RecordChannel(connector, RecordCodec(b"namespace", make_codec("zstd")), recorder)
        identity = records.codec.identity(b"key")
        assert (await records.store(identity, RAW)).is_ok()
        assert bytes((await records.retrieve(identity)).unwrap()) == RAW

    recorder = Recorder()
    asyncio.run(work())
    assert recorder.snapshot().open_spans == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": b"n" * 256},
        {"generation": 1 << 64},
        {"generation": -1},
        {"group": 1 << 32},
        {"rank": 1 << 32},
        {"rank": 1.0},
        {"key": "text"},
    ],
    ids=str,
)
def test_an_identity_that_has_no_name_is_invalid(changes: dict[str, Any]) -> None:
    async def work() -> None:
        records = channel()
        records = RecordChannel(
            records.connector, RecordCodec(changes.get("namespace", b"namespace"), make_codec("zstd"))
        )
        identity = replace(records.codec.identity(b"key"), **changes)
        for status in (await records.store(identity, RAW), await records.retrieve(identity)):
            assert status.code is StatusCode.INVALID
            assert next(iter(changes)) in status.detail

    asyncio.run(work())
    with pytest.raises(RecordError):
        record_name(Identity(**({"namespace": b"namespace", "key": b"key"} | changes)))
