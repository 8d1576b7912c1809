"""The envelope: exact sizes, one typed error for each thing that can be wrong, both placements."""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.record import envelope as env
from kvtier.record import errors as err

NO_DEADLINE = settings(deadline=None)
WHO = env.Identity(namespace=b"namespace-fingerprint", key=bytes(range(32)), generation=7, group=1, rank=3)
PAYLOAD = bytes(range(256)) * 20


def sealed(payload: bytes = PAYLOAD, who: env.Identity = WHO, slot_bytes: int | None = None) -> bytearray:
    slot = bytearray(b"\xee" * (slot_bytes or env.slot_bytes(len(payload))))
    slot[: len(payload)] = payload
    env.seal_slot(memoryview(slot), who, len(payload))
    return slot


identities = st.builds(
    env.Identity,
    namespace=st.binary(max_size=64),
    key=st.binary(max_size=64),
    generation=st.integers(0, 2**63 - 1),
    group=st.integers(0, 2**31),
    rank=st.integers(0, 2**31),
)
params = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.text(max_size=8), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False)),
    max_size=4,
)


@NO_DEADLINE
@given(identities, st.binary(max_size=300), params, st.integers(0, 2**40))
def test_head_first_round_trip_and_exact_sizes(
    who: env.Identity, payload: bytes, codec_params: dict[str, Any], raw: int
) -> None:
    head = env.head_for(who, payload, codec="zstd", codec_params=codec_params, raw_bytes=raw, raw_sum=raw * 3)
    record = env.pack(head, payload)
    found, view = env.unpack(record, who)
    assert found == head
    assert bytes(view) == payload
    sizes = env.sizes_of(head)
    assert sizes.payload_bytes + sizes.metadata_bytes + sizes.framing_bytes == sizes.stored_bytes == len(record)
    assert (sizes.raw_bytes, sizes.payload_bytes) == (raw, len(payload))
    assert 0 <= sizes.framing_bytes - env.FRAMING_BYTES < 16
    assert (len(record) - len(payload)) % 16 == 0
    assert env.encode_prefix(env.decode_head(record)) == env.encode_prefix(head) == record[: len(record) - len(payload)]


@NO_DEADLINE
@given(identities, st.binary(max_size=9000), st.integers(0, 3))
def test_head_last_round_trip(who: env.Identity, payload: bytes, spare_pages: int) -> None:
    slot = sealed(payload, who, env.slot_bytes(len(payload)) + 4096 * spare_pages)
    head = env.open_slot(slot, who, len(payload))
    assert (
        head
        == env.read_slot_head(slot)
        == env.read_slot_head(slot[-env.HEAD_BYTES_MAX :])
        == env.open_slot(slot, who, None)
    )
    assert slot[: len(payload)] == payload
    assert not any(slot[len(payload) : -env.HEAD_BYTES_MAX]), (
        "stale bytes of the slot's last user must not reach a medium"
    )
    assert head.raw_sum == head.payload_sum == env.xxh3(payload)
    sizes = env.sizes_of(head, len(slot))
    assert sizes.payload_bytes + sizes.metadata_bytes + sizes.framing_bytes == sizes.stored_bytes == len(slot)


@pytest.mark.parametrize(
    ("payload_bytes", "expected"),
    [(0, 4096), (1, 4096), (3584, 4096), (3585, 8192), (4096, 8192), (1 << 20, (1 << 20) + 4096)],
)
def test_slot_bytes(payload_bytes: int, expected: int) -> None:
    assert env.slot_bytes(payload_bytes) == expected


def flip(offset: int, bit: int = 0) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[offset] ^= 1 << bit

    return change


def rewrite_head(**changes: Any) -> Callable[[bytearray], None]:
    """A sound head, checksum and all, that says something else."""

    def change(slot: bytearray) -> None:
        head = msgspec.structs.replace(env.read_slot_head(slot), **changes)
        slot[-env.HEAD_BYTES_MAX :] = env.encode_head(head).ljust(env.HEAD_BYTES_MAX, b"\0")

    return change


HEAD = -env.HEAD_BYTES_MAX
WRONG: dict[str, tuple[Callable[[bytearray], None], type[err.RecordError], str]] = {
    "magic": (flip(HEAD), err.RecordMagicError, "magic"),
    "never written": (lambda slot: slot.__setitem__(slice(None), bytes(len(slot))), err.RecordMagicError, "magic"),
    "version": (flip(HEAD + 8), err.RecordVersionError, "version"),
    "flags": (flip(HEAD + 10), err.RecordHeadError, "head"),
    "metadata length": (flip(HEAD + 12), err.RecordHeadError, "head"),
    "absurd metadata length": (flip(HEAD + 15, 7), err.RecordHeadError, "head"),
    "metadata": (flip(HEAD + 60), err.RecordHeadError, "head"),
    "key": (rewrite_head(identity=dataclasses.replace(WHO, key=b"another")), err.RecordKeyError, "key"),
    "namespace": (
        rewrite_head(identity=dataclasses.replace(WHO, namespace=b"another")),
        err.RecordNamespaceError,
        "namespace",
    ),
    "generation": (
        rewrite_head(identity=dataclasses.replace(WHO, generation=6)),
        err.RecordGenerationError,
        "generation",
    ),
    "group": (rewrite_head(identity=dataclasses.replace(WHO, group=0)), err.RecordPartError, "part"),
    "rank": (rewrite_head(identity=dataclasses.replace(WHO, rank=0)), err.RecordPartError, "part"),
    "payload length": (rewrite_head(payload_bytes=len(PAYLOAD) - 1), err.RecordLengthError, "length"),
    "raw length": (rewrite_head(raw_bytes=len(PAYLOAD) - 1), err.RecordLengthError, "length"),
    "payload sum": (rewrite_head(payload_sum=1), err.RecordChecksumError, "checksum"),
    "first payload bit": (flip(0), err.RecordChecksumError, "checksum"),
    "last payload bit": (flip(len(PAYLOAD) - 1, 7), err.RecordChecksumError, "checksum"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_thing_has_its_error(name: str) -> None:
    change, error, what = WRONG[name]
    slot = sealed()
    env.open_slot(slot, WHO, len(PAYLOAD))
    change(slot)
    with pytest.raises(err.RecordError) as caught:
        env.open_slot(slot, WHO, len(PAYLOAD))
    assert type(caught.value) is error
    assert caught.value.what == what


def test_the_first_wrong_thing_is_named_when_several_are() -> None:
    slot = sealed(who=env.Identity(b"other", b"other", 1, 2, 4))
    flip(0)(slot)
    expected = WHO
    for error, change in (
        (err.RecordKeyError, {"key": b"other"}),
        (err.RecordNamespaceError, {"namespace": b"other"}),
        (err.RecordGenerationError, {"generation": 1}),
        (err.RecordPartError, {"group": 2, "rank": 4}),
        (err.RecordChecksumError, {}),
    ):
        with pytest.raises(error):
            env.open_slot(slot, expected, len(PAYLOAD))
        expected = dataclasses.replace(expected, **change)


def test_flags_of_a_sound_head_are_a_newer_version() -> None:
    body = bytearray(env.encode_head(env.head_for(WHO, PAYLOAD)))[:-8]
    body[10] = 1
    with pytest.raises(err.RecordVersionError, match="flags"):
        env.decode_head(bytes(body) + env.xxh3(body).to_bytes(8, "little"))


def test_sound_checksum_over_unreadable_metadata() -> None:
    body = bytearray(env.encode_head(env.head_for(WHO, PAYLOAD)))[:-8]
    body[24:] = b"\xc1" * (len(body) - 24)
    with pytest.raises(err.RecordHeadError, match="not readable"):
        env.decode_head(bytes(body) + env.xxh3(body).to_bytes(8, "little"))


@pytest.mark.parametrize("length", range(0, 260, 13))
def test_a_short_record_is_a_length_error(length: int) -> None:
    record = env.pack(env.head_for(WHO, PAYLOAD), PAYLOAD)
    with pytest.raises(err.RecordLengthError):
        env.unpack(record[:length], WHO)


def test_a_record_with_bytes_too_many_or_too_few_behind_its_head() -> None:
    record = env.pack(env.head_for(WHO, PAYLOAD), PAYLOAD)
    for wrong in (record[:-1], record + b"\0"):
        with pytest.raises(err.RecordLengthError):
            env.unpack(wrong, WHO)
    with pytest.raises(err.RecordLengthError):
        env.unpack(record, WHO, len(PAYLOAD) + 1)
    with pytest.raises(err.RecordLengthError):
        env.pack(env.head_for(WHO, PAYLOAD), PAYLOAD[1:])


@NO_DEADLINE
@given(st.data())
def test_fuzz_any_change_of_any_byte_is_refused(data: st.DataObject) -> None:
    record = bytearray(env.pack(env.head_for(WHO, PAYLOAD[:300]), PAYLOAD[:300]))
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    if record != env.pack(env.head_for(WHO, PAYLOAD[:300]), PAYLOAD[:300]):
        with pytest.raises(err.RecordError):
            env.unpack(record, WHO)


@NO_DEADLINE
@given(st.binary(max_size=600), st.booleans())
def test_fuzz_random_bytes_are_refused_by_a_typed_error(noise: bytes, with_magic: bool) -> None:
    record = env.MAGIC + b"\1\0\0\0" + noise if with_magic else noise
    with pytest.raises(err.RecordError):
        env.unpack(record, WHO)


@NO_DEADLINE
@given(st.data())
def test_fuzz_heads_of_a_faulty_writer_with_sums_that_fit(data: st.DataObject) -> None:
    """Only typed errors, or a head whose numbers are counts."""
    body = bytearray(env.encode_head(env.head_for(WHO, PAYLOAD)))[:-8]
    for _ in range(data.draw(st.integers(1, 6))):
        body[data.draw(st.integers(12, len(body) - 1))] = data.draw(st.integers(0, 255))
    record = bytes(body) + env.xxh3(body).to_bytes(8, "little")
    try:
        head = env.decode_head(record)
    except err.RecordError:
        return
    assert min(head.identity.generation, head.identity.group, head.identity.rank, head.raw_bytes, head.payload_sum) >= 0


@pytest.mark.parametrize("changes", [{"generation": -1}, {"group": -1}, {"rank": -1}])
def test_negative_counts_are_refused_before_they_are_written(changes: dict[str, int]) -> None:
    with pytest.raises(err.RecordError, match="0 to"):
        env.seal_slot(bytearray(4096), dataclasses.replace(WHO, **changes), 0)


def test_sums_of_64_bits_survive() -> None:
    head = env.RecordHead(WHO, 0, 0, 2**64 - 1, 2**64 - 1)
    assert env.decode_head(env.encode_head(head)) == head


def test_a_slot_too_short_for_its_payload() -> None:
    with pytest.raises(err.RecordLengthError, match="8192"):
        env.seal_slot(bytearray(4096), WHO, 4096)
    with pytest.raises(err.RecordLengthError):
        env.open_slot(bytearray(100), WHO, 0)
    with pytest.raises(err.RecordLengthError):
        env.seal_slot(bytearray(4096), WHO, -1)


def test_a_head_too_large_is_refused_before_anything_is_written() -> None:
    slot = bytearray(4096)
    with pytest.raises(err.HeadTooLargeError, match="at most 480"):
        env.seal_slot(slot, env.Identity(b"n" * 300, b"k" * 300), 0)
    assert slot == bytes(4096)


def test_views_that_are_not_contiguous_are_refused_and_shaped_ones_are_taken() -> None:
    array = np.arange(4096, dtype=np.float32).reshape(64, 64)
    head = env.head_for(WHO, memoryview(array))
    assert head.payload_bytes == array.nbytes
    with pytest.raises(err.RecordLengthError, match="contiguous"):
        env.head_for(WHO, memoryview(array[:, ::2]))
    assert env.head_for(WHO, memoryview(array[:0])).payload_bytes == 0


def test_an_encoded_payload_needs_its_raw_length_and_sum() -> None:
    with pytest.raises(err.RecordError, match="raw_sum"):
        env.head_for(WHO, PAYLOAD, codec="zstd", raw_bytes=3)


def test_golden_bytes_of_a_head() -> None:
    """Format version 1, byte for byte: a change here is a new version."""
    head = env.encode_head(env.head_for(env.Identity(b"ns", b"\1\2\3\4", 7, 1, 3), b"kvtier"))
    assert head.hex() == GOLDEN


GOLDEN = (
    "8b4b56544945520a010000005e00000006000000000000008aa26e73c4026e73a36b6579c40401020304a367656e07a5"
    "67726f757001a472616e6b03a5636f646563a86964656e74697479a6706172616d7380a372617706a77261775f73756d"
    "cfa1669530aa735bcea373756dcfa1669530aa735bce9553ba713eeda02c"
)


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": "text"},
        {"key": "text"},
        {"key": bytearray(b"changes")},
        {"key": None},
        {"generation": True},
        {"generation": 1.0},
        {"generation": "1"},
        {"generation": np.int64(1)},
        {"generation": 1 << 64},
        {"group": 1 << 64},
        {"rank": -1},
        {"rank": None},
    ],
    ids=str,
)
def test_an_identity_that_no_reader_could_read_is_not_written(changes: dict[str, Any]) -> None:
    slot = bytearray(4096)
    with pytest.raises(err.RecordError, match=next(iter(changes))) as caught:
        env.seal_slot(slot, dataclasses.replace(WHO, **changes), 0)
    assert type(caught.value) is err.RecordError
    assert not any(slot)


@pytest.mark.parametrize(
    "changes",
    [
        {"raw_bytes": -1},
        {"raw_bytes": 1 << 64},
        {"payload_bytes": -1},
        {"payload_bytes": 1 << 64},
        {"raw_sum": -1},
        {"payload_sum": 1 << 64},
        {"codec": 5},
        {"codec": "\ud800"},
        {"codec_params": {"level": None}},
        {"codec_params": {"level": [1]}},
        {"codec_params": {"level": 1 << 64}},
        {"codec_params": {"level": "\ud800"}},
        {"codec_params": {1: 1}},
    ],
    ids=str,
)
def test_a_head_that_no_reader_could_read_is_not_written(changes: dict[str, Any]) -> None:
    head = msgspec.structs.replace(env.head_for(WHO, PAYLOAD), **changes)
    with pytest.raises(err.RecordError) as caught:
        env.encode_head(head)
    assert type(caught.value) is err.RecordError


def test_metadata_nested_deeper_than_the_stack_left_is_a_damaged_head() -> None:
    body = bytearray(env.encode_head(env.head_for(WHO, PAYLOAD)))[:-8]
    body[24] += 1
    body += b"\xa1z" + b"\x91" * 300 + b"\xc0"
    body[12:16] = (len(body) - 24).to_bytes(4, "little")
    record = bytes(body) + env.xxh3(body).to_bytes(8, "little")
    assert env.decode_head(record).identity == WHO

    def deep(frames: int) -> None:
        if frames:
            deep(frames - 1)
        else:
            env.decode_head(record)

    frames = sys.getrecursionlimit() - len(inspect.stack()) - 150
    with pytest.raises(err.RecordHeadError, match="not readable"):
        deep(frames)


def test_a_slot_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(err.RecordError, match="read-only"):
        env.seal_slot(bytes(4096), WHO, 10)
