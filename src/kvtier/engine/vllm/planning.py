"""Between vLLM's queue and the planner: what each waiting request would load, what is under way, and the answer to vLLM.

vLLM asks for its waiting requests one after another, in queue order, as far as its budget of a step goes; the first question of a step begins
the planner's. A request that was given an answer and is running, or loading, is booked until its prompt is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import RequestStatus

from kvtier.config import Config
from kvtier.engine.vllm.manager import KVTierManager
from kvtier.plan.break_even import BreakEven
from kvtier.plan.planner import Booked, Candidate, Decision, LoadPlanner

_AT_WORK = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class Preload(Protocol):
    """Asks for parts to be brought into DRAM for a request. Called once a request, for all parts that its load needs."""

    def __call__(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        """Whether they will be; False where there is no room for them. What the request no longer needs when it ends is let go then."""


class RequestPlanner:
    """The gate and the planner of one engine.

    Args:
        config: the settings.
        costs: the break-even file, None for none.
        manager: where parts are, what moves, the clock, and the counters.

    Attributes:
        preload: stages what is deferred. Without it nothing is: waiting would bring nothing.
    """

    def __init__(self, config: Config, costs: BreakEven | None, manager: KVTierManager) -> None:
        self.preload: Preload | None = None
        self._config = config
        self._gate = costs or BreakEven()
        self._manager = manager
        self._planner: LoadPlanner | None = None
        self._plans = config.load_planner == "on"
        self._store_tokens_min = self._gate.store_tokens_min(has_disk=config.disk_path is not None)
        self._step_open = False
        self._waiting: set[str] = set()
        self._prefilling: dict[str, Any] = {}
        self._last: dict[str, Decision] = {}

    # ---- the life of a request

    def arrived(self, request_id: str) -> None:
        """It is in vLLM's queue."""
        if self._plans:
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

    def answer(
        self,
        request: Any,
        computed_tokens: int,
        hit_tokens: int,
        keys: Callable[[], list[OffloadKey]],
        context: ReqContext,
    ) -> Decision:
        """What becomes of a request whose stored prefix has `hit_tokens` behind those that the engine has; `keys` are the parts of it."""
        if not self._plans and (not hit_tokens or not (self._gate.ssd_tokens or self._gate.mem_tokens)):
            return Decision.ADMIT
        planner = self._open_step() if self._plans else None
        decision = Decision.ADMIT
        if hit_tokens:
            wanted = keys()
            total_bytes, away_bytes = self._manager.resident_bytes(wanted)
            if self._gate.declines(hit_tokens, in_dram=not away_bytes):
                decision = Decision.DECLINE
                self._count(request.request_id, "gate_declined", decision)
            elif planner is not None:
                candidate = Candidate(
                    request.request_id, request.num_tokens, computed_tokens, hit_tokens, total_bytes, away_bytes
                )
                decision = planner.decide(candidate, lambda: self._stage(wanted, context))
                if decision is Decision.ADMIT and away_bytes and self._last.get(request.request_id) is Decision.DEFER:
                    self._manager.count("planner_late")
                self._count(request.request_id, f"planner_{_PAST[decision]}", decision)
                if decision is Decision.DEFER:
                    return decision
                self._prefilling[request.request_id] = request
                return decision
        if planner is not None:
            planner.book_prefill(computed_tokens, request.num_tokens)
            self._prefilling[request.request_id] = request
        return decision

    def _stage(self, keys: Sequence[OffloadKey], context: ReqContext) -> bool:
        return self.preload is not None and self.preload(keys, context)

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
