"""Tests that twins of unusual models keep the properties that the code needs, and that tables are sharded by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import plan
from parallelformers_ng.autopolicy import twin_making
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.autopolicy.shrink import Shrinking, shrink
from parallelformers_ng.autopolicy.shrink_trial import shrink_by_trial
from parallelformers_ng.autopolicy.trials import Trials, comparable_probes
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.autopolicy.twin_observation import observe
from parallelformers_ng.cli.coverage import verify_model
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.layer_uses import is_only_called
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.rules import Policy, Stored


def unnamed(method: Callable) -> Callable:
    """Wrap a method without keeping its name or signature."""

    def wrapper(*args: object) -> object:
        return method(*args)

    return wrapper


class Quantizer(nn.Module):
    """A layer that finds the nearest row of a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Embedding(11, 6)

    @unnamed
    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, self.codebook.weight).argmin(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.codebook(self.nearest(x))


class CodebookPolicy(Policy):
    block = "Quantizer"
    plan = {"codebook": Stored()}


def test_table_read_by_forward_is_sharded_by_rows() -> None:
    model, x = Quantizer(), torch.randn(4, 6)
    for selection in (Selection((CodebookPolicy,), "custom", False), Selection((), "inferred", True)):
        plan = build_plan(model, 3, selection)
        assert [shard.shape((11, 6)) for shard in plan.tensors["codebook.weight"].shards] == [(4, 6), (4, 6), (3, 6)]
        got = run_ranks(3, lambda c, plan=plan: cut(model, plan, c.rank, c)(x))
        assert all(torch.equal(mine, model(x)) for mine in got)


def test_a_decorator_hides_no_weight_that_is_read() -> None:
    assert not is_only_called(Quantizer(), "codebook")


def test_experts_that_stay_whole_count_as_cuttable() -> None:
    with torch.device("meta"):
        model = tf.MixtralForCausalLM(tf.MixtralConfig(num_hidden_layers=1))
    assert build_plan(model, 2, Selection((), "", False, leftovers=False)).cut_share == 0.0
    assert build_plan(model, 2, select(model)).cut_share > 0.99


def test_layer_cut_within_block_is_not_compared() -> None:
    """A layer that no input reaches has its own probe. If a written policy splits the layer, each rank returns only
    some outputs."""
    config = tf.BertConfig(vocab_size=131, hidden_size=48, num_hidden_layers=1, num_attention_heads=6)
    twin = make_twin(tf.BertModel, config)
    query = "encoder.layer.0.attention.self.query"
    assert query in twin.calls
    alone = Twin(
        twin.model, [*twin.probes, *(probe_of(twin, query))], twin.calls, twin.gradients, single_layers=[query]
    )
    assert not any(
        probe.path == query for probe in comparable_probes(alone, build_plan(twin.model, 2, select(twin.model)))
    )
    assert Trials(alone, select(twin.model), 2).match([], True)


def probe_of(twin: Twin, path: str) -> list:
    layer, x = twin.model.get_submodule(path), torch.randn(2, 48, dtype=torch.float64)
    return [type(twin.probes[0])(path, {"input": x}, [layer(x).detach()])]


def test_heads_narrower_than_sixteen_stay_whole() -> None:
    """Tests often have heads of size 12; half of such a head is too narrow for rotary embeddings."""
    small = shrink(tf.BertConfig(hidden_size=192, num_attention_heads=16))
    assert small.hidden_size % 16 == 0
    assert small.hidden_size // 16 >= 8


def test_sections_of_a_rotated_head_fill_it() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [22, 22, 20]}
    config = tf.Qwen2VLTextConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, rope_parameters=rope)
    small = shrink(config)
    sections = small.rope_parameters["mrope_section"]
    assert sum(sections) == small.hidden_size // 32 // 2
    assert sections[0] == sections[1]


class Renamed(tf.Qwen2VLTextConfig):
    model_type = "renamed"


@pytest.mark.parametrize("heads", [16, 32])
def test_rope_sections_from_code_fill_a_head(heads: int) -> None:
    """The configuration has no rope sections. The code's default sections, 16 : 24 : 24, would exceed the small
    head."""
    config = Renamed(hidden_size=4096, num_attention_heads=heads, num_key_value_heads=8, num_hidden_layers=2)
    assert "mrope_section" not in config.rope_parameters
    small = shrink(config)
    assert sum(small.rope_parameters["mrope_section"]) == small.hidden_size // heads // 2
    assert make_twin(tf.Qwen2VLTextModel, config).runs_whole


def test_layers_sharing_keys_keep_one_per_kind() -> None:
    small = shrink(tf.Gemma3nTextConfig())
    first = small.num_hidden_layers - small.num_kv_shared_layers
    assert 0 < first < small.num_hidden_layers
    assert set(small.layer_types[:first]) == set(small.layer_types[first:]) == set(tf.Gemma3nTextConfig().layer_types)


def test_sections_of_layers_go_on_adding_up() -> None:
    """The model of this test runs its middle layers several times."""
    config = tf.LlamaConfig(num_hidden_layers=16, n_input_layers=4, n_recurrent_layers=9, n_output_layers=3)
    for layers, wanted in ((2, (1, 1, 1)), (5, (1, 3, 1))):
        small = shrink(config, Shrinking(layers=layers))
        assert (small.n_input_layers, small.n_recurrent_layers, small.n_output_layers) == wanted
        assert small.num_hidden_layers == sum(wanted)


def test_a_backbone_gives_as_many_stages_as_before() -> None:
    backbone = tf.Dinov2Config(out_indices=[6, 12], num_hidden_layers=12)
    small = shrink(backbone)
    assert small.num_hidden_layers == len(small.stage_names) - 1 == 2
    assert small.out_indices == [1, 2]


def test_a_state_space_mixer_shrinks_with_its_heads() -> None:
    config = tf.BambaConfig(attn_layer_indices=[1])
    small = shrink(config)
    assert small.mamba_n_heads * small.mamba_d_head == small.mamba_expand * small.hidden_size
    assert small.mamba_chunk_size == 4


NAMED_LIKE_LAYERS = [
    (tf.BigBirdModel, tf.BigBirdConfig(), "num_random_blocks", 3),  # beside each block of keys
    (tf.MobileNetV1Model, tf.MobileNetV1Config(), "min_depth", 8),  # channels
    (tf.AlbertModel, tf.AlbertConfig(), "num_hidden_layers", 2),  # which share their weights: no list has twelve
]


@pytest.mark.parametrize(("cls", "config", "name", "value"), NAMED_LIKE_LAYERS, ids=["blocks", "channels", "shared"])
def test_layer_count_must_match_the_model(
    cls: type[tf.PreTrainedModel], config: tf.PreTrainedConfig, name: str, value: int
) -> None:
    twin = make_twin(cls, config)
    assert twin.runs_whole
    assert getattr(twin.model.config, name) == value


TRIED = {
    "perceiver": (tf.PerceiverForMaskedLM, tf.PerceiverConfig()),  # the heads of 1280 latent channels must divide them
    "cvt": (tf.CvtModel, tf.CvtConfig(num_heads=[6, 6, 6])),  # widths by stage
    "bit": (tf.BitModel, tf.BitConfig()),  # norms over 32 groups of channels
    "focalnet": (tf.FocalNetModel, tf.FocalNetConfig()),  # widths and levels by stage
    "pp_ocrv5_server_rec": (tf.PPOCRV5ServerRecModel, tf.PPOCRV5ServerRecConfig()),  # one stage's must fit the next's
}


@pytest.mark.parametrize("name", TRIED)
def test_unknown_settings_are_shrunk_by_trial(name: str) -> None:
    cls, config = TRIED[name]

    def weigh(tried: tf.PreTrainedConfig) -> int | None:
        try:
            with torch.device("meta"):
                return sum(parameter.numel() for parameter in cls(tried).parameters())
        except Exception:  # as any modelling code may
            return None

    before = config.to_dict()
    small = shrink_by_trial(config, weigh, 4_000_000)
    assert small is not None
    assert weigh(small) <= 4_000_000
    assert config.to_dict() == before
    heads = [key for key in before if "head" in key]
    assert {key: small.to_dict()[key] for key in heads} == {key: before[key] for key in heads}


def test_class_refusing_smaller_sizes_is_left_alone() -> None:
    config = tf.LlamaConfig()
    assert shrink_by_trial(config, lambda tried: 10**9 if tried.to_dict() == config.to_dict() else None, 10**6) is None
    assert shrink_by_trial(config, lambda tried: None, 10**6) is None


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("cvt", "pp_ocrv5_server_rec")]


@pytest.mark.parametrize("name", ["perceiver", *SLOW])
def test_a_large_model_of_such_settings_is_planned(name: str) -> None:
    cls, config = TRIED[name]
    with torch.device("meta"):
        model = cls(config)
    assert plan(model).cut_share > 0.95


ATTENTIONS = [
    (tf.ViTModel, tf.ViTConfig, {"image_size": 30, "patch_size": 2}),
    (tf.HubertModel, tf.HubertConfig, {"conv_dim": (32, 32), "conv_kernel": (8, 8), "conv_stride": (4, 4)}),
    (tf.AlbertModel, tf.AlbertConfig, {"vocab_size": 131, "embedding_size": 16}),
]


@pytest.mark.parametrize(("cls", "kind", "more"), ATTENTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_configuration_with_attentions_is_proven_with_them(
    cls: type[tf.PreTrainedModel], kind: type[tf.PreTrainedConfig], more: dict
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    config = kind(**sizes, **more, attn_implementation="eager")
    config.output_attentions = True
    model = cls(config)
    assert plan(model).cut_share > 0.9
    assert verify_model(model).equal


class Remembering(tf.LlamaForCausalLM):
    """A model that keeps an offset from generation and uses it afterwards, as multimodal models do."""

    offset: torch.Tensor | None = None

    def prepare_inputs_for_generation(self, *args, **kwargs):
        self.offset = torch.ones(2)
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def forward(self, input_ids=None, **kwargs):
        outputs = super().forward(input_ids, **kwargs)
        if self.offset is not None:
            outputs["offset"] = self.offset
        return outputs


def test_generation_state_stays_out_of_cut_copies() -> None:
    twin = make_twin(Remembering, tf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=64))
    trials = Trials(twin, select(twin.model), 2)
    assert trials.prompt is not None, trials.failure
    assert twin.model.offset is None
    assert trials.match([], True), trials.failure


class Trembling(tf.LlamaForCausalLM):
    """A model without float64 whose outputs differ from run to run."""

    step, runs = 0.0, 0

    def forward(self, input_ids=None, **kwargs):
        if self.dtype == torch.float64:
            raise RuntimeError("float32 only")
        self.runs += 1
        outputs = super().forward(input_ids, **kwargs)
        outputs.logits = outputs.logits * (1 + self.step * self.runs)
        return outputs


@pytest.mark.parametrize(("step", "same"), [(2e-7, True), (1e-3, False)])
def test_inexact_runs_draw_no_random_numbers(step: float, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trembling, "step", step)
    twin = make_twin(Trembling, tf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=64))
    assert twin.runs_whole is same
    assert ("draws random numbers" in twin.unreached) is not same


def test_random_model_is_tried_at_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """VITS chooses the length of its sound at random; larger copies chose lengths that took minutes."""
    sizes: list[int] = []

    def counted(model: tf.PreTrainedModel, seed: int) -> Twin:
        sizes.append(model.config.hidden_size)
        return observe(model, seed)

    monkeypatch.setattr(Trembling, "step", 1e-3)
    monkeypatch.setattr(twin_making, "observe", counted)
    make_twin(Trembling, tf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=512))
    assert len(sizes) == 1


REFUSING = [(tf.ViTModel, tf.ViTConfig, "pixel_values"), (tf.BertModel, tf.BertConfig, "input_ids")]


@pytest.mark.parametrize(("cls", "kind", "name"), REFUSING, ids=["image", "text"])
def test_inputs_of_the_same_shapes_are_tried_once(cls: type, kind: type, name: str) -> None:
    tried = []

    def refuse(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tried.append({key: value.shape for key, value in kwargs.items()} | {"dtype": module.dtype})
        raise ValueError("not these")

    model = cls(kind(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=37))
    model.register_forward_pre_hook(refuse, with_kwargs=True)
    observe(model, seed=0)
    assert len([shapes for shapes in tried if name in shapes]) > 2
    assert all(tried.count(shapes) == 1 for shapes in tried)


class Drawing(tf.GPT2LMHeadModel):
    """A model that draws random numbers, and keeps the states of torch's default generator meanwhile."""

    states: list[torch.Tensor] = []

    def __init__(self, config: tf.GPT2Config) -> None:
        super().__init__(config)
        self.states.append(torch.get_rng_state())

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        torch.rand(3)
        self.states.append(torch.get_rng_state())
        return super().forward(input_ids, **kwargs)


def test_twins_leave_the_callers_random_stream() -> None:
    before = torch.get_rng_state()
    twin = make_twin(Drawing, tf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, eos_token_id=1))
    assert Trials(twin, Selection((), "none"), 2).prompt
    assert all(torch.equal(state, before) for state in Drawing.states)  # other threads may draw at these moments
