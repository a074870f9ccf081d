"""Tests that mistakes in a policy are reported: impossible rules when the policy is read, wrong rules by the proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from parallelformers_ng import Column, Gather, HeadNorms, Heads, Part, Policy, Renewed, Row, Slice, parallelize, plan
from parallelformers_ng.cli.commands import main
from parallelformers_ng.cli.coverage import verify_model
from parallelformers_ng.errors import PolicyError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.builder import build_plan, misfit
from parallelformers_ng.sharding.policy_check import check_policy
from parallelformers_ng.sharding.policy_registry import known_policies, written_policies
from tests.zoo.build import build, largest_difference
from tests.zoo.composites import fsmt

HEADS = Heads("num_heads", scaled=("embed_dim", "split_size"))
RIGHT = {
    "attn": HEADS, "attn.c_attn": Column(fused=3), "attn.c_proj": Row(), "mlp.c_fc": Column(), "mlp.c_proj": Row(),
}  # fmt: skip


def gpt2(**options: Any) -> tf.PreTrainedModel:
    config = tf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=6, n_positions=32, **options)
    return build(tf.GPT2LMHeadModel, config)


def policy(**attributes: Any) -> type[Policy]:
    return type("Mine", (Policy,), {"block": "GPT2Block", "plan": RIGHT, **attributes})


def with_rule(path: str, rule: Any) -> dict[str, Any]:
    return {"plan": {**RIGHT, path: rule}}


MISTAKES = [
    (with_rule("attn", Heads("num_heads", scaled="embed_dim")), r"scaled is 'embed_dim'.* tuple.*\('embed_dim',\)"),
    (with_rule("attn", Heads("num_heads", scaled=["embed_dim"])), r"scaled is \['embed_dim'\].* tuple"),
    (with_rule("attn", Heads(4)), r"rule 'attn': query is 4; Heads takes str"),
    (with_rule("attn", Heads("num_heads", layer="xlnet_attn")), r"layer is 'xlnet_attn'.*type\[HeadParallel\]"),
    (with_rule("attn", Heads("num_heads", weights=1.5)), r"weights is 1\.5"),
    (with_rule("attn", Heads("num_heads", more_weights=((2, "1"),))), r"more_weights is \(\(2, '1'\),\)"),
    (with_rule("attn", Heads("num_heads", key="config.none")), r"GPT2Attention has no attribute 'config.none'"),
    (with_rule("mlp", Heads("config.num_heads")), r"GPT2MLP has no attribute 'config.num_heads'"),
    (with_rule("attn.c_attn", Column), r"rule 'attn.c_attn' is the class Column; write Column\(…\), with parentheses"),
    (with_rule("attn.c_attn", "Column"), r"rule 'attn.c_attn' is 'Column'; it takes one of Column, Experts"),
    (with_rule("attn.c_attn", None), r"rule 'attn.c_attn' is None"),
    (with_rule("attn.c_attn", Column("keys")), r"unit is 'keys'.*did you mean 'key'"),
    (with_rule("attn.c_attn", Column(fused="three")), r"fused is 'three'; Column takes int \| tuple"),
    (with_rule("attn.c_attn", Column(fused=True)), r"fused is True"),
    (with_rule("attn.c_attn", Column(fused=0)), r"fused is 0; it takes the number of parts, 1 or more"),
    (with_rule("attn.c_attn", Column(fused=())), r"fused is \(\)"),
    (with_rule("attn.c_attn", Column(fused=5)), r"width 144, which is not a multiple of 30, the heads of its 5 parts"),
    (with_rule("attn.c_attn", Column(fused=("query", "keys"))), r"fused is .*did you mean 'key'"),
    (with_rule("attn.c_attn", Column("key", fused=("query", "key"))), r"unit is 'key', and fused names a unit"),
    (with_rule("attn.c_attn", Column(fused=3, interleaved=("query", "key"))), r"fused and interleaved are both set"),
    (with_rule("attn.c_attn", Column(fused=(Part("query", 1.5),))), r"fused: width is 1\.5; Part takes int"),
    (with_rule("attn.c_attn", Column(fused=3, heads="atn")), r"heads is 'atn'.*did you mean 'attn'"),
    (with_rule("attn.c_attn", Column(fused=3, gather="yes")), r"gather is 'yes'; Column takes bool"),
    (with_rule("attn.c_attn", Column(gather=True, widths=("embed_dim",))), r"gather and widths are both set"),
    (with_rule("mlp.c_fc", Column(gather_inputs=True)), r"no rule above it is Heads"),
    (with_rule("mlp", Gather("c_fcc")), r"no layer 'c_fcc'"),
    (with_rule("attn.q_norm", HeadNorms("column")), r"unit is 'column'; HeadNorms takes Literal\['query', 'key'\]"),
    (with_rule("ln_1.weight", Slice("0")), r"dim is '0'; Slice takes int"),
    (with_rule("attn", Renewed("self")), r"the plan has no Heads\(…\) at 'attn.self'"),
    ({"plan": list(RIGHT.items())}, r"plan is \[.*it takes a dictionary"),
    ({"plan": {1: Column()}}, r"plan is \{1: "),
    ({"plan": {}, "plans": RIGHT}, r"plans is set in Mine.*did you mean 'plan'"),
    ({"cut": lambda self: None}, r"cut is a method in Mine"),
    ({"block": 3}, r"block is 3; it takes a class name"),
    ({"optional": "crossattention"}, r"optional is 'crossattention'; it takes a tuple of paths"),
    ({"requires": ("attn",)}, r"requires is \('attn',\); it takes a dictionary"),
    ({"requires": {"attn.nothing": 1}}, r"requires 'attn.nothing', and GPT2Block has no attribute"),
]  # fmt: skip


@pytest.mark.parametrize(("attributes", "words"), MISTAKES, ids=lambda value: value[:40] if type(value) is str else "")
def test_a_mistake_is_an_error_in_words(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=r"(?s)^Mine: .*" + words):
        plan(gpt2(), custom_policies=policy(**attributes))


def test_no_written_policy_has_a_mistake() -> None:
    for written in written_policies():
        check_policy(written)
    claims = Counter(block for written in written_policies() for block in written.blocks())
    assert set(claims.values()) == {1}, claims.most_common(1)


class Mine(Policy):
    block = "GPT2Block"
    plan = RIGHT


class Forgotten(Mine):
    """A policy without `fused=3`: each rank takes one slice of the joint q, k and v, and uses the slice as its own q, k
    and v."""

    plan = {**RIGHT, "attn.c_attn": Column()}


class Doubled(Mine):
    """A policy that sums a result twice."""

    plan = {**RIGHT, "attn.c_proj": Row(reduce=False), "mlp.c_fc": Column()}


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_other_blocks_keep_their_written_policy(side: str) -> None:
    model, other = fsmt(), {"encoder": "decoder", "decoder": "encoder"}[side]
    mine = policy(block=f"fsmt.{side.capitalize()}Layer", plan={"fc1": Column(), "fc2": Row()})
    selection, misfits = known_policies(model, mine, 2)
    shard_plan = build_plan(model, 2, replace(selection, leftovers=False))
    cut = {name for name, tensor in shard_plan.tensors.items() if not tensor.is_replicated}
    assert not misfits
    assert {f"model.{side}.layers.0.fc1.weight", f"model.{other}.layers.0.self_attn.q_proj.weight"} <= cut
    assert f"model.{side}.layers.0.self_attn.q_proj.weight" not in cut


class OwnBlock(GPT2Block):
    """A block of the program, with a policy of the program, beside the library's blocks."""


def test_subclass_of_written_block_takes_custom_policy() -> None:
    model = gpt2()
    model.transformer.h[1].__class__ = OwnBlock
    mine = policy(block="OwnBlock", plan={"mlp.c_fc": Column(), "mlp.c_proj": Row()})
    selection, misfits = known_policies(model, mine, 2)
    shard_plan = build_plan(model, 2, replace(selection, leftovers=False))
    cut = {name for name, tensor in shard_plan.tensors.items() if not tensor.is_replicated}
    assert not misfits
    assert {"transformer.h.1.mlp.c_fc.weight", "transformer.h.0.attn.c_attn.weight"} <= cut
    assert "transformer.h.1.attn.c_attn.weight" not in cut


def test_rule_without_layer_is_found_beside_custom_blocks() -> None:
    model = gpt2()
    model.transformer.h[1].__class__ = OwnBlock
    wrong = policy(**with_rule("mlp.nothing", Column()))
    assert "'mlp.nothing' matches no layer" in misfit(model, wrong, 2, (policy(block="OwnBlock"),))


@pytest.mark.parametrize("wrong", [Forgotten, Doubled])
def test_policy_with_wrong_numbers_is_refused(wrong: type[Policy], groups: Callable[[int], WorkerGroup]) -> None:
    model = gpt2()
    with pytest.raises(
        PolicyError, match=rf"{wrong.__name__} on 2 ranks: .*other outputs sharded than whole.*prove=False"
    ):
        parallelize(model, workers=groups(2), custom_policies=wrong)
    with torch.no_grad():  # the model is unchanged
        want = model(torch.arange(5)[None]).logits
    assert not verify_model(model, 2, wrong).equal
    parallelize(model, workers=groups(2), custom_policies=wrong, prove=False)
    assert largest_difference(model(torch.arange(5)[None]).logits, want) > 0.1
    model.deparallelize()


def test_a_right_policy_is_proven_once(groups: Callable[[int], WorkerGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    from parallelformers_ng.autopolicy import proof

    proofs: list[str] = []
    real = proof._objection
    monkeypatch.setattr(proof, "_objection", lambda *args: proofs.append("proof") or real(*args))
    monkeypatch.setattr(proof, "_RESULTS", {})
    ids = torch.arange(3, 9)[None]
    for _ in range(2):
        model = gpt2()
        with torch.no_grad():
            want = model(ids).logits
        parallelize(model, workers=groups(2), custom_policies=Mine)
        assert largest_difference(model(ids).logits, want) <= 1e-4
        model.deparallelize()
    assert proofs == ["proof"]
    parallelize(gpt2(activation_function="relu"), workers=groups(2), custom_policies=Mine).deparallelize()
    assert proofs == ["proof", "proof"]


def test_a_policy_that_no_twin_proves_is_refused(groups: Callable[[int], WorkerGroup]) -> None:
    model = gpt2()
    model.transformer.h[0].add_module("extra", torch.nn.ModuleDict({"up": torch.nn.Linear(48, 96)}))

    class Extra(Policy):
        block = "ModuleDict"
        plan = {"up": Column()}

    with pytest.raises(PolicyError, match=r"Extra on 2 ranks: .*prove=False"):
        parallelize(model, workers=groups(2), custom_policies=Extra)


FILE = """
from parallelformers_ng import Column, Heads, Policy, Row

class Mine(Policy):
    block = "GPT2Block"
    plan = {
        "attn": Heads("num_heads", scaled=("embed_dim", "split_size")),
        "attn.c_attn": Column(fused=FUSED),
        "attn.c_proj": Row(),
        "mlp.c_fc": Column(),
        "mlp.c_proj": Row(),
    }
"""


def test_policies_of_a_file_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, config = tmp_path / "mine.py", tmp_path / "config.json"
    gpt2().config.to_json_file(config)
    for fused, status in ((3, 0), (1, 1)):
        file.write_text(FILE.replace("FUSED", str(fused)))
        assert main(["verify", str(config), "--policy", str(file)]) == status
    assert "NOT equal; policy: custom" in capsys.readouterr().out
    assert main(["plan", str(config), "--policy", str(file)]) == 0
    assert "Mine" in capsys.readouterr().out
    for text, words in (
        ("import nothing_there", "cannot be read: ModuleNotFoundError"),
        ("x = 1", "defines no policy"),
    ):
        file.write_text(text)
        assert main(["verify", str(config), "--policy", str(file)]) == 2
        assert words in capsys.readouterr().err
