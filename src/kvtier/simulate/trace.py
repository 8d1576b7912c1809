"""Request traces, read line by line: one JSON object a line, checked, in bounded memory.

Formats:

- `mooncake`: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, `hash_ids`: one id for
  each block of 512 tokens of the prompt, equal ids meaning an equal prefix up to and including that block.
- `bailian`: the same with `timestamp` in seconds, blocks of 16 tokens, and `chat_id`, `parent_chat_id`, `turn`,
  `type`, of which none is needed.
- `kvtier`: what `kvtier.observe.requests` writes for a live engine (`trace_path`): the same with `timestamp` in seconds and `block_tokens`, the
  tokens of one block.

Files may be compressed (`.gz`, `.xz`). Times are given back in seconds.
"""

import gzip
import io
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from kvtier.errors import KVTierError
from kvtier.observe.requests import TraceLine

HASH_ID_MAX = 2**64 - 1
TOKENS_PER_BLOCK = {"mooncake": 512, "bailian": 16}
KVTIER = "kvtier"
FORMATS = ("auto", *TOKENS_PER_BLOCK, KVTIER)


class TraceError(KVTierError, ValueError):
    """A trace can't be used: which file, which line, and what is wrong with it."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace.

    Attributes:
        time_s: seconds since the trace's own zero.
        block_ids: one id for each block of the prompt, in prefix order; equal ids mean equal prefixes.
        input_tokens: tokens of the prompt.
        output_tokens: tokens that were generated.
    """

    time_s: float
    block_ids: Sequence[int]
    input_tokens: int
    output_tokens: int


_decode = msgspec.json.Decoder(TraceLine).decode


@dataclass(slots=True)
class Trace:
    """A file of requests, to be iterated as often as needed. `skipped` counts the bad lines of the last pass.

    Args:
        path: the file.
        format: `mooncake`, `bailian`, `kvtier`, or `auto` to tell by the first line.
        skip_bad: leave out and count lines that are malformed or out of order, instead of raising.
        requests_max: stop after so many good ones.
        progress: called with the bytes read since the last call, of `file_bytes` in all.
    """

    path: Path
    format: str = "auto"
    skip_bad: bool = False
    requests_max: int | None = None
    progress: Callable[[int], None] | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise TraceError(f"trace format {self.format!r} is not known: use one of {known}")

    @property
    def name(self) -> str:
        """The file's name without its endings."""
        return self.path.name.split(".")[0] or self.path.name

    @property
    def file_bytes(self) -> int:
        """Bytes of the file as it lies on disk."""
        return self.path.stat().st_size

    def resolved_format(self) -> str:
        """The format, found out from the first good line where it is `auto`."""
        if self.format != "auto":
            return self.format
        first = self._first_good()
        if first is None:
            return "mooncake"
        if first.block_tokens:
            return KVTIER
        return "bailian" if first.chat_id is not None else "mooncake"

    @property
    def tokens_per_block(self) -> int:
        """Tokens that one block id stands for."""
        name = self.resolved_format()
        if name != KVTIER:
            return TOKENS_PER_BLOCK[name]
        first = self._first_good()
        if first is None or first.block_tokens < 1:
            raise TraceError(f"{self.path}: block_tokens is missing or not positive on the first line")
        return first.block_tokens

    def _first_good(self) -> TraceLine | None:
        with _open(self.path)[1] as lines:
            for line in itertools.islice(self._read(lines), 1000):
                try:
                    return _decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
        return None

    def _read(self, lines: BinaryIO) -> Iterator[bytes]:
        try:
            yield from lines
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as wrong:
            raise TraceError(f"{self.path}: it cannot be read to its end: {wrong}") from None

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises TraceError for the first bad line (unless `skip_bad`), and for a trace without one good line."""
        scale = 0.001 if self.resolved_format() == "mooncake" else 1.0
        self.skipped = 0
        good, last_s = 0, float("-inf")
        raw, lines = _open(self.path)
        told = 0
        with lines:
            for number, line in enumerate(self._read(lines), 1):
                if not line.strip():
                    continue
                try:
                    request = _parse(line, scale, last_s)
                except TraceError as wrong:
                    if not self.skip_bad:
                        raise TraceError(f"{self.path}, line {number}: {wrong}") from None
                    self.skipped += 1
                    continue
                good += 1
                last_s = request.time_s
                yield request
                if self.progress is not None and not number % 256:
                    at = raw.tell()
                    self.progress(at - told)
                    told = at
                if good == self.requests_max:
                    break
        if good == 0:
            bad = f" ({self.skipped} bad lines were skipped)" if self.skipped else ""
            raise TraceError(f"{self.path}: the trace has no request{bad}")


def _parse(line: bytes, scale: float, last_s: float) -> TraceRequest:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise TraceError(f"{wrong}") from None
    time_s = row.timestamp * scale
    if not 0 <= time_s < float("inf"):
        raise TraceError(f"timestamp {row.timestamp} is not a time since the start")
    if time_s < last_s:
        raise TraceError(f"timestamp {row.timestamp} is before that of the request ahead: sort the trace by time")
    if not row.hash_ids:
        raise TraceError("hash_ids is empty: a request has at least one block")
    for block_id in row.hash_ids:
        if not 0 <= block_id <= HASH_ID_MAX:
            raise TraceError(f"hash id {block_id} does not fit in 64 bits without sign")
    if row.input_length < 0 or row.output_length < 0:
        raise TraceError(f"input_length {row.input_length} or output_length {row.output_length} is negative")
    ids = list(dict.fromkeys(row.hash_ids))  # a block that is named twice is one block: a load asks for it once
    return TraceRequest(time_s, ids, row.input_length, row.output_length)


def _open(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """The file itself, whose place tells how far a reader has come, and its lines."""
    try:
        raw = path.open("rb")
    except OSError as wrong:
        raise TraceError(f"{path}: {wrong.strerror}") from wrong
    if path.suffix == ".gz":
        return raw, cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw)))
    if path.suffix == ".xz":
        return raw, cast(BinaryIO, io.BufferedReader(lzma.LZMAFile(raw)))
    return raw, raw
