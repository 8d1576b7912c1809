"""A disk that fails on purpose: an I/O engine around a real one, which does to chosen jobs what real disks do.

    io = FaultyIO(make_io("threads"), every(3, Fault(error=errno.EIO)))

The files are real, the errors are injected between the store and the engine: what was not touched by a fault went through the kernel.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.io import Finished, IOEngine, Job, Op


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one job.

    Attributes:
        error: errno that the job ends with, 0 for none.
        does_it: whether the job is carried out all the same, before it is said to have failed.
        flips: after a read, one bit of the buffer is turned; before a write, of what is written (a copy).
        stalls: the job is not started before `FaultyIO.release`.
    """

    error: int = 0
    does_it: bool = False
    flips: bool = False
    stalls: bool = False


Rule = Callable[[Job], Fault | None]


def of_kind(op: Op, fault: Fault) -> Rule:
    """`fault` for every job that has a step of that kind."""
    return lambda job: fault if any(step.op is op for step in job.steps) else None


def at_random(seed: int, share: float, faults: Sequence[Fault]) -> Rule:
    """One of `faults`, at random, for about `share` of the jobs that have steps."""
    generator = random.Random(seed)
    lock = threading.Lock()

    def rule(job: Job) -> Fault | None:
        with lock:
            hit = job.steps and generator.random() < share
            return generator.choice(faults) if hit else None

    return rule


class FaultyIO(IOEngine):
    """`inner` with `rule` applied to every job. `rule` may be replaced at any time.

    Attributes:
        injected: how many jobs were met by a fault.
    """

    name = "faulty"

    def __init__(self, inner: IOEngine, rule: Rule | None = None) -> None:
        self.inner = inner
        self.rule: Rule = rule or (lambda job: None)
        self.injected = 0
        self.chosen_because = f"faults over {inner.name}"
        self._lock = threading.Lock()
        self._stalled: list[tuple[Job, Finished]] = []

    def submit(self, jobs: Sequence[Job], finished: Finished) -> None:
        sound: list[Job] = []
        for job in jobs:
            fault = self.rule(job)
            if fault is None:
                sound.append(job)
                continue
            with self._lock:
                self.injected += 1
            self._submit_with(fault, job, finished)
        if sound:
            self.inner.submit(sound, finished)

    def _submit_with(self, fault: Fault, job: Job, finished: Finished) -> None:
        if fault.stalls:
            with self._lock:
                self._stalled.append((job, finished))
            return
        steps = job.steps
        if fault.error and not fault.does_it:
            job.steps = ()
        elif fault.flips:
            for step in steps:
                if step.op is Op.WRITE and step.buffer is not None:
                    _flip_written(job)

        def ended(jobs: list[Job]) -> None:
            for one in jobs:
                one.steps = steps
                one.error = one.error or fault.error
                one.failed_step = 0 if one.error else -1
                if fault.flips and not one.error:
                    for step in steps:
                        if step.op is Op.READ and step.buffer is not None:
                            step.buffer[step.buffer.nbytes // 3] ^= 0x10
            finished(jobs)

        self.inner.submit([job], ended)

    def release(self) -> None:
        """Let the stalled jobs go on."""
        with self._lock:
            stalled, self._stalled = self._stalled, []
        for job, finished in stalled:
            self.inner.submit([job], finished)

    @property
    def stalled(self) -> int:
        """How many jobs wait for `release`."""
        with self._lock:
            return len(self._stalled)

    def cancel(self, jobs: Sequence[Job]) -> None:
        self.inner.cancel(jobs)

    def promote(self, jobs: Sequence[Job], lane: Lane, deadline_s: float | None) -> None:
        self.inner.promote(jobs, lane, deadline_s)

    def in_flight(self) -> int:
        return self.inner.in_flight() + self.stalled

    def close(self, deadline_s: float) -> bool:
        return self.inner.close(deadline_s) and not self.stalled


def _flip_written(job: Job) -> None:
    """Replace what a job writes by a copy with one bit turned."""
    from dataclasses import replace

    from kvtier.tier.disk.io import address_of, aligned_buffer

    steps = []
    for step in job.steps:
        if step.op is Op.WRITE and step.buffer is not None:
            copy = aligned_buffer(step.buffer.nbytes)
            copy[:] = step.buffer.cast("B")
            copy[copy.nbytes // 3] ^= 0x10
            steps.append(replace(step, buffer=copy, address=address_of(copy)))
        else:
            steps.append(step)
    job.steps = tuple(steps)
