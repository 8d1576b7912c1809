"""ARC's invariants, with records of several sizes, at every step."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.policy.arc import ARCPolicy
from kvtier.policy.base import RecordInfo
from kvtier.testing.policy import PolicyTier


def check(policy: ARCPolicy) -> None:
    capacity = policy.capacity_bytes
    t1_bytes, t2_bytes = sum(policy.t1.values()), sum(policy.t2.values())
    assert (policy.t1_bytes, policy.t2_bytes) == (t1_bytes, t2_bytes)
    assert t1_bytes + policy.b1.size_bytes <= capacity
    assert t1_bytes + t2_bytes + policy.b1.size_bytes + policy.b2.size_bytes <= 2 * capacity
    assert 0 <= policy.target_t1 <= capacity
    alive = set(policy.t1) | set(policy.t2)
    assert len(alive) == len(policy)
    assert not [key for key in alive if key in policy.b1 or key in policy.b2]


@given(
    st.integers(8, 40),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(0, 9)), max_size=300),
)
def test_invariants(capacity: int, uses: list[tuple[int, int, int]]) -> None:
    policy = ARCPolicy(capacity)
    tier = PolicyTier(policy)
    for number, size, chance in uses:
        key = b"%d" % number
        if key not in tier.sizes:
            tier.admit(key, RecordInfo(size))
        elif chance == 0:
            tier.remove(key, evicted=False)
        elif chance == 1:
            tier.leased ^= {key}
        else:
            policy.access(key, 0.0)
        check(policy)


def test_a_ghost_hit_moves_the_target() -> None:
    policy = ARCPolicy(2)
    tier = PolicyTier(policy)
    tier.admit(b"a", RecordInfo(1))
    policy.access(b"a", 0.0)
    tier.admit(b"b", RecordInfo(1))
    tier.admit(b"c", RecordInfo(1))
    assert set(policy.t1) == {b"c"} and b"b" in policy.b1
    tier.admit(b"b", RecordInfo(1))
    assert policy.target_t1 == 1
    assert b"b" in policy.t2
