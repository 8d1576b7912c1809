"""Records over a connector: encode and store, retrieve and decode, each stage recorded.

A record stands in the remote store under a name made of its whole identity, so that generations, groups and ranks of one key lie side by side; and
what comes back must still say of itself that it is that record. Where it does not, or is damaged, retrieving ends as ERROR with the reason: for the
caller a miss, for the operator a count.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvtier.observe.recorder import OFF, Recorder, RecordingError, Span
from kvtier.record.codecs import RecordCodec
from kvtier.record.envelope import (
    Buffer,
    Identity,
    RecordHead,
    RecordSizes,
    check_identity_writable,
    pack,
    sizes_of,
    unpack,
)
from kvtier.record.errors import RecordError
from kvtier.tier.remote.connector import Connector, Status, StatusCode, UnsupportedFeatureError

_NAME = struct.Struct(">BQII")


def record_name(identity: Identity) -> bytes:
    """The key of a record in a remote store: 17 bytes of lengths and numbers, then namespace and key.

    Raises RecordError for an identity that no record can have, or with a namespace of more than 255 bytes, a group or rank of more than 32 bits.
    """
    check_identity_writable(identity)
    try:
        numbers = _NAME.pack(len(identity.namespace), identity.generation, identity.group, identity.rank)
    except struct.error as error:
        raise RecordError(
            f"group {identity.group}, rank {identity.rank} and a namespace of {len(identity.namespace)} bytes have no name in a remote store: "
            "use at most 2**32 - 1, 2**32 - 1 and 255"
        ) from error
    return numbers + identity.namespace + identity.key


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record ready to be stored: `record` is what is stored. `stage` is the id of the span that made it, None where nothing is recorded."""

    identity: Identity
    record: bytes
    head: RecordHead
    stage: int | None = None

    @property
    def sizes(self) -> RecordSizes:
        """Where its bytes go."""
        return sizes_of(self.head)


@dataclass(frozen=True, slots=True)
class FetchedRecord:
    """Bytes as they came from the store, nothing about them verified."""

    identity: Identity
    record: memoryview
    stage: int | None = None


class RecordChannel:
    """One namespace's records in one remote store.

    Args:
        connector: an open connector that has `variable_payload`.
        codec: the namespace and how its records are encoded.
        recorder: notes every stage as a span, if it is on: encode, store, retrieve, decode, each after the one before it.
        track: the spans' track; the thread's name where it is empty.

    Raises UnsupportedFeatureError for a connector of fixed blocks.
    """

    def __init__(
        self, connector: Connector[bytes, Any], codec: RecordCodec, recorder: Recorder = OFF, track: str = ""
    ) -> None:
        if not connector.feature.variable_payload:
            raise UnsupportedFeatureError(
                f"connector {connector.name!r} has no variable_payload, which records of any length need: use a back end that has it"
            )
        self.connector = connector
        self.codec = codec
        self.recorder = recorder
        self._track = track or None

    def _begin(self, stage: str, identity: Identity, after: int | None = None) -> Span | None:
        """Called only while the recorder is on. A run that is finished meanwhile records nothing more, and ends no work."""
        before: Sequence[int] = () if after is None else (after,)
        with suppress(RecordingError):
            return self.recorder.begin(stage, after=before, track=self._track, key=identity.key.hex())
        return None

    def _end(self, span: Span, **attrs: str) -> None:
        with suppress(RecordingError):
            self.recorder.end(span, **attrs)

    def _fail(self, span: Span | None, error: BaseException) -> None:
        """End a stage that an exception ended: a refusal, a fault, a task that was cancelled at its deadline."""
        if span is not None:
            self._end(span, error=error.what if isinstance(error, RecordError) else type(error).__name__)

    def encode(self, identity: Identity, raw: Buffer) -> EncodedRecord:
        """Encode and pack. Raises RecordError where identity or input do not fit the codec."""
        record_name(identity)  # what has no name need not be encoded
        span = self._begin("encode", identity) if self.recorder.on else None
        try:
            head, payload = self.codec.encode(identity, raw)
            record = pack(head, payload)
        except BaseException as error:
            self._fail(span, error)
            raise
        if span is not None:
            span.raw_bytes, span.stored_bytes = head.raw_bytes, len(record)
            self._end(span, codec=head.codec)
        return EncodedRecord(identity, record, head, None if span is None else span.id)

    async def put(self, encoded: EncodedRecord) -> Status[int | None]:
        """Store it: the connector's status, with the id of the stage where it is recorded."""
        span = self._begin("store", encoded.identity, encoded.stage) if self.recorder.on else None
        try:
            status = await self.connector.put_bytes(record_name(encoded.identity), encoded.record)
        except BaseException as error:
            self._fail(span, error)
            raise
        if span is not None:
            span.raw_bytes, span.stored_bytes = encoded.head.raw_bytes, len(encoded.record)
            span.moved_bytes = len(encoded.record) if status.is_ok() else 0
            self._end(span, status=status.code.value)
        if not status.is_ok():
            return Status.failed(status.code, status.detail, status.error)
        return Status.ok(None if span is None else span.id)

    async def fetch(self, identity: Identity, after: int | None = None) -> Status[FetchedRecord]:
        """The stored bytes of a record, after the stage `after`. Statuses as the connector's `get_bytes`, INVALID for an identity without a name."""
        try:
            name = record_name(identity)
        except RecordError as error:
            return Status.failed(StatusCode.INVALID, error=error)
        span = self._begin("retrieve", identity, after) if self.recorder.on else None
        try:
            status = await self.connector.get_bytes(name)
        except BaseException as error:
            self._fail(span, error)
            raise
        view = status.value
        if span is not None:
            span.stored_bytes = span.moved_bytes = 0 if view is None else len(view)
            self._end(span, status=status.code.value)
        if view is None:
            return Status.failed(status.code, status.detail, status.error)
        return Status.ok(FetchedRecord(identity, view, None if span is None else span.id))

    def decode(self, fetched: FetchedRecord, out: memoryview | None = None) -> memoryview:
        """Verify what was fetched and decode it, into `out` if given. Raises RecordError with what is wrong."""
        span = self._begin("decode", fetched.identity, fetched.stage) if self.recorder.on else None
        try:
            head, payload = self.unpack(fetched)
            raw = self.codec.decode(head, payload, fetched.identity, out)
        except BaseException as error:
            self._fail(span, error)
            raise
        if span is not None:
            span.raw_bytes, span.stored_bytes = raw.nbytes, len(fetched.record)
            self._end(span, codec=head.codec)
        return raw

    def unpack(self, fetched: FetchedRecord) -> tuple[RecordHead, memoryview]:
        """The verified head and payload of what was fetched. Raises RecordError."""
        return unpack(fetched.record, fetched.identity)

    async def store(self, identity: Identity, raw: Buffer) -> Status[RecordSizes]:
        """Encode and store; OK with the record's sizes. Statuses as the connector's, INVALID where it cannot be encoded."""
        try:
            encoded = self.encode(identity, raw)
        except RecordError as error:
            return Status.failed(StatusCode.INVALID, error=error)
        status = await self.put(encoded)
        return Status.ok(encoded.sizes) if status.is_ok() else Status.failed(status.code, status.detail, status.error)

    async def retrieve(self, identity: Identity, out: memoryview | None = None) -> Status[memoryview]:
        """Retrieve and decode; OK with the raw bytes, ERROR where what is stored is not the record asked for or is damaged."""
        fetched = await self.fetch(identity)
        if fetched.value is None:
            return Status.failed(fetched.code, fetched.detail, fetched.error)
        try:
            return Status.ok(self.decode(fetched.value, out))
        except RecordError as error:
            return Status.failed(StatusCode.ERROR, error=error)
