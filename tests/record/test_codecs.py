"""Codecs: exact ones give back every byte, lossy ones keep their bound, all refuse what they must."""

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvtier.record import codec_ans, codec_bf16, codec_lossy
from kvtier.record.codecs import (
    CodecUnavailableError,
    RecordCodec,
    codec_class,
    codec_names,
    decode_many,
    decode_record,
    encode_many,
    encode_record,
    make_codec,
    zstd_compress,
)
from kvtier.record.envelope import Identity, RecordHead, pack, unpack, xxh3
from kvtier.record.errors import CodecError, RecordChecksumError, RecordLengthError, RecordNamespaceError

changed = msgspec.structs.replace
NO_DEADLINE = settings(deadline=None, max_examples=60)
WHO = Identity(b"ns", b"key", 1)
LOSSLESS = ("identity", "zstd", "bf16_split")


def kv(layers: int, tokens: int, heads: int, dim: int, *, seed: int = 0, dtype: str = "bf16") -> bytes:
    """Something like KV in LCND: channels of keys with ranges of their own, values alike, normal noise."""
    random = np.random.default_rng(seed)
    part = random.normal(size=(layers, 2, tokens, heads, dim)).astype(np.float32)
    part[:, 0] *= np.exp2(random.integers(-4, 5, size=(layers, 1, heads, dim)))
    return codec_lossy.from_float(part.reshape(-1), dtype).tobytes()


def through(name: str, raw: bytes, **params: Any) -> tuple[RecordHead, bytes]:
    """Encode, pack, unpack, decode."""
    head, payload = encode_record(make_codec(name, allow_lossy=True, **params), WHO, raw)
    found, view = unpack(pack(head, payload), WHO)
    target = memoryview(bytearray(len(raw)))
    assert decode_record(found, view, target) is target
    assert bytes(decode_record(found, view)) == bytes(target)
    return found, bytes(target)


# -- lossless ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        b"ab",
        b"abc",
        bytes(4097),
        bytes(range(256)) * 33,
        kv(2, 16, 3, 64),
        kv(2, 16, 3, 64) + b"?",
        np.random.default_rng(1).bytes(9999),
    ],
    ids=["empty", "one", "two", "odd", "zeros", "cycle", "kv", "odd kv", "noise"],
)
def test_every_byte_comes_back(name: str, raw: bytes) -> None:
    head, back = through(name, raw)
    assert back == raw
    assert (head.raw_bytes, head.raw_sum) == (len(raw), xxh3(raw))


@NO_DEADLINE
@given(st.binary(max_size=3000))
def test_every_byte_comes_back_of_anything(raw: bytes) -> None:
    for name, params in (
        ("zstd", {"level": -1}),
        ("bf16_split", {"ratio_min": 1}),
        ("bf16_split", {"level": 5, "ratio_min": 1}),
    ):
        assert through(name, raw, **params)[1] == raw


def test_all_bf16_patterns_survive_the_split() -> None:
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    assert through("bf16_split", raw, ratio_min=1)[1] == raw


def test_identity_copies_nothing() -> None:
    raw = memoryview(kv(1, 16, 3, 64))
    head, payload = encode_record(make_codec("identity"), WHO, raw)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), np.frombuffer(raw, np.uint8))
    record = pack(head, payload)
    found, view = unpack(record, WHO)
    assert np.shares_memory(np.frombuffer(decode_record(found, view), np.uint8), np.frombuffer(record, np.uint8))


def test_what_does_not_compress_is_stored_raw_as_identity() -> None:
    noise = np.random.default_rng(2).bytes(10_000)
    for name in LOSSLESS:
        head, payload = encode_record(make_codec(name), WHO, noise)
        assert head.codec == "identity"
        assert np.shares_memory(np.frombuffer(payload, np.uint8), np.frombuffer(noise, np.uint8))
        assert head.raw_sum == head.payload_sum


def test_the_split_declines_below_its_ratio() -> None:
    raw = kv(2, 64, 3, 64)
    head, payload = encode_record(make_codec("bf16_split"), WHO, raw)
    ratio = len(raw) / len(memoryview(payload))
    assert head.codec == "bf16_split"
    assert ratio > 1.3
    assert encode_record(make_codec("bf16_split", ratio_min=ratio * 0.999), WHO, raw)[0].codec == "bf16_split"
    assert encode_record(make_codec("bf16_split", ratio_min=ratio * 1.001), WHO, raw)[0].codec == "identity"


@NO_DEADLINE
@given(hnp.arrays(np.uint16, st.integers(0, 500)))
def test_numba_and_numpy_give_the_same_bytes(elements: Any) -> None:
    split, join = codec_bf16.loops()
    planes = [np.empty(elements.size, np.uint8) for _ in range(4)]
    codec_bf16.split_numpy(elements, planes[0], planes[1])
    split(elements, planes[2], planes[3])
    assert planes[0].tobytes() == planes[2].tobytes()
    assert planes[1].tobytes() == planes[3].tobytes()
    back = [np.empty(elements.size, np.uint16) for _ in range(2)]
    codec_bf16.join_numpy(planes[0], planes[1], back[0])
    join(planes[0], planes[1], back[1])
    assert back[0].tobytes() == back[1].tobytes() == elements.tobytes()


def test_without_numba_the_split_works_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = kv(2, 16, 3, 64)
    with_numba = encode_record(make_codec("bf16_split"), WHO, raw)[1]
    codec_bf16.loops.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        assert codec_bf16.loops() == (codec_bf16.split_numpy, codec_bf16.join_numpy)
        assert bytes(encode_record(make_codec("bf16_split"), WHO, raw)[1]) == bytes(with_numba)
        assert through("bf16_split", raw)[1] == raw
    finally:
        codec_bf16.loops.cache_clear()


def test_many_on_threads_are_as_one_by_one() -> None:
    records = [(replace(WHO, key=b"%d" % number), kv(1, 16, 3, 64, seed=number)) for number in range(12)]
    for name in LOSSLESS:
        codec = make_codec(name)
        encoded = encode_many(codec, records, 3)
        assert [(head, bytes(payload)) for head, payload in encoded] == [
            (head, bytes(payload)) for head, payload in encode_many(codec, records, 1)
        ]
        targets = [memoryview(bytearray(len(raw))) for _, raw in records]
        decode_many([(head, payload, target) for (head, payload), target in zip(encoded, targets, strict=True)], 3)
        assert [bytes(target) for target in targets] == [raw for _, raw in records]
    for wrong in (0, -1):
        with pytest.raises(CodecError, match="threads"):
            encode_many(codec, records, wrong)
        with pytest.raises(CodecError, match="threads"):
            decode_many([], wrong)


# -- lossy ---------------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {"tokens": 16, "heads": 3, "head_dim": 64}


def errors_of(raw: bytes, back: bytes, dtype: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    before = codec_lossy.to_float(np.frombuffer(raw, "<u2"), dtype).astype(np.float64)
    return before, np.abs(codec_lossy.to_float(np.frombuffer(back, "<u2"), dtype) - before)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_error_keeps_its_bound_and_the_size_is_half(name: str, dtype: str) -> None:
    raw = kv(4, 16, 3, 64, dtype=dtype)
    head, back = through(name, raw, dtype=dtype, **(SHAPE if name == "int8" else {}))
    before, error = errors_of(raw, back, dtype)
    bound = head.codec_params["error_abs_max"]
    assert isinstance(bound, float)
    assert 0 < error.max() <= bound
    assert bound < 0.2 * np.abs(before).max(), "a bound that says nothing"
    assert head.codec_params["lossy"] is True
    assert head.codec == name
    assert 1.7 < len(raw) / head.payload_bytes <= 2


def test_int8_keeps_keys_by_channel_and_values_by_token() -> None:
    """A channel of keys a thousand times the others must not cost them their precision, nor one token's values the other tokens'."""
    part = codec_lossy.to_float(np.frombuffer(kv(1, 16, 3, 64), "<u2"), "bf16").reshape(1, 2, 16, 3, 64).copy()
    part[:, 0, :, 1, 5] *= 1000
    part[:, 1, 3] *= 1000
    raw = codec_lossy.from_float(part.reshape(-1), "bf16").tobytes()
    _, back = through("int8", raw, **SHAPE)
    before, error = (array.reshape(1, 2, 16, 3, 64) for array in errors_of(raw, back, "bf16"))
    others = np.ones(before.shape, bool)
    others[:, 0, :, 1, 5] = False
    others[:, 1, 3] = False
    assert error[others].max() < 0.01 * np.abs(before[others]).max()


def test_the_layouts_are_the_same_numbers_in_another_order() -> None:
    raw = kv(2, 16, 3, 64)
    patterns = np.frombuffer(raw, "<u2").reshape(2, 2, 16, 192)
    other = np.ascontiguousarray(patterns.transpose(2, 1, 0, 3))
    head, back = through("int8", raw, **SHAPE)
    other_head, other_back = through("int8", other.tobytes(), layout="NCLD", **SHAPE)
    assert np.array_equal(
        np.frombuffer(other_back, "<u2").reshape(16, 2, 2, 192).transpose(2, 1, 0, 3).reshape(-1),
        np.frombuffer(back, "<u2"),
    )
    assert head.codec_params["error_abs_max"] == other_head.codec_params["error_abs_max"]


finite_bf16 = hnp.arrays(
    np.uint16, 4 * 2 * 4, elements=st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)
)
finite_fp16 = hnp.arrays(
    np.uint16, 4 * 2 * 4, elements=st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7C00 != 0x7C00)
)


@NO_DEADLINE
@given(finite_bf16, finite_fp16)
def test_bounds_hold_for_any_finite_numbers(bf16: Any, fp16: Any) -> None:
    for dtype, patterns in (("bf16", bf16), ("fp16", fp16)):
        raw = patterns.tobytes()
        for name, params in (("int8", {"tokens": 2, "heads": 2, "head_dim": 4}), ("fp8", {})):
            head, back = through(name, raw, dtype=dtype, **params)
            before, error = errors_of(raw, back, dtype)
            found = head.codec_params
            assert error.max() <= float(found["error_abs_max"])
            if name == "fp8":
                large = np.abs(before) >= float(found["error_abs_min"])
                slack = 2.0**-25 if dtype == "fp16" else 0.0
                assert np.all(error[large] <= np.abs(before[large]) * float(found["error_rel_max"]) + slack)


def test_zeros_stay_zeros() -> None:
    for name, params in (("int8", SHAPE), ("fp8", {})):
        assert through(name, bytes(2 * 2 * 16 * 192), **params)[1] == bytes(2 * 2 * 16 * 192)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0])
def test_a_part_with_an_infinity_or_nan_is_stored_exactly(pattern: int) -> None:
    patterns = np.frombuffer(kv(1, 16, 3, 64), "<u2").copy()
    patterns[77] = pattern
    for name, params in (("int8", SHAPE), ("fp8", {})):
        head, back = through(name, patterns.tobytes(), **params)
        assert head.codec == "identity"
        assert back == patterns.tobytes()


def test_e4m3_is_the_format() -> None:
    numbers = codec_lossy.e4m3_numbers()
    assert numbers[0x7E] == 448
    assert numbers[0x08] == 2.0**-6
    assert numbers[0x01] == 2.0**-9
    assert numbers[0x38] == 1
    assert numbers[0xB8] == -1
    assert np.isnan(numbers[[0x7F, 0xFF]]).all()
    assert codec_lossy.e4m3_of(np.array([1.0625, 1.1875, 500.0, -500.0, 0.0, 2.0**-10, 3 * 2.0**-10])).tolist() == [
        0x38,
        0x3A,
        0x7E,
        0xFE,
        0,
        0,
        2,
    ]
    torch = pytest.importorskip("torch")
    samples = np.random.default_rng(0).normal(size=4000) * np.exp2(np.random.default_rng(1).integers(-12, 8, 4000))
    samples = np.clip(samples.astype(np.float32), -448, 448)
    expected = torch.from_numpy(samples).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(codec_lossy.e4m3_of(samples.astype(np.float64)), expected)


@pytest.mark.parametrize("raw", [bytes(2), bytes(4 * 16 * 192 - 2), b""])
def test_int8_refuses_what_its_shape_does_not_fit(raw: bytes) -> None:
    with pytest.raises(CodecError, match="do not fit"):
        encode_record(make_codec("int8", allow_lossy=True, **SHAPE), WHO, raw)


def test_lossy_is_off_unless_allowed() -> None:
    for name in ("int8", "fp8"):
        with pytest.raises(CodecError, match="allow_lossy"):
            make_codec(name, **(SHAPE if name == "int8" else {}))


def test_lossy_and_lossless_never_share_a_namespace() -> None:
    raw = kv(1, 16, 3, 64)
    exact = RecordCodec(b"model", make_codec("bf16_split"))
    int8 = RecordCodec(b"model", make_codec("int8", allow_lossy=True, **SHAPE))
    fp8 = RecordCodec(b"model", make_codec("fp8", allow_lossy=True))
    assert exact.namespace == b"model"
    assert len({exact.namespace, int8.namespace, fp8.namespace}) == 3
    for writer in (exact, int8, fp8):
        head, payload = writer.encode(writer.identity(b"key"), raw)
        record = pack(head, payload)
        for reader in (exact, int8, fp8):
            expected = reader.identity(b"key")
            if reader is writer:
                found, view = unpack(record, expected)
                assert len(reader.decode(found, view, expected)) == len(raw)
            else:
                with pytest.raises(RecordNamespaceError):
                    unpack(record, expected)
                with pytest.raises(RecordNamespaceError):
                    writer.encode(expected, raw)


def test_a_lossy_record_smuggled_into_an_exact_namespace_is_refused() -> None:
    raw = kv(1, 16, 3, 64)
    exact = RecordCodec(b"model", make_codec("identity"))
    expected = exact.identity(b"key")
    head, payload = encode_record(make_codec("fp8", allow_lossy=True), expected, raw)
    with pytest.raises(CodecError, match="holds no 'fp8'"):
        exact.decode(head, payload, expected)


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_the_registry_knows_its_codecs() -> None:
    assert codec_names() == ("ans", "bf16_split", "fp8", "identity", "int8", "zstd")
    for name in codec_names():
        assert codec_class(name).name == name
    with pytest.raises(CodecError, match=r"'lz4'.*bf16_split"):
        make_codec("lz4")


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("identity", {"level": 1}, "level"),
        ("zstd", {"speed": 1}, "speed.*level, ratio_min"),
        ("zstd", {"level": 23}, "23"),
        ("zstd", {"level": True}, "True"),
        ("zstd", {"level": "1"}, "'1'"),
        ("zstd", {"ratio_min": 0.5}, "0.5"),
        ("zstd", {"ratio_min": "2"}, "'2'"),
        ("bf16_split", {"level": -1}, "-1"),
        ("bf16_split", {"dtype": "fp16"}, "dtype"),
        ("int8", {"tokens": 16, "heads": 3}, "head_dim"),
        ("int8", SHAPE | {"tokens": 0}, "tokens"),
        ("int8", SHAPE | {"layout": "NLCD"}, "NLCD.*LCND"),
        ("int8", SHAPE | {"dtype": "fp32"}, "fp32"),
        ("fp8", {"dtype": "e5m2"}, "e5m2"),
        ("fp8", {"scale": 1}, "scale"),
        ("ans", {"chunk_bytes": 5000}, "multiple of 4096"),
        ("ans", {"chunk_bytes": 0}, "chunk_bytes"),
    ],
)
def test_parameters_are_validated(name: str, params: Mapping[str, Any], named: str) -> None:
    with pytest.raises(CodecError, match=named):
        make_codec(name, allow_lossy=True, **params)


@pytest.mark.parametrize("name", ["zstd", "bf16_split", "int8", "fp8"])
def test_payloads_of_a_faulty_writer_are_refused(name: str) -> None:
    """Their checksums are right: only the decoder can tell."""
    raw = kv(1, 16, 3, 64)
    head, payload = encode_record(make_codec(name, allow_lossy=True, **(SHAPE if name == "int8" else {})), WHO, raw)
    view = memoryview(payload)
    wrong: list[tuple[RecordHead, bytes | memoryview]] = [
        (head, view[:-1]),
        (head, b""),
        (changed(head, raw_bytes=len(raw) * 2), view),
        (changed(head, raw_bytes=0), view),
    ]
    if name in ("zstd", "bf16_split"):
        wrong += [(head, bytes(view[:2]) + b"\xff" * 40 + bytes(view[42:])), (head, bytes(len(view)))]
    if name in ("int8", "fp8"):
        wrong.append((changed(head, codec_params={}), view))
    for faulty, bytes_given in wrong:
        with pytest.raises((CodecError, RecordChecksumError)):
            decode_record(faulty, bytes_given)


def test_decoding_to_other_bytes_is_a_checksum_error() -> None:
    head, _ = encode_record(make_codec("zstd"), WHO, bytes(1000))
    with pytest.raises(RecordChecksumError, match="zstd"):
        decode_record(head, zstd_compress(b"\1" * 1000, 1))


def test_lengths_are_bounded_before_memory_is_taken() -> None:
    head, payload = encode_record(make_codec("zstd"), WHO, bytes(1000))
    with pytest.raises(RecordLengthError, match="raw_bytes_max"):
        decode_record(head, payload, raw_bytes_max=999)
    with pytest.raises(RecordLengthError, match="999 bytes were given"):
        decode_record(head, payload, memoryview(bytearray(999)))
    with pytest.raises(CodecError):
        decode_record(changed(head, codec="identity"), payload, memoryview(bytearray(1000)))
    with pytest.raises(CodecError, match="not known"):
        decode_record(changed(head, codec="brotli"), payload)


# -- ans -----------------------------------------------------------------------------------------------------------------


def test_ans_is_refused_clearly_without_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    with pytest.raises(CodecUnavailableError, match=r"nvidia-nvcomp.*bf16_split"):
        make_codec("ans")


class FakeArray:
    def __init__(self, data: Any) -> None:
        self.data = data

    def cuda(self) -> "FakeArray":
        return self

    def cpu(self) -> Any:
        return self.data


class FakeCodec:
    """Stands in for nvCOMP: run-length of zeros is all that it knows."""

    def __init__(self, algorithm: str, uncomp_chunk_size: int) -> None:
        assert algorithm == "ANS"
        self.thread = threading.get_ident()

    def encode(self, array: FakeArray) -> FakeArray:
        assert threading.get_ident() == self.thread, "nvCOMP's codecs belong to one thread"
        raw = array.data.tobytes()
        return FakeArray(np.frombuffer(len(raw).to_bytes(8, "little") + raw.rstrip(b"\0"), np.uint8))

    def decode(self, array: FakeArray, data_type: str) -> FakeArray:
        assert data_type == "|u1"
        stream = array.data.tobytes()
        if len(stream) < 8:
            raise RuntimeError("not a stream")
        return FakeArray(np.frombuffer(stream[8:].ljust(int.from_bytes(stream[:8], "little"), b"\0"), np.uint8))


@pytest.fixture
def fake_nvcomp(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("nvidia.nvcomp")
    module.Codec = FakeCodec  # type: ignore[attr-defined]
    module.as_array = FakeArray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", module)
    monkeypatch.setattr(codec_ans, "_contexts", threading.local())
    yield module


def test_ans_drives_nvcomp(fake_nvcomp: ModuleType) -> None:
    raw = b"head" + bytes(5000)
    head, back = through("ans", raw)
    assert back == raw
    assert (head.codec, head.payload_bytes) == ("ans", 12)
    noise = np.random.default_rng(3).bytes(1000)
    assert through("ans", noise)[0].codec == "identity"
    assert through("ans", b"")[1] == b""
    encode_many(make_codec("ans"), [(WHO, raw)] * 6, 3)
    with pytest.raises(CodecError, match="cannot decode"):
        decode_record(head, b"short")


def test_ans_is_refused_clearly_without_a_gpu(fake_nvcomp: ModuleType) -> None:
    def no_gpu(**_: Any) -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    fake_nvcomp.Codec = no_gpu
    with pytest.raises(CodecUnavailableError, match=r"GPU.*no CUDA-capable device"):
        make_codec("ans")


# -- fuzz: a writer that is at fault in any way, with sums that fit -------------------------------------------------------

RAW_PART = kv(1, 16, 3, 64)
SOUND = {
    name: encode_record(make_codec(name, allow_lossy=True, **(SHAPE if name == "int8" else {})), WHO, RAW_PART)
    for name in ("identity", "zstd", "bf16_split", "int8", "fp8")
}
scalars = st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.text(max_size=4), st.floats())


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_fuzz_decoders_refuse_or_decode_and_nothing_else(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SOUND)))
    head, sound = SOUND[name]
    payload = bytearray(sound)
    match data.draw(st.sampled_from(["bytes", "cut", "grow", "params", "length", "codec", "noise"])):
        case "bytes":
            for _ in range(data.draw(st.integers(1, 8))):
                payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        case "cut":
            del payload[data.draw(st.integers(0, len(payload) - 1)) :]
        case "grow":
            payload += data.draw(st.binary(min_size=1, max_size=40))
        case "params":
            names = [*head.codec_params, "exponent", "tokens"]
            head = changed(
                head, codec_params=dict(head.codec_params) | {data.draw(st.sampled_from(names)): data.draw(scalars)}
            )
        case "length":
            head = changed(head, raw_bytes=data.draw(st.integers(0, 1 << 16)))
        case "codec":
            head = changed(head, codec=data.draw(st.sampled_from(sorted(SOUND))))
        case _:
            payload = bytearray(data.draw(st.binary(max_size=400)))
    head = changed(head, payload_bytes=len(payload), payload_sum=xxh3(payload))
    record = pack(head, payload)
    try:
        found, view = unpack(record, WHO)
        back = decode_record(found, view, raw_bytes_max=1 << 20)
    except (CodecError, RecordChecksumError, RecordLengthError):
        return
    assert len(back) == found.raw_bytes
    if found.codec not in ("int8", "fp8", "identity"):
        assert bytes(back) == RAW_PART


def test_the_fuzzer_finds_a_decoder_that_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary."""

    def careless(payload: memoryview, params: Mapping[str, Any], out: memoryview) -> None:
        np.frombuffer(out, "<u2")[:] = np.frombuffer(payload, np.uint8, len(out) // 2)

    monkeypatch.setattr(codec_bf16.Bf16SplitCodec, "decode", careless)
    with pytest.raises(ValueError, match="buffer"):
        test_fuzz_decoders_refuse_or_decode_and_nothing_else()


def test_parts_at_odd_addresses_are_split_the_same() -> None:
    raw = kv(1, 16, 3, 64)
    shifted = memoryview(b"?" + raw)[1:]
    head, payload = encode_record(make_codec("bf16_split"), WHO, raw)
    assert bytes(encode_record(make_codec("bf16_split"), WHO, shifted)[1]) == bytes(payload)
    target = memoryview(bytearray(len(raw) + 1))[1:]
    assert decode_record(head, payload, target) == raw


def test_one_loop_is_compiled_whatever_memory_it_is_given() -> None:
    raw = kv(1, 16, 3, 64)
    codec = make_codec("bf16_split")
    split = codec_bf16.loops()[0]
    compiled = len(getattr(split, "signatures", []))
    for source in (raw, bytearray(raw), memoryview(raw), memoryview(bytearray(raw))):
        encode_record(codec, WHO, source)
    assert len(getattr(split, "signatures", [])) == compiled


# -- where decoded bytes go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["identity", "zstd", "bf16_split"])
def test_a_target_counts_its_bytes_whatever_its_shape_and_must_be_writable(name: str) -> None:
    raw = kv(1, 16, 3, 64)
    head, payload = encode_record(make_codec(name), WHO, raw)
    target = bytearray(len(raw))
    back = decode_record(head, payload, memoryview(target).cast("I", (2, len(raw) // 8)))
    assert bytes(target) == bytes(back) == raw
    for unfit in (bytearray(4 * len(raw)), bytearray(len(raw) - 4)):
        with pytest.raises(RecordLengthError):
            decode_record(head, payload, memoryview(unfit).cast("I"))
    with pytest.raises(RecordLengthError, match="contiguous"):
        decode_record(head, payload, memoryview(bytearray(2 * len(raw)))[::2])
    with pytest.raises(CodecError, match="read-only"):
        decode_record(head, payload, memoryview(bytes(len(raw))))


def test_a_namespace_of_lossy_records_cannot_be_taken_for_exact_ones() -> None:
    lossy = RecordCodec(b"model", make_codec("fp8", allow_lossy=True))
    for codec in (make_codec("identity"), make_codec("fp8", allow_lossy=True)):
        with pytest.raises(RecordNamespaceError, match="lossy"):
            RecordCodec(lossy.namespace, codec)
