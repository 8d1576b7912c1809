"""Who waits for what was read ahead, and how much of the arena that may take.

A part read ahead is staged for the requests that are expected to load it: one read and one slot, however many they are. It counts against a budget until
the last of them has begun its load or is gone; after that it is a record like any other. Pure bookkeeping: slots and reads are the store's.
"""

from collections.abc import Sequence

from kvtier.store.moves import Key


class Preloads:
    """Keys staged or being staged, by the requests that they are staged for.

    Args:
        bytes_max: most bytes of slots staged at a time.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._size: dict[Key, int] = {}
        self._owners: dict[Key, set[str]] = {}
        self._keys: dict[str, set[Key]] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether a request is expected to load `key`."""
        return key in self._owners

    def room_bytes(self) -> int:
        """How much more may be staged."""
        return self.bytes_max - self.used_bytes

    def stage(self, key: Key, size_bytes: int, owner: str) -> None:
        """`key` is wanted by `owner`; its size counts once."""
        if key not in self._owners:
            self._owners[key] = set()
            self._size[key] = size_bytes
            self.used_bytes += size_bytes
        self._owners[key].add(owner)
        self._keys.setdefault(owner, set()).add(key)

    def share(self, key: Key, owner: str) -> None:
        """`owner` wants what is staged for another; nothing where `key` is not staged."""
        if key in self._owners:
            self.stage(key, 0, owner)

    def release(self, owner: str) -> list[Key]:
        """`owner` loads now, or never will. Returns the keys that nobody else waits for."""
        free = []
        for key in sorted(self._keys.pop(owner, ())):
            self._owners[key].discard(owner)
            if not self._owners[key]:
                free.append(key)
        self.drop(free)
        return free

    def drop(self, keys: Sequence[Key]) -> None:
        """These are not staged any more, whoever waits."""
        for key in keys:
            for owner in self._owners.pop(key, ()):
                self._keys[owner].discard(key)
            self.used_bytes -= self._size.pop(key, 0)

    def clear(self) -> None:
        """Forget all."""
        self.drop(list(self._owners))
        self._keys.clear()
