"""Finds the policies for a model by the classes of its modules. A composite model, such as a vision tower with a
language model or an encoder with a decoder, gets the policies of all its parts."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import runpy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.builder import misfit
from parallelformers_ng.sharding.policy import CustomPolicies, Policy, Selection, block_names, is_block
from parallelformers_ng.sharding.policy_check import check_policy
from parallelformers_ng.sharding.vocabulary import find_vocabulary
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

log = logging.getLogger("parallelformers_ng")
_MAX_LEFT = 0.1  # fraction of linear weights that policies may leave uncovered, in `is_covered`


def known_policies(
    model: nn.Module, custom: CustomPolicies = None, world_size: int | None = None
) -> tuple[Selection, list[str]]:
    """Return the caller's and the written policies for a model, and the reasons why other written policies do not fit.

    A written policy does not apply to blocks of the caller's policies, and is left out if no other blocks remain.
    Reasons are also logged.
    """
    customs = check_custom(custom)
    names_of_modules = [block_names(module) for module in model.modules()]
    class_names = set().union(*names_of_modules)
    for policy in customs:
        if not class_names & set(policy.blocks()):
            raise PolicyError(
                f"{policy.__name__}: block {'/'.join(policy.blocks())!r} is not in {type(model).__name__}"
                f" (its blocks: {', '.join(repeated_blocks(model)) or 'none repeat'})"
            )
    taken = {name for policy in customs for name in policy.blocks()}
    remaining = set().union(*(names for names in names_of_modules if not names & taken))
    written = [p for p in written_policies() if remaining & set(p.blocks())]
    misfits = {} if world_size is None else {p: why for p in written if (why := misfit(model, p, world_size, customs))}
    for why in misfits.values():
        log.info("%s; its blocks are cut as the twin proof allows", why)
    written = [p for p in written if p not in misfits]
    sources = (["custom"] if customs else []) + (["written"] if written else [])
    return Selection((*customs, *written), "+".join(sources), customs=customs), list(misfits.values())


@cache
def written_policies() -> tuple[type[Policy], ...]:
    package = importlib.import_module("parallelformers_ng.policies")
    names = sorted(f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__))
    return tuple(policy for name in names for policy in _defined(vars(importlib.import_module(name)), name))


def policies_of_file(path: str) -> list[type[Policy]]:
    """Run a Python file, and return the policies that it defines, in the file's order.

    Policies that the file imports are left out.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file of policies at {path}")
    try:
        policies = _defined(runpy.run_path(path, run_name="policies"), "policies")
    except Exception as error:  # the file's code may raise anything
        raise_if_of_handler(error)
        raise PolicyError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not policies:
        raise PolicyError(f"{path} defines no policy; define a class that inherits from Policy (POLICY.md)")
    return policies


def _defined(names: Mapping[str, Any], module: str) -> list[type[Policy]]:
    """Return the policies that a module defines, without policies that the module imports."""
    classes = (value for value in names.values() if isinstance(value, type) and issubclass(value, Policy))
    return [policy for policy in classes if policy.__module__ == module]


def repeated_blocks(model: nn.Module) -> list[str]:
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(dict.fromkeys(type(child).__name__ for items in lists for child in items.children()))


def check_custom(custom: CustomPolicies) -> tuple[type[Policy], ...]:
    """Check the caller's policies, and return them as a tuple."""
    if custom is None:
        return ()
    listed: list[Any] = list(custom) if isinstance(custom, (list, tuple, set)) else [custom]
    for policy in listed:
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise PolicyError(f"custom_policies takes Policy classes, alone or in a list, not {policy!r}")
        check_policy(policy)
        if not policy.blocks() or not policy.plan:
            raise PolicyError(f"{policy.__name__}: both `block` and `plan` must be set")
    return tuple(listed)


def written_places(model: nn.Module, policies: Sequence[type[Policy]]) -> set[str]:
    """Return the paths of the blocks to which policies apply.

    If a block is or contains a whole model, its policy covers only parts of it. Then the result has the paths of the
    policy's rules, cut before the first `*`, instead of the block's path.
    """
    places: set[str] = set()
    for path, module in model.named_modules():
        for policy in policies:
            if is_block(module, policy):
                if path and not any(hasattr(child, "config_class") for child in module.children()):
                    places.add(path)
                else:
                    places.update(f"{path}.{rule.partition('*')[0]}".strip(".") for rule in policy.plan)
    return places


def is_covered(model: nn.Module, policies: Sequence[type[Policy]]) -> bool:
    """Return whether the policies cover at least 90 % of the weights of linear layers and stacked experts in lists.

    Layers outside of lists do not count: if they are large, they are cut as leftovers, which needs no proof. Weights
    are counted in numbers, not in bytes. The result is True for a model without such layers.
    """
    places = written_places(model, policies)
    vocabulary = find_vocabulary(model)
    total = left = 0
    for path, module in model.named_modules():
        stacked = () if isinstance(module, _ConvNd) else module._parameters.values()
        large = [parameter.numel() for parameter in stacked if parameter is not None and parameter.ndim == 3]
        if isinstance(module, (nn.Linear, Conv1D)):
            large = [module.weight.numel()]
        if not large or path in vocabulary or not any(name.isdigit() for name in path.split(".")):
            continue
        total += sum(large)
        if not any(path == place or path.startswith(place + ".") for place in places):
            left += sum(large)
    return left <= _MAX_LEFT * total
