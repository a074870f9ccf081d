"""The source of every model type's policy, and the proof for one model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from parallelformers_ng.autopolicy.proof import check, prove, prove_custom
from parallelformers_ng.autopolicy.quantized_trial import check_quantized
from parallelformers_ng.errors import PolicyError
from parallelformers_ng.options import read_quantize
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.policy_registry import check_custom, is_covered, known_policies, written_policies
from parallelformers_ng.sharding.rules import Policy
from parallelformers_ng.sharding.wording import human_bytes, pattern_of


def policy_sources() -> dict[str, str]:
    """Map each model type of transformers to the source of its policy: "written", "of its parts", "inferred" or "no
    modelling code of its own". A model without layers of its own has the policies of its parts.

    Reads the modelling files' class names and imports no modelling code. A written policy may cover a part of a
    composite model; an inferred policy counts only once its proof, made on first use, has held.
    """
    blocks = {block for policy in written_policies() for block in policy.blocks()}
    sources = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        package = model_type_to_module_name(model_type)
        spec = importlib.util.find_spec(f"transformers.models.{package}")
        folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
        modelling = "".join(path.read_text() for folder in folders for path in folder.glob("modeling_*.py"))
        classes = re.findall(r"^class (\w+)", modelling, re.MULTILINE)
        if blocks & {name for cls in classes for name in (cls, f"{package}.{cls}")}:
            sources[model_type] = "written"
        elif "AutoModel" in modelling and not re.search(r"\bnn\.(Linear|Embedding|Parameter|Conv\dd)\b", modelling):
            sources[model_type] = "of its parts"
        elif modelling:
            sources[model_type] = "inferred"
        else:
            sources[model_type] = "no modelling code of its own"
    return sources


@dataclass
class Verification:
    """The result of the proof on a tiny random copy of a model, the twin.

    Attributes:
        model_class, world_size: class of the model, number of ranks.
        equal: whether the sharded twin gave the outputs of the whole one.
        source: source of the policies.
        cut_share: share of the model's cuttable bytes that are cut, 0 to 1.
        rules: how many of the model's tensors each rule cuts.
        whole: tensors that every rank holds whole, in bytes, largest first.
        tried: attempts that failed.
        unproven: parts that the twin's inputs did not reach, and reasons.
        scheme: scheme of the compared weights, "" for none.
        quantized: how many of the model's tensors are held so.
        misfits: weights that could not be quantized, and reasons.
    """

    model_class: str
    world_size: int
    equal: bool
    source: str
    cut_share: float
    rules: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    unproven: str = ""
    scheme: str = ""
    quantized: int = 0
    misfits: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        lines = [
            f"{self.model_class} on {self.world_size} ranks: {verdict}; policy: {self.source};"
            f" {self.cut_share:.1%} of the cuttable bytes are cut",
            *(f"  cut    {count:>4} × {rule}" for rule, count in self.rules.items()),
            *(f"  whole  {human_bytes(size):>9}  {name}" for name, size in list(self.whole.items())[:20]),
            *(f"  tried  {what}" for what in self.tried),
        ]
        if self.scheme:
            lines.append(f"  {self.scheme}   {self.quantized:>4} tensors")
        lines += dict.fromkeys(
            f"  not {self.scheme}: {pattern_of(name)}, for {why}" for name, why in self.misfits.items()
        )
        if self.unproven:
            lines.append(f"  not reached by the twin's inputs: {self.unproven}")
        return "\n".join(lines)


def verify_model(
    model: PreTrainedModel,
    num_gpus: int = 2,
    custom_policies: type[Policy] | Sequence[type[Policy]] | None = None,
    quantize: Any = None,
) -> Verification:
    """Check the policy of a model on a tiny random copy: sharded over `num_gpus` ranks and whole, outputs must match.

    Args:
        model: the model; on the `meta` device it will do.
        num_gpus: number of ranks.
        custom_policies: policies that come before the written ones, as in `parallelize`.
        quantize: same as in `parallelize`. The copy is compared once more, with weights rounded whole and
            quantized in shards. If inputs share a scale in groups, the copy's groups have two inputs, as its layers are
            narrow.

    Raises:
        ParallelError: `quantize` cannot be read.
        UnsupportedModelError: the model is refused, or no twin of it runs.
        PolicyError: a custom policy does not fit it.
    """
    bits = read_quantize(quantize)
    base, misfits = known_policies(model, custom_policies, num_gpus)
    tried, unproven, selection = list(misfits), "", base
    plan = build_plan(model, num_gpus, base)
    try:
        if custom := check_custom(custom_policies):
            prove_custom(model, custom, num_gpus)
        equal = True
    except PolicyError as error:
        tried.append(str(error))
        equal = False
    if equal and base.policies and not misfits and is_covered(model, base.policies):
        outcome = check(model, base, num_gpus)
        equal, tried = outcome == "", [*tried, outcome] if outcome else tried
    elif equal:
        proof = prove(model, base, num_gpus)
        tried, unproven, selection = [*tried, *proof.tried], proof.unproven, proof.selection
        plan = build_plan(model, num_gpus, selection)
    if bits is not None:
        plan = build_plan(model, num_gpus, selection, quantize=bits)
        outcome = check_quantized(model, selection, num_gpus, bits) if equal else ""
        equal, tried = equal and outcome == "", [*tried, outcome] if outcome else tried
    rules: dict[str, int] = {}
    for tensor in plan.stored():
        if not tensor.is_replicated:
            rules[tensor.rule] = rules.get(tensor.rule, 0) + 1
    large = {name: size for name, size in plan.replicated.items() if name in plan.cuttable}
    name, share = type(model).__name__, plan.cut_share
    verification = Verification(name, num_gpus, equal, selection.source, share, rules, large, tried, unproven)
    if bits is not None:
        verification.scheme, verification.quantized, verification.misfits = (
            str(bits.scheme),
            len(plan.quantized),
            dict(plan.misfits),
        )
    return verification
