"""Copy engines: they carry out lists of ranges between an engine's cache and the arena, without the GIL."""

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier.engine.layout import Addresses, Ranges

Copy = Callable[[Addresses, Addresses, Addresses], None]
"""Copies `sizes[i]` bytes from address `source[i]` to `target[i]`; the arguments in this order, int64 arrays of one length."""

_SPLIT_BYTES_MIN = 4 << 20
_CALL_RANGES_MAX = 1024
_CALL_BYTES_MAX = 1 << 30


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


def compiled_copy() -> Copy | None:
    """A compiled loop over memcpy, so that one call without the GIL does a whole list; None without numba."""
    try:
        from numba import njit, types
        from numba.core.typing import signature
    except ImportError:
        return None
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


def copy_by_one(source: Addresses, target: Addresses, sizes: Addresses) -> None:
    """A call for each range; each gives the GIL away and has to get it back."""
    memmove = ctypes.memmove
    for to, of, size in zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True):
        memmove(to, of, size)


def kernel_copy() -> Copy | None:
    """The kernel carries out a list: `process_vm_readv` of this process by itself, 1,024 ranges a call; None where it is not allowed.

    Half as fast as the compiled loop for ranges of 4 KiB, four fifths for 16 KiB and more, without a compiler in memory. Memory that is not
    there is an OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        read = libc.process_vm_readv
    except AttributeError:
        return None
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

    def copy(source: Addresses, target: Addresses, sizes: Addresses) -> None:
        places = np.stack((target, sizes, source, sizes), axis=1).reshape(-1, 2, 2)
        into, out_of = np.ascontiguousarray(places[:, 0]), np.ascontiguousarray(places[:, 1])
        ends = np.cumsum(sizes)
        first = done_bytes = 0
        while first < len(sizes):
            # A call moves less than 2 GiB.
            last = int(np.searchsorted(ends, done_bytes + _CALL_BYTES_MAX, side="right"))
            last = min(max(last, first + 1), first + _CALL_RANGES_MAX)
            wanted = int(ends[last - 1]) - done_bytes
            if wanted > _CALL_BYTES_MAX:
                copy_by_one(source[first:last], target[first:last], sizes[first:last])
            else:
                count = last - first
                moved = read(os.getpid(), into[first:].ctypes.data, count, out_of[first:].ctypes.data, count, 0)
                if moved != wanted:
                    number = ctypes.get_errno() if moved < 0 else errno.EFAULT
                    raise OSError(number, f"{moved} of {wanted} bytes were copied: {os.strerror(number)}")
            first, done_bytes = last, int(ends[last - 1])

    probe = np.arange(2, dtype=np.int64)
    address = np.array([probe.ctypes.data], dtype=np.int64)
    try:
        copy(address, address + 8, np.array([8], dtype=np.int64))
    except OSError:
        return None
    return copy


class MemoryCopyEngine(CopyEngine):
    """For an engine whose cache is ordinary memory. What it computed is there when its step has returned.

    A load is what its request waits for, and one thread does not fill the memory's bandwidth: a second one takes half of it.

    Args:
        compiled: copy by a compiled loop, whose compiler (numba) keeps 115 MiB of memory; else the kernel carries out the lists.
    """

    def __init__(self, *, compiled: bool = True) -> None:
        self._copy = (compiled_copy() if compiled else None) or kernel_copy() or copy_by_one
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
