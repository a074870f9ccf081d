"""Tests the modes of a call: grad mode, gradients of the model, and random numbers of `random` and NumPy."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch.autograd import forward_ad

from parallelformers_ng import ParallelError, parallelize
from parallelformers_ng.model.seen_modes import Modes
from tests.zoo.build import build

pytestmark = pytest.mark.promise("modes")

IDS = torch.tensor([[1, 5, 9, 33, 7, 48, 2]])
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


class Looking(tf.LlamaForCausalLM):
    """A model whose code sees modes and draws numbers."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + random.random() + torch.from_numpy(np.random.rand(50)).float()
        if torch.is_grad_enabled():
            output.logits = output.logits + 1
        if torch.is_inference_mode_enabled():
            output.logits = output.logits + 2
        return output

    def sharpened(self, ids):
        hidden = self.model(input_ids=ids).last_hidden_state.detach().clone()
        return torch.autograd.functional.jacobian(lambda x: (x.softmax(-1) ** 2).sum(), hidden)

    def through_layers(self, ids):
        embeddings = self.get_input_embeddings()(ids).detach().clone().requires_grad_()
        loss = self.model.layers[0].mlp(embeddings).sum()
        return torch.autograd.grad(loss, embeddings)[0]

    def of_a_weight(self, ids):
        hidden = self.get_input_embeddings()(ids)
        return torch.autograd.grad(hidden.sum(), self.get_input_embeddings().weight)[0]


def tiny(cls: Any = tf.LlamaForCausalLM) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return build(cls, tf.LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None))


@pytest.fixture(scope="module")
def looking(groups) -> Iterator[Any]:
    with parallelize(tiny(Looking), workers=groups(2)) as model:
        yield model


@pytest.fixture(scope="module")
def stock(groups) -> Iterator[Any]:
    with parallelize(tiny(), workers=groups(2)) as model:
        yield model


def seeded(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of a call after fixed seeds, and the next numbers of both generators."""
    random.seed(1)
    np.random.seed(1)
    result = call()
    return result, random.random(), np.random.rand()


MODES = {"gradients": torch.enable_grad, "no gradients": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
def test_code_sees_the_caller_s_modes_and_generators(looking, mode):
    calls = (lambda m: m(IDS).logits.detach(), lambda m: m.generate(IDS, **OPTIONS))
    with MODES[mode]():
        got, want = ([seeded(functools.partial(call, m)) for call in calls] for m in (looking, tiny(Looking)))
        torch.testing.assert_close(got, want)


def test_gradients_of_whole_values_are_right(looking):
    torch.testing.assert_close(looking.sharpened(IDS), tiny(Looking).sharpened(IDS))


@pytest.mark.parametrize("method", ["through_layers", "of_a_weight"])
def test_gradients_through_layers_are_refused(looking, method):
    with pytest.raises(ParallelError, match="asks for a gradient"):
        getattr(looking, method)(IDS)
    torch.testing.assert_close(seeded(lambda: looking(IDS).logits.detach()), seeded(lambda: tiny(Looking)(IDS).logits))


def jacobian(scores):
    return torch.autograd.functional.jacobian(lambda x: (x.softmax(-1) ** 2).sum(), scores)


def functional(scores):
    return torch.func.grad(lambda x: (x.softmax(-1) ** 2).sum())(scores)


def noise(scores):
    return torch.full_like(scores, random.gauss(0, 1)) + torch.from_numpy(np.random.permutation(50)) % 7


class Adding(tf.LogitsProcessor):
    def __init__(self, function):
        self.function = function

    def __call__(self, ids, scores):
        return scores - 100 * self.function(scores)


@pytest.mark.parametrize("function", [jacobian, functional, noise])
def test_processors_compute_gradients_and_draw(stock, function):
    def generate(model):
        return seeded(lambda: model.generate(IDS, logits_processor=[Adding(function)], **OPTIONS))

    got, want = generate(stock), generate(tiny())
    assert torch.equal(got[0], want[0])
    assert got[1:] == want[1:]


def test_hooks_see_the_grad_mode_and_draw(stock):
    def hook(module, args, output):
        return output + torch.is_grad_enabled() + 2 * torch.is_inference_mode_enabled() + np.random.randn()

    def hooked(model):
        handle = model.lm_head.register_forward_hook(hook)
        outputs = []
        for mode in MODES.values():
            with mode():
                outputs.append(seeded(lambda: model(IDS).logits.detach().clone()))
        handle.remove()
        return outputs

    torch.testing.assert_close(hooked(stock), hooked(tiny()))


def embedded(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return tiny().get_input_embeddings()(IDS)


def dual(model: Any) -> Any:
    with forward_ad.dual_level():
        embeddings = embedded(model)
        return model(inputs_embeds=forward_ad.make_dual(embeddings, embeddings)).logits


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "loss": lambda m: m(IDS, labels=IDS).loss.backward(),
    "sum of logits": lambda m: m(IDS).logits.sum().backward(),
    "one hidden state": lambda m: m.model(IDS, output_hidden_states=True).hidden_states[1].mean().backward(),
    "of inputs": lambda m: torch.autograd.grad(m(inputs_embeds=(e := embedded(m).requires_grad_())).logits.sum(), e),
    "unused": lambda m: torch.autograd.grad(
        m(inputs_embeds=(e := embedded(m).requires_grad_())).logits.sum(), e, allow_unused=True
    ),
    "of weights": lambda m: torch.autograd.grad(m(IDS).logits.sum(), [*m.parameters()], allow_unused=True),
    "jacobian": lambda m: torch.autograd.functional.jacobian(lambda e: m(inputs_embeds=e).logits, embedded(m)),
    "func.grad": lambda m: torch.func.grad(lambda e: m(inputs_embeds=e).logits.sum())(embedded(m)),
    "jvp": lambda m: torch.func.jvp(lambda e: m(inputs_embeds=e).logits, (embedded(m),), (embedded(m),)),
    "vmap": lambda m: torch.vmap(lambda ids: m(ids[None]).logits)(IDS),
    "forward mode": dual,
}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_of_the_model_are_refused(stock, gradient):
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        GRADIENTS[gradient](stock)


def test_outputs_require_gradients_as_when_plain(stock):
    assert stock(IDS).logits.requires_grad
    assert not stock.generate(IDS, **OPTIONS).requires_grad
    stock.requires_grad_(False)
    try:
        assert not stock(IDS).logits.requires_grad
        assert stock(inputs_embeds=embedded(stock).requires_grad_()).logits.requires_grad
    finally:
        stock.requires_grad_(True)


def test_calls_of_stock_code_send_no_modes(stock, monkeypatch):
    monkeypatch.setattr(Modes, "put_into", lambda *_: pytest.fail("a stock call looks for modes"))
    stock(IDS)
    stock.generate(IDS, **OPTIONS)


def test_library_code_draws_the_caller_s_numbers(groups):
    def make():
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        dropouts = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
        config = tf.Wav2Vec2Config(
            **sizes, **dropouts, feat_proj_dropout=0.0, conv_dim=(16,), conv_stride=(5,), conv_kernel=(10,),
            num_feat_extract_layers=1, mask_time_prob=0.3, mask_time_length=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )  # fmt: skip
        return build(tf.Wav2Vec2Model, config).train()

    sound = torch.linspace(-1, 1, 400).sin()[None]
    plain = make()
    with torch.no_grad(), parallelize(make(), workers=groups(2)) as model:
        for _ in range(2):
            got = seeded(lambda: model(sound).last_hidden_state)
            torch.testing.assert_close(got, seeded(lambda: plain(sound).last_hidden_state), rtol=1e-3, atol=1e-4)


def test_prints_of_a_model_appear_once():
    code = """
import torch, transformers as tf
from parallelformers_ng import parallelize
class Printing(tf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        print("forward of", type(self).__name__)
        return super().forward(*args, **kwargs)
if __name__ == "__main__":
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Printing(tf.LlamaConfig(vocab_size=50, **sizes)).eval()
    with torch.no_grad(), parallelize(model, 2, workers={"device": "cpu"}):
        model(torch.tensor([[1, 2, 3]]))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["forward of Printing"]
