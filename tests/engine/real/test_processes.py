"""Engines of several processes: tensor parallel workers, and the engine core in a process of its own, as `vllm serve` runs it."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import LLAMA, LOGPROBS, ask_crowd, assert_same, counters_of, external, kvtier_settings
from tests.engine.real.conftest import Fork

from kvtier.memory.arena import available_memory_bytes
from kvtier.testing import forks
from kvtier.testing.vllm.driver import Answer, Engine, fork_processes

pytestmark = pytest.mark.engine

# Workers bound to the same cores would spin against each other.
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def two_workers(model: Path, disk: Path | None) -> Engine:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    fork_processes()
    settings = None if disk is None else kvtier_settings(disk)
    return LLAMA.engine(model, kvtier=settings, **TENSOR_PARALLEL)


@dataclass(frozen=True)
class Stored:
    """What two ranks say without kvtier and with it, and the disk that they left."""

    plain: dict[str, list[Answer]]
    first: dict[str, list[Answer]]
    disk: Path


@pytest.fixture(scope="module")
def stored(fork_module: Fork, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    model, disk = checkpoint(LLAMA.model), tmp_path_factory.mktemp("disk-of-two-ranks")

    def plain() -> dict[str, list[Answer]]:
        with two_workers(model, None) as engine:
            cold, local = (engine.ask(LLAMA.long, logprobs=LOGPROBS) for _ in range(2))
            engine.reset_prefix_cache()
            half = engine.ask(LLAMA.half_shared(2), logprobs=LOGPROBS)
            engine.reset_prefix_cache()
            return {"cold": [cold], "local": [local], "half": [half], "crowd": ask_crowd(engine, LLAMA)}

    def first() -> dict[str, list[Answer]]:
        with two_workers(model, disk) as engine:
            cold = engine.ask(LLAMA.long, logprobs=LOGPROBS)
            engine.settle()
            engine.reset_prefix_cache()
            return {"cold": [cold], "dram": [engine.ask(LLAMA.long, logprobs=LOGPROBS)]}

    return Stored(fork_module(plain), fork_module(first), disk)


def test_tensor_parallel(fork: Fork, checkpoint: Callable[[str], Path], stored: Stored, tmp_path: Path) -> None:
    model = checkpoint(LLAMA.model)
    disk = tmp_path / "disk"
    shutil.copytree(stored.disk, disk)

    def again() -> tuple[dict[str, list[Answer]], dict[str, float]]:
        with two_workers(model, disk) as engine:
            restored = engine.ask(LLAMA.long, logprobs=LOGPROBS)
            engine.settle()
            counters = counters_of(engine)
            engine.reset_prefix_cache()
            half = engine.ask(LLAMA.half_shared(2), logprobs=LOGPROBS)
            engine.settle()
            engine.reset_prefix_cache()
            ask_crowd(engine, LLAMA)
            engine.settle()
            engine.reset_prefix_cache()
            return {"disk": [restored], "disk half": [half], "crowd": ask_crowd(engine, LLAMA)}, counters

    right, one = stored.plain, stored.first
    two, counters = fork(again)
    for name, answers, reference in (
        ("cold", one["cold"], "cold"),
        ("dram", one["dram"], "local"),
        ("disk", two["disk"], "local"),
        ("disk half", two["disk half"], "half"),
    ):
        assert_same(answers[0], right[reference][0], name)
    whole = LLAMA.whole_blocks(LLAMA.long_tokens)
    assert external([*one["cold"], *one["dram"], *two["disk"]]) == [0, whole, whole]
    assert external(two["disk half"])[0] > 0
    assert [answer.token_ids for answer in two["crowd"]] == [answer.token_ids for answer in right["crowd"]]
    assert external(two["crowd"]) == [LLAMA.whole_blocks(len(prompt)) for prompt in LLAMA.crowd]
    assert counters["load_disk_parts"] > 0
    assert counters.get("load_failed", 0) == 0
    assert len(list(disk.rglob("seg_*.kv"))) == 2, "each rank has a segment of its own"


def test_one_rank_lost_its_data(fork: Fork, checkpoint: Callable[[str], Path], stored: Stored, tmp_path: Path) -> None:
    """What is damaged on one rank is a miss on all, and what one rank has alone counts for nothing."""
    model, right = checkpoint(LLAMA.model), stored.plain["cold"][0]
    disk = tmp_path / "disk"
    shutil.copytree(stored.disk, disk)

    def serve() -> tuple[Answer, dict[str, float]]:
        with two_workers(model, disk) as engine:
            answer = engine.ask(LLAMA.long, logprobs=LOGPROBS)
            engine.settle()
            return answer, counters_of(engine)

    segment = sorted(disk.rglob("seg_*.kv"))[1]
    with segment.open("r+b") as file:
        slot = int(segment.stem.rpartition("_")[2])
        file.seek(3 * slot + slot // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    flipped, counters = fork(serve)
    assert_same(flipped, right, "a bit flipped on the second rank")
    assert counters["load_failed"] == 1
    for path in segment.parent.iterdir():
        if path.name != "lock":
            path.unlink()
    missing, counters = fork(serve)
    assert_same(missing, right, "the second rank's files deleted")
    assert missing.external_tokens == 0


def test_arenas_that_fit_one_by_one_but_not_together_are_refused(fork: Fork, checkpoint: Callable[[str], Path]) -> None:
    available = available_memory_bytes()
    if (os.cpu_count() or 1) < 2 or available is None:
        pytest.skip("two workers need two cores, and the system says how much memory it has")
    model = checkpoint(LLAMA.model)

    def start() -> str:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        fork_processes()
        try:
            with LLAMA.engine(model, kvtier={"dram_bytes": available * 3 // 2}, **TENSOR_PARALLEL):
                return "started"
        except Exception as error:  # noqa: BLE001 - whatever vLLM makes of a worker's error
            return str(error)

    assert "dram_bytes, of the 2 ranks on this machine together, is" in fork(start)


def own_process(model: Path, disk: Path) -> Any:
    """An engine whose core is in a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    fork_processes()
    return LLAMA.engine(model, kvtier=kvtier_settings(disk, disk_io="auto"))


def test_engine_core_in_its_own_process(fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As under `vllm serve`: the core goes on stepping by itself until everything is stored, and stops cleanly."""
    model = checkpoint(LLAMA.model)
    disk = tmp_path / "disk"
    disk.mkdir()

    def scenario() -> list[Answer]:
        with own_process(model, disk) as engine:
            answers = [engine.ask(LLAMA.long, logprobs=LOGPROBS)]
            forks.wait_for(lambda: bool(list(disk.rglob("seg_*.kv"))), timeout_s=20, what="something on disk")
            engine.reset_prefix_cache()
            answers.append(engine.ask(LLAMA.long, logprobs=LOGPROBS))
            return answers

    def after() -> Answer:
        with own_process(model, disk) as engine:
            return engine.ask(LLAMA.long, logprobs=LOGPROBS)

    cold, dram = fork(scenario)
    restored = fork(after)
    assert_same(dram, cold, "from DRAM")
    assert_same(restored, cold, "from disk")
    whole = LLAMA.whole_blocks(LLAMA.long_tokens)
    assert [cold.external_tokens, dram.external_tokens, restored.external_tokens] == [0, whole, whole]
