"""Runs random walks over users' actions: the same steps on a whole model and on a parallelized copy.

After every step both models must give the same result, or the parallelized model must raise a typed error without
changes. At the end of a walk `deparallelize()` must restore the exact bits of the whole model.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelformers_ng import warm_up
from parallelformers_ng.checkpoint.read_only import ReadOnlyTensor
from parallelformers_ng.errors import ParallelError, WorkerError
from parallelformers_ng.model.parallelized import is_parallelized
from parallelformers_ng.sharding.cache_names import CACHE
from tests.generation.test_generate import assert_same
from tests.helpers.walk_code_moves import CodeMoves
from tests.helpers.walk_models import IN_ORDER, MODELS
from tests.helpers.walk_moves import FaultMoves, Step, await_as_before, open_and_running
from tests.helpers.walk_object_moves import ObjectMoves
from tests.helpers.walk_state_moves import StateMoves, state_of


@dataclass
class Walk(FaultMoves, CodeMoves, StateMoves, ObjectMoves):
    """A walk with one pair of models.

    Args:
        name: name of the model in MODELS.
        seed: seed of the walk.
        parallelize: function from a whole model to a parallelized one.

    Attributes:
        whole, cut: the model, and a parallelized copy of it.
        refused: number of steps that the parallelized model refused.
        taken, refusals: numbers of steps of each kind taken, and refused.
        steps: descriptions of the steps, for readers.
    """

    name: str
    seed: int
    parallelize: Callable[[Any], Any]
    refused: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        warm_up()  # the fork server stays after the walk
        gc.collect()
        self._before = open_and_running()
        make, inputs = MODELS[self.name]
        self.inputs = inputs()
        self.whole, self.cut = make(), self.parallelize(make())
        self.remember()
        self.in_order = self.name in IN_ORDER
        self._random = random.Random(self.seed)
        self._kept = []
        self.steps: list[str] = []

    def run(self, count: int) -> None:
        """Take `count` steps, then end the parallelization and compare the weights."""
        for _ in range(count):
            name, step = self._draw()
            self.steps.append(name)
            refused = self.refused
            self._take(step)
            self.refusals[self._kind] += self.refused - refused
        self.finish()

    def finish(self) -> None:
        self.check_kept()
        self._kept.clear()
        self.cut.deparallelize()
        is_exact = not (self.in_order or self.taken["train"])
        for (name, got), want in zip(self.cut.named_parameters(), self.whole.named_parameters(), strict=True):
            assert torch.equal(got, want[1]) or not is_exact, name
            assert got.requires_grad == want[1].requires_grad, name
        for name, want in self.whole.named_buffers():
            assert torch.equal(self.cut.get_buffer(name), want) or not is_exact, name
        assert_same(state_of(self.cut), state_of(self.whole))
        modes = [[module.training for module in model.modules()] for model in (self.cut, self.whole)]
        assert modes[0] == modes[1]
        with torch.no_grad():
            seed_all()
            want = comparable(self.whole(**self.inputs))
            seed_all()
            assert_same(comparable(self.cut(**self.inputs)), want)
        await_as_before(self._before)

    def abandon(self) -> None:
        """End the processes of a failed walk."""
        self._kept.clear()
        if is_parallelized(self.cut):
            self.cut.deparallelize()

    def _take(self, step: Step) -> None:
        seed_all()
        try:
            got: Any = step(self.cut)
        except AssertionError:
            raise
        except Exception as error:
            if is_refusal(error):
                self.refused += 1  # the next comparison shows whether the refusal changed anything
                return
            got = type(error)
        drawn = [random.random(), np.random.rand()]
        seed_all()
        try:
            with torch.no_grad():
                want: Any = step(self.whole)
        except Exception as error:
            want = type(error)
        if isinstance(got, type) and isinstance(want, type):
            # A worker's error has the original type too. Inputs of another type may fail in another place.
            assert issubclass(got, want) or self._kind == "part", (got, want)
        else:
            assert_same(comparable(got), comparable(want))
            assert drawn == [random.random(), np.random.rand()], "the streams of the program differ"
        self.check_kept()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _draw(self) -> tuple[str, Step]:
        makers = (
            [self._forward] * 5
            + [self._generate] * 4
            + [self._part] * 4
            + [self._read] * 4
            + [self._setting] * 3
            + [self._mode] * 2
            + [self._change] * 4
            + [self._move] * 2
            + [self._hook] * 3
            + [self._attribute]
            + self.fault_moves()
            + self.code_moves()
            + self.state_moves()
            + self.object_moves()
        )
        maker = self._random.choice(makers)
        self._kind = maker.__name__.strip("_")
        self.taken[self._kind] += 1
        return maker()

    def _forward(self) -> tuple[str, Step]:
        options: dict[str, Any] = self._random.choice(
            [
                {},
                {"output_attentions": True},
                {"output_hidden_states": True},
                {"return_dict": False},
                {"use_cache": False},
            ]
        )
        return f"forward {options}", lambda model: model(**self.inputs, **options)

    def _generate(self) -> tuple[str, Step]:
        options: dict[str, Any] = self._random.choice(
            [
                {},
                {"num_beams": 2},
                {"do_sample": True, "top_k": 20},
                {"repetition_penalty": 1.3},
                {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
            ]
        )
        ids = {name: self.inputs[name] for name in ("input_ids", "attention_mask") if name in self.inputs}
        if not ids or not self.whole.can_generate():
            return self._forward()
        new = self._random.randint(1, 5)
        return f"generate {options}", lambda model: model.generate(**ids, **options, max_new_tokens=new)

    def _module(self) -> tuple[str, nn.Module]:
        return self._random.choice(list(self.whole.named_modules()))

    def _part(self) -> tuple[str, Step]:
        path, module = self._module()
        weight = next((w for w in module.parameters(recurse=False) if w.ndim == 2), None)
        if isinstance(module, nn.Embedding):
            states: Any = torch.tensor([[3, 1, 2]])
        elif isinstance(module, nn.Linear):
            states = torch.randn(1, 3, module.in_features, generator=torch.Generator().manual_seed(1))
        else:
            width = weight.shape[-1] if weight is not None else 48
            states = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1))
        return f"{path}(…)", lambda model: model.get_submodule(path)(states)

    def _read(self) -> tuple[str, Step]:
        path, _ = self._module()
        names = [name for name, _ in self.whole.named_parameters()]
        name = self._random.choice(names)
        reads: dict[str, Step] = {
            f"{name}.sum()": lambda model: model.get_parameter(name).sum().detach(),
            f"{name}[0]": lambda model: model.get_parameter(name).detach()[0] * 2,
            f"{path}.state_dict()": lambda model: dict(model.get_submodule(path).state_dict()),
            "num_parameters": lambda model: model.num_parameters(),
            "footprint": lambda model: model.get_memory_footprint(),
            "dtype, device": lambda model: [model.dtype, model.device],
            "names": lambda model: [name for name, _ in model.named_modules()],
        }
        return self._random.choice(list(reads.items()))

    def _setting(self) -> tuple[str, Step]:
        name, value = self._random.choice(
            [
                ("output_attentions", True),
                ("output_attentions", False),
                ("output_hidden_states", True),
                ("output_hidden_states", False),
            ]
        )

        def change(model: Any) -> None:
            setattr(model.config, name, value)

        return f"config.{name} = {value}", change

    def _mode(self) -> tuple[str, Step]:
        path, _ = self._module()
        mode = self._random.random() < 0.3
        return f"{path}.train({mode})", lambda model: type(model.get_submodule(path).train(mode)).__name__

    def _change(self) -> tuple[str, Step]:
        path, module = self._module()
        name = self._random.choice([name for name, _ in self.whole.named_parameters()])
        child = next((child for child, _ in module.named_children()), None)
        changes: dict[str, Step] = {
            f"zero {name}": lambda model: model.get_parameter(name).data.zero_() and None,
            f"init {name}": lambda model: nn.init.zeros_(model.get_parameter(name)) and None,
            f"{path}.half()": lambda model: type(model.get_submodule(path).half()).__name__,
            f"{path}.load": lambda model: model.get_submodule(path).load_state_dict({}, strict=False) and None,
            f"{path}.{child} = Identity": lambda model: setattr(model.get_submodule(path), child or "x", nn.Identity()),
            f"{path}.requires_grad_": lambda model: type(model.get_submodule(path).requires_grad_(False)).__name__,
            "resize": lambda model: model.resize_token_embeddings(200) and None,
            "adapter": lambda model: model.add_adapter(None),
            "copy": lambda model: type(copy.deepcopy(model.get_submodule(path))).__name__,
        }
        what, step = self._random.choice(list(changes.items()))
        return what, self._refused_or_harmless(step)

    def _refused_or_harmless(self, step: Step) -> Step:
        """Return a step that the parallelized model must refuse if it changes weights.

        The whole model never runs such a step, because each step is tried on a copy first.
        """

        def take(model: Any) -> Any:
            if model is self.whole:
                trial = copy.deepcopy(model)
                step(trial)
                same = all(torch.equal(a, b) for a, b in zip(trial.parameters(), model.parameters(), strict=True))
                assert same, "the parallelized model accepted a change of weights"
            return step(model)

        return take

    def _move(self) -> tuple[str, Step]:
        path, _ = self._module()
        moves: dict[str, Step] = {
            "float": lambda model: type(model.get_submodule(path).float()).__name__,
            "to cpu": lambda model: type(model.get_submodule(path).to(model.device)).__name__ if path else None,
            "to float32": lambda model: type(model.get_submodule(path).to(torch.float32)).__name__ if path else None,
        }
        what, step = self._random.choice(list(moves.items()))
        return f"{path}: {what}", step

    def _hook(self) -> tuple[str, Step]:
        """Register a hook that notes a module's output, call the model, and remove the hook; the notes are compared."""
        path, _ = self._module()

        def noted(model: Any) -> list[torch.Tensor]:
            notes: list[torch.Tensor] = []
            handle = model.get_submodule(path).register_forward_hook(
                lambda module, args, output: notes.append(first_tensor(output))
            )
            try:
                model(**self.inputs)
            finally:
                handle.remove()
            return [note for note in notes if note is not None]

        return f"hook on {path}", noted

    def _attribute(self) -> tuple[str, Step]:
        places = [
            (path, name)
            for path, module in self.whole.named_modules()
            for name in ("variance_epsilon", "eps", "p", "scaling")
            if isinstance(vars(module).get(name), float)
        ]
        if not places:
            return self._forward()
        path, name = self._random.choice(places)
        factor = self._random.choice([1.0, 1.5])

        def change(model: Any) -> None:
            module = model.get_submodule(path)
            setattr(module, name, vars(module)[name] * factor)

        return f"{path}.{name} *= {factor}", change


def is_refusal(error: Exception) -> bool:
    """Whether the library raised the error, and not the model's code on a worker."""
    return issubclass(type(error).__bases__[-1] if isinstance(error, WorkerError) else type(error), ParallelError)


def seed_all() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output."""
    if isinstance(output, torch.Tensor):
        return output.detach().clone()
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((tensor for item in items if (tensor := first_tensor(item)) is not None), None)


def comparable(value: Any) -> Any:
    """Return a result without its caches, and with detached tensors; weights that were gathered are read-only ones."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.as_subclass(torch.Tensor) if isinstance(value, ReadOnlyTensor) else value
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items() if name != CACHE}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value if not hasattr(item, "get_seq_length")]
    return value
