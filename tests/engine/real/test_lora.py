"""LoRA adapters on a real engine: retrained in place, they are not served what they were before."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import LLAMA, LOGPROBS, assert_same, kvtier_settings
from tests.engine.real.conftest import Fork

from kvtier.testing.vllm.driver import Answer

pytestmark = pytest.mark.engine

LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def write_adapter(model: Path, path: Path, seed: int) -> None:
    """A rank-8 adapter of the attention of every layer, strong enough to change answers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    outputs = {"q_proj": heads * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    torch.manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, 8) * 0.2
    path.mkdir(exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(outputs), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(about))


def test_an_adapter_retrained_in_place_gets_nothing_of_before(
    fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint(LLAMA.model)
    disk, path = tmp_path / "disk", tmp_path / "adapter"
    disk.mkdir()

    def serve(kvtier: bool) -> dict[str, Answer]:
        settings = kvtier_settings(disk, disk_io="auto") if kvtier else None
        with LLAMA.engine(model, kvtier=settings, **LORA) as engine:
            answers: dict[str, Answer] = {}
            for name, lora in (("adapter", ("a", 1, path)), ("base", None)):
                for turn in ("first", "second"):
                    engine.settle()
                    engine.reset_prefix_cache()
                    answers[f"{name} {turn}"] = engine.ask(LLAMA.long, logprobs=LOGPROBS, lora=lora)
            engine.settle()
            return answers

    def scenario(seed: int, kvtier: bool) -> Any:
        fork(lambda: write_adapter(model, path, seed))
        # Its change time has to lie before the start.
        time.sleep(0.2)
        return fork(lambda: serve(kvtier))

    whole = LLAMA.whole_blocks(LLAMA.long_tokens)
    plain, first = scenario(1, False), scenario(1, True)
    assert first["base first"].token_ids != first["adapter first"].token_ids, "the adapter changes nothing"
    for name in ("adapter", "base"):
        assert_same(first[f"{name} first"], plain[f"{name} first"], f"{name} cold")
        assert_same(first[f"{name} second"], plain[f"{name} first"], f"{name} from DRAM")
        assert [first[f"{name} {turn}"].external_tokens for turn in ("first", "second")] == [0, whole]
    restarted = fork(lambda: serve(True))
    for name in ("adapter", "base"):
        assert_same(restarted[f"{name} first"], plain[f"{name} first"], f"{name} after a restart")
        assert restarted[f"{name} first"].external_tokens == whole
    right, retrained = scenario(2, False), scenario(2, True)
    assert right["adapter first"].token_ids != plain["adapter first"].token_ids, "retraining changes nothing"
    assert_same(retrained["adapter first"], right["adapter first"], "the retrained adapter")
    assert [retrained[f"adapter {turn}"].external_tokens for turn in ("first", "second")] == [0, whole]
    assert retrained["base first"].external_tokens == whole
