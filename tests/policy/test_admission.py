"""Admission: counting, endurance, value, and what a scan costs."""

import pytest

from kvtier.policy.admission import DAY_S, Admission, AdmissionLimits, EnduranceBudget, FrequencySketch
from kvtier.policy.base import RecordInfo, RequestInfo
from kvtier.policy.registry import make_policy
from kvtier.simulate.replay import ReplayResult, replay
from kvtier.simulate.trace import TraceRequest


def test_sketch_counts() -> None:
    sketch = FrequencySketch(1000)
    for number in range(500):
        for _ in range(number % 3):
            sketch.add([b"%d" % number])
    counts = [sketch.count(b"%d" % number) for number in range(500)]
    assert all(count >= number % 3 for number, count in enumerate(counts)), "a count is never too low"
    assert sum(count > number % 3 for number, count in enumerate(counts)) < 10


def test_sketch_forgets_and_stays_small() -> None:
    sketch = FrequencySketch(1000)
    for _ in range(15):
        sketch.add([b"old"])
    size = sketch.size_bytes
    assert sketch.count(b"old") == 15
    for number in range(200_000):
        sketch.add([b"%d" % number])
    assert sketch.size_bytes == size <= 8 * 1024 * 2
    assert sketch.count(b"old") < 8


def test_sketch_needs_room() -> None:
    with pytest.raises(ValueError, match="keys is 0"):
        FrequencySketch(0)


def test_budget_refills_up_to_its_burst() -> None:
    budget = EnduranceBudget(10 * DAY_S, burst_s=10.0)  # ten bytes a second, a hundred at once
    assert budget.take(100, 0.0)
    assert not budget.take(1, 0.0)
    assert not budget.take(50, 4.0)
    assert budget.take(40, 4.0), "a refusal spends nothing"
    assert budget.left_bytes(1e9) == 100
    budget.give_back(50)
    assert budget.left_bytes(1e9) == 100


@pytest.mark.parametrize(("bytes_per_day", "burst_s"), [(0, 1), (1, 0)])
def test_budget_must_be_positive(bytes_per_day: float, burst_s: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        EnduranceBudget(bytes_per_day, burst_s=burst_s)


def test_over_a_day_no_more_is_written_than_the_budget() -> None:
    limits = AdmissionLimits(write_bytes_per_day=1000, write_burst_s=3600)
    door = Admission(limits, make_policy("lru", 10))
    written = sum(3 for second in range(0, 86_400, 10) if door.admits(b"x", 3, float(second)))
    assert 950 <= written <= 1000 + 1000 / 24
    assert door.refused["endurance"] > 8000


def test_seen_twice() -> None:
    door = Admission(AdmissionLimits(seen_min=2), make_policy("lru", 10))
    door.asked([b"a"])
    assert not door.admits(b"a", 1, 0.0)
    door.asked([b"a"])
    assert door.admits(b"a", 1, 0.0)
    assert door.refused == {"seen": 1}


def test_seen_min_is_checked() -> None:
    with pytest.raises(ValueError, match="seen_min is 16"):
        AdmissionLimits(seen_min=16)


def test_value_by_frequency() -> None:
    door = Admission(AdmissionLimits(by_value=True), make_policy("lru", 10))
    door.asked([b"a", b"a", b"b"])
    assert door.admits(b"b", 1, 0.0, [b"a"]), "a key counts once a request"
    door.asked([b"a"])
    assert door.admits(b"a", 1, 0.0, [b"b"])
    assert not door.admits(b"b", 1, 0.0, [b"a"])
    assert door.admits(b"b", 1, 0.0), "with nothing to displace there is nothing to weigh"


def test_value_by_the_policy_where_it_knows() -> None:
    policy = make_policy("reuse", 10)
    door = Admission(AdmissionLimits(by_value=True), policy)
    policy.request(RequestInfo([b"pinned"], pinned=True), 0.0)
    policy.insert(b"pinned", RecordInfo(1), 0.0)
    policy.request(RequestInfo([b"new"]), 1.0)
    for _ in range(9):
        door.asked([b"new"])
    assert not door.admits(b"new", 1, 1.0, [b"pinned"])


def scanned(name: str, admission: AdmissionLimits | None, *, scan: bool) -> tuple[int, ReplayResult]:
    """Hits of a working set of 40 prompts of 4 blocks in a tier of 200, while 2,000 blocks of one-time prompts pass."""
    requests = []
    next_id = 10_000
    for at in range(3000):
        number = at * 7 % 40
        requests.append(TraceRequest(float(at), [number * 10 + place for place in range(4)], 2048, 100))
        if scan and 1000 <= at < 1500:
            requests.append(TraceRequest(float(at), list(range(next_id, next_id + 4)), 2048, 100))
            next_id += 4
    hits = 0

    def each(request: TraceRequest, hit: int) -> None:
        nonlocal hits
        hits += hit if request.block_ids[0] < 10_000 else 0

    result = replay(requests, make_policy(name, 200), admission=admission, each=each)
    return hits, result


@pytest.mark.parametrize(
    ("name", "admission"),
    [
        ("reuse", None),
        ("lru", AdmissionLimits(seen_min=2)),
        ("fifo", AdmissionLimits(seen_min=2)),
        ("lru", AdmissionLimits(by_value=True)),
    ],
)
def test_a_scan_of_ten_times_the_capacity_costs_at_most_a_twentieth(
    name: str, admission: AdmissionLimits | None
) -> None:
    calm, _ = scanned(name, admission, scan=False)
    busy, _ = scanned(name, admission, scan=True)
    assert busy >= 0.95 * calm > 10_000


def test_the_scan_hurts_where_nothing_guards() -> None:
    calm, _ = scanned("lru", None, scan=False)
    busy, _ = scanned("lru", None, scan=True)
    assert busy < 0.95 * calm
