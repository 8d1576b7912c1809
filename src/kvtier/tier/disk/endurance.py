"""What a drive may be written, and on what that is spent.

A drive dies of being written. The budget is bytes a day, or drive writes a day times the drive's size; it is kept as an allowance that fills evenly and holds at most
an hour's worth, so that neither a restart nor a quiet night buys an afternoon of unbounded writes.

Where more is offered than the budget carries, the budget goes to what is likeliest to pay: each part has a score, the seconds of recompute that it saves for each
byte, times how likely it is to be asked for again, and a threshold moves so that what lies above it is about what the budget carries. Likelihood is a
prior, honest and small: a part that was offered before and refused is being computed again, so it is being asked for again (that counts most); a short prefix
is shared by more requests than a long one.

Pure: no clock, no I/O, no locks. The store calls it under its own lock.
"""

import math
import re
from collections import OrderedDict
from dataclasses import dataclass

from kvtier.errors import ConfigError

DAY_S = 86_400.0
_BURST_S = 3_600.0
_MEMORY_S = 3_600.0
_REMEMBERED_MAX = 200_000
_DEPTH_HALF_TOKENS = 8_192
_BINS = 256
_BINS_PER_DOUBLING = 4
_HOUR = re.compile("hour_[0-9]+")


@dataclass(frozen=True, slots=True)
class EnduranceMeter:
    """What was written and refused, and what is left; bytes unless the name says otherwise.

    Attributes:
        bytes_a_day: the budget, 0 for none.
        written_bytes: since the meter was first started, restarts included.
        written_last_day_bytes: in the last 24 hours, in steps of an hour.
        admitted_bytes: offered and admitted since the store was opened.
        refused_bytes: offered and refused since then.
        allowance_bytes: what could be written at once.
        threshold: score below which parts are refused at present.
    """

    bytes_a_day: int
    written_bytes: int
    written_last_day_bytes: int
    admitted_bytes: int
    refused_bytes: int
    allowance_bytes: int
    threshold: float


def daily_bytes(bytes_a_day: int | None, drive_writes_a_day: float | None, drive_bytes: int | None) -> int:
    """The budget out of either way to say it, 0 for none. Raises ConfigError where both are given, or half of one."""
    if bytes_a_day is not None and drive_writes_a_day is not None:
        raise ConfigError("both bytes_a_day and drive_writes_a_day are given: give one")
    if drive_writes_a_day is not None:
        if not drive_bytes or drive_writes_a_day <= 0:
            raise ConfigError(
                f"drive_writes_a_day is {drive_writes_a_day} with drive_bytes {drive_bytes}: both must be positive"
            )
        return int(drive_writes_a_day * drive_bytes)
    if bytes_a_day is not None and bytes_a_day < 0:
        raise ConfigError(f"bytes_a_day is {bytes_a_day}: give a positive number, or none for no budget")
    return bytes_a_day or 0


class WriteBudget:
    """Admission of writes within `bytes_a_day`, and the meter. Times are seconds since the epoch; a step backwards counts as no time.

    Args:
        bytes_a_day: the budget; 0 admits everything and only meters.
        saved: what `state` returned in an earlier life, None for the first.
        now_s: the time.
    """

    def __init__(self, bytes_a_day: int, *, now_s: float, saved: dict[str, float] | None = None) -> None:
        if bytes_a_day < 0:
            raise ConfigError(f"bytes_a_day is {bytes_a_day}: give a positive number, or 0 for no budget")
        self.bytes_a_day = bytes_a_day
        self._rate = bytes_a_day / DAY_S
        self._burst = self._rate * _BURST_S
        saved = saved or {}
        self._now_s = float(saved.get("now_s", now_s))
        self._allowance = min(self._burst, float(saved.get("allowance_bytes", self._burst)))
        self._written = int(saved.get("written_bytes", 0))
        self._hours = {int(name[5:]): int(value) for name, value in saved.items() if _HOUR.fullmatch(name)}
        self._admitted = 0
        self._refused = 0
        self._offered = [0.0] * _BINS
        self._offered_since_s = min(self._now_s, now_s)
        self._threshold_bin = 0
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._advance(now_s)

    def _advance(self, now_s: float) -> None:
        elapsed = now_s - self._now_s
        self._now_s = now_s
        if elapsed <= 0:
            # A clock that was ahead was set right: time goes on from here, or nothing would be admitted until it comes there again.
            return
        self._allowance = min(self._burst, self._allowance + elapsed * self._rate)
        fade = math.exp(-elapsed / _MEMORY_S)
        if fade < 0.999:
            self._offered = [amount * fade for amount in self._offered]

    @staticmethod
    def _bin(score: float) -> int:
        if score <= 0:
            return 0
        return min(_BINS - 1, max(1, _BINS // 2 + 64 + int(math.log2(score) * _BINS_PER_DOUBLING)))

    def score(self, key: bytes, value_s_per_byte: float, depth_tokens: int) -> float:
        """Worth of writing a byte of `key`: the higher, the sooner."""
        if not math.isfinite(value_s_per_byte) or value_s_per_byte < 0:
            value_s_per_byte = 0.0
        again = self._seen.get(key, 0)
        likelihood = (0.25 + again) / (1.0 + again) / (1.0 + depth_tokens / _DEPTH_HALF_TOKENS)
        return (value_s_per_byte or 1e-9) * likelihood

    def admit(self, key: bytes, size_bytes: int, value_s_per_byte: float, depth_tokens: int, now_s: float) -> bool:
        """Whether to write it. What is admitted is spent."""
        if not self.bytes_a_day:
            self._admitted += size_bytes
            return True
        self._advance(now_s)
        place = self._bin(self.score(key, value_s_per_byte, depth_tokens))
        self._offered[place] += size_bytes
        self._set_threshold()
        if place < self._threshold_bin or self._allowance < size_bytes:
            self._refused += size_bytes
            self._seen[key] = self._seen.get(key, 0) + 1
            self._seen.move_to_end(key)
            if len(self._seen) > _REMEMBERED_MAX:
                self._seen.popitem(last=False)
            return False
        self._allowance -= size_bytes
        self._admitted += size_bytes
        self._seen.pop(key, None)
        return True

    def _set_threshold(self) -> None:
        """The lowest bin at which what was offered lately at or above it is no more than what the budget carried in the same time.

        A full allowance lowers the bar: what is not spent is lost.
        """
        memory_s = min(_MEMORY_S, max(60.0, self._now_s - self._offered_since_s))
        carried = self._rate * memory_s + max(0.0, self._allowance - self._burst / 2)
        above = 0.0
        place = _BINS
        while place > 0 and above + self._offered[place - 1] <= carried:
            place -= 1
            above += self._offered[place]
        # The best that is offered is never barred by the threshold: the allowance alone decides on it.
        best = max((index for index, amount in enumerate(self._offered) if amount > 0), default=0)
        self._threshold_bin = min(place, best)

    def wrote(self, size_bytes: int, now_s: float) -> None:
        """Bytes reached the drive."""
        self._advance(now_s)
        self._written += size_bytes
        hour = int(self._now_s // 3600)
        self._hours[hour] = self._hours.get(hour, 0) + size_bytes
        if len(self._hours) > 30:
            self._hours = {one: amount for one, amount in self._hours.items() if hour - 24 < one <= hour}

    def meter(self, now_s: float) -> EnduranceMeter:
        """Figures of this moment."""
        self._advance(now_s)
        hour = int(self._now_s // 3600)
        last_day = sum(amount for one, amount in self._hours.items() if hour - 24 < one <= hour)
        threshold = 0.0
        if self._threshold_bin > 0:
            threshold = 2.0 ** ((self._threshold_bin - _BINS // 2 - 64) / _BINS_PER_DOUBLING)
        return EnduranceMeter(
            self.bytes_a_day, self._written, last_day, self._admitted, self._refused, int(self._allowance), threshold
        )

    def state(self) -> dict[str, float]:
        """What the next life must know, as plain numbers."""
        hours = {f"hour_{hour}": float(amount) for hour, amount in self._hours.items()}
        return {
            "now_s": self._now_s,
            "allowance_bytes": self._allowance,
            "written_bytes": float(self._written),
            **hours,
        }
