"""A doubly linked queue of keys: constant-time insert, remove and move, and a walk that survives both.

A dictionary in insertion order gives the first three, but can't be walked while keys move. S3-FIFO, SIEVE and
ARC look for a victim among keys that may be leased, and move keys while they look.
"""

from collections import OrderedDict
from collections.abc import Iterator

from kvtier.policy.base import Key


class Node:
    """One key. `mark` is the policy's own: visits, a frequency."""

    __slots__ = ("key", "mark", "newer", "older", "queue", "size_bytes")

    def __init__(self, key: Key, size_bytes: int, mark: int = 0) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.mark = mark
        self.older: Node | None = None
        self.newer: Node | None = None
        self.queue: Queue | None = None


class Queue:
    """Nodes from the oldest to the newest, and the sum of their bytes."""

    __slots__ = ("count", "newest", "oldest", "size_bytes")

    def __init__(self) -> None:
        self.oldest: Node | None = None
        self.newest: Node | None = None
        self.count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Node]:
        """From the oldest on. The node just given may be removed or moved before the next is asked for."""
        node = self.oldest
        while node is not None:
            following = node.newer
            yield node
            node = following

    def push(self, node: Node) -> None:
        """Add as the newest."""
        node.queue = self
        node.older, node.newer = self.newest, None
        if self.newest is None:
            self.oldest = node
        else:
            self.newest.newer = node
        self.newest = node
        self.count += 1
        self.size_bytes += node.size_bytes

    def remove(self, node: Node) -> None:
        """Take out. The node keeps nothing of its neighbours."""
        if node.older is None:
            self.oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self.newest = node.older
        else:
            node.newer.older = node.older
        node.older = node.newer = None
        node.queue = None
        self.count -= 1
        self.size_bytes -= node.size_bytes

    def refresh(self, node: Node) -> None:
        """Make the newest."""
        if node is not self.newest:
            self.remove(node)
            self.push(node)


class Ghosts:
    """Keys that left, oldest first, bounded in the bytes they had: a memory of names, not of data.

    `count_max` bounds the names as well, whatever sizes they had.
    """

    def __init__(self, bytes_max: int, count_max: int = 1 << 20) -> None:
        self.bytes_max = bytes_max
        self.count_max = count_max
        self.size_bytes = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def size_of(self, key: Key) -> int:
        """Bytes that `key` had, 0 where it is not remembered."""
        return self._sizes.get(key, 0)

    def add(self, key: Key, size_bytes: int) -> None:
        """Remember `key` as the newest, and forget the oldest beyond the bounds."""
        self.forget(key)
        self._sizes[key] = size_bytes
        self.size_bytes += size_bytes
        self.trim(self.bytes_max)

    def forget(self, key: Key) -> bool:
        """Drop `key`. False where it was not remembered."""
        size_bytes = self._sizes.pop(key, None)
        if size_bytes is None:
            return False
        self.size_bytes -= size_bytes
        return True

    def trim(self, bytes_max: int) -> None:
        """Forget the oldest until at most `bytes_max` bytes and `count_max` names are left."""
        while self._sizes and (self.size_bytes > bytes_max or len(self._sizes) > self.count_max):
            key = next(iter(self._sizes))
            self.size_bytes -= self._sizes.pop(key)
