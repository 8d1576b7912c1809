"""Policies alone on a trace: blocks of one size, one tier, no media and no clock but the trace's.

The measure is block hits over blocks asked, where a request's hits are its leading run of present blocks: KV
is of use only with all that comes before it. After a request all its blocks are there (used or inserted, the
last one first, so that recency alone evicts tails before heads), then the tier evicts down to its capacity.

`min` is Belady's MIN, which knows the future and bounds every policy: it evicts the block whose next use is
furthest away, of one request's blocks the last. `infinite` never evicts. Both hold all distinct blocks of the
trace in memory; every other policy holds what the capacity holds.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvtier.policy.admission import Admission, AdmissionLimits
from kvtier.policy.base import EvictionPolicy, Key, RecordInfo, RequestInfo
from kvtier.policy.registry import make_policy
from kvtier.simulate.trace import TraceRequest

KEY_BYTES = 8


class ReplayResult(msgspec.Struct, frozen=True):
    """What one policy did on one trace.

    Attributes:
        policy: its name.
        capacity_blocks: blocks that the tier held at most, 0 for `infinite`.
        hit_blocks: blocks of all leading runs.
        asked_blocks: blocks of all requests.
        stored_blocks: blocks that entered the tier, so bytes written over block size.
        seconds: wall time that the replay took.
    """

    policy: str
    capacity_blocks: int
    hit_blocks: int
    asked_blocks: int
    stored_blocks: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Block hits over blocks asked."""
        return self.hit_blocks / self.asked_blocks if self.asked_blocks else 0.0


def _no_lease(key: Key) -> bool:
    return False


def _admitted(
    door: Admission, policy: EvictionPolicy, keys: Sequence[Key], present: set[Key], capacity: int, now_s: float
) -> int:
    """How many of `keys`, from the first on, may be in the tier: behind one that may not, none is of use."""
    own = set(keys)
    victims = policy.candidates(now_s, own.__contains__)
    room = capacity - len(present)
    for place, key in enumerate(keys):
        if key in present:
            continue
        room -= 1
        victim = next(victims, None) if room < 0 else None
        if not door.admits(key, 1, now_s, [victim] if victim is not None else ()):
            return place
    return len(keys)


def replay(
    requests: Iterable[TraceRequest],
    policy: EvictionPolicy,
    *,
    tokens_per_block: int = 512,
    decode_tokens_s: float = 50.0,
    admission: AdmissionLimits | None = None,
    cost_s: Callable[[int], float] | None = None,
    each: Callable[[TraceRequest, int], None] | None = None,
) -> ReplayResult:
    """Run `policy` over a trace. Its capacity in bytes counts blocks: each has one byte here.

    Args:
        requests: the trace.
        policy: a new policy.
        tokens_per_block: tokens of one block.
        decode_tokens_s: how fast answers are generated; a policy is told of an answer's length once it is over.
        admission: what the tier asks of what comes in; all enters by default.
        cost_s: seconds that recomputing the block at a depth of so many tokens takes; 0 everywhere by default.
        each: called with every request and its hits.
    """
    started = time.perf_counter()
    present: set[Key] = set()
    capacity = policy.capacity_bytes
    hits = asked = stored = 0
    insert, access = policy.insert, policy.access
    door = Admission(admission, policy) if admission is not None else None
    running: list[tuple[float, int, list[Key], int]] = []
    for number, request in enumerate(requests):
        now_s = request.time_s
        while running and running[0][0] <= now_s:
            ended_s, _, done, output_tokens = heapq.heappop(running)
            policy.finished(done, output_tokens, ended_s)
        keys = [block_id.to_bytes(KEY_BYTES, "little") for block_id in request.block_ids]
        hit = 0
        for key in keys:
            if key not in present:
                break
            hit += 1
        hits += hit
        asked += len(keys)
        policy.request(RequestInfo(keys, hit), now_s)
        taken = len(keys)
        if door is not None:
            door.asked(keys)
            taken = _admitted(door, policy, keys, present, capacity, now_s)
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            if key in present:
                access(key, now_s)
            elif place >= taken:
                continue
            else:
                depth = (place + 1) * tokens_per_block
                parent = keys[place - 1] if place else None
                insert(key, RecordInfo(1, parent, depth, cost_s(depth) if cost_s else 0.0), now_s)
                present.add(key)
                stored += 1
        if len(present) > capacity:
            victims = policy.candidates(now_s, _no_lease)
            batch = [next(victims) for _ in range(len(present) - capacity)]
            victims.close()  # type: ignore[attr-defined]
            for key in batch:
                policy.remove(key, now_s, evicted=True)
                present.remove(key)
        heapq.heappush(running, (now_s + request.output_tokens / decode_tokens_s, number, keys, request.output_tokens))
        if each is not None:
            each(request, hit)
    return ReplayResult(policy.name, capacity, hits, asked, stored, time.perf_counter() - started)


def replay_min(requests: Sequence[TraceRequest], capacity_blocks: int) -> ReplayResult:
    """Belady's MIN on a whole trace in memory."""
    started = time.perf_counter()
    never = len(requests)
    next_use: list[list[int]] = [[]] * len(requests)
    seen: dict[int, int] = {}
    for at in range(len(requests) - 1, -1, -1):
        ids = requests[at].block_ids
        next_use[at] = [seen.get(block_id, never) for block_id in ids]
        for block_id in ids:
            seen[block_id] = at
    present: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = asked = stored = 0
    for at, request in enumerate(requests):
        hit = 0
        for block_id in request.block_ids:
            if block_id not in present:
                break
            hit += 1
        hits += hit
        asked += len(request.block_ids)
        for place, block_id in enumerate(request.block_ids):
            stored += block_id not in present
            present[block_id] = use = next_use[at][place]
            heapq.heappush(furthest, (-use, -place, block_id))
        while len(present) > capacity_blocks:
            use, _, block_id = heapq.heappop(furthest)
            if present.get(block_id) == -use:  # else an entry from before its last use
                del present[block_id]
        next_use[at] = []
    return ReplayResult("min", capacity_blocks, hits, asked, stored, time.perf_counter() - started)


def replay_infinite(requests: Iterable[TraceRequest]) -> ReplayResult:
    """A tier that never evicts."""
    started = time.perf_counter()
    present: set[int] = set()
    hits = asked = 0
    for request in requests:
        for block_id in request.block_ids:
            if block_id not in present:
                break
            hits += 1
        asked += len(request.block_ids)
        present.update(request.block_ids)
    return ReplayResult("infinite", 0, hits, asked, len(present), time.perf_counter() - started)


def replay_named(requests: Iterable[TraceRequest], name: str, capacity_blocks: int) -> ReplayResult:
    """One policy by its registered name, or `min`, or `infinite`."""
    if name == "min":
        return replay_min(list(requests), capacity_blocks)
    if name == "infinite":
        return replay_infinite(requests)
    return replay(requests, make_policy(name, capacity_blocks))
