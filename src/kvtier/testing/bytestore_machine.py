"""A Hypothesis state machine for byte stores: puts, gets, leases, evictions, deletes and close in any order, against a model.

    TestMine = bytestore_machine(MyByteStore).TestCase

The model is the contract of `kvtier.memory.base` with least-recently-used eviction, written as plainly as possible.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.memory.base import (
    ByteStore,
    ByteStoreError,
    KeyConflictError,
    Lease,
    LeaseOwner,
    NoRoomError,
    PutResult,
    RecordLeasedError,
    StillLeasedError,
    StoreClosedError,
)

KEYS = [b"key-%d" % number for number in range(4)]
SCOPES = ["load-1", "load-2"]
# Few, and large beside the capacity, so that repeats, conflicts and evictions happen often.
VALUES = st.builds(lambda length, fill: bytes([fill]) * length, st.integers(0, 16), st.sampled_from([0, 255]))
STEPS_BEFORE_CLOSE = 20


class _Machine(RuleBasedStateMachine):
    make_store: Callable[[int], ByteStore]

    def __init__(self) -> None:
        super().__init__()
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.owners: list[LeaseOwner] = []
        self.leases: list[tuple[int, str, bytes, Lease]] = []
        self.views: list[tuple[memoryview, bytes]] = []
        self.closed_owners: set[int] = set()
        self.met: list[bytes] = []
        self.closing = False
        self.steps = 0

    @initialize(capacity_bytes=st.integers(1, 40) | st.just(24))
    def begin(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.store = type(self).make_store(capacity_bytes)
        self.owners.append(self.store.owner("owner-0"))

    def used(self) -> int:
        return sum(map(len, self.values.values()))

    def leased(self) -> set[bytes]:
        return {key for _, _, key, _ in self.leases}

    def search(self, value_bytes: int) -> list[bytes]:
        """What has to go for a value, least recently used first. What is leased is in use: met by one search, it counts as used at the next."""
        victims: list[bytes] = []
        short_bytes = self.used() + value_bytes - self.capacity_bytes
        if short_bytes > 0:
            for key in [key for key in self.met if key in self.values]:
                self.values.move_to_end(key)
            self.met.clear()
        for key in list(self.values):
            if short_bytes <= 0:
                break
            if key in self.leased():
                self.met.append(key)
            else:
                victims.append(key)
                short_bytes -= len(self.values[key])
        return victims

    def let_go(self, gone: Callable[[int, str], bool]) -> int:
        before = len(self.leases)
        self.leases = [held for held in self.leases if not gone(held[0], held[1])]
        if self.closing and not self.leases:
            self.values.clear()
        return before - len(self.leases)

    @rule(key=st.sampled_from(KEYS), value=VALUES, kind=st.sampled_from([bytes, bytearray, memoryview]))
    def put(self, key: bytes, value: bytes, kind: Callable[[bytes], Any]) -> None:
        if self.closing:
            with pytest.raises(StoreClosedError):
                self.store.put(key, kind(value))
            return
        if key in self.values:
            if self.values[key] == value:
                assert self.store.put(key, kind(value)) is PutResult.UNCHANGED
            else:
                with pytest.raises(KeyConflictError):
                    self.store.put(key, kind(value))
            return
        leased_bytes = sum(len(self.values[held]) for held in self.leased())
        if leased_bytes + len(value) > self.capacity_bytes:
            with pytest.raises(NoRoomError):
                self.store.put(key, kind(value))
            return
        victims = self.search(len(value))
        assert self.store.put(key, kind(value)) is PutResult.STORED
        for victim in victims:
            del self.values[victim]
        self.values[key] = value

    @precondition(lambda self: not self.closing and len(self.values) < len(KEYS))
    @rule(value=VALUES, choice=st.randoms(use_true_random=False))
    def put_what_is_missing(self, value: bytes, choice: Any) -> None:
        """A put that needs room more often than `put` does."""
        self.put(choice.choice([key for key in KEYS if key not in self.values]), value, bytes)

    @precondition(lambda self: not self.closing and self.values)
    @rule(scope=st.sampled_from(SCOPES), owner=st.randoms(use_true_random=False))
    def lease_the_next_victim(self, scope: str, owner: Any) -> None:
        """And then use all others, so that the lease alone keeps it."""
        first = next(iter(self.values))
        self.lease(first, scope, owner)
        for key in [key for key in self.values if key != first]:
            self.get(key)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        if self.closing:
            with pytest.raises(StoreClosedError):
                self.store.get(key)
            return
        view = self.store.get(key)
        if key in self.values:
            assert view is not None
            assert bytes(view) == self.values[key]
            self.views.append((view, self.values[key]))
            self.values.move_to_end(key)
        else:
            assert view is None

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        if self.closing:
            with pytest.raises(StoreClosedError):
                self.store.delete(key)
        elif key in self.leased():
            with pytest.raises(RecordLeasedError) as caught:
                self.store.delete(key)
            assert len(caught.value.holders) == sum(held[2] == key for held in self.leases)
        else:
            assert self.store.delete(key) is (self.values.pop(key, None) is not None)

    @rule()
    def new_owner(self) -> None:
        if self.closing:
            with pytest.raises(StoreClosedError):
                self.store.owner("late")
        else:
            self.owners.append(self.store.owner(f"owner-{len(self.owners)}"))

    @precondition(lambda self: self.owners)
    @rule(key=st.sampled_from(KEYS), scope=st.sampled_from(SCOPES), choice=st.randoms(use_true_random=False))
    def lease(self, key: bytes, scope: str, choice: Any) -> None:
        number = choice.randrange(len(self.owners))
        if self.closing:
            with pytest.raises(StoreClosedError):
                self.owners[number].lease(key, scope)
            return
        try:
            lease = self.owners[number].lease(key, scope)
        except ByteStoreError:
            assert number in self.closed_owners
            return
        assert number not in self.closed_owners
        assert (lease is None) is (key not in self.values)
        if lease is not None:
            assert lease.view == self.values[key]
            self.leases.append((number, scope, key, lease))
            self.values.move_to_end(key)

    @precondition(lambda self: self.leases)
    @rule(choice=st.randoms(use_true_random=False), times=st.integers(1, 2))
    def release(self, choice: Any, times: int) -> None:
        held = choice.choice(self.leases)
        for _ in range(times):
            held[3].release()
        self.leases.remove(held)
        self.let_go(lambda _number, _scope: False)

    @precondition(lambda self: self.owners)
    @rule(choice=st.randoms(use_true_random=False), scope=st.sampled_from(SCOPES))
    def release_scope(self, choice: Any, scope: str) -> None:
        number = choice.randrange(len(self.owners))
        assert self.owners[number].release(scope) == self.let_go(lambda owner, of: owner == number and of == scope)

    @precondition(lambda self: self.owners)
    @rule(choice=st.randoms(use_true_random=False))
    def close_owner(self, choice: Any) -> None:
        number = choice.randrange(len(self.owners))
        assert self.owners[number].close() == self.let_go(lambda owner, _scope: owner == number)
        self.closed_owners.add(number)

    @precondition(lambda self: self.steps > STEPS_BEFORE_CLOSE)
    @rule()
    def close(self) -> None:
        self.closing = True
        if self.leases:
            with pytest.raises(StillLeasedError) as caught:
                self.store.close(0)
            assert [(info.owner, info.scope, info.key) for info in caught.value.holders] == [
                (f"owner-{number}", scope, key) for number, scope, key, _ in self.leases
            ]
        else:
            self.store.close(0)
            self.values.clear()

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        self.steps += 1
        assert self.store.used_bytes == self.used() <= self.capacity_bytes
        assert len(self.store) == len(self.values)
        if not self.closing:
            assert {key for key in KEYS if self.store.exists(key)} == set(self.values)
        assert [(info.owner, info.scope, info.key) for info in self.store.leases()] == [
            (f"owner-{number}", scope, key) for number, scope, key, _ in self.leases
        ]

    @invariant()
    def views_and_leases_stay_good(self) -> None:
        assert all(view == value for view, value in self.views)
        assert all(lease.view == self.values[key] for _, _, key, lease in self.leases)

    def teardown(self) -> None:
        for owner in self.owners:
            owner.close()
        if hasattr(self, "store"):
            self.store.close(0)
            assert self.store.used_bytes == 0


def bytestore_machine(make_store: Callable[[int], ByteStore]) -> type[RuleBasedStateMachine]:
    """The machine for stores that `make_store` makes from a capacity in bytes; its `TestCase` is what pytest collects."""
    return type("ByteStoreMachine", (_Machine,), {"make_store": staticmethod(make_store)})
