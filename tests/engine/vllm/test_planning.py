"""The gate and the planner between vLLM's queue and the store, without an engine."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: make test has it")
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.request import RequestStatus

from kvtier.config import Config
from kvtier.engine.vllm import metrics, startup
from kvtier.engine.vllm.manager import KVTierManager
from kvtier.engine.vllm.messages import KVTierHandshake
from kvtier.engine.vllm.planning import RequestPlanner
from kvtier.errors import ConfigError
from kvtier.plan.break_even import BreakEven, Curve, Curves
from kvtier.plan.planner import Decision
from kvtier.store.moves import ReadDone, ReadParts, WriteDone, WriteParts

pytestmark = pytest.mark.engine
ADMIT, DEFER, DECLINE = Decision.ADMIT, Decision.DEFER, Decision.DECLINE
SLOT, PART_TOKENS = 8192, 100
# Recomputing 1 ms a token, memory 0.01 ms, the disk 0.1 ms more.
CURVES = Curves(Curve(0.01, {1000: 1.01}), Curve(0.01, {1000: 0.12}), Curve(0.01, {1000: 0.02}))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Setup:
    """A manager with `on_disk` parts on disk and `in_dram` behind them in DRAM, and a planner over it."""

    def __init__(self, costs: BreakEven, *, on_disk: int, in_dram: int = 0, **settings: Any) -> None:
        self.clock = Clock()
        config = Config(**settings)
        self.manager = KVTierManager(config, [0], [PART_TOKENS], self.clock)
        self.keys = [make_offload_key(n.to_bytes(32, "big"), 0) for n in range(on_disk + in_dram)]
        entries = ([bytes(key) for key in self.keys[:on_disk]], [PART_TOKENS] * on_disk)
        self.manager.begin([KVTierHandshake((SLOT,), 200 * SLOT, 512 * SLOT, 0, entries)])
        context = ReqContext(req_id="filler")
        if in_dram:
            self.manager.prepare_store(self.keys[on_disk:], context)
            self.manager.complete_store(self.keys[on_disk:], context)
            for action in self.manager.take_actions():
                if isinstance(action, WriteParts):
                    self.manager.apply([WriteDone(action.move_id, {})])
        self.planner = RequestPlanner(config, costs, self.manager)

    def arrive(self, name: str, prompt_tokens: int) -> Any:
        self.planner.arrived(name)
        return SimpleNamespace(
            request_id=name, num_tokens=prompt_tokens, num_computed_tokens=0, status=RequestStatus.WAITING
        )

    def ask(self, request: Any, parts: Sequence[int], computed_tokens: int = 0) -> Decision:
        keys = [self.keys[n] for n in parts]
        return self.planner.answer(request, computed_tokens, len(keys) * PART_TOKENS, lambda: keys)

    def step(self, *asked: tuple[Any, Sequence[int]], to_s: float = 0.0) -> list[Decision]:
        self.clock.now_s = max(self.clock.now_s, to_s)
        decisions = [self.ask(request, parts) for request, parts in asked]
        self.planner.end_step()
        return decisions

    def reads(self) -> list[ReadParts]:
        """What was asked to be read ahead since the last call."""
        return [action for action in self.manager.take_actions() if isinstance(action, ReadParts)]

    def counts(self) -> dict[str, int]:
        assert self.manager.store is not None
        counters = self.manager.store.counters
        return {name: counters[name] for name in counters if name.startswith(("gate_", "planner_"))}


def test_without_settings_everything_is_admitted_and_nothing_looked_up() -> None:
    setup = Setup(BreakEven(), on_disk=1)

    def keys() -> list[Any]:
        raise AssertionError("nobody needs them")

    request = setup.arrive("a", 150)
    assert setup.planner.answer(request, 0, 100, keys) is ADMIT
    assert not setup.planner.withholds(request) and not setup.counts()


def test_the_gate_asks_where_all_parts_are() -> None:
    setup = Setup(BreakEven(ssd_tokens=500, mem_tokens=300), on_disk=5, in_dram=5)
    a = setup.arrive("a", 2000)
    assert [setup.ask(a, range(5, 5 + n)) for n in (2, 3)] == [DECLINE, ADMIT]
    assert [setup.ask(a, range(n)) for n in (4, 5)] == [DECLINE, ADMIT]
    assert setup.ask(a, (4, 5, 6, 7)) is DECLINE, "one part on disk makes it a load from disk"
    assert setup.planner.gate_declines(400, setup.keys[:4]) and not setup.planner.gate_declines(500, setup.keys[:5])
    b = setup.arrive("b", 2000)
    assert [setup.ask(b, range(1)) for _ in range(3)] == [DECLINE] * 3
    assert setup.counts() == {"gate_declined": 2}, "once a request"


def test_nothing_of_a_request_below_the_break_even_is_stored() -> None:
    costs = BreakEven(ssd_tokens=500, mem_tokens=300)
    setup = Setup(costs, on_disk=1)
    request = setup.arrive("a", 299)
    assert setup.planner.withholds(request)
    request.num_tokens = 300
    assert not setup.planner.withholds(request), "what it has generated counts"
    request.num_tokens = 299
    setup.planner.ended(request)
    assert setup.counts() == {"gate_withheld": 1}


def test_the_planner_declines_defers_and_admits() -> None:
    setup = Setup(BreakEven(curves=CURVES), on_disk=60, in_dram=5, load_planner="on")
    long, short, dram = setup.arrive("long", 6050), setup.arrive("short", 120), setup.arrive("dram", 520)
    assert setup.step((long, range(60)), (short, range(1)), (dram, range(60, 65))) == [DEFER, ADMIT, ADMIT]
    assert [len(action.parts) for action in setup.reads()] == [60]
    for request in (short, dram):
        setup.planner.scheduled(request.request_id)
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, request.num_tokens
    assert setup.step((long, range(60)), to_s=0.5) == [DEFER]
    # Twice its 0.6 s of disk.
    assert setup.step((long, range(60)), to_s=1.21) == [ADMIT]
    assert setup.counts() == {"planner_deferred": 1, "planner_admitted": 3, "planner_late": 1}
    assert setup.reads() == [] and setup.manager.is_reading_ahead, "asked for once, and under way"


def test_what_is_staged_in_time_is_loaded_from_dram() -> None:
    setup = Setup(BreakEven(curves=CURVES), on_disk=30, load_planner="on")
    a, _ = setup.arrive("a", 3050), setup.arrive("b", 100)
    assert setup.step((a, range(30))) == [DEFER]
    (read,) = setup.reads()
    assert setup.step((a, range(30)), to_s=0.1) == [DEFER]
    setup.manager.apply([ReadDone(read.move_id, {})])
    assert setup.step((a, range(30)), to_s=0.2) == [ADMIT]
    assert setup.counts() == {"planner_deferred": 1, "planner_admitted": 1}
    assert setup.manager.resident_bytes(setup.keys).away_bytes == 0


def test_staging_begins_when_no_load_reads_from_disk() -> None:
    setup = Setup(BreakEven(curves=CURVES), on_disk=40, load_planner="on")
    reader = ReqContext(req_id="reader")
    setup.manager.prepare_load(setup.keys[30:], reader)
    a, _ = setup.arrive("a", 3050), setup.arrive("b", 100)
    assert setup.step((a, range(30))) == [DEFER] and setup.reads() == []
    setup.manager.complete_load(setup.keys[30:], reader)
    assert setup.step((a, range(30)), to_s=0.1) == [DEFER] and len(setup.reads()) == 1


def test_a_request_declined_after_all_lets_go_of_what_was_staged_for_it() -> None:
    slow = CURVES._replace(g_ssd=Curve(0.01, {1000: 1.52}))  # 1.5 s of disk against 1 s of recomputing
    setup = Setup(BreakEven(curves=slow), on_disk=10, load_planner="on")
    busy, hit = setup.arrive("busy", 5000), setup.arrive("hit", 1010)
    before = setup.manager.preload_room_bytes()
    assert setup.planner.answer(busy, 0, 0, list) is ADMIT
    assert setup.step((hit, range(10))) == [DEFER]
    assert before - setup.manager.preload_room_bytes() == 10 * SLOT
    setup.planner.ended(busy)
    assert setup.step((hit, range(10)), to_s=0.1) == [DECLINE]
    assert setup.manager.preload_room_bytes() == before


def test_lookups_of_the_planner_see_through_reads_and_hurry_none() -> None:
    setup = Setup(BreakEven(curves=CURVES), on_disk=30, load_planner="on")
    a, _ = setup.arrive("a", 3050), setup.arrive("b", 100)
    context = ReqContext(req_id="a")
    assert setup.step((a, range(30))) == [DEFER] and len(setup.reads()) == 1
    with setup.manager.through_reads():
        assert setup.manager.leading_run(setup.keys, context) == (30, False)
        assert setup.manager.lookup(setup.keys[0], context) is LookupResult.HIT
    assert setup.manager.take_actions() == []
    assert setup.manager.leading_run(setup.keys, context) == (30, True)
    assert [type(action).__name__ for action in setup.manager.take_actions()] == ["HurryReads"]


def test_without_room_to_stage_nothing_is_deferred() -> None:
    setup = Setup(BreakEven(curves=CURVES), on_disk=60, load_planner="on", io_depth=180)
    a, b = setup.arrive("a", 3050), setup.arrive("b", 3050)
    assert setup.step((a, range(30)), (b, range(30, 60))) == [ADMIT, ADMIT]


def test_what_runs_is_booked_until_its_prompt_is_computed() -> None:
    slow = CURVES._replace(g_ssd=Curve(0.01, {1000: 1.52}))  # 1.5 s of disk against 1 s of recomputing
    setup = Setup(BreakEven(curves=slow), on_disk=10, load_planner="on", io_depth=200)
    cold, hit = setup.arrive("cold", 5000), setup.arrive("hit", 1010)
    assert setup.planner.answer(cold, 0, 0, list) is ADMIT
    assert setup.step((hit, range(10))) == [ADMIT], "ahead in the queue of this step: the GPU is busy for 5 s"
    setup.planner.scheduled("cold")
    for computed, status, expected in (
        (1000, RequestStatus.RUNNING, ADMIT),
        (4900, RequestStatus.RUNNING, DECLINE),
        (1000, RequestStatus.WAITING_FOR_REMOTE_KVS, ADMIT),
        (1000, RequestStatus.PREEMPTED, DECLINE),
        (5000, RequestStatus.RUNNING, DECLINE),
        (0, RequestStatus.RUNNING, DECLINE),
    ):
        cold.num_computed_tokens, cold.status = computed, status
        assert setup.step((hit, range(10))) == [expected], (computed, status)


def test_reads_and_writes_under_way_are_booked() -> None:
    setup = Setup(BreakEven(curves=CURVES), on_disk=100, load_planner="on")
    reader, hit = ReqContext(req_id="reader"), setup.arrive("hit", 1010)
    assert setup.step((hit, range(90, 100))) == [ADMIT]
    setup.manager.prepare_load(setup.keys[:90], reader)
    assert setup.manager.moving_bytes() == (90 * SLOT, 0)
    assert setup.step((hit, range(90, 100))) == [DECLINE], "0.9 s of reads before its own 0.1 s"
    setup.manager.complete_load(setup.keys[:90], reader)
    assert setup.manager.moving_bytes() == (0, 0)
    new = [make_offload_key(bytes([255, n]) * 16, 0) for n in range(3)]
    setup.manager.prepare_store(new, reader)
    setup.manager.complete_store(new, reader)
    assert setup.manager.moving_bytes() == (0, 3 * SLOT)


@pytest.mark.parametrize("late", [False, True])
def test_an_ended_request_leaves_nothing(late: bool) -> None:
    setup = Setup(BreakEven(600, 600, CURVES), on_disk=60, load_planner="on")
    requests = [setup.arrive(str(n), 3050) for n in range(20)]
    for to_s in (0.0, 9.0 if late else 0.1):
        setup.step(*((request, range(30)) for request in requests), to_s=to_s)
    assert setup.planner._planner is not None and setup.planner._planner.armed_count == 20
    for request in requests:
        setup.planner.ended(request)
        setup.planner.ended(request)
    assert not setup.planner._staged
    kept = (setup.planner._waiting, setup.planner._prefilling, setup.planner._last, setup.planner._planner._deadlines_s)
    assert not any(kept), kept


def test_every_counter_is_declared() -> None:
    for name in (
        "gate_declined",
        "gate_withheld",
        *(f"planner_{n}" for n in ("admitted", "deferred", "declined", "late")),
    ):
        assert metrics.counter_name(name) in metrics.definitions()


def test_the_file_has_to_fit_the_model_that_vllm_serves(tmp_path: Any) -> None:
    path = tmp_path / "b.json"
    config = Config(prefix_cache_break_even_path=path)

    def costs(kv_dtype: str, *, model: str = "served", dtype: str = "torch.bfloat16", cache: str = "auto") -> Any:
        path.write_text(f'{{"model_name": "{model}", "kv_dtype": "{kv_dtype}", "break_even_ssd_tokens": 9}}')
        model_config = SimpleNamespace(model="org/name", served_model_name=["served", "alias"], dtype=dtype)
        return startup.read_costs(
            SimpleNamespace(model_config=model_config, cache_config=SimpleNamespace(cache_dtype=cache)),  # type: ignore[arg-type]
            config,
        )

    for name in ("org/name", "served", "alias"):
        assert costs("bf16", model=name) == BreakEven(9)
    assert costs("auto") == costs("auto", cache="bfloat16") == costs("fp8", cache="fp8") == BreakEven(9)
    for wrong in ({"model": "another"}, {"dtype": "torch.float16"}, {"cache": "fp8"}):
        with pytest.raises(ConfigError, match=r"b\.json.*measure one"):
            costs("bf16", **wrong)
    assert startup.read_costs(SimpleNamespace(), Config()) is None  # type: ignore[arg-type]
