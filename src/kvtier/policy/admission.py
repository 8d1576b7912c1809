"""What may enter a tier: by how often it was asked for, by what the medium can endure, by what would have to go.

Eviction decides who leaves; on a medium that wears out, or one that a scan would flush, who enters matters as much.
`Admission` combines three tests, each off by default:

- seen: the key was asked for at least so often before, as a sketch of bounded size counts it;
- endurance: a budget of bytes written, that refills steadily and holds at most a burst;
- value: what comes in is worth no less than the best of what would have to go. Worth is the eviction policy's own where
  it knows one (`reuse`), else how often the key was asked for.

Pure: no I/O, no clock.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvtier.policy.base import EvictionPolicy, Key

DAY_S = 86_400.0
_ROWS = 4
SEEN_MIN_MAX = 15
"""Counts of the sketch end here."""
_ROW_NUMBERS = np.arange(_ROWS, dtype=np.uint64)[:, None]


class FrequencySketch:
    """How often keys were asked for lately, in fixed memory: a count-min sketch whose counts are halved now and then.

    Counts go up to 15. They are never too low for what was added since the last halving, and seldom too high.

    Args:
        keys: distinct keys that it should tell apart; it takes 8 bytes for each.
    """

    def __init__(self, keys: int) -> None:
        if keys <= 0:
            raise ValueError(f"keys is {keys}: a sketch needs room for at least one")
        self._bits = max(6, (2 * keys - 1).bit_length())
        self._rows = np.zeros((_ROWS, 1 << self._bits), np.uint8)
        self._added = 0
        self._halve_at = 10 * keys

    @property
    def size_bytes(self) -> int:
        """Bytes of the counts."""
        return self._rows.nbytes

    def _places(self, keys: Iterable[Key]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        numbers = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)
        steps = numbers >> np.uint64(32) | np.uint64(1)
        places: np.ndarray[tuple[int, ...], np.dtype[np.uint64]] = (numbers + _ROW_NUMBERS * steps) & np.uint64(
            (1 << self._bits) - 1
        )
        return places

    def add(self, keys: Iterable[Key]) -> None:
        """Each of `keys` was asked for once more."""
        places = self._places(dict.fromkeys(keys))
        counts = np.minimum(self._rows[_ROW_NUMBERS, places].min(axis=0) + 1, SEEN_MIN_MAX)
        for row, row_places in zip(self._rows, places, strict=True):
            np.maximum.at(row, row_places, counts)
        self._added += places.shape[1]
        if self._added >= self._halve_at:
            self._added //= 2
            self._rows >>= 1

    def count(self, key: Key) -> int:
        """About how often `key` was asked for."""
        return int(self._rows[_ROW_NUMBERS, self._places((key,))].min())


class EnduranceBudget:
    """Bytes that may be written: so many a day, saved up for at most `burst_s`.

    Args:
        bytes_per_day: e.g. a drive's rated bytes written over its years, in days.
        burst_s: how much of it may be spent at once, in seconds of its refill.
    """

    def __init__(self, bytes_per_day: float, *, burst_s: float = 3600.0) -> None:
        if bytes_per_day <= 0 or burst_s <= 0:
            raise ValueError(f"bytes_per_day is {bytes_per_day} and burst_s {burst_s}: both must be positive")
        self.bytes_per_s = bytes_per_day / DAY_S
        self.burst_bytes = self.bytes_per_s * burst_s
        self._left_bytes = self.burst_bytes
        self._at_s: float | None = None

    def left_bytes(self, now_s: float) -> float:
        """What may be written now."""
        if self._at_s is not None and now_s > self._at_s:
            self._left_bytes = min(self.burst_bytes, self._left_bytes + (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s
        return self._left_bytes

    def take(self, size_bytes: int, now_s: float) -> bool:
        """Spend `size_bytes`, or nothing where they are not there."""
        if size_bytes > self.left_bytes(now_s):
            return False
        self._left_bytes -= size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """A write that was paid for did not happen."""
        self._left_bytes = min(self.burst_bytes, self._left_bytes + size_bytes)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What a tier asks of what comes in.

    Attributes:
        seen_min: times that a key must have been asked for, this time included: 1 admits all, 2 what comes back.
        sketch_keys: distinct keys that counting should tell apart.
        write_bytes_per_day: endurance budget, 0 for none.
        write_burst_s: how much of the budget may be spent at once, in seconds.
        by_value: refuse what is worth less than what would have to go.
    """

    seen_min: int = 1
    sketch_keys: int = 1 << 16
    write_bytes_per_day: float = 0.0
    write_burst_s: float = 3600.0
    by_value: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.seen_min <= SEEN_MIN_MAX:
            raise ValueError(f"seen_min is {self.seen_min}: use 1 to {SEEN_MIN_MAX}, as uses are counted")


class Admission:
    """The door of one tier. `refused` counts by reason: `seen`, `value`, `endurance`.

    Args:
        limits: what is asked.
        policy: the tier's eviction policy, whose idea of worth counts.
    """

    def __init__(self, limits: AdmissionLimits, policy: EvictionPolicy) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self._policy = policy
        counts = limits.seen_min > 1 or limits.by_value
        self._sketch = FrequencySketch(limits.sketch_keys) if counts else None
        self._budget = None
        if limits.write_bytes_per_day:
            self._budget = EnduranceBudget(limits.write_bytes_per_day, burst_s=limits.write_burst_s)

    def asked(self, keys: Iterable[Key]) -> None:
        """A request asked for these keys. Once a request, before any of them is offered."""
        if self._sketch is not None:
            self._sketch.add(keys)

    def admits(self, key: Key, size_bytes: int, now_s: float, victims: Sequence[Key] = ()) -> bool:
        """Whether `key` may enter in place of `victims`. True spends its bytes of the budget: see `undo`."""
        if self._sketch is not None and self._sketch.count(key) < self.limits.seen_min:
            return self._refuse("seen")
        if self.limits.by_value and victims and not self._worth_it(key, victims, now_s):
            return self._refuse("value")
        if self._budget is not None and not self._budget.take(size_bytes, now_s):
            return self._refuse("endurance")
        return True

    def undo(self, size_bytes: int) -> None:
        """What was admitted was not written after all."""
        if self._budget is not None:
            self._budget.give_back(size_bytes)

    def _worth_it(self, key: Key, victims: Sequence[Key], now_s: float) -> bool:
        worth = self._policy.worth(key, now_s)
        if worth is not None:
            return all(worth >= (self._policy.worth(victim, now_s) or 0.0) for victim in victims)
        assert self._sketch is not None
        count = self._sketch.count(key)
        return all(count >= self._sketch.count(victim) for victim in victims)

    def _refuse(self, reason: str) -> bool:
        self.refused[reason] += 1
        return False
