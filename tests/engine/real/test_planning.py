"""The break-even gate and the load planner on a real engine: who is loaded, who is not, and that tokens are right either way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import CASES, LLAMA, LOGPROBS, Case, assert_same, counters_of, kvtier_settings, text
from tests.engine.real.conftest import Fork

from kvtier.cli.main import main
from kvtier.testing.vllm.driver import Answer, Engine

pytestmark = pytest.mark.engine
GEMMA = next(case for case in CASES if case.model == "gemma3")
FALCON = next(case for case in CASES if case.model == "falconh1")
CURVES = {  # Seconds that make a load cheaper by far; what the disk adds is long enough to be waited for.
    "f": {"floor": 0.01, "knots": {"1000": 100.0}},
    "g_ssd": {"floor": 0.01, "knots": {"1000": 0.5}},
    "g_mem": {"floor": 0.01, "knots": {"1000": 0.02}},
}


def break_even(path: Path, model: Path, **fields: Any) -> str:
    """A break-even file for this model."""
    file = path / "break_even.json"
    file.write_text(json.dumps({"model_name": str(model), "kv_dtype": "auto"} | fields))
    return str(file)


def again(engine: Engine, prompt: list[int]) -> Answer:
    """Ask with nothing in the engine's own cache."""
    engine.settle()
    engine.reset_prefix_cache()
    return engine.ask(prompt, logprobs=LOGPROBS)


@pytest.mark.parametrize("case", [LLAMA, GEMMA, FALCON], ids=lambda case: case.model)
def test_a_prefix_below_the_break_even_is_recomputed_and_one_above_is_loaded(
    case: Case, fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint(case.model)
    hit_tokens = case.whole_blocks(case.long_tokens)

    def fill() -> Answer:
        with case.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            cold = engine.ask(case.long, logprobs=LOGPROBS)
            engine.settle()
            return cold

    def serve(**fields: int) -> tuple[Answer, dict[str, float]]:
        settings = kvtier_settings(tmp_path, prefix_cache_break_even_path=break_even(tmp_path, model, **fields))
        with case.engine(model, kvtier=settings) as engine:
            answer = engine.ask(case.long, logprobs=LOGPROBS)
            engine.settle()
            return answer, counters_of(engine)

    cold = fork(fill)
    above, counters = fork(lambda: serve(break_even_ssd_tokens=hit_tokens + 1, break_even_mem_tokens=0))
    assert_same(above, cold, "recomputed")
    assert above.external_tokens == 0 and counters["gate_declined"] == 1
    assert "load_disk_parts" not in counters
    below, counters = fork(lambda: serve(break_even_ssd_tokens=hit_tokens, break_even_mem_tokens=hit_tokens + 1))
    assert_same(below, cold, "loaded")
    assert below.external_tokens == hit_tokens and counters["load_disk_parts"] > 0
    assert "gate_declined" not in counters


def test_of_a_request_below_the_break_even_nothing_is_stored_until_it_has_grown(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, block = checkpoint("llama"), LLAMA.block_tokens
    short = text(3, 3 * block + 5)

    def scenario() -> None:
        threshold = 4 * block + 2
        settings = kvtier_settings(
            None, prefix_cache_break_even_path=break_even(tmp_path, model, break_even_mem_tokens=threshold)
        )
        with LLAMA.engine(model, kvtier=settings) as engine:
            engine.ask(short, max_tokens=8)
            engine.settle()
            counters = counters_of(engine)
            assert "store_parts" not in counters and counters["gate_withheld"] == 1
            # Its answer takes it over the threshold: all of it is stored then, its prompt too.
            engine.ask(short, max_tokens=2 * block)
            engine.settle()
            assert counters_of(engine)["store_parts"] >= 4
            engine.ask(LLAMA.long)
            assert again(engine, LLAMA.long).external_tokens == LLAMA.whole_blocks(LLAMA.long_tokens)

    fork(scenario)


@pytest.mark.parametrize("stuck", [False, True], ids=["staged", "late"])
@pytest.mark.parametrize("case", [LLAMA, GEMMA], ids=lambda case: case.model)
def test_the_planner_serves_the_right_tokens_whatever_it_decides(
    case: Case, stuck: bool, fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint(case.model)
    prompts = [case.long, *(text(20 + n, 3 * case.block_tokens + 7) for n in range(3))]

    def fill() -> list[Answer]:
        with case.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            answers = [engine.ask(prompt, logprobs=LOGPROBS) for prompt in prompts]
            engine.settle()
            return answers

    def serve() -> tuple[list[Answer], dict[str, float]]:
        file = break_even(tmp_path, model, curves=CURVES, break_even_ssd_tokens=0, break_even_mem_tokens=0)
        settings = kvtier_settings(
            tmp_path,
            prefix_cache_break_even_path=file,
            load_planner="on",
            load_planner_defer_tolerance=1000,
            load_planner_defer_deadline_max_s=0.3 if stuck else 60,
        )
        with case.engine(model, kvtier=settings) as engine:
            scheduler = engine.scheduler.connector.connector_scheduler
            if stuck:
                # Promises to stage and does not: every deferred request runs into its deadline.
                scheduler.manager.preload = lambda parts, request_id: True
            answers = engine.answer(prompts, logprobs=LOGPROBS)
            engine.settle()
            assert scheduler.planner._planner.armed_count == 0
            return answers, counters_of(engine)

    expected = fork(fill)
    answers, counters = fork(serve)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference, "planned")
        assert answer.external_tokens == case.whole_blocks(answer.prompt_tokens)
    assert counters["planner_deferred"] > 0
    if stuck:
        assert counters["planner_late"] == counters["planner_deferred"]
    else:
        assert "planner_late" not in counters and counters["preload_used_parts"] == counters["preload_parts"] > 0
    assert counters["planner_admitted"] == len(prompts)


def test_an_aborted_request_that_was_deferred_leaves_nothing(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint("llama")

    def fill() -> None:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            engine.ask(LLAMA.long)
            engine.settle()

    def serve() -> None:
        file = break_even(tmp_path, model, curves=CURVES)
        settings = kvtier_settings(
            tmp_path,
            prefix_cache_break_even_path=file,
            load_planner="on",
            load_planner_defer_tolerance=1000,
            load_planner_defer_deadline_max_s=1000,
        )
        with LLAMA.engine(model, kvtier=settings) as engine:
            scheduler = engine.scheduler.connector.connector_scheduler
            planner, manager = scheduler.planner, scheduler.manager
            room_bytes = manager.preload_room_bytes()
            assert room_bytes > 0
            other = engine.submit(text(9, 40), max_tokens=64)
            deferred = engine.submit(LLAMA.long, max_tokens=4)
            # It is staged for ever: the worker hears of no read.
            manager.store.take_actions = list
            engine.step_until(lambda: planner._last, deadline_s=30, what="a decision")
            assert manager.preload_room_bytes() < room_bytes
            assert planner._planner.armed_count == 1 and engine.unfinished(deferred)
            engine.abort(deferred)
            engine.result(other)
            assert manager.preload_room_bytes() == room_bytes
            kept = (
                planner._waiting,
                planner._prefilling,
                planner._last,
                planner._staged,
                planner._planner._deadlines_s,
            )
            assert not any(kept), kept

    fork(fill)
    fork(serve)


def test_a_file_of_another_model_ends_the_start(fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("llama")

    def start(**changes: Any) -> str:
        file = break_even(tmp_path, model, **({"break_even_ssd_tokens": 5} | changes))
        try:
            with LLAMA.engine(
                model, kvtier=kvtier_settings(None, prefix_cache_break_even_path=file, load_planner="on")
            ):
                return ""
        except ValueError as error:
            return str(error)

    assert "model_name is 'other'" in fork(lambda: start(model_name="other"))
    assert "has no curves" in fork(start)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_what_is_priced_is_what_is_loaded(
    case: Case, fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint(case.model)

    def scenario() -> list[tuple[set[bytes], set[bytes]]]:
        file = break_even(tmp_path, model, break_even_mem_tokens=1)
        with case.engine(model, kvtier=kvtier_settings(None, prefix_cache_break_even_path=file)) as engine:
            scheduler = engine.scheduler.connector.connector_scheduler
            priced: list[set[bytes]] = []
            loaded: list[set[bytes]] = []
            keys_of_load, prepare_load = scheduler._keys_of_load, scheduler.manager.prepare_load

            def pricing(*args: Any, **more: Any) -> Any:
                keys = keys_of_load(*args, **more)
                priced.append(set(keys))
                return keys

            def loading(keys: Any, context: Any) -> Any:
                loaded.append(set(keys))
                return prepare_load(keys, context)

            scheduler._keys_of_load, scheduler.manager.prepare_load = pricing, loading
            engine.ask(case.long)
            again(engine, case.long)
            again(engine, case.half_shared(2))
            # The engine itself has the half now, and the rest is loaded.
            engine.ask(case.long)
            engine.settle()
            return list(zip(priced, loaded, strict=True))

    pairs = fork(scenario)
    assert len(pairs) >= 2
    for priced, loaded in pairs:
        assert priced == loaded


def test_the_file_that_the_benchmark_writes_serves_its_model(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = checkpoint("llama"), tmp_path / "measured.json"
    settings = {
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 32,
        "kv_cache_memory_bytes": 8 << 20,
        "seed": 0,
    }
    arguments = ["--model", str(model), "--disk", str(tmp_path), "--json", str(file), "--tokens", "60,128,384"]
    sizes = ["--repeats", "2", "--dram", "48MiB", "--disk-bytes", "256MiB"]
    assert main(["bench", "break-even", *arguments, *sizes, "--engine", json.dumps(settings)]) == 0
    assert "loading from disk" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert list(content["curves"]["g_ssd"]["knots"]) == ["64", "128", "384"]
    assert all(content["curves"][name]["floor"] > 0 for name in ("f", "g_ssd", "g_mem"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("kvtier-bench-")] == []

    def serve() -> dict[str, float]:
        planned = kvtier_settings(None, prefix_cache_break_even_path=str(file), load_planner="on")
        with LLAMA.engine(model, kvtier=planned) as engine:
            cold, hit = engine.ask(LLAMA.long, logprobs=LOGPROBS), again(engine, LLAMA.long)
            assert_same(hit, cold, "planned")
            engine.settle()
            return counters_of(engine)

    counters = fork(serve)
    decided = sum(counters.get(name, 0) for name in ("gate_declined", "planner_admitted", "planner_declined"))
    assert decided == 1 or counters.get("gate_withheld")
