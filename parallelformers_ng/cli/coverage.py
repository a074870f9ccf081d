"""Lists the source of every model type's policy, and checks the policy of one model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from parallelformers_ng.autopolicy.proof import check, prove, prove_custom
from parallelformers_ng.autopolicy.quantized_trial import check_quantized
from parallelformers_ng.errors import PolicyError
from parallelformers_ng.options import read_quantize
from parallelformers_ng.runtime.placement import check_count
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.policy_registry import check_custom, is_covered, known_policies, written_policies
from parallelformers_ng.sharding.rules import Policy
from parallelformers_ng.sharding.wording import human_bytes, pattern_of


def policy_sources() -> dict[str, str]:
    """Return where the policy of each model type of transformers comes from: model type → text.

    The function reads class names from the modeling files, and imports no modeling code. A written policy may cover
    only a part of a composite model. "of its parts" means that the model only contains other models. An inferred policy
    is proven on first use.
    """
    blocks = {block for policy in written_policies() for block in policy.blocks()}
    sources = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        package = model_type_to_module_name(model_type)
        folder = Path(transformers.models.__path__[0], package)
        modelling = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
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
    """The result of checking a model's policy on its twin, a tiny random copy of the model.

    Attributes:
        model_class, world_size: class name of the model; number of ranks.
        equal: whether the outputs of the sharded twin and the whole twin match.
        source: source of the policies: "custom", "written" or "inferred", joined by "+".
        cut_share: sharded bytes divided by the bytes of all tensors that could be sharded, from 0 to 1.
        rules: rule → number of the model's tensors that the rule shards.
        whole: name of a replicated tensor that could be sharded → its size in bytes, largest first.
        tried: failed attempts to find a policy, with reasons.
        unproven: parts of the model that the twin does not run with its inputs, and why; "" if all parts run.
        scheme: quantization scheme of the compared weights; "" for none.
        quantized: number of the model's tensors that are quantized.
        misfits: name of a weight that cannot be quantized → reason.
    """

    model_class: str
    world_size: int
    equal: bool
    source: str
    cut_share: float
    rules: dict[str, int]
    whole: dict[str, int]
    tried: list[str]
    unproven: str
    scheme: str
    quantized: int
    misfits: dict[str, str]

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        lines = [
            f"{self.model_class} on {self.world_size} ranks: {verdict}; policy: {self.source};"
            f" {self.cut_share:.1%} of the cuttable bytes are cut",
            *(f"  cut    {count:>4} × {rule}" for rule, count in self.rules.items()),
            *(f"  whole  {human_bytes(size):>9}  {name}" for name, size in list(self.whole.items())[:20]),
            *(f"  tried  {attempt}" for attempt in self.tried),
        ]
        if self.scheme:
            lines.append(f"  {self.scheme}   {self.quantized:>4} tensors")
        misfits = (f"  not {self.scheme}: {pattern_of(name)}, because {why}" for name, why in self.misfits.items())
        lines += dict.fromkeys(misfits)
        if self.unproven:
            lines.append(f"  not reached by the twin's inputs: {self.unproven}")
        return "\n".join(lines)


def verify_model(
    model: PreTrainedModel,
    num_gpus: int = 2,
    custom_policies: type[Policy] | Sequence[type[Policy]] | None = None,
    quantize: Any = None,
) -> Verification:
    """Check the policy of a model: a sharded and a whole tiny random copy of the model must have equal outputs.

    With `quantize`, a second comparison uses a sharded copy with quantized weights, and a whole copy whose weights are
    rounded to the same values. In both, two inputs share a scale, because the copies' layers are narrow.
    """
    check_count(num_gpus)
    bits = read_quantize(quantize)
    base, misfits = known_policies(model, custom_policies, num_gpus)
    tried, unproven, selection, failure = list(misfits), "", base, ""
    try:
        if custom := check_custom(custom_policies):
            prove_custom(model, custom, num_gpus)
    except PolicyError as error:
        failure = str(error)
    if not failure and base.policies and not misfits and is_covered(model, base.policies):
        failure = check(model, base, num_gpus)
    elif not failure:
        proof = prove(model, base, num_gpus)
        tried, unproven, selection = [*tried, *proof.tried], proof.unproven, proof.selection
    if not failure and bits is not None:
        failure = check_quantized(model, selection, num_gpus, bits)
    if failure:
        tried.append(failure)
    plan = build_plan(model, num_gpus, selection, quantize=bits)
    rules = dict(Counter(tensor.rule for tensor in plan.stored() if not tensor.is_replicated))
    large = {name: size for name, size in plan.replicated.items() if name in plan.cuttable}
    return Verification(
        *(type(model).__name__, num_gpus, not failure, selection.source, plan.cut_share, rules, large, tried, unproven),
        scheme="" if bits is None else str(bits.scheme),
        quantized=0 if bits is None else len(plan.quantized),
        misfits={} if bits is None else dict(plan.misfits),
    )
