"""Compares all decoder layers in one C call with the modelling code, and tests the cases with a C call per layer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.proof import UNCUT
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import Communicator, SingleCommunicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import CollectiveAbortedError
from parallelformers_ng.kernels import operators
from parallelformers_ng.kernels.decoder_stack import DecoderStack
from parallelformers_ng.kernels.installation import install
from parallelformers_ng.kernels.operators import StreamingLinear, StreamingQuantizedLinear
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.placed import Placed, Stop
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.quantized import hold
from tests.helpers.rank_group import RankGroup, meet
from tests.helpers.step_models import (
    FAMILIES,
    LAYERS,
    cached_step,
    check_generations,
    count_calls,
    distance,
    generate,
    in_c,
    models,
    prompt,
)

pytestmark = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_and_scores_in_fp32(family: str, calls: Counter[str]) -> None:
    check_generations(family, True, calls, {"decoder_layers": 1})


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stack_equals_single_layers_bitwise(family: str, calls: Counter[str]) -> None:
    _, fused = models(family, torch.bfloat16, as_one=True)
    _, layered = models(family, torch.bfloat16)
    got, wanted = generate(fused), generate(layered)
    assert torch.equal(got[1], wanted[1])
    steps = 11 + in_c(3, 7, torch.bfloat16)
    assert calls == {"decoder_layers": steps, "attention_half": LAYERS * steps, "feed_half": LAYERS * steps}


def test_input_states_stay_unchanged() -> None:
    _, fused = models("llama", as_one=True)
    embedded = torch.randn(1, 1, 96)
    kept = embedded.clone()
    with torch.inference_mode():
        cache = DynamicCache(config=fused.config)
        fused(**prompt(1), past_key_values=cache)
        fused(inputs_embeds=embedded, past_key_values=cache)
    assert torch.equal(embedded, kept)


def test_stack_is_a_list_outside_the_model(calls: Counter[str]) -> None:
    _, fused = models("llama", as_one=True)
    layers = fused.model.layers
    assert type(layers) is DecoderStack
    cached_step(fused)
    assert list(layers[:LAYERS]) == list(layers) == [layers[at] for at in range(LAYERS)]
    fused.model.layers = nn.ModuleList(layers)
    calls.clear()
    cached_step(fused)
    assert calls == {"attention_half": 2 * LAYERS, "feed_half": 2 * LAYERS}


def test_stack_runs_the_configured_number_of_layers(calls: Counter[str]) -> None:
    stock, fused = models("llama", as_one=True)
    for model in (stock, fused):
        model.config.num_hidden_layers = LAYERS - 1
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 1e-5
    assert calls == {"attention_half": 2 * (LAYERS - 1), "feed_half": 2 * (LAYERS - 1)}


WATCHED: dict[str, Callable[[Any], nn.Module]] = {
    "layer": lambda layer: layer,
    "mlp": lambda layer: layer.mlp,
    "k_norm": lambda layer: layer.self_attn.k_norm,
}


@pytest.mark.parametrize("name", WATCHED)
def test_layers_with_a_hook_are_called(name: str, calls: Counter[str]) -> None:
    stock, fused = models("qwen3", as_one=True)
    hook_calls: list[nn.Module] = []
    for model in (stock, fused):
        for layer in model.model.layers[1:2]:
            WATCHED[name](layer).register_forward_hook(lambda module, *_: hook_calls.append(module))
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 1e-5
    assert len(hook_calls) == 4  # two models, each for the prompt and the step
    assert calls["decoder_layers"] == 0
    assert calls["feed_half"] >= LAYERS - 1


@pytest.mark.parametrize(
    ("name", "c_calls"), [("layer", 4 * LAYERS), ("mlp", 4 * LAYERS - 2), ("k_norm", 4 * LAYERS - 2)]
)
def test_module_with_own_forward_keeps_it(name: str, c_calls: int, calls: Counter[str]) -> None:
    stock, fused = models("qwen3", as_one=True)
    for model in (stock, fused):
        module: Any = WATCHED[name](model.model.layers[1])
        module.forward = lambda *args, own=module.forward, **kwargs: own(*args, **kwargs) * 0.5
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 1e-5
    assert calls.total() == calls["attention_half"] + calls["feed_half"] == c_calls


def test_requested_hidden_states_cost_nothing_later(calls: Counter[str]) -> None:
    stock, fused = models("qwen2", as_one=True)
    requested_outputs = {"output_hidden_states": True, "output_attentions": True}
    got, wanted = (cached_step(model, **requested_outputs) for model in (fused, stock))
    assert len(got.hidden_states) == len(wanted.hidden_states) == LAYERS + 1
    assert all(distance(mine, its) < 1e-5 for mine, its in zip(got.hidden_states, wanted.hidden_states, strict=True))
    assert calls["decoder_layers"] == 1, "only the prompt runs in one call"
    calls.clear()
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 1e-5
    assert calls == {"decoder_layers": 2}


def test_layers_of_several_types_are_called_singly(calls: Counter[str]) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    stock, fused = models("qwen3", as_one=True, layer_types=types, use_sliding_window=True, sliding_window=5)
    got, wanted = generate(fused), generate(stock)
    assert torch.equal(got[0], wanted[0])
    assert distance(got[1], wanted[1]) < 1e-5
    assert "decoder_layers" not in calls


def test_one_differing_layer_splits_the_stack(calls: Counter[str]) -> None:
    stock, fused = models("llama", as_one=True)
    for model in (stock, fused):
        model.model.layers[2].mlp.act_fn = nn.GELU()
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 1e-5
    assert calls == {"attention_half": 2 * LAYERS, "feed_half": 2 * (LAYERS - 1)}


def test_unequal_caches_are_left_to_the_layers(calls: Counter[str]) -> None:
    _, fused = models("llama", as_one=True)
    with torch.inference_mode():
        cache = DynamicCache(config=fused.config)
        fused(**prompt(1), past_key_values=cache)
        cache.layers[1].crop(-3)
        calls.clear()
        fused(torch.tensor([[5]]), past_key_values=cache)
    assert "decoder_layers" not in calls


def test_replaced_and_moved_weights_are_seen(calls: Counter[str]) -> None:
    stock, fused = models("qwen2", as_one=True)
    cached_step(fused)
    for model in (stock, fused):
        torch.manual_seed(5)
        layer = model.model.layers[1]
        layer.self_attn.v_proj.weight = nn.Parameter(torch.randn_like(layer.self_attn.v_proj.weight))
        layer.mlp.down_proj.weight = nn.Parameter(torch.randn_like(layer.mlp.down_proj.weight))
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 1e-5
    stock.to(torch.bfloat16), fused.to(torch.bfloat16)
    assert distance(cached_step(fused).logits, cached_step(stock).logits) < 2e-2
    assert calls == {"decoder_layers": 6}


def _share(communicator: Communicator, stock: Any, fused: Any) -> Any:
    """Return this rank's part of a model, with the kernels."""
    return cut(fused, build_plan(stock, communicator.world_size, select(stock)), communicator.rank, communicator)


def _scores_of_a_rank(communicator: Any) -> tuple[Tensor, Counter[str]]:
    share = _share(communicator, *models("qwen3", as_one=True))
    with pytest.MonkeyPatch.context() as patch:
        calls = count_calls(patch)
        return generate(share)[1], calls


@pytest.mark.slow
def test_sums_over_the_ranks(two_ranks: RankGroup) -> None:
    wanted = generate(models("qwen3")[0])[1]
    results = two_ranks.run(_scores_of_a_rank)
    for scores, calls in results:
        assert distance(scores, wanted) < 1e-5
        assert torch.equal(scores, results[0][0])
        assert calls == {"decoder_layers": 11 + in_c(3, 7)}


def test_ranks_that_meet_otherwise_sum_after_each_half(calls: Counter[str]) -> None:
    stock, fused = models("qwen3", as_one=True)
    wanted = cached_step(stock).logits
    calls.clear()
    for got in run_ranks(2, lambda communicator: cached_step(_share(communicator, stock, fused)).logits):
        assert distance(got, wanted) < 1e-5
    assert calls == {"attention_half": 4 * LAYERS, "feed_half": 4 * LAYERS}


def test_each_stage_of_a_pipeline_is_one_call(calls: Counter[str]) -> None:
    stock, fused = models("qwen3", as_one=True)
    wanted = cached_step(stock).logits
    shard_plan = in_stages(build_plan(stock, 1, UNCUT), stock, [0.5, 0.5])
    assert len({stop.holders for stop in _stops(shard_plan)}) == 2, "both ranks have layers"
    calls.clear()
    for got in run_ranks(2, lambda rank: cached_step(cut(fused, shard_plan, rank.rank, rank)).logits):
        assert distance(got, wanted) < 1e-5
    assert calls == {"decoder_layers": 4}


def _stops(shard_plan: ShardPlan) -> list[Stop]:
    layers = [layer for layer in shard_plan.layers if layer.cls is Placed and ".layers." in layer.path]
    return [layer.attributes[0]["stop"] for layer in layers]


def test_a_single_rank_has_nothing_to_sum(calls: Counter[str]) -> None:
    stock, fused = models("qwen3", as_one=True)
    calls.clear()
    got = cached_step(_share(SingleCommunicator(Arena.create(1)), stock, fused)).logits
    assert distance(got, cached_step(stock).logits) < 1e-5
    assert calls == {"decoder_layers": 2}


def _step_after_an_abort(communicator: Any) -> str:
    share = _share(communicator, *models("qwen3", as_one=True))
    with torch.inference_mode():
        cache = share(**prompt(1), use_cache=True).past_key_values
        meet(communicator)
        if communicator.rank == 1:
            communicator.abort("rank 1 has had enough")
            return ""
        try:
            share(torch.tensor([[5]]), past_key_values=cache)
        except CollectiveAbortedError as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_an_abort_ends_the_step(two_ranks: RankGroup) -> None:
    try:
        assert "rank 1 has had enough" in two_ranks.run(_step_after_an_abort)[0]
    finally:
        two_ranks.reset()


class Counts(LogitsProcessor):
    """A processor that records, for each token, how often a worker's kernels were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, _tokens: Tensor, scores: Tensor) -> Tensor:
        if not hasattr(self, "calls"):
            self.calls = count_calls(pytest.MonkeyPatch())
        (self.folder / str(os.getpid())).write_text(str(dict(self.calls)))
        return scores


def test_workers_run_all_layers_in_one_call(tmp_path: Path) -> None:
    stock, _ = models("llama")
    wanted = stock.generate(**prompt(1), max_new_tokens=6, do_sample=False)
    model = parallelize(stock, num_gpus=2, workers={"device": "cpu"})
    try:
        tokens = model.generate(
            **prompt(1), max_new_tokens=6, do_sample=False, logits_processor=LogitsProcessorList([Counts(tmp_path)])
        )
        assert torch.equal(tokens, wanted)
    finally:
        model.deparallelize()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{'decoder_layers': 5}"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [None, 32, 64])
@pytest.mark.parametrize("family", ["llama with every bias", "llama with odd sizes", "qwen3"])
def test_integer_weights_run_in_the_same_call(family: str, dtype: torch.dtype, group: int | None, calls) -> None:
    """Compare quantized layers with the same layers and dequantized weights. Most matrices have 8 bits, or 4 bits if
    `group` divides their inputs; one matrix is unquantized."""
    stock, fused = models(family, dtype, as_one=True)
    for path, layer in fused.model.named_modules():
        if type(layer) is StreamingLinear and not path.endswith("1.mlp.up_proj"):
            encoding = Encoding("int8", -1, layer.in_features)
            if group is not None and layer.in_features % group == 0:
                encoding = Encoding("int4", -1, group)
            integers, scales = encoding.encode(layer.weight.detach())
            layer.__class__ = nn.Linear
            stock.model.get_submodule(path).weight.data = encoding.decode(integers, scales, dtype)
            hold(layer, "weight", encoding, integers, scales, dtype)
    install(fused)
    assert isinstance(fused.model.layers[0].mlp.down_proj, StreamingQuantizedLinear)
    tokens, scores = generate(fused, rows=3)
    assert calls["decoder_layers"] == 11 + (dtype is torch.bfloat16)
    wanted_tokens, wanted = generate(stock, rows=3)
    if dtype is torch.float32:
        assert torch.equal(tokens, wanted_tokens)
        assert distance(scores, wanted) < 1e-5
    else:
        alike = tokens[:, -12] == wanted_tokens[:, -12]  # 16-bit rounding may change the best token
        assert alike.any()
        assert distance(scores[1][alike], wanted[1][alike]) < 6e-2


def test_comparison_of_parameters_in_c() -> None:
    values = [object() for _ in range(40)]
    dictionaries = [{"a": value} for value in values]
    names = ["a"] * 40
    assert operators._decode.still_contain(dictionaries, names, values)
    assert operators._decode.still_contain([*dictionaries, {}], [*names, "a"], [*values, None]), "None: no entry"
    dictionaries[39]["a"] = object()
    assert not operators._decode.still_contain(dictionaries, names, values)
    with pytest.raises(TypeError, match="equal lengths"):
        operators._decode.still_contain(dictionaries, names, values[:3])
    with pytest.raises(SystemError):
        operators._decode.still_contain([1], ["a"], [None])


def test_caches_of_the_wrong_size_are_refused(calls: Counter[str]) -> None:
    _, fused = models("qwen3", torch.float32, as_one=True)
    generate(fused)
    stack: DecoderStack = fused.model.layers
    with pytest.raises(TypeError, match=f"{LAYERS} caches"):
        operators._decode.decoder_layers(None, 0, stack.view()._layers, 0, b"", *range(16))
