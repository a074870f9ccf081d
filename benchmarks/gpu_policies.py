"""Runs each written policy once on two ranks that share a CUDA device over NCCL, on a tiny model.

    python -m benchmarks.gpu_policies [POLICY …] [--seconds 260] [--json OUT]

The forward pass and four greedy tokens must equal those of the plain model on the CPU. The results are in OUT, and on
the page beside OUT. Policies that were equal in earlier runs are left out, until all are; then the next run begins
anew. The program counts the policies that the time does not allow, and fails if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks import gpu
from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.twin import difference
from parallelformers_ng.autopolicy.twin import run as run_module
from tests.devices.one_card.place import Place, sharing_a_card
from tests.zoo.case import Case
from tests.zoo.families import ALL
from tests.zoo.judge import twin_of
from tests.zoo.of_policies import CASES, TWINS

RANKS, TOKENS = 2, 4
TWIN = "twin of "
EQUAL, HEADING = "equal", "Policies on tiny models"
MAX_DIFFERENCE = 1e-2
"""Largest difference of an output, as a share of its largest number. cuDNN may round inputs of convolutions to 10 bits;
a wrong shard differs by more than a tenth."""
MIN_GAP = 1e-3
"""Smallest distance between the two best logits at which a token must be the plain model's."""


@dataclass
class Tiny:
    """A tiny model, and the results of the plain model.

    Attributes:
        probes: (path of a module, inputs, tensors of its output).
        prompt: arguments of `generate`; None if the model does not generate.
        tokens: the plain model's tokens, prompt included, and the number of them before its first close decision.
    """

    model: Any
    probes: list[tuple[str, dict[str, Any], list[torch.Tensor]]]
    prompt: dict[str, Any] | None = None
    tokens: tuple[torch.Tensor, int] | None = None


def tiny(name: str) -> Tiny:
    """Return a model of the zoo, or of a model type that the zoo has not."""
    if name.startswith(TWIN):
        twin = twin_of(name.removeprefix(TWIN), varied=False)
        probes = [
            (each.path, each.inputs, each.expected) for each in twin.probes if each.path not in twin.single_layers
        ]
        return Tiny(twin.model, probes)
    case = {case.name: case for case in ALL}[name]
    model, inputs = case.make(), case.inputs()
    with torch.no_grad():
        want = run_module(model, inputs)[:1]
    if not case.generates or case.at_odds:
        return Tiny(model, [("", inputs, want)])
    prompt = _prompt(case)
    return Tiny(model, [("", inputs, want)], prompt, _tokens(model, _prompt(case)))


def problem(name: str, place: Place) -> str:
    """Return the difference between the sharded model and the plain model, in words; "" if they are equal."""
    each = tiny(name)
    with parallelize(each.model, workers=place.group(RANKS), progress=False) as model:
        for path, inputs, wanted in each.probes:
            for got, want in zip(run_module(model.get_submodule(path), inputs), wanted, strict=False):
                if not (off := difference(got, want)) <= MAX_DIFFERENCE:
                    return f"{path or 'the output'} differs by {off:.2g}"
        if each.tokens is not None:
            sequences, count = each.tokens
            got = model.generate(**each.prompt, max_new_tokens=TOKENS, do_sample=False)
            if not torch.equal(got[:, :count], sequences[:, :count]):
                return "other tokens"
    return ""


def _prompt(case: Case) -> dict[str, Any]:
    """Return new tensors at each call: `generate` of BLIP writes to its prompt."""
    return {name: value for name, value in case.inputs().items() if name != "decoder_input_ids"}


def _tokens(model: Any, prompt: dict[str, Any]) -> tuple[torch.Tensor, int]:
    scored = {"max_new_tokens": TOKENS, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    output = model.generate(**prompt, **scored)
    best, second = torch.stack(output.scores).float().topk(2).values.unbind(-1)
    close = ((best - second) <= MIN_GAP).any(-1).tolist()
    sure = close.index(True) if True in close else len(close)
    return output.sequences, output.sequences.shape[1] - len(close) + sure


def models() -> dict[str, list[str]]:
    """Return name of a tiny model → names of its policies, without model types that this transformers lacks."""
    twins = {TWIN + name: policies for name, policies in TWINS.items() if name in CONFIG_MAPPING_NAMES}
    return {name: policies.split() for name, policies in (CASES | twins).items()}


def run(options: argparse.Namespace) -> list[str]:
    """Run the policies that are due until the time is up, and return the complaints."""
    clock, options.shape = gpu.Clock(options.seconds), HEADING
    every = {policy: name for name, policies in models().items() for policy in policies}
    if unknown := set(options.policies) - every.keys():
        return [f"unknown policies: {', '.join(sorted(unknown))}; there are {', '.join(sorted(every))}"]
    known = _known(options.json)
    left = sorted(set(options.policies) or {each for each in every if known.get(each) != EQUAL} or every)
    print(f"due: {len(left)} of {len(every)} policies", flush=True)
    wrong: list[str] = []
    with sharing_a_card():
        place = Place()
        while left and clock.has_time_for(left[0]):
            name, begun = every[left[0]], time.monotonic()
            try:
                result = problem(name, place) or EQUAL
            except Exception as error:  # the other policies run all the same
                result = gpu.complaint(name, error)
            clock.note(time.monotonic() - begun)
            for policy in [each for each in left if every[each] == name]:
                left.remove(policy)
                gpu.save(options, policy, result)
                wrong += [f"{policy}: {name}: {result}"] if result != EQUAL else []
        place.close()
    print(f"left for the next run: {', '.join(left) or 'none'}", flush=True)
    return wrong


def _known(file: str | None) -> dict[str, Any]:
    if file is None or not Path(file).exists():
        return {}
    known: dict[str, Any] = json.loads(Path(file).read_text()).get(HEADING, {})
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "policies", nargs="*", metavar="POLICY", help="such as Llama; default: the policies that are due"
    )
    parser.add_argument("--seconds", type=float, default=260.0)
    parser.add_argument("--json")
    gpu.end_with(run, parser.parse_args())


if __name__ == "__main__":
    main()
