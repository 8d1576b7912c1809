"""The hazard model: the index against brute force, and that it learns and forgets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policy.returns import BATCH, BUCKETS, EDGES_S, ReturnModel, gittins

WIDTHS = [after - before for before, after in zip(EDGES_S, (*EDGES_S[1:], 2 * EDGES_S[-1]), strict=True)]


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=BUCKETS, max_size=BUCKETS))
def test_index_is_the_best_over_all_stopping_times(hazards: list[float]) -> None:
    index = gittins(np.tile(hazards, (BUCKETS, 1)), range(BUCKETS))
    for start in range(BUCKETS):
        alive, gain, held_s, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(start, BUCKETS):
            gain += alive * hazards[bucket]
            held_s += alive * WIDTHS[bucket] * (1 - hazards[bucket] / 2)
            alive *= 1 - hazards[bucket]
            best = max(best, gain / held_s)
        assert index[start] == pytest.approx(best, rel=1e-5, abs=1e-12)


def test_edges_rise() -> None:
    assert list(EDGES_S) == sorted(set(EDGES_S))
    assert EDGES_S[0] == 0 and EDGES_S[-1] >= 40_000


def indexes(model: ReturnModel, feature: int) -> list[float]:
    """The index in each bucket of what has `feature`."""
    return gittins(np.tile(model.hazards([(feature,)]), (BUCKETS, 1)), range(BUCKETS))


def test_untaught_it_ranks_by_recency() -> None:
    index = indexes(ReturnModel((2,)), 0)
    assert index == sorted(index, reverse=True)


def teach(model: ReturnModel, returns_in: int | None, feature: int, times: int) -> None:
    """Prefixes with `feature` that come back in one bucket, or never."""
    for _ in range(times):
        for bucket in range(BUCKETS - 1):
            model.learn((feature,), bucket, bucket == returns_in, 1.0)
            if bucket == returns_in:
                break


def test_it_learns_who_returns_and_when() -> None:
    model = ReturnModel((2,))
    for _ in range(150):
        teach(model, 12, 0, 1)
        teach(model, None, 1, 1)
    returning, silent = model.hazards([(0,), (1,)])
    assert returning[12] > 0.5 > 0.05 > returning[5]
    assert silent[12] < 0.2
    index = indexes(model, 0)
    assert index[12] > index[0] > indexes(model, 1)[0], "the index rises towards the usual time of return"


def test_it_follows_a_change() -> None:
    model = ReturnModel((2,))
    for _ in range(150):
        teach(model, 12, 0, 1)
        teach(model, None, 1, 1)
    for _ in range(300):
        teach(model, None, 0, 1)
        teach(model, 12, 1, 1)
    assert indexes(model, 1)[0] > indexes(model, 0)[0]


def test_it_changes_only_when_it_says_so() -> None:
    model = ReturnModel((2,))
    for _ in range(5 * BATCH):
        before, changes = model.hazards([(0,)]), model.learns_next
        model.learn((0,), 3, True, 1.0)
        assert (model.hazards([(0,)]) != before).any() == changes
