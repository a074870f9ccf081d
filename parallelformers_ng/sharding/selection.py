"""Which policies apply to a model, and what of it they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.sharding.policy import Policy
from parallelformers_ng.sharding.vocabulary import find_vocabulary

_LEFT_AT_MOST = 0.1


@dataclass(frozen=True)
class Selection:
    """The policies that apply to a model.

    Attributes:
        policies: each with at least one block in the model.
        source: "custom", "written", "native plan" or "inferred", joined by "+" where parts differ; "held in parts"
            where only leftovers are cut.
        vocabulary: whether embeddings and heads are cut by rows of the vocabulary.
        leftovers: whether what the policies leave whole is cut where it is large.
    """

    policies: tuple[type[Policy], ...]
    source: str
    vocabulary: bool = True
    leftovers: bool = True


def block_names(module: nn.Module) -> set[str]:
    """The names by which a policy may call a module: those of its classes, alone and behind their package."""
    names = set()
    for cls in type(module).__mro__:
        package = cls.__module__.rpartition(".")[0].rpartition(".")[2]
        names |= {cls.__name__, f"{package}.{cls.__name__}"}
    return names


def is_block(module: nn.Module, policy: type[Policy]) -> bool:
    """Whether `module` is a block of `policy`, by class name, a subclass included, and by the layers it must hold."""
    named = not block_names(module).isdisjoint(policy.blocks())
    return named and (not policy.holds or set(policy.holds) <= {name for name, _ in module.named_modules()})


def written_places(model: nn.Module, policies: Sequence[type[Policy]]) -> set[str]:
    """Paths that policies answer for: their blocks, or, of a block that is a whole model, the layers they name."""
    found: set[str] = set()
    for path, module in model.named_modules():
        for policy in policies:
            if is_block(module, policy):
                if path and not any(hasattr(child, "config_class") for child in module.children()):
                    found.add(path)
                else:
                    found.update(f"{path}.{rule.partition('*')[0]}".strip(".") for rule in policy.plan)
    return found


def is_covered(model: nn.Module, policies: Sequence[type[Policy]]) -> bool:
    """Whether the policies answer for nearly all of what could be cut, tables of positions aside."""
    places = written_places(model, policies)
    vocabulary = {layer.path for layer in find_vocabulary(model, taken=set())}
    total = left = 0
    for path, module in model.named_modules():
        large = [p.numel() for p in module._parameters.values() if p is not None and p.ndim == 3]
        if isinstance(module, _ConvNd):
            large = []
        if isinstance(module, (nn.Linear, Conv1D)):
            large = [module.weight.numel()]
        if not large or path in vocabulary:
            continue
        total += sum(large)
        if not any(path == place or path.startswith(place + ".") for place in places):
            left += sum(large)
    return left <= _LEFT_AT_MOST * total
