"""The policy `reuse`: order, hints, memory, cost, and its figures on two published traces."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.policy.base import Key, RecordInfo, RequestInfo
from kvtier.policy.registry import make_policy, policy_names
from kvtier.policy.returns import BUCKETS
from kvtier.policy.reuse import STEPS_MAX, ReusePolicy
from kvtier.simulate.replay import replay, replay_min
from kvtier.simulate.trace import Trace

DATA = Path(__file__).parents[1] / "data"


def ask(policy: ReusePolicy, names: str, now_s: float, cost_s: float = 0.0, **hints: object) -> None:
    """A request of one-letter records, all of which are in the tier afterwards."""
    keys = [names[: at + 1].encode() for at in range(len(names))]
    policy.request(RequestInfo(keys, **hints), now_s)  # type: ignore[arg-type]
    for at, key in enumerate(keys):
        if key in policy:
            policy.access(key, now_s)
        else:
            policy.insert(key, RecordInfo(1, keys[at - 1] if at else None, at + 1, cost_s), now_s)


def order(policy: ReusePolicy, now_s: float, *leased: Key) -> list[str]:
    return [key.decode() for key in policy.candidates(now_s, leased.__contains__)]


def test_tails_go_first_whatever_the_order_of_use() -> None:
    policy = ReusePolicy(100)
    ask(policy, "abcd", 0.0)
    ask(policy, "abxy", 50.0)
    ask(policy, "pq", 60.0)
    ask(policy, "ab", 500.0)
    given = order(policy, 500.0)
    assert sorted(given) == sorted(["a", "ab", "abc", "abcd", "abx", "abxy", "p", "pq"])
    for name in given:
        assert not [later for later in given[given.index(name) :] if later != name and later.startswith(name)]


def test_a_record_is_not_evicted_before_what_continues_it_is() -> None:
    policy = ReusePolicy(100)
    ask(policy, "abcd", 0.0)
    given = order(policy, 10.0, b"abc")
    assert given == ["abcd", "a", "ab"] or given == ["abcd", "ab", "a"]


def test_order_holds_after_evictions_and_returns() -> None:
    policy = ReusePolicy(100)
    ask(policy, "abcd", 0.0)
    for name in order(policy, 5.0)[:2]:
        policy.remove(name.encode(), 5.0, evicted=True)
    ask(policy, "abcdef", 100.0)
    assert len(policy) == 6
    assert order(policy, 101.0) == ["abcdef", "abcde", "abcd", "abc", "ab", "a"]


def test_untaught_and_without_chains_it_is_recency() -> None:
    policy = ReusePolicy(100)
    for at, key in enumerate((b"a", b"b", b"c")):
        policy.insert(key, RecordInfo(1), 100.0 * at)
    assert order(policy, 400.0) == ["a", "b", "c"]


def test_pinned_goes_last_until_its_chain_says_otherwise() -> None:
    policy = ReusePolicy(100)
    ask(policy, "ab", 0.0, pinned=True)
    ask(policy, "xy", 5000.0)
    assert order(policy, 5001.0)[2:] == ["ab", "a"]
    ask(policy, "abc", 6000.0)
    ask(policy, "xy", 50_000.0)
    assert order(policy, 50_001.0)[-2:] == ["xy", "x"]


def test_time_to_live_ends() -> None:
    policy = ReusePolicy(100)
    ask(policy, "ab", 0.0, ttl_s=1000.0)
    ask(policy, "xy", 900.0)
    assert order(policy, 901.0)[-2:] == ["ab", "a"]
    assert order(policy, 1001.0)[-2:] == ["xy", "x"]


def test_a_tool_call_out_is_kept_for_a_while() -> None:
    policy = ReusePolicy(100)
    ask(policy, "ab", 0.0, returns_soon=True)
    ask(policy, "xy", 20.0)
    assert order(policy, 21.0)[-2:] == ["ab", "a"]
    assert order(policy, 500.0)[-2:] == ["xy", "x"]


def test_hints_hold_at_most_half() -> None:
    policy = ReusePolicy(8)
    ask(policy, "abcd", 0.0, pinned=True)
    ask(policy, "xy", 1.0, pinned=True)
    assert policy.hints_refused == 1
    assert order(policy, 2.0)[-1] == "a"


def test_cost_counts_by_byte() -> None:
    policy = ReusePolicy(100)
    ask(policy, "x", 0.0, cost_s=0.1)
    ask(policy, "a", 0.0, cost_s=5.0)
    ask(policy, "p", 0.0, cost_s=1.0)
    assert order(policy, 10.0) == ["x", "p", "a"]


def test_worth_ranks_as_eviction_does() -> None:
    policy = ReusePolicy(100)
    for at in range(6):
        ask(policy, chr(97 + at), 40.0 * at)
    worth = [policy.worth(name.encode(), 400.0) for name in order(policy, 400.0)]
    assert None not in worth
    assert worth == sorted(worth)  # type: ignore[type-var]
    assert policy.worth(b"unknown", 400.0) is None


def test_history_is_bounded() -> None:
    policy = ReusePolicy(50, history_keys_max=200)
    for at in range(2000):
        keys = [b"%d:%d" % (at, place) for place in range(5)]
        policy.request(RequestInfo(keys), float(at))
        for place, key in enumerate(keys):
            policy.insert(key, RecordInfo(1, keys[place - 1] if place else None), float(at))
        for key in list(policy.candidates(float(at), lambda key: False))[: max(0, len(policy) - 50)]:
            policy.remove(key, float(at), evicted=True)
    assert len(policy) == 50
    assert len(policy._where) <= 250
    assert len(policy._branches) <= 250
    assert sum(map(len, policy._by_age)) <= 250
    assert len(policy._oldest) <= 250
    assert len(policy._heap) <= 2000


def test_the_same_records_for_ever_take_no_more_memory() -> None:
    policy = ReusePolicy(50)
    for at in range(5000):
        ask(policy, "abc", float(at % 3 + at * 3))
        next(policy.candidates(at * 3.0 + 6, lambda key: False))
    assert sum(map(len, policy._by_age)) <= 10
    assert len(policy._oldest) <= 10
    assert len(policy._heap) <= 2000


def test_a_night_without_requests_is_made_up_for_in_steps() -> None:
    policy = ReusePolicy(5000)
    for at in range(2000):
        ask(policy, chr(0x4E00 + at), 0.0)
    taught = 0
    lessons: list[int] = []
    learn = policy.model.learn

    def counted(*example: object) -> None:
        lessons.append(1)
        learn(*example)  # type: ignore[arg-type]

    policy.model.learn = counted  # type: ignore[assignment, method-assign]
    for call in range(100):
        policy.finished((), 0, 80_000.0 + call)
        assert len(lessons) - taught <= STEPS_MAX
        taught = len(lessons)
    assert taught == 2000 * (BUCKETS - 1), "every age that each lived through taught"


# Hit rates that must be reached, and those of the best other policy, libCacheSim's 18 included.
FIGURES = [
    ("synthetic", 3_000, 0.2235, 0.1985),
    ("synthetic", 1_000, 0.0950, 0.0946),
    ("conversation", 1_000, 0.0815, 0.0554),
    ("conversation", 3_000, 0.1358, 0.0970),
    ("conversation", 10_000, 0.2380, 0.2227),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacity", "reached", "best_other"), FIGURES)
def test_figures(name: str, capacity: int, reached: float, best_other: float) -> None:
    requests = list(Trace(DATA / f"{name}_trace.jsonl.xz"))
    rate = replay(requests, make_policy("reuse", capacity)).hit_rate
    assert rate >= reached > best_other
    assert rate < replay_min(requests, capacity).hit_rate


def test_it_beats_the_others_on_an_hour_of_chat_cut_short() -> None:
    requests = list(Trace(DATA / "conversation_trace.jsonl.xz", requests_max=2500))
    rates = {name: replay(requests, make_policy(name, 1000)).hit_rate for name in policy_names()}
    ours = rates.pop("reuse")
    assert ours > 1.2 * max(rates.values()), rates


@pytest.mark.parametrize("hint", [{"pinned": True}, {"ttl_s": 1e9}, {"ttl_s": 1e9, "pinned": True}], ids=str)
@pytest.mark.parametrize("case", ["announced and never stored", "stored and evicted", "asked for again"])
def test_hints_without_end_take_no_memory_without_end(case: str, hint: dict[str, Any]) -> None:
    def weight(requests: int) -> int:
        tier = ReusePolicy(100, history_keys_max=100)
        for number in range(requests):
            now_s = float(number)
            chain = number % 10 if case == "asked for again" else number
            keys = [(4 * chain + place).to_bytes(8, "little") for place in range(4)]
            tier.request(RequestInfo(keys, **hint), now_s)
            if case == "announced and never stored":
                continue
            for key in reversed(keys):
                if key not in tier:
                    tier.insert(key, RecordInfo(1), now_s)
            while len(tier) > 50:
                tier.remove(next(tier.candidates(now_s, lambda key: False)), now_s, evicted=True)
        return len(tier._held) + len(tier._held_until)

    assert weight(8000) <= weight(2000) + 100


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("hint", [{"pinned": True}, {"ttl_s": 600.0}], ids=str)
@pytest.mark.parametrize("stored_first", [False, True])
def test_hints_hold_half_at_most_however_many_come_before_their_records(
    count: int, hint: dict[str, Any], stored_first: bool
) -> None:
    tier = ReusePolicy(100)
    chains = [[bytes([number, place]) for place in range(80 // count)] for number in range(count)]
    others = [bytes([255, place]) for place in range(20)]

    def store(keys: list[bytes], now_s: float) -> None:
        for key in reversed(keys):
            tier.insert(key, RecordInfo(1), now_s)

    if stored_first:
        for keys in chains:
            tier.request(RequestInfo(keys), 0.0)
            store(keys, 0.0)
    for keys in chains:
        tier.request(RequestInfo(keys, **hint), 1.0)
    if not stored_first:
        for keys in chains:
            store(keys, 2.0)
    tier.request(RequestInfo(others), 3.0)
    store(others, 3.0)
    assert tier._held_bytes <= 50
    assert tier.hints_refused > 0
    assert len(list(tier.candidates(4.0, lambda key: False))) == 100
    if count > 1:
        assert tier._held_bytes > 30, "what fits is held"
