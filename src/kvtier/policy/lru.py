"""Least recently used."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo


class LRUPolicy(EvictionPolicy):
    """Evicts the record whose last use is longest ago. A record that a search finds leased counts as used when the next one begins."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._met: list[Key] = []

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        self._order[key] = None

    def fill(self, keys: Sequence[Key], info_of: Callable[[int], RecordInfo], now_s: float) -> None:
        if self._order:
            self._order.update(dict.fromkeys(keys))
        else:
            self._order = OrderedDict.fromkeys(keys)

    def access(self, key: Key, now_s: float) -> None:
        self._order.move_to_end(key)

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        del self._order[key]

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        # Who holds a lease is using it: else every search would walk over all that are held for long.
        met, self._met = self._met, []
        for key in met:
            if key in self._order:
                self._order.move_to_end(key)
        for key in self._order:
            if is_leased(key):
                self._met.append(key)
            else:
                yield key

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: Key) -> bool:
        return key in self._order
