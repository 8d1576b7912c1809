"""Replay: known answers by hand, and the two published traces against figures computed elsewhere."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policy.registry import make_policy, policy_names
from kvtier.simulate.replay import replay, replay_infinite, replay_min, replay_named
from kvtier.simulate.trace import Trace, TraceRequest

DATA = Path(__file__).parents[1] / "data"

# Hit rates by capacity in blocks, computed independently of this project.
FIGURES = {
    "conversation": {
        "infinite": {0: 0.3664},
        "lru": {100_000: 0.3637, 50_000: 0.3546, 30_000: 0.3257, 10_000: 0.2116, 3_000: 0.0653, 1_000: 0.0445},
        "min": {100_000: 0.3664, 50_000: 0.3664, 30_000: 0.3664, 10_000: 0.3664, 3_000: 0.2945, 1_000: 0.1907},
    },
    "synthetic": {
        "infinite": {0: 0.6396},
        "lru": {100_000: 0.6396, 50_000: 0.6396, 30_000: 0.6242, 10_000: 0.4239, 3_000: 0.1906, 1_000: 0.0841},
        "min": {100_000: 0.6396, 50_000: 0.6396, 30_000: 0.6396, 10_000: 0.6180, 3_000: 0.4467, 1_000: 0.2767},
    },
}


@pytest.mark.parametrize("name", ["synthetic", pytest.param("conversation", marks=pytest.mark.slow)])
def test_published_figures(name: str) -> None:
    requests = list(Trace(DATA / f"{name}_trace.jsonl.xz"))
    for policy, rates in FIGURES[name].items():
        for capacity, rate in rates.items():
            result = replay_named(requests, policy, capacity)
            assert result.hit_rate == pytest.approx(rate, abs=0.0005), (policy, capacity)


def chain(time_s: float, *block_ids: int) -> TraceRequest:
    return TraceRequest(time_s, block_ids, 512 * len(block_ids), 1)


def test_only_the_leading_run_counts() -> None:
    requests = [chain(0, 1, 2, 3), chain(1, 9, 2, 3), chain(2, 1, 2, 8, 3)]
    result = replay(requests, make_policy("lru", 100))
    assert (result.hit_blocks, result.asked_blocks, result.stored_blocks) == (2, 10, 5)
    assert replay_infinite(requests).hit_blocks == 2


def test_tails_go_first() -> None:
    requests = [chain(0, 1, 2, 3, 4), chain(1, 9), chain(2, 1, 2, 3, 4)]
    assert replay(requests, make_policy("lru", 4)).hit_blocks == 3


def test_a_request_larger_than_the_tier() -> None:
    requests = [chain(0, *range(10)), chain(1, *range(10))]
    assert replay(requests, make_policy("lru", 4)).hit_blocks == 4
    assert replay_min(requests, 4).hit_blocks == 4


trees = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)).map(
        lambda path: [path[0] * 100 + (path[1] * 10 + at if at > 1 else at) for at in range(path[2])]
    ),
    min_size=1,
    max_size=40,
)


@given(trees, st.integers(1, 12))
def test_no_policy_beats_min_and_none_beats_infinite(paths: list[list[int]], capacity: int) -> None:
    requests = [chain(float(at), *path) for at, path in enumerate(paths)]
    infinite = replay_infinite(requests).hit_blocks
    best = replay_min(requests, capacity).hit_blocks
    assert best <= infinite
    for name in policy_names():
        result = replay_named(requests, name, capacity)
        assert result.hit_blocks <= best, name
        assert result.asked_blocks == sum(map(len, paths))
