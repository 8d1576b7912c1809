"""A real engine's own steps say what a part is worth."""

from typing import Any

import pytest
from tests.engine.real.cases import LLAMA, counters_of, kvtier_settings, text
from tests.engine.real.conftest import Fork

pytestmark = pytest.mark.engine


def test_costs_are_learned_from_steps_and_rise_with_depth(fork: Fork, checkpoint: Any) -> None:
    model = checkpoint(LLAMA.model)

    def scenario() -> dict[str, Any]:
        engine = LLAMA.engine(
            model,
            kvtier=kvtier_settings(None, dram_policy="reuse", dram_bytes="64MiB"),
            max_num_batched_tokens=1024,
            max_model_len=8192,
            num_gpu_blocks_override=300,
        )
        with engine:
            manager = engine.scheduler.connector.manager
            before = manager.curve.known
            for seed, tokens in enumerate((6000, 300, 1500, 100, 4000, 700, 6000)):
                engine.ask(text(seed, tokens), max_tokens=20)
            engine.settle()
            curve = manager.curve
            infos = [slot.info for slot in manager.store._dram.values()]
            return {
                "before": before,
                "known": curve.known,
                "terms": (curve.base_s, curve.token_s, curve.pair_s),
                "took_s": [curve.seconds(0, 1000), curve.seconds(5000, 6000)],
                "costs": sorted((info.depth_tokens, info.cost_s) for info in infos if info.cost_s),
                "metric": counters_of(engine)["recompute_seconds"],
            }

    found = fork(scenario)
    assert not found["before"] and found["known"], found["terms"]
    shallow_s, deep_s = found["took_s"]
    assert 0 < shallow_s < deep_s < 60, found["terms"]
    assert found["metric"] > deep_s
    shallow = [cost for depth, cost in found["costs"] if depth <= 512]
    deep = [cost for depth, cost in found["costs"] if depth >= 5500]
    assert shallow and deep and max(shallow) < min(deep), found["costs"]
