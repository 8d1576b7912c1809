"""What every eviction policy must do, as checks to run against one. For authors of policies.

`check_policy` drives a policy at random against a model of a tier and raises AssertionError with what broke.
`policy_machine` is the same contract as a Hypothesis state machine, which also shrinks a failure
(needs `hypothesis`):

    TestMyPolicy = policy_machine(lambda capacity_bytes: MyPolicy(capacity_bytes)).TestCase
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.policy.base import EvictionPolicy, Key, RecordInfo, RequestInfo

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

MakePolicy = Callable[[int], EvictionPolicy]


class PolicyTier:
    """A tier that keeps its side of the contract, and asserts that the policy keeps its own."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.sizes: dict[Key, int] = {}
        self.leased: set[Key] = set()
        self.now_s = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes of what is in."""
        return sum(self.sizes.values())

    def request(self, keys: list[Key], **hints: object) -> None:
        """Tell of a request over `keys`: use its leading run, insert the rest as far as room can be made."""
        hit = 0
        while hit < len(keys) and keys[hit] in self.sizes:
            hit += 1
        self.policy.request(RequestInfo(keys, hit, **hints), self.now_s)  # type: ignore[arg-type]
        for place, key in reversed(list(enumerate(keys))):
            if key in self.sizes:
                self.policy.access(key, self.now_s)
            else:
                self.admit(key, RecordInfo(1, keys[place - 1] if place else None, 16 * (place + 1)))
        self.check()

    def admit(self, key: Key, info: RecordInfo) -> bool:
        """Make room and insert, or change nothing: False."""
        need = self.used_bytes + info.size_bytes - self.policy.capacity_bytes
        batch: list[Key] = []
        if need > 0:
            for victim in self.policy.candidates(self.now_s, self.leased.__contains__, key):
                batch.append(victim)
                need -= self.sizes[victim]
                if need <= 0:
                    break
            assert len(set(batch)) == len(batch), "a key was offered twice in one search"
            assert not self.leased & set(batch), "a leased key was offered"
            assert set(batch) <= set(self.sizes), "a key was offered that is not in the tier"
            if need > 0:
                self.check()
                return False
        for victim in batch:
            self.remove(victim, evicted=True)
        self.policy.insert(key, info, self.now_s)
        self.sizes[key] = info.size_bytes
        return True

    def remove(self, key: Key, *, evicted: bool) -> None:
        """Take a record out."""
        del self.sizes[key]
        self.leased.discard(key)
        self.policy.remove(key, self.now_s, evicted=evicted)

    def check(self) -> None:
        """The policy knows exactly what is in."""
        assert len(self.policy) == len(self.sizes), (
            f"the policy has {len(self.policy)} keys, the tier {len(self.sizes)}"
        )
        for key in self.sizes:
            assert key in self.policy, f"the policy forgot {key!r}"
        assert b"\xff never inserted" not in self.policy

    def check_walk(self) -> None:
        """A full search offers every unleased key once, no leased one, and takes nothing away."""
        walk = list(self.policy.candidates(self.now_s, self.leased.__contains__))
        assert len(walk) == len(set(walk)), "a key was offered twice in one search"
        assert set(walk) == set(self.sizes) - self.leased, "a search must offer exactly the unleased keys"
        self.check()


def check_policy(make: MakePolicy, *, steps: int = 3000, capacity_bytes: int = 40, seed: int = 1) -> None:
    """Drive a policy at random, and check the contract throughout."""
    tier = PolicyTier(make(capacity_bytes))
    state = seed

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % below

    for _ in range(steps):
        tier.now_s += draw(3) * 0.5
        action = draw(10)
        key = f"k{draw(draw(200) + 1)}".encode()
        if action < 4 and key not in tier.sizes:
            tier.admit(key, RecordInfo(1 + draw(4)))
        elif action < 6 and key in tier.sizes:
            tier.policy.access(key, tier.now_s)
        elif action == 6 and key in tier.sizes:
            tier.remove(key, evicted=False)
        elif action == 7 and key in tier.sizes:
            tier.leased ^= {key}
        elif action == 8:
            chain = draw(30)
            tier.request([f"c{chain // 4 if at < 2 else chain}:{at}".encode() for at in range(1 + draw(8))])
        elif action == 9:
            tier.check_walk()
    tier.check_walk()


def policy_machine(make: MakePolicy) -> type["RuleBasedStateMachine"]:
    """The contract as a Hypothesis state machine; its `TestCase` is a unit test."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

    keys = st.integers(0, 25).map(lambda number: f"k{number}".encode())

    class PolicyMachine(RuleBasedStateMachine):
        tier: PolicyTier

        @initialize(capacity_bytes=st.integers(1, 30))
        def start(self, capacity_bytes: int) -> None:
            self.tier = PolicyTier(make(capacity_bytes))

        @rule(key=keys, size_bytes=st.integers(1, 8), parent=st.none() | keys, cost_s=st.sampled_from((0.0, 0.1, 2.0)))
        def insert(self, key: Key, size_bytes: int, parent: Key | None, cost_s: float) -> None:
            if key not in self.tier.sizes:
                self.tier.admit(key, RecordInfo(size_bytes, parent if parent != key else None, 16, cost_s))

        @precondition(lambda self: self.tier.sizes)
        @rule(data=st.data(), evicted=st.booleans())
        def remove(self, data: st.DataObject, evicted: bool) -> None:
            self.tier.remove(data.draw(st.sampled_from(sorted(self.tier.sizes))), evicted=evicted)

        @precondition(lambda self: self.tier.sizes)
        @rule(data=st.data())
        def access(self, data: st.DataObject) -> None:
            self.tier.policy.access(data.draw(st.sampled_from(sorted(self.tier.sizes))), self.tier.now_s)

        @precondition(lambda self: self.tier.sizes)
        @rule(data=st.data())
        def lease_or_release(self, data: st.DataObject) -> None:
            self.tier.leased ^= {data.draw(st.sampled_from(sorted(self.tier.sizes)))}

        @rule(
            root=st.integers(0, 2),
            branch=st.integers(0, 4),
            length=st.integers(1, 6),
            ttl_s=st.none() | st.just(5.0),
            pinned=st.booleans(),
            returns_soon=st.booleans(),
        )
        def request(self, root: int, branch: int, length: int, **hints: object) -> None:
            names = [f"r{root}:{at}" if at < 2 else f"r{root}b{branch}:{at}" for at in range(length)]
            self.tier.request([name.encode() for name in names], **hints)

        @rule(seconds=st.sampled_from((0.001, 1.0, 90.0, 1e6)))
        def wait(self, seconds: float) -> None:
            self.tier.now_s += seconds

        @rule(taken=st.integers(0, 5))
        def search_and_evict_nothing(self, taken: int) -> None:
            search = self.tier.policy.candidates(self.tier.now_s, self.tier.leased.__contains__)
            for _ in zip(range(taken), search, strict=False):
                pass

        @rule()
        def walk(self) -> None:
            self.tier.check_walk()

        @invariant()
        def policy_knows_what_is_in(self) -> None:
            if hasattr(self, "tier"):
                self.tier.check()

    return PolicyMachine
