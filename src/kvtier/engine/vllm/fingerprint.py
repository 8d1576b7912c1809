"""The namespace of a vLLM engine: all that its cached bytes depend on and that is not in vLLM's block hashes already.

In the hashes are the tokens, LoRA, multimodal inputs and the cache salt. Here are the model, its weights and revision, types,
quantization, layout, instruction set, hash algorithm, chunking and topology.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.identity.namespace import Namespace, file_fingerprint

LAYOUT_VERSION = 1
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def _plain(value: Any) -> Any:
    """What JSON can hold, out of whatever a configuration holds."""
    # Infinity, which Granite and Falcon have in their time step limits, is no JSON: it is kept as that word.
    return json.loads(json.dumps(value, sort_keys=True, default=str), parse_constant=str)


def _weights(model: str, revision: str | None) -> Mapping[str, object]:
    directory = Path(model)
    if not directory.is_dir():
        commit = None
        try:
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(model, "config.json", revision=revision)
            if isinstance(found, str):
                commit = Path(found).parent.name
        except (ImportError, ValueError, OSError):
            pass
        return {"repository": model, "revision": commit or revision or "unknown"}
    files = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    return {"files": {path.name: file_fingerprint(path) for path in files}}


def _shapes(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> dict[str, object]:
    """Type, shape and strides of each layer's cache; the number of blocks depends on memory, not on meaning, and is left out."""
    result: dict[str, object] = {}
    for name, tensor in kv_caches.items():
        shape = ["blocks" if size == num_blocks else size for size in tensor.shape]
        order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
        result[name] = [str(tensor.dtype), shape, order]
    return result


def namespace_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    offloading: OffloadingConfig,
    kv_caches: Mapping[str, torch.Tensor],
    label: str,
) -> Namespace:
    """The namespace; every rank computes the same."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = offloading.parallel
    hf_config = {
        k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    speculative = vllm_config.speculative_config
    fields: dict[str, object] = {
        "layout_version": LAYOUT_VERSION,
        "label": label,
        "vllm": vllm.__version__,
        "weights": _weights(model.model, model.revision),
        "model_config": _plain(hf_config),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "mamba_cache_dtype": str(cache.mamba_cache_dtype),
        "mamba_ssm_cache_dtype": str(cache.mamba_ssm_cache_dtype),
        "quantization": str(model.quantization),
        "speculative_model": str(speculative.model) if speculative is not None else None,
        "kv_cache_layout": str(offloading.kv_cache_layout),
        "attention_backend": str(vllm_config.attention_config.backend),
        "platform": current_platform.device_type,
        "instruction_set": torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else None,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "groups": [
            {
                "tokens_per_block": group.tokens_per_block,
                "layers": list(group.layer_names),
                "kind": type(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec).__name__,
            }
            for group in offloading.groups
        ],
        "caches": _shapes(kv_caches, kv_cache_config.num_blocks),
        "topology": {
            "world": parallel.world_size,
            "tensor": parallel.tp_size,
            "pipeline": parallel.pp_size,
            "prefill_context": parallel.pcp_size,
            "decode_context": parallel.dcp_size,
        },
    }
    return Namespace(_plain(fields))
