"""The control plane on traces with simulated media: known answers, accounts that agree, memory that does not grow."""

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.policy.advice import ReuseCurve
from kvtier.simulate.media import Engines, Medium, PrefillSpeed, Spread
from kvtier.simulate.run import Machine, Simulation, simulate
from kvtier.simulate.trace import Trace, TraceRequest
from kvtier.store import tiered

DATA = Path(__file__).parents[1] / "data"
BLOCK = 512 * 131_072


def test_a_medium_is_a_queue() -> None:
    disk = Medium(100.0, latency_s=0.5)
    assert disk.transfer(100, 0.0) == 1.5
    assert disk.transfer(100, 0.0) == 2.5
    assert disk.transfer(100, 10.0) == 11.5
    assert disk.transfer(0, 3.0) == 3.0
    assert disk.busy_s == 3.0
    with pytest.raises(ValueError, match="bytes_per_s is 0"):
        Medium(0)


def test_recompute_grows_with_context() -> None:
    curve = PrefillSpeed(tokens_per_s=1000, context_doubles=1000)
    assert curve.prefill_s(0, 1000) == pytest.approx(1.5)
    assert curve.prefill_s(1000, 2000) == pytest.approx(2.5)
    assert curve.prefill_s(0, 1000) + curve.prefill_s(1000, 2000) == pytest.approx(curve.prefill_s(0, 2000))
    assert curve.prefill_s(2000, 2000) > 0, "the last token is computed always"


def test_engines_serve_in_order() -> None:
    engines = Engines(2, PrefillSpeed(tokens_per_s=100, context_doubles=1e12))
    assert [round(engines.prefill(0, 100, 0.0), 6) for _ in range(3)] == [1.0, 1.0, 2.0]


def test_spread() -> None:
    spread = Spread()
    for milliseconds in range(1, 1001):
        spread.add(milliseconds / 1000)
    assert spread.mean_s == pytest.approx(0.5005)
    assert spread.quantile(0.5) == pytest.approx(0.5, rel=0.03)
    assert spread.quantile(0.99) == pytest.approx(0.99, rel=0.03)
    assert spread.curve()[-1][1] == 1.0


def chats(count: int, every_s: float = 1.0, known: int = 5) -> Iterator[TraceRequest]:
    """`known` conversations of four blocks that take turns."""
    for at in range(count):
        first = at % known * 10
        yield TraceRequest(at * every_s, [first, first + 1, first + 2, first + 3], 2048, 50)


def run(machine: Machine, count: int, **more: float) -> Simulation:
    simulation = Simulation(machine, "lru", 512, engines=1)
    simulation.run(chats(count, **more))  # type: ignore[arg-type]
    simulation.store.check()
    return simulation


def test_what_fits_hits_from_the_second_turn_on() -> None:
    simulation = run(Machine(dram_bytes=40 * BLOCK), 100)
    assert simulation.dram_hits == 95 * 4
    assert simulation.disk_hits == simulation.written_bytes == 0
    assert simulation.ttft.mean_s < simulation.ttft_without.mean_s / 2
    assert not simulation.store.has_pending()


def test_what_dram_cannot_hold_comes_from_disk() -> None:
    simulation = run(Machine(dram_bytes=12 * BLOCK, disk_bytes=40 * BLOCK), 100, every_s=5.0)
    assert simulation.disk_hits > 80 * 4 > simulation.dram_hits
    assert simulation.read_bytes == simulation.disk_hits * BLOCK
    assert simulation.written_bytes == 20 * BLOCK, "each block is written once: what came from disk is not written back"


def test_a_slow_disk_is_felt() -> None:
    fast = run(Machine(12 * BLOCK, 40 * BLOCK), 100, every_s=5.0)
    slow = run(Machine(12 * BLOCK, 40 * BLOCK, disk_read_bytes_per_s=0.2e9), 100, every_s=5.0)
    assert slow.ttft.mean_s > 2 * fast.ttft.mean_s


def test_memory_does_not_grow_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "_REUSE_SAMPLES_MAX", 100)  # as full after 500 requests as it gets

    def held(count: int) -> int:
        tracemalloc.start()
        simulation = Simulation(Machine(40 * BLOCK, 80 * BLOCK), "lru", 512, engines=4)
        simulation.curve = ReuseCurve(100)
        requests = (TraceRequest(at * 1.0, [4 * at + block for block in range(4)], 2048, 50) for at in range(count))
        simulation.run(requests)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    assert held(2500) < held(500) + 200_000, "a hundred bytes a request would show"


def test_a_trace_as_a_whole() -> None:
    trace = Trace(DATA / "synthetic_trace.jsonl.xz", requests_max=800)
    results = {name: simulate(trace, Machine(100 * BLOCK * 10, 100 * BLOCK * 30), name)[0] for name in ("lru", "reuse")}
    for result in results.values():
        assert result.requests == 800
        assert result.hit_rate == (result.dram_hit_blocks + result.disk_hit_blocks) / result.asked_blocks
        assert result.ttft_s["p50"] < result.ttft_without_s["p50"]
        assert result.written_bytes == result.counters["written_parts"] * result.block_bytes
    assert results["reuse"].hit_rate >= results["lru"].hit_rate
