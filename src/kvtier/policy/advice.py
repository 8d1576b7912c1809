"""What a larger tier would buy: hit rate by capacity, from sampled reuse distances.

The reuse distance of a use is the bytes of distinct records used since the same record was last used. A tier that keeps the most
recent hits exactly those uses whose distance is less than its capacity, so one histogram of distances answers for
every capacity at once. Within a request the last record counts as used first: then a record's distance is no less than
those of the records before it, and what hits is a leading run.

Memory is bounded as in SHARDS (FAST '15): only keys whose hash is below a threshold are followed, and the threshold
falls when they become too many; distances and counts are scaled by what the sample stands for. The histogram has 16 bins a doubling
and halves its counts now and then, so that advice follows the workload.

The estimate is for recency (`lru`). A better policy hits more at every capacity.
"""

import math
from collections.abc import Sequence

import xxhash

from kvtier.policy.base import Key

_HASH_MAX = 1 << 64
_BINS_PER_DOUBLING = 16
_BINS = 64 * _BINS_PER_DOUBLING
_ALWAYS = 1 << 62


class _Sums:
    """Prefix sums over slots that change: a Fenwick tree."""

    def __init__(self, slots: int) -> None:
        self._tree = [0] * (slots + 1)

    def add(self, slot: int, amount: int) -> None:
        at = slot + 1
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at

    def before(self, slot: int) -> int:
        """Sum of the slots below `slot`."""
        total, at = 0, slot
        while at:
            total += self._tree[at]
            at -= at & -at
        return total


class ReuseCurve:
    """Estimated hit rate of a tier by its capacity.

    Args:
        samples_max: keys followed at most; each takes some 300 bytes. Below so many distinct keys the answer is exact,
            but for the width of a bin (4%).
        forget_after: uses after which what came before counts half.
    """

    def __init__(self, samples_max: int = 8192, *, forget_after: int = 1 << 22) -> None:
        if samples_max < 1:
            raise ValueError(f"samples_max is {samples_max}: at least one key must be followed")
        self._samples_max = samples_max
        self._forget_after = forget_after
        self._threshold = _HASH_MAX
        self._slots = 4 * samples_max
        self._sums = _Sums(self._slots)
        self._next_slot = 0
        self._total_bytes = 0
        self._seen: dict[Key, tuple[int, int, int]] = {}  # key: slot of its last use, bytes, hash
        self._bins = [0.0] * _BINS
        self._uses = 0.0
        self._since_halved = 0

    def request(self, keys: Sequence[Key], size_bytes: int) -> None:
        """A request used the records `keys`, in prefix order, of `size_bytes` each."""
        self._since_halved += len(keys)
        if self._since_halved >= self._forget_after:
            self._since_halved = 0
            self._bins = [count / 2 for count in self._bins]
            self._uses /= 2
        digest, threshold = xxhash.xxh3_64_intdigest, self._threshold
        for key in reversed(keys):
            number = digest(key)
            if number < threshold:
                self._use(key, number, size_bytes)
                threshold = self._threshold

    def _use(self, key: Key, number: int, size_bytes: int) -> None:
        """A record that is followed was used, or asked for and not there."""
        scale = _HASH_MAX / self._threshold
        self._uses += scale
        seen = self._seen.get(key)
        if seen is not None:
            slot, old_bytes, _ = seen
            newer_bytes = self._total_bytes - self._sums.before(slot + 1)
            self._bins[_bin(newer_bytes * scale + size_bytes)] += scale
            self._sums.add(slot, -old_bytes)
            self._total_bytes -= old_bytes
        if self._next_slot == self._slots:
            self._pack()
        self._seen[key] = (self._next_slot, size_bytes, number)
        self._sums.add(self._next_slot, size_bytes)
        self._total_bytes += size_bytes
        self._next_slot += 1
        if len(self._seen) > self._samples_max:
            self._thin()

    def hit_rate(self, capacity_bytes: float) -> float:
        """Uses that a tier of this capacity would hit, of all uses. 0 where nothing has been used."""
        if not self._uses or capacity_bytes <= 0:
            return 0.0
        return min(1.0, sum(self._bins[: _bin(capacity_bytes) + 1]) / self._uses)

    def advice(self, capacity_bytes: int, factors: Sequence[float] = (0.5, 1.0, 2.0, 4.0)) -> dict[float, float]:
        """Estimated hit rate at multiples of a capacity."""
        return {factor: self.hit_rate(factor * capacity_bytes) for factor in factors}

    def _pack(self) -> None:
        """Give the keys new slots in the same order, so that there is room for more uses."""
        self._sums = _Sums(self._slots)
        order = sorted(self._seen.items(), key=lambda item: item[1][0])
        for slot, (key, (_, size_bytes, number)) in enumerate(order):
            self._seen[key] = (slot, size_bytes, number)
            self._sums.add(slot, size_bytes)
        self._next_slot = len(order)

    def _thin(self) -> None:
        """Follow an eighth fewer keys from now on."""
        hashes = sorted(number for _, _, number in self._seen.values())
        self._threshold = hashes[len(hashes) * 7 // 8]
        for key, (slot, size_bytes, number) in list(self._seen.items()):
            if number >= self._threshold:
                del self._seen[key]
                self._sums.add(slot, -size_bytes)
                self._total_bytes -= size_bytes


def _bin(distance_bytes: float) -> int:
    return min(_BINS - 1, max(0, math.ceil(_BINS_PER_DOUBLING * math.log2(max(1.0, min(distance_bytes, _ALWAYS))))))
