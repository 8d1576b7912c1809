"""Known answers of single policies, and bounds on what they remember."""

import pytest

from kvtier.policy.base import Key, RecordInfo
from kvtier.policy.registry import make_policy
from kvtier.policy.s3fifo import S3FIFOPolicy
from kvtier.testing.policy import PolicyTier


def order_of(name: str, leased: frozenset[Key] = frozenset()) -> bytes:
    """Victims of a, b, c, d, inserted in that order, then used: a twice, c once."""
    policy = make_policy(name, 10)
    for key in (b"a", b"b", b"c", b"d"):
        policy.insert(key, RecordInfo(1), 0.0)
    for key in (b"a", b"c", b"a"):
        policy.access(key, 1.0)
    return b"".join(policy.candidates(2.0, leased.__contains__))


@pytest.mark.parametrize(
    ("name", "victims"),
    [("fifo", b"abcd"), ("lru", b"bdca"), ("lfu", b"bdca"), ("sieve", b"bdac"), ("s3fifo", b"abcd"), ("arc", b"bdca")],
)
def test_order(name: str, victims: bytes) -> None:
    assert order_of(name) == victims


def test_leased_are_passed_over() -> None:
    assert order_of("lru", frozenset({b"b", b"c"})) == b"da"


def test_lru_does_not_meet_the_same_leases_at_every_search() -> None:
    policy = make_policy("lru", 4000)
    leased, asked = {b"held%d" % number for number in range(1000)}, 0

    def is_leased(key: Key) -> bool:
        nonlocal asked
        asked += 1
        return key in leased

    for key in [*sorted(leased), *(b"old%d" % number for number in range(1000))]:
        policy.insert(key, RecordInfo(1), 0.0)
    for number in range(3000):
        victim = next(policy.candidates(1.0, is_leased))
        assert victim == (b"old%d" % number if number < 1000 else b"new%d" % (number - 1000))
        policy.remove(victim, 1.0, evicted=True)
        policy.insert(b"new%d" % number, RecordInfo(1), 1.0)
    assert asked < 2 * (3000 + 3 * len(leased)), "each is met once in a round of all records"
    leased.clear()
    assert len(set(policy.candidates(2.0, is_leased))) == 2000, "none is forgotten"


def test_sieve_keeps_its_place_when_nothing_was_evicted() -> None:
    policy = make_policy("sieve", 10)
    for key in (b"a", b"b", b"c"):
        policy.insert(key, RecordInfo(1), 0.0)
    for _ in range(3):
        assert next(policy.candidates(0.0, lambda key: False)) == b"a"


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"small_to_main_promo_threshold": 0}, "small_to_main_promo_threshold is 0"),
        ({"small_to_main_promo_threshold": 4}, "small_to_main_promo_threshold is 4"),
        ({"small_fifo_capacity_ratio": 0.0}, "small_fifo_capacity_ratio is 0.0"),
        ({"small_fifo_capacity_ratio": 1.0}, "small_fifo_capacity_ratio is 1.0"),
    ],
)
def test_s3fifo_refuses_bad_settings(settings: dict[str, float], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        S3FIFOPolicy(10, **settings)  # type: ignore[arg-type]


def test_s3fifo_promotes_at_its_threshold() -> None:
    policy = S3FIFOPolicy(3, small_to_main_promo_threshold=2)
    tier = PolicyTier(policy)
    for key in (b"a", b"b", b"c"):
        tier.admit(key, RecordInfo(1))
    policy.access(b"a", 0.0)
    policy.access(b"b", 0.0)
    policy.access(b"b", 0.0)
    tier.admit(b"d", RecordInfo(1))  # a was used once: not enough
    assert b"a" not in policy and b"b" in policy
    tier.admit(b"a", RecordInfo(1))  # a ghost: straight to the main queue
    assert next(policy.candidates(0.0, lambda key: False)) == b"d"


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_ghosts_are_bounded(name: str) -> None:
    """Twenty thousand keys through room for fifteen once left 19,985 ghosts elsewhere."""
    policy = make_policy(name, 15)
    tier = PolicyTier(policy)
    for number in range(20_000):
        tier.admit(b"%d" % number, RecordInfo(1))
        tier.policy.access(b"%d" % number, 0.0) if number % 3 else None
    ghosts = len(policy.ghosts) if isinstance(policy, S3FIFOPolicy) else len(policy.b1) + len(policy.b2)  # type: ignore[attr-defined]
    assert ghosts <= 15
