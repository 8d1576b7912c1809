"""The request trace: a line for each request that an engine has answered, for `kvtier simulate`.

A line says when the request arrived, which blocks its prompt has, and how many tokens went in and came out. A block is named by the first 8 bytes
of its key, which is a hash: neither text nor token ids are in a trace.

The engine's thread only puts what it knows into a queue; a thread of its own makes lines and writes them. Lines are in the order of arrival, as readers
want them, so that one waits until all requests ahead of it have been answered, in bounded memory: beyond that the first is written
without the length of its answer. What finds the queue full, and what the file cannot take, is dropped and counted, never waited for.
"""

import fcntl
import logging
import os
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import msgspec

from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

QUEUE_MAX = 1024
HELD_BYTES_MAX = 16 << 20
ID_BYTES = 8
_REQUEST_BYTES = 400
"""What a request that waits takes beside its ids, roughly."""


class TraceLine(msgspec.Struct, omit_defaults=True):
    """A request in a file of any of the formats that `kvtier.simulate.trace` reads and describes."""

    timestamp: float
    hash_ids: list[int]
    input_length: int = 0
    output_length: int = 0
    chat_id: int | str | None = None
    block_tokens: int = 0


def block_id(key: bytes) -> int:
    """What stands for a key, which must be a hash, in a trace: its first 8 bytes."""
    return int.from_bytes(key[:ID_BYTES], "little")


def trace_line(
    time_s: float, block_ids: Sequence[int], input_tokens: int, output_tokens: int, block_tokens: int
) -> bytes:
    """One request of a live engine as a line of a `kvtier` trace, newline included."""
    line = TraceLine(round(time_s, 6), list(block_ids), input_tokens, output_tokens, block_tokens=block_tokens)
    return msgspec.json.encode(line) + b"\n"


class _Arrived:
    """A request on its way into the file; answered once `output_tokens` is known."""

    __slots__ = ("ids", "input_tokens", "output_tokens", "time_s")

    def __init__(self, time_s: float, ids: "array[int]", input_tokens: int) -> None:
        self.time_s = time_s
        self.ids = ids
        self.input_tokens = input_tokens
        self.output_tokens: int | None = None


# Requests are told apart by their number here: who names them may name two alike.
_Arrival = tuple[int, float, Sequence[bytes], int]
_Answer = tuple[int, int]


class RequestTrace:
    """Writes a trace behind the caller's back. `arrived`, `answered` and `close` are for one thread.

    Args:
        path: the file. What is there already is kept as `<path>.1`, in place of an older one.
        bytes_max: of both files together. Where the file would exceed half of it, it becomes `<path>.1`, and a new one begins.
        block_tokens: tokens that one key stands for.
        started_s: the caller's clock now; a trace's times begin at 0.

    Attributes:
        counters: `trace_requests` are in a file, `trace_unanswered_requests` of them without the length of their answer;
            `trace_dropped_requests` found the queue full, `trace_failed_requests` could not be written.

    Raises ConfigError where the file cannot be written now. Later faults are counted, and logged once.
    """

    def __init__(self, path: Path, bytes_max: int, block_tokens: int, started_s: float) -> None:
        self.path = path
        self.counters: Counter[str] = Counter(
            trace_requests=0, trace_unanswered_requests=0, trace_dropped_requests=0, trace_failed_requests=0
        )
        self._file_bytes_max = bytes_max // 2
        self._block_tokens = block_tokens
        self._started_s = started_s
        self._queue: SimpleQueue[_Arrival | _Answer | None] = SimpleQueue()
        self._open: dict[str, int] = {}
        self._numbers = count()
        self._held: OrderedDict[int, _Arrived] = OrderedDict()
        self._held_bytes = 0
        self._size_bytes = 0
        self._warned = False
        try:
            self._file = self._begin()
        except OSError as error:
            raise ConfigError(
                f"trace_path is {str(path)!r}: {error.strerror}: name a file that this engine alone writes, in a directory that exists"
            ) from None
        self._thread = threading.Thread(target=self._run, name="kvtier-trace", daemon=True)
        self._thread.start()

    # ---- the engine's thread

    def arrived(self, request_id: str, keys: Sequence[bytes], input_tokens: int, time_s: float) -> None:
        """A request with these prompt keys, of which there is at least one, has arrived; one of the same name is over then. Returns at once."""
        self.answered(request_id, 0)
        if self._queue.qsize() >= QUEUE_MAX:
            self.counters["trace_dropped_requests"] += 1
            return
        self._open[request_id] = number = next(self._numbers)
        self._queue.put((number, time_s, keys, input_tokens))

    def answered(self, request_id: str, output_tokens: int) -> None:
        """It has been answered, or ended otherwise. Returns at once."""
        number = self._open.pop(request_id, None)
        if number is not None:
            self._queue.put((number, output_tokens))

    def close(self, deadline_s: float) -> bool:
        """Write what has been answered, for `deadline_s` seconds at most. True if that was enough."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # ---- the writer's thread

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if len(event) == 2:
                self._answer(*event)
            else:
                self._arrive(*event)
        for waiting in self._held.values():
            if waiting.output_tokens is not None:
                self._write(waiting)
        os.close(self._file)

    def _arrive(self, number: int, time_s: float, keys: Sequence[bytes], input_tokens: int) -> None:
        ids = array("Q", map(block_id, keys))
        self._held[number] = _Arrived(time_s - self._started_s, ids, input_tokens)
        self._held_bytes += len(ids) * ID_BYTES + _REQUEST_BYTES
        while self._held_bytes > HELD_BYTES_MAX:
            self._write(self._take_first())

    def _answer(self, number: int, output_tokens: int) -> None:
        waiting = self._held.get(number)
        if waiting is None:
            return  # it has been written without
        waiting.output_tokens = output_tokens
        while self._held and next(iter(self._held.values())).output_tokens is not None:
            self._write(self._take_first())

    def _take_first(self) -> _Arrived:
        _, waiting = self._held.popitem(last=False)
        self._held_bytes -= len(waiting.ids) * ID_BYTES + _REQUEST_BYTES
        return waiting

    def _write(self, request: _Arrived) -> None:
        line = trace_line(
            request.time_s, request.ids, request.input_tokens, request.output_tokens or 0, self._block_tokens
        )
        try:
            if self._size_bytes and self._size_bytes + len(line) > self._file_bytes_max:
                self._rotate()
            if len(line) > self._file_bytes_max:
                raise OSError(0, "the line alone is larger than trace_bytes_max allows")
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError(0, "the filesystem took a part of a line only")
        except OSError as error:
            self.counters["trace_failed_requests"] += 1
            with suppress(OSError):  # leave whole lines only
                os.ftruncate(self._file, self._size_bytes)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "kvtier: requests are missing in the trace %s: %s (said once; kvtier_trace_failed_requests counts them)",
                    self.path,
                    error.strerror,
                )
            return
        self._size_bytes += len(line)
        self.counters["trace_requests"] += 1
        self.counters["trace_unanswered_requests"] += request.output_tokens is None

    def _begin(self) -> int:
        """Descriptor of a new, empty file at `path`, which is locked; what was there is kept beside it."""
        file = self._locked()
        if not os.fstat(file).st_size:
            return file
        try:
            # The old file stays locked until its successor is.
            self.path.replace(f"{self.path}.1")
            return self._locked()
        finally:
            os.close(file)

    def _rotate(self) -> None:
        with suppress(FileNotFoundError):  # somebody took it away
            self.path.replace(f"{self.path}.1")
        old, self._file = self._file, self._locked()
        os.close(old)
        self._size_bytes = 0

    def _locked(self) -> int:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise OSError(0, "another engine writes to it") from None
        except BaseException:
            os.close(file)
            raise
        return file
