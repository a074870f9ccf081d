"""Tests options of the forward, threads, submodules, methods and saving: everything except `generate`."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

from parallelformers_ng import parallelize, plan
from parallelformers_ng.errors import NotParallelizedError, ParallelError
from parallelformers_ng.model.parallelized import deployment_of, is_parallelized
from tests.generation.test_generate import FAMILIES, Pair, assert_same
from tests.zoo.build import largest_difference
from tests.zoo.case import image_inputs, seq2seq_inputs, text_inputs, token_ids
from tests.zoo.decoders import decoder
from tests.zoo.readers import blip
from tests.zoo.vision_audio import CASES as VISION_AUDIO


@pytest.fixture(scope="module", params=["gpt2", "t5", "llama"])
def pair(request, groups) -> Iterator[Pair]:
    models = [FAMILIES[request.param]() for _ in range(2)]
    for model in models:
        model.set_attn_implementation("eager")
    inputs = seq2seq_inputs() if request.param == "t5" else text_inputs()
    with parallelize(models[1], workers=groups(2)) as parallel:
        yield Pair(models[0], parallel, inputs)


@pytest.fixture(scope="module")
def llama(groups) -> Iterator[Pair]:
    with parallelize(decoder("Llama"), workers=groups(2)) as parallel:
        yield Pair(decoder("Llama"), parallel, text_inputs())


# -- forward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"output_attentions": True, "output_hidden_states": True},
        {"return_dict": False},
        {"use_cache": False},
        {"labels": True},
    ],
    ids=str,
)
def test_forward_options(pair: Pair, options: dict[str, Any]) -> None:
    if "labels" in options:
        options = {"labels": pair.inputs["input_ids"]}
    inputs = {k: v for k, v in pair.inputs.items() if not ("labels" in options and k == "decoder_input_ids")}
    with torch.no_grad():
        want = pair.whole(**inputs, **options)
    got = pair.parallel(**inputs, **options)
    if isinstance(want, tuple):
        assert_same([x for x in got if isinstance(x, torch.Tensor)], [x for x in want if isinstance(x, torch.Tensor)])
    else:
        assert_same(got, want)


def test_inputs_embeds(llama: Pair) -> None:
    with torch.no_grad():
        embeds = llama.whole.get_input_embeddings()(llama.inputs["input_ids"])
        want = llama.whole(inputs_embeds=embeds).logits
    assert largest_difference(llama.parallel(inputs_embeds=embeds).logits, want) <= 1e-4


def test_ids_outside_vocabulary_raise_as_in_whole_model(llama: Pair) -> None:
    for wrong in (-1, 131):
        with pytest.raises(IndexError, match="out of range"):
            llama.whole(input_ids=torch.tensor([[5, wrong]]))
        with pytest.raises(IndexError, match="out of range"):
            llama.parallel(input_ids=torch.tensor([[5, wrong]]))
    assert llama.parallel(**llama.inputs).logits.isfinite().all()


def test_autocast_of_the_caller(llama: Pair) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        got = llama.parallel(**llama.inputs).logits
        with torch.no_grad():
            want = llama.whole(**llama.inputs).logits
    assert got.dtype == want.dtype
    assert largest_difference(got.float(), want.float()) <= 0.1


# -- threads -----------------------------------------------------------------------------------------------------


def test_threads_get_the_results_of_calls_alone(llama: Pair) -> None:
    def ask(number: int) -> torch.Tensor:
        ids = torch.tensor([[5, 9, 3 + number]])
        sampling = {"do_sample": True, "seed": number} if number % 2 else {}
        return llama.parallel.generate(input_ids=ids, max_new_tokens=4, **sampling)

    alone = [ask(number) for number in range(32)]
    together: list[Any] = [None] * 32

    def ask_again(number: int) -> None:
        together[number] = ask(number)

    threads = [threading.Thread(target=ask_again, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, together, alone))


def test_threads_that_sample_do_not_draw_alike(llama: Pair) -> None:
    ids, together = torch.tensor([[5, 9, 3]]), threading.Barrier(6)

    def ask(_: int) -> tuple[int, ...]:
        together.wait()
        return tuple(llama.parallel.generate(ids, max_new_tokens=30, min_new_tokens=30, do_sample=True)[0].tolist())

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(ask, range(6)))) == 6


# -- the rest of the model ---------------------------------------------------------------------------------------


def test_sub_modules_run_or_refuse_in_words(llama: Pair) -> None:
    with torch.no_grad():
        want = llama.whole.model(**llama.inputs).last_hidden_state
    assert largest_difference(llama.parallel.model(**llama.inputs).last_hidden_state, want) <= 1e-4
    hidden = torch.randn(1, 3, 48)
    assert largest_difference(llama.parallel.lm_head(hidden), llama.whole.lm_head(hidden).detach()) <= 1e-4
    with pytest.raises(ParallelError, match=r"model\.layers\.0\.mlp\.down_proj is cut"):
        llama.parallel.model.layers[0].mlp.down_proj(hidden)


def test_methods_of_the_class_run_on_workers(groups) -> None:
    clip = next(case for case in VISION_AUDIO if case.name == "clip")
    whole, inputs = clip.make(), clip.inputs()
    with torch.no_grad():
        want = whole.get_image_features(pixel_values=inputs["pixel_values"])
    with parallelize(clip.make(), workers=groups(2)) as model:
        assert_same(model.get_image_features(pixel_values=inputs["pixel_values"]), want)


def test_names_types_and_device(llama: Pair) -> None:
    assert isinstance(llama.parallel, type(llama.whole))
    assert type(llama.parallel).__name__ == "LlamaForCausalLM"
    assert llama.parallel.device == torch.device("cpu")
    assert llama.parallel.dtype == torch.float32
    assert llama.parallel.num_parameters() == llama.whole.num_parameters()


def test_parallelized_model_cannot_be_pickled_copied_or_cast(llama: Pair) -> None:
    for action in (pickle.dumps, copy.deepcopy, lambda model: model.half()):
        with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
            action(llama.parallel)


def test_saving_while_parallelized(llama: Pair, tmp_path) -> None:
    llama.parallel.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = llama.whole.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in again.state_dict().items())
    assert all(torch.equal(tensor, want[name]) for name, tensor in llama.parallel.state_dict().items())


def test_config_edits_are_honoured(groups) -> None:
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        for each in (whole, model):
            each.config.output_hidden_states = True
        got = model(**text_inputs())
        with torch.no_grad():
            assert_same(got.hidden_states, whole(**text_inputs()).hidden_states)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_edits_of_a_copied_configuration_take_effect(groups, part) -> None:
    whole, inputs = FAMILIES["t5"](), seq2seq_inputs()
    with parallelize(FAMILIES["t5"](), workers=groups(2)) as model:
        assert model.get_submodule(part).config is not model.config
        model(**inputs)
        for each in (whole, model):
            each.get_submodule(part).config.output_hidden_states = True
        got = model(**inputs)
        want = whole(**inputs)
        assert want[f"{part}_hidden_states"] is not None
        assert_same(got[f"{part}_hidden_states"], want[f"{part}_hidden_states"])


def test_edits_of_a_later_configuration_take_effect(groups) -> None:
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        for each in (whole, model):
            each.model.config = copy.deepcopy(each.config)
        assert_same(model(**text_inputs()), whole(**text_inputs()))
        for each in (whole, model):
            each.model.config.output_hidden_states = True
        want = whole(**text_inputs()).hidden_states
        assert want is not None
        assert_same(model(**text_inputs()).hidden_states, want)


def test_edits_of_an_inner_generation_config_take_effect(groups) -> None:
    whole, inputs = blip(), {**image_inputs(), "input_ids": token_ids()}
    with parallelize(blip(), workers=groups(2)) as model:
        lengths = []
        for length in (9, 12):
            for each in (whole, model):
                each.text_decoder.generation_config.max_length = length
                each.text_decoder.generation_config.eos_token_id = None
            want = whole.generate(**inputs)
            assert torch.equal(model.generate(**inputs), want)
            lengths.append(want.shape[1])
        assert lengths[0] != lengths[1]


def test_replaced_configuration_leaves_those_of_parts(groups) -> None:
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        for each in (whole, model):
            each.config = copy.deepcopy(each.config)
            each.config.output_hidden_states = True
        assert_same(model(**text_inputs()), whole(**text_inputs()))


def test_deparallelized_model_is_plain_again(groups) -> None:
    model = decoder("Llama", tied=True)
    with torch.no_grad():
        want = model(**text_inputs()).logits
    parallelize(model, workers=groups(2))
    with pytest.warns(UserWarning, match=r"\.cpu\(\) ends the parallelization"):
        model.cpu()
    with torch.no_grad():
        assert torch.equal(model(**text_inputs()).logits, want)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert type(model).__mro__[0] is type(decoder("Llama"))
    with pytest.raises(NotParallelizedError):
        deployment_of(model)


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{number}": number for number in range(3, 131)} | {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def test_pipeline_runs_on_the_workers(llama: Pair) -> None:
    options = {"task": "text-generation", "tokenizer": word_tokenizer()}
    prompt, settings = "w9 w17 w30", {"max_new_tokens": 6, "do_sample": False}
    want = pipeline(model=llama.whole, **options)(prompt, **settings)
    assert pipeline(model=llama.parallel, **options)(prompt, **settings) == want
    assert is_parallelized(llama.parallel)


class Adapter(torch.nn.Module):
    """A module that an adapter library puts around a layer."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base_layer(states).clamp(-0.1, 0.1)


def test_a_layer_in_an_adapter_stays_uncut() -> None:
    model = decoder("Llama")
    model.model.layers[1].mlp.up_proj = Adapter(model.model.layers[1].mlp.up_proj)
    shard_plan = plan(model)
    assert [*shard_plan.uncut] == ["model.layers.1.mlp"]
    assert "Adapter" in shard_plan.why_uncut
    assert not shard_plan.tensors["model.layers.0.mlp.up_proj.weight"].is_replicated
