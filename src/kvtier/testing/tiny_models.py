"""Tiny checkpoints with random weights, one for each way in which models keep KV: enough to serve on a CPU in seconds.

Weights are drawn with a standard deviation of 0.1 (and not the usual 0.02) so that greedy decoding wanders over the vocabulary
instead of repeating one token: a wrong byte of KV then shows in the tokens. The tokenizer has one token for each byte and two
special ones. Shapes are the smallest that vLLM's CPU kernels take: head dimensions of 32 for attention, 128 for gated delta
nets, the real latent sizes for MLA.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
BYTE_TOKENS = 256
SEED = 20

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """How one checkpoint is made.

    Attributes:
        name: names it here and in test ids.
        architecture: class in `transformers` that holds the weights.
        config: class in `transformers` that holds the sizes.
        sizes: what differs from the sizes common to all.
        groups: kinds of KV state in it, for readers and test selection.
        post_norm_gain: value of the norms after attention and MLP, where the architecture has them. Gemma scales embeddings up
            so much that its layers change nothing with norms of 1 and random weights: it would repeat its last token for ever.
    """

    name: str
    architecture: str
    config: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ("full",)
    post_norm_gain: float | None = None

    @property
    def all_sizes(self) -> dict[str, Any]:
        """Arguments of the configuration class."""
        return {**_COMMON, **self.sizes}


_MODELS = (
    TinyModel("llama", "LlamaForCausalLM", "LlamaConfig", {"head_dim": 32, "num_hidden_layers": 4}),
    TinyModel(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "num_hidden_layers": 6,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        ("full", "window"),
        post_norm_gain=4.0,
    ),
    TinyModel(
        "gptoss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 32,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        ("full", "window"),
    ),
    TinyModel(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "num_hidden_layers": 2,
        },
        ("mla",),
    ),
    TinyModel(
        "qwen3next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        ("full", "state"),
    ),
    TinyModel(
        "lfm2",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "conv_dim": 256,
            "conv_bias": False,
            "block_dim": 256,
            "block_ff_dim": 512,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        ("full", "state"),
    ),
    TinyModel(
        "granite4",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "num_key_value_heads": 8,
            "shared_intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_expand": 2,
            "position_embedding_type": "nope",
            **_MAMBA2,
        },
        ("full", "state"),
    ),
    TinyModel(
        "falconh1",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {"num_key_value_heads": 8, "num_hidden_layers": 4, "mamba_d_ssm": 512, **_MAMBA2},
        ("full", "state"),
    ),
)
TINY_MODELS: dict[str, TinyModel] = {model.name: model for model in _MODELS}


def tiny_checkpoint(name: str, root: Path) -> Path:
    """Directory of the checkpoint `name` under `root`; made there first if it is not yet.

    Safe to call from several processes at once: a checkpoint appears under its name only when it is whole.

    Raises:
        KeyError: no such model; the message lists those there are.
    """
    if name not in TINY_MODELS:
        raise KeyError(f"no tiny model named {name!r}: there are {', '.join(TINY_MODELS)}")
    model = TINY_MODELS[name]
    digest = hashlib.sha256(f"{SEED} {model} {sorted(_COMMON.items())}".encode()).hexdigest()[:8]
    return publish_directory(root / f"{name}-{digest}", lambda path: _write(model, path))


def publish_directory(final: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a directory beside `final` and rename it there, unless `final` exists already.

    A process that dies while writing leaves a directory of another name, which is never taken for the whole one.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.parent / f".{final.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write(partial)
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _write(model: TinyModel, path: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, model.config)(**model.all_sizes)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        weights = getattr(transformers, model.architecture)(config).to(torch.bfloat16)
    if model.post_norm_gain is not None:
        # Gemma's norms multiply by 1 + weight.
        with torch.no_grad():
            for name, weight in weights.named_parameters():
                if "post_" in name and "norm" in name:
                    weight.fill_(model.post_norm_gain - 1.0)
    weights.save_pretrained(path)
    _write_byte_tokenizer(path)


def _write_byte_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert len(vocabulary) == BYTE_TOKENS
    vocabulary |= {"<s>": BOS_TOKEN_ID, "</s>": EOS_TOKEN_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)
