"""Tests that changes of modules and weights of a parallelized model raise an error, and that harmless calls do not."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import is_parallelized
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.seq2seq import t5


@pytest.fixture(scope="module")
def llama(groups) -> Iterator[Any]:
    with parallelize(decoder("Llama", tied=True), workers=groups(2)) as model:
        yield model


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in itertools.chain(model.parameters(), model.buffers())]


class Wrapped(nn.Module):
    """A module that an adapter library puts around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer is replaced": lambda m: setattr(m.model.layers[0].mlp, "up_proj", Wrapped(m.model.layers[0].mlp.up_proj)),
    "a layer is removed": lambda m: delattr(m.model.layers[1], "mlp"),
    "a layer is added": lambda m: m.model.layers.append(Wrapped(m.model.norm)),
    "one is set to nothing": lambda m: setattr(m, "lm_head", None),
    "a module is registered": lambda m: m.model.register_module("norm", nn.Identity()),
    "a module is written": lambda m: m.model._modules.update(norm=nn.Identity()),
    "modules are cleared": lambda m: m.model.layers._modules.clear(),
    "modules change places": lambda m: m.model.layers.__setitem__(0, m.model.layers[1]),
    "a list is shortened": lambda m: m.model.layers.__delitem__(0),
    "a module is taken": lambda m: m.model._modules.pop("norm"),
    "a parameter is replaced": lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(48))),
    "a parameter is added": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "a buffer is replaced": lambda m: setattr(m.model.rotary_emb, "inv_freq", torch.ones(4)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_modules_is_refused_without_effect(llama, change) -> None:
    modules, tensors = list(llama.named_modules()), list(map(id, [*llama.parameters(), *llama.buffers()]))
    want = llama(**text_inputs()).logits
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        CHANGES[change](llama)
    assert list(llama.named_modules()) == modules
    assert list(map(id, [*llama.parameters(), *llama.buffers()])) == tensors
    assert torch.equal(llama(**text_inputs()).logits, want)


def test_tying_tied_weights_is_no_error(llama) -> None:
    llama.tie_weights()
    llama.model.norm.weight = llama.model.norm.weight
    assert is_parallelized(llama)


def test_tying_untied_weights_is_refused(groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        model.config.tie_word_embeddings = True
        with pytest.raises(ParallelError, match=r"does not support setting weight"):
            model.tie_weights()


def nothing(model: nn.Module) -> None: ...


def swap_a_layer(model: Any) -> None:
    dict.__setitem__(model.model.layers._modules, "0", nn.Identity())


def drop_all(model: Any) -> None:
    vars(model.model)["_modules"] = {}


def rename(model: Any) -> None:
    vars(model)["_modules"] = {"renamed": model.model, "head": model.lm_head}


def lose_a_weight(model: Any) -> None:
    vars(model.lm_head)["_parameters"] = {"weight": None}


@pytest.mark.parametrize("force", [nothing, swap_a_layer, drop_all, rename, lose_a_weight])
def test_weights_return_despite_changed_modules(groups, force) -> None:
    model = decoder("Llama")
    names, tensors = list(model.state_dict()), tensors_of(model)
    attributes = [(module, set(vars(module))) for module in model.modules()]
    with torch.no_grad():
        want = model(**text_inputs()).logits
    parallelize(model, workers=groups(2))
    force(model)
    model.deparallelize()
    assert list(model.state_dict()) == names
    assert all(torch.equal(got, before) for got, before in zip(tensors_of(model), tensors, strict=True))
    left = {"deparallelize"}  # `deparallelize` has no effect any more
    assert [(module, set(vars(module)) - left) for module in model.modules()] == attributes
    with torch.no_grad():
        assert torch.equal(model(**text_inputs()).logits, want)


def test_own_forward_of_a_module_returns(groups) -> None:
    model = gpt2()
    norm = model.transformer.ln_f
    norm.forward = own = norm.forward
    parallelize(model, workers=groups(2)).deparallelize()
    assert vars(norm)["forward"] is own


# -- moving and casting ------------------------------------------------------------------------------------------

HARMLESS: dict[str, Callable[[Any], Any]] = {
    "its device": lambda m: m.to(m.device),
    "cpu": lambda m: m.to("cpu"),
    "its data type": lambda m: m.to(torch.float32),
    "both": lambda m: m.to(device="cpu", dtype=torch.float32),
    "another's": lambda m: m.to(torch.ones(1)),
    "float": lambda m: m.float(),
    "a part": lambda m: m.model.layers[0].to("cpu"),
    "a part's data type": lambda m: m.lm_head.float(),
    "a parent": lambda m: nn.Sequential(m).to("cpu"),
    "a parent's data type": lambda m: nn.ModuleDict({"model": m}).float(),
    "a parent of a part": lambda m: nn.Sequential(m.model).cpu(),
}


@pytest.mark.parametrize("harmless", HARMLESS)
def test_harmless_moves_do_not_end_parallelization(llama, harmless) -> None:
    want = llama(**text_inputs()).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert HARMLESS[harmless](llama) is not None
    assert is_parallelized(llama)
    assert torch.equal(llama(**text_inputs()).logits, want)


CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "type": lambda m: m.type(torch.bfloat16),
    "a part": lambda m: m.model.half(),
    "a part is moved": lambda m: m.model.layers[0].to("meta"),
    "a parent": lambda m: nn.Sequential(m).to(torch.bfloat16),
    "a parent of a part": lambda m: nn.Sequential(m.lm_head).double(),
    "a parent is emptied": lambda m: nn.Sequential(m).to_empty(device="cpu"),
    "in place": lambda m: m.model._apply(lambda tensor: tensor.zero_()),
    "laid out anew": lambda m: m.lm_head._apply(lambda tensor: tensor.t()),
}


@pytest.mark.parametrize("cast", CASTS)
def test_moves_and_casts_of_parts_are_refused(llama, cast) -> None:
    kinds = [(p.dtype, p.device) for p in llama.parameters()]
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        CASTS[cast](llama)
    assert [(p.dtype, p.device) for p in llama.parameters()] == kinds


@pytest.mark.parametrize("target", [torch.float64, {"dtype": torch.bfloat16}, "meta"], ids=str)
def test_move_that_ends_parallelization_warns(groups, target) -> None:
    model = parallelize(t5(), workers=groups(2))
    with pytest.warns(UserWarning, match=r"T5ForConditionalGeneration\.to\(\) ends the parallelization") as warned:
        model.to(**target) if isinstance(target, dict) else model.to(target)
    assert warned[0].filename == __file__
    assert not is_parallelized(model)


def test_move_to_missing_device_raises_as_torch(llama) -> None:
    for move in (lambda: llama.to("cuda:7"), lambda: llama.cuda()):
        with pytest.raises((AssertionError, RuntimeError)):
            move()
        assert is_parallelized(llama)
    assert llama(**text_inputs()).logits.isfinite().all()


# -- training ----------------------------------------------------------------------------------------------------


def test_training_is_refused_in_words(groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        before = model.state_dict()
        for training in (True, False):
            model.train(training)
            loss = model(**text_inputs(), labels=text_inputs()["input_ids"]).loss
            with pytest.raises(ParallelError, match=r"does not support training.*deparallelize\(\) first"):
                loss.backward()
        model.train()
        own_loss = nn.functional.cross_entropy(model(**text_inputs()).logits.mean(1), torch.tensor([1, 2]))
        with pytest.raises(ParallelError, match="does not support training"):
            own_loss.backward()
        with pytest.raises(ParallelError, match="does not support training"):
            model.model(**text_inputs()).last_hidden_state.sum().backward()
        tensors = model.state_dict()
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_outputs_require_gradients_as_when_plain(groups) -> None:
    with parallelize(t5(), workers=groups(2)) as model:
        assert model(**seq2seq_inputs()).logits.requires_grad
        model.train()
        with torch.no_grad():
            assert not model(**seq2seq_inputs()).logits.requires_grad
