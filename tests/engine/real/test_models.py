"""Every kind of model on a real engine: what kvtier brings back gives the same tokens, and the same logprobs to the bit.

Three engines for each model: one without kvtier, which says what is right; one with kvtier, on an empty disk; and, after that one
was stopped, another on the same disk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.real.cases import (
    CASES,
    LOGPROBS,
    Case,
    ask_crowd,
    assert_agrees,
    assert_same,
    counters_of,
    distance,
    external,
    kvtier_settings,
    text,
)
from tests.engine.real.conftest import Fork

from kvtier.testing.vllm.driver import Answer, Engine

pytestmark = pytest.mark.engine

# Logprobs of the same sums in another order.
FLOAT32_TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 0.25


@dataclass
class Results:
    """What the three engines of one case said, by name of the phase."""

    case: Case
    answers: dict[str, list[Answer]]
    counters: dict[str, dict[str, float]]

    def one(self, phase: str) -> Answer:
        (answer,) = self.answers[phase]
        return answer


class Run:
    """The phases of one engine, in a child process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, list[Answer]] = {}
        self.counters: dict[str, dict[str, float]] = {}

    def keep(self, phase: str, answers: list[Answer]) -> list[Answer]:
        self.engine.settle()
        self.answers[phase] = answers
        self.counters[phase] = counters_of(self.engine)
        return answers

    def ask(self, phase: str, prompt: list[int], max_tokens: int = 16) -> Answer:
        return self.keep(phase, [self.engine.ask(prompt, max_tokens=max_tokens, logprobs=LOGPROBS)])[0]

    def ask_each(self, phase: str, prompts: list[list[int]]) -> None:
        """Each prompt alone, with nothing in the engine's own cache."""
        answers = []
        for prompt in prompts:
            self.forget()
            answers.append(self.engine.ask(prompt, max_tokens=16, logprobs=LOGPROBS))
        self.keep(phase, answers)

    def forget(self) -> None:
        self.engine.settle()
        self.engine.reset_prefix_cache()


def continuation(case: Case, answer: Answer) -> list[int]:
    return case.short + list(answer.token_ids) + text(6, 9)


def without_kvtier(case: Case, model: Path) -> Run:
    with case.engine(model) as engine:
        run = Run(engine)
        first = run.ask("turn 1", case.short, max_tokens=case.block_tokens * 3 // 2)
        run.ask("turn 2 local", continuation(case, first))
        run.forget()
        run.ask("cold", case.long)
        run.ask("local", case.long)
        run.forget()
        run.ask("half", case.half_shared(2))
        run.forget()
        run.ask("other half", case.half_shared(3))
        run.forget()
        run.keep("crowd", ask_crowd(engine, case))
        run.ask_each("each", case.crowd)
        run.engine = None  # type: ignore[assignment]
        return run


def with_kvtier(case: Case, model: Path, disk: Path) -> Run:
    with case.engine(model, kvtier=kvtier_settings(disk)) as engine:
        run = Run(engine)
        run.ask("cold", case.long)
        run.forget()
        run.ask("dram", case.long)
        run.forget()
        run.ask("dram half", case.half_shared(2))
        run.forget()
        first = run.ask("turn 1", case.short, max_tokens=case.block_tokens * 3 // 2)
        run.forget()
        run.ask("turn 2", continuation(case, first))
        run.engine = None  # type: ignore[assignment]
        return run


def after_restart(case: Case, model: Path, disk: Path) -> Run:
    # A state stored while decoding differs from the one that prefill makes: to compare a preempted request with its recompute
    # to the bit, only prompts are stored here.
    settings = kvtier_settings(disk, store_decode_blocks=not case.has_state)
    with case.engine(model, kvtier=settings) as engine:
        run = Run(engine)
        run.ask("disk", case.long)
        run.forget()
        run.ask("disk half", case.half_shared(3))
        if case.batch_exact:
            run.forget()
            run.keep("crowd cold", ask_crowd(engine, case))
        else:
            run.ask_each("each cold", case.crowd)
        run.forget()
        run.keep("crowd", ask_crowd(engine, case))
        run.ask_each("each", case.crowd)
        run.engine = None  # type: ignore[assignment]
        return run


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.model)
def results(
    request: pytest.FixtureRequest,
    fork_module: Fork,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Results]:
    case: Case = request.param
    model = checkpoint(case.model)
    disk = tmp_path_factory.mktemp(f"disk-{case.model}")
    plain = fork_module(lambda: without_kvtier(case, model))
    first = fork_module(lambda: with_kvtier(case, model, disk))
    second = fork_module(lambda: after_restart(case, model, disk))
    answers = {f"plain {phase}": value for phase, value in plain.answers.items()}
    answers |= first.answers | second.answers
    yield Results(case, answers, first.counters | second.counters)


def test_cold_is_as_without_kvtier(results: Results) -> None:
    answer = results.one("cold")
    assert (answer.local_tokens, answer.external_tokens) == (0, 0)
    assert len(set(answer.token_ids)) > 1, "a model that repeats one token would hide wrong KV"
    assert_same(answer, results.one("plain cold"), "cold")


def test_dram_hit(results: Results) -> None:
    answer = results.one("dram")
    assert answer.external_tokens == results.one("plain local").local_tokens > 0
    assert_same(answer, results.one("plain local"), "DRAM hit")
    assert results.counters["dram"]["load_dram_parts"] > 0
    assert results.counters["dram"].get("load_disk_parts", 0) == 0


def test_disk_hit_after_restart(results: Results) -> None:
    answer = results.one("disk")
    assert answer.external_tokens == results.one("plain local").local_tokens > 0
    assert_same(answer, results.one("plain local"), "disk hit")
    assert results.counters["disk"]["load_disk_parts"] > 0
    assert results.counters["disk"].get("load_dram_parts", 0) == 0


@pytest.mark.parametrize(("phase", "reference"), [("dram half", "plain half"), ("disk half", "plain other half")])
def test_half_prefix_hit(results: Results, phase: str, reference: str) -> None:
    answer, case = results.one(phase), results.case
    assert answer.external_tokens == case.half_tokens // case.block_tokens * case.block_tokens > 0
    assert_same(answer, results.one(reference), phase)


def test_generated_tokens_come_back_too(results: Results) -> None:
    """The second turn of a conversation finds its first turn's answer, not its prompt alone."""
    answer, reference, case = results.one("turn 2"), results.one("plain turn 2 local"), results.case
    assert_same(results.one("turn 1"), results.one("plain turn 1"), "first turn")
    assert answer.external_tokens == reference.local_tokens > len(case.short)
    assert_same(answer, reference, "second turn")


def test_crowd_under_little_memory(results: Results) -> None:
    for phase in ("crowd cold", "crowd") if results.case.batch_exact else ():
        pairs = zip(results.answers[phase], results.answers["plain crowd"], strict=True)
        for place, (answer, reference) in enumerate(pairs):
            what = f"{phase}, request {place}, preempted {answer.preemptions} times"
            if results.case.dtype == "float32":
                assert answer.token_ids == reference.token_ids, what
                assert distance(answer, reference) <= FLOAT32_TOLERANCE, what
            else:
                # Once preempted, what was decoded is computed again by prefill, which rounds otherwise.
                tolerance = BFLOAT16_TOLERANCE if answer.preemptions or reference.preemptions else 0.0
                assert_agrees(answer, reference, what, tolerance=tolerance)


def test_crowd_is_restored_and_preempted(results: Results) -> None:
    case = results.case
    phases = [results.answers[phase] for phase in ("crowd cold", "crowd") if phase in results.answers]
    assert external(results.answers["crowd"]) == [case.whole_blocks(len(prompt)) for prompt in case.crowd]
    assert sum(answer.preemptions for answers in phases for answer in answers) > 0


def test_what_a_crowd_used_is_unharmed(results: Results) -> None:
    answers, references = results.answers["each"], results.answers["plain each"]
    assert external(answers) == [results.case.whole_blocks(len(prompt)) for prompt in results.case.crowd]
    for place, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        assert_same(answer, reference, f"prompt {place} of the crowd, alone")


def test_nothing_failed(results: Results) -> None:
    for phase, counters in results.counters.items():
        failed = {name: value for name, value in counters.items() if ("fail" in name or "lost" in name) and value}
        assert not failed, phase
