"""Tests that CPU ranks with fewer heads compute more columns, for which they prefetch weights while they wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng import api, parallelize, plan
from parallelformers_ng.kernels.decoder_stack import bytes_ahead
from parallelformers_ng.sharding.partition import fill_waits
from tests.zoo.build import largest_difference, randomise

SMALL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
"""Shape of SmolLM2-135M."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(api, "threads_of_rank", lambda ranks: request.param)
    return int(request.param)


def columns(shard_plan: Any, name: str = "model.layers.0.mlp.up_proj.weight") -> list[int]:
    tensor = shard_plan.tensors[name]
    return [shard.shape(tensor.shape)[0] for shard in tensor.shards]


def on_meta(cls: Any, config: Any) -> Any:
    with torch.device("meta"):
        return cls(config)


def llama(**sizes: Any) -> tf.LlamaConfig:
    return tf.LlamaConfig(**{"num_hidden_layers": 2, "vocab_size": 4096, **SMALL, **sizes})


def test_columns_fill_three_quarters_of_a_wait() -> None:
    assert fill_waits([300, 300], 1000, 400) == []
    assert fill_waits([300, 100], 0, 400) == []
    assert fill_waits([300, 100], 1000, 400) == pytest.approx([0.425, 0.575])
    assert fill_waits([300, 100], 1000, 100) == pytest.approx([0.45, 0.55]), "only 100 bytes are prefetched"
    assert fill_waits([400, 400, 100], 1200, 10_000) == pytest.approx([0.271, 0.271, 0.458], abs=1e-3)
    assert fill_waits([900, 100], 400, 10_000) == pytest.approx([0.167, 0.833], abs=1e-3), "each rank has columns"


def test_only_ranks_of_one_thread_fill_waits(threads: int) -> None:
    shard_plan = plan(on_meta(tf.LlamaForCausalLM, llama()), 2)
    assert columns(shard_plan) == ([704, 832] if threads == 1 else [768, 768])
    assert columns(shard_plan, "model.embed_tokens.weight") == [2048, 2048], "nobody waits before the head"


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (tf.LlamaForCausalLM, llama(num_attention_heads=8, num_key_value_heads=4, head_dim=64)),
        (tf.MixtralForCausalLM, tf.MixtralConfig(num_hidden_layers=2, num_local_experts=2, **SMALL)),
        (tf.BertModel, tf.BertConfig(num_hidden_layers=2, num_attention_heads=9, hidden_size=576)),
    ],
    ids=["equal heads", "experts", "encoder"],
)
def test_other_plans_stay_even(cls: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(cls, config)
    plans = []
    for threads in (1, 2):
        monkeypatch.setattr(api, "threads_of_rank", lambda ranks, threads=threads: threads)
        plans.append(plan(model, 2).tensors)
    assert plans[0] == plans[1]


def test_prefetched_bytes_are_of_dense_layers() -> None:
    assert bytes_ahead(on_meta(tf.LlamaForCausalLM, llama(num_hidden_layers=3))) == 3 << 20
    assert bytes_ahead(on_meta(tf.GPT2LMHeadModel, tf.GPT2Config(n_layer=2))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_fill_waits_equal_the_model(dtype: torch.dtype, threads: int, groups: Any) -> None:
    model = randomise(tf.LlamaForCausalLM(llama(tie_word_embeddings=True))).to(dtype).eval()
    ids = torch.arange(5, 17)[None]
    parallel = parallelize(copy.deepcopy(model), workers=groups(2))
    assert len(set(columns(parallel.shard_plan))) == (2 if threads == 1 else 1)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want, got = model.generate(ids, **options), parallel.generate(ids, **options)
    if dtype is torch.float32:
        assert torch.equal(got.sequences, want.sequences)
        assert max(map(largest_difference, got.logits, want.logits)) <= 1e-4
    else:
        assert largest_difference(got.logits[0].float(), want.logits[0].float()) <= 0.05
    parallel.deparallelize()
