"""The namespace of a vLLM engine: all that its cached bytes depend on and that is not in vLLM's block hashes already.

In the hashes are the tokens, LoRA, multimodal inputs and the cache salt. Here are the model, its weights and revision, types,
quantization, layout, instruction set, hash algorithm, chunking and topology.
"""

import math
import os
import re
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

LAYOUT_VERSION = 2
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_NOT_THE_MODEL = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def _plain(value: Any) -> Any:
    """What JSON can hold, out of whatever a configuration holds: the same in every process, so without addresses and the order of sets."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # Infinity, which Granite and Falcon have in their time step limits, is no JSON: it is kept as a word.
        return value if math.isfinite(value) else str(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def _model_fields(config: Any) -> Any:
    """A model's configuration without what says where it lies or who wrote it, in nested ones too."""
    if isinstance(config, Mapping):
        return {name: _model_fields(item) for name, item in config.items() if name not in _NOT_THE_MODEL}
    return config


def _weights(model: str, revision: str | None, commit: str | None = None) -> Mapping[str, object]:
    """What tells one set of weights from another; `commit` is the one that the configuration came from, where that is known."""
    path = Path(model)
    if path.is_file():
        return {"files": {path.name: file_fingerprint(path)}}
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
        return {"files": {file.name: file_fingerprint(file) for file in files}}
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(found, str):
            commit = Path(found).parent.name
    except (ImportError, ValueError, OSError):
        pass
    return {"repository": model, "revision": commit or revision or "unknown"}


def _shapes(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> dict[str, object]:
    """Type, shape and strides of each layer's cache; the number of blocks depends on memory, not on meaning, and is left out.

    Blocks come first. Kernels may see each as several of their own: how many, says something, and is kept.
    """
    result: dict[str, object] = {}
    for name, tensor in kv_caches.items():
        blocks, *rest = tensor.shape
        shape = [["blocks", blocks // num_blocks] if blocks % num_blocks == 0 else blocks, *rest]
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
    speculative = vllm_config.speculative_config
    fields: dict[str, object] = {
        "layout_version": LAYOUT_VERSION,
        "label": label,
        "vllm": vllm.__version__,
        "weights": _weights(model.model, model.revision, getattr(model.hf_config, "_commit_hash", None)),
        "model_config": _plain(_model_fields(model.hf_config.to_dict())),
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
