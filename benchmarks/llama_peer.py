"""Runs llama.cpp for `quantized.py`: writes a random model of a given shape and GGUF type, then prints tokens per
second.

Each input line has two numbers: the tokens of the prompt, and the tokens to generate. The program needs only
`llama_cpp` and `gguf`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write(path: str, kind: str, shape: dict[str, int]) -> None:
    """Write a Llama of the given shape with random weights; all matrices have the GGUF type `kind`."""
    stored = gguf.GGMLQuantizationType[kind]
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    vocab_size, heads, kv_heads = shape["vocab_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    width = shape.get("head_dim", hidden // heads)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>".encode() for number in range(vocab_size)])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([1] * vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    numbers = np.random.default_rng(0)

    def matrix(name: str, out: int, width_in: int) -> None:
        weight = (numbers.standard_normal((out, width_in), dtype=np.float32)) * np.float32(0.02)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, stored), raw_dtype=stored)

    matrix("token_embd", vocab_size, hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        matrix(f"{block}.attn_q", heads * width, hidden)
        matrix(f"{block}.attn_k", kv_heads * width, hidden)
        matrix(f"{block}.attn_v", kv_heads * width, hidden)
        matrix(f"{block}.attn_output", hidden, heads * width)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{norm}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    from llama_cpp import Llama

    path = str(Path(sys.argv[1]) / "model.gguf")
    write(path, sys.argv[2], {name: int(value) for name, value in (word.split("=") for word in sys.argv[3:])})
    # Prompts run token by token, too: with several tokens at once, version 0.3.36 crashes on processors with AMX.
    model: Any = Llama(path, n_ctx=2048, n_batch=1, n_ubatch=1, n_threads=2, n_threads_batch=2, verbose=False)
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, tokens = map(int, line.split())
        model.reset()
        model.eval(list(range(100, 100 + prompt)))
        begun = time.perf_counter()
        for number in range(tokens):
            model.eval([200 + number])
        print(tokens / (time.perf_counter() - begun), flush=True)


if __name__ == "__main__":
    main()
