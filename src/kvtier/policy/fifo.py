"""First in, first out."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import ClassVar

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo


class FIFOPolicy(EvictionPolicy):
    """Evicts the record that entered first, whatever its use."""

    name: ClassVar[str] = "fifo"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        self._order[key] = None

    def access(self, key: Key, now_s: float) -> None:
        return

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        del self._order[key]

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        return (key for key in self._order if not is_leased(key))

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: Key) -> bool:
        return key in self._order
