"""`ans`: lossless entropy coding on an NVIDIA GPU, by nvCOMP. Refused where there is no such GPU or no nvCOMP.

The payload is nvCOMP's native bitstream; it holds its own header, so that the chunking of its writer need not be known. The codec takes bytes that lie in host
memory: what it gains is the GPU's speed at coding, and it pays for crossing the bus twice.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Final, Self

import numpy as np

from kvtier.record.codecs import Codec, CodecUnavailableError, Encoded, declined, int_in, ratio_from, refuse_unknown
from kvtier.record.envelope import Scalar
from kvtier.record.errors import CodecError

CHUNK_BYTES_DEFAULT: Final = 1 << 16

# nvCOMP's codecs hold scratch memory and belong to one thread.
_contexts = threading.local()


def nvcomp_module() -> Any:
    """The module `nvidia.nvcomp`. Raises CodecUnavailableError where it cannot be imported."""
    try:
        return import_module("nvidia.nvcomp")
    except ImportError as error:
        raise CodecUnavailableError(
            f"codec 'ans' needs nvCOMP, which cannot be imported ({error}): install nvidia-nvcomp-cu12 or nvidia-nvcomp-cu13, or use 'bf16_split'"
        ) from error


def _nvcomp_codec(chunk_bytes: int) -> tuple[Any, Any]:
    """nvCOMP and this thread's codec of it."""
    nvcomp = nvcomp_module()
    codecs: dict[int, Any] | None = getattr(_contexts, "codecs", None)
    if codecs is None:
        codecs = _contexts.codecs = {}
    if chunk_bytes not in codecs:
        try:
            codecs[chunk_bytes] = nvcomp.Codec(algorithm="ANS", uncomp_chunk_size=chunk_bytes)
        except RuntimeError as error:
            raise CodecUnavailableError(
                f"codec 'ans' needs an NVIDIA GPU that nvCOMP can use ({error}): use 'bf16_split' here"
            ) from error
    return nvcomp, codecs[chunk_bytes]


def _on_gpu(nvcomp: Any, view: memoryview) -> Any:
    return nvcomp.as_array(np.frombuffer(view, np.uint8)).cuda()


def _on_host(array: Any) -> Any:
    return np.asarray(array.cpu()).view(np.uint8).reshape(-1)


@dataclass(frozen=True, slots=True)
class AnsCodec(Codec):
    """rANS on the GPU. Parameters: `chunk_bytes` (4,096 to 262,144, a multiple of 4,096, default 65,536), `ratio_min` (default 1.1)."""

    name: ClassVar[str] = "ans"
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    ratio_min: float = 1.1

    @classmethod
    def make(cls, **params: Any) -> Self:
        refuse_unknown(cls.name, params, ("chunk_bytes", "ratio_min"))
        chunk_bytes = int_in(cls.name, "chunk_bytes", params.get("chunk_bytes", CHUNK_BYTES_DEFAULT), 4096, 1 << 18)
        if chunk_bytes % 4096:
            raise CodecError(f"chunk_bytes of codec 'ans' is {chunk_bytes}: use a multiple of 4096")
        made = cls(chunk_bytes, ratio_from(cls.name, params.get("ratio_min", 1.1)))
        _nvcomp_codec(chunk_bytes)
        return made

    def encode(self, raw: memoryview) -> Encoded:
        if not raw:
            return declined(raw)
        nvcomp, codec = _nvcomp_codec(self.chunk_bytes)
        payload = _on_host(codec.encode(_on_gpu(nvcomp, raw)))
        if payload.nbytes * self.ratio_min > len(raw):
            return declined(raw)
        return Encoded(payload.tobytes(), self.name)

    @classmethod
    def decode(cls, payload: memoryview, params: Mapping[str, Scalar], out: memoryview) -> None:
        nvcomp, codec = _nvcomp_codec(CHUNK_BYTES_DEFAULT)
        try:
            raw = _on_host(codec.decode(_on_gpu(nvcomp, payload), data_type="|u1"))
        except (RuntimeError, ValueError) as error:
            raise CodecError(f"nvCOMP cannot decode a payload of {len(payload)} bytes: {error}") from error
        if raw.nbytes != len(out):
            raise CodecError(f"an ans payload decodes to {raw.nbytes} bytes where {len(out)} were raw")
        out[:] = raw.data
