"""The policies against independent ones: libCacheSim, and plain models of what the papers say."""

import random
from collections import OrderedDict, deque
from pathlib import Path

import libcachesim
import pytest

from kvtier.policy.arc import ARCPolicy
from kvtier.policy.base import EvictionPolicy, Key, RecordInfo
from kvtier.policy.registry import make_policy
from kvtier.policy.s3fifo import S3FIFOPolicy
from kvtier.simulate.trace import Trace

DATA = Path(__file__).parents[1] / "data"


def random_keys(kind: str, count: int) -> list[int]:
    rng = random.Random(7)
    if kind == "uniform":
        return [rng.randrange(300) for _ in range(count)]
    if kind == "skewed":
        return [int(rng.paretovariate(0.3)) % 5000 for _ in range(count)]
    assert kind == "loops"
    return [(at * 7 if at // 500 % 2 else rng.randrange(150)) % 400 for at in range(count)]


def trace_keys(name: str, requests: int) -> list[int]:
    trace = Trace(DATA / f"{name}_trace.jsonl.xz", requests_max=requests)
    return [block_id for request in trace for block_id in request.block_ids]


def keys_of(kind: str) -> list[int]:
    if kind in ("conversation", "synthetic"):
        return trace_keys(kind, 1200)
    return random_keys(kind, 12_000)


KINDS = ("uniform", "skewed", "loops", "conversation", "synthetic")


def hits_of(policy: EvictionPolicy, numbers: list[int]) -> list[bool]:
    """A cache of records of one byte that evicts one before it inserts one, as libCacheSim does."""
    present: set[Key] = set()
    hits = []
    for now, number in enumerate(numbers):
        key = number.to_bytes(8, "little")
        hits.append(key in present)
        if key in present:
            policy.access(key, now)
            continue
        if len(present) >= policy.capacity_bytes:
            victim = next(policy.candidates(now, lambda key: False, key))
            policy.remove(victim, now, evicted=True)
            present.remove(victim)
        policy.insert(key, RecordInfo(1), now)
        present.add(key)
    return hits


def reference_hits(cache: libcachesim.CacheBase, numbers: list[int]) -> list[bool]:
    request = libcachesim.Request()
    hits = []
    for now, number in enumerate(numbers):
        request.obj_id, request.obj_size, request.clock_time = number + 1, 1, now
        hits.append(cache.get(request))
    return hits


@pytest.mark.parametrize("capacity", [40, 700])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("arc", libcachesim.ARC),
        ("fifo", libcachesim.FIFO),
        ("lfu", libcachesim.LFU),
        ("lru", libcachesim.LRU),
        ("sieve", libcachesim.Sieve),
    ],
)
def test_every_hit_equals_libcachesim(name: str, reference: type, kind: str, capacity: int) -> None:
    numbers = keys_of(kind)
    assert hits_of(make_policy(name, capacity), numbers) == reference_hits(reference(capacity), numbers)


class PaperARC:
    """ARC as figure 4 of the paper writes it, pages of one size, case by case."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def replace(self, number: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (number in self.b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def get(self, number: int) -> bool:
        if number in self.t1 or number in self.t2:
            self.t1.pop(number, None)
            self.t2.pop(number, None)
            self.t2[number] = None
            return True
        if number in self.b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.replace(number)
            del self.b1[number]
            self.t2[number] = None
            return False
        if number in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.replace(number)
            del self.b2[number]
            self.t2[number] = None
            return False
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self.replace(number)
            else:
                self.t1.popitem(last=False)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total >= self.c:
                if total == 2 * self.c:
                    self.b2.popitem(last=False)
                self.replace(number)
        self.t1[number] = None
        return False


@pytest.mark.parametrize("capacity", [1, 2, 3, 40, 100, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_arc_is_the_papers(kind: str, capacity: int) -> None:
    numbers = keys_of(kind)
    paper = PaperARC(capacity)
    assert hits_of(ARCPolicy(capacity), numbers) == [paper.get(number) for number in numbers]


class DocumentS3FIFO:
    """Document 001's S3-FIFO, records of one size, as plainly as it can be said."""

    def __init__(self, capacity: int, threshold: int, ratio: float) -> None:
        self.capacity, self.threshold, self.ratio = capacity, threshold, ratio
        self.small, self.main, self.ghosts = deque[int](), deque[int](), deque[int]()
        self.uses: dict[int, int] = {}

    def evict(self) -> None:
        while True:
            if len(self.small) > self.ratio * self.capacity or not self.main:
                number = self.small.popleft()
                if self.uses[number] >= self.threshold:
                    self.uses[number] = 0
                    self.main.append(number)
                    continue
                self.ghosts.append(number)
                if len(self.ghosts) > int(self.capacity * (1 - self.ratio)):
                    self.ghosts.popleft()
            else:
                number = self.main.popleft()
                if self.uses[number] > 0:
                    self.uses[number] -= 1
                    self.main.append(number)
                    continue
            del self.uses[number]
            return

    def get(self, number: int) -> bool:
        if number in self.uses:
            self.uses[number] = min(3, self.uses[number] + 1)
            return True
        if len(self.uses) >= self.capacity:
            self.evict()
        if number in self.ghosts:
            self.ghosts.remove(number)
            self.main.append(number)
        else:
            self.small.append(number)
        self.uses[number] = 0
        return False


@pytest.mark.parametrize(("threshold", "ratio"), [(1, 0.3), (2, 0.1), (3, 0.5)])
@pytest.mark.parametrize("capacity", [1, 40, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_s3fifo_is_the_documents(kind: str, capacity: int, threshold: int, ratio: float) -> None:
    numbers = keys_of(kind)
    policy = S3FIFOPolicy(capacity, small_to_main_promo_threshold=threshold, small_fifo_capacity_ratio=ratio)
    model = DocumentS3FIFO(capacity, threshold, ratio)
    assert hits_of(policy, numbers) == [model.get(number) for number in numbers]


class LibCacheSimS3FIFO(DocumentS3FIFO):
    """What libCacheSim does otherwise than document 001, and no more: the next test shows that this is all."""

    evicted = False

    def evict(self) -> None:
        # The main queue pays first when it is over its share, where the document asks the small one first.
        main_max = self.capacity - int(self.capacity * self.ratio)
        if self.small and len(self.main) <= main_max:
            while self.small:
                number = self.small.popleft()
                if self.uses[number] < self.threshold:
                    self.ghosts.append(number)
                    if len(self.ghosts) > int(self.capacity * (1 - self.ratio)):
                        self.ghosts.popleft()
                    del self.uses[number]
                    return
                self.uses[number] = 0
                self.main.append(number)
            return self.evict()
        while self.uses[self.main[0]]:
            self.uses[self.main[0]] -= 1
            self.main.rotate(-1)
        del self.uses[self.main.popleft()]
        return None

    def get(self, number: int) -> bool:
        if number in self.uses:
            return super().get(number)
        # A ghost is looked up before room is made for it, not after.
        remembered = number in self.ghosts
        if remembered:
            self.ghosts.remove(number)
        if len(self.uses) >= self.capacity:
            self.evicted = True
            self.evict()
        # Until the first eviction, what the small queue has no place for goes to the main queue unproven.
        warming = not self.evicted and len(self.small) >= int(self.capacity * self.ratio)
        (self.main if remembered or warming else self.small).append(number)
        self.uses[number] = 0
        return False


@pytest.mark.parametrize("capacity", [10, 40, 100, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_s3fifo_differs_from_libcachesim_by_three_rules(kind: str, capacity: int) -> None:
    numbers = keys_of(kind)
    theirs = libcachesim.S3FIFO(capacity, small_size_ratio=0.3, ghost_size_ratio=0.7, move_to_main_threshold=1)
    model = LibCacheSimS3FIFO(capacity, 1, 0.3)
    assert [model.get(number) for number in numbers] == reference_hits(theirs, numbers)
