"""Makes models with peft's adapters, and returns the tokens of each adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

from tests.helpers.apart import find_packages
from tests.zoo.build import randomise
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

find_packages()
import peft  # noqa: E402


def _refuses_peft() -> str:
    """Return why transformers accepts no adapters of this version of peft, or "" if it does."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        return f"transformers {transformers.__version__}, peft {peft.__version__}: {error}"
    return ""


adapters_of_transformers = pytest.mark.skipif(bool(_refuses_peft()), reason=_refuses_peft())

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
EVERYWHERE = {"r": 4, "target_modules": "all-linear", "use_rslora": True}
NAMES = ("default", "adapter2", "adapter3", "adapter4")


def adapted(model: Any, *configs: Any, **options: Any) -> Any:
    """Return peft's model around a tiny model. The adapters are random, because B of a new adapter would be zero."""
    configs = configs or (peft.LoraConfig(**{**EVERYWHERE, **options}),)
    wrapped = peft.get_peft_model(model, configs[0])
    for number, config in enumerate(configs[1:], 2):
        wrapped.add_adapter(f"adapter{number}", config)
    return randomise(wrapped, seed=3).eval()


def draw(model: Any) -> Any:
    """Fill the adapters with seeded random values, the same for equal adapters. The base weights do not change."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    return model.eval()


def four_adapters() -> Any:
    """Return a model with four adapters of different layers; two of them have a head."""
    targets = (["q_proj", "down_proj"], ["v_proj", "o_proj"], ["up_proj"], ["embed_tokens", "k_proj"])
    heads = (["lm_head"], None, ["lm_head"], None)
    return adapted(
        decoder("Llama"),
        *(
            peft.LoraConfig(r=3, target_modules=each, modules_to_save=head, task_type="CAUSAL_LM")
            for each, head in zip(targets, heads, strict=True)
        ),
    )


def answers(model: Any) -> dict[str, torch.Tensor]:
    """Return the greedy tokens with each adapter, and without an adapter."""
    tokens_by_name = {}
    for name in NAMES:
        model.set_adapter(name)
        tokens_by_name[name] = model.generate(**text_inputs(), **GREEDY)
    with model.disable_adapter():
        tokens_by_name["none"] = model.generate(**text_inputs(), **GREEDY)
    assert len({tuple(tokens.flatten().tolist()) for tokens in tokens_by_name.values()}) == len(tokens_by_name)
    return tokens_by_name


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(got[name], want[name]) for name in want)
