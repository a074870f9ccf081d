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
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.sharding.policy_registry import written_policies
from tests.devices.one_card.place import Place, sharing_a_card
from tests.zoo.build import largest_difference
from tests.zoo.case import Case
from tests.zoo.families import ALL

RANKS, TOKENS = 2, 4
EQUAL = "equal"
MAX_DIFFERENCE = 1e-2
"""Largest difference of an output, as a share of its largest number. cuDNN may round inputs of convolutions to 10 bits;
a wrong shard differs by more than a tenth."""
MIN_GAP = 1e-3
"""Smallest distance between the two best logits at which a token must be the plain model's."""


def cases(names: set[str]) -> dict[str, Case]:
    """Return policy → tiny model for the policies with these names. A model counts for all its policies."""
    chosen: dict[str, Case] = {}
    for case in ALL:
        if names <= chosen.keys():
            break
        for policy in select(case.make(), world_size=RANKS).policies:
            if policy.__name__ in names:
                chosen.setdefault(policy.__name__, case)
    return chosen


def problem(case: Case, place: Place) -> str:
    """Return the difference between the sharded model and the plain model, in words; "" if they are equal."""
    model, inputs = case.make(), case.inputs()
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        want = model(**inputs)[0]
    wanted = _tokens(model, prompt) if case.generates and not case.at_odds else None
    with parallelize(model, workers=place.group(RANKS), progress=False):
        difference = largest_difference(model(**inputs)[0], want)
        if not difference <= MAX_DIFFERENCE:
            return f"the output differs by {difference:.2g}"
        if wanted is not None:
            sequences, count = wanted
            got = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
            if not torch.equal(got[:, :count], sequences[:, :count]):
                return "other tokens"
    return ""


def _tokens(model: Any, prompt: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the plain model's tokens, prompt included, and the number of them before its first close decision."""
    how = {"max_new_tokens": TOKENS, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    output = model.generate(**prompt, **how)
    best, second = torch.stack(output.scores).float().topk(2).values.unbind(-1)
    close = ((best - second) <= MIN_GAP).any(-1).tolist()
    sure = close.index(True) if True in close else len(close)
    return output.sequences, output.sequences.shape[1] - len(close) + sure


def run(options: argparse.Namespace) -> list[str]:
    """Run the policies that are due until the time is up, and return the complaints."""
    begun, clock = time.monotonic(), gpu.Clock(options.seconds)
    options.shape = "tiny models"  # the heading of the page
    every = {policy.__name__ for policy in written_policies()}
    known = _known(options.json)
    done = {name for name in every if known.get(name) == EQUAL}
    due = set(options.policies) or every - done or every
    chosen = cases(due)
    wrong = [f"{name}: no model of the zoo has this policy" for name in sorted(due - chosen.keys())]
    print(f"{len(due)} policies, found in {time.monotonic() - begun:.0f} s", flush=True)
    results: dict[str, str] = {}  # name of a model → result
    left = []
    with sharing_a_card():
        place = Place()
        for name in sorted(chosen):
            case = chosen[name]
            if case.name not in results:
                if not clock.has_time_for(name):
                    left.append(name)
                    continue
                since = time.monotonic()
                results[case.name] = _result(name, case, place)
                clock.note(time.monotonic() - since)
            gpu.save(options, name, results[case.name])
            if results[case.name] != EQUAL:
                wrong.append(f"{name}: {case.name}: {results[case.name]}")
        place.close()
    print(f"{len(chosen) - len(left)} policies run, {len(left)} left for the next run", flush=True)
    return wrong


def _result(name: str, case: Case, place: Place) -> str:
    try:
        return problem(case, place) or EQUAL
    except Exception as error:  # the other policies run all the same
        return gpu.complaint(name, error)


def _known(file: str | None) -> dict[str, Any]:
    if file is None or not Path(file).exists():
        return {}
    known: dict[str, Any] = json.loads(Path(file).read_text()).get("tiny models", {})
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="names of policies; default: those that are due")
    parser.add_argument("--seconds", type=float, default=260.0)
    parser.add_argument("--json")
    gpu.end_with(run, parser.parse_args())


if __name__ == "__main__":
    main()
