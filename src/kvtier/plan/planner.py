"""The load planner: for each waiting request whose prefix is stored, load it now, stage it first, or recompute it.

The planner prices one step of a scheduler at a time. `begin_step` says what is under way: prefills that the GPU has begun, bytes that
loads and writes move on the disk. Then the waiting requests come in queue order, and each answer is booked before the next is
asked for:

- ADMIT: load now. Its read goes to the disk's demand queue, the rest of its prompt to the GPU's.
- DEFER: ask again at a later step. Its parts are staged into memory meanwhile, behind all demand reads, and the requests behind it go first.
- DECLINE: no load. All of its prompt that is not computed yet goes to the GPU's queue.

For a request with `computed` tokens in the engine's own cache and `restorable` tokens behind them, of which `disk` lie on disk alone:

    service     = g_ssd(disk) - g_mem(disk)                        what the disk adds to a load, at least 0
    t_load      = max(storage, gpu) + g_mem(restorable) + rest     rest: f(prompt) - f(computed + restorable)
    t_recompute = gpu + f(0) + f(prompt) - f(computed)

`gpu` and `storage` are the seconds until the GPU has done what is ahead, and until the disk has read what is ahead and this. Both
sides price the same tokens: what is computed already is on neither, and what follows the prefix is on both. Writes take their share of
the disk: demand reads cede them `WRITE_SHARE` of it, staging lets them all go first.

The rule, in this order:

1. Recomputing is no slower: DECLINE.
2. Nothing has to be read from disk: ADMIT. What counts is where the store says that the parts are, not when they were to arrive.
3. Its deadline has passed: ADMIT. It was armed when the request was first deferred, at min(`defer_deadline_max_s`, max(50 ms,
   `defer_tolerance` x the predicted end of its staging)) from then, and is never moved.
4. Not deferred yet, and deferring helps nobody, since nothing else waits or is under way: ADMIT.
5. Not deferred yet, and overtaking those that are staged before it saves this request more than it costs them together: ADMIT. So a
   short read is not put behind long ones.
6. There is room to stage it: DEFER; else ADMIT.

So no request is deferred beyond its deadline: nothing waits for ever. An answer holds for one step: an engine that has no room for the
request asks again. State is the deadline of each request that was ever deferred, until `forget`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtier.plan.break_even import Curves

DEADLINE_MIN_S = 0.05
WRITE_SHARE = 0.125
"""The part of what the disk starts that waiting writes get beside demand reads: the disk's own queues guarantee as much."""

OVERTAKE_MARGIN = 1.05
"""How many times its cost to others a request must gain to overtake them: predictions are not more exact."""


class Decision(Enum):
    """What becomes of a waiting request's load."""

    ADMIT = "admit"
    DEFER = "defer"
    DECLINE = "decline"


class Candidate(NamedTuple):
    """A waiting request whose prefix is stored.

    Attributes:
        request_id: its name.
        prompt_tokens: all that has to be in the engine's cache before its first token.
        computed_tokens: of those, from the first on, what is in the engine's cache already.
        restorable_tokens: what a load would bring behind those.
        restorable_bytes: bytes of the parts that the load needs.
        disk_bytes: of those, the bytes that are on disk and not in memory.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    restorable_tokens: int
    restorable_bytes: int
    disk_bytes: int


class Booked(NamedTuple):
    """What is under way when a step begins.

    Attributes:
        prefills: (tokens done, tokens in all) of each prompt that the engine has begun, or begins when its load is there.
        read_bytes: bytes that loads are reading from disk.
        write_bytes: bytes that are being written to it.
        waiting: requests in the engine's queue, the one that is asked for included.
    """

    prefills: Sequence[tuple[int, int]] = ()
    read_bytes: int = 0
    write_bytes: int = 0
    waiting: int = 0


@dataclass(slots=True)
class _Queues:
    """Seconds booked in this step."""

    gpu_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    staged_s: float = 0.0
    staged_count: int = 0
    waiting: int = 0

    def read_done_s(self, service_s: float) -> float:
        reads_s = self.read_s + service_s
        return reads_s + min(self.write_s, reads_s * WRITE_SHARE / (1 - WRITE_SHARE))

    def staging_done_s(self, service_s: float) -> float:
        return self.read_s + self.write_s + self.staged_s + service_s


@dataclass(slots=True)
class LoadPlanner:
    """See the module's text.

    Attributes:
        curves: of the break-even file.
        bytes_per_token: bytes of one token's parts on one rank, to price bytes under way in tokens.
        defer_tolerance: how many times its predicted staging a request waits for it.
        defer_deadline_max_s: the longest that a request is deferred.
    """

    curves: Curves
    bytes_per_token: float
    defer_tolerance: float = 2.0
    defer_deadline_max_s: float = 2.0
    _deadlines_s: dict[str, float] = field(default_factory=dict)
    _queues: _Queues = field(default_factory=_Queues)
    _now_s: float = 0.0

    def begin_step(self, booked: Booked, now_s: float) -> None:
        """A step of the scheduler begins, with this under way."""
        self._now_s = now_s
        self._queues = _Queues(
            gpu_s=sum(self._compute_s(done, total) for done, total in booked.prefills),
            read_s=self._service_s(booked.read_bytes / self.bytes_per_token),
            write_s=self._service_s(booked.write_bytes / self.bytes_per_token),
            waiting=booked.waiting,
        )

    def book_prefill(self, computed_tokens: int, prompt_tokens: int) -> None:
        """A waiting request that has nothing to load computes these tokens before those behind it."""
        self._queues.gpu_s += self._compute_s(computed_tokens, prompt_tokens)

    def decide(self, candidate: Candidate, stage: Callable[[], bool]) -> Decision:
        """The answer to one request, booked.

        `stage` is called where the answer would be DEFER for the first time: whether its parts can be staged into memory.
        """
        queues = self._queues
        name, prompt, computed, restorable = candidate[:4]
        service_s = 0.0
        if candidate.disk_bytes > 0:
            service_s = self._service_s(restorable * min(1.0, candidate.disk_bytes / candidate.restorable_bytes))
        rest_s = self._compute_s(computed + restorable, prompt)
        read_done_s = queues.read_done_s(service_s) if candidate.disk_bytes > 0 else 0.0
        load_s = max(read_done_s, queues.gpu_s) + self.curves.g_mem(restorable) + rest_s
        recompute_s = queues.gpu_s + self.curves.f(0) + self._compute_s(computed, prompt)
        if recompute_s <= load_s:
            queues.gpu_s += self._compute_s(computed, prompt)
            return Decision.DECLINE
        if candidate.disk_bytes > 0 and self._defers(name, service_s, stage):
            queues.staged_s += service_s
            queues.staged_count += 1
            return Decision.DEFER
        queues.gpu_s += rest_s
        queues.read_s += service_s
        return Decision.ADMIT

    def forget(self, request_id: str) -> None:
        """A request has ended, well or not."""
        self._deadlines_s.pop(request_id, None)

    @property
    def armed_count(self) -> int:
        """Requests whose deadline is kept."""
        return len(self._deadlines_s)

    def _defers(self, name: str, service_s: float, stage: Callable[[], bool]) -> bool:
        queues = self._queues
        deadline_s = self._deadlines_s.get(name)
        if deadline_s is not None:
            return self._now_s < deadline_s
        if queues.waiting <= 1 and queues.gpu_s <= 0 and queues.read_s <= 0:
            return False
        staging_done_s = queues.staging_done_s(service_s)
        overtaking_s = staging_done_s - queues.staged_s
        gain_s = max(staging_done_s, queues.gpu_s) - max(overtaking_s, queues.gpu_s)
        wait_s = min(self.defer_deadline_max_s, max(DEADLINE_MIN_S, self.defer_tolerance * staging_done_s))
        if wait_s <= 0 or gain_s > OVERTAKE_MARGIN * service_s * queues.staged_count or not stage():
            return False
        self._deadlines_s[name] = self._now_s + wait_s
        return True

    def _compute_s(self, start_tokens: int, end_tokens: int) -> float:
        """Seconds that the GPU takes for these tokens of a prompt, in a step that it makes anyway."""
        return max(0.0, self.curves.f(end_tokens) - self.curves.f(start_tokens))

    def _service_s(self, tokens: float) -> float:
        return max(0.0, self.curves.g_ssd(tokens) - self.curves.g_mem(tokens)) if tokens > 0 else 0.0
