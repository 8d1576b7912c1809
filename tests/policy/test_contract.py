"""Every registered policy keeps the contract of `EvictionPolicy`."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo
from kvtier.policy.lru import LRUPolicy
from kvtier.policy.registry import make_policy, policy_names
from kvtier.testing.policy import PolicyTier, check_policy, policy_machine


@pytest.mark.parametrize("name", policy_names())
def test_random_use(name: str) -> None:
    check_policy(lambda capacity_bytes: make_policy(name, capacity_bytes))


@pytest.mark.parametrize("name", policy_names())
def test_state_machine(name: str) -> None:
    machine = policy_machine(lambda capacity_bytes: make_policy(name, capacity_bytes))
    case = machine.TestCase()
    case.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    case.runTest()


@pytest.mark.parametrize("name", policy_names())
def test_a_record_larger_than_what_is_unleased_changes_nothing(name: str) -> None:
    tier = PolicyTier(make_policy(name, 10))
    for key in (b"a", b"b", b"c"):
        assert tier.admit(key, RecordInfo(3))
    tier.leased = {b"a", b"b"}
    before = dict(tier.sizes)
    assert not tier.admit(b"d", RecordInfo(8))
    assert tier.sizes == before
    tier.leased.clear()
    assert tier.admit(b"d", RecordInfo(8))


@pytest.mark.parametrize("name", policy_names())
def test_a_search_is_lazy(name: str) -> None:
    tier = PolicyTier(make_policy(name, 1000))
    for number in range(1000):
        assert tier.admit(b"%d" % number, RecordInfo(1))
    asked = 0

    def is_leased(key: Key) -> bool:
        nonlocal asked
        asked += 1
        return False

    next(tier.policy.candidates(0.0, is_leased))
    assert asked <= 3


@pytest.mark.parametrize("capacity_bytes", [0, -1])
@pytest.mark.parametrize("name", policy_names())
def test_capacity_must_be_positive(name: str, capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_bytes is {capacity_bytes}"):
        make_policy(name, capacity_bytes)


def test_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'mru' is not known: use one of arc, .*lru"):
        make_policy("mru", 1)
    assert isinstance(make_policy("LRU", 1), LRUPolicy)


class _Forgetful(LRUPolicy):
    """Drops a key from its own order when it offers it, as one that pops while it searches would."""

    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        for key in list(super().candidates(now_s, is_leased, incoming)):
            super().remove(key, now_s, evicted=False)
            yield key

    def remove(self, key: Key, now_s: float, *, evicted: bool) -> None:
        if key in self:
            super().remove(key, now_s, evicted=evicted)


class _IgnoresLeases(LRUPolicy):
    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        return super().candidates(now_s, lambda key: False, incoming)


class _OffersTwice(LRUPolicy):
    def candidates(self, now_s: float, is_leased: Callable[[Key], bool], incoming: Key | None = None) -> Iterator[Key]:
        for key in super().candidates(now_s, is_leased, incoming):
            yield key
            yield key


@pytest.mark.parametrize("broken", [_Forgetful, _IgnoresLeases, _OffersTwice])
def test_the_checks_find_a_broken_policy(broken: type[EvictionPolicy]) -> None:
    with pytest.raises(AssertionError):
        check_policy(broken)


@pytest.mark.parametrize("name", policy_names())
def test_filling_is_inserting(name: str) -> None:
    """Also into a tier that holds something already."""
    one, many = make_policy(name, 1 << 20), make_policy(name, 1 << 20)
    for policy in (one, many):
        policy.insert(b"first", RecordInfo(64), 0.0)
    keys = [b"%d" % number for number in range(9)]
    infos = [RecordInfo(64, depth_tokens=16 * number) for number in range(9)]
    for key, info in zip(keys, infos, strict=True):
        one.insert(key, info, 1.0)
    many.fill(keys, infos.__getitem__, 1.0)
    assert len(one) == len(many) == 10
    empty = make_policy(name, 1 << 20)
    empty.fill(keys, infos.__getitem__, 1.0)
    empty.insert(b"last", RecordInfo(64), 2.0)
    assert [*empty.candidates(3.0, lambda key: False)].count(b"last") == len(empty) - 9 == 1
    assert list(one.candidates(3.0, lambda key: False)) == list(many.candidates(3.0, lambda key: False))
