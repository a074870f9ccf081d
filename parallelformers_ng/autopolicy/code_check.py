"""Checks whether a plan is still correct after the program has changed the model's code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.trials import Trials
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.reach import reach
from parallelformers_ng.live_code.stock import foreign_class, names_of_class, words_of_program
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.stored import StoredInParts
from parallelformers_ng.sharding.units import and_above, sees_part

# Attribute in which transformers' configurations keep the name of the attention function.
ATTENTION_SETTING = "_attn_implementation_internal"


class CodeCheck:
    """Decides whether a plan still fits a model whose code has changed since the plan was made."""

    def __init__(self, model: PreTrainedModel, plan: ShardPlan, selection: Selection | None) -> None:
        self._model_class = type(model)
        self._config = model.config
        self.edits = LiveEdits(model)  # methods and modules that the user's program replaced after the model was built
        self._plan = plan
        self._selection = selection
        classes = {path: type(module) for path, module in model.named_modules()}
        above = {path for root in plan.units for path in and_above(root)}
        self._inside = {cls for path, cls in classes.items() if sees_part(plan, path)}
        self._outside = {cls for path, cls in classes.items() if path in above} - self._inside
        self._layers = {layer.path.rpartition(".")[2] for layer in plan.layers} | {"weight"}
        cut = (model.get_submodule(layer.path) for layer in plan.layers if layer.cls is not StoredInParts)
        self._cut = {type(module) for module in cut if module._parameters}

    def objection(self, moved: Collection[str]) -> str:
        if self._plan.world_size == 1:
            return ""

        def changed(classes: Iterable[type]) -> list[type]:
            return [cls for cls in classes if foreign_class(cls) and not reach([cls]).keys().isdisjoint(moved)]

        if cut := changed(self._cut):  # a twin's small numbers may miss an error in code that computes on shards
            return f"{cut[0].__name__} is sharded"
        readers = {cls for cls in self._outside if self._layers & names_of_class(cls)}
        return self._not_proven() if changed(self._inside | readers) else ""

    def objection_to_settings(self, attributes: Mapping[tuple[str, str], Any], configs: Mapping[str, Any]) -> str:
        """Return the reason why the plan does not fit settings that sharded foreign code reads; "" if the plan fits."""
        for (path, name), value in attributes.items():
            self.edits.set(path, name, value)
        foreign = [cls for cls in self._inside if foreign_class(cls)]
        if self._plan.world_size == 1 or not (foreign or self.edits.functions):
            return ""
        slots = reach(foreign, self.edits.functions).values()
        read = words_of_program((*(slot.value for slot in slots), *self.edits.functions))
        names = {name for _, name in attributes} | {name.rpartition(".")[2] for name in configs}
        return self._not_proven() if names & (read | {ATTENTION_SETTING}) else ""

    def _not_proven(self) -> str:
        if self._selection is None:
            return "the model is divided into stages"
        try:
            twin = make_twin(self._model_class, self._config, edits=self.edits)
        except UnsupportedModelError as error:
            return str(error)
        return Trials(twin, self._selection, self._plan.world_size).objection()
