"""How long the engine's steps take, for the curve that says what a part is worth.

vLLM builds the connector's metadata once a step and asks for its statistics once a step's output has come back, in the same order, however
many steps are under way. A step began when it was scheduled, or, where another one was running then, when that one's output came back: so
neither idle time nor a second step in the queue counts.
"""

from collections import deque
from collections.abc import Callable

from vllm.v1.core.sched.output import SchedulerOutput

from kvtier.plan.curves import RecomputeCurve, pairs_of

DECODES_BETWEEN = 15
"""Of steps that compute one token a request, so many are left out between two that are taken: they are alike."""
STEPS_MAX = 64


class StepTimer:
    """Feeds `curve` with the engine's steps. `clock` gives monotonic seconds."""

    def __init__(self, curve: RecomputeCurve, clock: Callable[[], float]) -> None:
        self.curve = curve
        self._clock = clock
        self._steps: deque[tuple[float, int, float]] = deque()
        self._answered_s = float("-inf")
        self._decodes = 0

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step goes to the workers."""
        if len(self._steps) >= STEPS_MAX:  # no engine has so many under way: answers do not come
            self._steps.clear()
        self._steps.append((self._clock(), *self._work_of(output)))

    def answered(self) -> None:
        """The output of the oldest step under way has come back."""
        if self._steps:
            now_s = self._clock()
            started_s, tokens, pairs = self._steps.popleft()
            if tokens:
                self.curve.add(tokens, pairs, now_s - max(started_s, self._answered_s))
            self._answered_s = now_s

    def _work_of(self, output: SchedulerOutput) -> tuple[int, float]:
        """Tokens of a step and the pairs of a token and one before it; no tokens where it is not to be taken."""
        tokens, counts = output.total_num_scheduled_tokens, output.num_scheduled_tokens
        if not tokens or output.scheduled_encoder_inputs:
            return 0, 0.0
        if tokens == len(counts):
            self._decodes += 1
            if self._decodes % (DECODES_BETWEEN + 1):
                return 0, 0.0
        running = output.scheduled_cached_reqs
        pairs = 0.0
        for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            pairs += pairs_of(computed, computed + counts[request_id])
        for new in output.scheduled_new_reqs:
            pairs += pairs_of(new.num_computed_tokens, new.num_computed_tokens + counts[new.req_id])
        return tokens, pairs
