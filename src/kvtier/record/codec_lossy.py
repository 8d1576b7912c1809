"""`int8` and `fp8`: one byte for each value of 16 bits. They change what the model sees, and are off unless asked for.

`int8` knows how keys and values lie, because they want different scales: channels of keys differ much and keep their range over tokens, so each
channel of keys has one scale for all tokens of the part; values have one scale for each token and head.

    payload = scales of keys | scales of values | keys | values        (scales: the upper 16 bits of a float32)

`fp8` (e4m3: 4 bits of exponent, 3 of mantissa, no infinities) casts each value by itself, after a power of two that puts the part's largest value
just under the format's. Both decline a part that holds an infinity or NaN. The head names a bound of the absolute error, `error_abs_max`; fp8's also of the
relative one, `error_rel_max`, which holds for values down to `error_abs_min`: below it the error is at most half of it.

Layouts: `LCND` = (layers, 2, tokens, heads, dim), `NCLD` = (tokens, 2, layers, heads, dim); 2 is keys, then values. The layers follow from the length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import frexp
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from kvtier.record.codecs import Codec, Encoded, declined, int_in, param_int, refuse_unknown
from kvtier.record.envelope import Scalar
from kvtier.record.errors import CodecError

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]

DTYPES: Final = ("bf16", "fp16")
LAYOUTS: Final = ("LCND", "NCLD")
# Half the distance between a number and its neighbour, as a part of it.
_ROUNDING: Final = {"bf16": 2.0**-8, "fp16": 2.0**-11}
_LARGEST: Final = {"bf16": float(np.float32(2.0**127 * (2 - 2**-7))), "fp16": 65504.0}
_SIZE_MAX: Final = 1 << 20


def dtype_in(codec: str, value: Any) -> str:
    """`value` if it is a type that can be quantised. Raises CodecError."""
    if value not in DTYPES:
        raise CodecError(f"dtype of codec {codec!r} is {value!r}: use one of {', '.join(DTYPES)}")
    return str(value)


def to_float(patterns: U16, dtype: str) -> F32:
    """Patterns of `dtype` as float32, exactly."""
    if dtype == "fp16":
        return patterns.view(np.float16).astype(np.float32)
    wide = patterns.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def from_float(numbers: F32, dtype: str) -> U16:
    """Finite float32 rounded to the nearest of `dtype`, ties to even; beyond its largest, its largest."""
    largest = np.float32(_LARGEST[dtype])
    numbers = np.clip(numbers, -largest, largest)
    if dtype == "fp16":
        return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return (bits >> 16).astype(np.uint16)


def _finite(patterns: U16, dtype: str) -> npt.NDArray[np.bool_]:
    exponent = 0x7F80 if dtype == "bf16" else 0x7C00
    finite: npt.NDArray[np.bool_] = (patterns & exponent) != exponent
    return finite


# -- int8 ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    dtype: str
    layout: str
    tokens: int
    heads: int
    head_dim: int

    def layers_of(self, codec: str, raw_bytes: int) -> int:
        one = 4 * self.tokens * self.heads * self.head_dim
        if raw_bytes == 0 or raw_bytes % one:
            raise CodecError(
                f"codec {codec!r} was given {raw_bytes} bytes, no whole number of layers of {one}: tokens={self.tokens}, heads={self.heads} and "
                f"head_dim={self.head_dim} do not fit what is stored"
            )
        return raw_bytes // one

    def keys_and_values(self, part: npt.NDArray[Any], layers: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Views of a part as (layers, tokens, heads, dim) twice."""
        if self.layout == "LCND":
            shaped = part.reshape(layers, 2, self.tokens, self.heads, self.head_dim)
            return shaped[:, 0], shaped[:, 1]
        shaped = part.reshape(self.tokens, 2, layers, self.heads, self.head_dim)
        return shaped[:, 0].swapaxes(0, 1), shaped[:, 1].swapaxes(0, 1)


def _quantise(numbers: F32, axis: int) -> tuple[U16, npt.NDArray[np.int8]]:
    """Scales along `axis`, rounded up to what 16 bits hold, and the numbers in them."""
    largest = np.abs(numbers).max(axis=axis, keepdims=True)
    # The least scale keeps 127 of it above zero in float32 arithmetic, and gives a range of zeros a scale too.
    scales = np.maximum(largest / np.float32(127), np.float32(2.0**-126))
    patterns = ((scales.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return patterns, np.rint(numbers / to_float(patterns, "bf16")).astype(np.int8)


@dataclass(frozen=True, slots=True)
class Int8Codec(Codec):
    """8-bit integers, keys by channel, values by token and head.

    Parameters, of which the sizes are required: `dtype` (bf16, fp16; default bf16), `layout` (LCND, NCLD; default LCND), `tokens`, `heads`, `head_dim`.
    """

    name: ClassVar[str] = "int8"
    lossy: ClassVar[bool] = True
    shape: _Shape

    @classmethod
    def make(cls, **params: Any) -> Self:
        refuse_unknown(cls.name, params, ("dtype", "layout", "tokens", "heads", "head_dim"))
        layout = params.get("layout", "LCND")
        if layout not in LAYOUTS:
            raise CodecError(f"layout of codec {cls.name!r} is {layout!r}: use one of {', '.join(LAYOUTS)}")
        sizes = [int_in(cls.name, name, params.get(name), 1, _SIZE_MAX) for name in ("tokens", "heads", "head_dim")]
        return cls(_Shape(dtype_in(cls.name, params.get("dtype", "bf16")), layout, *sizes))

    def encode(self, raw: memoryview) -> Encoded:
        shape = self.shape
        layers = shape.layers_of(self.name, len(raw))
        patterns = np.frombuffer(raw, "<u2")
        if not _finite(patterns, shape.dtype).all():
            return declined(raw)
        keys, values = shape.keys_and_values(to_float(patterns, shape.dtype), layers)
        key_scales, key_numbers = _quantise(keys, 1)
        value_scales, value_numbers = _quantise(values, 3)
        widest = float(max(to_float(key_scales, "bf16").max(), to_float(value_scales, "bf16").max()))
        # Half a step, then the rounding to the type; the last factor covers float32 arithmetic.
        bound = widest * (0.5 + 127.5 * _ROUNDING[shape.dtype]) * (1 + 2.0**-20) + (
            2.0**-25 if shape.dtype == "fp16" else 0
        )
        payload = b"".join(array.tobytes() for array in (key_scales, value_scales, key_numbers, value_numbers))
        params: dict[str, Scalar] = {
            "lossy": True,
            "error_abs_max": bound,
            "dtype": shape.dtype,
            "layout": shape.layout,
            "tokens": shape.tokens,
            "heads": shape.heads,
            "head_dim": shape.head_dim,
        }
        return Encoded(payload, self.name, params)

    @classmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        known = {name: params[name] for name in ("dtype", "layout", "tokens", "heads", "head_dim") if name in params}
        shape = cls.make(**known).shape
        layers = shape.layers_of(cls.name, len(out))
        channels = shape.heads * shape.head_dim
        count = layers * shape.tokens * channels
        key_scale_count, value_scale_count = layers * channels, layers * shape.tokens * shape.heads
        if len(payload) != 2 * (key_scale_count + value_scale_count) + 2 * count:
            raise CodecError(f"an int8 payload of {len(payload)} bytes does not fit {len(out)} raw bytes of {shape}")
        scales = to_float(np.frombuffer(payload, "<u2", key_scale_count + value_scale_count), "bf16")
        if not np.isfinite(scales).all():
            raise CodecError("an int8 payload has scales that are no numbers: its writer was at fault")
        numbers = np.frombuffer(payload, np.int8, 2 * count, 2 * scales.size)
        full = (layers, shape.tokens, shape.heads, shape.head_dim)
        with np.errstate(
            over="ignore"
        ):  # at the end of the range 127 scales may pass it: such numbers are clipped below
            keys = numbers[:count].reshape(full) * scales[:key_scale_count].reshape(
                layers, 1, shape.heads, shape.head_dim
            )
            values = numbers[count:].reshape(full) * scales[key_scale_count:].reshape(
                layers, shape.tokens, shape.heads, 1
            )
        into_keys, into_values = shape.keys_and_values(np.frombuffer(out, "<u2"), layers)
        into_keys[...] = from_float(keys, shape.dtype)
        into_values[...] = from_float(values, shape.dtype)


# -- fp8 -----------------------------------------------------------------------------------------------------------------

_E4M3_LARGEST: Final = 448.0
_E4M3_REL: Final = 2.0**-4
_E4M3_NORMAL_MIN: Final = 2.0**-6
_EXPONENT_MAX: Final = 200
_TABLES_MAX: Final = 64


@cache
def e4m3_numbers() -> F32:
    """What each of the 256 patterns stands for; NaN for the two that are NaN."""
    pattern = np.arange(256)
    sign = np.where(pattern & 0x80, -1.0, 1.0)
    exponent, mantissa = (pattern >> 3) & 0xF, pattern & 7
    number = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    number[(pattern & 0x7F) == 0x7F] = np.nan
    numbers: F32 = (sign * number).astype(np.float32)
    return numbers


def e4m3_of(numbers: npt.NDArray[np.float64]) -> U8:
    """The nearest patterns, ties to even, of finite numbers of at most 448 (saturating beyond)."""
    ladder = e4m3_numbers()[:0x7F].astype(np.float64)
    sizes = np.minimum(np.abs(numbers), _E4M3_LARGEST)
    above = np.clip(np.searchsorted(ladder, sizes), 1, len(ladder) - 1)
    to_lower, to_upper = sizes - ladder[above - 1], ladder[above] - sizes
    upper = (to_upper < to_lower) | ((to_upper == to_lower) & (above % 2 == 0))
    pattern = np.where(upper, above, above - 1)
    signed: U8 = (pattern | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)
    return signed


@lru_cache(_TABLES_MAX)
def _encode_table(dtype: str, exponent: int) -> U8:
    """The fp8 pattern of each 16-bit pattern times 2**exponent; what is not finite is never looked up."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns[~_finite(patterns, dtype)] = 0
    numbers = to_float(patterns, dtype).astype(np.float64)
    return e4m3_of(np.ldexp(numbers, exponent))


@lru_cache(_TABLES_MAX)
def _decode_table(dtype: str, exponent: int) -> U16:
    numbers = np.nan_to_num(np.ldexp(e4m3_numbers().astype(np.float64), -exponent), nan=0.0)
    return from_float(np.clip(numbers, -_LARGEST[dtype], _LARGEST[dtype]).astype(np.float32), dtype)


@dataclass(frozen=True, slots=True)
class Fp8Codec(Codec):
    """8-bit floats (e4m3) after a power of two for each part. Parameter: `dtype` (bf16, fp16; default bf16)."""

    name: ClassVar[str] = "fp8"
    lossy: ClassVar[bool] = True
    dtype: str = "bf16"

    @classmethod
    def make(cls, **params: Any) -> Self:
        refuse_unknown(cls.name, params, ("dtype",))
        return cls(dtype_in(cls.name, params.get("dtype", "bf16")))

    def encode(self, raw: memoryview) -> Encoded:
        if len(raw) % 2:
            raise CodecError(
                f"codec {self.name!r} was given {len(raw)} bytes, which are no whole number of {self.dtype}"
            )
        patterns = np.frombuffer(raw, "<u2")
        if not patterns.size or not _finite(patterns, self.dtype).all():
            return declined(raw)
        largest = float(to_float(np.atleast_1d((patterns & 0x7FFF).max()), self.dtype)[0])
        exponent = 0 if largest == 0 else max(-_EXPONENT_MAX, min(_EXPONENT_MAX, frexp(_E4M3_LARGEST / largest)[1] - 1))
        payload = _encode_table(self.dtype, exponent)[patterns]
        # Below the least normal number steps are even, above it an eighth of the number's power of two.
        least = _E4M3_NORMAL_MIN * 2.0**-exponent
        rounding = _ROUNDING[self.dtype] * (1 + _E4M3_REL)
        params: dict[str, Scalar] = {
            "lossy": True,
            "error_abs_max": largest * (_E4M3_REL + rounding) + (2.0**-25 if self.dtype == "fp16" else 0.0),
            "error_rel_max": _E4M3_REL + rounding,
            "error_abs_min": least,
            "dtype": self.dtype,
            "exponent": exponent,
        }
        return Encoded(payload.data, self.name, params)

    @classmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        exponent = param_int(cls.name, params, "exponent", -_EXPONENT_MAX, _EXPONENT_MAX)
        if len(out) != 2 * len(payload):
            raise CodecError(f"an fp8 payload of {len(payload)} bytes cannot hold {len(out)} raw bytes")
        table = _decode_table(dtype_in(cls.name, params.get("dtype")), exponent)
        patterns = np.frombuffer(payload, np.uint8)
        if ((patterns & 0x7F) == 0x7F).any():
            raise CodecError("an fp8 payload holds NaN, which no encoder writes: its writer was at fault")
        np.take(table, patterns, out=np.frombuffer(out, "<u2"), mode="clip")
