"""Tests that wrong options are refused in one line that names the option, its value and what is meant."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.option_checks import read_options
from parallelformers_ng.options import BatchingOptions, FitOptions, QuantizeOptions, RayOptions, WorkerOptions
from parallelformers_ng.serving.serve_options import ServeOptions

KINDS = {
    "workers": WorkerOptions,
    "batching": BatchingOptions,
    "fit": FitOptions,
    "quantize": QuantizeOptions,
    "ray": RayOptions,
    "serve.toml": ServeOptions,
}
FIELDS = [
    pytest.param(argument, kind, field.name, id=f"{argument}-{field.name}")
    for argument, kind in KINDS.items()
    for field in dataclasses.fields(kind)
]


def refusal(argument: str, kind: Any, options: dict[str, Any]) -> str:
    with pytest.raises(ParallelError) as caught:
        read_options(kind, options, argument)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("argument", KINDS)
def test_all_options_have_defaults_of_their_types(argument: str) -> None:
    kind: Any = KINDS[argument]
    options = kind(**{"serve.toml": {"model": "a folder"}, "quantize": {"scheme": "int8"}}.get(argument, {}))
    assert read_options(kind, vars(options), argument) == options


@pytest.mark.parametrize(("argument", "kind", "name"), FIELDS)
def test_unknown_option_names_the_one_that_is_meant(argument: str, kind: Any, name: str) -> None:
    mistyped = name[:1] + name
    assert refusal(argument, kind, {mistyped: 3}) == f"{argument} has no option {mistyped!r} (did you mean {name!r}?)"


@pytest.mark.parametrize("wrong", [{3}, 1j, {"one": 1j}], ids=["set", "complex", "mapping"])
@pytest.mark.parametrize(("argument", "kind", "name"), FIELDS)
def test_wrong_type_names_value_and_type(argument: str, kind: Any, name: str, wrong: Any) -> None:
    if name in ("ray", "resources", "runtime_env") and isinstance(wrong, dict):
        pytest.skip("takes a mapping")
    takes = "it takes (int|str|list|dict|True or False)"
    said = refusal(argument, kind, {name: wrong})
    assert re.match(f"{re.escape(argument)}: {name} is {re.escape(repr(wrong))}; {takes}", said)
