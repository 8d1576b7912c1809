"""Least frequently used; among equals the one that reached its count first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import ClassVar, Optional

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo


class _Uses:
    """The keys used `count` times, in the order in which they came to it, between the next lower and higher count."""

    __slots__ = ("count", "higher", "keys", "lower")

    def __init__(self, count: int, lower: Optional["_Uses"] = None, higher: Optional["_Uses"] = None) -> None:
        self.count = count
        self.lower = lower
        self.higher = higher
        self.keys: OrderedDict[Key, None] = OrderedDict()
        if lower is not None:
            lower.higher = self
        if higher is not None:
            higher.lower = self


class LFUPolicy(EvictionPolicy):
    """Evicts the record used least often since it entered. It never forgets: old fame outlives its use.

    Counts form a sorted chain, so every operation takes constant time.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._uses_of: dict[Key, _Uses] = {}
        self._floor = _Uses(0)  # holds no key

    def _place(self, key: Key, after: _Uses, count: int) -> None:
        uses = after.higher
        if uses is None or uses.count != count:
            uses = _Uses(count, lower=after, higher=uses)
        uses.keys[key] = None
        self._uses_of[key] = uses

    def _drop(self, key: Key, uses: _Uses) -> None:
        del uses.keys[key]
        if not uses.keys and uses.lower is not None:
            uses.lower.higher = uses.higher
            if uses.higher is not None:
                uses.higher.lower = uses.lower

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        self._place(key, self._floor, 1)

    def access(self, key: Key, now_s: float) -> None:
        uses = self._uses_of[key]
        self._place(key, uses, uses.count + 1)
        self._drop(key, uses)

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        self._drop(key, self._uses_of.pop(key))

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        uses = self._floor.higher
        while uses is not None:
            for key in uses.keys:
                if not is_leased(key):
                    yield key
            uses = uses.higher

    def __len__(self) -> int:
        return len(self._uses_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._uses_of
