"""Compares forecasts with published figures, and observations on `meta` with running models."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from parallelformers_ng import ParallelError, UnsupportedModelError, forecast, plan
from parallelformers_ng.cli import commands as cli
from parallelformers_ng.planner import measured
from parallelformers_ng.planner.devices import DEVICES, Device
from parallelformers_ng.planner.forecast import Arrangement, Forecast
from parallelformers_ng.planner.measured import MEASURED as measured_steps
from parallelformers_ng.planner.measured import MeasuredStep
from parallelformers_ng.planner.observation import Observation, observe, tensors_in

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
LLAMA_2_7B: dict[str, Any] = {}  # transformers' defaults
LLAMA_3_8B = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_2_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
PUBLISHED = {
    "Llama-2-7B": (LLAMA_2_7B, {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}),
    "Llama-3.1-8B": (LLAMA_3_8B, {1: 93.83, 2: 149.1, 4: 217.21, 8: 276.01}),
    "Llama-2-70B": (LLAMA_2_70B, {2: 21.32, 4: 38.01, 8: 62.5}),
}
"""Number of A100-80GB → tokens per second of gpt-fast in bf16, by its README: one sequence, a short prompt."""


def on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def seen(config: PreTrainedConfig, ranks: int = 1, batch: int = 2, length: int = 64) -> Observation:
    model = on_meta(config)
    return observe(model, plan(model, ranks), 0, batch, length)


@pytest.mark.parametrize(
    "name", ["Llama-2-7B", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Llama-3.1-8B", "Llama-2-70B"))]
)
def test_decoding_is_as_fast_as_gpt_fast_measured(name: str) -> None:
    sizes, figures = PUBLISHED[name]
    model = on_meta(LlamaConfig(**sizes))
    prediction = forecast(model, device="a100", num_gpus=8, length=205)
    speeds = {each.tensor: each.tokens_per_second for each in prediction.arrangements if each.pipeline == 1}
    assert {count: speeds[count] for count in figures} == pytest.approx(figures, rel=0.1)


@pytest.mark.slow
def test_measured_steps_have_the_planners_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the measured figures would scale a forecast that the planner no longer makes."""
    monkeypatch.setattr(measured, "MEASURED", [])
    model = on_meta(LlamaConfig(**LLAMA_3_8B))
    for step in measured_steps:
        quantize = None if step.weights == "bfloat16" else step.weights
        told = forecast(model, device=step.device, num_gpus=1, batch=step.rows, length=576, quantize=quantize)
        speed = told.arrangements[0].tokens_per_second
        assert speed is not None
        assert speed / step.rows == pytest.approx(step.computed, rel=0.01), step


def test_measured_steps_scale_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement counts for the same card, number of ranks and weights, and for as many rows or more."""
    model = on_meta(LlamaConfig(**SMALL))

    def told(batch: int) -> Forecast:
        return forecast(model, device="a100", num_gpus=2, batch=batch, length=16)

    def speeds(prediction: Forecast) -> dict[int, float | None]:
        return {each.tensor: each.tokens_per_second for each in prediction.arrangements if each.pipeline == 1}

    computed = told(4)
    assert computed.notes[-1] == "The speeds are computed: this library was not measured on such a device."
    step = MeasuredStep("a100", 1, "bfloat16", 4, measured=300.0, computed=200.0)
    others = [dataclasses.replace(step, **changed, measured=1.0) for changed in ({"rows": 5}, {"weights": "int8"})]
    monkeypatch.setattr(measured, "MEASURED", [step, *others, dataclasses.replace(step, rows=1, measured=1.0)])
    scaled = told(4)
    monkeypatch.setattr(measured, "MEASURED", [dataclasses.replace(step, device="h100")])
    elsewhere = told(4)
    assert speeds(elsewhere) == speeds(computed)
    assert speeds(scaled)[2] == speeds(computed)[2]
    assert speeds(scaled)[1] == pytest.approx(1.5 * (speeds(computed)[1] or 0))
    assert scaled.notes[-1] == (
        "Scaled by measurements: one rank of 1, 8B shape, bfloat16, 4 rows: 300 steps/s, computed 200."
        " Other speeds, and all sums, are computed."
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_read_quantized_weights_once(ranks: int) -> None:
    """A byte less for each weight of the layers; the scales of the outputs are read in addition."""
    model = on_meta(LlamaConfig(**SMALL))
    plain, small = (observe(model, plan(model, ranks, quantize=scheme), 0, 1, 16).step for scheme in (None, "int8"))
    layers = sum(weight.numel() for weight in model.model.layers.parameters() if weight.ndim == 2) / ranks
    read, read_less = (sum(work.moved for work in step if not work.fuses) for step in (plain, small))
    scales = 2 * sum(len(weight) for weight in model.model.layers.parameters() if weight.ndim == 2)
    assert layers - 2 * scales <= read - read_less <= layers


def test_weights_and_caches_equal_those_of_llama2() -> None:
    """By the model card, Llama 2 7B has 6,738,415,616 parameters; a cached token takes 32 layers × 2 × 4096 numbers."""
    prediction = forecast(on_meta(LlamaConfig()), device="h100", num_gpus=1, batch=2, length=128)
    memory = prediction.arrangements[0].memory
    assert memory.weights == pytest.approx(2 * 6_738_415_616, rel=1e-6)
    assert memory.caches == 2 * 128 * 32 * 2 * 4096 * 2


def test_megatron_step_sums_twice_per_layer() -> None:
    """Besides the two sums per layer, a step has one sum for the embedding, and one gather of the logits."""
    assert sum(work.exchanges for work in seen(LlamaConfig(**SMALL), ranks=2).step) == 2 * 2 + 2


def test_surplus_ranks_cache_heads_repeatedly() -> None:
    config = LlamaConfig(**SMALL, num_key_value_heads=2)
    whole, two, four = (sum(seen(config, ranks).caches.values()) for ranks in (1, 2, 4))
    assert (two, four) == (whole / 2, whole / 2)


def test_caches_have_the_length_of_a_window() -> None:
    short, long = (
        seen(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=16), length=length) for length in (64, 128)
    )
    assert sum(short.caches.values()) == sum(long.caches.values()) > 0


def test_latent_attention_caches_576_numbers_per_token() -> None:
    """A token has 512 numbers of the latent and 64 of the rotary key: DeepSeek-V3, arXiv:2412.19437, section 4.2."""
    config = DeepseekV3Config(num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1, vocab_size=512)
    assert sum(seen(config, batch=1, length=32).caches.values()) == 2 * 32 * 576 * 2


def test_states_do_not_grow_with_the_text() -> None:
    config = Mamba2Config(hidden_size=64, num_heads=8, head_dim=16, state_size=16, num_hidden_layers=2, vocab_size=96)
    short, long = (sum(seen(config, length=length).caches.values()) for length in (32, 64))
    assert short == long > 0


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96)])
def test_observed_caches_are_those_of_a_real_run(config: PreTrainedConfig) -> None:
    observed = seen(config, length=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ids = torch.ones(2, 31, dtype=torch.long)
    with torch.inference_mode():
        caches = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        caches = model(ids[:, :1], past_key_values=caches).past_key_values
    assert sum(observed.caches.values()) == sum(tensor.nbytes for tensor in tensors_in(caches))


def test_step_reads_the_experts_that_it_uses() -> None:
    """One token reads only its chosen experts, and a thousand tokens read all experts."""

    def read(chosen: int, batch: int) -> float:
        sizes = SMALL | {"num_local_experts": 8, "num_experts_per_tok": chosen, "num_key_value_heads": 2}
        return sum(work.moved for work in seen(MixtralConfig(**sizes), batch=batch).step)

    experts = 2 * 3 * 64 * 128 * 2  # one expert in each layer
    assert read(2, 1) - read(1, 1) == pytest.approx(experts, rel=0.02)
    assert read(4, 1) - read(1, 1) == pytest.approx(3 * experts, rel=0.02)
    assert read(1, 1000) > 8 * experts


def test_an_encoder_and_a_decoder_are_observed() -> None:
    model = T5ForConditionalGeneration(
        T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=96)
    )
    observation = observe(model, plan(model, 2), 1, 2, 16)
    # 2 layers: self-attention and cross-attention, half of the heads.
    assert sum(observation.caches.values()) == 2 * 2 * (16 + 15) * 2 * 2 * 16 * 4


def test_loaded_model_is_unchanged_by_a_forecast() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forecast(model, num_gpus=2, length=16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {type(module).__module__.partition(".")[0] for module in model.modules()} <= {"transformers", "torch"}


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Define a device with room for little more than half of a small model."""
    monkeypatch.setitem(DEVICES, "small", Device(5e5, 1e9, "pcie4"))


def test_number_of_missing_devices_is_enough(small_device: None) -> None:
    model = on_meta(LlamaConfig(**SMALL | {"num_hidden_layers": 8, "hidden_size": 128}))
    tight = forecast(model, device="small", num_gpus=1, batch=1, length=16)
    assert tight.best is None
    (line,) = [note for note in tight.notes if " devices: " in note]
    devices = int(line.split()[2])
    assert forecast(model, device="small", num_gpus=devices, batch=1, length=16).best is not None
    fewer = forecast(model, device="small", num_gpus=devices - 1, batch=1, length=16).arrangements
    assert not next(each for each in fewer if each.tensor == 1).memory.fits


def test_stages_are_chosen_for_large_layers(small_device: None) -> None:
    model = on_meta(LlamaConfig(**SMALL | {"num_hidden_layers": 8, "hidden_size": 128}))
    arrangements = forecast(model, device="small", num_gpus=8, length=16).arrangements
    staged = next(each for each in arrangements if each.tensor == 1)
    assert staged.memory.fits
    assert staged.pipeline > 1
    assert staged.memory.weights < sum(plan(model, 1).bytes_per_rank)
    assert staged.tokens_per_second is None


def test_too_large_batch_names_one_that_fits(small_device: None) -> None:
    model = on_meta(LlamaConfig(**SMALL))
    full = forecast(model, device="small", num_gpus=1, batch=500, length=64)
    (line,) = [note for note in full.notes if "sequences at a time" in note]
    count = int(line.split()[2])
    largest = forecast(model, device="small", num_gpus=1, batch=count, length=64).best
    assert largest is not None
    memory = largest.memory
    assert memory.weights + memory.caches + memory.activations <= memory.room
    assert forecast(model, device="small", num_gpus=1, batch=count + 1, length=64).best is None


def test_int8_shrinks_the_weights_and_takes_fewer_stages(small_device: None) -> None:
    model = on_meta(LlamaConfig(**SMALL | {"num_hidden_layers": 8, "hidden_size": 128}))

    def ways(devices: int, quantize: str | None) -> list[Arrangement]:
        return forecast(model, device="small", num_gpus=devices, length=16, quantize=quantize).arrangements

    plain, small = (next(each for each in ways(8, precision) if each.tensor == 1) for precision in (None, "int8"))
    assert plain.memory.fits
    assert small.memory.fits
    assert plain.pipeline > small.pipeline > 1
    assert small.memory.weights < plain.memory.room


@pytest.mark.slow
def test_int8_is_advised_if_it_would_fit(small_device: None) -> None:
    model = on_meta(LlamaConfig(**SMALL | {"num_hidden_layers": 8, "hidden_size": 128}))

    def predicted(devices: int, quantize: str | None = None) -> Forecast:
        return forecast(model, device="small", num_gpus=devices, length=16, quantize=quantize)

    fits = next(devices for devices in range(1, 9) if predicted(devices, "int8").best is not None)
    assert predicted(fits).best is None
    assert any("with quantize='int8'" in note for note in predicted(fits).notes)
    if fits > 1:
        assert not any("with quantize='int8'" in note for note in predicted(fits - 1).notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h10"}, "did you mean 'h100'"),
        ({"device": "abacus"}, "known devices: v100, a100-40gb"),
        ({"num_gpus": 0}, "num_gpus is 0; it takes a number, at least 1"),
        ({"length": 1}, "length is 1; it takes a number, at least 2"),
    ],
)
def test_unknown_options_are_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        forecast(on_meta(LlamaConfig(**SMALL)), **options)


def test_models_without_tokens_are_refused_in_words() -> None:
    config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=96)
    with pytest.raises(UnsupportedModelError, match="does not generate"):
        forecast(BertForMaskedLM(config), num_gpus=1, length=16)
    with pytest.raises(UnsupportedModelError, match="returns no cache"):
        forecast(BertLMHeadModel(config), num_gpus=1, length=16)


def test_the_command_prints_a_table_and_json(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--device", "h100", "--num-gpus", "2", "--length", "16"]
    command += ["--batch", "4", "--dtype", "bfloat16"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM in bfloat16 on 2 h100 of one host: 4 sequences of 16 tokens" in text
    assert "Best layout: 1 × 1" in text
    assert cli.main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"]
    assert printed["arrangements"][0]["tensor"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "2"], "--batch is for a forecast; add --device"),
        (["--device", "h100", "--ratio", "1,3"], "--ratio is for a plan; leave it out for a forecast"),
        (["--device", "h100", "--tensor", "2"], "--tensor is for a plan; leave it out for a forecast"),
        (["--device", "h100", "--strategy", "pipeline"], "--strategy is for a plan; leave it out for a forecast"),
    ],
)
def test_flags_without_a_meaning_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "llama", *flags]) == 2
    assert message in capsys.readouterr().err
