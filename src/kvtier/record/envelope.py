"""The envelope: what makes a run of bytes a record that says of itself what it is.

A record is a *head* and a *payload*. The head says whose bytes these are (namespace, key, generation, group, rank),
how they were encoded, how long they are and what they sum to; so a reader needs no index to refuse bytes that are not
those it asked for. `docs/formats.md` has the layout byte by byte.

    head = framing prefix (24 bytes: magic, version, flags, lengths)
         + metadata (MessagePack map)
         + xxh3_64 of all of the head before it (8 bytes)

The same head stands in one of two places:

- *head first* (`pack`, `unpack`): head, zeros up to a multiple of 16 bytes, payload. For byte stores, where a record is one value of any
  length; a payload of numbers is aligned for them wherever the record is.
- *head last* (`seal_slot`, `open_slot`): payload at offset 0 of a slot, head in the slot's last HEAD_BYTES_MAX bytes.
  For arenas and segments, whose payloads must lie aligned for direct I/O and for the copies to the engine. A slot can be
  cut off at its front only by one who knows where it ends, which is what a catalog or a fixed slot size says.

Checks run in one order, cheap and general first, so that the error names the first thing that went wrong: room for a head,
magic, version, the head's own checksum; then identity: key, namespace, generation, part; then lengths; then the payload's
checksum. A flipped bit in the head is thus never reported as another key's record, and another key's sound record is never
reported as corruption.

Two sums are kept: of the payload as stored, checked here, and of the raw bytes, checked after decoding (see
`kvtier.record.codecs`). Where the codec is `identity` both are one number, computed once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from kvtier.record.errors import (
    HeadTooLargeError,
    RecordChecksumError,
    RecordError,
    RecordGenerationError,
    RecordHeadError,
    RecordKeyError,
    RecordLengthError,
    RecordMagicError,
    RecordNamespaceError,
    RecordPartError,
    RecordVersionError,
)

MAGIC: Final = b"\x8bKVTIER\n"
VERSION: Final = 1
HEAD_BYTES_MAX: Final = 512
SLOT_ALIGN_BYTES: Final = 4096
PAYLOAD_ALIGN_BYTES: Final = 16
IDENTITY_CODEC: Final = "identity"

Scalar: TypeAlias = str | int | float | bool
Buffer: TypeAlias = bytes | bytearray | memoryview

_PREFIX = Struct("<8sHHIQ")  # magic, version, flags, metadata bytes, payload bytes
_SUM = Struct("<Q")
FRAMING_BYTES: Final = _PREFIX.size + _SUM.size
_METADATA_BYTES_MAX = HEAD_BYTES_MAX - FRAMING_BYTES
_ZEROS = bytes(SLOT_ALIGN_BYTES)
_NO_PARAMS: Mapping[str, Scalar] = MappingProxyType({})
_COUNT_MAX: Final = (1 << 64) - 1
_SCALARS: Final = frozenset((str, int, float, bool))


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose bytes a record holds.

    Attributes:
        namespace: fingerprint of all that must be equal for bytes to mean the same.
        key: the chunk's key within the namespace.
        generation: epoch of the weights; grows by a reset.
        group: index of the layers that share a block table.
        rank: index of the worker whose bytes these are.
    """

    namespace: bytes
    key: bytes
    generation: int = 0
    group: int = 0
    rank: int = 0


class RecordHead(msgspec.Struct, frozen=True):
    """What a record says of itself. Sums are xxh3_64 with seed 0; lengths are bytes.

    Attributes:
        identity: whose bytes these are.
        raw_bytes: length before encoding.
        payload_bytes: length as stored, without the envelope.
        raw_sum: checksum of the raw bytes.
        payload_sum: checksum of the payload; equal to `raw_sum` where the codec is identity.
        codec: name of the codec that made the payload.
        codec_params: what its decoder must know.
    """

    identity: Identity
    raw_bytes: int
    payload_bytes: int
    raw_sum: int
    payload_sum: int
    codec: str = IDENTITY_CODEC
    codec_params: Mapping[str, Scalar] = {}


@dataclass(frozen=True, slots=True)
class RecordSizes:
    """Where a record's bytes go: `payload_bytes + metadata_bytes + framing_bytes == stored_bytes`, always."""

    raw_bytes: int
    payload_bytes: int
    metadata_bytes: int
    framing_bytes: int
    stored_bytes: int

    @property
    def raw_to_envelope_ratio(self) -> float:
        """Raw bytes for each byte stored, the whole envelope counted."""
        return self.raw_bytes / self.stored_bytes


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Metadata(msgspec.Struct, frozen=True):
    """The head's metadata as it is encoded: a MessagePack map. Fields that a reader does not know are skipped."""

    ns: bytes
    key: bytes
    gen: Count
    group: Count
    rank: Count
    codec: str
    params: dict[str, Scalar]
    raw: Count
    raw_sum: Count
    sum: Count


_encode_metadata = msgspec.msgpack.Encoder(order="deterministic").encode
_decode_metadata = msgspec.msgpack.Decoder(_Metadata).decode


def xxh3(buffer: Buffer) -> int:
    """The project's checksum: xxh3_64, seed 0, of a contiguous buffer. Large ones are summed without the GIL."""
    return xxh3_64_intdigest(buffer)


def byte_view(buffer: Buffer) -> memoryview:
    """`buffer` as one-dimensional bytes, without a copy. Raises RecordLengthError where it is not contiguous."""
    view = memoryview(buffer)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise RecordLengthError(
            f"a view of shape {view.shape} and strides {view.strides} is not contiguous: copy it into contiguous bytes first"
        )
    if view.nbytes == 0:  # a cast refuses shapes that contain a zero
        return memoryview(b"")
    return view.cast("B")


def encode_head(head: RecordHead) -> bytes:
    """The head's bytes, at most HEAD_BYTES_MAX. The same head always gives the same bytes.

    Raises HeadTooLargeError, and RecordError for what could not be read again.
    """
    _check_writable(head)
    who = head.identity
    try:
        metadata = _encode_metadata(
            _Metadata(
                who.namespace,
                who.key,
                who.generation,
                who.group,
                who.rank,
                head.codec,
                dict(head.codec_params),
                head.raw_bytes,
                head.raw_sum,
                head.payload_sum,
            )
        )
    except (OverflowError, UnicodeEncodeError) as error:
        raise RecordError(
            f"codec {head.codec!r} or its parameters {dict(head.codec_params)} cannot be written: {error}"
        ) from error
    if len(metadata) > _METADATA_BYTES_MAX:
        raise HeadTooLargeError(
            f"the metadata of key {who.key.hex()[:64]} takes {len(metadata)} bytes of at most {_METADATA_BYTES_MAX}: "
            f"shorten the key ({len(who.key)} bytes), the namespace ({len(who.namespace)}) or the codec's parameters "
            f"({len(head.codec_params)})"
        )
    body = _PREFIX.pack(MAGIC, VERSION, 0, len(metadata), head.payload_bytes) + metadata
    return body + _SUM.pack(xxh3_64_intdigest(body))


def check_identity_writable(who: Identity) -> None:
    """Raise RecordError, which names the field, for an identity that a head cannot hold: text for bytes, or what is no count."""
    for name, value in (("namespace", who.namespace), ("key", who.key)):
        if type(value) is not bytes:
            raise RecordError(f"{name} of a record is bytes, {value!r} is {type(value).__name__}: encode it first")
    _check_counts({"generation": who.generation, "group": who.group, "rank": who.rank})


def _check_counts(counts: Mapping[str, int]) -> None:
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value <= _COUNT_MAX:
            raise RecordError(f"{name} of a record is a whole number from 0 to 2**64 - 1, {value!r} is none")


def _check_writable(head: RecordHead) -> None:
    """Raise RecordError for a head that no reader could read. Encoding alone would write what decoding refuses."""
    who = head.identity
    generation, group, rank = who.generation, who.group, who.rank
    raw_bytes, payload_bytes, raw_sum, payload_sum = head.raw_bytes, head.payload_bytes, head.raw_sum, head.payload_sum
    # One pass for the sound ones. Joined by "or" the counts are in range exactly if each is.
    if not (
        type(who.key) is type(who.namespace) is bytes
        and type(generation) is type(group) is type(rank) is int
        and type(raw_bytes) is type(payload_bytes) is type(raw_sum) is type(payload_sum) is int
        and 0 <= generation | group | rank | raw_bytes | payload_bytes | raw_sum | payload_sum <= _COUNT_MAX
    ):
        check_identity_writable(who)
        _check_counts(
            {"raw_bytes": raw_bytes, "payload_bytes": payload_bytes, "raw_sum": raw_sum, "payload_sum": payload_sum}
        )
    if type(head.codec) is not str:
        raise RecordError(f"codec of a record is a name, {head.codec!r} is {type(head.codec).__name__}")
    for name, value in head.codec_params.items():
        if type(name) is not str or type(value) not in _SCALARS:
            raise RecordError(
                f"parameter {name!r} of codec {head.codec!r} is {value!r}: only text, numbers and truth values, by name, can be written"
            )


def decode_head(buffer: Buffer) -> RecordHead:
    """The head at the start of `buffer`, which may be longer. Checks room, magic, version and the head's checksum, in this order.

    Raises RecordLengthError, RecordMagicError, RecordVersionError, RecordHeadError.
    """
    return _read_head(byte_view(buffer))[0]


def _read_head(view: memoryview, expected: Identity | None = None) -> tuple[RecordHead, int]:
    """The head at the start of `view`, and the length of its metadata. Its identity is `expected` itself where they are equal."""
    if len(view) < FRAMING_BYTES:
        raise RecordLengthError(
            f"{len(view)} bytes are too few for a record's head, which takes {FRAMING_BYTES} at least"
        )
    magic, version, flags, metadata_bytes, payload_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise RecordMagicError(
            f"the bytes begin with {magic.hex()}, a record with {MAGIC.hex()}: nothing of ours is stored here"
        )
    if version != VERSION:
        raise RecordVersionError(
            f"the record is of format version {version}, this code reads version {VERSION}: drop it or use a newer kvtier"
        )
    end = _PREFIX.size + metadata_bytes
    if metadata_bytes > _METADATA_BYTES_MAX:
        raise RecordHeadError(
            f"the head claims {metadata_bytes} bytes of metadata, at most {_METADATA_BYTES_MAX} are possible: it is damaged"
        )
    if len(view) < end + _SUM.size:
        raise RecordLengthError(
            f"the head takes {end + _SUM.size} bytes and {len(view)} are there: the record was cut short"
        )
    (stored_sum,) = _SUM.unpack_from(view, end)
    found_sum = xxh3_64_intdigest(view[:end])
    if found_sum != stored_sum:
        raise RecordHeadError(f"the head sums to {found_sum:016x} and says {stored_sum:016x}: it is damaged")
    if flags:
        raise RecordVersionError(
            f"the record has flags {flags:#06x}, this code knows none: drop it or use a newer kvtier"
        )
    try:
        meta = _decode_metadata(view[_PREFIX.size : end])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordHeadError(
            f"the head's checksum is right and its metadata is not readable ({error}): its writer was at fault"
        ) from error
    if (
        expected is not None
        and meta.key == expected.key
        and meta.ns == expected.namespace
        and meta.gen == expected.generation
        and meta.group == expected.group
        and meta.rank == expected.rank
    ):
        who = expected
    else:
        who = Identity(meta.ns, meta.key, meta.gen, meta.group, meta.rank)
    head = RecordHead(who, meta.raw, payload_bytes, meta.raw_sum, meta.sum, meta.codec, meta.params)
    return head, metadata_bytes


def check_identity(head: RecordHead, expected: Identity) -> None:
    """Refuse a sound head that is not `expected`'s: key first, then namespace, generation, part."""
    found = head.identity
    if found is expected or found == expected:
        return
    if found.key != expected.key:
        raise RecordKeyError(f"the record is of key {found.key.hex()}, key {expected.key.hex()} was asked for")
    if found.namespace != expected.namespace:
        raise RecordNamespaceError(
            f"the record of key {found.key.hex()} is of namespace {found.namespace.hex()}, {expected.namespace.hex()} was asked for"
        )
    if found.generation != expected.generation:
        raise RecordGenerationError(
            f"the record of key {found.key.hex()} is of generation {found.generation}, {expected.generation} was asked for"
        )
    raise RecordPartError(
        f"the record of key {found.key.hex()} is of group {found.group}, rank {found.rank}; "
        f"group {expected.group}, rank {expected.rank} was asked for"
    )


def _check_payload(head: RecordHead, payload: memoryview) -> None:
    found_sum = xxh3_64_intdigest(payload)
    if found_sum != head.payload_sum:
        raise RecordChecksumError(
            f"the payload of key {head.identity.key.hex()} ({head.payload_bytes} bytes) sums to {found_sum:016x}, "
            f"its head says {head.payload_sum:016x}: it is corrupt"
        )


def _check_lengths(head: RecordHead, payload_bytes: int | None) -> None:
    if payload_bytes is not None and head.payload_bytes != payload_bytes:
        raise RecordLengthError(
            f"the record of key {head.identity.key.hex()} has a payload of {head.payload_bytes} bytes, {payload_bytes} were expected"
        )
    if head.codec == IDENTITY_CODEC and head.raw_bytes != head.payload_bytes:
        raise RecordLengthError(
            f"the record of key {head.identity.key.hex()} is not encoded and yet has {head.raw_bytes} raw and {head.payload_bytes} payload bytes"
        )


def head_for(
    identity: Identity,
    payload: Buffer,
    *,
    codec: str = IDENTITY_CODEC,
    codec_params: Mapping[str, Scalar] = _NO_PARAMS,
    raw_bytes: int | None = None,
    raw_sum: int | None = None,
) -> RecordHead:
    """The head of `payload`, which is summed here. `raw_bytes` and `raw_sum` are needed unless the codec is identity."""
    view = byte_view(payload)
    payload_sum = xxh3_64_intdigest(view)
    if codec == IDENTITY_CODEC:
        raw_bytes, raw_sum = len(view), payload_sum
    elif raw_bytes is None or raw_sum is None:
        raise RecordError(f"codec {codec!r} needs raw_bytes and raw_sum of what it encoded: pass both")
    return RecordHead(identity, raw_bytes, len(view), raw_sum, payload_sum, codec, codec_params)


# -- head first: byte stores -------------------------------------------------------------------------------------------


def encode_prefix(head: RecordHead) -> bytes:
    """What stands before the payload of a head-first record: the head, and zeros that align the payload. Raises HeadTooLargeError."""
    encoded = encode_head(head)
    return encoded + _ZEROS[: -len(encoded) % PAYLOAD_ALIGN_BYTES]


def pack(head: RecordHead, payload: Buffer) -> bytes:
    """One record, head first. Copies the payload once; a store that takes scattered writes needs `encode_prefix` alone.

    Raises RecordLengthError where `payload` is not as long as the head says, HeadTooLargeError.
    """
    view = byte_view(payload)
    if len(view) != head.payload_bytes:
        raise RecordLengthError(f"the head says {head.payload_bytes} payload bytes and {len(view)} were given")
    return b"".join((encode_prefix(head), view))


def unpack(
    record: Buffer, expected: Identity | None, payload_bytes: int | None = None
) -> tuple[RecordHead, memoryview]:
    """The verified head of a record that `pack` made, and a view of its payload in `record`, without a copy.

    With `expected` None any identity is accepted, for tools that look at what is there. Raises a subclass of RecordError.
    """
    view = byte_view(record)
    head, metadata_bytes = _read_head(view, expected)
    if expected is not None:
        check_identity(head, expected)
    _check_lengths(head, payload_bytes)
    head_bytes = FRAMING_BYTES + metadata_bytes
    start = head_bytes + -head_bytes % PAYLOAD_ALIGN_BYTES
    if len(view) - start != head.payload_bytes:
        raise RecordLengthError(
            f"the record of key {head.identity.key.hex()} has {max(len(view) - start, 0)} bytes of payload, its head says {head.payload_bytes}"
        )
    if any(view[head_bytes:start]):
        raise RecordHeadError(
            f"the record of key {head.identity.key.hex()} has other bytes than zeros between head and payload: it is damaged"
        )
    payload = view[start:]
    _check_payload(head, payload)
    return head, payload


def sizes_of(head: RecordHead, stored_bytes: int | None = None) -> RecordSizes:
    """Where the record's bytes go, padding counted as framing. `stored_bytes` is the slot's length where the head stands last."""
    encoded_bytes = len(encode_head(head))
    if stored_bytes is None:
        stored_bytes = encoded_bytes + -encoded_bytes % PAYLOAD_ALIGN_BYTES + head.payload_bytes
    metadata_bytes = encoded_bytes - FRAMING_BYTES
    framing_bytes = stored_bytes - head.payload_bytes - metadata_bytes
    if framing_bytes < FRAMING_BYTES:
        raise RecordLengthError(f"{stored_bytes} bytes cannot hold a payload of {head.payload_bytes} and its envelope")
    return RecordSizes(head.raw_bytes, head.payload_bytes, metadata_bytes, framing_bytes, stored_bytes)


# -- head last: slots of an arena or a segment -------------------------------------------------------------------------


def slot_bytes(payload_bytes: int) -> int:
    """Length of the slot that a payload of `payload_bytes` needs: with its head, a multiple of SLOT_ALIGN_BYTES."""
    return -(-(payload_bytes + HEAD_BYTES_MAX) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def _slot_view(slot: Buffer, payload_bytes: int) -> memoryview:
    view = byte_view(slot)
    if not 0 <= payload_bytes <= len(view) - HEAD_BYTES_MAX:
        raise RecordLengthError(
            f"a slot of {len(view)} bytes cannot hold a payload of {payload_bytes} and a head of {HEAD_BYTES_MAX}: "
            f"it needs {slot_bytes(max(payload_bytes, 0))} bytes"
        )
    return view


def seal_slot(
    slot: Buffer,
    identity: Identity,
    payload_bytes: int,
    *,
    codec: str = IDENTITY_CODEC,
    codec_params: Mapping[str, Scalar] = _NO_PARAMS,
    raw_bytes: int | None = None,
    raw_sum: int | None = None,
) -> RecordHead:
    """Sum the payload that lies at the start of `slot` and write its head into the slot's end.

    What lies between is zeroed, so that no stale bytes of another record reach a medium; readers do not rely on it. The slot
    must be writable, contiguous, and long enough (`slot_bytes`). Raises RecordLengthError, HeadTooLargeError.
    """
    view = _slot_view(slot, payload_bytes)
    if view.readonly:
        raise RecordError(f"a slot of {len(view)} bytes is read-only: nothing can be sealed in it")
    head = head_for(
        identity, view[:payload_bytes], codec=codec, codec_params=codec_params, raw_bytes=raw_bytes, raw_sum=raw_sum
    )
    encoded = encode_head(head)
    place = len(view) - HEAD_BYTES_MAX
    gap = place - payload_bytes
    if gap:
        view[payload_bytes:place] = _ZEROS[:gap] if gap <= SLOT_ALIGN_BYTES else bytes(gap)
    view[place:] = encoded.ljust(HEAD_BYTES_MAX, b"\0")
    return head


def open_slot(slot: Buffer, expected: Identity, payload_bytes: int | None) -> RecordHead:
    """The head of a sealed slot, once all of it is verified: identity, lengths and the payload's checksum.

    `payload_bytes` is what the reader knows from elsewhere, None where it knows nothing. Raises a subclass of RecordError.
    """
    view = _slot_view(slot, payload_bytes or 0)
    head = _read_head(view[len(view) - HEAD_BYTES_MAX :], expected)[0]
    check_identity(head, expected)
    _check_lengths(head, payload_bytes)
    _slot_view(view, head.payload_bytes)
    _check_payload(head, view[: head.payload_bytes])
    return head


def read_slot_head(slot: Buffer) -> RecordHead:
    """The head of a sealed slot, its own checksum verified and its payload not: to rebuild a catalog by scanning.

    `slot` may be the slot's last HEAD_BYTES_MAX bytes alone. Raises a subclass of RecordError.
    """
    view = _slot_view(slot, 0)
    return _read_head(view[len(view) - HEAD_BYTES_MAX :])[0]
