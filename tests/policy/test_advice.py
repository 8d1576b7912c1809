"""The curve of hit rate by capacity: exact where all keys are followed, near where they are sampled, bounded always."""

from pathlib import Path

import pytest

from kvtier.policy.advice import ReuseCurve
from kvtier.policy.registry import make_policy
from kvtier.simulate.replay import KEY_BYTES, replay, replay_infinite
from kvtier.simulate.trace import Trace

DATA = Path(__file__).parents[1] / "data"


def curve_of(trace: Trace, samples_max: int) -> ReuseCurve:
    curve = ReuseCurve(samples_max)
    for request in trace:
        curve.request([block_id.to_bytes(KEY_BYTES, "little") for block_id in request.block_ids], 1000)
    return curve


@pytest.mark.parametrize(("samples_max", "off_by"), [(1 << 20, 0.012), (4096, 0.04)])
def test_it_agrees_with_replay(samples_max: int, off_by: float) -> None:
    trace = Trace(DATA / "synthetic_trace.jsonl.xz")
    curve = curve_of(trace, samples_max)
    for blocks in (1000, 3000, 10_000, 30_000):
        rate = replay(trace, make_policy("lru", blocks)).hit_rate
        assert curve.hit_rate(blocks * 1000) == pytest.approx(rate, abs=off_by), blocks
    assert curve.hit_rate(1e15) == pytest.approx(replay_infinite(trace).hit_rate, abs=off_by)


def test_a_loop_hits_from_its_length_on() -> None:
    curve = ReuseCurve()
    for at in range(5000):
        curve.request([b"%d" % (at % 100)], 10)
    advice = curve.advice(1000, (0.5, 0.9, 1.05, 4.0))
    assert advice[0.5] == advice[0.9] == 0
    assert advice[1.05] == advice[4.0] == pytest.approx(0.98)


def test_memory_is_bounded() -> None:
    curve = ReuseCurve(500)
    for at in range(50_000):
        curve.request([b"%d" % at], 10)
    assert len(curve._seen) <= 500
    assert curve.hit_rate(1e12) == 0


def test_it_forgets() -> None:
    curve = ReuseCurve(500, forget_after=1000)
    for at in range(1000):
        curve.request([b"%d" % (at % 10)], 1)
    before = curve.hit_rate(1e9)
    for at in range(20_000):
        curve.request([b"new %d" % at], 1)
    assert curve.hit_rate(1e9) < before / 50


def test_nothing_used() -> None:
    assert ReuseCurve().advice(100) == {0.5: 0.0, 1.0: 0.0, 2.0: 0.0, 4.0: 0.0}
    with pytest.raises(ValueError, match="samples_max is 0"):
        ReuseCurve(0)
