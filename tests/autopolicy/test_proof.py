"""Tests that the proof on a twin refuses wrong policies, and policies whose cuts affect no output."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import plan
from parallelformers_ng.autopolicy import trials
from parallelformers_ng.autopolicy.proposal import Proposal
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.autopolicy.shrink import Shrinking, shrink
from parallelformers_ng.autopolicy.trials import Trials
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.autopolicy.twin_observation import single_layers
from parallelformers_ng.cli.commands import main
from parallelformers_ng.cli.coverage import policy_sources, verify_model
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import CollectiveAbortedError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.layer_uses import is_only_called, reads_parameters
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.quantized import ExpertStack
from parallelformers_ng.sharding.rules import Column, Heads, Row
from tests.zoo.shuffled import ShuffledForCausalLM

QUERIES = {"self_attn.q_proj": Column(), "self_attn.o_proj": Row(), "self_attn.k_proj": Column("key")}


def search(world_size: int = 2, **options: object) -> Trials:
    config = tf.GraniteConfig(
        vocab_size=131, hidden_size=48, intermediate_size=74, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, **options,
    )  # fmt: skip
    return Trials(make_twin(tf.GraniteForCausalLM, config), Selection((), ""), world_size)


def holds(rules: dict[str, object], trials: Trials) -> bool:
    proposal = Proposal("GraniteDecoderLayer", "attention", (rules,))
    return trials.match([proposal], True)


HEADS = Heads("config.num_attention_heads", "config.num_key_value_heads", "num_key_value_groups")


def test_a_right_cut_holds() -> None:
    assert holds({"self_attn": HEADS, **QUERIES, "self_attn.v_proj": Column("key")}, search())


def test_missing_feed_forward_sum_fails_the_proof() -> None:
    wrong = {"mlp.gate_proj": Column(), "mlp.up_proj": Column(), "mlp.down_proj": Row(reduce=False)}
    trials = search()
    assert not holds(wrong, trials)
    assert trials.failure == "its outputs differ"


def test_cut_without_effect_on_outputs_is_void() -> None:
    """A cut of an expert that no token chooses, or of a tower without inputs, changes no output."""
    trials = search()
    for name in [name for name in trials.twin.gradients if "mlp.up_proj" in name]:
        trials.twin.gradients[name][:37] = 0
    right = {"mlp.gate_proj": Column(), "mlp.up_proj": Column(), "mlp.down_proj": Row()}
    assert not holds(right, trials)
    assert "rank 0's part of model.layers.0.mlp.up_proj.weight" in trials.failure


def test_attention_that_cannot_be_cut_is_gathered() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    proof = verify_model(ShuffledForCausalLM(tf.LlamaConfig(vocab_size=131, **sizes)), 2)
    assert proof.equal
    assert proof.cut_share > 0.9
    assert "attention of ShuffledBlock (its outputs differ)" in proof.tried


def test_the_proof_serves_the_large_model() -> None:
    with torch.device("meta"):
        model = tf.CwmForCausalLM(tf.CwmConfig())
    plan = build_plan(model, 2, select(model, world_size=2))
    assert plan.source == "inferred"
    assert max(plan.bytes_per_rank) <= 0.505 * plan.bytes_whole


def test_shrinking_keeps_heads_and_the_layer_pattern() -> None:
    config = tf.Gemma3TextConfig(num_attention_heads=8, num_key_value_heads=2)
    small = shrink(config)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers < config.num_hidden_layers
    assert small.hidden_size / small.head_dim == config.hidden_size / config.head_dim


def test_many_heads_become_fewer_in_the_same_ratio() -> None:
    config = tf.LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    small = shrink(config, Shrinking(heads=3))
    assert (small.num_attention_heads, small.num_key_value_heads) == (16, 2)
    assert small.hidden_size == 16 * small.head_dim


def test_a_rank_that_ends_leaves_nobody_waiting() -> None:
    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            communicator.all_reduce(torch.zeros(1))

    with pytest.raises(CollectiveAbortedError, match=r"rank 1: .* another rank ended without it"):
        run_ranks(2, body)


class Reader(nn.Module):
    """A module that reads the weight of its first layer and calls its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6)
        self.called = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x) @ self.table.weight.T


class Caller(nn.Module):
    """A module that calls its layers, whatever their data type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def test_layer_with_read_weight_is_not_proven() -> None:
    assert not is_only_called(Reader(), "table")
    assert is_only_called(Caller(), "layers.0")
    both = nn.ModuleDict({"reader": Reader(), "caller": Caller()})
    assert [path for path, _ in single_layers(both, set(), 0)] == ["caller.layers.0"]
    assert not list(single_layers(both, {"caller.layers.0"}, 0))


class Rows(nn.Embedding):
    """An embedding that looks up positions computed by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[2 : 2 + x.shape[1]]


class NormedRows(nn.Embedding):
    """An embedding that needs whole rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().forward(x), dim=-1)


def test_embedding_is_cut_by_columns_without_own_arithmetic() -> None:
    tables = {"rows": Rows(9, 6), "normed": NormedRows(9, 6), "layered": Rows(9, 6)}
    tables["layered"].norm = nn.LayerNorm(6)
    model = Caller()
    for name, table in tables.items():
        model.add_module(name, table)
    assert [name for name in tables if is_only_called(model, name)] == ["rows"]


UNREADABLE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x):
        return x + self.down(self.up(x.to(self.up.weight.dtype)).relu())


class Rows(nn.Embedding):
    def forward(self, x):
        return self.weight[2 : 2 + x.shape[1]]


class TypedModel(tf.PreTrainedModel):
    config_class = tf.LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.table, self.block, self.rows = nn.Embedding(config.vocab_size, 48), Block(), Rows(20, 48)
        self.post_init()

    def forward(self, input_ids):
        return self.block(self.table(input_ids) + self.rows(input_ids))
"""


def test_class_without_readable_source_is_sharded() -> None:
    """Python finds no source of a class that was typed at a prompt."""
    scope: dict[str, Any] = {"nn": nn, "tf": tf, "__name__": __name__}
    exec(UNREADABLE, scope)
    model = scope["TypedModel"](tf.LlamaConfig(vocab_size=64))
    assert {name for name in ("table", "rows", "block.up") if is_only_called(model, name)} == {"table"}
    assert reads_parameters(model, "block.up")
    assert plan(model, 2).tensors["block.up.weight"].bytes_on(0) == 48 * 48 * 4


def test_large_table_is_cut_small_one_not() -> None:
    """Position embeddings are a third of this tiny model's bytes, but almost nothing of a real model's bytes."""
    config = tf.BertConfig(
        vocab_size=131, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=74,
        max_position_embeddings=512,
    )  # fmt: skip
    with torch.device("meta"):
        small, large = tf.BertForMaskedLM(config), tf.BertForMaskedLM(tf.BertConfig())
    name = "bert.embeddings.position_embeddings.weight"
    assert build_plan(small, 2, select(small)).tensors[name].rule == "leftover"
    assert build_plan(large, 2, select(large)).tensors[name].is_replicated


def test_plan_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bert", "--num-gpus", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["source"] == "written"
    assert len(printed["bytes_per_rank"]) == 2


def test_plan_of_bare_model_type_names_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["plan", "gpt2"], ["verify", "gpt2"]):
        assert main(command) == 0
        assert capsys.readouterr().out.startswith("'gpt2' is a model type: the result is for the default configuration")
    tf.GPT2Config().to_json_file(tmp_path / "config.json")
    assert main(["plan", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out.startswith("GPT2LMHeadModel on 2 ranks")


def test_verify_compares_weights_in_few_bits_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["verify", "gpt2", "--quantize", "int4"]) == 0
    assert "int4     48 tensors" in capsys.readouterr().out
    whole = ExpertStack.whole
    monkeypatch.setattr(ExpertStack, "whole", lambda self: whole(self) * 1.01)  # spoils the experts of ranks
    assert main(["verify", "gpt2", "--quantize", "fp8"]) == 1
    assert "its outputs differ in fp8" in capsys.readouterr().out


def test_verify_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "gpt2"]) == 0
    assert "GPT2LMHeadModel on 2 ranks: equal; policy: written" in capsys.readouterr().out


def test_every_model_type_has_a_source() -> None:
    sources = policy_sources()
    assert sources["llama"] == "written"
    assert sources["cwm"] == "inferred"
    assert sources["codegen"] == "inferred"
    assert set(sources) >= {"bert", "t5", "vit"}


@pytest.mark.parametrize(
    ("generate", "failure"),
    [(torch.rand, "its greedy tokens are random"), (torch.ones, ""), (lambda n: torch.rand(n) * 0, "")],
)
def test_random_greedy_tokens_prove_nothing(generate: Any, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of block diffusion draw numbers in `generate`, whatever it was told; ranks that are threads share them."""
    monkeypatch.setattr(trials, "sharing_copy", lambda model: model)
    monkeypatch.setattr(trials, "_generate", lambda model, inputs: [generate(3)])
    twin: Any = SimpleNamespace(
        runs_whole=True, model=SimpleNamespace(can_generate=lambda: True), probes=[SimpleNamespace(inputs={})],
        tolerance=1e-4,
    )  # fmt: skip
    attempt = trials.Trials(twin, None, 2)  # type: ignore[arg-type]
    assert (attempt.prompt is None) == bool(failure)
    assert attempt.failure == failure
