"""Tests batches of models without a cache, with their own caches and with states, and the proof that calls may share a
batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching import batch_proof as proof
from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.batching.sharing import shared_call
from parallelformers_ng.batching.whole_rows import whole_logits
from parallelformers_ng.errors import BatchingError
from parallelformers_ng.sharding.cache_names import CACHE
from tests.helpers.rounds_seen import rows_of_each_round, use_short_pieces
from tests.zoo.build import build
from tests.zoo.decoders import decoder
from tests.zoo.recent import latent

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def openai_gpt() -> Any:
    config = tf.OpenAIGPTConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4)
    return build(tf.OpenAIGPTLMHeadModel, config, attention="eager")


def mpt() -> Any:
    config = tf.MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    assert config.use_cache is False
    return build(tf.MptForCausalLM, config, attention="eager")


def xlm() -> Any:
    config = tf.XLMConfig(vocab_size=99, emb_dim=32, n_layers=2, n_heads=4, mask_token_id=7, pad_token_id=2)
    return build(tf.XLMWithLMHeadModel, config, attention="eager")


def minimax() -> Any:
    config = tf.MiniMaxConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8, num_local_experts=4, block_size=4,
        layer_types=["full_attention", "linear_attention"],
    )  # fmt: skip
    return build(tf.MiniMaxForCausalLM, config)


def sparse(heads: int, family: str = "DeepseekV32") -> Any:
    """Return a model whose tokens attend to 4 keys, which an indexer with `heads` heads chooses."""
    experts = {"mlp_layer_types": ["dense", "sparse"]}
    return latent(family, **experts, index_topk=4, index_head_dim=16, index_n_heads=heads)


def twin(cls: Any, config: Any) -> Any:
    return make_twin(cls, config).model


KINDS: dict[str, Callable[[], Any]] = {
    "whole sequences": openai_gpt,
    "whole sequences, no cache asked for": mpt,
    "whole sequences with a token behind, not causal": xlm,
    "a cache that the model makes": minimax,
    "states alone": lambda: twin(tf.xLSTMForCausalLM, tf.xLSTMConfig()),
    "columns that come last": lambda: twin(
        tf.Qwen4ExpForCausalLM,
        tf.Qwen4ExpTextConfig(
            indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=16, indexer_compress_ratio=2
        ),
    ),
    "keys that an indexer chooses": lambda: twin(tf.GlmMoeDsaForCausalLM, tf.GlmMoeDsaConfig()),
    "chunks": lambda: twin(tf.Llama4ForCausalLM, tf.Llama4TextConfig()),
    "experts of odd widths": lambda: twin(tf.InklingForConditionalGeneration, tf.InklingConfig()),
    "layers that run several times": lambda: twin(tf.HrmTextForCausalLM, tf.HrmTextConfig()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_share(kind: str) -> None:
    model = KINDS[kind]()
    if isinstance(model, tf.XLMWithLMHeadModel) and CACHE in inspect.signature(model.forward).parameters:
        pytest.skip("this release of transformers gives XLM a cache")
    if kind == "columns that come last" and tf.__version__.startswith("5.17."):
        pytest.skip("this release keeps the positions of its columns in the model's cache, not in its layers")
    assert "" in [proof.why_alone(model, in_chunks) for in_chunks in (True, False)]


@pytest.mark.parametrize("make", [openai_gpt, mpt, minimax, lambda: sparse(heads=32)])
def test_unusual_models_share_calls_on_ranks(
    monkeypatch: pytest.MonkeyPatch, groups: Any, make: Callable[[], Any]
) -> None:
    use_short_pieces(monkeypatch, 8)
    numbers = torch.Generator().manual_seed(3)
    specs = [
        {
            "input_ids": torch.randint(5, 95, (1, before), generator=numbers),
            "max_new_tokens": after,
            "min_new_tokens": after,
            "do_sample": False,
        }
        for before, after in ((3, 9), (11, 4), (6, 12), (1, 7), (8, 8), (5, 3))
    ]
    whole = make()
    want = [whole.generate(**call) for call in specs]
    with parallelize(make(), workers=groups(2), batching={"rows": 4}) as model:
        rows = rows_of_each_round(model)
        with ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda call: model.generate(**call), specs))
    assert all(map(torch.equal, got, want))
    assert max(rows) > 1, "no two calls were decoded together"


def test_length_dependent_cache_is_refused() -> None:
    config = tf.ReformerConfig(is_decoder=True)
    assert "past_buckets_states" in proof.why_alone(twin(tf.ReformerModelWithLMHead, config), in_chunks=False)


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
def test_choice_between_equal_scores_is_refused(family: str) -> None:
    """Few heads of an indexer give many keys the score 0. By chance, few tokens of the proof depend on the choice."""
    model = sparse(3, family)
    assert all("equal scores" in proof.why_alone(model, in_chunks) for in_chunks in (True, False))


@pytest.mark.parametrize(("dim", "equal"), [((0,), True), ((1,), False), ((), False)])
def test_choice_along_any_dimension_is_seen(dim: tuple[int, ...], equal: bool) -> None:
    with proof._Choices() as choices:
        torch.tensor([[1.0, 2.0], [1.0, 3.0]]).topk(1, *dim)
    assert choices.between_equals == equal


def test_limit_of_keys_counts_padding() -> None:
    """Doge attends to the best 2,048 columns of its cache, padding included: in a batch, longer calls would differ."""
    assert proof.prove(tf.DogeForCausalLM, tf.DogeConfig())[0]


def test_layer_states_are_seen_by_the_proof() -> None:
    """By chance the small model's tokens agree in a batch and alone, but its scores differ."""
    model = twin(tf.RecurrentGemmaForCausalLM, tf.RecurrentGemmaConfig())
    assert all(proof.why_alone(model, in_chunks) for in_chunks in (True, False))


def test_shared_scores_must_equal_solo_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("Llama")
    assert not proof.why_alone(model, in_chunks=True)
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda states: head(states) * (1.0 + 0.01 * (len(states) > 1)))
    assert "scores differ" in proof.why_alone(model, in_chunks=True)


def test_proof_runs_prompts_together_and_in_pieces() -> None:
    model, shapes = decoder("Llama"), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    proof.why_alone(model, in_chunks=True, lengths=((3, 9), (5, 6), (15, 4)))
    assert (2, 5) in shapes
    assert (1, 4) in shapes, "11 tokens run as 4, 4 and 3"


def test_model_looking_ahead_takes_whole_prompts() -> None:
    model = twin(tf.BertGenerationDecoder, tf.BertGenerationConfig(is_decoder=False))
    assert proof.why_alone(model, in_chunks=True)


def test_call_without_cache_shares_no_batch() -> None:
    prompt = {"input_ids": torch.tensor([[11, 12, 13]])}
    assert not isinstance(shared_call(mpt(), prompt, None), str)
    assert "other calls do not" in str(shared_call(mpt(), {**prompt, "use_cache": True}, None))


def test_steps_that_are_not_recorded_say_why() -> None:
    model, captured = openai_gpt(), SimpleNamespace(reason="")
    prompts, rows = Prompts(model, PrefixCache(0)), Rows(model, None, PrefixCache(0), captured)
    prompts.add(BatchRow(0, prepare(model, {"input_ids": torch.tensor([[11, 12, 13]]), "max_new_tokens": 5})))
    prefill = prompts.run(0)
    rows.join(prefill)
    rows.run(1, positions=1000)
    assert captured.reason == "the model has no cache"


def test_argument_that_cannot_be_padded_is_named() -> None:
    model = openai_gpt()
    row = BatchRow(0, prepare(model, {"input_ids": torch.tensor([[11, 12, 13]])}))
    row.call.model_kwargs["boxes"] = torch.zeros(1, 3, 4)
    with pytest.raises(BatchingError, match="argument boxes cannot be padded"):
        whole_logits(model, [row])
