"""Tests that every public method and attribute of a parallelized model, and of its parts, acts as docs/methods.md
says."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import GenerationMixin, PreTrainedModel

from parallelformers_ng import parallelize
from parallelformers_ng.errors import AlreadyParallelizedError, ParallelError
from parallelformers_ng.model.methods import REFUSED, place_of
from parallelformers_ng.model.remote_module import RemoteModule
from tests.generation.test_generate import Pair, assert_same
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

CLASSES = (nn.Module, PreTrainedModel, GenerationMixin)


@pytest.fixture
def llama(groups) -> Iterator[Pair]:
    with parallelize(decoder("Llama", tied=True), workers=groups(2)) as parallel:
        yield Pair(decoder("Llama", tied=True), parallel, text_inputs())


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


# -- the table -------------------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "methods.md"
TABLE = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
"""Rows of the table: name, place, note."""
WORDS = {
    "local": "answered here",
    "saved": "answered here",
    "switched": "answered here",
    "forwarded": "runs on the workers",
    "generated": "runs on the workers",
    "refused": "refused",
}
ANSWERED_HERE = [name for name, place, _ in TABLE if place == "answered here"]


def test_table_is_sorted_and_complete() -> None:
    names = [name for name, *_ in TABLE]
    assert names == sorted(set(names), key=str.lower)
    assert set().union(*map(public, CLASSES)) <= set(names)


def test_table_agrees_with_the_code() -> None:
    cls = type(decoder("Llama"))
    for name, place, note in TABLE:
        assert place == WORDS[place_of(cls, name)], name
        assert (place == "refused") == (name in REFUSED)
        assert place != "refused" or note == f"it {REFUSED[name]}"


def parts(model: Any) -> list[Any]:
    """Return the model, a model within it, and a layer."""
    return [model, model.model, model.model.embed_tokens]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(llama: Pair, name: str) -> None:
    count = 0
    for part in parts(llama.parallel):
        if hasattr(part, name):
            count += 1
            with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
                getattr(part, name)()
    assert count or not hasattr(llama.whole, name)
    assert largest_difference(llama.parallel(**llama.inputs).logits, llama.whole(**llama.inputs).logits) <= 1e-4


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "add_model_tags": lambda m: m.add_model_tags(["a"]),
    "apply": lambda m: names_met(m),
    "can_record_outputs": lambda m: sorted(m.can_record_outputs or {}),
    "compute_transition_scores": lambda m: m.compute_transition_scores(
        torch.tensor([[1, 2, 3]]), (torch.arange(131.0)[None],), normalize_logits=True
    ),
    "extra_repr": lambda m: None,  # a longer text: see below
    "get_buffer": lambda m: m.get_buffer("nothing"),
    "get_parameter": lambda m: m.get_parameter(next(name for name, _ in m.named_parameters())).sum(),
    "get_parameter_or_buffer": lambda m: m.get_parameter_or_buffer(next(n for n, _ in m.named_parameters())).sum(),
    "get_submodule": lambda m: type(m.get_submodule("")).__name__,
    "get_correct_attn_implementation": lambda m: m.get_correct_attn_implementation("eager"),
    "get_correct_experts_implementation": lambda m: m.get_correct_experts_implementation("eager"),
    "get_compiled_call": lambda m: callable(m.get_compiled_call),
    "loss_function": lambda m: m.loss_function.__name__,
    "prepare_inputs_for_generation": lambda m: sorted(m.prepare_inputs_for_generation(torch.tensor([[1, 2]]))),
    "register_forward_hook": lambda m: callable(m.register_forward_hook),  # see test_hooks.py
    "register_forward_pre_hook": lambda m: callable(m.register_forward_pre_hook),
    "register_backward_hook": lambda m: None,
    "register_for_auto_class": lambda m: callable(m.register_for_auto_class),  # would mark the class permanently
    "register_full_backward_hook": lambda m: None,
    "register_full_backward_pre_hook": lambda m: None,
    "requires_grad_": lambda m: [p.requires_grad for p in m.requires_grad_(False).parameters()],
    "smart_apply": lambda m: callable(m.smart_apply),
    "retrieve_modules_from_names": lambda m: len(m.retrieve_modules_from_names(["layers"])),
    "save_pretrained": lambda m: None,  # test_saving.py
    "from_pretrained": lambda m: callable(m.from_pretrained),
    "set_adapter": lambda m: m.set_adapter("a"),
    "set_decoder": lambda m: m.set_decoder(m.get_decoder()),
    "set_encoder": lambda m: m.set_encoder(m.get_encoder()),
    "set_input_embeddings": lambda m: m.set_input_embeddings(m.get_input_embeddings()),
    "set_output_embeddings": lambda m: m.set_output_embeddings(m.get_output_embeddings()),
    "to": lambda m: m.model.to("cpu") is m.model,
    "cpu": lambda m: m.model.cpu() is m.model,
    "cuda": lambda m: callable(m.model.cuda),
    "type": lambda m: m.type(torch.float32) is m,
    "half": lambda m: callable(m.half),  # changes weights: see below
    "bfloat16": lambda m: callable(m.bfloat16),
    "double": lambda m: callable(m.double),
    "warn_if_padding_and_no_attention_mask": lambda m: m.warn_if_padding_and_no_attention_mask(
        torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    ),
}
"""Calls of methods with arguments; all other names are read, or called without arguments."""


def names_met(model: nn.Module) -> list[str]:
    met: list[str] = []
    model.apply(lambda module: met.append(type(module).__name__))
    return met


def ask(name: str, model: Any) -> Any:
    """Return the value of a model's attribute or method, or the kind of error that it raises."""
    try:
        if name in ARGUMENTS:
            return seen(ARGUMENTS[name](model))
        value = getattr(model, name)
        return seen(value() if callable(value) and not isinstance(value, (type, nn.Module)) else value)
    except Exception as error:
        return repr(error) if isinstance(error, ParallelError) else type(error)


def seen(value: Any) -> Any:
    """Convert a result to a form that can be compared between two models."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {str(key): seen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "__next__"):
        return [seen(item) for item in value]
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device, type)):
        return value
    return type(value).__name__


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and torch.equal(got, want)
    if isinstance(want, dict):
        return isinstance(got, dict) and got.keys() == want.keys() and all(same(got[k], want[k]) for k in want)
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    return got == want


@pytest.mark.parametrize("name", ANSWERED_HERE)
def test_answered_here_as_by_the_whole_model(llama: Pair, name: str) -> None:
    if not hasattr(llama.whole, name):
        pytest.skip(f"not in this release: {name}")
    got, want = ask(name, llama.parallel), ask(name, llama.whole)
    assert same(got, want), (got, want)
    assert largest_difference(llama.parallel(**llama.inputs).logits, llama.whole(**llama.inputs).logits) <= 1e-4
    assert isinstance(llama.parallel, RemoteModule)


def test_model_text_says_how_it_is_cut(llama: Pair) -> None:
    text = str(llama.parallel)
    assert "parallelized over 2 workers (cpu:0, cpu:1) by LlamaPolicy" in text
    assert "(q_proj): Linear(in_features=48, out_features=48, bias=False, cut=(column: weight [" in text
    assert repr(llama.parallel.model.norm) == repr(llama.whole.model.norm)


def test_a_repl_shows_one_line(llama: Pair) -> None:
    line = repr(llama.parallel)
    assert line.startswith("LlamaForCausalLM(parallelized over 2 workers (cpu:0, cpu:1) by LlamaPolicy")
    assert "\n" not in line
    assert "\n" in repr(llama.whole), "an ordinary model shows its modules"


# -- changes of weights ----------------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.model.half(),
    "to": lambda m: m.model.to(torch.bfloat16),
    "double": lambda m: m.lm_head.double(),
    "data": lambda m: m.model.layers[1].mlp.down_proj.weight.data.zero_(),
    "set data": lambda m: setattr(m.lm_head.weight, "data", torch.zeros(131, 48)),
    "view": lambda m: m.model.norm.weight.detach()[3:].view(-1).fill_(2),
    "item": lambda m: m.model.norm.weight.data.__setitem__(0, 5.0),
    "in place": lambda m: m.model.norm.weight.data.mul_(2),
    "init": lambda m: nn.init.zeros_(m.model.layers[0].self_attn.q_proj.weight),
    "apply": lambda m: m.apply(lambda module: nn.init.ones_(module.weight) if hasattr(module, "weight") else None),
    "out": lambda m: torch.add(torch.ones(48), 1, out=m.model.norm.weight.data),
    "optimizer": lambda m: step(torch.optim.SGD(m.model.norm.parameters(), lr=1.0), m.model.norm.weight),
    "load": lambda m: m.model.load_state_dict(m.model.state_dict()),
    "replace a layer": lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()),
    "replace in a list": lambda m: m.model.layers.__setitem__(0, nn.Identity()),
    "insert into a list": lambda m: m.model.layers.insert(0, nn.Identity()),
    "drop a layer": lambda m: m.model.layers.__delitem__(1),
    "replace a weight": lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.zeros(131, 48))),
    "replace in the table": lambda m: m.lm_head._parameters.update(weight=nn.Parameter(torch.zeros(131, 48))),
    "delete a weight": lambda m: delattr(m.lm_head, "weight"),
    "a weight of None": lambda m: setattr(m.lm_head, "weight", None),
    "parametrize": lambda m: nn.utils.parametrizations.weight_norm(m.model.layers[0].mlp.up_proj),
    "prune": lambda m: prune.random_unstructured(m.model.layers[0].mlp.up_proj, "weight", amount=0.5),
    "new embeddings": lambda m: m.set_input_embeddings(nn.Embedding(9, 48)),
    "resize": lambda m: m.resize_token_embeddings(140),
    "patch forward": lambda m: setattr(m.model.norm, "forward", lambda states: states),
    "local heads": lambda m: setattr(m.model.layers[0].self_attn, "num_key_value_groups", 1),
    "copy": lambda m: copy.deepcopy(m.model),
    "pickle": lambda m: pickle.dumps(m.model.layers[0]),
    "address": lambda m: m.lm_head.weight.data_ptr(),
    "again": lambda m: parallelize(m.model, 2),
}


def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
    weight.grad = torch.ones(weight.shape)
    optimizer.step()


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_weights_are_refused_without_effect(llama: Pair, groups, name: str) -> None:
    shown = str(llama.parallel)
    with pytest.raises((ParallelError, AlreadyParallelizedError)):
        CHANGES[name](llama.parallel)
    assert str(llama.parallel) == shown
    assert largest_difference(llama.parallel(**llama.inputs).logits, llama.whole(**llama.inputs).logits) <= 1e-4
    model = llama.parallel.deparallelize()
    assert same(seen(model.state_dict()), seen(llama.whole.state_dict()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    parallelize(model, workers=groups(2))  # the fixture ends it again


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda m: m.lm_head.weight.sum(),
    "item": lambda m: m.model.norm.weight[3].item(),
    "numpy": lambda m: torch.from_numpy(m.model.layers[1].mlp.down_proj.weight.detach().numpy()),
    "list": lambda m: m.model.norm.weight.tolist(),
    "product": lambda m: m.lm_head.weight.T[:, :4] @ torch.ones(4, 2),
    "norm": lambda m: [p.norm() for p in m.parameters()],
    "copy": lambda m: copy.deepcopy(m.lm_head.weight),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.model.norm.weight)),
    "split": lambda m: m.lm_head.weight.split(50),
    "printed": lambda m: repr(m.model.norm.weight),
    "copied into another": lambda m: torch.zeros(48).copy_(m.model.norm.weight.detach()),
    "a sub-module's": lambda m: m.model.layers[0].state_dict(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.model.parameters()),
    "dtype and device": lambda m: [m.model.dtype, m.model.device, m.lm_head.weight.device],
    "functional": lambda m: nn.functional.linear(torch.ones(48), m.lm_head.weight),
    "prefix": lambda m: m.model.state_dict(prefix="a."),
}


@pytest.mark.parametrize("name", READS)
def test_weights_can_be_read(llama: Pair, name: str) -> None:
    got, want = seen(READS[name](llama.parallel)), seen(READS[name](llama.whole))
    assert same(got, want), (got, want)


def test_tied_entries_of_state_dict_share_memory(llama: Pair) -> None:
    state = llama.parallel.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_weights_are_the_model_s_after_deparallelize(groups) -> None:
    model = parallelize(decoder("Llama"), workers=groups(2))
    weight = model.model.norm.weight
    model.deparallelize()
    assert weight is model.model.norm.weight
    weight.data.zero_()
    assert not model.model.norm.weight.any()


# -- classes, modes, attributes --------------------------------------------------------------------------------------


def test_the_class_makes_ordinary_models(llama: Pair, tmp_path: Path) -> None:
    cls = type(llama.parallel)
    llama.whole.save_pretrained(tmp_path)
    for instance in (cls(llama.whole.config), cls._from_config(llama.whole.config), cls.from_pretrained(tmp_path)):
        assert type(instance) is type(llama.whole)
        assert isinstance(instance, cls)
        instance.half()
    cls.double(llama.whole)  # on an instance that is not parallelized
    assert llama.whole.dtype == torch.float64
    assert pickle.loads(pickle.dumps(cls)) is type(llama.whole)


def test_a_part_can_be_saved(llama: Pair, tmp_path: Path) -> None:
    llama.parallel.model.save_pretrained(tmp_path)
    again = type(llama.whole.model).from_pretrained(tmp_path)
    assert same(seen(again.state_dict()), seen(llama.whole.model.state_dict()))


def test_modes_and_attributes_reach_the_workers(groups) -> None:
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        for each in (whole, model):
            each.model.norm.variance_epsilon = 0.5
            each.model.layers[1].input_layernorm.variance_epsilon = 0.25
        inputs = text_inputs()
        assert largest_difference(model(**inputs).logits, whole(**inputs).logits) <= 1e-4
        got, want = (each.generate(**inputs, max_new_tokens=6, do_sample=False) for each in (model, whole))
        assert torch.equal(got, want)
        for each in (whole, model):
            each.model.layers[0].self_attn.attention_dropout = 0.0
            each.model.layers[0].train()
        assert largest_difference(model(**inputs).logits, whole(**inputs).logits) <= 1e-4
        assert not model.training
        assert model.model.layers[0].mlp.training


def test_a_loss_function_that_is_set_is_used(groups) -> None:
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        for each in (whole, model):
            each.loss_function = lambda logits, labels, **_: logits.mean() * 3
        ids = text_inputs()["input_ids"]
        assert largest_difference(model(ids, labels=ids).loss, whole(ids, labels=ids).loss) <= 1e-4


# -- parts -----------------------------------------------------------------------------------------------------------


def test_part_is_refused_if_its_output_is_partial(llama: Pair) -> None:
    hidden = torch.randn(1, 3, 48)
    layer, whole = llama.parallel.model.layers[0], llama.whole.model.layers[0]
    for name in ("mlp", "input_layernorm", "mlp.act_fn"):
        assert_same(layer.get_submodule(name)(hidden), whole.get_submodule(name)(hidden).detach())
    for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"):
        with pytest.raises(ParallelError, match=rf"model\.layers\.0\.{name} is cut"):
            layer.get_submodule(name)(hidden)


@pytest.mark.parametrize("name", ["opt-projected", "albert", "deberta", "electra"])
def test_input_embeddings_are_called(groups, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, OPTConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tiny: dict[str, Any] = {"vocab_size": 131, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48}
    if name == "opt-projected":
        config = OPTConfig(**tiny, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64)
        make: Callable[[], Any] = lambda: AutoModelForCausalLM.from_config(config).eval()  # noqa: E731
    else:
        config = CONFIG_MAPPING[name](**tiny, intermediate_size=64, embedding_size=32, max_position_embeddings=64)
        make = lambda: AutoModelForMaskedLM.from_config(config).eval()  # noqa: E731
    torch.manual_seed(0)
    whole = make()
    torch.manual_seed(0)
    ids = torch.tensor([[5, 9, 77, 31]])
    with parallelize(make(), workers=groups(2)) as model:
        assert_same(model.get_input_embeddings()(ids), whole.get_input_embeddings()(ids).detach())
