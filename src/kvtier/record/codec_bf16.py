"""`bf16_split`: lossless, for bfloat16. Exponents compress, the rest does not.

Of the 16 bits of a bfloat16 the 8 of the exponent are few values in fact, while sign and mantissa are noise. The codec takes them apart into two
planes of one byte an element, compresses the plane of exponents with zstd and keeps the other as it is. Exponents repeat in frequency, not in sequence:
searching them for matches costs two thirds of the time and makes the result larger, so level 0, the default, leaves that out.

    payload = sign and mantissa, one byte an element | the last raw byte where their number is odd | zstd frame of the exponents

The loops run in numba, without the GIL, where it is installed, and in numpy otherwise; the bytes are the same.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from kvtier.record.codecs import (
    ZSTD_LEVEL_MAX,
    Codec,
    Encoded,
    declined,
    int_in,
    ratio_from,
    refuse_unknown,
    zstd_compress,
    zstd_compress_entropy,
    zstd_decompress_into,
)
from kvtier.record.envelope import Scalar
from kvtier.record.errors import CodecError

U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
Split = Callable[[U16, U8, U8], None]
Join = Callable[[U8, U8, U16], None]


def split_numpy(elements: U16, exponents: U8, rest: U8) -> None:
    """Take bfloat16 patterns apart."""
    np.right_shift(elements, 7, out=exponents, casting="unsafe")
    np.bitwise_or((elements >> 8) & 0x80, elements & 0x7F, out=rest, casting="unsafe")


def join_numpy(exponents: U8, rest: U8, elements: U16) -> None:
    """Put bfloat16 patterns together."""
    np.left_shift(exponents, 7, out=elements, dtype=np.uint16)
    wide = rest.astype(np.uint16)
    elements |= wide & 0x7F
    wide &= 0x80
    wide <<= 8
    elements |= wide


def _split_loop(elements: U16, exponents: U8, rest: U8) -> None:
    for at in range(elements.size):
        element = elements[at]
        exponents[at] = (element >> 7) & 0xFF
        rest[at] = ((element >> 8) & 0x80) | (element & 0x7F)


def _join_loop(exponents: U8, rest: U8, elements: U16) -> None:
    for at in range(elements.size):
        byte = np.uint16(rest[at])
        elements[at] = (np.uint16(exponents[at]) << 7) | (byte & 0x7F) | ((byte & 0x80) << 8)


@cache
def loops() -> tuple[Split, Join]:
    """The fastest loops that there are here."""
    try:
        from numba import njit
    except ImportError:
        return split_numpy, join_numpy
    try:
        return njit(nogil=True, cache=True)(_split_loop), njit(nogil=True, cache=True)(_join_loop)
    except RuntimeError:  # nowhere to keep what was compiled: compile it in each process
        return njit(nogil=True)(_split_loop), njit(nogil=True)(_join_loop)


def split(raw: memoryview, exponents: U8, rest: U8) -> None:
    """Take the bfloat16 of `raw` apart, wherever it lies."""
    elements = np.frombuffer(raw, "<u2", exponents.size)
    # One kind of array, so that one loop is compiled: read-only, and aligned.
    elements.flags.writeable = False
    (loops()[0] if elements.flags.aligned else split_numpy)(elements, exponents, rest)


def join(exponents: U8, rest: U8, out: memoryview) -> None:
    """Put bfloat16 together into `out`, wherever it lies."""
    elements = np.frombuffer(out, "<u2", exponents.size)
    rest.flags.writeable = False
    (loops()[1] if elements.flags.aligned else join_numpy)(exponents, rest, elements)


@cache
def warm_up() -> None:
    """Import and compile what the first record would otherwise wait for."""
    plane, rest = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    split(memoryview(bytes(2)), plane, rest)
    join(plane, rest, memoryview(bytearray(2)))


# A plane of exponents for each thread, as long as its longest part: fresh memory for each part would cost its page faults each time.
_planes = threading.local()


def _scratch(count: int) -> U8:
    plane: U8 | None = getattr(_planes, "exponents", None)
    if plane is None or plane.size < count:
        plane = _planes.exponents = np.empty(count, np.uint8)
    return plane[:count]


@dataclass(frozen=True, slots=True)
class Bf16SplitCodec(Codec):
    """Exponents in zstd, sign and mantissa raw.

    Parameters: `level` (0 to 22; 0, the default, codes by frequency alone, others are zstd's), `ratio_min` (default 1.1).
    """

    name: ClassVar[str] = "bf16_split"
    level: int = 0
    ratio_min: float = 1.1

    @classmethod
    def make(cls, **params: Any) -> Self:
        refuse_unknown(cls.name, params, ("level", "ratio_min"))
        made = cls(
            int_in(cls.name, "level", params.get("level", 0), 0, ZSTD_LEVEL_MAX),
            ratio_from(cls.name, params.get("ratio_min", 1.1)),
        )
        warm_up()
        return made

    def encode(self, raw: memoryview) -> Encoded:
        count = len(raw) // 2
        frame_at = len(raw) - count
        # As long as the raw bytes: what does not fit is declined.
        payload = np.empty(len(raw), np.uint8)
        exponents = _scratch(count)
        split(raw, exponents, payload[:count])
        frame = zstd_compress(exponents.data, self.level) if self.level else zstd_compress_entropy(exponents.data)
        if (frame_at + len(frame)) * self.ratio_min > len(raw):
            return declined(raw)
        view = payload.data
        view[count:frame_at] = raw[2 * count :]
        view[frame_at : frame_at + len(frame)] = frame
        return Encoded(view[: frame_at + len(frame)], self.name, {"level": self.level})

    @classmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        count = len(out) // 2
        frame_at = len(out) - count
        if len(payload) < frame_at:
            raise CodecError(f"a {cls.name} payload of {len(payload)} bytes cannot hold {len(out)} raw bytes")
        exponents = _scratch(count)
        zstd_decompress_into(payload[frame_at:], exponents.data)
        join(exponents, np.frombuffer(payload, np.uint8, count), out)
        out[2 * count :] = payload[count:frame_at]
