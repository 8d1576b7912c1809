"""Simulated media and engine: how long a copy, a read, a write and a prefill take, and who waits for whom."""

import math
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True)
class Medium:
    """One queue with a bandwidth: a transfer begins when the one before it has ended.

    Args:
        bytes_per_s: bandwidth.
        latency_s: added to each transfer, without holding the queue.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    free_at_s: float = 0.0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}, latency_s {self.latency_s}: use a positive bandwidth")

    def transfer(self, size_bytes: int, now_s: float) -> float:
        """Enqueue a transfer now; when it ends."""
        if size_bytes == 0:
            return now_s
        held_s = size_bytes / self.bytes_per_s
        self.free_at_s = max(now_s, self.free_at_s) + held_s
        self.busy_s += held_s
        return self.free_at_s + self.latency_s


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Seconds of prefill: a part by token and a part by token and the context it attends to.

    Attributes:
        tokens_per_s: speed at no context.
        context_doubles: context in tokens at which a token takes twice as long.
    """

    tokens_per_s: float = 10_000.0
    context_doubles: float = 65_536.0

    def prefill_s(self, cached_tokens: int, tokens: int) -> float:
        """To compute the prompt up to `tokens`, with the first `cached_tokens` there."""
        new = max(1, tokens - cached_tokens)  # the last token is computed always: it gives the first of the answer
        mean_context = (tokens - new + tokens) / 2
        return new / self.tokens_per_s * (1 + mean_context / self.context_doubles)


class Engines:
    """Servers that prefill one request at a time, first come first served. Decoding shares with prefill and costs it nothing here."""

    def __init__(self, count: int, curve: PrefillSpeed) -> None:
        if count < 1:
            raise ValueError(f"{count} engines can serve nothing: use at least one")
        self.curve = curve
        self._free_at_s = [0.0] * count
        self.busy_s = 0.0

    def prefill(self, cached_tokens: int, tokens: int, ready_s: float) -> float:
        """Prefill as soon as its cached part is there and a server is free; when it ends."""
        took_s = self.curve.prefill_s(cached_tokens, tokens)
        self.busy_s += took_s
        end_s = max(ready_s, heappop(self._free_at_s)) + took_s
        heappush(self._free_at_s, end_s)
        return end_s


class Spread:
    """A distribution of times in bounded memory: 32 bins a doubling, from a microsecond on."""

    _PER_DOUBLING = 32
    _FLOOR_S = 1e-6

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        at = math.ceil(self._PER_DOUBLING * math.log2(max(seconds, self._FLOOR_S) / self._FLOOR_S))
        self._bins[at] = self._bins.get(at, 0) + 1
        self.count += 1
        self.total_s += seconds

    @property
    def mean_s(self) -> float:
        """Mean, 0 of nothing."""
        return self.total_s / self.count if self.count else 0.0

    def curve(self) -> list[tuple[float, float]]:
        """(seconds, share of all that took no longer), rising."""
        points, below = [], 0
        for at in sorted(self._bins):
            below += self._bins[at]
            points.append((self._FLOOR_S * 2 ** (at / self._PER_DOUBLING), below / self.count))
        return points

    def quantile(self, share: float) -> float:
        """Time that this share of all did not exceed, within 2%; 0 of nothing."""
        return next((seconds for seconds, below in self.curve() if below >= share), 0.0)
