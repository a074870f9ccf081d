"""Saves a tiny language model and its tokenizer in the format of `from_pretrained`, without downloads."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.zoo.build import build

WORDS = ["<unk>", *(f"w{number}" for number in range(130))]
"""Whole words, so that a streamer has text after every token."""


def save_tiny_model(folder: Path) -> Path:
    """Save a random Llama with a vocabulary of 131 words that never generates an end token; return the folder."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    build(LlamaForCausalLM, config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without special tokens decoding drops nothing: a text has a word for every token.
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
