"""What is checked and set before anything is allocated: versions, vLLM's settings, and what would silently give no hits."""

import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvtier.config import Config, Loaded, load_config
from kvtier.engine.costs import read_break_even
from kvtier.errors import ConfigError
from kvtier.plan.break_even import BreakEven

logger = logging.getLogger(__name__)

KNOWN_VLLM = ("0.32.",)
KNOWN_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
# Names in kv_connector_extra_config that upstream's offloading reads itself.
_UPSTREAM_NAMES = frozenset(
    {"spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "self_describing_kv_events", "canonical_layout"}
)
# What vLLM's processes take to end, beside kvtier's own close.
_TEARDOWN_S = 5
_REPRODUCIBLE_HASHES = frozenset({"sha256", "sha256_cbor"})


def show_log() -> None:
    """Let kvtier's log appear where vLLM's does, unless somebody has given it handlers of its own."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def let_vllm_scan_llvmlite() -> None:
    """Keep vLLM's CPU start-up from tripping over numba, which kvtier uses.

    vLLM looks into the `__dict__` of every object in every loaded module for kernels to replace. llvmlite's library object answers
    to any name with a function, that one too, and the start of a second engine in one process then ends in an AttributeError.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        ffi.lib._fntab.setdefault("__dict__", {})


def read_settings(vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ) -> Loaded:
    """kvtier's settings out of vLLM's configuration and the environment. Raises ConfigError."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kvtier needs vLLM's --kv-transfer-config, see the README")
    extra: dict[str, Any] = {
        name: value for name, value in transfer.kv_connector_extra_config.items() if name not in _UPSTREAM_NAMES
    }
    if "offload_prompt_only" in extra:
        extra.setdefault("store_decode_blocks", not extra["offload_prompt_only"])
        del extra["offload_prompt_only"]
    if transfer.kv_connector_extra_config.get("canonical_layout"):
        raise ConfigError("canonical_layout is true: kvtier stores pages as the engine lays them out; leave it away")
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}: kvtier both stores and loads, set "kv_role": "kv_both"')
    return load_config(extra, environ=environ)


def kv_type_names(vllm_config: VllmConfig) -> list[str]:
    """What the type of this engine's KV cache may be called, "auto" too where it is the model's own."""
    cache_type = str(vllm_config.cache_config.cache_dtype)
    own_type = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return [own_type, "auto"] if cache_type in ("auto", own_type) else [cache_type]


def read_costs(vllm_config: VllmConfig, config: Config) -> BreakEven | None:
    """The break-even file of this model; None where none is set. Raises ConfigError."""
    if config.prefix_cache_break_even_path is None and config.load_planner == "off":
        return None
    model = vllm_config.model_config
    served = model.served_model_name or []
    names = [model.model, *([served] if isinstance(served, str) else served)]
    return read_break_even(config, models=names, kv_dtypes=kv_type_names(vllm_config))


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> None:
    """Refuse, with a way out, what is not known to work. Raises ConfigError."""
    if not vllm.__version__.startswith(KNOWN_VLLM) and not config.accept_unknown:
        raise ConfigError(
            f"vLLM is {vllm.__version__}, and this kvtier is tested with {', '.join(v + 'x' for v in KNOWN_VLLM)}: install that "
            "vLLM, or set accept_unknown=true to try it at your own risk"
        )
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if not isinstance(spec, KNOWN_SPECS) and not config.accept_unknown:
                raise ConfigError(
                    f"this model caches {type(spec).__name__}, which kvtier is not known to restore rightly: serve it without "
                    "kvtier, or set accept_unknown=true to try it at your own risk"
                )


def give_time_to_close(vllm_config: VllmConfig, close_deadline_s: float) -> None:
    """In the front end, once the engine core has been started: let it end by itself before it is killed.

    With `--shutdown-timeout 0`, its default, `vllm serve` kills the engine at the very moment at which it asks it to end, and what is being
    written is lost. The engine core has its own copy of the setting: it goes on aborting requests at once.
    """
    if vllm_config.shutdown_timeout == 0:
        vllm_config.shutdown_timeout = math.ceil(close_deadline_s) + _TEARDOWN_S


def adjust_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Set in vLLM what kvtier needs, and say aloud what would silently give no hits."""
    assert vllm_config.kv_transfer_config is not None
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        logger.info("kvtier: kv_load_failure_policy is recompute: a failed load is a miss, not a failed request")
    cache = vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm == "sha256":
        cache.prefix_caching_hash_algo = "sha256_cbor"
        logger.info(
            "kvtier: prefix_caching_hash_algo is sha256_cbor, which every process and Python version reproduces"
        )
    elif algorithm not in _REPRODUCIBLE_HASHES and "PYTHONHASHSEED" not in os.environ:
        logger.warning(
            "kvtier: prefix_caching_hash_algo is %s and PYTHONHASHSEED is not set: every process hashes prompts its own way, and "
            "nothing on disk will ever be found again after a restart. Use --prefix-caching-hash-algo sha256_cbor, or set "
            "PYTHONHASHSEED to the same number for every engine",
            algorithm,
        )
    if os.environ.get("PYTHONHASHSEED") == "random":
        logger.warning(
            "kvtier: PYTHONHASHSEED is 'random', which vLLM takes as a fixed seed of that text: hits work, but set a number"
        )
    kinds = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    windowed = any(isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)) for spec in kinds)
    if windowed and cache.prefix_cache_retention_interval == 0:
        logger.warning(
            "kvtier: prefix_cache_retention_interval is 0, and this model has windows or recurrent states: vLLM keeps those at the end of "
            "prompts alone, so that a prefix which other prompts share in part is found from its second sharing on. A multiple of "
            "the block size keeps more of them"
        )
    if not cache.enable_prefix_caching:
        logger.warning(
            "kvtier: vLLM's own prefix caching is off: requests for the same prefix at the same time each load or compute it; "
            "hybrid models need it on to be restored at all"
        )
