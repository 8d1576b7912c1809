"""Codecs: how raw bytes become a payload and come back. The contract, the registry, and the codecs of one line: identity and zstd.

A codec object holds what was asked for (a level, a shape); what its decoder must know travels in the record's head, so that decoding needs the name
and the head alone. An encoder may decline: where its payload would not be `ratio_min` times smaller than the raw bytes, or where the
input is not what it is for, it hands the raw bytes back as `identity`, uncopied. Decoders check what they are given: a payload that
passed its checksum may still be of a faulty writer.

**Lossy codecs** are off unless asked (`make_codec(..., allow_lossy=True)`), put their error bound into the head, and never share a namespace with
lossless records or with another lossy codec: `RecordCodec` writes and reads them under a namespace derived from the given one, so
that who asks for exact bytes cannot be served others.

All codecs are thread-safe and leave the GIL in their loops; `encode_many` and `decode_many` use several threads.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Final, Self, cast

import zstandard

from kvtier.record.envelope import (
    IDENTITY_CODEC,
    Buffer,
    Identity,
    RecordHead,
    Scalar,
    byte_view,
    check_identity,
    head_for,
    xxh3,
)
from kvtier.record.errors import CodecError, RecordChecksumError, RecordLengthError, RecordNamespaceError

RAW_BYTES_MAX: Final = 1 << 32
LOSSY_MARK: Final = b"~lossy:"


class CodecUnavailableError(CodecError):
    """A codec is known and cannot run here."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder made: the payload, and under which name and with which parameters it decodes."""

    payload: Buffer
    codec: str
    params: Mapping[str, Scalar] = field(default_factory=dict)


class Codec(ABC):
    """One way to encode. Implementations are immutable once made, and thread-safe."""

    name: ClassVar[str]
    lossy: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def make(cls, **params: Any) -> Self:
        """A codec with `params`, which are validated: CodecError names the one at fault; CodecUnavailableError where it cannot run here."""

    @abstractmethod
    def encode(self, raw: memoryview) -> Encoded:
        """Encode a contiguous byte view, or decline."""

    @classmethod
    @abstractmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        """Decode into `out`, a writable byte view as long as the raw bytes were. Raises CodecError."""


def declined(raw: memoryview) -> Encoded:
    """The answer of an encoder that leaves the raw bytes as they are."""
    return Encoded(raw, IDENTITY_CODEC)


def refuse_unknown(codec: str, params: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise CodecError for a parameter that `codec` does not have."""
    known = sorted(known)
    for name in params:
        if name not in known:
            raise CodecError(f"codec {codec!r} has no parameter {name!r}: it has {', '.join(known) or 'none'}")


def int_in(codec: str, name: str, value: Any, low: int, high: int) -> int:
    """`value` if it is a whole number from `low` to `high`. Raises CodecError."""
    if type(value) is not int or not low <= value <= high:
        raise CodecError(f"{name} of codec {codec!r} is {value!r}: use a whole number from {low} to {high}")
    return value


def ratio_from(codec: str, value: Any) -> float:
    """`value` if it can be a least ratio. Raises CodecError."""
    if type(value) not in (int, float) or not 1 <= value <= 1000:
        raise CodecError(f"ratio_min of codec {codec!r} is {value!r}: use a number from 1 to 1000")
    return float(value)


def param_int(codec: str, params: Mapping[str, Scalar], name: str, low: int, high: int) -> int:
    """The whole number `name` of a head's parameters, for decoders. Raises CodecError where it is missing or out of range."""
    if name not in params:
        raise CodecError(f"a record of codec {codec!r} lacks its parameter {name!r}: its writer was at fault")
    return int_in(codec, name, params[name], low, high)


class IdentityCodec(Codec):
    """The bytes as they are."""

    name = IDENTITY_CODEC

    @classmethod
    def make(cls, **params: Any) -> Self:
        refuse_unknown(cls.name, params, ())
        return cls()

    def encode(self, raw: memoryview) -> Encoded:
        return declined(raw)

    @classmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        if len(payload) != len(out):
            raise CodecError(f"an identity payload has {len(payload)} bytes where {len(out)} were raw")
        out[:] = payload


class _ZstdContexts(threading.local):
    """Contexts of one thread: they are costly to make, and not to be shared."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        # A table of 64 long matches finds next to nothing, and skips ahead fast where it doesn't: what remains is Huffman coding.
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, write_content_size=True)
        self.entropy_compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _ZstdContexts()


def zstd_compress(raw: Buffer, level: int) -> bytes:
    """One zstd frame that knows its content's length."""
    compressor = _contexts.compressors.get(level)
    if compressor is None:
        compressor = _contexts.compressors[level] = zstandard.ZstdCompressor(level=level)
    return compressor.compress(raw)


def zstd_compress_entropy(raw: Buffer) -> bytes:
    """One zstd frame of bytes that repeat in frequency and not in sequence: nearly all of it Huffman codes. Any decoder reads it."""
    return _contexts.entropy_compressor.compress(raw)


def zstd_decompress_into(frame: memoryview, out: memoryview) -> None:
    """Decompress one frame that fills `out` exactly. Raises CodecError."""
    try:
        content_bytes = zstandard.frame_content_size(frame)
        if content_bytes != len(out):
            raise CodecError(f"a zstd frame holds {content_bytes} bytes where {len(out)} were raw")
        if not out:
            return
        done = 0
        with _contexts.decompressor.stream_reader(frame) as reader:
            while done < len(out) and (count := reader.readinto(out[done:])):
                done += count
    except zstandard.ZstdError as error:
        raise CodecError(f"a zstd frame cannot be decoded: {error}") from error
    if done != len(out):
        raise CodecError(f"a zstd frame ends after {done} of {len(out)} bytes")


ZSTD_LEVEL_MIN: Final = -7
ZSTD_LEVEL_MAX: Final = 22


@dataclass(frozen=True, slots=True)
class ZstdCodec(Codec):
    """zstd, one frame a record. Parameters: `level` (-7 to 22, default 1; 0 is zstd's own default), `ratio_min` (default 1)."""

    name: ClassVar[str] = "zstd"
    level: int = 1
    ratio_min: float = 1.0

    @classmethod
    def make(cls, **params: Any) -> Self:
        refuse_unknown(cls.name, params, ("level", "ratio_min"))
        return cls(
            int_in(cls.name, "level", params.get("level", 1), ZSTD_LEVEL_MIN, ZSTD_LEVEL_MAX),
            ratio_from(cls.name, params.get("ratio_min", 1.0)),
        )

    def encode(self, raw: memoryview) -> Encoded:
        frame = zstd_compress(raw, self.level)
        if len(frame) * self.ratio_min >= len(raw):
            return declined(raw)
        return Encoded(frame, self.name, {"level": self.level})

    @classmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        zstd_decompress_into(payload, out)


# Adding a codec is one file and one line here.
_CODECS: dict[str, str] = {
    "ans": "kvtier.record.codec_ans:AnsCodec",
    "bf16_split": "kvtier.record.codec_bf16:Bf16SplitCodec",
    "fp8": "kvtier.record.codec_lossy:Fp8Codec",
    "identity": "kvtier.record.codecs:IdentityCodec",
    "int8": "kvtier.record.codec_lossy:Int8Codec",
    "zstd": "kvtier.record.codecs:ZstdCodec",
}


def codec_names() -> tuple[str, ...]:
    """Names that `make_codec` knows, sorted."""
    return tuple(sorted(_CODECS))


def codec_class(name: str) -> type[Codec]:
    """The codec of a name, as it stands in records. Raises CodecError for an unknown one."""
    place = _CODECS.get(name)
    if place is None:
        raise CodecError(f"codec {name!r} is not known: use one of {', '.join(codec_names())}")
    module, _, attribute = place.partition(":")
    return cast("type[Codec]", getattr(import_module(module), attribute))


def make_codec(name: str, *, allow_lossy: bool = False, **params: Any) -> Codec:
    """A codec by name. Raises CodecError for an unknown name or parameter, and for a lossy codec that was not allowed."""
    found = codec_class(name)
    if found.lossy and not allow_lossy:
        raise CodecError(
            f"codec {name!r} is lossy, it changes what the model sees: pass allow_lossy=True if that is meant, or use a lossless one"
        )
    return found.make(**params)


# -- records -------------------------------------------------------------------------------------------------------------


def encode_record(codec: Codec, identity: Identity, raw: Buffer) -> tuple[RecordHead, Buffer]:
    """The head and payload of a record of `raw`, both sums computed. The payload is a view of `raw` where nothing was encoded."""
    view = byte_view(raw)
    encoded = codec.encode(view)
    if encoded.codec == IDENTITY_CODEC:
        return head_for(identity, encoded.payload), encoded.payload
    head = head_for(
        identity,
        encoded.payload,
        codec=encoded.codec,
        codec_params=encoded.params,
        raw_bytes=len(view),
        raw_sum=xxh3(view),
    )
    return head, encoded.payload


def decode_record(
    head: RecordHead, payload: Buffer, out: memoryview | None = None, *, raw_bytes_max: int = RAW_BYTES_MAX
) -> memoryview:
    """The raw bytes of a record whose envelope was verified, checked against the head's sum unless the codec is lossy.

    With `out`, a writable contiguous view of as many bytes, they are put there. Without it, an identity payload is given as it is,
    and anything else in memory of its own, of at most `raw_bytes_max`. Raises CodecError, RecordLengthError, RecordChecksumError.
    """
    view = byte_view(payload)
    found = codec_class(head.codec)
    if out is None:
        if found is IdentityCodec:
            return view
        if head.raw_bytes > raw_bytes_max:
            raise RecordLengthError(
                f"the record says it had {head.raw_bytes} raw bytes, at most {raw_bytes_max} are allowed: raise raw_bytes_max"
            )
        out = memoryview(bytearray(head.raw_bytes))
    target = byte_view(out)
    if len(target) != head.raw_bytes:
        raise RecordLengthError(f"{len(target)} bytes were given for a record of {head.raw_bytes} raw bytes")
    if target.readonly:
        raise CodecError(f"the view of {len(target)} bytes to decode into is read-only")
    found.decode(view, head.codec_params, target)
    if found is IdentityCodec or found.lossy:
        return out
    found_sum = xxh3(target)
    if found_sum != head.raw_sum:
        raise RecordChecksumError(
            f"key {head.identity.key.hex()} decodes with {head.codec!r} to bytes that sum to {found_sum:016x}, its head says {head.raw_sum:016x}"
        )
    return out


@dataclass(frozen=True, slots=True)
class RecordCodec:
    """One namespace and the codec of its records, so that lossy and exact records never meet.

    Attributes:
        base_namespace: the namespace of exact records.
        codec: what encodes.
    """

    base_namespace: bytes
    codec: Codec

    def __post_init__(self) -> None:
        if LOSSY_MARK in self.base_namespace:
            raise RecordNamespaceError(
                f"namespace {self.base_namespace!r} is of lossy records already ({LOSSY_MARK.decode()!r} in it): give the one of exact records"
            )

    @property
    def namespace(self) -> bytes:
        """What stands in the records' identities: the base namespace, marked where the codec is lossy."""
        return self.base_namespace + LOSSY_MARK + self.codec.name.encode() if self.codec.lossy else self.base_namespace

    def identity(self, key: bytes, generation: int = 0, group: int = 0, rank: int = 0) -> Identity:
        """The identity of a record of this namespace."""
        return Identity(self.namespace, key, generation, group, rank)

    def encode(self, identity: Identity, raw: Buffer) -> tuple[RecordHead, Buffer]:
        """As `encode_record`. Raises RecordNamespaceError for an identity of another namespace."""
        if identity.namespace != self.namespace:
            raise RecordNamespaceError(
                f"identity of namespace {identity.namespace!r} given to the codec of {self.namespace!r}: use identity()"
            )
        return encode_record(self.codec, identity, raw)

    def decode(
        self, head: RecordHead, payload: Buffer, expected: Identity, out: memoryview | None = None
    ) -> memoryview:
        """As `decode_record`, and refuses a record whose codec this namespace must not hold, whatever its head says."""
        check_identity(head, expected)
        found = codec_class(head.codec)
        if found.lossy and (not self.codec.lossy or found is not type(self.codec)):
            raise CodecError(
                f"namespace {self.namespace!r} holds no {head.codec!r} records, yet one is there (key {head.identity.key.hex()}): its writer was at fault"
            )
        return decode_record(head, payload, out)


def encode_many(
    codec: Codec, records: Sequence[tuple[Identity, Buffer]], threads: int
) -> list[tuple[RecordHead, Buffer]]:
    """`encode_record` for each, in order, on `threads` threads."""
    if threads < 1:
        raise CodecError(f"threads is {threads}: use at least 1")
    if threads == 1 or len(records) < 2:
        return [encode_record(codec, identity, raw) for identity, raw in records]
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-encode") as pool:
        return list(pool.map(lambda record: encode_record(codec, *record), records))


def decode_many(records: Sequence[tuple[RecordHead, Buffer, memoryview]], threads: int) -> list[memoryview]:
    """`decode_record` for each (head, payload, out), in order, on `threads` threads."""
    if threads < 1:
        raise CodecError(f"threads is {threads}: use at least 1")
    if threads == 1 or len(records) < 2:
        return [decode_record(*record) for record in records]
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-decode") as pool:
        return list(pool.map(lambda record: decode_record(*record), records))
