"""Runs a twin, and records the layers that are called and the weights that influence the outputs."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.autopolicy.candidate_inputs import candidate_inputs
from parallelformers_ng.autopolicy.own_draws import OwnDraws
from parallelformers_ng.autopolicy.twin import Twin, TwinProbe, equal, failure_of, run, sharing_copy
from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.layer_uses import is_only_called, reads_parameters
from parallelformers_ng.sharding.structure import dotted, traced_calls, uses

DRAWS = "its forward draws random numbers: two runs differ"
_ROWS = 6  # rows of the inputs of a single layer
_SECONDS = 4.0  # after 4 s of processor time, each module is tried only on the first candidate inputs


def observe(model: PreTrainedModel, seed: int) -> Twin:
    """Return a twin with tests (probes) of the model and its parts.

    The twin is in float64, for small rounding errors, if the whole model runs in float64. It is also in float64 if
    tests reach more parameters than in float32, or if they took over 4 s of processor time. Otherwise it is in float32.

    `model` becomes float64 in place, and all its floating-point parameters require gradients. A twin in float32 has a
    copy of `model`.
    """
    observer = _Observer(model.to(torch.float64), seed)
    exact = observer.probe_parts()
    if exact.runs_whole or (exact.probes and time.thread_time() > observer.end):
        return exact
    plain = _Observer(copy.deepcopy(model).to(torch.float32), seed).probe_parts()
    return exact if len(exact.gradients) > len(plain.gradients) else plain


def observe_single_layers(twin: Twin, seed: int) -> Twin:
    """Add a test (probe) of each layer that no other test of the twin reaches; return the twin."""
    observer = _Observer(twin.model, seed, twin)
    reached = {name.rpartition(".")[0] for name in twin.gradients}
    for path, inputs in single_layers(observer.copy, reached, seed):
        if not observer.run(observer.copy.get_submodule(path), path, inputs):
            twin.single_layers.append(path)
    return twin


class _Observer:
    """An observer of a twin, which runs a copy with shared parameters, so that no forward stores state in the twin."""

    def __init__(self, model: PreTrainedModel, seed: int, twin: Twin | None = None) -> None:
        self.twin = twin or Twin(model, [], {}, {})
        self.seed = seed
        self.end = time.thread_time() + _SECONDS
        self.copy = sharing_copy(model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())  # gradients show which parameters influence outputs

    def probe_parts(self) -> Twin:
        """Make a test (probe) of the model, and tests of the parts that this test does not reach."""
        refusals = [self._probe(self.copy, "")]
        for path, part in self.copy.named_modules():
            if path and isinstance(part, PreTrainedModel) and not self._reached(part, path):
                refusal = self._probe(part, path)
                refusals.append(f"{path}: {refusal}" if refusal else "")
        self.twin.unreached = "; ".join(refusal for refusal in refusals if refusal)
        return self.twin

    def _reached(self, part: nn.Module, path: str) -> bool:
        large = [name for name, p in part.named_parameters() if p.ndim >= 2]
        return not large or sum(f"{path}.{name}" in self.twin.gradients for name in large) >= 0.7 * len(large)

    def _probe(self, part: nn.Module, path: str) -> str:
        """Add a test of one part, with the first inputs that run. Return "", or the reason why no inputs run."""
        refusal = ""
        tried: list[dict[str, Any]] = []
        for inputs in candidate_inputs(part, self.seed):
            shapes = {name: getattr(value, "shape", value) for name, value in inputs.items()}
            if not inputs or shapes in tried:
                continue
            tried.append(shapes)
            problem = self.run(part, path, inputs)
            if not problem:
                return ""
            refusal = refusal or problem
            if time.thread_time() > self.end:
                break
        return refusal or "its forward takes none of the known inputs"

    def run(self, part: nn.Module, path: str, inputs: dict[str, Any]) -> str:
        """Run one part on the inputs, and add a test of the part. Return "", or the reason why no test was added."""
        try:
            with OwnDraws(0), traced_calls(part) as traced:
                outputs = run(part, inputs)
            with OwnDraws(1), torch.no_grad():
                again = run(part, inputs)
        except Exception as error:  # modelling code may raise any exception on inputs that it refuses
            return failure_of(error)
        floats = [o for o in outputs if o.is_floating_point()]
        if not floats or not any(o.isfinite().any() and o.numel() for o in floats):
            return "its outputs are not numbers"
        if not equal(again, [o.detach() for o in outputs], self.twin.tolerance / 10):
            return DRAWS
        with contextlib.suppress(RuntimeError, AssertionError):  # a part without gradients raises
            _differentiate(part, path, floats, self.twin.gradients)
        calls = self.twin.calls
        start = len(calls)
        for name, order in traced.items():
            calls.setdefault(dotted(path, name), start + order)
        self.twin.probes.append(TwinProbe(path, inputs, [o.detach().clone() for o in outputs]))
        return ""


def _differentiate(
    part: nn.Module, path: str, outputs: Sequence[torch.Tensor], gradients: dict[str, torch.Tensor]
) -> None:
    """Add the absolute gradients of a random weighted sum of the outputs to `gradients`."""
    generator = torch.Generator().manual_seed(7)
    total: Any = 0.0
    for output in outputs:
        if output.requires_grad:
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
            total = total + (output.nan_to_num(0.0, 0.0, 0.0) * weights).sum()
    if not isinstance(total, torch.Tensor):
        return
    named = [(name, p) for name, p in part.named_parameters(remove_duplicate=False) if p.requires_grad]
    slopes = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    for (name, _), gradient in zip(named, slopes, strict=True):
        if gradient is not None:
            slope = gradient.nan_to_num(1.0, 1.0, 1.0).abs()
            if bool(slope.any()):
                full_name = dotted(path, name)
                gradients[full_name] = slope + gradients.get(full_name, torch.zeros(()))


def single_layers(model: nn.Module, reached: set[str], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, inputs) of layers that no forward of the model calls, so that each can be tested alone.

    A layer qualifies only if the modelling code does nothing with the layer except calls (`sharding/layer_uses.py`).
    With gathered outputs, such a column-parallel layer has the same outputs as a whole layer in every model.
    """
    generator = torch.Generator().manual_seed(seed)
    used = uses(model)
    for path, module in model.named_modules():
        if path in reached or any(used[id(p)] > 1 for p in module._parameters.values() if p is not None):
            continue
        inputs = _inputs(module, generator)
        if inputs is None:
            continue
        if is_only_called(model, path) or (has_experts_interface(module) and not reads_parameters(model, path)):
            yield path, inputs


def _inputs(module: Any, generator: torch.Generator) -> dict[str, Any] | None:
    """Return inputs for a layer of a known class; None for any other class, also for subclasses of known classes."""
    if type(module) is nn.Linear:
        return {"input": _randn(_ROWS, module.in_features, module.weight, generator)}
    if type(module) is Conv1D:
        return {"x": _randn(_ROWS, module.nx, module.weight, generator)}
    if type(module) is nn.Embedding and module.max_norm is None:
        return {"input": torch.randint(0, module.num_embeddings, (_ROWS,), generator=generator)}
    if has_experts_interface(module):
        down = module.down_proj
        width = down.shape[2] if getattr(module, "is_transposed", False) else down.shape[1]
        return {
            "hidden_states": _randn(_ROWS, width, down, generator),
            "top_k_index": torch.randint(0, down.shape[0], (_ROWS, 2), generator=generator),
            "top_k_weights": torch.rand(_ROWS, 2, generator=generator).to(down.dtype),
        }
    return None


def _randn(rows: int, width: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(like.dtype)
