"""Engines that share a filesystem, and parts read ahead: tokens are right, hits are found, and what goes wrong is a miss."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import CASES, LLAMA, LOGPROBS, Case, assert_same, counters_of, text
from tests.engine.real.conftest import Fork
from tests.engine.real.test_processes import TENSOR_PARALLEL

from kvtier.errors import ConfigError
from kvtier.testing.vllm.driver import Answer, Engine, fork_processes

pytestmark = pytest.mark.engine

GEMMA = next(case for case in CASES if case.model == "gemma3")
FALCON = next(case for case in CASES if case.model == "falconh1")
STAGING_GIB = 48 / 1024


def shared_settings(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "shared_storage_path": str(root),
        "staging_mem": STAGING_GIB,
        "disk_io": "ring",
        "disk_free_bytes_min": 0,
        "shared_absent_s": 0.0,
        **more,
    }


def ask(engine: Engine, prompt: list[int]) -> Answer:
    """Ask with nothing in the engine's own cache, and let everything be stored."""
    engine.reset_prefix_cache()
    answer = engine.ask(prompt, logprobs=LOGPROBS)
    engine.settle()
    return answer


def serve(case: Case, model: Path, settings: dict[str, Any] | None, prompts: list[list[int]]) -> Callable[[], Any]:
    """A scenario: the prompts' answers and the counters afterwards."""

    def scenario() -> tuple[list[Answer], dict[str, float]]:
        with case.engine(model, kvtier=settings) as engine:
            return [ask(engine, prompt) for prompt in prompts], counters_of(engine)

    return scenario


def part_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.bin") if "committed" not in path.parts)


@pytest.mark.parametrize("case", [LLAMA, GEMMA, FALCON], ids=lambda case: case.model)
@pytest.mark.parametrize("trailer", ["on", "off"])
def test_one_engine_stores_and_another_finds(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path, case: Case, trailer: str
) -> None:
    model = checkpoint(case.model)
    settings = shared_settings(tmp_path, shared_trailer=trailer)
    (right,), _ = fork(serve(case, model, None, [case.long]))
    (cold, again), first = fork(serve(case, model, settings, [case.long, case.long]))
    (other,), second = fork(serve(case, model, settings, [case.long]))
    for answer, what in ((cold, "cold"), (again, "again"), (other, "by another engine")):
        assert_same(answer, right, what)
    whole = case.whole_blocks(case.long_tokens)
    assert [cold.external_tokens, again.external_tokens, other.external_tokens] == [0, whole, whole]
    assert first["dram_used_bytes"] == 0, "DRAM only stages, unless asked to do more"
    assert second["load_disk_parts"] > 0 and second.get("load_failed", 0) == 0
    assert second.get("written_parts", 0) <= first["written_parts"] / 3, "what is there is not written again"


def test_dram_is_a_cache_above_a_shared_disk_where_asked_to(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = shared_settings(tmp_path, staging_cache="arc", sync_on_store=True)
    (cold, again), counters = fork(serve(LLAMA, checkpoint(LLAMA.model), settings, [LLAMA.long, LLAMA.long]))
    assert_same(again, cold, "from DRAM")
    assert counters["load_dram_parts"] == LLAMA.whole_blocks(LLAMA.long_tokens) // LLAMA.block_tokens
    assert counters.get("load_disk_parts", 0) == 0 and counters["dram_used_bytes"] > 0


def test_two_ranks_share_by_commit_markers(fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    model = checkpoint(LLAMA.model)

    def scenario() -> Answer:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        fork_processes()
        with LLAMA.engine(model, kvtier=shared_settings(tmp_path), **TENSOR_PARALLEL) as engine:
            return ask(engine, LLAMA.long)

    cold, found = fork(scenario), fork(scenario)
    assert_same(found, cold, "by another engine of two ranks")
    assert found.external_tokens == LLAMA.whole_blocks(LLAMA.long_tokens)
    (tp,) = tmp_path.rglob("tp_2_pp_size_1_pcp_size_1")
    assert {path.name for path in tp.iterdir()} >= {"rank_0", "rank_1", "committed"}
    names = [{path.name for path in (tp / rank).rglob("*.bin")} for rank in ("rank_0", "rank_1", "committed")]
    assert names[0] == names[1] == names[2] and names[0]
    lost = next((tp / "rank_1").rglob("*.bin"))
    lost.unlink()
    after = fork(scenario)
    assert_same(after, cold, "one rank's file gone")
    assert lost.exists(), "what was recomputed is stored again"


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    "deleted": lambda files: [file.unlink() for file in files[::3]],
    "cut": lambda files: [os.truncate(file, 100) for file in files[::3]],
    "flipped": lambda files: [flip(file) for file in files[::3]],
    "another key's": lambda files: [files[place].write_bytes(files[place + 1].read_bytes()) for place in (0, 4)],
    "all gone": lambda files: [file.unlink() for file in files],
    "unreadable": lambda files: [(file.unlink(), file.mkdir()) for file in files[::3]],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_recomputed_and_replaced(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path, damage: str
) -> None:
    model, settings = checkpoint(LLAMA.model), shared_settings(tmp_path)
    (right,), _ = fork(serve(LLAMA, model, settings, [LLAMA.long]))
    DAMAGES[damage](part_files(tmp_path))
    # Each failed load finds out about one damaged part of five at least.
    answers, counters = fork(serve(LLAMA, model, settings, [LLAMA.long] * 7))
    for answer in answers:
        assert_same(answer, right, damage)
    if damage == "unreadable":
        return  # a directory under a part's name: nothing there can be replaced, and the engine goes on
    assert answers[-1].external_tokens == LLAMA.whole_blocks(LLAMA.long_tokens)
    if damage not in ("deleted", "all gone"):
        assert counters["load_failed"] >= 1


def test_other_weights_never_meet(fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint(LLAMA.model)
    root = tmp_path / "root"
    root.mkdir()
    other_model = tmp_path / "other" / model.name
    other_model.mkdir(parents=True)
    for file in model.iterdir():
        (other_model / file.name).write_bytes(file.read_bytes())
    with next(other_model.glob("*.safetensors")).open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(os.urandom(2) + bytes(2))
    (cold,), _ = fork(serve(LLAMA, model, shared_settings(root), [LLAMA.long]))
    (other,), _ = fork(serve(LLAMA, other_model, shared_settings(root), [LLAMA.long]))
    (again,), _ = fork(serve(LLAMA, model, shared_settings(root), [LLAMA.long]))
    assert (cold.external_tokens, other.external_tokens) == (0, 0)
    assert again.external_tokens > 0
    assert len([path for path in root.iterdir() if "--" in path.name]) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_waiting_requests_are_read_ahead_for(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path, shared: bool
) -> None:
    model = checkpoint(LLAMA.model)
    prompts = [text(50 + number, 5 * LLAMA.block_tokens + 3) for number in range(5)]
    ahead = {"enable_preload": True, "preload_lookahead_requests": 4, "iodepth": 4}
    if shared:
        settings = shared_settings(tmp_path, **ahead)
    else:
        settings = {"disk_path": str(tmp_path), "dram_bytes": "48MiB", "disk_bytes": "512MiB", "disk_free_bytes_min": 0}
        settings |= ahead

    def fill() -> list[Answer]:
        with LLAMA.engine(model, kvtier=settings) as engine:
            return [ask(engine, prompt) for prompt in prompts]

    def occupied(engine: Engine) -> str:
        """A request that takes so much of the engine's memory that nothing else can be loaded into it."""
        first = engine.submit(text(9, 20 * LLAMA.block_tokens), max_tokens=40)
        engine.step_until(lambda: engine.computed_tokens(first) > 0, deadline_s=30, what="the first request runs")
        return first

    def queue() -> tuple[list[Answer], dict[str, float]]:
        with LLAMA.engine(model, kvtier=settings, max_num_seqs=1) as engine:
            first = occupied(engine)
            answers = engine.answer(prompts, logprobs=LOGPROBS)
            engine.result(first)
            engine.settle()
            return answers, counters_of(engine)

    def abort() -> bool:
        with LLAMA.engine(model, kvtier=settings, max_num_seqs=1) as engine:
            ids = [occupied(engine), *(engine.submit(prompt, max_tokens=2) for prompt in prompts)]
            store = engine.scheduler.connector.manager.store
            engine.step_until(lambda: bool(store.gauges()["preload_used_bytes"]), deadline_s=30, what="a read ahead")
            for request_id in ids:
                engine.abort(request_id)
            engine.settle()
            store.check()
            return bool(engine.scheduler.connector.connector_scheduler._waiting or store._preloads.used_bytes)

    def no_need() -> int:
        """One that finds its prefix in the engine, where another has loaded it meanwhile, keeps nothing of what was read ahead while it runs."""
        with LLAMA.engine(model, kvtier=settings, max_num_seqs=1) as engine:
            first = occupied(engine)
            loads, finds = (engine.submit(prompts[0], max_tokens=count) for count in (1, 60))
            store = engine.scheduler.connector.manager.store
            engine.step_until(lambda: store._preloads._keys.keys() >= {loads, finds}, deadline_s=30, what="reads ahead")
            engine.result(first)
            assert engine.result(loads).external_tokens > 0
            engine.step_until(lambda: engine.computed_tokens(finds) > len(prompts[0]), deadline_s=30, what="decoding")
            held = store.gauges()["preload_used_bytes"]
            assert engine.result(finds).external_tokens == 0
            return held

    right = fork(fill)
    answers, counters = fork(queue)
    for answer, reference in zip(answers, right, strict=True):
        assert_same(answer, reference, "read ahead")
        assert answer.external_tokens == LLAMA.whole_blocks(len(prompts[0]))
    assert counters["preload_used_parts"] >= 10, {name: n for name, n in counters.items() if "load" in name}
    assert counters.get("load_failed", 0) == 0
    assert not fork(abort), "aborted requests leave nothing of what was read for them"
    assert not fork(no_need), "a request that runs waits for nothing that was read for it"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shared_storage_path": "/nowhere/at/all"}, "shared_storage_path is '/nowhere/at/all', which does not exist"),
        ({"shared_storage_path": "{tmp}", "shared_model_name": "../up"}, "cannot be a directory's name below the root"),
        ({"shared_storage_path": "{tmp}", "shared_model_name": "/abs"}, "cannot be a directory's name below the root"),
        ({"shared_storage_path": "{tmp}/file"}, "which is not a directory"),
    ],
)
def test_a_shared_path_that_cannot_be_is_refused_at_the_start(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path, settings: dict[str, str], named: str
) -> None:
    model = checkpoint(LLAMA.model)
    (tmp_path / "file").touch()

    def scenario() -> str:
        try:
            LLAMA.engine(model, kvtier={name: value.format(tmp=tmp_path) for name, value in settings.items()})
        except ConfigError as error:
            return str(error)
        return ""

    assert named in fork(scenario)
