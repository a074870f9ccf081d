"""Tests values that the program sets before and after `parallelize`: the next call has them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from parallelformers_ng import ParallelError, parallelize
from tests.strangers.agreement import assert_agree, assert_agree_in_a_batch, prompt
from tests.zoo.build import largest_difference
from tests.zoo.decoders import decoder

pytestmark = pytest.mark.promise("values")
SETTINGS = """
from collections import OrderedDict
from decimal import Decimal
import numpy as np

SCALE = 1.0
TABLE = {"scale": 1.0}
LARGE = {number: 1.0 for number in range(5_000)}
EXACT = Decimal(1)
ORDERED = OrderedDict(scale=1.0)
ARRAY = np.ones(100_000)

class Options:
    scale = 1.0
    nested = {"scale": 1.0}
    maybe = None

OPTIONS = Options()

def product():
    maybe = OPTIONS.maybe or 1.0
    return SCALE * TABLE["scale"] * LARGE[17] * float(EXACT) * ORDERED["scale"] * float(ARRAY[-1]) * maybe
"""
MODEL = """
import settings_of_a_test as settings
from transformers.models.llama import modeling_llama

class MLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        late = getattr(settings, "LATE", 1.0) * settings.OPTIONS.scale * settings.OPTIONS.nested["scale"]
        return super().forward(x) * settings.SCALE * settings.product() * late
"""

BY_PATH = """
from transformers.models.llama import modeling_llama
from .scales import scaled

class MLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        from .scales import SCALE
        return scaled(super().forward(x)) * SCALE
"""


@pytest.fixture(params=["imported", "here"])
def settings_and_class(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, type]]:
    """Return a module with settings, and a class that reads them, which a rank imports or gets by value."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "settings_of_a_test.py").write_text(SETTINGS)
    (tmp_path / "model_of_a_test.py").write_text(MODEL)
    importlib.invalidate_caches()
    settings: Any = importlib.import_module("settings_of_a_test")

    class MLP(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import settings_of_a_test

            late = getattr(settings, "LATE", 1.0) * settings.OPTIONS.scale * settings.OPTIONS.nested["scale"]
            return super().forward(x) * settings_of_a_test.SCALE * settings.product() * late

    yield settings, importlib.import_module("model_of_a_test").MLP if request.param == "imported" else MLP
    for name in ("settings_of_a_test", "model_of_a_test"):
        sys.modules.pop(name, None)


def own(cls: type) -> Any:
    model = decoder("Llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = cls
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda settings: setattr(settings, "SCALE", 3.0),
    "new table": lambda settings: setattr(settings, "TABLE", {"scale": 1.5}),
    "inside the new table": lambda settings: settings.TABLE.update(scale=0.5),
    "large table": lambda settings: settings.LARGE.update({17: 3.0}),
    "decimal": lambda settings: setattr(settings, "EXACT", Decimal("0.5")),
    "ordered": lambda settings: settings.ORDERED.update(scale=3.0),
    "array": lambda settings: settings.ARRAY.__setitem__(-1, 0.5),
    "class attribute": lambda settings: setattr(settings.Options, "scale", 3.0),
    "attribute of an object": lambda settings: setattr(settings.OPTIONS, "scale", 0.5),
    "None before": lambda settings: setattr(settings.Options, "maybe", 3.0),
    "nested": lambda settings: settings.Options.nested.update(scale=0.5),
    "late": lambda settings: setattr(settings, "LATE", 3.0),
}


SETS = (
    ("number", "new table", "large table", "decimal", "ordered", "array", "class attribute", "None before", "late"),
    ("inside the new table", "attribute of an object", "nested"),
)
"""Names of changes between two calls. Each set costs a proof that the plan is valid for the new values."""


def test_values_in_modules_reach_the_next_call(groups, settings_and_class: tuple[ModuleType, type]) -> None:
    """A parallelized model gets each change with its next call; a later model has all of them from the start."""
    settings, cls = settings_and_class
    whole, cut = own(cls), own(cls)
    with parallelize(cut, workers=groups(2), batching=True):
        assert_agree(cut, whole, prompt())
        for names in SETS:
            for name in names:
                before = whole(prompt()).logits
                CHANGES[name](settings)
                assert not torch.allclose(before, whole(prompt()).logits), name
            assert_agree(cut, whole, prompt())
        assert_agree_in_a_batch(cut, whole, [prompt(9), prompt(12, seed=2)])
    again = own(cls)
    with parallelize(again, workers=groups(2)):
        assert_agree(again, whole, prompt())


FACTOR = 1.0


def test_values_of_closures_and_later_globals(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    def read() -> float:
        return scale * FACTOR * globals().get("LATER", 1.0)

    class MLP(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * read()

    whole, cut = own(MLP), own(MLP)
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        scale = 3.0
        assert_agree(cut, whole, prompt())
        monkeypatch.setitem(globals(), "FACTOR", 0.5)
        assert_agree(cut, whole, prompt())
        monkeypatch.setitem(globals(), "LATER", 0.25)
        assert_agree(cut, whole, prompt())


def test_deleted_values_are_refused(groups, settings_and_class: tuple[Any, type]) -> None:
    settings, cls = settings_and_class
    cut = own(cls)
    with parallelize(cut, workers=groups(2)):
        del settings.SCALE
        with pytest.raises(ParallelError, match="SCALE was changed after the model was parallelized"):
            cut(prompt())


LIMIT = 0.1


class Limited(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-LIMIT, LIMIT)


def test_globals_of_replicated_layers_may_change(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        model.model.layers[0].mlp.up_proj.__class__ = Limited
    with parallelize(cut, workers=groups(2)):
        for limit in (0.1, 0.02):
            monkeypatch.setitem(globals(), "LIMIT", limit)
            assert_agree(cut, whole, prompt())


def test_environment_variables_reach_the_next_call(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's code reads a variable that the program sets, changes and deletes after `parallelize`."""
    usual = modeling_llama.LlamaMLP.forward

    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return usual(self, x) * float(os.environ.get("SCALE_OF_A_TEST", "1"))

    whole, cut, prompts = decoder("Llama"), decoder("Llama"), [prompt(seed=seed) for seed in (1, 2, 3)]
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", scaled)
    with parallelize(cut, workers=groups(2), batching=True):
        plain = whole(prompts[0]).logits
        for scale in ("0.5", "0.25"):
            monkeypatch.setenv("SCALE_OF_A_TEST", scale)
            assert largest_difference(whole(prompts[0]).logits, plain) > 0.01
            assert_agree(cut, whole, prompts[0])
            assert_agree_in_a_batch(cut, whole, prompts)
        monkeypatch.delenv("SCALE_OF_A_TEST")
        assert_agree_in_a_batch(cut, whole, prompts)
        assert_agree(cut, whole, prompts[0])


def test_attributes_of_local_classes_reach_the_next_call(groups) -> None:
    class Scaled(modeling_llama.LlamaDecoderLayer):
        factor = 1.0

        def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            return super().forward(hidden_states, **others) * self.factor * getattr(self, "late", 1.0)

    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        model.model.layers[0].__class__ = Scaled
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        for name in ("factor", "late"):
            setattr(Scaled, name, 0.5)
            assert_agree(cut, whole, prompt())


def test_package_loaded_by_path(groups, tmp_path: Path) -> None:
    """A package of two files that is not on the import path: its code imports the other file also inside a function."""
    (tmp_path / "scales.py").write_text("SCALE = 2.0\n\ndef scaled(states):\n    return states * SCALE\n")
    (tmp_path / "__init__.py").write_text("from .parts import MLP\n")
    (tmp_path / "parts.py").write_text(BY_PATH)
    place = importlib.util.spec_from_file_location(
        "package_by_path", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    assert place is not None
    assert place.loader is not None
    package = sys.modules["package_by_path"] = importlib.util.module_from_spec(place)
    place.loader.exec_module(package)
    scales = sys.modules["package_by_path.scales"]
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        for layer in model.model.layers:
            layer.mlp.__class__ = package.MLP
    scales.SCALE = 3.0  # type: ignore[attr-defined]
    try:
        with parallelize(cut, workers=groups(2)):
            assert_agree(cut, whole, prompt())
            scales.SCALE = 0.5  # type: ignore[attr-defined]
            assert_agree(cut, whole, prompt())
    finally:
        for name in [name for name in sys.modules if name.startswith("package_by_path")]:
            del sys.modules[name]
