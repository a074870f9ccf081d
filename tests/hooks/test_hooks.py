"""Tests that hooks run once, on the workers, with the inputs of the whole model, and that changes by hooks return to
the caller."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from transformers import CompileConfig, LogitsProcessor

from parallelformers_ng import parallelize
from parallelformers_ng.checkpoint.read_only import ReadOnlyTensor
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.remote_module import remote_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.generation.test_generate import assert_same
from tests.zoo.case import seq2seq_inputs, text_inputs, token_ids
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import t5

Groups = Callable[[int], WorkerGroup]
GREEDY = {"max_new_tokens": 4, "do_sample": False}

PLACES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "llama": (
        lambda: decoder("Llama"),
        ("", "model", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"),
    ),
    "gpt2": (gpt2, ("", "transformer", "transformer.wte", "transformer.h.1", "transformer.ln_f", "lm_head")),
    "t5": (t5, ("", "shared", "encoder", "encoder.block.0", "decoder.block.1", "decoder.final_layer_norm", "lm_head")),
}


def first_tensor(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    return first_tensor(next(iter(output.values() if isinstance(output, dict) else output)))


def listen(model: Any, paths: tuple[str, ...], notes: list[Any], pre: bool = False) -> list[Any]:
    """Register hooks on several modules; each hook appends (path, value) to one list."""

    def on(path: str) -> Any:
        module = model.get_submodule(path)
        if pre:
            return module.register_forward_pre_hook(lambda module, args: notes.append((path, len(args))))
        return module.register_forward_hook(lambda module, args, output: notes.append((path, first_tensor(output))))

    return [on(path) for path in paths]


def use(model: Any) -> None:
    with torch.no_grad():
        inputs = seq2seq_inputs() if model.config.is_encoder_decoder else text_inputs()
        model(**inputs)
        model.generate(**text_inputs(), **GREEDY)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", PLACES)
def test_hooks_record_the_whole_models_values(family: str, world_size: int, when: str, groups: Groups) -> None:
    make, paths = PLACES[family]
    whole, model = make(), make()
    want: list[Any] = []
    got: list[Any] = []
    listen(whole, paths, want)
    use(whole)
    if when == "before":
        handles = listen(model, paths, got)
    with parallelize(model, workers=groups(world_size)):
        if when == "after":
            handles = listen(model, paths, got)
        use(model)
        assert [path for path, _ in got] == [path for path, _ in want]
        assert_same(got, want)
        assert all(type(tensor) is torch.Tensor and tensor.device.type == "cpu" for _, tensor in got)
        for handle in handles:
            handle.remove()
        use(model)
        assert len(got) == len(want)


def test_pre_hooks_keep_order_and_keyword_arguments(groups: Groups) -> None:
    def register(model: Any, notes: list[Any]) -> None:
        layer = model.model.layers[1]
        layer.register_forward_pre_hook(lambda *_: notes.append("pre"))
        layer.register_forward_pre_hook(lambda *_: notes.append("pre, first"), prepend=True)
        layer.register_forward_pre_hook(lambda m, args, kwargs: notes.append(sorted(kwargs)), with_kwargs=True)
        layer.register_forward_hook(lambda *_: notes.append("after"))
        layer.register_forward_hook(
            lambda m, args, kwargs, output: notes.append(len(args)), with_kwargs=True, prepend=True
        )

    whole, model, want, got = decoder("Llama"), decoder("Llama"), list[Any](), list[Any]()
    register(whole, want)
    use(whole)
    with parallelize(model, workers=groups(2)):
        register(model, got)
        use(model)
        model.model.layers[1].register_forward_hook(lambda *_: got.append("before most"), prepend=True)
        model.model.layers[1].register_forward_hook(lambda *_: got.append("before all"), prepend=True)
        before = len(got)
        model(**text_inputs())
        assert got[before:][-4:-2] == ["before all", "before most"]
    assert got[:before] == want


def test_hooks_may_change_inputs_and_outputs(groups: Groups) -> None:
    vector = torch.linspace(-1, 1, 48)

    def register(model: Any) -> list[Any]:
        return [
            model.model.layers[0].register_forward_hook(lambda m, args, output: output + vector),
            model.model.norm.register_forward_pre_hook(lambda m, args: (args[0] * 1.1, *args[1:])),
            model.lm_head.register_forward_hook(lambda m, args, output: output.flip(-1)),
        ]

    whole, plain = decoder("Llama"), decoder("Llama")
    register(whole)
    with parallelize(decoder("Llama"), workers=groups(3)) as model:
        handles = register(model)
        with torch.no_grad():
            assert_same(model(**text_inputs()).logits, whole(**text_inputs()).logits)
        want = whole.generate(**text_inputs(), **GREEDY, num_beams=2)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY, num_beams=2), want)
        for handle in handles:
            handle.remove()
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), plain.generate(**text_inputs(), **GREEDY))


def test_recorded_outputs_include_changes_by_hooks(groups: Groups) -> None:
    requested_outputs = {"output_hidden_states": True, "output_attentions": True}
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model, torch.no_grad():
        for _ in range(2):  # in the second pass, transformers' recorder is registered before the hook
            handles = [m.model.layers[0].register_forward_hook(lambda *seen: seen[2] * 2) for m in (whole, model)]
            assert_same(
                model(**text_inputs(), **requested_outputs).hidden_states,
                whole(**text_inputs(), **requested_outputs).hidden_states,
            )
            for handle in handles:
                handle.remove()


COUNT = 0
SEEN: deque[int] = deque(maxlen=3)


def count(module: nn.Module, args: Any, output: Any) -> None:
    global COUNT
    COUNT += 1
    _note(len(SEEN) + COUNT)
    module.times = COUNT  # type: ignore[assignment]


def _note(number: int) -> None:
    SEEN.append(number)


class Recorder:
    """An object whose method is a hook."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.states: dict[Any, list[Any]] = {}
        self.calls: Counter[str] = Counter()
        self.total = torch.zeros(())

    def hook(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls[type(module).__name__] += 1
        self.total = self.total + output.sum()
        self.states.setdefault(module, []).append(output[0, -1].clone())


def test_notes_in_objects_globals_and_on_modules(groups: Groups) -> None:
    global COUNT
    whole, model = decoder("Llama"), decoder("Llama")
    theirs, mine = Recorder(whole), Recorder(model)
    deep: dict[str, list[Any]] = {"a": []}

    def into(notes: dict[str, list[Any]], module: nn.Module, args: Any, output: Any) -> None:
        notes["a"].append(type(module).__name__)

    counts: dict[str, Any] = {}
    with parallelize(model, workers=groups(2)):
        for name, each, recorder in (("whole", whole, theirs), ("cut", model, mine)):
            COUNT = 0
            SEEN.clear()
            for layer in each.model.layers:
                layer.register_forward_hook(recorder.hook)
            each.model.norm.register_forward_hook(count)
            each.model.norm.register_forward_hook(functools.partial(into, deep))
            use(each)
            counts[name] = (COUNT, list(SEEN), each.model.norm.times)
            if name == "whole":
                names, deep["a"] = deep["a"], []
        assert counts["cut"] == counts["whole"]
        assert deep["a"] == names
        assert mine.calls == theirs.calls
        assert_same(mine.total, theirs.total)
        assert list(mine.states) == list(model.model.layers)  # the caller's modules, not the workers'
        assert_same(list(mine.states.values()), list(theirs.states.values()))
        assert mine.model is model


def test_hook_may_call_modules_and_keep_outputs(groups: Groups) -> None:
    """The hook is a logit lens: the hook applies the output head to each layer's hidden states."""

    def register(model: Any, notes: list[Any], outputs: list[Any]) -> None:
        def lens(module: nn.Module, args: Any, output: Any) -> None:
            notes.append(model.lm_head(model.model.norm(output))[:, -1].argmax(-1))

        for layer in model.model.layers:
            layer.register_forward_hook(lens)
        model.register_forward_hook(lambda module, args, output: outputs.append(output))

    whole, want, whole_outputs = decoder("Llama"), list[Any](), list[Any]()
    got, outputs = list[Any](), list[Any]()
    register(whole, want, whole_outputs)
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        register(model, got, outputs)
        for each in (whole, model):
            use(each)
        assert_same(got, want)
        assert_same([output.logits for output in outputs], [output.logits for output in whole_outputs])
        lengths = [output.past_key_values.get_seq_length() for output in (outputs[0], whole_outputs[0])]
        assert lengths[0] == lengths[1]
        again = model(token_ids()[:, -1:], past_key_values=outputs[0].past_key_values).logits
        with torch.no_grad():
            assert_same(again, whole(token_ids()[:, -1:], past_key_values=whole_outputs[0].past_key_values).logits)


def test_hook_on_attention_block_sees_all_heads(groups: Groups) -> None:
    whole, model, want, got = t5(), t5(), list[Any](), list[Any]()
    for each, notes in ((whole, want), (model, got)):
        each.set_attn_implementation("eager")
        attention = each.encoder.block[0].layer[0].SelfAttention
        attention.register_forward_hook(lambda m, args, output, notes=notes: notes.append(output))
        each.encoder.block[0].register_forward_hook(lambda m, args, output, notes=notes: notes.append(output))
    with parallelize(model, workers=groups(3)):
        use(whole)
        use(model)
    assert_same(got, want)


class Failing:
    """A hook that raises at one call, on every rank."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("enough")


def test_notes_before_an_error_return(groups: Groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        failing, ends = Failing(3), list[Any]()
        model.model.norm.register_forward_hook(failing)
        model.register_forward_hook(lambda m, args, output: ends.append(output is None), always_call=True)
        with pytest.raises(ZeroDivisionError, match="enough"):
            model.generate(**text_inputs(), **GREEDY)
        assert failing.left == 0
        assert ends == [False, False, True]
        model.generate(**text_inputs(), **GREEDY)
        assert failing.left == -4


def test_threads_take_turns(groups: Groups) -> None:
    with parallelize(encoder("Bert"), workers=groups(2)) as model:
        notes: list[int] = []
        model.register_forward_hook(lambda *_: notes.append(len(notes)))
        threads = [threading.Thread(target=lambda: [model(token_ids()) for _ in range(5)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert notes == list(range(15))


def test_call_with_hooks_may_wait_forever(groups: Groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        notes: list[int] = []
        model.register_forward_hook(lambda *_: notes.append(1))
        model.generate(**text_inputs(), **GREEDY, timeout=float("inf"))
        assert notes == [1] * GREEDY["max_new_tokens"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def nothing(*_: Any) -> None:
    """Do nothing, as a hook."""


class Listening(nn.Module):
    def forward(self, *_: Any) -> None:
        """Do nothing, as a hook."""


def locked() -> Any:
    lock = threading.Lock()
    return lambda *_: lock.acquire(blocking=False) and None


def holding(model: Any) -> Any:
    weight = model.lm_head.weight
    return lambda module, args, output: output @ weight


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a projection": (
        lambda m: m.model.layers[0].self_attn.q_proj.register_forward_hook(nothing),
        r"nothing on model\.layers\.0\.self_attn\.q_proj .* inside model\.layers\.0, which is sharded",
    ),
    "a feed-forward's activation": (
        lambda m: m.model.layers[1].mlp.act_fn.register_forward_pre_hook(nothing),
        r"see one worker's shard\. Register the hook on model\.layers\.1 or on a parent module",
    ),
    "backward": (lambda m: m.lm_head.register_full_backward_hook(nothing), "compute without gradients"),
    "backward, before": (lambda m: m.register_full_backward_pre_hook(nothing), "compute without gradients"),
    "a lock": (lambda m: m.lm_head.register_forward_hook(locked()), "locked.* of lm_head cannot be sent .*lock"),
    "a weight": (
        lambda m: m.lm_head.register_forward_hook(holding(m)),
        "refers to lm_head.weight, and each worker has only a shard",
    ),
    "a hook that reads its module's weight": (
        lambda m: m.lm_head.register_forward_hook(lambda module, *_: print(module.weight.sum())),
        "on lm_head is refused: it reads weights or widths, and each worker has a part",
    ),
    "a hook that reads another module's weight": (
        lambda m: m.model.norm.register_forward_hook(lambda *_: print(m.lm_head.weight.sum())),
        "on model.norm is refused: it reads weights or widths",
    ),
    "a module": (lambda m: m.lm_head.register_forward_hook(Listening()), "belongs to a module, Listening"),
}


@pytest.mark.parametrize(("register", "why"), REFUSED.values(), ids=REFUSED)
def test_refused_in_words_and_nothing_changed(register: Callable[[Any], Any], why: str, groups: Groups) -> None:
    whole = decoder("Llama")
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        with pytest.raises(ParallelError, match=why):
            register(model)
        assert not remote_of(model).calls.hooks.present()
        with torch.no_grad():
            assert_same(model(**text_inputs()).logits, whole(**text_inputs()).logits)
    handle = register(model)
    with pytest.raises(ParallelError, match=why):
        parallelize(model, workers=groups(2))
    handle.remove()
    with parallelize(model, workers=groups(2)), torch.no_grad():
        assert_same(model(**text_inputs()).logits, whole(**text_inputs()).logits)


@pytest.fixture(params=[register_module_forward_hook, register_module_full_backward_hook])
def global_hook(request: pytest.FixtureRequest) -> Iterator[Any]:
    handles: list[Any] = []
    yield lambda: handles.append(request.param(nothing)) or handles[-1]
    for handle in handles:
        handle.remove()


def test_a_global_hook_is_refused_in_words(groups: Groups, global_hook: Callable[[], Any]) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        handle = global_hook()
        for call in (lambda: model(**text_inputs()), lambda: model.generate(**text_inputs(), **GREEDY)):
            with pytest.raises(ParallelError, match="global module hook"):
                call()
        handle.remove()
        assert model(**text_inputs()).logits.shape[-1] > 0
    global_hook()
    with pytest.raises(ParallelError, match="global module hook"):
        parallelize(model, workers=groups(2))


def test_hook_sharing_state_with_processor_is_refused(groups: Groups) -> None:
    class Both(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores

        def hook(self, *_: Any) -> None:
            self.calls += 1

    both = Both()
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        model.lm_head.register_forward_hook(both.hook)
        with pytest.raises(ParallelError, match="shares an object with a logits processor"):
            model.generate(**text_inputs(), **GREEDY, logits_processor=[both])


# -- beginning and end -------------------------------------------------------------------------------------------------


def test_afterwards_they_are_ordinary_hooks(groups: Groups) -> None:
    model, notes = decoder("Llama"), list[Any]()
    before = model.model.norm.register_forward_hook(lambda *_: notes.append("before"))
    with parallelize(model, workers=groups(2)):
        after = model.lm_head.register_forward_hook(lambda *_: notes.append("after"))
    with torch.no_grad():
        model(**text_inputs())
    assert notes == ["before", "after"]
    assert type(model.model.layers[0]._forward_hooks) is OrderedDict
    model.model.layers[0].mlp.register_full_backward_hook(nothing)
    assert copy.deepcopy(model).lm_head._forward_hooks.keys() == model.lm_head._forward_hooks.keys()
    before.remove()
    after.remove()
    assert b"parallelformers" not in pickle.dumps(model.lm_head)
    with torch.no_grad():
        model(**text_inputs())
    assert len(notes) == 2


def test_hooks_of_state_dicts_see_whole_weights(groups: Groups) -> None:
    whole, seen = decoder("Llama"), list[Any]()
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        for each in (whole, model):
            layer = each.model.layers[0]
            layer.register_state_dict_post_hook(lambda m, state, prefix, _: seen.append(dict(state)))
            layer.register_state_dict_pre_hook(lambda m, prefix, keep_vars: seen.append(prefix))
            each.state_dict()
    assert seen[0] == seen[2]
    assert {type(weight) for weight in seen[3].values()} == {ReadOnlyTensor}
    assert_same({name: weight.as_subclass(torch.Tensor) for name, weight in seen[3].items()}, seen[1])


def test_compiled_steps_stand_back(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    compiled = CompileConfig(backend="no such compiler")
    want: list[Any] = []
    got: list[Any] = []
    whole = decoder("Llama")
    listen(whole, ("model.layers.0",), want)
    tokens = whole.generate(**text_inputs(), **GREEDY)
    with parallelize(decoder("Llama"), workers=groups(2), decode=compiled) as model:
        listen(model, ("model.layers.0",), got)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), tokens)
    assert_same(got, want)
    assert "forward hook" in caplog.text


def test_hook_that_removes_itself_runs_once(groups: Groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        layer, calls = model.model.layers[0], []

        def once(*_: Any) -> None:
            calls.append("called")
            handle.remove()

        handle = layer.register_forward_hook(once)
        with torch.no_grad():
            for _ in range(2):
                model(**text_inputs())
        assert calls == ["called"]
        assert not layer._forward_hooks
