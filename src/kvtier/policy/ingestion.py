"""What goes down from DRAM to a slower tier, and when: document 001's `ALL`, `HOT` and `EVICTED`, behind quotas.

- `ALL`: what is new in DRAM is written.
- `HOT`: what was used in DRAM so often, once by default, is written.
- `EVICTED`: what DRAM evicts is written.

The rules that hold in every mode:

- Nothing is written on the read path: a use only puts a name into a queue. `take` hands out what to write, and is
  called when nobody waits.
- What is in the slower tier, or was just read from it, is not written to it again, until that tier loses it.
- Writes in flight are bounded in bytes and in tokens. What finds no room is refused, and counted; a refused write holds nothing.
- Every write that began ends once, with `ended`, well or not, and gives back exactly what it took.

Pure: no I/O, no clock.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum

from kvtier.policy.base import Key


class IngestionType(Enum):
    """When a record in DRAM is due to be written to the slower tier."""

    ALL = "ALL"
    HOT = "HOT"
    EVICTED = "EVICTED"

    @classmethod
    def of(cls, name: str) -> "IngestionType":
        """By name, whatever its case. Raises ValueError with the known names."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(cls.__members__)
            raise ValueError(f"ingestion type {name!r} is not known: use one of {known}") from None


@dataclass(frozen=True, slots=True)
class IngestionLimits:
    """How much may be on its way down.

    Attributes:
        type: when a record is due.
        hot_uses: uses in DRAM, after it was stored, that make a record hot.
        inflight_bytes_max: bytes being written at once.
        inflight_tokens_max: tokens being written at once, 0 for no bound of its own.
        queue_max: names that may wait to be written.
    """

    type: IngestionType = IngestionType.HOT
    hot_uses: int = 1
    inflight_bytes_max: int = 1 << 30
    inflight_tokens_max: int = 0
    queue_max: int = 1 << 16

    def __post_init__(self) -> None:
        if self.hot_uses < 1 or self.inflight_bytes_max < 1 or self.queue_max < 1 or self.inflight_tokens_max < 0:
            raise ValueError(
                f"hot_uses is {self.hot_uses}, inflight_bytes_max {self.inflight_bytes_max}, queue_max {self.queue_max},"
                f" inflight_tokens_max {self.inflight_tokens_max}: the first three must be positive, the last not negative"
            )


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    tokens: int
    uses: int = 0
    below: bool = False


class Ingestion:
    """Decides, for one slower tier, what of DRAM is written to it. Knows DRAM's records by name, size and tokens.

    `counters`: `queued`, `begun`, `ended`, `refused_queue`, `refused_bytes`, `refused_tokens`.
    """

    def __init__(self, limits: IngestionLimits) -> None:
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.inflight_bytes = 0
        self.inflight_tokens = 0
        self._entries: dict[Key, _Entry] = {}
        self._queue: OrderedDict[Key, None] = OrderedDict()
        self._inflight: dict[Key, tuple[int, int]] = {}

    # ---- what happens in DRAM

    def stored(self, key: Key, size_bytes: int, tokens: int, *, below: bool = False) -> None:
        """`key` is new in DRAM; `below`: it was read from the slower tier, or is in it."""
        self._entries[key] = entry = _Entry(size_bytes, tokens, below=below)
        if self.limits.type is IngestionType.ALL:
            self._enqueue(key, entry)

    def used(self, key: Key) -> None:
        """`key` was used from DRAM."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.uses += 1
        if self.limits.type is IngestionType.HOT and entry.uses == self.limits.hot_uses:
            self._enqueue(key, entry)

    def evicting(self, key: Key) -> bool:
        """DRAM is about to evict `key`: whether its bytes are due to be written first. It still has to `begin`."""
        entry = self._entries.get(key)
        return (
            self.limits.type is IngestionType.EVICTED
            and entry is not None
            and not entry.below
            and key not in self._inflight
        )

    def due(self, key: Key) -> bool:
        """Whether `key` waits to be written, or is being written."""
        return key in self._queue or key in self._inflight

    def left(self, key: Key) -> None:
        """`key` is no longer in DRAM. A write that began goes on and still has to end."""
        self._entries.pop(key, None)
        self._queue.pop(key, None)

    def lost(self, key: Key) -> None:
        """The slower tier no longer has `key`: it may be written again when it is due again."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.below = False
            entry.uses = 0

    # ---- writes

    def take(self, count_max: int) -> list[Key]:
        """Begin up to `count_max` of the writes that are due, oldest first, as far as the quotas go. The rest waits."""
        begun: list[Key] = []
        while self._queue and len(begun) < count_max:
            key = next(iter(self._queue))
            entry = self._entries[key]
            if self._over(entry) and self._inflight:
                break  # it will fit when something ends
            del self._queue[key]
            if self.begin(key):
                begun.append(key)
        return begun

    def begin(self, key: Key) -> bool:
        """Begin to write `key` now, or refuse, and hold nothing."""
        entry = self._entries.get(key)
        if entry is None or entry.below or key in self._inflight:
            return False
        over = self._over(entry)
        if over:
            self.counters[f"refused_{over}"] += 1
            return False
        self._queue.pop(key, None)
        self._inflight[key] = (entry.size_bytes, entry.tokens)
        self.inflight_bytes += entry.size_bytes
        self.inflight_tokens += entry.tokens
        self.counters["begun"] += 1
        return True

    def ended(self, key: Key, *, written: bool) -> None:
        """The write of `key` is over. A second word on it changes nothing."""
        held = self._inflight.pop(key, None)
        if held is None:
            return
        self.inflight_bytes -= held[0]
        self.inflight_tokens -= held[1]
        self.counters["ended"] += 1
        entry = self._entries.get(key)
        if entry is not None:
            entry.below = written
            if not written:
                entry.uses = 0

    def reset(self) -> None:
        """Forget all, what is in flight too: what ends later is not this one's any more."""
        self._entries.clear()
        self._queue.clear()
        self._inflight.clear()
        self.inflight_bytes = self.inflight_tokens = 0

    def waiting(self) -> int:
        """Names that wait to be written."""
        return len(self._queue)

    def _enqueue(self, key: Key, entry: _Entry) -> None:
        if entry.below or key in self._inflight or key in self._queue:
            return
        if len(self._queue) >= self.limits.queue_max:
            self.counters["refused_queue"] += 1
            entry.uses = 0
            return
        self._queue[key] = None
        self.counters["queued"] += 1

    def _over(self, entry: _Entry) -> str:
        """Which quota `entry` would exceed, empty for none."""
        if self.inflight_bytes + entry.size_bytes > self.limits.inflight_bytes_max:
            return "bytes"
        tokens_max = self.limits.inflight_tokens_max
        return "tokens" if tokens_max and self.inflight_tokens + entry.tokens > tokens_max else ""
