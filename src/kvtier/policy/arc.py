"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST '03), with sizes in bytes.

Names are the paper's. T1 holds keys used once lately, T2 those used again, B1 and B2 the ghosts of each.
`target_t1` (p) is the share of the capacity c that T1 should have: a hit among B1's ghosts raises it, one
among B2's lowers it. Held after every call, once the caller keeps its tier within the capacity:

- T1 and B1 together have at most c bytes; all four at most 2c; p lies in 0 to c;
- no key is in two lists.

With records of one size this is the paper's algorithm, record for record. It is split over two calls, since
the tier searches for room before it inserts: `candidates` looks up what p would become for the incoming key
(REPLACE of the paper), and `insert` makes it so.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import ClassVar

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo
from kvtier.policy.queue import Ghosts


class ARCPolicy(EvictionPolicy):
    """Balances recency against frequency by what its ghosts say it evicted too early."""

    name: ClassVar[str] = "arc"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.t1: OrderedDict[Key, int] = OrderedDict()
        self.t2: OrderedDict[Key, int] = OrderedDict()
        self.t1_bytes = 0
        self.t2_bytes = 0
        self.b1 = Ghosts(capacity_bytes)
        self.b2 = Ghosts(2 * capacity_bytes)
        self.target_t1 = 0.0
        # The paper adapts p before it replaces, and replacing changes the ghosts: so the search's result waits here.
        self._planned: tuple[Key, float, bool] | None = None

    def _plan(self, key: Key | None, size_bytes: int) -> tuple[float, bool]:
        """What p becomes when `key` comes in, and whether a ghost remembers it."""
        b1_bytes, b2_bytes = self.b1.size_bytes, self.b2.size_bytes
        if key is not None and key in self.b1:
            step = size_bytes * max(1.0, b2_bytes / max(b1_bytes, 1))
            return min(self.capacity_bytes, self.target_t1 + step), True
        if key is not None and key in self.b2:
            step = size_bytes * max(1.0, b1_bytes / max(b2_bytes, 1))
            return max(0.0, self.target_t1 - step), True
        return self.target_t1, False

    def _trim(self) -> None:
        """Forget ghosts until the bounds hold. What lives is the caller's to keep within the capacity."""
        self.b1.trim(max(0, self.capacity_bytes - self.t1_bytes))
        self.b2.trim(max(0, 2 * self.capacity_bytes - self.t1_bytes - self.t2_bytes - self.b1.size_bytes))

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        planned = self._planned
        self._planned = None
        if planned is not None and planned[0] == key:
            self.target_t1, remembered = planned[1:]
        else:
            self.target_t1, remembered = self._plan(key, info.size_bytes)
        self.b1.forget(key)
        self.b2.forget(key)
        if remembered:
            self.t2[key] = info.size_bytes
            self.t2_bytes += info.size_bytes
        else:
            self.t1[key] = info.size_bytes
            self.t1_bytes += info.size_bytes
        self._trim()

    def access(self, key: Key, now_s: float) -> None:
        size_bytes = self.t1.pop(key, None)
        if size_bytes is None:
            self.t2.move_to_end(key)
            return
        self.t1_bytes -= size_bytes
        self.t2[key] = size_bytes
        self.t2_bytes += size_bytes

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        size_bytes = self.t1.pop(key, None)
        if size_bytes is not None:
            self.t1_bytes -= size_bytes
            ghosts = self.b1
        else:
            size_bytes = self.t2.pop(key)
            self.t2_bytes -= size_bytes
            ghosts = self.b2
        if evicted:
            ghosts.add(key, size_bytes)
        self._trim()

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        size_bytes = self.b1.size_of(incoming) or self.b2.size_of(incoming) if incoming is not None else 0
        target, remembered = self._plan(incoming, size_bytes)
        self._planned = None if incoming is None else (incoming, target, remembered)
        incoming_in_b2 = incoming is not None and incoming in self.b2
        t1 = (key for key in self.t1 if not is_leased(key))
        t2 = (key for key in self.t2 if not is_leased(key))
        t1_bytes = self.t1_bytes
        first, second = next(t1, None), next(t2, None)
        while first is not None or second is not None:
            from_t1 = t1_bytes > target or (incoming_in_b2 and t1_bytes == target and t1_bytes > 0)
            if first is not None and (from_t1 or second is None):
                t1_bytes -= self.t1[first]
                yield first
                first = next(t1, None)
            else:
                assert second is not None
                yield second
                second = next(t2, None)

    def __len__(self) -> int:
        return len(self.t1) + len(self.t2)

    def __contains__(self, key: Key) -> bool:
        return key in self.t1 or key in self.t2
