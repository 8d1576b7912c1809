"""The load planner: the cheaper side, what is booked, deadlines, and a simulated queue in which nobody starves."""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.plan.break_even import Curve, Curves
from kvtier.plan.planner import WRITE_SHARE, Booked, Candidate, Decision, LoadPlanner

ADMIT, DEFER, DECLINE = Decision.ADMIT, Decision.DEFER, Decision.DECLINE
TOKEN_BYTES = 100

# Straight lines: recomputing 1 ms a token, from memory 0.01 ms a token, the disk 0.1 ms a token more. A step takes 10 ms.
CURVES = Curves(Curve(0.01, {1000: 1.01}), Curve(0.01, {1000: 0.12}), Curve(0.01, {1000: 0.02}))


def planner(curves: Curves = CURVES, **settings: float) -> LoadPlanner:
    return LoadPlanner(curves, TOKEN_BYTES, **settings)


def request(
    name: str,
    restorable: int,
    *,
    on_disk: float = 1.0,
    rest: int = 10,
    computed: int = 0,
    part_bytes: int = TOKEN_BYTES,
) -> Candidate:
    size = restorable * part_bytes
    return Candidate(name, computed + restorable + rest, computed, restorable, size, int(size * on_disk))


def room() -> bool:
    return True


def no_room() -> bool:
    return False


def decide(
    plan: LoadPlanner, *candidates: Candidate, now_s: float = 0.0, booked: Booked | None = None
) -> list[Decision]:
    plan.begin_step(booked or Booked(waiting=len(candidates)), now_s)
    return [plan.decide(candidate, room) for candidate in candidates]


# ---- one request


def test_alone_it_gets_the_cheaper_side() -> None:
    assert decide(planner(), request("a", 1000)) == [ADMIT]
    slow_disk = CURVES._replace(g_ssd=Curve(0.01, {1000: 1.02}))
    assert decide(planner(slow_disk), request("a", 1000)) == [DECLINE]
    assert decide(planner(slow_disk), request("a", 1000, on_disk=0)) == [ADMIT]


def test_equal_costs_are_recomputed() -> None:
    same = CURVES._replace(g_mem=CURVES.f, g_ssd=CURVES.f)
    assert decide(planner(same), request("a", 1000)) == [DECLINE]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 3000),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.tuples(*[st.floats(0, 2)] * 3),
)
def test_alone_the_cheaper_side_wins_whatever_the_curves(
    restorable: int, rest: int, computed: int, on_disk: float, seconds: tuple[float, float, float]
) -> None:
    curves = Curves(*(Curve(0.01, {1000: 0.01 + value}) for value in seconds))
    candidate = request("a", restorable, on_disk=on_disk, rest=rest, computed=computed)
    (decision,) = decide(planner(curves), candidate)
    disk_tokens = restorable * candidate.disk_bytes / candidate.restorable_bytes
    service_s = max(0.0, curves.g_ssd(disk_tokens) - curves.g_mem(disk_tokens)) if disk_tokens else 0.0
    load_s = service_s + curves.g_mem(restorable)
    recompute_s = curves.f(0) + curves.f(computed + restorable) - curves.f(computed)
    if abs(load_s - recompute_s) > 1e-9:
        assert decision is (ADMIT if load_s < recompute_s else DECLINE)


def test_both_sides_price_the_same_tokens() -> None:
    """What is computed already, and what follows the prefix, moves no answer: neither is on one side alone."""
    curves = CURVES._replace(g_ssd=Curve(0.01, {1000: 0.91}))
    for computed in (0, 50_000):
        for rest in (1, 50_000):
            assert decide(planner(curves), request("a", 1000, rest=rest, computed=computed)) == [ADMIT]
    # A curve that grows faster than its tokens: the same prefix is dearer to recompute behind a long one.
    steep = CURVES._replace(f=Curve(0.01, {1000: 0.11, 10_000: 10.01}), g_ssd=Curve(0.01, {1000: 0.16}))
    assert decide(planner(steep), request("a", 1000)) == [DECLINE]
    assert decide(planner(steep), request("a", 1000, computed=9000)) == [ADMIT]


def test_only_what_is_on_disk_is_read_from_it() -> None:
    curves = CURVES._replace(g_ssd=Curve(0.01, {1000: 2.02}))  # 2 s of disk for 1000 tokens, against 1 s of recomputing
    assert decide(planner(curves), request("a", 1000, on_disk=0.6)) == [DECLINE]
    assert decide(planner(curves), request("a", 1000, on_disk=0.4)) == [ADMIT]
    # By the share of its bytes, whatever a token's parts weigh.
    assert decide(planner(curves), request("a", 1000, on_disk=0.4, part_bytes=7)) == [ADMIT]


# ---- what is booked


def test_a_busy_gpu_hides_a_read() -> None:
    slow = CURVES._replace(g_ssd=Curve(0.01, {1000: 1.52}))  # 1.5 s of disk
    assert decide(planner(slow), request("a", 1000)) == [DECLINE]
    busy = Booked(prefills=[(500, 2000)], waiting=1)  # 1.5 s to go
    assert decide(planner(slow), request("a", 1000), booked=busy) == [DEFER]
    plan = planner(slow)
    plan.begin_step(busy, 0.0)
    assert plan.decide(request("a", 1000), no_room) is ADMIT


def test_prefills_ahead_in_the_queue_count_too() -> None:
    slow = CURVES._replace(g_ssd=Curve(0.01, {1000: 1.52}))
    plan = planner(slow)
    plan.begin_step(Booked(waiting=2), 0.0)
    plan.book_prefill(0, 1500)
    assert plan.decide(request("a", 1000), no_room) is ADMIT
    # A request that was declined is such a prefill, and one that was admitted only for what it computes.
    plan.begin_step(Booked(waiting=2), 0.0)
    assert plan.decide(request("b", 1000, rest=500), no_room) is DECLINE
    assert plan.decide(request("a", 1000), no_room) is ADMIT
    assert plan.decide(request("c", 1000), no_room) is DECLINE


def test_reads_under_way_delay_a_read_but_no_load_from_memory() -> None:
    reading = Booked(read_bytes=10_000 * TOKEN_BYTES, waiting=1)  # 1 s
    assert decide(planner(), request("a", 1000), booked=reading) == [DECLINE]
    assert decide(planner(), request("a", 1000, on_disk=0), booked=reading) == [ADMIT]
    reading = Booked(read_bytes=5_000 * TOKEN_BYTES, waiting=1)
    plan = planner()
    plan.begin_step(reading, 0.0)
    # The k-th would be read after 0.6 + 0.1 k s and recomputed after 1.02 + 0.01 k s.
    assert [plan.decide(request(name, 1000), no_room) for name in "abcdef"] == [*[ADMIT] * 5, DECLINE]


def test_writes_take_their_share_of_the_disk() -> None:
    # A read of 0.9 s, and 0.99 s to recompute: writes in plenty stretch it to 1 / (1 - WRITE_SHARE) times.
    curves = CURVES._replace(g_ssd=Curve(0.01, {1000: 0.92}))
    assert decide(planner(curves), request("a", 1000)) == [ADMIT]
    assert 0.9 / (1 - WRITE_SHARE) > 1.0
    assert decide(planner(curves), request("a", 1000), booked=Booked(write_bytes=10**9, waiting=1)) == [DECLINE]
    assert decide(planner(curves), request("a", 1000), booked=Booked(write_bytes=100, waiting=1)) == [ADMIT]


# ---- deferring


def test_a_long_read_lets_the_short_ones_pass() -> None:
    plan = planner()
    assert decide(plan, request("long", 8000), request("short", 200), request("in dram", 300, on_disk=0)) == [
        *(DEFER, ADMIT),
        ADMIT,
    ]


def test_equal_reads_keep_their_order() -> None:
    assert decide(planner(), *(request(name, 1000) for name in "abcd")) == [DEFER] * 4


def test_what_saves_one_less_than_it_costs_the_others_does_not_pass() -> None:
    plan = planner()
    # Behind four of 0.1 s, one of 0.09 s would gain 0.4 s and cost four times 0.09 s; one of 0.11 s gains no more than 0.44 s costs.
    queue = [request(name, 1000) for name in "abcd"]
    assert decide(plan, *queue, request("e", 900))[-1] is ADMIT
    assert decide(planner(), *queue, request("e", 1100))[-1] is DEFER
    # With a busy GPU nobody gains by passing.
    busy = Booked(prefills=[(0, 5000)], waiting=5)
    assert decide(planner(), *queue, request("e", 900), booked=busy) == [DEFER] * 5


def test_staged_parts_end_the_waiting_when_the_store_has_them() -> None:
    plan = planner()
    assert decide(plan, request("a", 1000), request("b", 10, on_disk=0)) == [DEFER, ADMIT]
    assert decide(plan, request("a", 1000, on_disk=0.5), now_s=0.15) == [DEFER], "by the clock it would be there"
    assert decide(plan, request("a", 1000, on_disk=0), now_s=0.16) == [ADMIT]


def test_staging_is_asked_for_once_and_no_room_admits() -> None:
    plan, asked = planner(), []

    def stage() -> bool:
        asked.append(1)
        return True

    for now_s in (0.0, 0.01, 0.02):
        plan.begin_step(Booked(waiting=2), now_s)
        assert plan.decide(request("a", 1000), stage) is DEFER
    assert len(asked) == 1
    plan.begin_step(Booked(waiting=2), 0.0)
    assert plan.decide(request("b", 1000), no_room) is ADMIT


@pytest.mark.parametrize(
    ("tokens", "settings", "deadline_s"),
    [
        (5000, {}, 1.0),  # twice the half second of its staging
        (100, {}, 0.05),  # never less
        (100_000, {}, 2.0),  # never more
        (5000, {"defer_tolerance": 3.0}, 1.5),
        (5000, {"defer_deadline_max_s": 0.3}, 0.3),
        (100, {"defer_deadline_max_s": 0.01}, 0.01),
        (5000, {"defer_tolerance": 0.0}, 0.05),
    ],
)
def test_the_deadline_is_armed_once(tokens: int, settings: dict[str, float], deadline_s: float) -> None:
    plan = planner(**settings)
    candidate = request("a", tokens)
    others = Booked(waiting=2)
    assert decide(plan, candidate, booked=others) == [DEFER]
    assert decide(plan, candidate, booked=others, now_s=deadline_s * 0.99) == [DEFER]
    assert decide(plan, candidate, booked=others, now_s=deadline_s) == [ADMIT]
    # An engine without room for it asks again: it is not deferred a second time.
    assert decide(plan, candidate, booked=others, now_s=deadline_s + 1) == [ADMIT]


def test_no_time_to_wait_defers_nothing() -> None:
    plan = planner(defer_deadline_max_s=0.0)
    assert decide(plan, *(request(name, 1000) for name in "abc")) == [ADMIT] * 3


def test_the_prediction_counts_what_is_ahead() -> None:
    plan = planner()
    booked = Booked(read_bytes=1000 * TOKEN_BYTES, write_bytes=2000 * TOKEN_BYTES, waiting=9)
    assert decide(plan, request("a", 1000), request("b", 1000), booked=booked) == [DEFER, DEFER]
    # b: 0.1 s of reads, 0.2 s of writes, 0.1 s of a, 0.1 s its own; twice that.
    for now_s, expected in ((0.99, DEFER), (1.0, ADMIT)):
        assert decide(plan, request("b", 1000), booked=booked, now_s=now_s) == [expected]


def test_an_ended_request_leaves_nothing() -> None:
    plan = planner()
    decide(plan, *(request(str(n), 1000) for n in range(100)))
    assert plan.armed_count == 100
    for n in range(100):
        plan.forget(str(n))
        plan.forget(str(n))
    assert plan.armed_count == 0


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20_000), st.floats(0, 1), st.integers(1, 500), st.integers(0, 2000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(
    REQUESTS,
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 10**7), st.integers(0, 10**7), st.booleans()), max_size=12),
    st.floats(0, 4),
    st.floats(0, 3),
)
def test_no_request_is_deferred_beyond_its_deadline(
    requests: list[tuple[int, float, int, int]],
    steps: list[tuple[float, int, int, bool]],
    tolerance: float,
    deadline_max_s: float,
) -> None:
    plan = planner(defer_tolerance=tolerance, defer_deadline_max_s=deadline_max_s)
    first_s: dict[str, float] = {}
    now_s = 0.0
    for pause_s, read_bytes, write_bytes, has_room in steps:
        now_s += pause_s
        plan.begin_step(Booked([(0, 1000)], read_bytes, write_bytes, len(requests)), now_s)
        for place, (restorable, on_disk, rest, computed) in enumerate(requests):
            candidate = request(str(place), restorable, on_disk=on_disk, rest=rest, computed=computed)
            if plan.decide(candidate, room if has_room else no_room) is DEFER:
                assert now_s - first_s.setdefault(str(place), now_s) < deadline_max_s
    assert plan.armed_count == len(first_s)


# ---- a simulated queue


@dataclass
class Job:
    name: str
    arrival_s: float
    restorable: int
    rest: int
    disk_left_s: float
    in_dram: bool = False
    deferred_s: float | None = None
    loading: bool = False
    gpu_left_s: float | None = None
    done_s: float | None = None


def simulate(jobs: list[Job], *, planned: bool, disk_stuck: bool = False) -> LoadPlanner:
    """One GPU and one disk, in ticks of a millisecond: demand reads first, then staging, each in order; prefills in order."""
    plan = planner()
    demand: deque[Job] = deque()
    staging: deque[Job] = deque()
    gpu: deque[Job] = deque()
    waiting: list[Job] = []
    tick_s, tick = 0.001, 0
    while any(job.done_s is None for job in jobs):
        now_s = tick * tick_s
        assert now_s < 100, "somebody waits for ever"
        waiting += [job for job in jobs if tick == round(job.arrival_s / tick_s)]
        read_bytes = sum(int(job.disk_left_s * 10_000) * TOKEN_BYTES for job in demand)
        prefills = [(0, int((job.gpu_left_s or 0) * 1000)) for job in gpu]
        plan.begin_step(Booked(prefills, read_bytes, 0, len(waiting)), now_s)
        for job in list(waiting):
            size = job.restorable * TOKEN_BYTES
            candidate = Candidate(
                job.name, job.restorable + job.rest, 0, job.restorable, size, 0 if job.in_dram else size
            )
            stage = lambda job=job: staging.append(job) is None  # noqa: E731
            decision = plan.decide(candidate, stage) if planned else ADMIT
            if decision is DEFER:
                job.deferred_s = now_s if job.deferred_s is None else job.deferred_s
                continue
            waiting.remove(job)
            if decision is DECLINE:
                job.gpu_left_s = (job.restorable + job.rest) / 1000
                gpu.append(job)
            elif job.in_dram:
                job.gpu_left_s = job.restorable / 100_000 + job.rest / 1000
                gpu.append(job)
            else:
                job.loading = True
                if job in staging:
                    staging.remove(job)
                demand.append(job)
        for queue in () if disk_stuck and tick < 5000 else (demand, staging):
            if queue:
                queue[0].disk_left_s -= tick_s
                if queue[0].disk_left_s <= 0:
                    job = queue.popleft()
                    job.in_dram = True
                    if job.loading:
                        job.gpu_left_s = job.restorable / 100_000 + job.rest / 1000
                        gpu.append(job)
                break
        if gpu:
            assert gpu[0].gpu_left_s is not None
            gpu[0].gpu_left_s -= tick_s
            if gpu[0].gpu_left_s <= 0:
                job = gpu.popleft()
                job.done_s = (tick + 1) * tick_s
                plan.forget(job.name)
        tick += 1
    return plan


def queue_of(shape: list[tuple[float, int, int]]) -> list[Job]:
    return [Job(str(n), at_s, tokens, rest, tokens / 10_000) for n, (at_s, tokens, rest) in enumerate(shape)]


def ttft_s(jobs: list[Job]) -> list[float]:
    return [job.done_s - job.arrival_s for job in jobs if job.done_s is not None]


def test_short_requests_pass_and_the_long_one_hardly_pays() -> None:
    shape = [(0.0, 10_000, 100), *[(0.0, 500, 100)] * 8]
    plain, planned = queue_of(shape), queue_of(shape)
    simulate(plain, planned=False)
    simulate(planned, planned=True)
    before_s, after_s = ttft_s(plain), ttft_s(planned)
    assert max(after_s[1:]) < 1.3, "the short ones wait for one another alone"
    assert sum(after_s[1:]) < 0.6 * sum(before_s[1:])
    assert after_s[0] < 1.9 * before_s[0]
    assert sum(after_s) < sum(before_s)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(10, 8000), st.integers(10, 200)), min_size=1, max_size=10),
    st.booleans(),
)
def test_in_a_queue_nobody_starves(shape: list[tuple[float, int, int]], disk_stuck: bool) -> None:
    jobs = queue_of(shape)
    plan = simulate(jobs, planned=True, disk_stuck=disk_stuck)
    assert plan.armed_count == 0


def test_short_requests_without_end_do_not_hold_a_long_one() -> None:
    shape = [(0.0, 8_000, 10), *[(0.05 * n, 480, 10) for n in range(60)]]
    jobs = queue_of(shape)
    simulate(jobs, planned=True)
    long, deferred_max_s = jobs[0], 2.0
    assert long.deferred_s is not None and long.done_s is not None
    # At its deadline it is a demand read like the others, behind those few that were there before it.
    assert long.done_s < long.deferred_s + deferred_max_s + 2.0
