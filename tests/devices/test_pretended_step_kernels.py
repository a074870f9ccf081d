"""Decode steps by Triton kernels on pretended devices, in small: the kernels run in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import IMPORTS
from tests.devices.test_pretended_batching import calls, together, with_window
from tests.pretend_cuda.ledger import TO_DEVICE, TO_HOST, WAITS
from tests.zoo.build import build, largest_difference
from tests.zoo.case import VOCABULARY, text_inputs
from tests.zoo.decoders import SPECIAL_IDS, decoder, gpt2

HOW: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
SERVED = "decode steps are computed by the Triton kernels"


def interpreters(ranks: int) -> Iterator[WorkerGroup]:
    """Yield a group whose ranks have the interpreter."""
    from tests.pretend_cuda.caller import believe

    target = "tests.pretend_cuda.interpreting:InterpretingRunner"
    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        group = WorkerGroup(ranks, "cuda", target=target, imports=IMPORTS, timeout=300)  # the interpreter is slow
        yield group
        group.close()


@pytest.fixture(scope="module")
def interpreting() -> Iterator[WorkerGroup]:
    """Yield one rank with the interpreter."""
    yield from interpreters(1)


def step_of(group: WorkerGroup, model: Any, **options: Any) -> dict[str, int]:
    """Return the kernels of a recorded step, by name."""
    with parallelize(model, workers=group, decode="cuda_graphs", **options) as model:
        model.generate(
            **text_inputs(), **HOW | {"max_new_tokens": 3, "min_new_tokens": 3}
        )  # the second step is recorded
        assert group.call("said_of_kernels") == [SERVED]
        return group.call("launched")


def split_everywhere(layers: int, ranks: int = 1) -> Any:
    """Return a Llama with biases whose quantized products all have two splits on each rank of `InterpretingRunner`."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": ranks * 64, "head_dim": 32}
    heads = {"num_attention_heads": ranks * 2, "num_key_value_heads": ranks, "num_hidden_layers": layers}
    biases = {"attention_bias": True, "mlp_bias": True, "vocab_size": VOCABULARY}
    return build(LlamaForCausalLM, LlamaConfig(**sizes, **heads, **biases, **SPECIAL_IDS)).to(torch.bfloat16)


INT4 = {"scheme": "int4", "group": 32}
SUM = "parallelformers_ng.sum_of_splits.default"


@pytest.mark.parametrize(
    ("make", "scheme", "products"),
    [
        (split_everywhere, "", "aten.linear"),
        (split_everywhere, "int8", "byte_product"),
        pytest.param(split_everywhere, INT4, "nibble_product", marks=pytest.mark.slow),
        pytest.param(split_everywhere, "fp8", "byte_product", marks=pytest.mark.slow),
        pytest.param(functools.partial(decoder, "Qwen3"), "", "aten.linear", marks=pytest.mark.slow),
    ],
    ids=["bf16", "int8", "int4", "fp8", "Qwen3"],
)
def test_kernels_of_a_served_layer(make: Any, scheme: Any, products: str, interpreting: WorkerGroup) -> None:
    """The sums of split products are part of the kernels that read them, but for the last layer's."""
    options: dict[str, Any] = {"quantize": scheme} if scheme else {}
    less, more = (step_of(interpreting, make(layers=n).to(torch.bfloat16), **options) for n in (1, 2))
    of_layer = {name: count - less.get(name, 0) for name, count in more.items() if count > less.get(name, 0)}
    assert sum(of_layer.values()) <= 10, of_layer
    assert sum(count for name, count in of_layer.items() if products in name) == 4, of_layer
    assert more.get(SUM, 0) == bool(scheme)


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Llama", marks=pytest.mark.slow)])
def test_tokens_equal_those_of_transformers(family: str, interpreting: WorkerGroup) -> None:
    """Rows of unlike lengths are padded on the left, in the second call to a bucket of four."""
    whole = decoder(family)
    rows = [text_inputs(), *({name: each[[0, 1, 1]] for name, each in text_inputs().items()} for _ in range(2))]
    for inputs in rows:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :3] = 0
    want = [whole.generate(**inputs, **HOW, output_logits=True, return_dict_in_generate=True) for inputs in rows]
    with parallelize(decoder(family), workers=interpreting, decode="cuda_graphs") as model:
        interpreting.call("graphs")
        for inputs, wanted in zip(rows, want, strict=True):
            output = model.generate(**inputs, **HOW, output_logits=True, return_dict_in_generate=True)
            assert torch.equal(output.sequences, wanted.sequences)
            for ours, theirs in zip(output.logits, wanted.logits, strict=True):
                assert largest_difference(ours, theirs) <= 1e-4
        assert interpreting.call("said_of_kernels") == [SERVED]
        assert interpreting.call("graphs")[1] > 0
        assert interpreting.call("launched")["parallelformers_ng.attend.default"] == 2 * 2


@pytest.mark.slow
def test_the_same_call_twice_gives_the_same_bits(interpreting: WorkerGroup) -> None:
    """Also if the kernels' first step is part of the first call. One row has no mask of its own."""
    ids = text_inputs()["input_ids"][:1]
    with parallelize(decoder("Llama").to(torch.bfloat16), workers=interpreting, decode="cuda_graphs") as model:
        logits = [
            torch.stack(model.generate(ids, **HOW, output_logits=True, return_dict_in_generate=True).logits)
            for _ in range(2)
        ]
        assert torch.equal(*logits)
        model.generate(ids, **HOW)
        step = interpreting.call("last_step")
        assert (step.get(TO_DEVICE, 0), step[TO_HOST], step[WAITS]) == (0, 1, 1)
        assert interpreting.call("said_of_kernels") == [SERVED]


LEFT = "decode steps are left to their operators: "
FAULTS = {
    "wrong": "they differ from the modules by ",
    "slow": "a step takes ",
    "old card": "the device has compute capability 7.5, and 8.0 is the least",
    "no Triton": "Triton is not installed",
    "no memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_kernels_that_fail_their_trial_are_not_used(fault: str, interpreting: WorkerGroup) -> None:
    """The modules' tokens come, from recordings as before, and one line says why."""
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=interpreting, decode="cuda_graphs") as model:
        interpreting.call("spoil_kernels", fault)
        try:
            for _ in range(2):
                assert torch.equal(model.generate(**text_inputs(), **HOW), whole.generate(**text_inputs(), **HOW))
        finally:
            interpreting.call("spoil_kernels")
        (line,) = interpreting.call("said_of_kernels")
        assert line.startswith(LEFT + FAULTS[fault])
        assert not any("parallelformers_ng" in name for name in interpreting.call("launched"))


def test_other_models_keep_their_operators(interpreting: WorkerGroup) -> None:
    for make in (gpt2, lambda: decoder("Gemma"), lambda: decoder("Olmo2")):
        with parallelize(make(), workers=interpreting, decode="cuda_graphs") as model:
            model.generate(**text_inputs(), **HOW)
            assert not any("parallelformers_ng" in name for name in interpreting.call("launched"))
            assert SERVED not in interpreting.call("said_of_kernels")


@pytest.mark.slow
@pytest.mark.parametrize("make", [functools.partial(decoder, "Llama"), with_window], ids=["Llama", "window"])
def test_rows_of_a_batch_use_the_kernels(make: Any, interpreting: WorkerGroup) -> None:
    want = [make().generate(**call) for call in calls()]
    with parallelize(make(), workers=interpreting, batching={"rows": 3}) as model:
        assert all(map(torch.equal, together(model, calls()), want))
        assert interpreting.call("said_of_kernels") == [SERVED]
        assert interpreting.call("launched")["parallelformers_ng.attend.default"] == 2 * len(make().model.layers)


@pytest.fixture(scope="module")
def interpreting_two() -> Iterator[WorkerGroup]:
    """Yield two ranks with the interpreter."""
    yield from interpreters(2)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        pytest.param("", SERVED, marks=pytest.mark.slow),
        ("no Triton", f"{LEFT}Triton is not installed"),
        pytest.param("slow", SERVED, marks=pytest.mark.slow),  # rank 0 decides
    ],
    ids=["none", "no Triton", "slow"],
)
def test_ranks_decide_together(fault: str, line: str, interpreting_two: WorkerGroup) -> None:
    """The fault is on rank 1 alone."""
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=interpreting_two, decode="cuda_graphs") as model:
        interpreting_two.call("spoil_kernels", fault, 1)
        assert torch.equal(model.generate(**text_inputs(), **HOW), whole.generate(**text_inputs(), **HOW))
        assert interpreting_two.call("said_of_kernels") == [line]
        launched = interpreting_two.call("launched").get("parallelformers_ng.attend.default", 0)
        assert launched == (2 * 2 if line == SERVED else 0)


def test_split_products_are_summed_before_an_exchange(interpreting_two: WorkerGroup) -> None:
    """A sum over the ranks takes whole products; q, k, v, gate and up are read in parts, as on one rank."""
    interpreting_two.call("spoil_kernels")  # no fault of another test
    of_step = step_of(interpreting_two, split_everywhere(1, ranks=2), quantize="int8")
    assert of_step[SUM] == 2
    assert of_step["parallelformers_ng.byte_product.default"] == 4
