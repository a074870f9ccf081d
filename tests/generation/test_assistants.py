"""Tests `generate(assistant_model=…)` with an assistant on the workers: tokens, weights that are sent, refusals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from parallelformers_ng import parallelize
from parallelformers_ng.errors import DeadlineExpiredError
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.groups import StoredModel
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import await_incarnation, kill
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

Groups = Callable[[int], WorkerGroup]
NEW = 24


def main_model() -> Any:
    torch.manual_seed(0)
    return decoder("Llama").eval()


def assistant_like(noise: float, **settings: Any) -> Any:
    """Return the main model with noise in its weights, so that a part of its proposals is right."""
    model = main_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    settings = {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": 4, **settings}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def prompt() -> dict[str, Any]:
    return {name: value[:1] for name, value in text_inputs().items()}


def tokens(model: Any, assistant: Any, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**prompt(), assistant_model=assistant, **options)


@pytest.fixture
def on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail if the loop of a `generate` runs in this process."""

    def here(*_: Any, **__: Any) -> None:
        raise AssertionError("the loop runs in this process")

    monkeypatch.setattr(Calls, "_generate_here", here)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list with an item for each assistant whose weights were sent."""
    loaded_parts: list[str] = []
    usual = StoredModel.load

    def load(self: StoredModel, group: WorkerGroup, progress: Any = None, part: str = "") -> None:
        usual(self, group, progress, part)
        if part:
            loaded_parts.append(part)

    monkeypatch.setattr(StoredModel, "load", load)
    return loaded_parts


@pytest.mark.parametrize(
    ("ranks", "noise"),
    [(1, 0.3), (2, 0.0), (2, 0.3), (2, 3.0), (3, 0.3)],
    ids=["one rank", "all right", "some right", "few right", "three ranks"],
)
def test_tokens_are_those_of_one_process(groups: Groups, on_workers: None, ranks: int, noise: float) -> None:
    whole, assistant = main_model(), assistant_like(noise)
    want = tokens(whole, assistant)
    torch.manual_seed(7)
    want_sampled = tokens(whole, assistant, do_sample=True)
    after = torch.get_rng_state()
    with parallelize(main_model(), workers=groups(ranks)) as model:
        assert torch.equal(tokens(model, assistant), want)
        torch.manual_seed(7)
        assert torch.equal(tokens(model, assistant, do_sample=True), want_sampled)
        assert torch.equal(torch.get_rng_state(), after)


def test_tokens_in_bf16_are_those_without_assistant(groups: Groups, on_workers: None) -> None:
    ids = torch.randint(3, 131, (1, 1100), generator=torch.Generator().manual_seed(0))  # torch computes this pass
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True}
    assistant = assistant_like(0.3).bfloat16()
    with parallelize(main_model().bfloat16(), workers=groups(2)) as model:

        def run(**kwargs: Any) -> torch.Tensor:
            return torch.stack(model.generate(ids, return_dict_in_generate=True, **settings, **kwargs).logits)

        assert torch.equal(run(assistant_model=assistant), run())


def test_settings_go_and_come_back(groups: Groups, on_workers: None) -> None:
    settings = {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 9}
    mine, theirs = assistant_like(0.3, **settings), assistant_like(0.3, **settings)
    whole = main_model()
    with parallelize(main_model(), workers=groups(2)) as model:
        for start in (9, 2, 20):
            numbers = []
            for each, assistant in ((model, mine), (whole, theirs)):
                assistant.generation_config.num_assistant_tokens = start
                tokens(each, assistant, max_new_tokens=8)
                numbers.append(assistant.generation_config.num_assistant_tokens)
            assert numbers[0] != start
            assert abs(numbers[0] - numbers[1]) <= 1  # transformers proposes tokens in its first pass, too


def test_assistant_is_sent_only_if_it_changed(groups: Groups, on_workers: None, loads: list[str]) -> None:
    whole, assistant, other = main_model(), assistant_like(0.3), assistant_like(3.0)
    want = tokens(whole, assistant)
    with parallelize(main_model(), workers=groups(2)) as model:
        before = sum(model.memory_allocated().values())
        for change, count in (
            (lambda: None, 1),
            (lambda: None, 1),
            (lambda: assistant.model.layers[0].mlp.up_proj.weight.data.mul_(1.0), 1),  # torch does not count this one
            (lambda: assistant.lm_head.weight.requires_grad_(False).add_(0.0), 2),
            (lambda: setattr(assistant.model.norm, "weight", torch.nn.Parameter(assistant.model.norm.weight.data)), 3),
            (lambda: setattr(assistant.config, "rms_norm_eps", 1e-5), 4),
            (lambda: setattr(assistant.generation_config, "num_assistant_tokens", 2), 4),
            (lambda: setattr(assistant.model.layers[0].self_attn, "scaling", 0.01), 5),
            (lambda: setattr(assistant.model.layers[0].mlp, "act_fn", torch.nn.ReLU().eval()), 6),
        ):
            change()
            assert torch.equal(tokens(model, assistant), want)
            assert len(loads) == count
        assert torch.equal(tokens(model, other), want)
        assert torch.equal(tokens(model, assistant), want)
        assert len(loads) == 8
        assert sum(model.memory_allocated().values()) > 1.9 * before
        assert not any(weight.is_meta for weight in assistant.parameters())


def test_sending_that_was_interrupted_begins_again(
    groups: Groups, on_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant, other = assistant_like(0.3), assistant_like(3.0)
    want = tokens(main_model(), assistant)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with parallelize(main_model(), workers=groups(2)) as model:
        assert torch.equal(tokens(model, assistant), want)
        with monkeypatch.context() as patch:
            patch.setattr(StoredModel, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tokens(model, other)
        assert torch.equal(tokens(model, assistant), want)


def test_workers_that_were_replaced_get_it_again(on_workers: None, loads: list[str]) -> None:
    assistant = assistant_like(0.3)
    want = tokens(main_model(), assistant)
    with parallelize(main_model(), 2, workers={"device": "cpu"}, progress=False) as model:
        assert torch.equal(tokens(model, assistant), want)
        kill(deployment_of(model).pids[1])
        await_incarnation(model, 1)
        assert torch.equal(tokens(model, assistant), want)
        assert len(loads) == 2


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_parallelized_assistant(on_workers: None, groups: Groups, loads: list[str], quantize: str | None) -> None:
    assistant = assistant_like(0.3)
    want = tokens(main_model(), assistant)
    options: dict[str, Any] = {"workers": {"device": "cpu"}, "progress": False, "quantize": quantize}
    with parallelize(assistant, 2, **options), parallelize(main_model(), workers=groups(2)) as model:
        for _ in range(2):
            assert torch.equal(tokens(model, assistant), want)
        assert len(loads) == 1
        assert torch.equal(assistant.generate(**prompt(), max_new_tokens=2), tokens(assistant, None, max_new_tokens=2))


def test_threads_with_two_assistants(groups: Groups, on_workers: None) -> None:
    assistants = [assistant_like(0.3), assistant_like(3.0)]
    wants = [tokens(main_model(), each, max_new_tokens=10) for each in assistants]
    plain = main_model().generate(**prompt(), max_new_tokens=10, do_sample=False)
    with parallelize(main_model(), workers=groups(2)) as model, ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(tokens, model, assistants[number % 2], max_new_tokens=10) for number in range(8)]
        others = [pool.submit(model.generate, **prompt(), max_new_tokens=10, do_sample=False) for _ in range(4)]
        assert all(torch.equal(job.result(), wants[number % 2]) for number, job in enumerate(jobs))
        assert all(torch.equal(other.result(), plain) for other in others)


def test_deadline_of_a_call_that_waits(groups: Groups) -> None:
    assistant = assistant_like(0.3)
    entered, leave = threading.Event(), threading.Event()

    class Stuck:
        def put(self, _: Any) -> None:
            entered.set()
            leave.wait(20)

        def end(self) -> None:
            pass

    with parallelize(main_model(), workers=groups(2)) as model, ThreadPoolExecutor(1) as pool:
        tokens(model, assistant)
        first = pool.submit(tokens, model, assistant, streamer=Stuck())
        assert entered.wait(20)
        begin = time.monotonic()
        with pytest.raises(DeadlineExpiredError, match="one after another"):
            tokens(model, assistant, timeout=0.3)
        assert time.monotonic() - begin < 5
        leave.set()
        first.result()


class Echoing(LlamaForCausalLM):
    """An assistant with code of its own around `generate`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = super().generate(*args, **kwargs)
        output.sequences[:, -1] = 5
        return output


def test_assistant_with_its_own_generate(groups: Groups, on_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = Echoing(main_model().config).eval()
    want = tokens(main_model(), assistant)
    with parallelize(main_model(), workers=groups(2)) as model:
        assert torch.equal(tokens(model, assistant), want)
    with parallelize(assistant, workers=groups(2)) as model:
        assert (
            model.generate(prompt()["input_ids"], return_dict_in_generate=True, max_new_tokens=3).sequences[0, -1] == 5
        )
        with pytest.raises(TypeError, match="multiple values"):
            model.generate(prompt()["input_ids"], inputs=prompt()["input_ids"])


def hooked(assistant: Any) -> None:
    assistant.model.norm.register_forward_hook(lambda *_: None)


def in_training(assistant: Any) -> None:
    assistant.train()


def changed(assistant: Any) -> None:
    assistant.generation_config.num_assistant_tokens = 3
    assistant.config.rms_norm_eps = 2e-6


def left(_: Any) -> None:
    """Leave the assistant as it is."""


@pytest.mark.parametrize(
    ("change", "ranks", "why"),
    [
        (hooked, 0, "its modules have forward hooks"),
        (in_training, 0, "it is in training mode"),
        (left, 3, "it has 3 workers, and the model has 2"),
        (changed, 2, "it was changed after it was parallelized"),
    ],
)
def test_reasons_for_the_loop_in_this_process(
    groups: Groups, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], ranks: int, why: str
) -> None:
    assistant: PreTrainedModel = assistant_like(0.3)
    if ranks:
        parallelize(assistant, workers=groups(ranks))
    change(assistant)
    want = main_model().generate(**prompt(), max_new_tokens=6, do_sample=False)
    with parallelize(main_model(), workers=groups(2)) as model, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(tokens(model, assistant, max_new_tokens=6), want)
    messages = [record.message for record in caplog.records if record.name == "parallelformers_ng"]
    assert sum(why in message for message in messages) == 1
    if ranks:
        assistant.deparallelize()


@pytest.mark.parametrize("fit", [{"cache": "int8"}, {"strategy": "pipeline"}], ids=["int8 cache", "stages"])
def test_options_of_the_model(groups: Groups, on_workers: None, fit: dict[str, Any]) -> None:
    assistant = assistant_like(0.3)
    with parallelize(main_model(), workers=groups(2), fit=fit) as model:
        want = model.generate(**prompt(), max_new_tokens=NEW, do_sample=False)
        assert torch.equal(tokens(model, assistant), want)
