"""After a failed load the prefix is whole again: what was recomputed is stored, and the next request gets all of it."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.driver import Engine

pytestmark = pytest.mark.engine


def spoil_one_part(engine: Engine) -> None:
    """Flip a bit of the third part that DRAM holds."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = engine.scheduler.connector.manager.store
    slot = list(store._dram.values())[2]
    plane = get_kv_transfer_group()._worker._plane
    plane._arena.view(slot.offset, 4096)[100] ^= 1


def test_two_engines_one_after_the_other_in_one_process(fork: Any, checkpoint: Any) -> None:
    model: Path = checkpoint("llama")

    def scenario() -> list[tuple[int, ...]]:
        answers = []
        for _ in range(2):
            with Engine(model, kvtier={"dram_bytes": "16MiB"}) as engine:
                answers.append(engine.ask(list(range(200))).token_ids)
        return answers

    first, second = fork(scenario)
    assert first == second


def test_a_part_that_went_bad_is_recomputed_and_stored_again(fork: Any, checkpoint: Any) -> None:
    model: Path = checkpoint("llama")

    def scenario() -> list[tuple[int, tuple[int, ...]]]:
        prompt = [(7 * n) % 250 for n in range(700)]
        answers = []
        with Engine(model, kvtier={"dram_bytes": "16MiB"}) as engine:
            for step in ("cold", "spoiled", "again"):
                if step == "spoiled":
                    spoil_one_part(engine)
                answer = engine.ask(prompt)
                answers.append((answer.external_tokens, answer.token_ids))
                engine.settle()
                engine.reset_prefix_cache()
            assert engine.counters["vllm:kvtier_load_failed"] == 1
        return answers

    cold, spoiled, again = fork(scenario)
    assert cold[1] == spoiled[1] == again[1]
    assert cold[0] == 0 and again[0] >= 600
