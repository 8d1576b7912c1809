"""The KV cache of a real text under a real model, for benchmarks. Needs torch and transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

KV = npt.NDArray[np.uint16]


def kv_of_text(model: Path, text: Path, tokens_max: int) -> KV:
    """What plain attention of `model` keeps for the first `tokens_max` tokens of `text`.

    Returns bfloat16 patterns as uint16, (layers, 2, tokens, heads, dim): keys, then values. `model` is a Hugging Face directory of a causal language
    model. Raises ConfigError where model or text cannot be read, or the model keeps something else than keys and values.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"running a model needs torch and transformers ({error}): install them, or give the KV as a file"
        ) from error
    try:
        tokens = AutoTokenizer.from_pretrained(model, local_files_only=True)(
            text.read_text(), return_tensors="pt"
        ).input_ids[:, :tokens_max]
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model} or text {text} cannot be read: {error}") from error
    with torch.inference_mode():
        cache = network(tokens, use_cache=True).past_key_values
    layers: list[Any] = []
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            raise ConfigError(
                f"model {model} keeps a {type(layer).__name__}, not keys and values: choose one of plain attention"
            )
        layers.append(torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2))
    kv: KV = torch.stack(layers).contiguous().view(torch.uint16).numpy()
    return kv
