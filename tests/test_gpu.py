"""The CUDA path. Skipped without a device; `make gpu` runs it where there is one."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng import parallelize
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.seq2seq import t5

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", [lambda: decoder("Llama"), gpt2, t5], ids=["llama", "gpt2", "t5"])
def test_parity_on_one_device(make, world_size: int) -> None:
    """Two ranks share the device, so their sums go through host memory: NCCL wants a device for each rank."""
    model, inputs = make(), text_inputs()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    parallelize(model, device="cuda", device_ids=[0] * world_size, backend="shared_memory")
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), want)
    assert all(device == "cuda:0" and used > 0 for device, used in model.memory_allocated().items())
    model.cpu()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_compiled_steps() -> None:
    """By the compiler's own defaults: one rank's step becomes a CUDA graph."""
    whole, inputs = decoder("Llama"), text_inputs()
    want = whole.generate(**inputs, max_new_tokens=16, do_sample=False)
    with parallelize(decoder("Llama"), 1, device="cuda", compile=True) as model:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), want)


def test_half_precision_and_a_restart(tmp_path) -> None:
    whole, model = decoder("Llama").half().cuda(), decoder("Llama")
    with torch.no_grad():
        want = whole(**{name: tensor.cuda() for name, tensor in text_inputs().items()}).logits.float().cpu()
    parallelize(model, 1, fp16=True, device="cuda", host_copy=True)
    assert largest_difference(model(**text_inputs()).logits.float(), want) <= 2e-2
    model.cuda()
    assert model.device.type == "cuda"
    assert model.dtype == torch.float16
