"""Between vLLM's queue and the planner: what each waiting request would load, what is under way, and the answer to vLLM.

vLLM asks for its waiting requests one after another, in queue order, as far as its budget of a step goes; the first question of a step begins
the planner's. A request that was given an answer and is running, or loading, is booked until its prompt is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import RequestStatus

from kvtier.config import Config
from kvtier.engine.vllm.manager import KVTierManager
from kvtier.plan.break_even import BreakEven
from kvtier.plan.planner import Booked, Candidate, Decision, LoadPlanner

_AT_WORK = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class RequestPlanner:
    """The gate and the planner of one engine.

    Args:
        config: the settings.
        costs: the break-even file, None for none.
        manager: where parts are, what moves, preloads, the clock, and the counters.

    Attributes:
        plans: whether the planner is on.
    """

    def __init__(self, config: Config, costs: BreakEven | None, manager: KVTierManager) -> None:
        self._config = config
        self._gate = costs or BreakEven()
        self._manager = manager
        self._planner: LoadPlanner | None = None
        self.plans = config.load_planner == "on"
        self._gates = bool(self._gate.ssd_tokens or self._gate.mem_tokens)
        self._store_tokens_min = self._gate.store_tokens_min(has_disk=config.has_disk)
        self._step_open = False
        self._waiting: set[str] = set()
        self._prefilling: dict[str, Any] = {}
        self._last: dict[str, Decision] = {}
        self._staged: set[str] = set()

    # ---- the life of a request

    def arrived(self, request_id: str) -> None:
        """It is in vLLM's queue."""
        if self.plans:
            self._waiting.add(request_id)

    def scheduled(self, request_id: str) -> None:
        """It has left the queue."""
        self._waiting.discard(request_id)

    def ended(self, request: Any) -> None:
        """It is over, well or not."""
        request_id = request.request_id
        self._waiting.discard(request_id)
        self._prefilling.pop(request_id, None)
        self._last.pop(request_id, None)
        self._staged.discard(request_id)
        if self._planner is not None:
            self._planner.forget(request_id)
        if self.withholds(request):
            self._manager.count("gate_withheld")

    def end_step(self) -> None:
        """vLLM has scheduled a step."""
        self._step_open = False

    # ---- answers

    def withholds(self, request: Any) -> bool:
        """Whether nothing of a request is stored, since nothing of its length is worth loading."""
        return bool(request.num_tokens < self._store_tokens_min)

    def gate_declines(self, hit_tokens: int, keys: Sequence[OffloadKey]) -> bool:
        """Whether loading these parts of so many tokens is below the break-even of where they are."""
        return self._gates and self._gate.declines(
            hit_tokens, in_dram=not self._manager.resident_bytes(keys).away_bytes
        )

    def answer(
        self, request: Any, computed_tokens: int, hit_tokens: int, keys: Callable[[], list[OffloadKey]]
    ) -> Decision:
        """What becomes of a request whose stored prefix has `hit_tokens` behind those that the engine has; `keys` are the parts of it."""
        planner = self._open_step() if self.plans else None
        decision = Decision.ADMIT
        if hit_tokens and (planner is not None or self._gates):
            decision = self._judge(planner, request, computed_tokens, hit_tokens, keys())
        if planner is not None:
            if not hit_tokens:
                planner.book_prefill(computed_tokens, request.num_tokens)
            if decision is not Decision.DEFER:
                self._prefilling[request.request_id] = request
        return decision

    def _judge(
        self, planner: LoadPlanner | None, request: Any, computed_tokens: int, hit_tokens: int, keys: list[OffloadKey]
    ) -> Decision:
        request_id, resident = request.request_id, self._manager.resident_bytes(keys)
        if self._gate.declines(hit_tokens, in_dram=not resident.away_bytes):
            if planner is not None:
                planner.book_prefill(computed_tokens, request.num_tokens)
            self._count(request_id, "gate_declined", Decision.DECLINE)
            return Decision.DECLINE
        if planner is None:
            return Decision.ADMIT
        candidate = Candidate(
            request_id, request.num_tokens, computed_tokens, hit_tokens, resident.total_bytes, resident.away_bytes
        )
        decision = planner.decide(candidate, lambda: self._manager.preload_room_bytes() >= resident.unread_bytes)
        if decision is Decision.DEFER:
            self._stage(request_id, keys)
        elif self._last.get(request_id) is Decision.DEFER:
            if decision is Decision.DECLINE:
                self._manager.release_preload(request_id)
            elif resident.away_bytes:
                self._manager.count("planner_late")
        self._count(request_id, f"planner_{_PAST[decision]}", decision)
        return decision

    def _stage(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """Read ahead what a deferred request will load, as soon as no load reads from disk."""
        if request_id in self._staged or self._manager.moving_bytes()[0]:
            return
        if self._manager.preload(self._manager.parts(keys), request_id):
            self._staged.add(request_id)

    def _count(self, request_id: str, counter: str, decision: Decision) -> None:
        """Once for each time that a request's answer changes: it is asked for at every step until vLLM has room for it."""
        if self._last.get(request_id) is not decision:
            self._last[request_id] = decision
            self._manager.count(counter)

    def _open_step(self) -> LoadPlanner:
        """The planner, in the present step of the engine."""
        if self._planner is None:
            assert self._gate.curves is not None, "the start is refused without curves"
            self._planner = LoadPlanner(
                self._gate.curves,
                self._manager.bytes_per_token or 1.0,
                self._config.load_planner_defer_tolerance,
                self._config.load_planner_defer_deadline_max_s,
            )
        if not self._step_open:
            self._step_open = True
            reading, writing = self._manager.moving_bytes()
            self._planner.begin_step(
                Booked(self._prefills(), reading, writing, len(self._waiting)), self._manager.clock()
            )
        return self._planner

    def _prefills(self) -> list[tuple[int, int]]:
        """Tokens done and in all of the prompts at work; those that are through are dropped."""
        at_work = []
        for request_id, request in list(self._prefilling.items()):
            if request.num_computed_tokens >= request.num_tokens - 1 and request.status is RequestStatus.RUNNING:
                del self._prefilling[request_id]
            elif request.status in _AT_WORK:
                at_work.append((request.num_computed_tokens, request.num_tokens))
        return at_work


_PAST = {Decision.ADMIT: "admitted", Decision.DEFER: "deferred", Decision.DECLINE: "declined"}
