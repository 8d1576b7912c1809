"""Copy engines: they carry out lists of ranges between an engine's cache and the arena, without the GIL."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier.engine.layout import Addresses, Ranges

_SPLIT_BYTES_MIN = 4 << 20


class CopyEngine(ABC):
    """Carries out copies. One thread at a time calls each direction; the two may run at once."""

    @abstractmethod
    def mark(self) -> object:
        """A token for what the engine has done so far, for `after`. Called on the engine's thread."""

    @abstractmethod
    def to_arena(self, ranges: Ranges, after: object) -> None:
        """Copy out of the engine's cache, after the work that `after` marks; returns when the bytes are in the arena."""

    @abstractmethod
    def to_engine(self, ranges: Ranges, after: object) -> None:
        """Copy into the engine's cache, after what `after` marks (blocks are zeroed before use); returns when the bytes are there."""

    def close(self) -> None:
        """Let go of what was registered."""
        return


def _native_copy() -> Callable[[Addresses, Addresses, Addresses], None]:
    """A loop over memcpy: compiled where numba is, so that one call without the GIL does a whole list."""
    try:
        from numba import njit, types
        from numba.core.typing import signature
    except ImportError:
        memmove = ctypes.memmove

        def loop(source: Addresses, target: Addresses, sizes: Addresses) -> None:
            for place in range(len(sizes)):
                memmove(int(target[place]), int(source[place]), int(sizes[place]))

        return loop

    memcpy = types.ExternalFunction("memcpy", signature(types.intp, types.intp, types.intp, types.intp))

    def plain(source: Addresses, target: Addresses, sizes: Addresses) -> None:
        for place in range(len(sizes)):
            memcpy(target[place], source[place], sizes[place])

    try:
        compiled = njit(nogil=True, cache=True)(plain)
    except RuntimeError:
        # Nowhere to keep what is compiled: then every start compiles anew, for about a second.
        compiled = njit(nogil=True)(plain)
    empty = np.empty(0, dtype=np.int64)
    compiled(empty, empty, empty)
    return compiled  # type: ignore[no-any-return]


class MemoryCopyEngine(CopyEngine):
    """For an engine whose cache is ordinary memory. What it computed is there when its step has returned.

    A load is what its request waits for, and one thread does not fill the memory's bandwidth: a second one takes half of it.
    """

    def __init__(self) -> None:
        self._copy = _native_copy()
        self._second = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtier-copy")

    def mark(self) -> object:
        return None

    def to_arena(self, ranges: Ranges, after: object) -> None:
        self._copy(ranges.engine, ranges.arena, ranges.sizes)

    def to_engine(self, ranges: Ranges, after: object) -> None:
        half = len(ranges.sizes) // 2 if ranges.total_bytes >= _SPLIT_BYTES_MIN else 0
        other = None
        if half:
            other = self._second.submit(self._copy, ranges.arena[:half], ranges.engine[:half], ranges.sizes[:half])
        self._copy(ranges.arena[half:], ranges.engine[half:], ranges.sizes[half:])
        if other is not None:
            other.result()

    def close(self) -> None:
        self._second.shutdown()
