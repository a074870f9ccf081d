"""Defines moves of a walk about the state of the model, which outlives its workers: see tests/helpers/walks.py."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallelformers_ng.errors import GroupError, StateLostError, WorkerError
from parallelformers_ng.model.parallelized import deployment_of, is_parallelized
from tests.helpers.patience import await_incarnation, kill
from tests.helpers.walk_models import STATE
from tests.helpers.walk_moves import Moves, Step


def state_of(model: Any) -> dict[str, Any]:
    """Return copies of the weights, buffers, configuration and changed attributes of a model."""
    own = {
        f"{path}.{name}": getattr(module, name)
        for path, module in model.named_modules()
        for name in STATE
        if "walk_models" in type(module).__module__ and hasattr(module, name)
    }
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "buffers": {name: tensor.detach().clone() for name, tensor in model.named_buffers()},
        "configuration": model.config.to_dict(),
        "own": {name: [*value] if name.endswith("queue") else copy.deepcopy(value) for name, value in own.items()},
    }


class Slow:
    """A processor that counts its calls, and is slow on the workers."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.count = seconds, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        time.sleep(self.seconds)
        return scores


@contextlib.contextmanager
def not_of_code() -> Iterator[None]:
    """Turn a GroupError that an exception of the model's code is, too, into this exception's other type."""
    try:
        yield
    except WorkerError as error:
        raise type(error).__bases__[-1](str(error)) from error


class StateMoves(Moves):
    """A mixin of walks."""

    def state_moves(self) -> list[Callable[[], tuple[str, Step]]]:
        moves = [self._read_state, self._save, self._bring_home, self._train, self._death, self._death_within]
        return [*moves, self._lose] if hasattr(self.whole.base_model, "norm") else moves

    def _read_state(self) -> tuple[str, Step]:
        return "read the state", state_of

    def _save(self) -> tuple[str, Step]:
        def take(model: Any) -> Any:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                return dict(sorted(load_file(f"{folder}/model.safetensors").items()))

        return "save", take

    @contextlib.contextmanager
    def _at_home(self, model: Any) -> Any:
        """End the parallelization of a model for a while."""
        is_cut = is_parallelized(model)
        if is_cut:
            model.deparallelize()
        try:
            yield
        finally:
            if is_cut:
                self.parallelize(model)

    def _bring_home(self) -> tuple[str, Step]:
        first, last = self._call(), self._call()

        def take(model: Any) -> list[Any]:
            with self._at_home(model):
                results = [state_of(model), first(model)]
            return [*results, state_of(model), last(model)]

        return "deparallelize, parallelize again", take

    def remember(self) -> None:
        """Make an optimizer for each of two new models; training goes on with them, across all moves."""
        pair = (self.whole, self.cut)
        self._parameters = [[*map(id, model.parameters())] for model in pair]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in pair]

    def _train(self) -> tuple[str, Step]:
        call = self._call()

        def take(model: Any) -> list[Any]:
            optimizer = self._optimizers[model is self.cut]
            with self._at_home(model), torch.enable_grad():
                assert [*map(id, model.parameters())] == self._parameters[model is self.cut]
                optimizer.zero_grad()
                loss = model(**self.inputs, return_dict=True)[0].pow(2).mean()
                loss.backward()
                optimizer.step()
            return [loss.detach(), call(model)]

        return "train a step", take

    def _death(self) -> tuple[str, Step]:
        call, rank, waits = self._call(), self._random.randrange(2), self._random.random() < 0.5

        def take(model: Any) -> Any:
            if is_parallelized(model):
                deployment = deployment_of(model)
                restarts = deployment.incarnation
                kill(deployment.pids[rank])
                if waits:
                    await_incarnation(model, restarts + 1)
                else:
                    with contextlib.suppress(GroupError), not_of_code():
                        return call(model)
            return call(model)

        return f"rank {rank} dies before a call{', which waits' if waits else ''}", take

    def _death_within(self) -> tuple[str, Step]:
        """Kill a worker during a call of `generate`, and repeat the call, because it has changed nothing."""
        if not self._generates():
            return self._death()
        ids, rank = self._random.choice(self._prompts()), self._random.randrange(2)
        seconds = self._random.uniform(0, 0.3)

        def take(model: Any) -> list[Any]:
            slow = Slow(0.02 if is_parallelized(model) else 0)

            def call() -> list[Any]:
                options = {"do_sample": False, "max_new_tokens": 12, "logits_processor": [slow]}
                return [model.generate(ids, **options), slow.count]

            if is_parallelized(model):
                restarts, pids = deployment_of(model).incarnation, deployment_of(model).pids
                killer = threading.Timer(seconds, kill, [pids[rank]])
                killer.start()
                try:
                    with not_of_code():
                        return call()
                except GroupError:
                    assert slow.count == 0
                finally:
                    killer.join()
                    await_incarnation(model, restarts + 1)
            return call()

        return f"rank {rank} dies in a call after {seconds:.2f} s", take

    def _lose(self) -> tuple[str, Step]:
        """Lose state that only the workers had; calls raise until the program accepts the loss."""
        if not hasattr(self.whole.base_model.norm, "lock"):
            return self._death()
        call, accepts = self._call(), self._random.random() < 0.5

        def take(model: Any) -> list[Any]:
            norm = model.base_model.norm
            norm.locks = True
            results = [call(model)]
            norm.locks = False
            if is_parallelized(model):
                restarts = deployment_of(model).incarnation
                kill(deployment_of(model).pids[0])
                await_incarnation(model, restarts + 1)
                for _ in range(2):
                    with pytest.raises(StateLostError, match="lock"):
                        call(model)
                if accepts:
                    model.accept_lost_state()
            norm.lock = None
            return [*results, state_of(model), call(model)]

        return f"lose a lock, {'accept' if accepts else 'set it again'}", take
