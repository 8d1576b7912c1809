"""The suite and the state machine of byte stores can fail: stores that break one promise each are found out."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.memory.base import ByteStore, ByteStoreError, Key, KeyConflictError, PutResult
from kvtier.memory.bytestore import MemoryByteStore
from kvtier.record.envelope import Buffer
from kvtier.testing.bytestore_machine import bytestore_machine
from kvtier.testing.bytestore_suite import ByteStoreSuite


class Suite(ByteStoreSuite):
    def make_store(self, capacity_bytes: int) -> ByteStore:
        raise NotImplementedError


class EvictsLeased(MemoryByteStore):
    def _is_leased(self, key: Key) -> bool:
        return False


class EvictsBeforeItRefuses(MemoryByteStore):
    def _find_victims(self, key: Key, *wanted: Any) -> list[Key]:
        try:
            return super()._find_victims(key, *wanted)
        except Exception:
            for candidate in list(self._policy.candidates(0, self._is_leased)):
                self._drop(candidate, 0, evicted=True)
            raise


class EvictsTooMuch(MemoryByteStore):
    def _find_victims(self, key: Key, *wanted: Any) -> list[Key]:
        super()._find_victims(key, *wanted)
        return list(self._policy.candidates(0, self._is_leased))


class ForgetsUses(MemoryByteStore):
    def get(self, key: Key) -> memoryview | None:
        record = self._records.get(key)
        return super().get(key) if self.closed else None if record is None else memoryview(record.value)


class TakesConflicts(MemoryByteStore):
    def put(self, key: Key, value: Buffer) -> PutResult:
        try:
            return super().put(key, value)
        except KeyConflictError:
            return PutResult.UNCHANGED


class CountsFirstDimension(MemoryByteStore):
    @property
    def used_bytes(self) -> int:
        return super().used_bytes // 8 * 8


class ReleasesEverything(MemoryByteStore):
    def _leases_of(self, owner_id: int, what: int | str | None) -> tuple[int, ...]:
        return super()._leases_of(owner_id, None if isinstance(what, str) else what)


class DeletesLeased(MemoryByteStore):
    def delete(self, key: Key) -> bool:
        for book in self._owners.values():
            for held in book.held.values():
                held.record.lease_count = 0
        return super().delete(key)


class ClosesOverLeases(MemoryByteStore):
    def close(self, deadline_s: float) -> None:
        self._lease_count = 0
        super().close(deadline_s)


class ServesAfterClose(MemoryByteStore):
    def exists(self, key: Key) -> bool:
        return key in self._records


BROKEN: dict[type[MemoryByteStore], str] = {
    EvictsLeased: "test_a_leased_value_is_not_evicted",
    EvictsBeforeItRefuses: "test_admission_that_cannot_succeed_changes_nothing",
    EvictsTooMuch: "test_as_many_go_as_must_and_no_more",
    ForgetsUses: "test_the_value_used_longest_ago_goes_first",
    TakesConflicts: "test_values_that_differ_only_at_their_end_conflict",
    CountsFirstDimension: "test_strided_inputs_are_copied_in_their_order",
    ReleasesEverything: "test_a_scope_ends_its_leases_and_no_others",
    DeletesLeased: "test_a_leased_value_is_not_deleted_and_the_error_says_who_holds_it",
    ClosesOverLeases: "test_close_reports_who_holds_what_and_ends_when_they_let_go",
    ServesAfterClose: "test_a_closed_store_refuses_everything",
}


@pytest.mark.parametrize("store", BROKEN, ids=lambda store: store.__name__)
def test_the_suite_finds_it(store: type[MemoryByteStore]) -> None:
    test: Callable[..., None] = getattr(Suite(), BROKEN[store])
    test(make=MemoryByteStore)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(make=store)


@pytest.mark.parametrize(
    "store",
    [EvictsLeased, EvictsBeforeItRefuses, EvictsTooMuch, ForgetsUses, TakesConflicts, DeletesLeased],
    ids=lambda store: store.__name__,
)
def test_the_machine_finds_it(store: type[MemoryByteStore]) -> None:
    quick = settings(
        max_examples=1000,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, pytest.fail.Exception, KeyError, ByteStoreError)):
        run_state_machine_as_test(bytestore_machine(store), settings=quick)
