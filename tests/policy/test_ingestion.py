"""Ingestion: each type, the quotas, and that every write gives back what it took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policy.ingestion import Ingestion, IngestionLimits, IngestionType


def ingestion(name: str, **limits: int) -> Ingestion:
    return Ingestion(IngestionLimits(IngestionType.of(name), **limits))


def test_all_writes_what_is_new() -> None:
    down = ingestion("ALL")
    down.stored(b"a", 10, 16)
    down.stored(b"b", 10, 16, below=True)
    assert down.take(9) == [b"a"]


def test_hot_writes_what_was_used() -> None:
    down = ingestion("hot", hot_uses=2)
    down.stored(b"a", 10, 16)
    assert down.take(9) == []
    down.used(b"a")
    assert down.take(9) == []
    down.used(b"a")
    assert down.take(9) == [b"a"]
    down.used(b"a")
    down.ended(b"a", written=True)
    down.used(b"a")
    assert down.take(9) == []


def test_evicted_writes_what_leaves() -> None:
    down = ingestion("EVICTED")
    down.stored(b"a", 10, 16)
    down.stored(b"b", 10, 16, below=True)
    down.used(b"a")
    assert down.take(9) == []
    assert down.evicting(b"a") and not down.evicting(b"b") and not down.evicting(b"unknown")
    assert down.begin(b"a")
    down.left(b"a")
    assert down.inflight_bytes == 10
    down.ended(b"a", written=True)
    assert (down.inflight_bytes, down.inflight_tokens) == (0, 0)


def test_a_use_is_never_a_write() -> None:
    down = ingestion("HOT")
    down.stored(b"a", 10, 16)
    down.used(b"a")
    assert (down.inflight_bytes, down.waiting()) == (0, 1)


@pytest.mark.parametrize("name", ["ALL", "HOT", "EVICTED"])
def test_what_was_read_from_the_tier_is_not_written_back(name: str) -> None:
    down = ingestion(name)
    down.stored(b"a", 10, 16, below=True)
    down.used(b"a")
    assert down.take(9) == []
    assert not down.evicting(b"a")
    assert not down.begin(b"a")
    down.lost(b"a")
    down.used(b"a")
    assert down.take(9) == ([b"a"] if name == "HOT" else [])
    assert down.evicting(b"a") == (name == "EVICTED")


def test_a_refused_write_holds_nothing() -> None:
    down = ingestion("EVICTED", inflight_bytes_max=15, inflight_tokens_max=40)
    for key in (b"a", b"b"):
        down.stored(key, 10, 16)
    down.stored(b"c", 1, 30)
    assert down.begin(b"a")
    for _ in range(10):
        assert not down.begin(b"b")
        assert not down.begin(b"c")
    assert (down.inflight_bytes, down.inflight_tokens) == (10, 16)
    assert (down.counters["refused_bytes"], down.counters["refused_tokens"]) == (10, 10)
    down.ended(b"a", written=False)
    assert down.begin(b"b")


def test_queued_writes_wait_for_room() -> None:
    down = ingestion("ALL", inflight_bytes_max=15)
    for key in (b"a", b"b", b"c"):
        down.stored(key, 10, 16)
    assert down.take(9) == [b"a"]
    assert down.take(9) == []
    down.ended(b"a", written=True)
    assert down.take(9) == [b"b"]


def test_one_larger_than_the_quota_is_refused_and_does_not_block() -> None:
    down = ingestion("ALL", inflight_bytes_max=15)
    down.stored(b"big", 20, 16)
    down.stored(b"a", 10, 16)
    assert down.take(9) == [b"a"]
    assert down.counters["refused_bytes"] == 1


def test_the_queue_is_bounded() -> None:
    down = ingestion("ALL", queue_max=2)
    for number in range(5):
        down.stored(b"%d" % number, 1, 1)
    assert (down.waiting(), down.counters["refused_queue"]) == (2, 3)


def test_unknown_type_and_bad_limits() -> None:
    with pytest.raises(ValueError, match="'COLD' is not known: use one of ALL, HOT, EVICTED"):
        IngestionType.of("COLD")
    with pytest.raises(ValueError, match="hot_uses is 0"):
        IngestionLimits(hot_uses=0)


@given(
    st.sampled_from(["ALL", "HOT", "EVICTED"]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.integers(1, 9)), max_size=120),
)
def test_what_is_held_is_what_is_in_flight(name: str, steps: list[tuple[int, int, int]]) -> None:
    down = ingestion(name, inflight_bytes_max=20, inflight_tokens_max=50, queue_max=4)
    inflight: dict[bytes, tuple[int, int]] = {}
    alive: dict[bytes, tuple[int, int]] = {}
    for number, action, size in steps:
        key = b"%d" % number
        if action == 0 and key not in alive:
            alive[key] = (size, size * 3)
            down.stored(key, size, size * 3, below=size == 9)
        elif action == 1:
            down.used(key)
        elif action == 2:
            began = down.take(2)
            assert not set(began) & set(inflight), "one write of a key at a time"
            inflight |= {taken: alive[taken] for taken in began}
        elif action == 3 and down.begin(key):
            assert key not in inflight
            inflight[key] = alive[key]
        elif action == 4:
            down.ended(key, written=size < 5)
            inflight.pop(key, None)
        elif action == 5:
            down.left(key)
            alive.pop(key, None)
        elif action == 6:
            down.lost(key)
        elif action == 7 and size == 1:
            down.reset()
            inflight.clear()
            alive.clear()
        assert down.inflight_bytes == sum(held[0] for held in inflight.values()) <= 20
        assert down.inflight_tokens == sum(held[1] for held in inflight.values()) <= 50
        assert down.waiting() <= 4
