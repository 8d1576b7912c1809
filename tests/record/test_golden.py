"""Bytes written by format version 1 stay readable. The files in `golden/` were written once and are never rewritten:

a change that fails here needs a new version number, and a reader for the old one.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.record import envelope as env
from kvtier.record.codec_lossy import from_float
from kvtier.record.codecs import decode_record, encode_record, make_codec

GOLDEN = Path(__file__).parent / "golden"
WHO = env.Identity(namespace=bytes(range(32)), key=bytes(range(32, 64)), generation=5, group=1, rank=2)
SHAPE: dict[str, Any] = {"tokens": 8, "heads": 2, "head_dim": 16}
CODECS: dict[str, dict[str, Any]] = {"identity": {}, "zstd": {}, "bf16_split": {}, "int8": SHAPE, "fp8": {}}


def raw() -> bytes:
    """2 layers of numbers that look like KV, made without a random generator so that no library's change changes them."""
    steps = np.arange(2 * 2 * 8 * 2 * 16, dtype=np.uint64)
    mixed = (steps * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(1 << 20)
    return from_float((mixed.astype(np.float32) / (1 << 19) - 1) ** 3, "bf16").tobytes()


def record_of(codec: str) -> bytes:
    """How the golden record of a codec was written."""
    return env.pack(*encode_record(make_codec(codec, allow_lossy=True, **CODECS[codec]), WHO, raw()))


def slot() -> bytes:
    """How the golden slot was written."""
    view = bytearray(env.slot_bytes(len(raw())))
    view[: len(raw())] = raw()
    env.seal_slot(view, WHO, len(raw()))
    return bytes(view)


@pytest.mark.parametrize("codec", CODECS)
def test_golden_records_are_read(codec: str) -> None:
    head, payload = env.unpack((GOLDEN / f"record-v1-{codec}.bin").read_bytes(), WHO)
    assert head.codec == codec
    back = decode_record(head, payload)
    if codec in ("int8", "fp8"):
        before, after = (np.frombuffer(side, "<u2").astype(np.uint32) << 16 for side in (raw(), bytes(back)))
        error = np.abs(before.view(np.float32) - after.view(np.float32)).max()
        assert 0 < error <= float(head.codec_params["error_abs_max"])
    else:
        assert bytes(back) == raw()


@pytest.mark.parametrize("codec", ["identity", "int8", "fp8"])
def test_what_needs_no_compressor_is_still_written_as_it_was(codec: str) -> None:
    assert record_of(codec) == (GOLDEN / f"record-v1-{codec}.bin").read_bytes()


def test_the_golden_slot_is_read_and_still_written_as_it_was() -> None:
    stored = (GOLDEN / "slot-v1.bin").read_bytes()
    assert env.open_slot(stored, WHO, len(raw())).identity == WHO
    assert stored[: len(raw())] == raw()
    assert slot() == stored


def test_the_hex_example_in_the_documentation_is_a_record() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    block = text.split("<!-- example -->")[1].split("```")[1]
    dump = [line[6:53] for line in block.strip().splitlines() if line[:4].isalnum()]
    record = bytes.fromhex(" ".join(dump))
    who = env.Identity(b"ns", b"\x01\x02\x03\x04", 7, 1, 3)
    head, payload = env.unpack(record, who)
    assert bytes(payload) == b"kvtier"
    assert env.pack(env.head_for(who, b"kvtier"), b"kvtier") == record
    sizes = env.sizes_of(head)
    assert f"{sizes.payload_bytes} + {sizes.metadata_bytes} + {sizes.framing_bytes} = {sizes.stored_bytes}" in text
