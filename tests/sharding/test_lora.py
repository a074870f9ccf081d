"""Compares sharded models with peft's adapters with peft in one process. The ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng import UnsupportedModelError
from parallelformers_ng.autopolicy.planning import make_plan
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.kernels import installation, operators
from parallelformers_ng.options import FitOptions, QuantizeOptions
from parallelformers_ng.sharding.active_adapters import layers_with_adapters
from parallelformers_ng.sharding.adapters import without_adapters
from parallelformers_ng.sharding.inject import cut
from tests.helpers.adapters import GREEDY, adapted
from tests.helpers.apart import find_packages
from tests.zoo.build import largest_difference
from tests.zoo.case import Case, text_inputs
from tests.zoo.decoders import decoder, falcon, gpt2
from tests.zoo.families import ALL

find_packages()
import peft  # noqa: E402

FAMILIES = {case.name: case for case in ALL}
SIZES = {
    "llama": (2, 3, 4),
    "gpt2": (2, 3, 4),
    "mixtral": (2, 3, 4),
    "falcon-grouped": (2, 3, 4),
    "t5": (2, 3),
    "bert": (3,),
}

# In one process fp32 differs from fp64 by 4e-4; in fp64 cut models are equal.
ROUNDING = {"idefics2": 1e-3, "blip-2": 1e-3}


def outputs(model: Any, case: Case, generates: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = case.inputs()
    generates = generates and case.generates
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    with torch.no_grad():
        return model(**inputs)[0], model.generate(**prompt, **GREEDY) if generates else torch.zeros(0)


def check(
    model: Any, case: Case, ranks: int, fit: FitOptions | None = None, generates: bool = True, **options: Any
) -> Any:
    """Compare a model sharded over `ranks` ranks with the whole model, and check that the adapters have an effect."""
    inner = model.get_base_model()
    with model.disable_adapter():
        without, _ = outputs(inner, case, generates=False)
    want, tokens = outputs(inner, case, generates)
    assert largest_difference(without, want) > 5e-4
    plan = make_plan(inner, ranks, None, None, fit or FitOptions(), **options)
    for got, chosen in run_ranks(ranks, lambda each: outputs(cut(inner, plan, each.rank, each), case, generates)):
        assert largest_difference(got, want) <= ROUNDING.get(case.name, 1e-4)
        assert torch.equal(chosen, tokens)
    return plan


@pytest.mark.parametrize(("name", "ranks"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_families(name: str, ranks: int) -> None:
    check(adapted(FAMILIES[name].make()), FAMILIES[name], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case.name not in SIZES], ids=lambda case: case.name)
def test_every_written_policy(case: Case) -> None:
    """One forward shows whether the adapters are cut like their layers."""
    try:
        model = adapted(case.make(), use_rslora=False)  # a smaller scale: some models amplify rounding
        outputs(model.get_base_model(), case, generates=False)
    except (ValueError, AttributeError, NotImplementedError) as error:
        pytest.skip(f"peft: {error}")
    try:
        check(model, case, 3, generates=False)
    except UnsupportedModelError as error:
        if case.name not in ("wavlm", "wavlm-stable"):
            with pytest.raises(UnsupportedModelError):  # refused even without adapters
                make_plan(case.make(), 3, None, None, FitOptions())
            pytest.skip(str(error))


def test_a_and_b_are_cut_with_their_layer() -> None:
    plan = check(adapted(decoder("Llama")), FAMILIES["llama"], 3, FitOptions(ratio=(1, 2, 3)))
    layer = plan.tensors["model.layers.0.mlp.down_proj.base_layer.weight"]
    a = plan.tensors["model.layers.0.mlp.down_proj.lora_A.default.weight"]
    assert [shard.ranges for shard in a.shards] == [shard.ranges for shard in layer.shards]
    assert len({shard.shape(a.shape) for shard in a.shards}) == 3
    assert plan.tensors["model.layers.0.mlp.down_proj.lora_B.default.weight"].is_replicated
    assert plan.tensors["model.layers.0.mlp.up_proj.lora_A.default.weight"].is_replicated
    assert not plan.tensors["model.layers.0.mlp.up_proj.lora_B.default.weight"].is_replicated
    assert not [name for name in plan.replicated if "base_layer" in name]


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head(tied: bool) -> None:
    targets = ["embed_tokens", "lm_head", "q_proj", "o_proj"]
    check(adapted(decoder("Llama", tied=tied), target_modules=targets), FAMILIES["llama"], 3)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_to_save_are_cut_like_their_originals(tied: bool) -> None:
    copies = ["embed_tokens", "lm_head", "input_layernorm", "mlp"]
    model = adapted(decoder("Llama", tied=tied), target_modules=["q_proj", "o_proj"], modules_to_save=copies)
    plan = check(model, FAMILIES["llama"], 3)
    assert not plan.tensors["lm_head.modules_to_save.default.weight"].is_replicated


@pytest.mark.parametrize("make", [decoder, gpt2, falcon], ids=["llama", "gpt2", "falcon"])
def test_a_bias_of_b_is_added_once(make: Any) -> None:
    model = make("Llama") if make is decoder else make()
    check(adapted(model, lora_bias=True), Case("", make, text_inputs, generates=True), 3)


def test_adapters_of_different_layers_and_ranks() -> None:
    model = adapted(
        decoder("Llama"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 6}),
        peft.LoraConfig(r=5, target_modules=["v_proj", "down_proj"], lora_alpha=3),
    )
    for names in (["default"], ["adapter2"], ["default", "adapter2"]):
        model.base_model.set_adapter(names)
        check(model, FAMILIES["llama"], 2)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ia3(name: str) -> None:
    targets = {"llama": ["k_proj", "o_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}[name]
    config = peft.IA3Config(target_modules=targets, feedforward_modules=targets[-1:])
    check(adapted(FAMILIES[name].make(), config), FAMILIES[name], 3)


BOTH = FitOptions(strategy="tensor+pipeline", tensor=2)


@pytest.mark.parametrize(("name", "ranks", "fit"), [("llama", 2, None), ("gpt2", 3, None), ("llama", 4, BOTH)])
def test_dora(name: str, ranks: int, fit: FitOptions | None) -> None:
    model = adapted(
        FAMILIES[name].make(), use_dora=True, target_modules={"gpt2": ["c_attn", "c_proj"]}.get(name, "all-linear")
    )
    with torch.no_grad():  # make the magnitudes positive, like norms of weights
        for parameter in (value for key, value in model.named_parameters() if "magnitude" in key):
            parameter.abs_()
    plan = check(model, FAMILIES[name], ranks, fit)
    magnitudes = [tensor for key, tensor in plan.tensors.items() if "magnitude" in key]
    parts = {tensor.bytes_on(0) / tensor.bytes_whole for tensor in magnitudes} - {0}
    assert min(parts) < max(parts) == 1


@pytest.mark.parametrize(("ranks", "tensor"), [(2, None), (4, 2)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "bert"])
def test_stages(name: str, ranks: int, tensor: int | None) -> None:
    """An adapter is in the stage of its layer, in stages of one rank and in stages of two ranks that shard the
    layers."""
    fit = FitOptions(strategy="tensor+pipeline" if tensor else "pipeline", tensor=tensor)
    plan = check(adapted(FAMILIES[name].make()), FAMILIES[name], ranks, fit)
    added = [tensor for name, tensor in plan.tensors.items() if "lora_" in name]
    assert len(added) > 8
    for each in added:
        ranks_with_bytes = [bool(each.bytes_on(rank)) for rank in range(ranks)]
        assert ranks_with_bytes in (
            [True] * (ranks // 2) + [False] * (ranks // 2),
            [False] * (ranks // 2) + [True] * (ranks // 2),
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "tensor"), [(2, None), (4, 2)])
def test_stages_with_embeddings_heads_and_copies(ranks: int, tensor: int | None, tied: bool) -> None:
    model = adapted(
        decoder("Llama", tied=tied),
        peft.LoraConfig(r=3, target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head", "mlp"]),
        peft.LoraConfig(r=2, target_modules=["v_proj"]),
    )
    fit = FitOptions(strategy="tensor+pipeline" if tensor else "pipeline", tensor=tensor)
    for names in (["default"], ["adapter2"], ["default", "adapter2"]):
        model.base_model.set_adapter(names)
        check(model, FAMILIES["llama"], ranks, fit)


@pytest.mark.parametrize(("ranks", "tensor"), [(2, None), (4, 2)])
def test_parts_beside_trained_copies_are_in_all_stages(ranks: int, tensor: int | None) -> None:
    case = FAMILIES["roberta-classifier"]
    model = adapted(case.make(), target_modules=["query", "output.dense"], task_type="SEQ_CLS")
    fit = FitOptions(strategy="tensor+pipeline" if tensor else "pipeline", tensor=tensor)
    plan = check(model, case, ranks, fit)
    copy = plan.tensors["classifier.modules_to_save.default.dense.weight"]
    assert all(copy.bytes_on(rank) for rank in range(ranks))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_on_a_quantized_base(name: str) -> None:
    """The layers are int8. Adapters, and experts with adapters, are not quantized."""
    model = adapted(FAMILIES[name].make())
    inner = model.get_base_model()
    plan = make_plan(inner, 2, None, None, FitOptions(), QuantizeOptions("int8"))
    assert plan.quantized
    assert all(".base_layer." in each and "experts" not in each for each in plan.quantized)
    rounded = copy.deepcopy(inner)
    for each, encoding in plan.quantized.items():
        weight = rounded.get_parameter(each)
        weight.data = encoding.decode(*encoding.encode(weight.detach()), torch.float32)
    want, tokens = outputs(rounded, FAMILIES[name])
    for got, chosen in run_ranks(2, lambda each: outputs(cut(inner, plan, each.rank, each), FAMILIES[name])):
        assert largest_difference(got, want) <= 1e-4
        assert torch.equal(chosen, tokens)


@pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")
@pytest.mark.parametrize(
    "target", ["q_proj", "o_proj", "gate_proj", "down_proj", "input_layernorm", "norm", "self_attn"]
)
def test_decode_kernels_include_every_adapter(target: str) -> None:
    """C computes all layers without adapters, also in a model with adapters in other layers."""
    copies = [target] if "norm" in target or target == "self_attn" else None
    model = adapted(decoder("Llama"), r=4, target_modules=["up_proj"] if copies else [target], modules_to_save=copies)
    inner = model.get_base_model()
    in_c = copy.deepcopy(inner)
    installation._change(in_c, checked=True)
    assert any(isinstance(layer, operators.StreamingLinear) for layer in in_c.modules())
    with torch.inference_mode():
        for names in ((), ("default",)):
            for each in (*layers_with_adapters(inner), *layers_with_adapters(in_c)):
                each._active_adapter = [*names]
            want, got = (each.generate(**text_inputs(), **GREEDY, output_logits=True, return_dict_in_generate=True)
                         for each in (inner, in_c))  # fmt: skip
            assert largest_difference(torch.stack(got.logits), torch.stack(want.logits)) <= 1e-4


def refused(config: Any, **kwargs: Any) -> str:
    model = peft.get_peft_model(decoder("Llama"), config, **kwargs)
    with pytest.raises(ParallelError) as raised:
        make_plan(model.get_base_model(), 2, None, None, FitOptions())
    return str(raised.value)


TARGETS: Sequence[str] = ("q_proj", "down_proj")
OTHERS = {
    "DoraEmbedding": peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True),
    "ALora": peft.LoraConfig(target_modules=TARGETS, alora_invocation_tokens=[5]),
    "vera": peft.VeraConfig(target_modules=["q_proj"]),
    "loha": peft.LoHaConfig(target_modules=TARGETS),
    "ln_tuning": peft.LNTuningConfig(target_modules=["norm"]),
    "TrainableTokens": peft.LoraConfig(target_modules=TARGETS, trainable_token_indices=[1, 2]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_are_refused_by_name(name: str) -> None:
    message = refused(OTHERS[name])
    assert name in message
    assert "merge" in message


def test_a_merged_adapter_is_refused() -> None:
    model = adapted(decoder("Llama"))
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match="unmerge_adapter"):
        make_plan(model.get_base_model(), 2, None, None, FitOptions())


def test_adapter_bypassed_by_modelling_code_is_refused() -> None:
    """WavLM passes the weights of its projections to torch, so adapters do nothing even in one process."""
    model = adapted(FAMILIES["wavlm"].make(), target_modules=["k_proj"]).get_base_model()
    with pytest.raises(UnsupportedModelError, match="reads the weight of"):
        make_plan(model, 2, None, None, FitOptions())


def test_without_adapters_nothing_is_copied() -> None:
    model: nn.Module = decoder("Llama")
    assert without_adapters(model) is model
