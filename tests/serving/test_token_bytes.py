"""Compares the bytes of tokens with the bytes of the tokens' text."""

from __future__ import annotations

import codecs
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from parallelformers_ng.serving.shapes import TokenBytes
from tests.helpers.real_weights import minilm_folder, smollm2_tokenizer
from tests.helpers.server import serving_on, tiny_tokenizer

TEXT = "Ünïcode, 中文 and 🙂🙃 — wörds  \n<|end|>x"


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's, which writes spaces as ▁ and unknown characters as bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Ucode,andwrsx▁"]
    tokenizer = Tokenizer(
        models.BPE(
            {word: at for at, word in enumerate(dict.fromkeys(words))}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    ("make", "before"),
    [(tiny_tokenizer, ""), (smollm2_tokenizer, ""), (with_byte_fallback, " ")],
    ids=["bytes", "smollm2", "byte fallback"],
)
def test_bytes_of_tokens_are_those_of_their_text(make: Any, before: str) -> None:
    tokenizer = make()
    tokens = tokenizer(TEXT)["input_ids"]
    known = TokenBytes(tokenizer)
    assert b"".join(map(known.bytes, tokens)) == (before + TEXT).encode()
    assert any(known.bytes(token).decode(errors="ignore") == "" for token in tokens)


def test_word_piece_tokens_have_their_decoded_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    known = TokenBytes(tokenizer)
    for token in tokenizer("unaffable words 中")["input_ids"]:
        assert known.text(token) == tokenizer.decode([token])
    assert known.bytes(1 << 20) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_are_told_by_their_bytes(groups, stream):
    tokenizer = tiny_tokenizer()
    with serving_on(groups(2), tokenizer) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        arguments = {"model": "tiny", "prompt": "中🙂", "max_tokens": 20, "temperature": 0, "logprobs": 3, "echo": True}
        answer = client.completions.create(**arguments, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        text = "".join(choice.text for choice in choices)
        told = [choice.logprobs for choice in choices if choice.logprobs]
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=30,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
        ).choices[0]
    words = [word for each in told for word in each.tokens]
    offsets = [offset for each in told for offset in each.text_offset]
    assert words[:3] == ["\\xe4", "\\xb8", "\\xad"]
    assert offsets[:8] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert all(len(top) == 3 for each in told for top in each.top_logprobs if top)
    assert max(offsets) <= len(text)
    content = chat.logprobs.content
    raw = b"".join(bytes(each.bytes) for each in content if not each.token.startswith("<|"))
    assert codecs.decode(raw, errors="replace").rstrip("\ufffd") == chat.message.content.rstrip("\ufffd")
    assert any(each.token.startswith("\\x") for each in content)
    assert all(len({bytes(top.bytes) for top in each.top_logprobs}) == 20 for each in content)
