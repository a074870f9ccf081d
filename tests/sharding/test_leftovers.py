"""Tests that large layers without a rule are sharded in a way that is right in any model, or are reported."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import plan
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.linear import GatheredColumnParallel
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row
from parallelformers_ng.sharding.stored import StoredInParts
from parallelformers_ng.sharding.wholeness import Alone, alone
from tests.zoo.build import randomise


class Attention(nn.Module):
    """An attention in which a replicated layer processes each head separately, so the layer's input differs between
    ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 4, 6
        self.query, self.mix, self.out = nn.Linear(24, 24), nn.Linear(6, 6), nn.Linear(24, 24)
        self.table = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.query(x).view(*x.shape[:-1], self.heads, self.width)) + self.table.mean(0)
        return self.out(heads.flatten(-2))


class AttentionPolicy(Policy):
    block = "Attention"
    plan = {"": Heads("heads"), "query": Column(), "out": Row()}


class Model(nn.Module):
    """A model with layers of every kind, and with blocks that a policy shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.called = nn.Linear(24, 25)
        self.image = nn.Conv2d(3, 7, 3)
        self.grouped = nn.Conv1d(6, 6, 1, groups=3)
        self.bare = nn.Parameter(torch.randn(5, 25))
        self.memory = nn.GRU(24, 24, batch_first=True)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        x = self.memory(self.attention(x, x, x, need_weights=False)[0])[0]
        pixels = x[..., :12].reshape(len(x), 3, 4, -1)
        return [self.called(x) @ self.bare.T, self.image(pixels), self.grouped(x[:, :6])]


def model() -> Model:
    torch.manual_seed(0)
    return randomise(Model()).eval()  # type: ignore[return-value]


def kinds(shard_plan: ShardPlan, path: str) -> set[Any]:
    return {layer.cls for layer in shard_plan.layers if layer.path == path}


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_leftover_cuts_equal_the_whole_model(world_size: int) -> None:
    whole, x = model().double(), torch.randn(2, 8, 24, dtype=torch.float64)
    shard_plan = build_plan(
        whole, world_size, Selection((AttentionPolicy,), "custom", customs=(AttentionPolicy,)), exhaustive=True
    )
    wanted = whole(x)
    for got in run_ranks(world_size, lambda c: cut(whole, shard_plan, c.rank, c)(x)):
        for mine, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)
    assert not [name for name in shard_plan.replicated if whole.get_parameter(name).ndim > 1]


def test_recurrent_layers_are_cut_if_little_is_replicated() -> None:
    """A small recurrent layer stays whole, because a decoder may read the whole layer for every token."""

    def cut_share(width: int) -> float:
        parts = nn.ModuleDict({"large": nn.Linear(512, 512), "memory": nn.LSTM(width, width)})
        return build_plan(parts, 2, Selection((), "")).cut_share

    assert cut_share(256) == 1.0
    assert 0.5 < cut_share(64) < 1.0


def test_only_layers_with_equal_inputs_get_cut_outputs() -> None:
    shard_plan = build_plan(
        model(), 2, Selection((AttentionPolicy,), "custom", customs=(AttentionPolicy,)), exhaustive=True
    )
    assert kinds(shard_plan, "called") == kinds(shard_plan, "image") == {GatheredColumnParallel}
    assert (
        kinds(shard_plan, "layers.1.mix")
        == kinds(shard_plan, "attention")
        == kinds(shard_plan, "grouped")
        == {StoredInParts}
    )
    alone = build_plan(model(), 2, Selection((), ""), exhaustive=True)
    assert kinds(alone, "layers.1.mix") == {GatheredColumnParallel}


def test_module_with_stored_parts_is_not_whole() -> None:
    shard_plan = build_plan(
        model(), 2, Selection((AttentionPolicy,), "custom", customs=(AttentionPolicy,)), exhaustive=True
    )
    assert StoredInParts in kinds(shard_plan, "layers.1")
    assert alone(shard_plan, "layers.1") is Alone.UNSURE
    assert alone(shard_plan, "layers.1.query") is Alone.PART
    assert alone(shard_plan, "layers.1.mix") is alone(shard_plan, "attention") is Alone.WHOLE


def test_a_parameter_in_two_places_stays_whole() -> None:
    tied = model()
    tied.layers[1].mix.weight = tied.layers[0].mix.weight
    shard_plan = build_plan(tied, 2, Selection((), ""), exhaustive=True)
    assert shard_plan.tensors["layers.0.mix.weight"].is_replicated
    assert not shard_plan.tensors["layers.0.query.weight"].is_replicated


def test_small_layers_stay_whole() -> None:
    large = nn.ModuleDict({"large": nn.Linear(512, 512), "small": nn.Linear(8, 8)})
    shard_plan = build_plan(large, 2, Selection((), ""))
    assert not shard_plan.tensors["large.weight"].is_replicated
    assert shard_plan.tensors["small.weight"].is_replicated


def test_all_weights_of_large_modules_are_cuttable() -> None:
    """A custom stack of experts counts as one parameter without a layer; convolutions do not count."""
    shard_plan = build_plan(model(), 2, Selection((), "", False, leftovers=False))
    assert {"bare", "attention.in_proj_weight", "memory.weight_ih_l0"} <= shard_plan.cuttable
    assert not {"image.weight", "called.bias"} & shard_plan.cuttable
    assert shard_plan.cut_share == 0.0
    assert shard_plan.whole_share == 1.0


def test_ranks_with_more_heads_get_fewer_columns() -> None:
    with torch.device("meta"):
        whole = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                vocab_size=512, hidden_size=640, num_hidden_layers=2, num_attention_heads=10, intermediate_size=1024
            )
        )
    shard_plan = plan(whole, 8)
    even = shard_plan.bytes_whole / 8
    assert max(shard_plan.bytes_per_rank) <= 1.2 * even
    up = shard_plan.tensors["model.layers.0.mlp.up_proj.weight"]
    rows = [shard.shape(up.shape)[0] for shard in up.shards]
    assert sum(rows) == 1024
    assert max(rows[:2]) < min(rows[2:])
    assert all(count % 16 == 0 for count in rows)


@pytest.mark.parametrize(("heads", "world_size"), [(4, 3), (5, 4)])
def test_uneven_shares_equal_the_whole_model(heads: int, world_size: int) -> None:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=128, hidden_size=160, head_dim=32, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=128,
    )  # fmt: skip
    whole = randomise(tf.LlamaForCausalLM(config)).eval().double()
    shard_plan = plan(whole, world_size)
    up = shard_plan.tensors["model.layers.1.mlp.up_proj.weight"]
    rows = [shard.shape(up.shape)[0] for shard in up.shards]
    assert max(rows) - min(rows) >= 8
    ids = torch.tensor([[5, 9, 17, 31]])
    want = whole(ids).logits
    for got in run_ranks(world_size, lambda c: cut(whole, shard_plan, c.rank, c)(ids).logits):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_model_without_forward_is_stored_in_parts(groups: Any) -> None:
    """Methods of a model without a forward give the same results as on the whole model."""
    from parallelformers_ng import parallelize

    config = tf.GlmImageVQVAEConfig(embed_dim=32, latent_channels=32, num_embeddings=50)
    whole = randomise(tf.GlmImageVQVAE(config)).eval()
    states = torch.randn(1, 32, 4, 4)
    with torch.no_grad():
        want = whole.encode(states)
    with parallelize(copy.deepcopy(whole), workers=groups(2)) as parallel:
        got = parallel.encode(states)
        assert parallel.shard_plan.whole_share < 0.1
    assert torch.equal(got.image_tokens, want.image_tokens)
    torch.testing.assert_close(got.quantized_last_hidden_state, want.quantized_last_hidden_state)


class Scaled(tf.GPT2LMHeadModel):
    """A model with a long vector, which is not sharded."""

    def __init__(self, config: tf.GPT2Config) -> None:
        super().__init__(config)
        self.scales = nn.Parameter(torch.ones(20_000))


def test_replicated_bytes_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = tf.GPT2Config(n_embd=48, n_layer=1, n_head=4, vocab_size=131, n_positions=32)
    with caplog.at_level(logging.WARNING, "parallelformers_ng"):
        shard_plan = plan(Scaled(config), 2)
        assert "of the bytes of Scaled stay whole on every rank" in caplog.text
        assert "scales" in caplog.text
        assert f"warning: {shard_plan.warning}" in str(shard_plan)
        caplog.clear()
        assert plan(tf.GPT2LMHeadModel(config), 2).warning == ""
        assert not caplog.text


def test_parallelize_reports_replicated_bytes_too(caplog: pytest.LogCaptureFixture, groups: Any) -> None:
    from parallelformers_ng import parallelize

    whole = Scaled(tf.GPT2Config(n_embd=48, n_layer=1, n_head=4, vocab_size=131, n_positions=32)).eval()
    randomise(whole)
    ids = torch.tensor([[5, 9, 77, 31]])
    with torch.no_grad():
        want = copy.deepcopy(whole)(ids).logits
    with caplog.at_level(logging.WARNING, "parallelformers_ng"), parallelize(whole, workers=groups(2)) as cut_model:
        torch.testing.assert_close(cut_model(ids).logits, want, rtol=1e-4, atol=1e-4)
    assert "stay whole on every rank" in caplog.text
