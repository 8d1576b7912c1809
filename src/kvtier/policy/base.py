"""The contract of an eviction policy: it orders the records of one tier, and owns nothing else.

The tier (the caller) owns the records, their bytes and their leases; the policy owns an order over their
keys. Duties of the caller: `insert` once when a record enters the tier, `access` on each use, `remove` once
when it leaves for whatever reason; times never run backwards. Duties of the policy: `candidates` yields each
unleased key at most once, best victim first, and forgets none of them. It may reorder its own queues while
it searches (S3-FIFO promotes, SIEVE moves its hand), but a key stays until `remove`. So an admission that
cannot be satisfied changes nothing in the tier: the caller walks the candidates until it has room enough,
then removes the batch, or removes nothing.

All sizes are bytes, all times seconds of the caller's clock. No I/O, no clock, no locks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

Key = bytes


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What is known of a record when it enters a tier. Every field may be left at its default.

    Attributes:
        size_bytes: bytes that the record takes from the tier's capacity.
        parent: key of the record before it in its prefix chain, None for the first or where unknown.
        depth_tokens: tokens of the prefix that ends with this record.
        cost_s: seconds of engine time that recomputing it would take, 0 where unknown.
    """

    size_bytes: int
    parent: Key | None = None
    depth_tokens: int = 0
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request as the tier sees it, before its records are accessed or inserted.

    Attributes:
        keys: keys of the whole prompt in prefix order.
        hit_count: how many of them, from the first on, were present.
        ttl_s: keep its records at least this long, None for no wish.
        pinned: keep its records until a later request of the same chain unpins them.
        returns_soon: a tool call is out and the same prefix comes back.
    """

    keys: Sequence[Key]
    hit_count: int = 0
    ttl_s: float | None = None
    pinned: bool = False
    returns_soon: bool = False


class EvictionPolicy(ABC):
    """An order over the keys of one tier of `capacity_bytes` bytes."""

    name: ClassVar[str]

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}: a tier needs a positive capacity")
        self.capacity_bytes = capacity_bytes

    def request(self, request: RequestInfo, now_s: float) -> None:
        """A request arrived. Called at most once a request; policies that learn from chains use it."""
        return

    def finished(self, keys: Sequence[Key], output_tokens: int, now_s: float) -> None:
        """The request with these prompt keys has been answered, in so many tokens. Never needed; some policies learn from it."""
        return

    @abstractmethod
    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        """`key` entered the tier. It was not in it before."""

    def fill(self, keys: Sequence[Key], info_of: Callable[[int], RecordInfo], now_s: float) -> None:
        """All of `keys` entered the tier, in this order, many at once; `info_of` says what is known of the one at a place."""
        for place, key in enumerate(keys):
            self.insert(key, info_of(place), now_s)

    @abstractmethod
    def access(self, key: Key, now_s: float) -> None:
        """`key`, which is in the tier, was used."""

    @abstractmethod
    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        """`key` left the tier: chosen as a victim (`evicted`), or deleted for another reason."""

    @abstractmethod
    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        """Yield the keys that are not leased, each at most once, the best victim first.

        Lazy: the caller stops when it has room enough. `incoming` is the key that room is wanted for, where
        one is known (ARC and S3-FIFO remember what they evicted). Nothing leaves the tier here.
        """

    def worth(self, key: Key, now_s: float) -> float | None:
        """What keeping `key` is worth, for comparison with others of this policy; None where the policy has no such measure.

        A key need not be in the tier, if a request has announced it.
        """
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Number of keys in the tier."""

    @abstractmethod
    def __contains__(self, key: Key) -> bool:
        """Whether `key` is in the tier."""
