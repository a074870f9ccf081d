"""Checks a policy before it is applied.

Without this check, a misspelt name or a value of a wrong type would fail far from its cause, or not at all. For
example, a string instead of a tuple would be read as a tuple of letters.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from parallelformers_ng.errors import PolicyError, did_you_mean
from parallelformers_ng.sharding import rules
from parallelformers_ng.sharding.heads import Heads
from parallelformers_ng.sharding.partition import Part
from parallelformers_ng.sharding.policy import Policy, Rule
from parallelformers_ng.sharding.tensors import dotted

_ATTRIBUTES = {
    "block": "a class name, or a tuple of them",
    "plan": "a dictionary of rules by path: {'mlp.up_proj': Column(), …}",
    "optional": "a tuple of paths, for example ('crossattention',)",
    "requires": "a dictionary of values by attribute path: {'config.quantized': False}",
}


def check_policy(policy: type[Policy]) -> None:
    """Check a policy for mistakes that are independent of the model."""
    who = policy.__name__
    _check_attributes(policy, who)
    for path, rule in policy.plan.items():
        where = f"{who}: rule {path!r}"
        if isinstance(rule, type) and issubclass(rule, Rule):
            raise PolicyError(f"{where} is the class {rule.__name__}; write {rule.__name__}(…), with parentheses")
        if not isinstance(rule, Rule):
            raise PolicyError(f"{where} is {rule!r}; it takes one of {', '.join(_rules())}")
        _check_fields(where, rule)
        _check_arguments(where, rule)
        _check_paths(where, path, rule, policy)


def _check_attributes(policy: type[Policy], who: str) -> None:
    for cls in policy.__mro__[: policy.__mro__.index(Policy)]:
        for name, value in vars(cls).items():
            if name in _ATTRIBUTES or name.startswith("_"):
                continue
            what = "a method" if callable(value) or isinstance(value, (classmethod, staticmethod, property)) else "set"
            raise PolicyError(
                f"{who}: {name} is {what} in {cls.__name__}; a policy has {', '.join(_ATTRIBUTES)} and nothing else"
                f"{_near(name, _ATTRIBUTES)}"
            )
    for name, allowed in _ATTRIBUTES.items():
        value = getattr(policy, name)
        is_one_name = name == "block" and isinstance(value, str)
        kinds = dict if name in ("plan", "requires") else (tuple, list)
        if not is_one_name and not (isinstance(value, kinds) and all(isinstance(item, str) for item in value)):
            raise PolicyError(f"{who}: {name} is {value!r}; it takes {allowed}")


def _check_fields(where: str, rule: Any) -> None:
    """Raise PolicyError if the type of a rule's argument is not the declared type. Also check arguments of a `Part`."""
    hints = get_type_hints(type(rule))
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        for inner in value if isinstance(value, tuple) else ():
            if isinstance(inner, Part):
                _check_fields(f"{where}: {field.name}", inner)
        if not _fits(value, hints[field.name]):
            takes = re.sub(r"\b(typing|parallelformers_ng[\w.]*)\.", "", inspect.formatannotation(hints[field.name]))
            choices = re.findall(r"'(\w+)'", takes)
            wrong = next((item for item in value if item not in choices), "") if isinstance(value, tuple) else value
            example = f", for example ({value!r},)" if isinstance(value, str) and "tuple[str" in takes else ""
            hint = _near(wrong, choices) + example
            raise PolicyError(f"{where}: {field.name} is {value!r}; {type(rule).__name__} takes {takes}{hint}")


def _check_arguments(where: str, rule: Rule) -> None:
    """Raise PolicyError if the arguments of a rule contradict each other."""
    fused, interleaved = getattr(rule, "fused", 1), getattr(rule, "interleaved", ())
    if fused == () or (isinstance(fused, int) and fused < 1):
        raise PolicyError(f"{where}: fused is {fused!r}; it takes the number of parts, 1 or more, or their units")
    if interleaved and fused != 1:
        raise PolicyError(f"{where}: fused and interleaved are both set; parts lie side by side or within each group")
    unit = getattr(rule, "unit", "")
    if unit and (interleaved or isinstance(fused, tuple)):
        name = "interleaved" if interleaved else "fused"
        raise PolicyError(f"{where}: unit is {unit!r}, and {name} names a unit for each part; leave unit out")
    if getattr(rule, "gather", False) and getattr(rule, "widths", ()):
        raise PolicyError(f"{where}: gather and widths are both set, but widths counts outputs that stay cut")


def _check_paths(where: str, path: str, rule: Rule, policy: type[Policy]) -> None:
    """Raise PolicyError if a rule names a path at which the plan has no `Heads` rule."""
    heads = [name for name, other in policy.plan.items() if isinstance(other, Heads)]
    above = getattr(rule, "heads", None)
    if above is not None and above not in heads:
        raise PolicyError(
            f"{where}: heads is {above!r}, but the plan has no Heads(…) at that path{_near(above, heads)}"
        )
    if isinstance(rule, rules.Renewed):
        carried = dotted(path, rule.attention)
        if carried not in heads:
            raise PolicyError(f"{where}: the plan has no Heads(…) at {carried!r}{_near(carried, heads)}")


def _rules() -> list[str]:
    members = ((name, getattr(rules, name)) for name in rules.__all__)
    return [name for name, cls in members if isinstance(cls, type) and issubclass(cls, Rule) and cls is not Rule]


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is Ellipsis:
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is type:
        return isinstance(value, type) and issubclass(value, arguments[0])
    return type(value) is bool if hint is bool else isinstance(value, hint) and type(value) is not bool


def _near(name: Any, known: Iterable[str]) -> str:
    return did_you_mean(name, known) if isinstance(name, str) else ""
