"""The recompute curve: coefficients of known steps, wrong samples, bounds, forgetting."""

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.plan.curves import (
    FIT_EVERY,
    KINDS_MAX,
    PAIRS_MAX,
    SAMPLES_A_KIND,
    SAMPLES_MIN,
    SECONDS_MAX,
    SECONDS_MIN,
    TOKENS_MAX,
    RecomputeCurve,
    pairs_of,
)

Coefficients = tuple[float, float, float]


def feed(
    curve: RecomputeCurve, truth: Coefficients, steps: int, seed: int, *, noise: float = 0.0, wrong: float = 0.0
) -> None:
    """Steps as an engine has them: prefill in pieces of 2,048 tokens down some prompts, and decoding between."""
    numbers, depth = random.Random(seed), 0
    for _ in range(steps):
        if numbers.random() < 0.3:
            tokens = numbers.randrange(1, 64)
            pairs = tokens * float(numbers.randrange(100, 30_000))
        else:
            tokens = min(2048, numbers.randrange(10, 4000))
            pairs = pairs_of(depth, depth + tokens)
            depth = 0 if depth > 30_000 or numbers.random() < 0.1 else depth + tokens
        seconds = truth[0] + truth[1] * tokens + truth[2] * pairs
        seconds *= math.exp(noise * numbers.gauss(0, 1))
        if numbers.random() < wrong:
            seconds *= numbers.choice([0.1, 20.0, 300.0])
        curve.add(tokens, pairs, seconds)


def test_known_steps_give_their_coefficients() -> None:
    curve, truth = RecomputeCurve(), (0.01, 1e-4, 1e-9)
    assert not curve.known
    assert curve.seconds(0, 10_000) == 0
    feed(curve, truth, 600, 1)
    assert curve.known
    assert (curve.base_s, curve.token_s, curve.pair_s) == pytest.approx(truth, rel=0.01)
    assert curve.seconds(0, 10_000) == pytest.approx(1.0 + 0.05, rel=0.01)
    assert curve.seconds(100_000, 100_016) > 1.5 * curve.seconds(0, 16), "what lies deeper costs more"
    assert curve.seconds(500, 500) == curve.seconds(600, 500) == 0


@settings(max_examples=30, deadline=None)
@given(
    token_s=st.floats(1e-6, 1e-3),
    base_ratio=st.floats(0, 500),
    doubles_at=st.one_of(st.none(), st.floats(2_000, 100_000)),
    noise=st.floats(0, 0.1),
    wrong=st.floats(0, 0.15),
    seed=st.integers(0, 2**32),
)
def test_noisy_steps_with_some_wrong_ones_give_about_the_curve(
    token_s: float, base_ratio: float, doubles_at: float | None, noise: float, wrong: float, seed: int
) -> None:
    pair_s = token_s / doubles_at if doubles_at is not None else 0.0
    curve = RecomputeCurve()
    feed(curve, (base_ratio * token_s, token_s, pair_s), 1200, seed, noise=noise, wrong=wrong)
    for begin, end in ((0, 20_000), (20_000, 30_000)):
        expected = token_s * (end - begin) + pair_s * pairs_of(begin, end)
        assert curve.seconds(begin, end) == pytest.approx(expected, rel=0.02 + 5 * noise + wrong)
    assert min(curve.base_s, curve.token_s, curve.pair_s) >= 0


def within(high: float) -> st.SearchStrategy[float]:
    """Numbers that may be, and some that may not."""
    return st.one_of(st.floats(0, high), st.floats(0, 1), st.floats())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-5, 2 * TOKENS_MAX), within(2 * PAIRS_MAX), within(2 * SECONDS_MAX)), max_size=100)
)
@example([(1, math.nan, 1.0)])
@example([(1, math.inf, 1.0)])
@example([(1, 1.0, math.nan)])
@example([(TOKENS_MAX, PAIRS_MAX, SECONDS_MIN), (1, 0.0, SECONDS_MAX)] * SAMPLES_MIN)
def test_whatever_comes_it_stays_finite_and_not_negative(samples: list[tuple[int, float, float]]) -> None:
    curve = RecomputeCurve()
    for tokens, pairs, seconds in samples:
        curve.add(tokens, pairs, seconds)
    for number in (curve.base_s, curve.token_s, curve.pair_s, curve.seconds(1000, 2000)):
        assert 0 <= number < float("inf")


def test_a_long_compile_at_the_start_is_not_believed() -> None:
    curve, truth = RecomputeCurve(), (0.005, 5e-5, 1e-9)
    curve.add(2048, pairs_of(0, 2048), 45.0)
    curve.add(16, 16_000, 20.0)
    feed(curve, truth, 300, 2)
    assert curve.seconds(0, 8192) == pytest.approx(5e-5 * 8192 + 1e-9 * pairs_of(0, 8192), rel=0.05)


def test_equal_steps_alone_give_a_rate() -> None:
    curve = RecomputeCurve()
    for _ in range(SAMPLES_MIN):
        curve.add(1000, 500_000, 0.1)
    assert curve.known
    assert 0 < curve.seconds(0, 1000) <= 0.1 * 1.001


def test_it_follows_a_change_and_keeps_what_is_not_seen() -> None:
    curve = RecomputeCurve()
    feed(curve, (0.01, 1e-4, 1e-9), 1000, 3)
    for _ in range(20_000):
        curve.add(8, 8 * 5000.0, 0.011)
    assert curve.seconds(0, 20_000) == pytest.approx(1e-4 * 20_000 + 1e-9 * 2e8, rel=0.1), "hours of decoding"
    feed(curve, (0.01, 3e-4, 1e-9), 5000, 4)
    assert curve.seconds(0, 20_000) == pytest.approx(3e-4 * 20_000 + 1e-9 * 2e8, rel=0.1)


def test_its_state_is_bounded() -> None:
    curve, numbers = RecomputeCurve(), random.Random(5)
    for _ in range(3 * FIT_EVERY):
        tokens = 1 << numbers.randrange(24)
        curve.add(tokens, tokens * float(1 << numbers.randrange(40)), 0.01)
    assert len(curve._kinds) <= KINDS_MAX
    assert max(map(len, curve._kinds.values())) <= SAMPLES_A_KIND
