"""The write budget and its meter, on a clock of our own."""

import random
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.part_store import WAIT_S, pattern, write_parts
from kvtier.tier.disk.base import PartFailure
from kvtier.tier.disk.endurance import DAY_S, WriteBudget, daily_bytes
from kvtier.tier.disk.engines import make_io
from kvtier.tier.disk.io import PAGE_BYTES
from kvtier.tier.disk.segment_store import SegmentStore

MIB = 1 << 20


def offer(budget: WriteBudget, hours: float, parts_a_second: float, seed: int = 1) -> dict[bool, list[float]]:
    """Offer parts of 1 MiB with random values evenly over `hours`. Returns the values admitted and refused."""
    generator = random.Random(seed)
    outcome: dict[bool, list[float]] = {True: [], False: []}
    count = int(hours * 3600 * parts_a_second)
    for number in range(count):
        value = 10 ** generator.uniform(-9, -6)
        now_s = number / parts_a_second
        admitted = budget.admit(b"%d" % number, MIB, value, 0, now_s)
        outcome[admitted].append(value)
        if admitted:
            budget.wrote(MIB, now_s)
    return outcome


def test_no_more_is_written_than_the_budget_and_the_first_hours_worth() -> None:
    a_day = 24 * 100 * MIB
    budget = WriteBudget(a_day, now_s=0.0)
    outcome = offer(budget, 24, 0.25)
    spent = len(outcome[True]) * MIB
    assert spent <= a_day * 25 / 24
    assert spent >= 0.85 * a_day
    meter = budget.meter(DAY_S - 1)
    assert meter.admitted_bytes == meter.written_bytes == spent
    assert meter.refused_bytes == len(outcome[False]) * MIB
    assert meter.written_last_day_bytes == pytest.approx(spent, rel=0.05)


def test_it_is_spent_on_the_most_valuable() -> None:
    budget = WriteBudget(24 * 100 * MIB, now_s=0.0)
    outcome = offer(budget, 12, 0.25)
    admitted, refused = sorted(outcome[True]), sorted(outcome[False])
    share = len(admitted) / (len(admitted) + len(refused))
    bar = sorted(admitted + refused)[int((1 - share) * (len(admitted) + len(refused)))]
    assert sum(value >= bar for value in admitted) / len(admitted) > 0.85


def test_everything_goes_while_the_budget_carries_it() -> None:
    budget = WriteBudget(24 * 3600 * MIB, now_s=0.0)
    assert offer(budget, 1, 0.5)[False] == []


def test_no_budget_admits_all_and_meters() -> None:
    budget = WriteBudget(0, now_s=0.0)
    assert offer(budget, 1, 1.0)[False] == []
    assert budget.meter(3600).written_bytes == 3600 * MIB


def test_what_comes_again_is_likelier_and_short_prefixes_are() -> None:
    budget = WriteBudget(1, now_s=0.0)
    assert budget.score(b"a", 1e-7, 0) > budget.score(b"a", 1e-7, 16_384)
    before = budget.score(b"a", 1e-7, 0)
    assert not budget.admit(b"a", MIB, 1e-7, 0, 1.0)
    assert budget.score(b"a", 1e-7, 0) > 2 * before


def test_a_restart_forgives_nothing() -> None:
    budget = WriteBudget(24 * 10 * MIB, now_s=0.0)
    for number in range(10):
        assert budget.admit(b"%d" % number, MIB, 1e-6, 0, 0.0)
        budget.wrote(MIB, 0.0)
    assert not budget.admit(b"x", MIB, 1e-6, 0, 0.0)
    again = WriteBudget(24 * 10 * MIB, now_s=1.0, saved=budget.state())
    assert not again.admit(b"x", MIB, 1e-6, 0, 1.0)
    assert again.meter(1.0).written_bytes == 10 * MIB
    assert again.admit(b"y", MIB, 1e-6, 0, 400.0)
    # A clock that was set back gives nothing, and takes nothing.
    assert not again.admit(b"z", MIB, 1e-6, 0, 10.0)


def test_hours_older_than_a_day_leave_the_meter() -> None:
    budget = WriteBudget(0, now_s=0.0)
    for hour in range(60):
        budget.wrote(MIB, hour * 3600.0)
    assert budget.meter(59 * 3600.0).written_last_day_bytes == 24 * MIB


def test_the_budget_can_be_said_in_two_ways() -> None:
    assert daily_bytes(None, None, None) == 0
    assert daily_bytes(5, None, None) == 5
    assert daily_bytes(None, 0.5, 1000) == 500
    for arguments in ((5, 1.0, 10), (None, 1.0, None), (None, -1.0, 10), (-1, None, None)):
        with pytest.raises(ConfigError):
            daily_bytes(*arguments)


def test_the_store_refuses_what_the_budget_does_not_carry_and_remembers(tmp_path: Path) -> None:
    def open_store(now_s: float) -> SegmentStore:
        return SegmentStore(
            tmp_path,
            namespace=b"e",
            capacity_bytes=64 * PAGE_BYTES,
            io=make_io("threads"),
            bytes_a_day=24 * 4 * PAGE_BYTES,
            wall_clock=lambda: now_s,
        )

    store = open_store(1e9)
    failures = write_parts(store, {b"%032d" % n: pattern(n, PAGE_BYTES) for n in range(6)})
    assert list(failures.values()).count(PartFailure.OVER_BUDGET) == 2
    assert store.endurance().written_bytes == 4 * PAGE_BYTES
    assert store.stats().used_bytes == 4 * PAGE_BYTES
    store.close(WAIT_S)
    store = open_store(1e9 + 60)
    assert write_parts(store, {b"new" + bytes(29): pattern(1, PAGE_BYTES)}) == {
        b"new" + bytes(29): PartFailure.OVER_BUDGET
    }
    assert store.endurance().written_bytes == 4 * PAGE_BYTES
    store.close(WAIT_S)
    store = open_store(1e9 + 3600)
    assert write_parts(store, {b"new" + bytes(29): pattern(1, PAGE_BYTES)}) == {b"new" + bytes(29): None}
    store.close(WAIT_S)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_was_ahead_and_was_set_right_stops_nothing(restarted: bool) -> None:
    budget = WriteBudget(24 * 1000, now_s=0.0)
    budget.wrote(500, 1e9)
    assert budget.admit(b"a", 1000, 1.0, 0, 1e9)
    if restarted:
        budget = WriteBudget(24 * 1000, now_s=10.0, saved=budget.state())
    assert not budget.admit(b"b", 1000, 1.0, 0, 10.0), "a step backwards earns nothing"
    assert budget.admit(b"c", 1000, 1.0, 0, 10.0 + 3600.0)
    budget.wrote(700, 10.0 + 3600.0)
    assert budget.meter(10.0 + 3600.0).written_last_day_bytes == 700


def test_a_clock_that_swings_earns_no_more_than_an_hour_s_worth_a_swing_forwards() -> None:
    budget = WriteBudget(24 * 1000, now_s=0.0)
    admitted = sum(budget.admit(b"%d" % n, 100, 1.0, 0, 0.0 if n % 2 else 36.0) for n in range(100))
    assert admitted * 100 <= 1000 + 50 * 10
