"""How long steps took, told from when they are scheduled and when their outputs come back."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: make test has it")
from kvtier.engine.vllm.steps import DECODES_BETWEEN, STEPS_MAX, StepTimer
from kvtier.plan.curves import RecomputeCurve

pytestmark = pytest.mark.engine


class Curve(RecomputeCurve):
    """Keeps what it is fed with."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[int, float, float]] = []

    def add(self, tokens: int, pairs: float, seconds: float) -> None:
        self.samples.append((tokens, pairs, round(seconds, 9)))


class Engine:
    """A timer with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.curve = Curve()
        self.timer = StepTimer(self.curve, lambda: self.now_s)

    def schedule(self, now_s: float, **requests: Any) -> None:
        """A step of requests, each (tokens computed before, tokens now), new ones with a name that begins with n."""
        self.now_s = now_s
        counts = {name: tokens for name, (_, tokens) in requests.items()}
        old = {name: computed for name, (computed, _) in requests.items() if name[0] != "n"}
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(counts.values()),
            num_scheduled_tokens=counts,
            scheduled_encoder_inputs={},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=requests[name][0]) for name in counts if name[0] == "n"
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(old), num_computed_tokens=list(old.values())),
        )
        self.timer.scheduled(output)  # type: ignore[arg-type]

    def answer(self, now_s: float) -> None:
        self.now_s = now_s
        self.timer.answered()


def test_tokens_and_pairs_of_a_step() -> None:
    engine = Engine()
    engine.schedule(1.0, n1=(0, 100), n2=(512, 8), a=(1000, 1))
    engine.answer(1.5)
    assert engine.curve.samples == [(109, 5000 + 8 * 516 + 1000.5, 0.5)]


def test_a_step_behind_another_begins_when_that_ends() -> None:
    engine = Engine()
    engine.schedule(1.0, n1=(0, 100))
    engine.schedule(1.1, a=(100, 50), b=(0, 10))
    engine.answer(2.0)
    engine.schedule(2.0, a=(150, 50))
    engine.answer(2.5)
    engine.answer(2.75)
    assert [seconds for *_, seconds in engine.curve.samples] == [1.0, 0.5, 0.25]


def test_idle_time_does_not_count() -> None:
    engine = Engine()
    engine.schedule(1.0, n1=(0, 100))
    engine.answer(1.5)
    engine.schedule(500.0)
    engine.answer(501.0)
    engine.schedule(900.0, n2=(0, 100))
    engine.answer(900.5)
    assert [seconds for *_, seconds in engine.curve.samples] == [0.5, 0.5]


def test_decoding_is_taken_now_and_then() -> None:
    engine = Engine()
    for at in range(10 * (DECODES_BETWEEN + 1)):
        engine.schedule(float(at), a=(100 + at, 1), b=(200 + at, 1))
        engine.answer(at + 0.25)
    assert len(engine.curve.samples) == 10
    assert {(tokens, seconds) for tokens, _, seconds in engine.curve.samples} == {(2, 0.25)}


def test_steps_that_are_never_answered_take_no_memory() -> None:
    engine = Engine()
    for at in range(1000):
        engine.schedule(float(at), n1=(0, 10))
    assert len(engine.timer._steps) <= STEPS_MAX
    for at in range(100):
        engine.answer(1000.0 + at)
