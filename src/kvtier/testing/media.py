"""Media that misbehave on command: a part store around a real one."""

import threading
from collections.abc import Iterable, Sequence

from kvtier.tier.disk.base import (
    Key,
    Lane,
    PartDone,
    PartEntry,
    PartFailure,
    PartRead,
    PartsDone,
    PartStore,
    PartWrite,
    Transfer,
)


class _HeldRead(Transfer):
    def __init__(self, parts: Sequence[PartRead], done: PartsDone, lane: Lane) -> None:
        self.parts, self.done, self.lane = parts, done, lane

    def cancel(self) -> None:
        """A stalled device answers nothing, a cancellation neither."""


class FaultyPartStore(PartStore):
    """Does what `inner` does, except where told otherwise.

    Attributes:
        fail: failures to report, by key, instead of reading or writing.
        flip: keys of which one bit is flipped when they are read.
        write_failure: what every write ends with, None for its own end.
        raises: what `submit_read` and `submit_write` raise, None for nothing.
        reset_raises: what `reset` raises, None for nothing.
    """

    def __init__(self, inner: PartStore) -> None:
        self.inner = inner
        self.fail: dict[Key, PartFailure] = {}
        self.flip: set[Key] = set()
        self.write_failure: PartFailure | None = None
        self.raises: Exception | None = None
        self.reset_raises: Exception | None = None
        self._lock = threading.Lock()
        self._stalled = False
        self._held: list[_HeldRead] = []

    def stall(self) -> None:
        """Reads submitted from now on do not end, as on a device that hangs."""
        with self._lock:
            self._stalled = True

    def resume(self) -> None:
        """Carry out what was held."""
        with self._lock:
            self._stalled = False
            held, self._held = self._held, []
        for read in held:
            self.submit_read(read.parts, read.done, lane=read.lane)

    @property
    def generation(self) -> int:
        return self.inner.generation

    def entries(self) -> Iterable[PartEntry]:
        return self.inner.entries()

    def submit_write(self, parts: Sequence[PartWrite], done: PartsDone, *, lane: Lane = Lane.WRITE) -> Transfer:
        if self.raises is not None:
            raise self.raises
        if self.write_failure is not None:
            done([PartDone(part.key, self.write_failure, "injected") for part in parts])
            return _HeldRead((), done, lane)
        return self.inner.submit_write(parts, done, lane=lane)

    def submit_read(
        self, parts: Sequence[PartRead], done: PartsDone, *, lane: Lane = Lane.DEMAND, deadline_s: float | None = None
    ) -> Transfer:
        if self.raises is not None:
            raise self.raises
        with self._lock:
            if self._stalled:
                held = _HeldRead(parts, done, lane)
                self._held.append(held)
                return held
        buffers = {part.key: part.buffer for part in parts}

        def spoil(results: Sequence[PartDone]) -> None:
            spoiled = []
            for result in results:
                if result.key in self.fail:
                    spoiled.append(PartDone(result.key, self.fail[result.key], "injected"))
                    continue
                if result.key in self.flip:
                    buffers[result.key][len(buffers[result.key]) // 3] ^= 0x10
                spoiled.append(result)
            done(spoiled)

        return self.inner.submit_read(parts, spoil, lane=lane, deadline_s=deadline_s)

    def delete(self, keys: Sequence[Key]) -> None:
        self.inner.delete(keys)

    def reset(self, generation: int) -> None:
        if self.reset_raises is not None:
            raise self.reset_raises
        self.inner.reset(generation)

    def flush(self, deadline_s: float) -> bool:
        return self.inner.flush(deadline_s)

    def close(self, deadline_s: float) -> bool:
        self.resume()
        return self.inner.close(deadline_s)
