"""What a real engine records of its requests is what `kvtier simulate` reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import LLAMA, counters_of, kvtier_settings, text
from tests.engine.real.conftest import Fork

from kvtier.cli.main import main
from kvtier.simulate.trace import Trace

pytestmark = pytest.mark.engine


def test_an_engine_writes_what_simulate_reads(
    fork: Fork, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path, block = checkpoint(LLAMA.model), tmp_path / "requests.jsonl", LLAMA.block_tokens
    first, second = text(1, 5 * block + 3), text(2, 3 * block)
    prompts = [first, second, first, first + text(3, 2 * block), text(4, block - 1)]

    def scenario() -> dict[str, float]:
        with LLAMA.engine(model, kvtier=kvtier_settings(None, trace_path=str(path))) as engine:
            for prompt in prompts[:2]:
                engine.ask(prompt, max_tokens=4)
            engine.answer(prompts[2:], max_tokens=6)
            aborted = engine.submit(second, max_tokens=500)
            engine.step()
            engine.abort(aborted)
            engine.settle()
            engine.ask(second, max_tokens=1)
            return counters_of(engine)

    counters = fork(scenario)
    assert counters["trace_requests"] >= 5
    trace = Trace(path)
    recorded = list(trace)
    assert (trace.resolved_format(), trace.tokens_per_block) == ("kvtier", block)
    # A prompt below one block has nothing that could be cached, and no line.
    lengths = [(len(request.block_ids), request.input_tokens) for request in recorded]
    assert lengths == [
        (5, 5 * block + 3),
        (3, 3 * block),
        (5, 5 * block + 3),
        (7, 7 * block + 3),
        *[(3, 3 * block)] * 2,
    ]
    outputs = [request.output_tokens for request in recorded]
    assert outputs[:4] + outputs[5:] == [4, 4, 6, 6, 1] and outputs[4] < 500
    assert recorded[0].block_ids == recorded[2].block_ids == recorded[3].block_ids[:5]
    assert not set(recorded[0].block_ids) & set(recorded[1].block_ids)
    assert [request.time_s for request in recorded] == sorted(request.time_s for request in recorded)

    out = tmp_path / "result.json"
    assert (
        main(["simulate", str(path), "--policy", "lru,infinite", "--capacity-blocks", "100", "--json", str(out)]) == 0
    )
    rows = {row["policy"]: row for row in json.loads(out.read_text())}
    assert rows["lru"]["asked_blocks"] == rows["infinite"]["asked_blocks"] == 26
    assert rows["lru"]["hit_blocks"] == rows["infinite"]["hit_blocks"] == 16
