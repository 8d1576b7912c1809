"""Keeps what is most likely to be asked for again soon, per byte: kvtier's own policy.

What it builds on, in traces of real services:

- A prefix is a chain. A record is of use only with all before it, so a chain goes from its tail, and a record
  never before what continues it.
- Whether a prefix comes back depends on what is known when it was used: its turn, what the request added, how long
  the answer was, how often and after what gap it came back before, how many continuations it has. When it
  comes back is not soon after: people read and think. Neither the newest nor the most used is the most valuable.

So the policy learns, from what it sees, the hazard of return by age and features (`kvtier.policy.returns`), and evicts
the lowest index: expected returns per second of holding, times seconds of recompute saved per byte.

**Runs.** Records that were last used by the same request, and before that by the same one, have the same future
as far as anyone can tell. Such a stretch of a chain is a run: it has one index, and is evicted from its end. A
request cuts the runs that it touches and makes new ones, so the work is by request, not by record. The last
record of a request is a run of its own: a partial block is seldom used again.

**Order.** Runs with records in the tier are in a heap by (hold, index, age). A run's index changes when it passes into the next
age bucket; buckets are queues in order of use, so passing costs constant time. A run that would be next while
something continues it is parked until that has left, and is taken right after it. Entries of the heap that no longer hold are skipped
when they come up.

**Learning.** Each run has a witness, its middle record. A request that holds the witness is a return of the run; each
age bucket passed without is one too few. Records that left are remembered by name, up to `history_keys_max`, so what
was evicted teaches as well: else the model would learn only from what it chose to keep.

**Hints.** A pinned chain goes after all that is not, one with a time to live after all that has neither, and a chain whose tool
call is out counts as having a time to live of half a minute. Hints hold at most half of the capacity; beyond that they are
not taken, and counted in `hints_refused`.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import ClassVar

import numpy as np

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo, RequestInfo
from kvtier.policy.returns import BUCKETS, EDGES_S, ReturnModel, gittins

HISTORY_KEYS_MAX = 1 << 17
TEMPLATE_BRANCHES = 3
"""A record with so many continuations is a shared beginning: what follows it is a new conversation."""
SAME_USE_S = 60.0
"""A use so soon after the request that announced it belongs to that request."""
RETURNS_SOON_S = 30.0
HINT_SHARE_MAX = 0.5
ADVANCE_EVERY_S = 0.5
STEPS_MAX = 8192
"""Steps from one age bucket to the next taken at once; after an idle hour the rest is made up for in the calls that follow."""
_ROWS_MAX = 1024
REFRESH_AT = frozenset(bisect_left(EDGES_S, age_s) for age_s in (16, 64, 256, 1024, 4096, 16_384, 65_536))
"""Age buckets in which a run's hazards are asked for anew: the model has learned since."""

_NO_HOLD, _TTL, _PIN = range(3)
_HELD_WORTH = 1e30


def _octave(number: float, steps: int, last: int) -> int:
    """Logarithmic category of a number from 0 on, in so many steps a doubling, at most `last`."""
    return min(last, int(steps * math.log2(max(number, 0) + 1)))


# The fields of the features and how many categories each has.
_SIZES = (
    8,  # turn
    2 * 32,  # records that the request added; in a first turn or a later one
    16,  # records of the request
    2 * 17,  # tokens answered, the first category for not known yet; in a first turn or a later one
    6 * 3,  # earlier uses; continuations
    4,  # whether it is the last record; whether it is new
    18,  # seconds since the use before, the first category for none
    2,  # whether a tool call is out
)
_ANSWER_FIELD = 3


class _Record:
    """A record in the tier."""

    __slots__ = ("cost_s", "parent", "size_bytes")

    def __init__(self, size_bytes: int, parent: Key | None, cost_s: float) -> None:
        self.size_bytes = size_bytes
        self.parent = parent
        self.cost_s = cost_s


class _Run:
    """A stretch of a chain with one past, of `members` in prefix order, some of which later runs may have taken over.

    `known` members are still this run's, `resident` of them in the tier, none of those at `top` or beyond. The entry of the
    heap that holds is the one with the present `serial`; a parked run has none, and is parked at its last member in the tier.
    """

    __slots__ = (
        "bucket",
        "cost_s",
        "features",
        "hazards",
        "hold",
        "index",
        "known",
        "learning",
        "members",
        "number",
        "parent",
        "parked_at",
        "queued",
        "ranked",
        "request",
        "resident",
        "serial",
        "size_bytes",
        "top",
        "touched_s",
        "turn",
        "uses",
    )

    def __init__(
        self, members: list[Key], parent: Key | None, turn: int, uses: int, request: int, number: int, now_s: float
    ) -> None:
        self.members = members
        self.parent = parent
        self.turn = turn
        self.uses = uses
        self.request = request
        self.number = number
        self.touched_s = now_s
        self.features: tuple[int, ...] = ()
        self.hazards = b""
        self.index = 0.0
        self.ranked = -1
        self.bucket = 0
        self.learning = True
        self.hold = _NO_HOLD
        self.known = len(members)
        self.resident = 0
        self.size_bytes = 0
        self.cost_s = 0.0
        self.top = 0
        self.serial = 0
        self.queued = False
        self.parked_at = -1


def _stretches(befores: Sequence[_Run | None]) -> list[tuple[int, int, _Run | None]]:
    """Cut a chain where its past changes, and before its last record: (start, end, the run it was in)."""
    last = len(befores) - 1
    starts = [at for at in range(last + 1) if at in (0, last) or befores[at] is not befores[at - 1]]
    return [(start, end, befores[start]) for start, end in zip(starts, (*starts[1:], last + 1), strict=True)]


class ReusePolicy(EvictionPolicy):
    """Evicts the lowest expected saving per byte and second, tails first.

    Args:
        capacity_bytes: capacity of the tier.
        history_keys_max: names remembered of records that left, some 300 bytes each.
    """

    name: ClassVar[str] = "reuse"

    def __init__(self, capacity_bytes: int, *, history_keys_max: int = HISTORY_KEYS_MAX) -> None:
        super().__init__(capacity_bytes)
        self.history_keys_max = history_keys_max
        self.model = ReturnModel(_SIZES)
        self.hints_refused = 0
        self._records: dict[Key, _Record] = {}
        self._where: dict[Key, tuple[_Run, int]] = {}  # of records in the tier and of those remembered
        self._children: dict[Key, int] = {}  # records in the tier that continue this one
        self._branches: dict[Key, int] = {}  # continuations seen of a remembered record
        self._heap: list[tuple[int, float, int, int, _Run]] = []
        self._heap_max = 1024
        self._by_age: list[OrderedDict[_Run, None]] = [OrderedDict() for _ in range(BUCKETS)]
        self._oldest: OrderedDict[_Run, None] = OrderedDict()
        self._held: dict[int, dict[_Run, None]] = {}  # by request
        self._held_until: list[tuple[float, int]] = []
        self._held_bytes = 0
        self._usual_worth = 0.0
        self._due: list[_Run] = []  # to be appraised before the model changes
        self._advance_at_s = float("-inf")
        self._numbers = count(1)

    # ---- the contract

    def request(self, request: RequestInfo, now_s: float) -> None:
        self._advance(now_s)
        keys = list(dict.fromkeys(request.keys))
        if keys:
            self._touch(keys, now_s, number=next(self._numbers), hints=request)

    def finished(self, keys: Sequence[Key], output_tokens: int, now_s: float) -> None:
        self._advance(now_s)
        last = self._where.get(keys[-1]) if keys else None
        if last is None:
            return
        seen: _Run | None = None
        runs: list[_Run] = []
        for key in keys:
            place = self._where.get(key)
            if place is None or place[0] is seen or place[0].request != last[0].request:
                continue
            seen = run = place[0]
            answer = 2 * (1 + _octave(output_tokens, 1, 15)) + (run.turn > 0)
            run.features = (*run.features[:_ANSWER_FIELD], answer, *run.features[_ANSWER_FIELD + 1 :])
            self._due.append(run)
            runs.append(run)
        self._appraise()
        self._rank(runs)

    def insert(self, key: Key, info: RecordInfo, now_s: float) -> None:
        self._advance(now_s)
        if key not in self._where:
            self._touch([key], now_s, parent=info.parent)
        run, at = self._where[key]
        parent = run.members[at - 1] if at else run.parent or info.parent
        self._records[key] = record = _Record(info.size_bytes, parent, info.cost_s)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if info.cost_s > 0:
            worth = info.cost_s / info.size_bytes
            self._usual_worth += (worth - self._usual_worth) * (0.01 if self._usual_worth else 1.0)
        if run.bucket < 0:  # it had nothing in the tier and nothing to teach, and was let alone
            run.bucket = bisect_right(EDGES_S, now_s - run.touched_s) - 1
            self._by_age[run.bucket][run] = None
        self._add(run, 1, record.size_bytes, record.cost_s)
        run.top = max(run.top, at + 1)
        if run.parked_at >= 0:
            if at > run.parked_at:
                self._unpark(run)
        elif not run.queued:
            self._queue(run)
        if run.hold:
            self._bound_held(run.request)

    def access(self, key: Key, now_s: float) -> None:
        run, _ = self._where[key]
        if run.request and now_s - run.touched_s < SAME_USE_S:
            return
        self._advance(now_s)
        self._touch([key], now_s, parent=self._records[key].parent)

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        record = self._records.pop(key)
        run, _ = self._where[key]
        self._add(run, -1, -record.size_bytes, -record.cost_s)
        self._settle(run)
        parent = record.parent
        if parent is not None:
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]
                place = self._where.get(parent)
                if place is not None and place[0].parked_at == place[1]:
                    self._unpark(place[0])
        if run not in self._oldest:
            self._drop(key)
        self._forget()

    def worth(self, key: Key, now_s: float) -> float | None:
        self._advance(now_s)
        place = self._where.get(key)
        if place is None:
            return None
        run = place[0]
        bucket = run.bucket if run.bucket >= 0 else bisect_right(EDGES_S, now_s - run.touched_s) - 1
        return self._index_of(run, bucket) * self._worth_of(run) + run.hold * _HELD_WORTH

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        self._advance(now_s)
        heap = self._heap
        aside: list[tuple[int, float, int, int, _Run]] = []
        given: dict[Key, None] = {}
        given_children: dict[Key, int] = {}
        waiting: dict[Key, tuple[_Run, int]] = {}
        try:
            while heap:
                entry = heappop(heap)
                run = entry[4]
                if entry[3] != run.serial:
                    continue
                if not run.resident:
                    run.queued = False
                    continue
                aside.append(entry)
                yield from self._walk(run, is_leased, given, given_children, waiting)
            for key in self._records:  # what leased records continue goes last
                if key not in given and not is_leased(key):
                    yield key
        finally:
            valid = [entry for entry in aside if entry[3] == entry[4].serial]
            if 4 * len(valid) > len(heap):
                heap += valid
                heapify(heap)
            else:
                for entry in valid:
                    heappush(heap, entry)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    # ---- choosing

    def _walk(
        self,
        run: _Run,
        is_leased: Callable[[Key], bool],
        given: dict[Key, None],
        given_children: dict[Key, int],
        waiting: dict[Key, tuple[_Run, int]],
    ) -> Iterator[Key]:
        """Give `run` from its end, and after the last continuation of a record that waited for it, that record's run."""
        stack = [(run, run.top - 1)]
        while stack:
            run, at = stack.pop()
            while at >= 0:
                key = run.members[at]
                if key in given or not self._is_in(run, at):
                    at -= 1
                    continue
                gone = given_children.get(key, 0)
                if self._children.get(key, 0) > gone:
                    if not gone and at == run.top - 1:
                        run.parked_at = at
                        run.serial += 1
                        run.queued = False
                    waiting[key] = (run, at)
                    break
                if is_leased(key):
                    at -= 1
                    continue
                given[key] = None
                yield key
                at -= 1
                parent = self._records[key].parent
                if parent is None:
                    continue
                gone = given_children[parent] = given_children.get(parent, 0) + 1
                if self._children.get(parent, 0) > gone:
                    continue
                place = waiting.get(parent) or self._where.get(parent)
                if place is not None and place[0] is not run and (parent in waiting or place[0].parked_at == place[1]):
                    stack.append((run, at))
                    run, at = place

    def _is_in(self, run: _Run, at: int) -> bool:
        key = run.members[at]
        return key in self._records and self._where[key][0] is run

    def _queue(self, run: _Run) -> None:
        """Put `run` where it belongs in the order, if it has anything to give."""
        if not run.resident or run.parked_at >= 0:
            return
        run.serial += 1
        run.queued = True
        heappush(
            self._heap, (run.hold, self._index_of(run, run.bucket) * self._worth_of(run), run.number, run.serial, run)
        )
        if len(self._heap) > self._heap_max:
            self._heap[:] = [entry for entry in self._heap if entry[3] == entry[4].serial and entry[4].resident]
            heapify(self._heap)
            self._heap_max = 2 * len(self._heap) + 1024

    def _worth_of(self, run: _Run) -> float:
        """Seconds saved by a return, per byte; where costs are not told all bytes are equal."""
        return run.cost_s / run.size_bytes if run.cost_s else self._usual_worth or 1.0

    def _unpark(self, run: _Run) -> None:
        run.parked_at = -1
        self._queue(run)

    def _settle(self, run: _Run) -> None:
        """Bring `top` back to the truth after members left."""
        while run.top and not self._is_in(run, run.top - 1):
            run.top -= 1
        if run.parked_at >= run.top:
            self._unpark(run)

    def _add(self, run: _Run, resident: int, size_bytes: int, cost_s: float) -> None:
        """Count records that came into `run`, or left it."""
        run.resident += resident
        run.size_bytes += size_bytes
        run.cost_s = run.cost_s + cost_s if run.resident else 0.0
        if run.hold:
            self._held_bytes += size_bytes

    # ---- learning

    def _touch(
        self,
        keys: list[Key],
        now_s: float,
        *,
        parent: Key | None = None,
        number: int = 0,
        hints: RequestInfo | None = None,
    ) -> None:
        """All of `keys`, a chain from its beginning or (number 0) one record alone, are used now: they get new runs."""
        where = self._where
        befores = [place[0] if (place := where.get(key)) else None for key in keys]
        known = next((at for at, before in enumerate(befores) if before is None), len(keys))
        turn = 0
        if known:
            end = keys[known - 1]
            if self._branches.get(end, 0) < TEMPLATE_BRANCHES:
                turn = where[end][0].turn + 1
            if known < len(keys):
                self._branches[end] = self._branches.get(end, 0) + 1
            if hints is not None:
                self._release(where[end][0].request)
        hold = self._hold(hints, number, now_s) if hints is not None else _NO_HOLD
        returns_soon = hints is not None and hints.returns_soon

        added = 2 * _octave(len(keys) - known, 2, 31) + (turn > 0)
        length = _octave(len(keys), 1, 15)
        runs: list[_Run] = []
        for start, end_at, before in _stretches(befores):
            stretch = keys[start:end_at]
            if before is not None and before.learning:
                self._learn_return(before, stretch)
            run = _Run(
                stretch,
                keys[start - 1] if start else parent,
                turn,
                before.uses + 1 if before else 0,
                number,
                next(self._numbers),
                now_s,
            )
            run.features = (
                min(turn, 7),
                added,
                length,
                int(turn > 0),
                3 * _octave(run.uses, 1, 5) + min(self._branches.get(stretch[-1], 0), 2),
                2 * (end_at == len(keys)) + (before is None),
                1 + _octave(now_s - before.touched_s, 1, 16) if before else 0,
                int(returns_soon),
            )
            run.hold = hold
            if hold:
                self._held.setdefault(number, {})[run] = None
            self._move(stretch, before, run)
            self._by_age[0][run] = None
            self._oldest[run] = None
            self._due.append(run)
            runs.append(run)
        self._appraise()
        self._rank(runs)
        if hold:
            self._bound_held(number)
        self._forget()

    def _learn(self, run: _Run, *, returned: bool) -> None:
        """One example: `run` came back at the age that it has reached, or left it behind."""
        if self.model.learns_next:
            self._appraise()
        self.model.learn(run.features, run.bucket, returned, math.sqrt(len(run.members)))

    def _appraise(self) -> None:
        """Ask the model, as it is now, for the runs that are due."""
        if self._due:
            hazards = self.model.hazards([run.features for run in self._due]).astype(np.float32)
            for run, row in zip(self._due, hazards, strict=True):
                run.hazards = row.tobytes()
                run.ranked = -1
            self._due.clear()

    def _rank(self, runs: Sequence[_Run]) -> None:
        """Put `runs` where they belong in the order at the age that they have reached."""
        for start in range(0, len(runs), _ROWS_MAX):
            some = runs[start : start + _ROWS_MAX]
            hazards = np.frombuffer(b"".join(run.hazards for run in some), np.float32).reshape(-1, BUCKETS)
            for run, index in zip(some, gittins(hazards, [run.bucket for run in some]), strict=True):
                run.index, run.ranked = index, run.bucket
                self._queue(run)

    def _index_of(self, run: _Run, bucket: int) -> float:
        if run.ranked != bucket:
            (run.index,) = gittins(np.frombuffer(run.hazards, np.float32)[None], [bucket])
            run.ranked = bucket
        return run.index

    def _learn_return(self, before: _Run, stretch: list[Key]) -> None:
        witness = len(before.members) // 2
        first, last = self._where[stretch[0]][1], self._where[stretch[-1]][1]
        if first <= witness <= last:
            self._learn(before, returned=True)
            before.learning = False

    def _move(self, stretch: list[Key], before: _Run | None, run: _Run) -> None:
        """Hand `stretch` over from the run it was in."""
        records, where = self._records, self._where
        if before is not None:
            first, last = where[stretch[0]][1], where[stretch[-1]][1]
            if first < before.top <= last + 1 and last - first + 1 == len(stretch):
                before.top = first  # all above it leave
        resident = size_bytes = 0
        cost_s = 0.0
        for at, key in enumerate(stretch):
            record = records.get(key)
            if record is not None:
                resident += 1
                size_bytes += record.size_bytes
                cost_s += record.cost_s
                run.top = at + 1
            where[key] = (run, at)
        self._add(run, resident, size_bytes, cost_s)
        if before is not None:
            self._add(before, -resident, -size_bytes, -cost_s)
            before.known -= len(stretch)
            self._settle(before)
            if not before.known:
                self._bury(before)

    def _bury(self, run: _Run) -> None:
        """No record is in this run any more."""
        run.learning = False
        run.serial += 1
        run.members = []
        self._oldest.pop(run, None)
        held = self._held.get(run.request) if run.hold else None
        if held is not None:  # else what is pinned and never comes, or leaves, would be held for ever
            held.pop(run, None)
            if not held:
                del self._held[run.request]
        if run.bucket >= 0:
            self._by_age[run.bucket].pop(run, None)
            run.bucket = -1

    def _advance(self, now_s: float) -> None:
        """Let runs pass into the age buckets that they have reached, and holds end."""
        if now_s < self._advance_at_s:
            return
        self._advance_at_s = now_s + ADVANCE_EVERY_S
        moved: dict[_Run, None] = {}
        steps_left = STEPS_MAX
        for bucket in range(BUCKETS - 1):
            runs = self._by_age[bucket]
            while runs and steps_left:
                run = next(iter(runs))
                if now_s - run.touched_s < EDGES_S[bucket + 1]:
                    break
                del runs[run]
                steps_left -= 1
                if run.learning:
                    self._learn(run, returned=False)
                elif not run.resident:
                    run.bucket = -1
                    continue
                run.bucket = bucket + 1
                self._by_age[bucket + 1][run] = None
                if run.resident:
                    moved[run] = None
                    if bucket + 1 in REFRESH_AT:
                        self._due.append(run)
        self._appraise()
        self._rank(list(moved))
        while self._held_until and self._held_until[0][0] <= now_s:
            self._release(heappop(self._held_until)[1])

    def _forget(self) -> None:
        """Drop the oldest names beyond the bound. A run whose names are dropped teaches no more."""
        while len(self._where) - len(self._records) > self.history_keys_max and self._oldest:
            run, _ = self._oldest.popitem(last=False)
            run.learning = False
            for at, key in enumerate(list(run.members)):
                if self._where.get(key) == (run, at) and key not in self._records:
                    self._drop(key)

    def _drop(self, key: Key) -> None:
        run, _ = self._where.pop(key)
        self._branches.pop(key, None)
        run.known -= 1
        if not run.known:
            self._bury(run)

    # ---- hints

    def _hold(self, hints: RequestInfo, number: int, now_s: float) -> int:
        """What the hints of a request come to, within what hints may hold."""
        ttl_s = max(hints.ttl_s or 0.0, RETURNS_SOON_S if hints.returns_soon else 0.0)
        if not hints.pinned and ttl_s <= 0:
            return _NO_HOLD
        if self._held_bytes >= HINT_SHARE_MAX * self.capacity_bytes:
            self.hints_refused += 1
            return _NO_HOLD
        if hints.pinned:
            return _PIN
        if len(self._held_until) > 2 * len(self._held) + 1024:  # most have ended before their time
            self._held_until = [entry for entry in self._held_until if entry[1] in self._held]
            heapify(self._held_until)
        heappush(self._held_until, (now_s + ttl_s, number))
        return _TTL

    def _bound_held(self, number: int) -> None:
        """A request's records came in after its hint was taken: let go of it where they are more than hints may hold."""
        if self._held_bytes > HINT_SHARE_MAX * self.capacity_bytes:
            self.hints_refused += 1
            self._release(number)

    def _release(self, number: int) -> None:
        """A held request's time is over, or a later request of its chain has come, which says for itself what it wishes."""
        for run in self._held.pop(number, ()):
            self._held_bytes -= run.size_bytes
            run.hold = _NO_HOLD
            self._queue(run)
